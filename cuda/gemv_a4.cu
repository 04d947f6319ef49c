#include "gemv_kernels.cuh"

CQ_GEMV_TO_8(gemv_a4_g32, Affine<4>, 32)
CQ_GEMV_TO_16(gemv_a4_g64, Affine<4>, 64)
CQ_GEMV_TO_16(gemv_a4_g128, Affine<4>, 128)
