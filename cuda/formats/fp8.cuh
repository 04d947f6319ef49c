// FP8 with float scales: E4M3 elements, a scale for each 32, 64 or 128. Only read.
#pragma once
#include "quantize.cuh"

namespace cq {

struct Fp8 : E4m3, PlainFloatScales {
    static constexpr uint32_t GROUP = 0;  // a launch parameter
};

}  // namespace cq

// The kernels of the family; formats/all.cuh says what the lists are.
#define CQ_FORMATS_FP8(X) X(fp8, cq::Fp8)
#define CQ_TILES_FP8(X) X(fp8_g32, cq::Fp8, 32) X(fp8_g64, cq::Fp8, 64)
