//! Integer codes times fixed-point activations.
//!
//! Affine codes are integers, and E2M1 codes become integers. An activation is a fixed-point number of three signed limbs
//! of eight bits, so that sums of products are exact; they are scaled group by group. Only the fixed point rounds, about
//! as much as f32 does, once [`outliers`] are out of the way. With VNNI fewer limbs will do where less is asked for.
//!
//! * [`gemv_vnni`] multiplies one row of x, with vectors.
//! * [`gemm_vnni`] multiplies more rows, with vectors, and panels of unpacked weights.
//! * [`gemm_amx`] multiplies more rows, with tiles. It serves affine formats and MXFP4, and `bf16` serves NVFP4 and MXFP8;
//!   both stay, since no machine with AMX was at hand to compare them on one format.

mod affine_codes;
mod codes;
mod fixed_point;
pub(super) mod gemm_amx;
pub(super) mod gemm_vnni;
pub(super) mod gemv_vnni;
mod group_limbs;
mod mxfp4_rows;
mod outliers;
mod panels;
mod tile_rows;
mod unpack_vnni;
mod weight_panels;
mod x_tiles;
