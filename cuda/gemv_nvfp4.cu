#include "formats/nvfp4.cuh"
#include "gemv_kernels.cuh"

CQ_GEMV_NVFP4(CQ_GEMV_KERNELS)
