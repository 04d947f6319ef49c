// NF4 and FP4 of bitsandbytes: 4-bit codes select from a table, a float scale for each 64.
#pragma once
#include "quantize.cuh"

namespace cq {

// In constant memory, for want of registers: lanes with different codes wait for each other.
__constant__ constexpr float NF4_VALUES[16] = {
    -1.0f,         -0.6961928f,   -0.52507305f, -0.3949175f,  -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f,    0.1609302f,    0.2461123f,   0.33791524f,  0.44070983f,  0.562617f,    0.72295684f,   1.0f,
};

// Twelfths, as bitsandbytes rounds them.
__constant__ constexpr float FP4_VALUES[16] = {
    0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  6.0f / 12,  2.0f / 12,  3.0f / 12,
    0.0f,  -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12,
};

// Values of a table, times 2^12, as sums of two halves each: 22 bits of them.
//
// The bits of the halves nearest to all values, or to what these leave, are in four words for the low bytes and four for the
// high ones.
struct HalvesOfTable {
    static constexpr int EXPONENT = 12;
    uint32_t bytes[2][2][4] = {};  // [half][low or high][four values]

    __host__ __device__ constexpr explicit HalvesOfTable(const float (&values)[16]) {
        for (int i = 0; i < 16; ++i) {
            double left = double(values[i]) * (1 << EXPONENT);
            for (int half = 0; half < 2; ++half) {
                const uint32_t bits = take_half(left);
                for (int byte = 0; byte < 2; ++byte) bytes[half][byte][i / 4] |= (bits >> (8 * byte) & 0xff) << (i % 4 * 8);
            }
        }
    }

  private:
    // The bits of the half nearest to a number, which it is taken from.
    static __host__ __device__ constexpr uint32_t take_half(double &number) {
        const bool negative = number < 0;
        const double magnitude = negative ? -number : number;
        int exponent = -14;  // of the smallest normal half
        double unit = 1. / (1 << 24);
        while (magnitude >= 2047.5 * unit) unit *= 2, ++exponent;
        const uint32_t steps = uint32_t(magnitude / unit + 0.5);
        number = negative ? number + steps * unit : number - steps * unit;
        return (negative ? 0x8000u : 0u) | (steps < 1024 ? steps : uint32_t(exponent + 15) << 10 | (steps - 1024));
    }
};

struct Nf4 : PlainFloatScales {
    static constexpr int BITS = 4;
    static constexpr uint32_t GROUP = 64;

    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = NF4_VALUES[codes.low >> (4 * (first + i)) & 15];
    }

    static constexpr float OUT_SCALE = 1.f / (1 << HalvesOfTable::EXPONENT);
    static constexpr bool SPLIT = false;
    // Two halves for each weight.
    static __device__ __forceinline__ void octet_to_halves(Octet codes, uint32_t (&pairs)[2][4]) {
        constexpr HalvesOfTable HALVES(NF4_VALUES);
        select_halves(HALVES.bytes, codes.low, pairs);
    }

    static __device__ __forceinline__ uint32_t nearest(float value) {
        uint32_t code = 0;
#pragma unroll
        for (int i = 0; i < 15; ++i) code += value > (NF4_VALUES[i] + NF4_VALUES[i + 1]) / 2;
        return code;
    }
    static __device__ __forceinline__ void quantize_group(const CqQuantize &p, LaneOfGroup &own, uint64_t group, bool stores) {
        const float largest = absmax_of_group(own, 32);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) own.code[i] = nearest(largest > 0 ? __fdiv_rn(own.weight[i], largest) : 0.0f);
        if (stores) store_float(p.scales, group, p.dtype, largest);
    }

  protected:
    static __device__ __forceinline__ void select_halves(const uint32_t (&bytes)[2][2][4], uint32_t codes, uint32_t (&pairs)[2][4]) {
        const SelectBytes selected(codes);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const uint32_t low = selected.four(2 * i, bytes[half][0]), high = selected.four(2 * i, bytes[half][1]);
                pairs[half][i] = __byte_perm(low, high, 0x5140), pairs[half][i + 1] = __byte_perm(low, high, 0x7362);
            }
    }
};

struct Fp4 : Nf4 {
    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = FP4_VALUES[codes.low >> (4 * (first + i)) & 15];
    }
    static __device__ __forceinline__ void octet_to_halves(Octet codes, uint32_t (&pairs)[2][4]) {
        constexpr HalvesOfTable HALVES(FP4_VALUES);
        select_halves(HALVES.bytes, codes.low, pairs);
    }
    // Codes by ascending value, without the second zero, four bits each.
    static __device__ __forceinline__ uint32_t ascending(int rank) {
        return static_cast<uint32_t>(0x3254'7610'9efc'dabULL >> (4 * rank)) & 15;
    }
    static __device__ __forceinline__ uint32_t nearest(float value) {
        int rank = 0;
#pragma unroll
        for (int i = 0; i < 14; ++i) rank += value > (FP4_VALUES[ascending(i)] + FP4_VALUES[ascending(i + 1)]) / 2;
        return ascending(rank);
    }
    static __device__ __forceinline__ void quantize_group(const CqQuantize &p, LaneOfGroup &own, uint64_t group, bool stores) {
        const float largest = absmax_of_group(own, 32);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) own.code[i] = nearest(largest > 0 ? __fdiv_rn(own.weight[i], largest) : 0.0f);
        if (stores) store_float(p.scales, group, p.dtype, largest);
    }
};

template <> constexpr int HALVES_OF_WEIGHT<Nf4> = 2;
template <> constexpr int HALVES_OF_WEIGHT<Fp4> = 2;

}  // namespace cq

// The kernels of the family; formats/all.cuh says what the lists are.
#define CQ_FORMATS_NF4(X) X(nf4, cq::Nf4) X(fp4, cq::Fp4)
#define CQ_QUANTIZE_NF4(X) CQ_FORMATS_NF4(X)
// Two halves of each weight take the registers of groups of 32.
#define CQ_TILES_NF4(X) X(nf4, cq::Nf4, 32) X(fp4, cq::Fp4, 32)
