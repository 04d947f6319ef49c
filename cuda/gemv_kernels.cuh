// The tensor-core kernels of a format.
#pragma once
#include "gemv_experts.cuh"

#define CQ_GEMV(name, Format, group, rows) \
    CQ_KERNEL(name, CqGemv, 256, 2) { cq::gemv<cq::Format, cq::GemvShape<cq::Format, group, rows>>(p); }
#define CQ_GEMV_EXPERTS(name, Format, group) \
    CQ_KERNEL(name, CqExperts, 256, 2) { cq::gemv_of_experts<cq::Format, cq::GemvShape<cq::Format, group, 1>>(p); }
// For every number of rows of x, and for the experts of one. Groups of less than 64 weights take 16 rows as twice 8:
// the columns could not keep their sums apart in the registers there are.
#define CQ_GEMV_TO_8(prefix, Format, group) \
    CQ_GEMV(prefix##_m1, Format, group, 1)  \
    CQ_GEMV(prefix##_m2, Format, group, 2)  \
    CQ_GEMV(prefix##_m4, Format, group, 4)  \
    CQ_GEMV(prefix##_m8, Format, group, 8)  \
    CQ_GEMV_EXPERTS(prefix##_experts, Format, group)
#define CQ_GEMV_TO_16(prefix, Format, group) \
    CQ_GEMV_TO_8(prefix, Format, group)      \
    CQ_GEMV(prefix##_m16, Format, group, 16)
