// Two numbers of 16 bits in a word.
#pragma once
#include "device.cuh"

namespace cq {

template <bool BF16> __device__ __forceinline__ uint32_t to_pair(float x, float y) {
    uint32_t pair;
    if constexpr (BF16) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
        memcpy(&pair, &both, 4);
    } else {
        pair = as_bits(__floats2half2_rn(x, y));
    }
    return pair;
}

template <bool BF16> __device__ __forceinline__ float2 of_pair(uint32_t pair) {
    if constexpr (BF16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    return make_float2(half_bits_to_float(pair & 0xffffu), half_bits_to_float(pair >> 16));
}

}  // namespace cq
