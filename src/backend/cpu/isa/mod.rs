//! Vector instructions: one trait, and one thin file for each instruction set. No algorithms.
//!
//! An algorithm is written once, generic over [`Simd`], and instantiated for each instruction set inside a function that
//! enables its features (`f32/kernels.rs`). A vector of `LANES` 32-bit lanes takes the packed codes of a *block* of
//! `4 * LANES` elements: lane `l` holds, in its low `4 * BITS` bits, the codes of elements `4 * l .. 4 * l + 4`. Four
//! shifts then give four vectors of dequantized weights, of which vector `i` holds the elements `4 * l + i`. Activations
//! are brought into that order once per call (`f32/lane_order.rs`), so that weights are never shuffled.
//!
//! # Proof that an instruction is there
//! Each instruction set is a type with a private field. Its `new` returns a value only after it has detected the
//! features, so whoever holds a value may call functions that enable them. [`InstructionSet`] holds such values.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx_tile;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512_e4m3;
mod detect;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub(super) mod portable;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(super) use detect::{available, tested};
pub(super) use detect::{best, InstructionSet};
#[cfg(target_arch = "x86_64")]
pub(super) use detect::{has_large_first_cache, is_of_intel};

/// The operations that algorithms need of an instruction set.
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
    /// The largest M with which a GEMV kernel takes two rows of the weight together, as registers allow.
    const MAX_M_OF_PAIRS: usize;
    /// Rows and vectors of the tile of sums that a kernel for dense matrices keeps in registers.
    const TILE: (usize, usize);
    /// Whether weights are dequantized while others are multiplied. Measured: with AVX-512 that takes less time, with
    /// AVX2 three times as long for some formats.
    const DEQUANTIZES_AHEAD: bool = false;

    unsafe fn zero() -> Self::F;
    /// Reads `LANES` numbers.
    unsafe fn load(from: *const f32) -> Self::F;
    /// Writes `LANES` numbers.
    unsafe fn store(to: *mut f32, value: Self::F);
    /// The same number in every lane.
    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the instruction set can.
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Sum over the lanes.
    unsafe fn sum(value: Self::F) -> f32;
    /// The larger number in each lane; `b` where it is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The largest of all lanes, if none is NaN.
    unsafe fn largest(value: Self::F) -> f32;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// The low nine bits of each lane as sign and exponent of a number: `2^(n - 127)` for a lane that holds `2^23 + n`
    /// or `1.5 * 2^23 + n`, and zero for an `n` of zero.
    unsafe fn low_bits_as_power(value: Self::F) -> Self::F;
    /// Reads `LANES` f16 numbers.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    /// Reads `LANES` bf16 numbers.
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    /// Reads `LANES` unsigned bytes, as numbers.
    unsafe fn load_bytes(from: *const u8) -> Self::F;
    /// Reads `LANES` bytes: their low four bits as numbers, or with a `shift` of 4 their high four bits.
    unsafe fn load_nibbles(from: *const u8, shift: u32) -> Self::F;
    /// Prefetches a cache line; never faults.
    unsafe fn prefetch(address: *const u8);

    /// The codes of a block: reads exactly `BITS * LANES / 2` bytes; bits of a lane above
    /// `4 * BITS` are undefined.
    unsafe fn load_codes<const BITS: usize>(from: *const u8) -> Self::U;
    /// Broadcasts one number to each `LANES_PER_GROUP` lanes: reads `LANES / LANES_PER_GROUP` numbers, at least one.
    unsafe fn broadcast<const LANES_PER_GROUP: usize>(from: *const f32) -> Self::F;

    /// `code * scale + bias` of the four unsigned codes in each lane.
    unsafe fn affine<const BITS: usize, const LANES_PER_GROUP: usize>(
        codes: Self::U,
        scale: Self::F,
        bias: Self::F,
    ) -> [Self::F; 4];
    /// The entries of a table that the four codes in each lane select.
    unsafe fn lookup16<T: Table16>(codes: Self::U) -> [Self::F; 4];
    /// Values of the four E4M3 codes in each lane.
    unsafe fn e4m3(codes: Self::U) -> [Self::F; 4];
    /// Values of the four signed 8-bit integers in each lane.
    unsafe fn int8(codes: Self::U) -> [Self::F; 4];
}

/// The values of codes of up to four bits. A type, so that instruction sets know at compile time what a table allows.
pub(super) trait Table16 {
    /// Bits of a code.
    const BITS: usize = 4;
    /// The value of each code. Those of fewer bits repeat: bits above a code do not matter.
    const VALUES: [f32; 16];

    /// Whether the highest bit of a code is the sign of its value.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const HAS_SIGN_BIT: bool = {
        let mut code = 0;
        while code < 8 {
            if Self::VALUES[code + 8].to_bits() != Self::VALUES[code].to_bits() | 1 << 31 {
                break;
            }
            code += 1;
        }
        code == 8
    };
    /// Whether the lower half of every value's bits is zero, as it is for values that bf16 has.
    #[cfg_attr(not(target_arch = "aarch64"), allow(dead_code))]
    const LOWER_HALVES_ARE_ZERO: bool = {
        let mut code = 0;
        while code < 16 && Self::VALUES[code].to_bits() & 0xFFFF == 0 {
            code += 1;
        }
        code == 16
    };
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

/// A call of a function of plain Rust that is inlined, compiled for the instruction set in use: its loops have wider vectors, and
/// results the same bits, since the compiler neither contracts nor reorders arithmetic. Not a function that takes a closure, see
/// [`each`].
macro_rules! vectorized {
    ($function:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,f16c")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                $function($($argument),*)
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                $function($($argument),*)
            }
            use $crate::backend::cpu::isa::{best, InstructionSet};
            // SAFETY: the values of instruction sets prove that the CPU has their features.
            unsafe {
                match best() {
                    InstructionSet::Portable(_) => $function($($argument),*),
                    InstructionSet::Avx2(_) => avx2($($argument),*),
                    InstructionSet::Avx512(_)
                    | InstructionSet::Avx512Vnni(_)
                    | InstructionSet::Avx512Amx(_) => avx512($($argument),*),
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        $function($($argument),*)
    }};
}
pub(super) use vectorized;
