#include "formats/mx.cuh"
#include "gemv_kernels.cuh"

CQ_GEMV_MX(CQ_GEMV_KERNELS)
