// CUDA C++ on the CPU: include this instead of the CUDA headers and compile a `.cu` with
// `g++ -std=c++17 -x c++ -DCANDLE_QUANT_EMULATED -ffp-contract=off`.
//
// Every CUDA thread is a fiber; the blocks of a launch run one after another on the calling thread of
// the operating system. Link `shared_begin.cpp` before all kernels and `shared_end.cpp` after them.
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef __global__
#define __global__
#endif
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// Compiles, but no module is loaded with it: all shared memory has to be dynamic.
#define __shared__ static thread_local

#include "async_copy.h"
#include "bfloat16.h"
#include "half.h"
#include "intrinsics.h"
#include "kernel.h"
#include "mma.h"
#include "scheduler.h"
#include "vector_types.h"
#include "warp.h"

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block->index)
#define blockDim (emulator::current->block->dim)
#define gridDim (emulator::current->block->grid)
#define warpSize 32
