#include "formats/affine.cuh"
#include "gemv_kernels.cuh"

CQ_GEMV_AFFINE(CQ_GEMV_KERNELS, 5)
