#include "gemv_kernels.cuh"

CQ_GEMV_TO_8(gemv_a5_g32, Affine<5>, 32)
CQ_GEMV_TO_16(gemv_a5_g64, Affine<5>, 64)
CQ_GEMV_TO_16(gemv_a5_g128, Affine<5>, 128)
