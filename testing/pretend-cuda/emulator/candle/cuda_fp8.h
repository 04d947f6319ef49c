// Enough for candle's kernels to compile. Those that compute in FP8 fail: no model of the crate reaches them.
#pragma once
#include "cuda_fp16.h"

enum __nv_fp8_interpretation_t { __NV_E4M3 };
struct __nv_fp8_e4m3 {
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float) { emulator::fail("FP8 is not emulated"); }
};
inline __half __nv_cvt_fp8_to_halfraw(uint8_t, __nv_fp8_interpretation_t) { emulator::fail("FP8 is not emulated"); }
