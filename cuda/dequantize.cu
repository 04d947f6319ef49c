// dequantize_<format>: rows of a weight as f16, bf16 or f32 (CqDequantize).
//
// The f32 bits are those of the scalar reference, times a factor; f16 and bf16 are that number rounded once. A row that
// the weight does not have is not read: zeros for an id whose row another rank has, NaN for one that nobody has.
//
// Grid (count, ceil(k / 2048)), 256 threads of eight elements each, no dynamic shared memory.
// y is 16-byte aligned, packed 4-byte aligned.
#include "formats/all.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS;

__device__ __forceinline__ uint64_t load_id(const void *ids, uint32_t i, uint32_t bytes) {
    if (bytes == 1) return static_cast<const uint8_t *>(ids)[i];
    if (bytes == 4) return static_cast<const uint32_t *>(ids)[i];
    return static_cast<const uint64_t *>(ids)[i];  // a negative id is far out of range
}

__device__ __forceinline__ uint32_t rounded_pair(float first, float second, uint32_t dtype) {
    if (dtype == CQ_F16) return as_bits(__floats2half2_rn(first, second));
    const uint32_t low = __bfloat16_as_ushort(__float2bfloat16_rn(first));
    const uint32_t high = __bfloat16_as_ushort(__float2bfloat16_rn(second));
    return high << 16 | low;
}

__device__ __forceinline__ void store_octet(void *y, size_t octet, uint32_t dtype, const float (&a)[4],
                                            const float (&b)[4]) {
    if (dtype == CQ_F32) {
        float4 *out = static_cast<float4 *>(y) + 2 * octet;
        out[0] = make_float4(a[0], a[1], a[2], a[3]);
        out[1] = make_float4(b[0], b[1], b[2], b[3]);
    } else {
        static_cast<uint4 *>(y)[octet] = make_uint4(rounded_pair(a[0], a[1], dtype), rounded_pair(a[2], a[3], dtype),
                                                    rounded_pair(b[0], b[1], dtype), rounded_pair(b[2], b[3], dtype));
    }
}

template <class F> __device__ __forceinline__ void dequantize(const CqDequantize &p) {
    const uint32_t octets = p.k / 8, octet = blockIdx.y * THREADS + threadIdx.x;
    const uint32_t group_size = group_size_of<F>(p.group_size), groups = p.k / group_size, group_of_row = octet * 8 / group_size;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (octet >= octets) return;
    const uint64_t id = p.ids ? load_id(p.ids, blockIdx.x, p.ids_bytes) : 0;
    const uint64_t row = p.ids ? id - p.first_row : p.first_row + blockIdx.x;
    const float none = id < p.vocabulary ? 0.f : __uint_as_float(0x7fc00000u);
    float a[4] = {none, none, none, none}, b[4] = {none, none, none, none};
    if (row < p.matrix.rows) {
        const Octet codes = load_octet<F::BITS>(p.matrix.packed + row * words_of_row<F::BITS>(p.k), octet);
        const GroupScale group = F::load_group(p.matrix, row * groups + group_of_row, p.matrix.global_scale);
        dequantize_four<F>(codes, 0, group, a);
        dequantize_four<F>(codes, 4, group, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] *= p.factor, b[i] *= p.factor;
    }
    store_octet(p.y, size_t(blockIdx.x) * octets + octet, p.y_dtype, a, b);
}

}  // namespace

#define DEQUANTIZE_KERNEL(name, Format) \
    CQ_KERNEL(dequantize_##name, CqDequantize, THREADS, 4) { dequantize<Format>(p); }
CQ_FORMATS(DEQUANTIZE_KERNEL)
