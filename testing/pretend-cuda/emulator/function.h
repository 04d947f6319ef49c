// Kernels that take several parameters, as others than the crate write them.
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

#include "kernel.h"

namespace emulator {

template <auto function> struct Function;

template <class... Parameters, void (*function)(Parameters...)> struct Function<function> {
    // Zero ends them.
    static constexpr size_t sizes[] = {sizeof(Parameters)..., 0};

    static void run(const void *params) {
        call(static_cast<const unsigned char *>(params), std::index_sequence_for<Parameters...>());
    }

private:
    template <size_t... i> static void call(const unsigned char *params, std::index_sequence<i...>) {
        function(*reinterpret_cast<const std::remove_cv_t<Parameters> *>(params + i * PARAM_SLOT)...);
    }
    static_assert(((sizeof(Parameters) <= PARAM_SLOT) && ...));
};

}  // namespace emulator

// Registers the function `name` of `space`, a kernel for blocks of any size.
#define EMULATED_FUNCTION(space, name)                                                                        \
    static const emulator::Kernel name##_kernel(#name, emulator::Function<&space::name>::run,                 \
                                                emulator::Function<&space::name>::sizes);
