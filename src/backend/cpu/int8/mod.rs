//! Integer codes times fixed-point activations.
//!
//! Affine codes are integers, and E2M1 codes become integers. An activation is a fixed-point number of three signed limbs
//! of eight bits, so that sums of products are exact; they are scaled group by group. Only the fixed point rounds, about
//! as much as f32 does, once [`outliers`] are out of the way. Fewer limbs will do where less is asked for.
//!
//! * [`gemv_vnni`] and [`gemv_avx2`] multiply one row of x, with vectors; outliers meet [columns](outliers), or with AVX-512
//!   [windows](outlier_windows) of rows.
//! * `gemv_neon` does on ARM CPUs with dot products of bytes, for one row and a few.
//! * [`few_amx`] multiplies a few rows with tiles of weights.
//! * [`gemm`] multiplies more rows with panels of unpacked weights: [`gemm_vnni`], [`gemm_avx2`] and `gemm_neon` with vectors,
//!   [`gemm_amx`] with tiles.

mod codes;
pub(super) mod gemm;
#[cfg(target_arch = "aarch64")]
pub(super) mod gemv_neon;
mod magnitudes;
mod outliers;
mod panel_columns;
mod tables;
mod units;
mod weight_panels;
mod x_tiles;

#[cfg(target_arch = "x86_64")]
pub(super) mod few_amx;
#[cfg(target_arch = "x86_64")]
mod fixed_point;
#[cfg(target_arch = "x86_64")]
mod gemm_amx;
#[cfg(target_arch = "x86_64")]
mod gemm_avx2;
#[cfg(target_arch = "aarch64")]
mod gemm_neon;
#[cfg(target_arch = "x86_64")]
mod gemm_vnni;
#[cfg(target_arch = "x86_64")]
pub(super) mod gemv_avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod gemv_vnni;
#[cfg(target_arch = "x86_64")]
mod outlier_windows;
#[cfg(target_arch = "x86_64")]
mod panels_avx2;
#[cfg(target_arch = "x86_64")]
mod panels_avx512;
#[cfg(target_arch = "aarch64")]
mod panels_neon;
#[cfg(target_arch = "x86_64")]
mod unpack;
