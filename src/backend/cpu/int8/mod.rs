//! Integer codes times fixed-point activations.
//!
//! Affine codes are integers, and E2M1 codes become integers. An activation is a fixed-point number of three signed limbs
//! of eight bits, so that sums of products are exact; they are scaled group by group. Only the fixed point rounds, about
//! as much as f32 does, once [`outliers`] are out of the way. Fewer limbs will do where less is asked for.
//!
//! * [`gemv_vnni`] and [`gemv_avx2`] multiply one row of x, with vectors; outliers meet [columns](outliers), or with AVX-512
//!   [windows](outlier_windows) of rows.
//! * [`gemm`] multiplies more rows with panels of unpacked weights: [`gemm_vnni`] and [`gemm_avx2`] with vectors, [`gemm_amx`] with
//!   tiles.

mod codes;
mod fixed_point;
pub(super) mod gemm;
mod gemm_amx;
mod gemm_avx2;
mod gemm_vnni;
pub(super) mod gemv_avx2;
pub(super) mod gemv_vnni;
mod outlier_windows;
mod outliers;
mod panel_columns;
mod panels_avx2;
mod panels_avx512;
mod unpack;
mod weight_panels;
mod x_tiles;
