#include "gemv_kernels.cuh"

CQ_GEMV_TO_8(gemv_a1_g32, Affine<1>, 32)
CQ_GEMV_TO_16(gemv_a1_g64, Affine<1>, 64)
CQ_GEMV_TO_16(gemv_a1_g128, Affine<1>, 128)
