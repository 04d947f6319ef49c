//! The f32 kernels of each instruction set: the generic ones, instantiated for every codec inside functions that enable
//! its features.

use super::super::codec::{with_codec, Codec, WithCodec};
use super::super::group_params::GroupParams;
#[cfg(target_arch = "x86_64")]
use super::super::isa::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::super::isa::avx512::Avx512;
#[cfg(target_arch = "aarch64")]
use super::super::isa::neon::Neon;
use super::super::isa::portable::Portable;
use super::super::isa::{InstructionSet, Simd};
use super::super::matrix::PackedMatrix;
use super::dequantize_rows::{dequantize_rows, DequantizeRows};
use super::dot::{dot_rows, DotRows};
use super::reference;
use std::ops::Range;

/// The kernels of one instruction set.
pub(in super::super) trait Kernels: Send + Sync {
    /// Elements of a block: K is padded to a multiple of it in interleaved rows.
    fn block(&self) -> usize;
    /// Vector lanes.
    fn lanes(&self) -> usize;
    /// Loads scales and biases of up to `ROWS_PER_PASS` rows, of some groups of each.
    fn load_params(
        &self,
        to: &mut GroupParams,
        matrix: &PackedMatrix,
        rows: (usize, usize),
        groups: Range<usize>,
    );
    /// The numbers of rows of x that [`Kernels::dot_rows`] takes, ascending, from 1 on.
    fn panel_sizes(&self) -> &'static [usize];
    /// Dot products of packed rows and a panel of interleaved rows of x.
    fn dot_rows(&self, task: DotRows<'_>);
    /// Packed rows to f32, interleaved or in natural order.
    fn dequantize_rows(&self, task: DequantizeRows<'_>);
}

/// The kernels of an instruction set. VNNI and AMX have no f32 arithmetic beside that of AVX-512.
pub(in super::super) fn kernels(isa: &InstructionSet) -> &dyn Kernels {
    match isa {
        InstructionSet::Portable(isa) => isa,
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon(isa) => isa,
        #[cfg(target_arch = "aarch64")]
        InstructionSet::NeonDotprod(isa) => &isa.neon,
        #[cfg(target_arch = "aarch64")]
        InstructionSet::NeonI8mm(isa) => &isa.dotprod.neon,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2(isa) => isa,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512(isa) => isa,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni(isa) => &isa.avx512,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Amx(isa) => &isa.vnni.avx512,
    }
}

/// Implements [`Kernels`] for a [`Simd`] type: one monomorphic function for each codec (and panel size), compiled with the
/// features of the instruction set.
macro_rules! implement {
    ($isa:ty, [$($m:literal),+], $($features:literal)?) => {
        impl Kernels for $isa {
            fn block(&self) -> usize {
                <$isa>::BLOCK
            }
            fn lanes(&self) -> usize {
                <$isa>::LANES
            }
            fn load_params(
                &self,
                to: &mut GroupParams,
                matrix: &PackedMatrix,
                rows: (usize, usize),
                groups: Range<usize>,
            ) {
                $(#[target_feature(enable = $features)])?
                unsafe fn entry(
                    to: &mut GroupParams,
                    matrix: &PackedMatrix,
                    rows: (usize, usize),
                    groups: Range<usize>,
                ) {
                    to.load_groups(matrix, rows, groups);
                }
                // SAFETY: `self` proves that the CPU has the features, see `isa`.
                unsafe { entry(to, matrix, rows, groups) }
            }
            fn panel_sizes(&self) -> &'static [usize] {
                &[$($m),+]
            }
            fn dot_rows(&self, task: DotRows<'_>) {
                struct Call<'a>($isa, DotRows<'a>);
                impl WithCodec for Call<'_> {
                    fn run<C: Codec>(self) {
                        $(#[target_feature(enable = $features)])?
                        unsafe fn entry<C: Codec, const M: usize>(task: DotRows<'_>) {
                            // SAFETY: `entry` enables the features of the instruction set.
                            unsafe { dot_rows::<$isa, C, M>(task) }
                        }
                        // SAFETY: the value of the instruction set in `self` proves that the CPU has the features.
                        unsafe {
                            match self.1.m {
                                $($m => entry::<C, $m>(self.1),)+
                                other => panic!("{other} is none of the panel sizes"),
                            }
                        }
                    }
                }
                if let Err(Call(isa, task)) = with_codec(task.matrix.format, Call(*self, task)) {
                    reference::dot_rows(task, isa.lanes());
                }
            }
            fn dequantize_rows(&self, task: DequantizeRows<'_>) {
                struct Call<'a>($isa, DequantizeRows<'a>);
                impl WithCodec for Call<'_> {
                    fn run<C: Codec>(self) {
                        $(#[target_feature(enable = $features)])?
                        unsafe fn entry<C: Codec>(task: DequantizeRows<'_>) {
                            // SAFETY: `entry` enables the features of the instruction set.
                            unsafe { dequantize_rows::<$isa, C>(task) }
                        }
                        // SAFETY: the value of the instruction set in `self` proves that the CPU has the features.
                        unsafe { entry::<C>(self.1) }
                    }
                }
                if let Err(Call(isa, task)) = with_codec(task.matrix.format, Call(*self, task)) {
                    reference::dequantize_rows(task, isa.lanes());
                }
            }
        }
    };
}

implement!(Portable, [1, 4],);
#[cfg(target_arch = "aarch64")]
implement!(Neon, [1, 2, 4, 8], "neon");
#[cfg(target_arch = "x86_64")]
implement!(Avx2, [1, 2, 4, 8], "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
implement!(Avx512, [1, 2, 4, 8], "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c");
