#include "formats/ggml.cuh"
#include "gemv_kernels.cuh"

CQ_GEMV_GGML(CQ_GEMV_KERNELS)
