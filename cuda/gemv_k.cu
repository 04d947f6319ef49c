#include "formats/ggml.cuh"
#include "gemv_kernels.cuh"

CQ_GEMV_K_TO_2(CQ_GEMV_KERNELS_TO_2)
CQ_GEMV_K_TO_4(CQ_GEMV_KERNELS_TO_4)
CQ_GEMV_K(CQ_GEMV_KERNELS)
