//! x as fixed-point numbers, for the AVX2 kernel.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::super::aligned::Aligned;
use super::super::super::fast_kernel::NotRepresentable;
use super::super::super::isa::avx2::Avx2;
use super::super::codes::{IntegerCodes, Kind};
use super::super::units::{normalize, sum, unit_of, LIMBS};
use super::LANES;
use std::arch::x86_64::*;

/// How codes of some format are read.
#[derive(Clone, Copy)]
pub(super) struct Geometry {
    pub(super) bits: usize,
    pub(super) group_size: usize,
    /// log2 of it.
    pub(super) group_shift: u32,
    /// Vectors of 32 codes in a block.
    pub(super) vectors: usize,
    /// Whether blocks have several groups, and for each lane the group that it has codes of, counted from the first.
    pub(super) has_groups: bool,
    pub(super) group_of_lane: [i32; LANES],
}

impl Geometry {
    pub(super) fn of(codes: &IntegerCodes, group_size: usize) -> Self {
        let bits = codes.bits().get();
        let vectors = match bits {
            // As many as come from one load.
            1 | 2 | 4 => 8 / bits,
            // In their order: a lane has codes of one group.
            _ if group_size < 64 => 1,
            _ => 2,
        };
        let group_of_lane = std::array::from_fn(|lane| (lane * 4 * vectors / group_size) as i32);
        let (group_shift, has_groups) = (group_size.trailing_zeros(), group_size < 32 * vectors);
        Self { bits, group_size, group_shift, vectors, has_groups, group_of_lane }
    }

    /// Elements of a block.
    fn block(&self) -> usize {
        32 * self.vectors
    }
}

/// Bytes of each of a block's digits.
pub(super) const fn block_digits(bits: usize, vectors: usize) -> usize {
    32 * vectors * (1 + word_digits(bits) as usize)
}

/// Whether digits are of 16 bits: two of 12 bits, or one of 16.
pub(super) const fn word_digits(bits: usize) -> bool {
    bits == 8
}

/// The numbers of 32 bits that sums of so many digits are: three bytes make two, and so do two words.
pub(super) const fn parts(bits: usize, digits: usize) -> usize {
    match word_digits(bits) {
        true => digits,
        false => 1 + digits / LIMBS,
    }
}

/// A row of x in the order of codes. The numbers that meet a group of weights are multiples of its unit.
pub(super) struct XRow {
    pub(super) geometry: Geometry,
    /// Digits of a number.
    pub(super) digits: usize,
    /// `[block][digit, highest first][vector][32]`, of 8 or 16 bits. Vectors have the order of [`super::unpack::load_block`].
    pub(super) bytes: Aligned<u8>,
    /// `[block][part][lane]`: `-center *` the sum of the lane's numbers. Sums of products are added to it.
    pub(super) offsets: Aligned<i32>,
    /// Multipliers of scales, for each group; zeros behind them, to a multiple of the lanes.
    pub(super) units: Vec<f32>,
    /// Sums of the activations of a group, which biases are multiplied by.
    pub(super) sums: Vec<f32>,
    /// What all sums are multiples of.
    pub(super) unit: f32,
    /// `[block][lane]`: the unit of integers if scales are E8M0; else there are none.
    pub(super) lane_units: Aligned<f32>,
}

impl XRow {
    /// # Errors
    /// If there is an infinity or a NaN, which no fixed-point number is.
    pub(super) fn new(
        _isa: Avx2,
        codes: &IntegerCodes,
        geometry: Geometry,
        x: &[f32],
        count: usize,
    ) -> Result<Self, NotRepresentable> {
        // A digit of 16 bits is as good as two of eight, and takes no longer than one.
        let (digits, bytes) = match (word_digits(geometry.bits), count) {
            (true, LIMBS..) => (2, LIMBS),
            (true, _) => (1, 2),
            (false, count) => (count, count),
        };
        let blocks = x.len().div_ceil(geometry.block());
        let groups = (x.len() / geometry.group_size).next_multiple_of(LANES);
        let has_lane_units = matches!(codes.kind, Kind::Mxfp4);
        let mut this = Self {
            geometry,
            digits,
            bytes: Aligned::new(blocks * digits * block_digits(geometry.bits, geometry.vectors)),
            offsets: Aligned::new(blocks * parts(geometry.bits, digits) * LANES),
            units: vec![0.; groups],
            sums: vec![0.; groups],
            unit: 1.,
            lane_units: Aligned::new(if has_lane_units { blocks * LANES } else { 0 }),
        };
        // SAFETY: `_isa` proves that the CPU has the features of the functions.
        unsafe {
            this.measure(codes, x, bytes).ok_or(NotRepresentable)?;
            /// The function for what the geometry has; of codes in their order, the width does not matter.
            macro_rules! fill {
                ($($bits:literal, $vectors:literal, $digits:literal;)*) => {
                    let bits = if matches!(geometry.bits, 5 | 6) { 3 } else { geometry.bits };
                    match (bits, geometry.vectors, digits) {
                        $(($bits, $vectors, $digits) => this.fill::<$bits, $vectors, $digits>(codes.center, x),)*
                        _ => return Err(NotRepresentable),
                    }
                };
            }
            fill!(
                1, 8, 1; 1, 8, 2; 1, 8, 3;
                2, 4, 1; 2, 4, 2; 2, 4, 3;
                3, 1, 1; 3, 1, 2; 3, 1, 3; 3, 2, 1; 3, 2, 2; 3, 2, 3;
                4, 2, 1; 4, 2, 2; 4, 2, 3;
                8, 1, 1; 8, 1, 2; 8, 2, 1; 8, 2, 2;
            );
        }
        this.scale_units(codes, x.len());
        Ok(this)
    }

    /// Finds units of the groups and sums. The features make the loops wide.
    #[target_feature(enable = "avx2,fma")]
    fn measure(&mut self, codes: &IntegerCodes, x: &[f32], bytes: usize) -> Option<()> {
        let groups = self.units.iter_mut().zip(&mut self.sums);
        for (x, (unit, of_biases)) in x.chunks_exact(self.geometry.group_size).zip(groups) {
            *unit = unit_of(x, bytes)?;
            // Elements of tables have no biases to multiply.
            *of_biases = if codes.has_biases() { (sum(x) / f64::from(*unit)) as f32 } else { 0. };
        }
        Some(())
    }

    /// Scales units and sums to [`XRow::unit`].
    fn scale_units(&mut self, codes: &IntegerCodes, k: usize) {
        let geometry = self.geometry;
        if !self.lane_units.is_empty() {
            for (block, lanes) in self.lane_units.chunks_exact_mut(LANES).enumerate() {
                let first = block * geometry.block() / geometry.group_size;
                for (lane, group) in lanes.iter_mut().zip(geometry.group_of_lane) {
                    *lane = self.units.get(first + group as usize).map_or(0., |unit| unit * codes.unit);
                }
            }
            // Scales stay as they are.
            self.units[..k / geometry.group_size].fill(1.);
            return;
        }
        let largest = self.units.iter().fold(0f32, |largest, unit| largest.max(*unit));
        self.unit = normalize(codes, largest, self.units.iter_mut().zip(&mut self.sums));
    }

    /// Writes digits and offsets.
    #[target_feature(enable = "avx2,fma")]
    fn fill<const BITS: usize, const VECTORS: usize, const DIGITS: usize>(&mut self, center: i32, x: &[f32]) {
        let block_digits = const { block_digits(BITS, VECTORS) * DIGITS };
        let blocks = self.bytes.chunks_exact_mut(block_digits).zip(x.chunks(32 * VECTORS));
        for (block, (out, x)) in blocks.enumerate() {
            let mut integers = [[0i32; 32]; VECTORS];
            let groups = x.chunks_exact(8).zip(integers.as_flattened_mut().chunks_exact_mut(8));
            for (eight, (x, to)) in groups.enumerate() {
                let group = (block * 32 * VECTORS + eight * 8) / self.geometry.group_size;
                let inverse = _mm256_set1_ps(1. / self.units[group]);
                // SAFETY: both have the eight numbers of a vector.
                unsafe {
                    let x = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x.as_ptr()), inverse));
                    _mm256_storeu_si256(to.as_mut_ptr().cast(), x);
                }
            }
            for (digit, out) in out.chunks_exact_mut(block_digits / DIGITS).enumerate().rev() {
                if word_digits(BITS) {
                    for (integer, to) in integers.as_flattened_mut().iter_mut().zip(out.as_chunks_mut().0) {
                        let value = if digit > 0 { (*integer << 20) >> 20 } else { *integer };
                        *to = (value as i16).to_ne_bytes();
                        *integer = (*integer - value) >> 12;
                    }
                    continue;
                }
                let mut natural = [[0u8; 32]; VECTORS];
                for (integer, to) in integers.as_flattened_mut().iter_mut().zip(natural.as_flattened_mut()) {
                    // The lowest byte, signed, is subtracted, and the rest shifted.
                    let value = *integer as i8;
                    *to = value as u8;
                    *integer = (*integer - i32::from(value)) >> 8;
                }
                if matches!(BITS, 1 | 2 | 4) {
                    let natural = natural.as_flattened();
                    for (vector, out) in out.chunks_exact_mut(32).enumerate() {
                        for byte in 0..32 {
                            out[byte] = natural[byte * VECTORS + vector];
                        }
                    }
                } else {
                    out.copy_from_slice(natural.as_flattened());
                }
            }
        }
        let offsets = self.offsets.chunks_exact_mut(parts(BITS, DIGITS) * LANES);
        for (digits, offsets) in self.bytes.chunks_exact(block_digits).zip(offsets) {
            let ones = [_mm256_set1_epi8(1); VECTORS];
            // SAFETY: a chunk has the digits of a block.
            let mut sums = unsafe { multiply::<BITS, VECTORS, DIGITS>(ones, digits.as_ptr(), VECTORS) };
            if DIGITS > 1 && !word_digits(BITS) {
                sums[0] = _mm256_add_epi32(sums[0], sums[1]);
            }
            let all = [sums[0], sums[DIGITS - 1]];
            for (sum, to) in all.into_iter().zip(offsets.chunks_exact_mut(LANES)) {
                // SAFETY: a chunk has the eight numbers of a vector.
                unsafe {
                    let offset = _mm256_mullo_epi32(sum, _mm256_set1_epi32(-center));
                    _mm256_storeu_si256(to.as_mut_ptr().cast(), offset);
                }
            }
        }
    }
}

/// The sums of a block's codes times each of the digits; the highest of several bytes times 256. As many sums of two products as
/// `in_16_bits` are added up in 16 bits.
///
/// # Safety
/// There are the digits of a block.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn multiply<const BITS: usize, const VECTORS: usize, const DIGITS: usize>(
    codes: [__m256i; VECTORS],
    digits: *const u8,
    in_16_bits: usize,
) -> [__m256i; DIGITS] {
    let mut sums = [_mm256_setzero_si256(); DIGITS];
    for digit in 0..DIGITS {
        if word_digits(BITS) {
            for vector in 0..VECTORS {
                let lower = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(codes[vector]));
                let upper = _mm256_cvtepu8_epi16(_mm256_extracti128_si256::<1>(codes[vector]));
                for (half, codes) in [lower, upper].into_iter().enumerate() {
                    // SAFETY: the caller vouches for the digits.
                    let digits = unsafe {
                        _mm256_loadu_si256(digits.add(((digit * VECTORS + vector) * 2 + half) * 32).cast())
                    };
                    sums[digit] = _mm256_add_epi32(sums[digit], _mm256_madd_epi16(codes, digits));
                }
            }
            continue;
        }
        // Where there are lower digits, the highest is a multiple of 256 of the next.
        let factor = _mm256_set1_epi16(if digit == 0 && DIGITS > 1 { 256 } else { 1 });
        let mut words = _mm256_setzero_si256();
        for vector in 0..VECTORS {
            // SAFETY: the caller vouches for the digits.
            let digits = unsafe { _mm256_loadu_si256(digits.add((digit * VECTORS + vector) * 32).cast()) };
            let products = _mm256_maddubs_epi16(codes[vector], digits);
            words =
                if vector.is_multiple_of(in_16_bits) { products } else { _mm256_add_epi16(words, products) };
            if (vector + 1).is_multiple_of(in_16_bits) || vector + 1 == VECTORS {
                sums[digit] = _mm256_add_epi32(sums[digit], _mm256_madd_epi16(words, factor));
            }
        }
    }
    sums
}
