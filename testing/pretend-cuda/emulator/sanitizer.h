// What AddressSanitizer wants to know of stacks; nothing without it.
#pragma once
#include <cstddef>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator::sanitizer {

#ifdef __SANITIZE_ADDRESS__
// About to switch to `stack`; `fake` is null if the stack in use will not be used again.
inline void leaving(void **fake, const void *stack, size_t size) { __sanitizer_start_switch_fiber(fake, stack, size); }
// Switched to a stack left with `fake`.
inline void entered(void *fake) { __sanitizer_finish_switch_fiber(fake, nullptr, nullptr); }
// As before; the first time in a block, notes where it came from.
inline void entered(void *fake, const void *&from, size_t &from_size) {
    if (from) return entered(fake);
    __sanitizer_finish_switch_fiber(fake, &from, &from_size);
}
// The frames on `stack` will never end.
inline void forget_stack(void *stack, size_t size) { __asan_unpoison_memory_region(stack, size); }
constexpr bool ADDRESS = true;
#else
inline void leaving(void **, const void *, size_t) {}
inline void entered(void *) {}
inline void entered(void *, const void *&, size_t &) {}
inline void forget_stack(void *, size_t) {}
constexpr bool ADDRESS = false;
#endif

}  // namespace emulator::sanitizer
