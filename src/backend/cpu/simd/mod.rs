//! Vectors: one trait, one thin file for each instruction set, and the choice at run time.
//!
//! Every kernel is written once, generic over [`Simd`] (`kernels`), and instantiated for each
//! instruction set inside a function that enables its features. A vector of `LANES` 32-bit lanes
//! takes the packed codes of a *block* of `4 * LANES` elements: lane `l` holds, in its low
//! `4 * BITS` bits, the codes of elements `4 * l .. 4 * l + 4`. Four shifts then give four vectors
//! of decoded weights, of which vector `i` holds the elements `4 * l + i`; activations are brought
//! into that order once per call ([`interleave`]), so that weights are never shuffled.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod digits;
#[cfg(target_arch = "x86_64")]
mod mxfp8;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(super) mod portable;
#[cfg(target_arch = "x86_64")]
mod rows;
#[cfg(target_arch = "x86_64")]
mod scales;
#[cfg(target_arch = "x86_64")]
pub(super) mod vnni;

use super::kernels::{DecodeRows, DotRows, Parameters};
use super::matrix::PackedMatrix;
use std::sync::OnceLock;

/// The operations that the kernels need of an instruction set.
///
/// # Safety
/// The functions may be called only where the CPU has the instruction set, from a function that
/// enables its features. Pointers must be valid for the bytes that each function names.
pub(super) trait Simd: Copy {
    /// `LANES` f32 numbers.
    type F: Copy;
    /// `LANES` 32-bit words.
    type U: Copy;
    /// Lanes of a vector.
    const LANES: usize;
    /// Elements of a block.
    const BLOCK: usize = 4 * Self::LANES;
    /// The most columns with which products handle two rows together, as registers allow.
    const MAX_COLUMNS_OF_PAIRS: usize;
    /// Whether weights are decoded while others are multiplied. Measured: with AVX-512 that takes less time, with AVX2
    /// three times as long for some formats.
    const DECODES_AHEAD: bool = false;

    unsafe fn zero() -> Self::F;
    /// Reads `LANES` numbers.
    unsafe fn load(from: *const f32) -> Self::F;
    /// Writes `LANES` numbers.
    unsafe fn store(to: *mut f32, value: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the instruction set can.
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Sum over the lanes.
    unsafe fn sum(value: Self::F) -> f32;
    /// Asks for a cache line that will be read soon; never faults.
    unsafe fn prefetch(address: *const u8);

    /// The codes of a block: reads exactly `BITS * LANES / 2` bytes; bits of a lane above
    /// `4 * BITS` are undefined.
    unsafe fn load_codes<const BITS: usize>(from: *const u8) -> Self::U;
    /// One number for each `LANES_PER_GROUP` lanes: reads `LANES / LANES_PER_GROUP` numbers (at least
    /// one) and repeats each.
    unsafe fn spread<const LANES_PER_GROUP: usize>(from: *const f32) -> Self::F;

    /// `code * scale + bias` of the four codes in each lane.
    unsafe fn affine<const BITS: usize, const LANES_PER_GROUP: usize>(
        codes: Self::U,
        scale: Self::F,
        bias: Self::F,
    ) -> [Self::F; 4];
    /// Values of the four E2M1 codes in each lane.
    unsafe fn e2m1(codes: Self::U) -> [Self::F; 4];
    /// Values of the four E4M3 codes in each lane.
    unsafe fn e4m3(codes: Self::U) -> [Self::F; 4];
}

/// The kernels of one instruction set.
pub(crate) trait InstructionSet: Send + Sync {
    /// For `CANDLE_QUANT_SIMD` and for reports.
    fn name(&self) -> &'static str;
    /// Elements of a block: K is padded to a multiple of it in interleaved rows.
    fn block(&self) -> usize;
    /// Vector lanes.
    fn lanes(&self) -> usize;
    /// Fetches scales and biases of up to `ROWS_PER_PASS` rows.
    fn load_parameters(&self, to: &mut Parameters, matrix: &PackedMatrix, first_row: usize, rows: usize);
    /// The numbers of columns that [`InstructionSet::dot_rows`] takes, ascending, from 1 on.
    fn slab_widths(&self) -> &'static [usize];
    /// Dot products of packed rows and a slab of interleaved activations.
    fn dot_rows(&self, task: DotRows<'_>);
    /// Packed rows to f32, interleaved or in natural order.
    fn decode_rows(&self, task: DecodeRows<'_>);
    /// Whether there may be a kernel for whole products with `m` rows of activations.
    fn has_product(&self, _m: usize) -> bool {
        false
    }
    /// The whole product, `[M, N]`, of activations `[M, K]`, if there is a kernel for just that. Called only where
    /// [`InstructionSet::has_product`].
    fn product(&self, _matrix: &PackedMatrix, _x: &[f32]) -> Option<Vec<f32>> {
        None
    }
}

/// `function` of each of four vectors. Not `array::map`: a closure does not have the features of the
/// function around it, so the intrinsics in it would become calls.
macro_rules! each {
    ($four:expr, |$item:ident| $function:expr) => {{
        let [a, b, c, d] = $four;
        let a = {
            let $item = a;
            $function
        };
        let b = {
            let $item = b;
            $function
        };
        let c = {
            let $item = c;
            $function
        };
        let d = {
            let $item = d;
            $function
        };
        [a, b, c, d]
    }};
}
pub(super) use each;

/// Implements [`InstructionSet`] for a [`Simd`] type: one monomorphic function for each recipe (and
/// number of columns), compiled with the features of the instruction set.
macro_rules! implement {
    ($simd:ident, $name:literal, [$($columns:literal),+], $($feature:literal)?) => {
        #[doc = concat!("The ", $name, " kernels.")]
        pub(in crate::backend::cpu) struct Kernels;

        impl super::InstructionSet for Kernels {
            fn name(&self) -> &'static str {
                $name
            }
            fn block(&self) -> usize {
                <$simd as super::Simd>::BLOCK
            }
            fn lanes(&self) -> usize {
                <$simd as super::Simd>::LANES
            }
            fn load_parameters(
                &self,
                to: &mut crate::backend::cpu::kernels::Parameters,
                matrix: &crate::backend::cpu::PackedMatrix,
                first_row: usize,
                rows: usize,
            ) {
                $(#[target_feature(enable = $feature)])?
                unsafe fn entry(
                    to: &mut crate::backend::cpu::kernels::Parameters,
                    matrix: &crate::backend::cpu::PackedMatrix,
                    first_row: usize,
                    rows: usize,
                ) {
                    to.load(matrix, first_row, rows);
                }
                // SAFETY: `Kernels` is handed out only after its features were detected.
                unsafe { entry(to, matrix, first_row, rows) }
            }
            fn slab_widths(&self) -> &'static [usize] {
                &[$($columns),+]
            }
            fn dot_rows(&self, task: crate::backend::cpu::kernels::DotRows<'_>) {
                struct Call<'a>(crate::backend::cpu::kernels::DotRows<'a>);
                impl crate::backend::cpu::recipe::WithRecipe for Call<'_> {
                    fn run<R: crate::backend::cpu::recipe::Recipe>(self) {
                        $(#[target_feature(enable = $feature)])?
                        unsafe fn entry<R: crate::backend::cpu::recipe::Recipe, const M: usize>(
                            task: crate::backend::cpu::kernels::DotRows<'_>,
                        ) {
                            // SAFETY: the features are enabled here, and present as `entry` was called.
                            unsafe { crate::backend::cpu::kernels::dot_rows::<$simd, R, M>(task) }
                        }
                        // SAFETY: `Kernels` is handed out only after its features were detected.
                        unsafe {
                            match self.0.columns {
                                $($columns => entry::<R, $columns>(self.0),)+
                                other => panic!("{other} columns are none of the slab widths"),
                            }
                        }
                    }
                }
                crate::backend::cpu::recipe::with_recipe(task.matrix.format, Call(task))
            }
            fn decode_rows(&self, task: crate::backend::cpu::kernels::DecodeRows<'_>) {
                struct Call<'a>(crate::backend::cpu::kernels::DecodeRows<'a>);
                impl crate::backend::cpu::recipe::WithRecipe for Call<'_> {
                    fn run<R: crate::backend::cpu::recipe::Recipe>(self) {
                        $(#[target_feature(enable = $feature)])?
                        unsafe fn entry<R: crate::backend::cpu::recipe::Recipe>(
                            task: crate::backend::cpu::kernels::DecodeRows<'_>,
                        ) {
                            // SAFETY: the features are enabled here, and present as `entry` was called.
                            unsafe { crate::backend::cpu::kernels::decode_rows::<$simd, R>(task) }
                        }
                        // SAFETY: `Kernels` is handed out only after its features were detected.
                        unsafe { entry::<R>(self.0) }
                    }
                }
                crate::backend::cpu::recipe::with_recipe(task.matrix.format, Call(task))
            }
        }
    };
}
use implement;

/// Every instruction set that this CPU has, best first; the portable one is always there.
pub(crate) fn available() -> &'static [&'static dyn InstructionSet] {
    static AVAILABLE: OnceLock<Vec<&'static dyn InstructionSet>> = OnceLock::new();
    AVAILABLE.get_or_init(|| {
        let mut sets: Vec<&'static dyn InstructionSet> = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if super::amx::detected() {
                sets.push(&super::amx::Kernels);
            }
            if vnni::detected() {
                sets.push(&vnni::Kernels);
            }
            if avx512::detected() {
                sets.push(&avx512::Kernels);
            }
            if avx2::detected() {
                sets.push(&avx2::Kernels);
            }
        }
        #[cfg(target_arch = "aarch64")]
        sets.push(&neon::Kernels);
        sets.push(&portable::Kernels);
        sets
    })
}

/// The instruction set in use: the best there is, or the one that the environment variable
/// `CANDLE_QUANT_SIMD` names (`avx512amx`, `avx512vnni`, `avx512`, `avx2`, `neon`, `portable`) if this CPU has it.
pub(crate) fn best() -> &'static dyn InstructionSet {
    static BEST: OnceLock<&'static dyn InstructionSet> = OnceLock::new();
    *BEST.get_or_init(|| {
        let wanted = std::env::var("CANDLE_QUANT_SIMD").unwrap_or_default();
        let named = available().iter().find(|set| set.name() == wanted);
        if named.is_none() && !wanted.is_empty() {
            log::warn!("CANDLE_QUANT_SIMD={wanted}: not an instruction set of this CPU, ignored");
        }
        named.or(available().first()).copied().unwrap_or(&portable::Kernels)
    })
}
