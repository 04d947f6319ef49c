#include "formats/ggml.cuh"
#include "gemv_kernels.cuh"

CQ_GEMV_GGML_32(CQ_GEMV_KERNELS)
