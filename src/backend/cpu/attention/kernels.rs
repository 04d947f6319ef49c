//! The kernels of each instruction set: the generic ones, instantiated for all numbers and sizes of tiles inside functions
//! that enable its features. They are calls, not parts of one large function, which no compiler takes in good time.

#[cfg(target_arch = "aarch64")]
use super::super::isa::neon::Neon;
use super::super::isa::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::super::isa::{avx2::Avx2, avx512::Avx512};
use super::super::isa::{InstructionSet, Simd};
use super::flash::{run, PartTask};
use super::operand::{Bf16, Codes4, Codes8, Numbers, F16, F32};
use super::product::{multiply, Product};
use super::widen::{widen, Kind};
use crate::tensor::{KvFormat, KvLayout, KvPlane};
use std::ops::Range;

/// What one part of an attention needs of an instruction set.
///
/// # Safety
/// As [`Simd`].
pub(super) trait Kernels: Simd {
    /// [`multiply`] for at most [`Simd::TILE`]`.0` rows.
    unsafe fn multiply(product: &Product, rows: Range<usize>, depth: Range<usize>, columns: Range<usize>);
    /// [`widen`] for the format of the layout.
    unsafe fn widen(plane: &KvPlane, layout: &KvLayout, kind: Kind, dim: usize, out: &mut [f32]);
    /// [`run`].
    unsafe fn run(task: PartTask<'_>);
}

/// Computes a part with an instruction set. VNNI and AMX have no f32 arithmetic beside that of AVX-512.
pub(super) fn run_with(isa: &InstructionSet, task: PartTask<'_>) {
    // SAFETY: the values of instruction sets prove that the CPU has their features.
    unsafe {
        match isa {
            InstructionSet::Portable(_) => Portable::run(task),
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon(_) | InstructionSet::NeonDotprod(_) | InstructionSet::NeonI8mm(_) => {
                Neon::run(task)
            }
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2(_) => Avx2::run(task),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512(_) | InstructionSet::Avx512Vnni(_) | InstructionSet::Avx512Amx(_) => {
                Avx512::run(task)
            }
        }
    }
}

/// `$function::<Numbers>` for the numbers of a format.
macro_rules! with_numbers {
    ($format:expr, $function:ident($($argument:expr),*)) => {
        match $format {
            KvFormat::F32 => $function::<F32>($($argument),*),
            KvFormat::F16 => $function::<F16>($($argument),*),
            KvFormat::Bf16 => $function::<Bf16>($($argument),*),
            KvFormat::Affine8 => $function::<Codes8>($($argument),*),
            KvFormat::Affine4 => $function::<Codes4>($($argument),*),
        }
    };
}

/// Implements [`Kernels`] for an instruction set with these numbers of rows in a tile.
macro_rules! implement {
    ($isa:ty, [$($rows:literal),+], $($features:literal)?) => {
        impl Kernels for $isa {
            unsafe fn multiply(
                product: &Product,
                rows: Range<usize>,
                depth: Range<usize>,
                columns: Range<usize>,
            ) {
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<N: Numbers, const ROWS: usize>(
                    product: &Product,
                    first_row: usize,
                    depth: Range<usize>,
                    columns: Range<usize>,
                ) {
                    // SAFETY: `entry` enables the features; the caller vouches for the rest.
                    unsafe { multiply::<$isa, N, ROWS>(product, first_row, depth, columns) }
                }
                unsafe fn for_rows<N: Numbers>(
                    product: &Product,
                    rows: Range<usize>,
                    depth: Range<usize>,
                    columns: Range<usize>,
                ) {
                    // SAFETY: the caller vouches for features, rows, depth and columns.
                    unsafe {
                        match rows.len() {
                            $($rows => entry::<N, $rows>(product, rows.start, depth, columns),)+
                            other => debug_assert_eq!(other, 0, "rows of a tile"),
                        }
                    }
                }
                // SAFETY: the caller vouches for features, rows, depth and columns.
                unsafe { with_numbers!(product.b.format, for_rows(product, rows, depth, columns)) }
            }
            unsafe fn widen(plane: &KvPlane, layout: &KvLayout, kind: Kind, dim: usize, out: &mut [f32]) {
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<N: Numbers>(
                    plane: &KvPlane,
                    layout: &KvLayout,
                    kind: Kind,
                    dim: usize,
                    out: &mut [f32],
                ) {
                    // SAFETY: `entry` enables the features.
                    unsafe { widen::<$isa, N>(plane, layout, kind, dim, out) }
                }
                // SAFETY: the caller vouches for the features.
                unsafe { with_numbers!(layout.format, entry(plane, layout, kind, dim, out)) }
            }
            unsafe fn run(task: PartTask<'_>) {
                $(#[target_feature(enable = $features)])?
                unsafe fn entry(task: PartTask<'_>) {
                    // SAFETY: `entry` enables the features.
                    unsafe { run::<$isa>(task) }
                }
                // SAFETY: the caller vouches for the features.
                unsafe { entry(task) }
            }
        }
    };
}

implement!(Portable, [1, 2],);
#[cfg(target_arch = "aarch64")]
implement!(Neon, [1, 2, 3, 4, 5, 6], "neon");
#[cfg(target_arch = "x86_64")]
implement!(Avx2, [1, 2, 3, 4, 5, 6], "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
implement!(Avx512, [1, 2, 3, 4, 5, 6], "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c");
