#include "context.h"

#include <cstdint>
#include <cstring>

extern "C" void emulator_switch_context(void **from, void *to);

#if defined(__x86_64__)
// Callee-saved registers only: to the compiler a switch is a call. The jump, unlike a `ret`, is
// predicted well, since nearly all contexts go on at the same place.
__asm__(R"(
.text
.globl emulator_switch_context
.hidden emulator_switch_context
.type emulator_switch_context,@function
emulator_switch_context:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.size emulator_switch_context, .-emulator_switch_context
)");
static const size_t SAVED = 8 * 8;  // six registers, the address to go on at, a null return address
static const size_t RESUME_AT = 6;
#elif defined(__aarch64__)
__asm__(R"(
.text
.globl emulator_switch_context
.hidden emulator_switch_context
.type emulator_switch_context,@function
emulator_switch_context:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emulator_switch_context, .-emulator_switch_context
)");
static const size_t SAVED = 160;
static const size_t RESUME_AT = 11;
#else
#error "the emulator switches contexts on x86-64 and aarch64 only"
#endif

namespace emulator {

void switch_context(StackPointer *from, StackPointer to) { emulator_switch_context(from, to); }

StackPointer make_context(char *top, void (*entry)()) {
    const uintptr_t aligned = reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15);
    void **saved = reinterpret_cast<void **>(aligned - SAVED);
    memset(saved, 0, SAVED);
    saved[RESUME_AT] = reinterpret_cast<void *>(entry);
    return saved;
}

}  // namespace emulator
