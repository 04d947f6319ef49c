#include "gemv_kernels.cuh"

CQ_GEMV_TO_8(gemv_a3_g32, Affine<3>, 32)
CQ_GEMV_TO_16(gemv_a3_g64, Affine<3>, 64)
CQ_GEMV_TO_16(gemv_a3_g128, Affine<3>, 128)
