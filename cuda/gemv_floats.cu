#include "gemv_kernels.cuh"

CQ_GEMV_TO_16(gemv_mxfp4, Fp4<cq::ScaleKind::E8m0>, 32)
CQ_GEMV_TO_16(gemv_nvfp4, Fp4<cq::ScaleKind::E4m3>, 16)
CQ_GEMV_TO_16(gemv_mxfp8, Fp8, 32)
