#include "gemv_kernels.cuh"

CQ_GEMV_TO_8(gemv_a6_g32, Affine<6>, 32)
CQ_GEMV_TO_16(gemv_a6_g64, Affine<6>, 64)
CQ_GEMV_TO_16(gemv_a6_g128, Affine<6>, 128)
