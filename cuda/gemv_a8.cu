#include "gemv_kernels.cuh"

CQ_GEMV_TO_8(gemv_a8_g32, Affine<8>, 32)
CQ_GEMV_TO_16(gemv_a8_g64, Affine<8>, 64)
CQ_GEMV_TO_16(gemv_a8_g128, Affine<8>, 128)
