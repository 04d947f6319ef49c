// All families, and the lists of their kernels.
//
// Each formats/<family>.cuh has up to four lists. `name` is the format in the names of kernels; the same names are in
// src/backend/cuda/formats.rs, and a test compares what is listed here with what Rust can launch.
//   CQ_FORMATS_<FAMILY>   X(name, format): dequantize and simt, which need `elements`, `load_group` and `weight`
//                         (a table of elements: `__constant__ constexpr`, outside of functions, lest it lies on the stack)
//   CQ_QUANTIZE_<FAMILY>  X(name, format): quantize, which needs `quantize_group`
//   CQ_GEMV_<FAMILY>      X(name, format, group size): the tensor-core GEMV, which needs `to_halves`
//   CQ_TILES_<FAMILY>     X(name, format, group): the tensor-core GEMM, which needs `octet_to_halves`; of the group's weights
//                         the products are added up before a scale is applied: 16, 32, or 64 if groups are larger
#pragma once
#include "affine.cuh"
#include "fp8.cuh"
#include "ggml.cuh"
#include "mx.cuh"
#include "nf4.cuh"
#include "nvfp4.cuh"

#define CQ_FORMATS(X) \
    CQ_FORMATS_AFFINE(X) CQ_FORMATS_FP8(X) CQ_FORMATS_GGML(X) CQ_FORMATS_MX(X) CQ_FORMATS_NF4(X) CQ_FORMATS_NVFP4(X)
#define CQ_QUANTIZE(X) CQ_QUANTIZE_AFFINE(X) CQ_QUANTIZE_MX(X) CQ_QUANTIZE_NF4(X) CQ_QUANTIZE_NVFP4(X)
