#include "formats/ggml.cuh"
#include "gemv_kernels.cuh"

CQ_GEMV_GGML_16(CQ_GEMV_KERNELS_TO_4)
