#include "gemv_kernels.cuh"

CQ_GEMV_TO_8(gemv_a2_g32, Affine<2>, 32)
CQ_GEMV_TO_16(gemv_a2_g64, Affine<2>, 64)
CQ_GEMV_TO_16(gemv_a2_g128, Affine<2>, 128)
