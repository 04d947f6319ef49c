#include "illegal_address.h"

#include <signal.h>

#include <cstdio>
#include <mutex>

#include "sanitizer.h"
#include "scheduler.h"

namespace emulator {

static struct sigaction others[2];  // for SIGSEGV and SIGBUS
static int number(int signal) { return signal == SIGBUS; }

static void diagnose(int signal, siginfo_t *information, void *context) {
    if (current) {
        // The handler runs on the stack of the CUDA thread, and blocks no signals: it need not return.
        char reason[64];
        snprintf(reason, sizeof reason, "illegal address %p", information->si_addr);
        fail(reason, {"a load or store", 0});
    }
    const struct sigaction &other = others[number(signal)];
    if (other.sa_flags & SA_SIGINFO)
        other.sa_sigaction(signal, information, context);
    else
        sigaction(signal, &other, nullptr);  // what went wrong happens again
}

void diagnose_illegal_addresses() {
    if (sanitizer::ADDRESS) return;
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction ours = {};
        ours.sa_sigaction = diagnose;
        ours.sa_flags = SA_SIGINFO | SA_NODEFER;
        for (int signal : {SIGSEGV, SIGBUS}) sigaction(signal, &ours, &others[number(signal)]);
    });
}

}  // namespace emulator
