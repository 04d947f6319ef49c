// quantize_<format>: weights to codes, scales and biases (CqQuantize).
//
// The results have the bits of the scalar reference (src/format); how, each family says. Weights are finite.
//
// Grid (ceil(groups * group_size / PER_BLOCK)), PER_BLOCK = 8 * max(group_size, 32); 256 threads; shared memory for the
// codes of a block.
#include "formats/all.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS;
constexpr int WARPS = THREADS / 32;

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

template <class F> __device__ __forceinline__ void quantize(const CqQuantize &p) {
    CQ_DYNAMIC_SHARED(codes);
    wait_for_earlier_kernels();
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t group_size = group_size_of<F>(p.group_size);
    const uint32_t per_warp = max(group_size, 32u);
    const uint64_t first = (uint64_t(blockIdx.x) * WARPS + warp) * per_warp;
    const uint64_t elements = p.groups * group_size;
    if (first >= elements) return;  // whole warps
    LaneOfGroup own;
    own.count = per_warp / 32;
    const uint64_t index = first + lane * own.count;
    const bool inside = index < elements;  // the second of two groups of a warp may not exist
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i)
        own.weight[i] = inside && i < own.count ? load_float(p.weights, index + i, p.dtype) : 0.0f;
    F::quantize_group(p, own, index / group_size, inside && index % group_size == 0);
    uint8_t *of_warp = codes + warp * LARGEST_GROUP;
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i)
        if (i < own.count) of_warp[lane * own.count + i] = static_cast<uint8_t>(own.code[i]);
    __syncwarp();
    const uint64_t first_word = first / 32 * F::BITS;
    if (lane < per_warp / 32 * F::BITS && first_word + lane < elements * F::BITS / 32)
        p.packed[first_word + lane] = packed_word<F::BITS>(of_warp, lane);
}

static_assert(CQ_QUANTIZE_SHARED_BYTES == WARPS * LARGEST_GROUP, "codes of a group for each warp");

}  // namespace

#define QUANTIZE_KERNEL(name, Format) \
    CQ_KERNEL(quantize_##name, CqQuantize, THREADS, 2) { quantize<Format>(p); }
CQ_QUANTIZE(QUANTIZE_KERNEL)
