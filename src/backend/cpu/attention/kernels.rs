//! [`run`] and its products for each instruction set, compiled with its features.

#[cfg(target_arch = "x86_64")]
use super::super::isa::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::super::isa::avx512::Avx512;
#[cfg(target_arch = "aarch64")]
use super::super::isa::neon::Neon;
use super::super::isa::portable::Portable;
use super::super::isa::InstructionSet;
use super::flash::{run, PartTask};
use super::operand::Numbers;
use super::product::{strips, Multiplies, Product};
use std::ops::Range;

/// Implements [`Multiplies`]: a function for each kind of numbers, compiled with the features of the instruction set.
macro_rules! implement {
    ($isa:ty, $($features:literal)?) => {
        impl Multiplies for $isa {
            #[inline(always)]
            unsafe fn strips<N: Numbers>(
                product: &Product,
                rows: Range<usize>,
                depth: Range<usize>,
                columns: Range<usize>,
            ) {
                #[inline(never)]
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<N: Numbers>(
                    product: &Product,
                    rows: Range<usize>,
                    depth: Range<usize>,
                    columns: Range<usize>,
                ) {
                    // SAFETY: `entry` enables the features; its caller vouches for the rest.
                    unsafe { strips::<$isa, N>(product, rows, depth, columns) }
                }
                // SAFETY: the caller vouches for features, rows, depth and columns.
                unsafe { entry::<N>(product, rows, depth, columns) }
            }
        }
    };
}

implement!(Portable,);
#[cfg(target_arch = "aarch64")]
implement!(Neon, "neon");
#[cfg(target_arch = "x86_64")]
implement!(Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
implement!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c");

/// Computes a part with an instruction set. VNNI and AMX have no f32 arithmetic beside that of AVX-512.
pub(super) fn run_with(isa: &InstructionSet, task: PartTask<'_>) {
    macro_rules! entry {
        ($isa:ty, $features:literal) => {{
            #[target_feature(enable = $features)]
            unsafe fn entry(task: PartTask<'_>) {
                // SAFETY: `entry` enables the features.
                unsafe { run::<$isa>(task) }
            }
            // SAFETY: the value of the instruction set proves that the CPU has the features.
            unsafe { entry(task) }
        }};
    }
    match isa {
        // SAFETY: no features are needed.
        InstructionSet::Portable(_) => unsafe { run::<Portable>(task) },
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon(_) => entry!(Neon, "neon"),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2(_) => entry!(Avx2, "avx2,fma,f16c"),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512(_) | InstructionSet::Avx512Vnni(_) | InstructionSet::Avx512Amx(_) => {
            entry!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c")
        }
    }
}
