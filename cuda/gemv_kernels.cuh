// The tensor-core kernels of a format: CQ_GEMV_KERNELS(name, format, group size), for the lists of formats/.
#pragma once
#include "gemv_experts.cuh"

#define CQ_GEMV(name, Format, group, rows) \
    CQ_KERNEL(gemv_##name##_m##rows, CqGemv, CQ_THREADS, 2) { cq::gemv<Format, cq::GemvShape<Format, group, rows>>(p); }
#define CQ_GEMV_EXPERTS(name, Format, group) \
    CQ_KERNEL(gemv_##name##_experts, CqExperts, CQ_THREADS, 2) { cq::gemv_of_experts<Format, cq::GemvShape<Format, group, 1>>(p); }
// For each number of rows of x, and for the experts of one. Groups of less than 64 weights take 16 rows as twice 8:
// the columns could not keep their sums apart in the registers there are.
#define CQ_GEMV_16_16(name, Format)
#define CQ_GEMV_16_32(name, Format)
#define CQ_GEMV_16_64(name, Format) CQ_GEMV(name, Format, 64, 16)
#define CQ_GEMV_16_128(name, Format) CQ_GEMV(name, Format, 128, 16)
#define CQ_GEMV_KERNELS(name, Format, group)      \
    CQ_GEMV_KERNELS_TO_4(name, Format, group)     \
    CQ_GEMV(name, Format, group, 8)               \
    CQ_GEMV_16_##group(name, Format)
// Some formats leave no registers for more rows. Of groups of 16 weights, every weight would be multiplied four times or
// more, once for each group that a multiplication meets, unless scales are folded into weights.
#define CQ_GEMV_KERNELS_TO_4(name, Format, group) \
    CQ_GEMV_KERNELS_TO_2(name, Format, group)     \
    CQ_GEMV(name, Format, group, 4)
#define CQ_GEMV_KERNELS_TO_2(name, Format, group) \
    CQ_GEMV(name, Format, group, 1)               \
    CQ_GEMV(name, Format, group, 2)               \
    CQ_GEMV_EXPERTS(name, Format, group)
