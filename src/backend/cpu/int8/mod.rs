//! Integer codes times fixed-point activations.
//!
//! Affine codes are integers, and E2M1 codes become integers. An activation is a fixed-point number of three signed limbs
//! of eight bits, so that sums of products are exact; they are scaled group by group. Only the fixed point rounds, about
//! as much as f32 does.
//!
//! * [`gemv_vnni`] multiplies one row of x, with vectors.
//! * [`gemm_amx`] multiplies more rows, with tiles. It serves affine formats and MXFP4, and `bf16` serves NVFP4 and MXFP8;
//!   both stay, since no machine with AMX was at hand to compare them on one format.

mod affine_codes;
mod codes;
mod fixed_point;
pub(super) mod gemm_amx;
pub(super) mod gemv_vnni;
mod group_limbs;
mod mxfp4_rows;
mod panels;
mod tile_rows;
mod unpack_vnni;
