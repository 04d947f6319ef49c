// encode_{a1,a2,a3,a4,a5,a6,a8,mxfp4,nvfp4,mxfp8}: weights to codes, scales and biases (CqEncode).
//
// Every operation and every rounding to the dtype of the weights is the one of the scalar reference
// (src/format/encode.rs): the results have the same bits. Weights are finite.
//
// Grid (ceil(groups * group_size / PER_BLOCK)), PER_BLOCK = 8 * max(group_size, 32); 256 threads, no
// dynamic shared memory. A warp encodes one group (nvfp4: two), each lane consecutive elements of it.
#include "formats/scalar.cuh"

namespace {

using namespace cq;
using namespace cq::scalar;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int LARGEST_GROUP = 128;
constexpr int MAX_PER_LANE = LARGEST_GROUP / 32;

constexpr float E2M1_MAX = 6;
constexpr float E4M3_MAX = 448;
constexpr float NVFP4_MAX = E2M1_MAX * E4M3_MAX;
constexpr float SMALLEST_AFFINE_SCALE = 1e-7f;

// `value` rounded to `dtype`.
__device__ __forceinline__ float rounded(float value, uint32_t dtype) {
    if (dtype == CQ_F16) return __half2float(__float2half_rn(value));
    if (dtype == CQ_BF16) return __bfloat162float(__float2bfloat16_rn(value));
    return value;
}

// Smallest e with 2^e >= value, at least -127; 0 for a value of zero.
__device__ __forceinline__ int ceil_log2(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (bits == 0) return 0;
    const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffffu;
    // A subnormal above 2^-127 rounds up to 2^-126, every other to the lower limit.
    if (exponent == 0) return mantissa > 0x400000u ? -126 : -127;
    return static_cast<int>(exponent) - 127 + (mantissa != 0);
}

// Nearest E4M3 code, ties to even; saturates.
__device__ __forceinline__ uint32_t float_to_e4m3(float value) {
    const uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80u;
    const float magnitude = fabsf(value);
    uint32_t code = 0x7e;
    if (magnitude < 0x1p-6f)  // subnormals count steps of 2^-9
        code = static_cast<uint32_t>(rintf(__fmul_rn(magnitude, 512.0f)));
    else if (magnitude < 464.0f)
        code = (((bits & 0x7fffffffu) + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return sign | min(code, 0x7eu);
}

__device__ __forceinline__ float e4m3_to_float(uint32_t code) {
    return half_bits_to_float(e4m3x2_to_half2(code));
}

// The first code whose distance from `value`, rounded to `dtype`, is smallest. Distances that are not
// numbers lose, which leaves code 0.
__device__ __forceinline__ uint32_t nearest_e2m1(float value, uint32_t dtype) {
    uint32_t nearest = 0;
    float smallest = fabsf(rounded(value, dtype));
#pragma unroll
    for (uint32_t code = 1; code < 16; ++code) {
        const float element = e2m1_element({code, 0}, 0);
        const float distance = fabsf(rounded(__fsub_rn(value, element), dtype));
        nearest = distance < smallest ? code : nearest;
        smallest = distance < smallest ? distance : smallest;
    }
    return nearest;
}

// Of all lanes' values (of a group's `lanes` lanes), the largest.
__device__ __forceinline__ float largest_of(float value, int lanes) {
    for (int distance = lanes / 2; distance; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
}

// The first smallest of all lanes' values, in the order of lanes: which of two zeros is first shows in
// the sign of a 1-bit bias.
__device__ __forceinline__ float first_smallest_of(float value) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const float other = __shfl_xor_sync(FULL_WARP, value, distance);
        const bool other_is_first = threadIdx.x & distance;
        value = other < value || (other_is_first && other == value) ? other : value;
    }
    return value;
}

// Elements of a group in one lane, and their codes.
struct Lane {
    float weight[MAX_PER_LANE];
    uint32_t code[MAX_PER_LANE];
    int count;
};

__device__ __forceinline__ float absmax_of_group(const Lane &own, int lanes) {
    float largest = 0;
    for (int i = 0; i < MAX_PER_LANE; ++i)
        if (i < own.count) largest = fmaxf(largest, fabsf(own.weight[i]));
    return largest_of(largest, lanes);
}

// Scale and bias of a group, not yet rounded to the dtype of the weights.
template <int BITS> __device__ __forceinline__ GroupParameters affine_parameters(const Lane &own) {
    float low = __uint_as_float(0x7f800000u), high = -low;
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i) {
        if (i >= own.count) continue;
        low = own.weight[i] < low ? own.weight[i] : low;
        high = own.weight[i] > high ? own.weight[i] : high;
    }
    low = first_smallest_of(low);
    high = -first_smallest_of(-high);
    const float range = __fsub_rn(high, low);
    if (BITS == 1) return {fmaxf(range, SMALLEST_AFFINE_SCALE), low};
    const float step = fmaxf(__fdiv_rn(range, (1 << BITS) - 1), SMALLEST_AFFINE_SCALE);
    const bool low_is_larger = fabsf(low) > fabsf(high);
    const float scale = low_is_larger ? step : -step, edge = low_is_larger ? low : high;
    const float steps_to_edge = rintf(__fdiv_rn(edge, scale));
    if (steps_to_edge == 0) return {scale, 0};
    // Zero is then a multiple of the scale away from the edge, hence exact.
    return {__fdiv_rn(edge, steps_to_edge), edge};
}

// Fills the codes of a group and stores its scale (and bias) at index `group`.
template <class F>
__device__ __forceinline__ void encode_group(const CqEncode &p, Lane &own, uint64_t group, bool stores) {
    constexpr bool E2M1 = F::BITS == 4;
    if constexpr (F::SCALES == ScaleKind::Float) {
        constexpr float LARGEST_CODE = (1 << F::BITS) - 1;
        const GroupParameters parameters = affine_parameters<F::BITS>(own);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) {
            const float steps = rintf(__fdiv_rn(__fsub_rn(own.weight[i], parameters.bias), parameters.scale));
            own.code[i] = static_cast<uint32_t>(fminf(fmaxf(steps, 0.0f), LARGEST_CODE));
        }
        if (stores) {
            store_float(p.scales, group, p.dtype, parameters.scale);
            store_float(p.biases, group, p.dtype, parameters.bias);
        }
    } else if constexpr (F::SCALES == ScaleKind::E8m0) {
        const float largest = __fdiv_rn(absmax_of_group(own, 32), E2M1 ? E2M1_MAX : E4M3_MAX);
        const uint32_t scale = static_cast<uint32_t>(ceil_log2(rounded(largest, p.dtype)) + 127);
        const float divisor = rounded(e8m0_to_float(scale), p.dtype);
        const float value = rounded(__fdiv_rn(own.weight[0], divisor), p.dtype);
        own.code[0] = E2M1 ? nearest_e2m1(value, p.dtype) : float_to_e4m3(value);
        if (stores) static_cast<uint8_t *>(p.scales)[group] = static_cast<uint8_t>(scale);
    } else {
        const float scale_of_scales = p.absmax == 0 ? 1.0f : __fdiv_rn(NVFP4_MAX, p.absmax);
        const float largest = rounded(__fdiv_rn(absmax_of_group(own, 16), E2M1_MAX), p.dtype);
        const uint32_t scale = float_to_e4m3(__fmul_rn(largest, scale_of_scales));
        const float value = rounded(__fdiv_rn(own.weight[0], e4m3_to_float(scale)), p.dtype);
        own.code[0] = nearest_e2m1(__fmul_rn(value, scale_of_scales), CQ_F32);
        if (stores) static_cast<uint8_t *>(p.scales)[group] = static_cast<uint8_t>(scale);
    }
}

// Word `index` of the bit stream of `codes`.
template <int BITS> __device__ __forceinline__ uint32_t packed_word(const uint8_t *codes, int index) {
    const int first_bit = index * 32;
    uint32_t word = 0;
    for (int i = first_bit / BITS; i * BITS < first_bit + 32; ++i) {
        const int shift = i * BITS - first_bit;
        word |= shift < 0 ? uint32_t(codes[i]) >> -shift : uint32_t(codes[i]) << shift;
    }
    return word;
}

template <class F> __device__ __forceinline__ void encode(const CqEncode &p, uint8_t *codes) {
    wait_for_earlier_kernels();
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t group_size = group_size_of<F>(p.group_size);
    const uint32_t per_warp = max(group_size, 32u);
    const uint64_t first = (uint64_t(blockIdx.x) * WARPS + warp) * per_warp;
    const uint64_t elements = p.groups * group_size;
    if (first >= elements) return;  // whole warps
    Lane own;
    own.count = per_warp / 32;
    const uint64_t index = first + lane * own.count;
    const bool inside = index < elements;  // the second of two groups of a warp may not exist
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i)
        own.weight[i] = inside && i < own.count ? load_float(p.weights, index + i, p.dtype) : 0.0f;
    encode_group<F>(p, own, index / group_size, inside && index % group_size == 0);
    codes += warp * LARGEST_GROUP;
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i)
        if (i < own.count) codes[lane * own.count + i] = static_cast<uint8_t>(own.code[i]);
    __syncwarp();
    const uint64_t first_word = first / 32 * F::BITS;
    if (lane < per_warp / 32 * F::BITS && first_word + lane < elements * F::BITS / 32)
        p.packed[first_word + lane] = packed_word<F::BITS>(codes, lane);
}

// The codes of a block's groups, for all kernels.
__device__ __forceinline__ uint8_t *shared_codes() {
    __shared__ uint8_t codes[WARPS * LARGEST_GROUP];
    return codes;
}

}  // namespace

#define ENCODE_KERNEL(suffix, Format) \
    CQ_KERNEL(encode_##suffix, CqEncode, THREADS, 2) { encode<Format>(p, shared_codes()); }
CQ_FOR_EVERY_FORMAT(ENCODE_KERNEL)
