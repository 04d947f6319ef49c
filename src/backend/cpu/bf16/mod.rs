//! bf16 weights times activations that are split into three bf16 (bf16x3).
//!
//! NVFP4, MXFP4 and MXFP8 weights are bf16 numbers, scales and all, so that nothing but the f32 accumulation rounds. [`gemm_amx`]
//! multiplies on AMX. `int8` serves other formats.

pub(super) mod gemm_amx;
mod split_activations;
mod weights;
