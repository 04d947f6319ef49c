//! Arithmetic in f32: every format on every instruction set.
//!
//! * [`gemv`] multiplies packed weights as they are with a few rows of x; its kernel is `dot`.
//! * [`gemm`] dequantizes tiles of weights for many rows of x; its kernels are `dequantize_rows` and the `gemm` crate's.
//! * [`gemm_backward`] does the same for the gradient of x.
//! * [`dequantize`] writes rows of weights in their natural order.
//! * [`fp8_gemv`] is what `dot` computes for E4M3 elements and one row of x, in fewer AVX-512 instructions.

mod block;
pub(super) mod dequantize;
mod dequantize_rows;
mod dot;
#[cfg(target_arch = "x86_64")]
pub(super) mod fp8_gemv;
pub(super) mod gemm;
pub(super) mod gemm_backward;
mod gemm_crate;
pub(super) mod gemv;
mod kernels;
mod lane_order;
mod reference;

pub(super) use gemm_crate::multiply_add;
pub(super) use kernels::kernels;
