// E2M1 and E4M3 elements as halves, exact.
#pragma once
#include "scales.cuh"

namespace cq {

// MXFP4 and NVFP4: the bits of an E2M1 number, moved to the sign and the low exponent bits of a half,
// read as that number times 2^-14.
template <ScaleKind KIND> struct Fp4 {
    static constexpr int BITS = 4;
    static constexpr int UNIT = 8;
    static constexpr ScaleKind SCALES = KIND;
    static constexpr bool HAS_BIASES = false;
    static constexpr float OUT_SCALE = 16384.f;
    // Scales that are folded into weights: what 2^0 becomes, relative to the largest scale of a round
    // for E8M0. Products stay exact down to 2^-24 of the largest.
    static constexpr int FOLDED_EXPONENT = KIND == ScaleKind::E8m0 ? 15 : 7;

    static constexpr __host__ __device__ int weight_of(int h) { return h / 2 + (h % 2) * 4; }
    static constexpr __host__ __device__ float offset(int) { return 0.f; }

    template <int U> static __device__ __forceinline__ void decode(const uint32_t *words, uint32_t *pairs) {
        const uint32_t codes = words[U];
        pairs[0] = and_or(codes << 12, SIGNS, (codes << 9) & MAGNITUDES);
        pairs[1] = and_or(codes << 8, SIGNS, (codes << 5) & MAGNITUDES);
        pairs[2] = and_or(codes << 4, SIGNS, (codes << 1) & MAGNITUDES);
        pairs[3] = and_or(codes, SIGNS, (codes >> 3) & MAGNITUDES);
    }

  private:
    static constexpr uint32_t SIGNS = 0x80008000u, MAGNITUDES = 0x0e000e00u;
};

// MXFP8: E4M3 by the hardware's conversion.
struct Fp8 {
    static constexpr int BITS = 8;
    static constexpr int UNIT = 4;
    static constexpr ScaleKind SCALES = ScaleKind::E8m0;
    static constexpr bool HAS_BIASES = false;
    static constexpr float OUT_SCALE = 1.f;
    static constexpr int FOLDED_EXPONENT = 7;

    static constexpr __host__ __device__ int weight_of(int h) { return h; }
    static constexpr __host__ __device__ float offset(int) { return 0.f; }

    template <int U> static __device__ __forceinline__ void decode(const uint32_t *words, uint32_t *pairs) {
        e4m3x4_to_half2x2(words[U], pairs[0], pairs[1]);
    }
};

}  // namespace cq
