//! Groups of activations as sums of three terms that tiles can multiply.
//!
//! Beside integer codes, activations are fixed-point numbers of three signed digits of eight bits; beside
//! bf16 factors, they are three bf16 numbers, each what the ones before it leave over. Either way a group
//! of weights meets numbers of 23 or 24 bits, scaled by a power of two of their own.

#![allow(clippy::needless_range_loop)] // Loops over lanes, which the compiler vectorizes.

use super::codes::Codes;

/// Terms of an activation.
pub(super) const TERMS: usize = 3;

/// The largest group of weights.
const MAX_GROUP: usize = 128;

/// The largest number of three balanced digits.
const LIMIT: f32 = 0x7F_7F7F as f32;

/// The activations that meet a group of weights.
pub(super) struct Group {
    /// For each term, highest first: what a lane multiplies, four digits or two bf16 numbers in a word.
    pub(super) words: [[u32; MAX_GROUP / 4]; TERMS],
    /// What numbers are multiples of, a power of two.
    pub(super) unit: f32,
    /// The sum of the activations, beside integer codes.
    pub(super) sum: f32,
}

impl Group {
    pub(super) const EMPTY: Self = Self { words: [[0; MAX_GROUP / 4]; TERMS], unit: 0.0, sum: 0.0 };

    /// Elements in a word.
    pub(super) const fn per_word(float: bool) -> usize {
        if float {
            2
        } else {
            4
        }
    }

    /// What a term counts in units.
    pub(super) const fn weight(float: bool, term: usize) -> f32 {
        match (float, term) {
            (false, 0) => 65536.0,
            (false, 1) => 256.0,
            _ => 1.0,
        }
    }

    /// Fills this with a group (at most 128, beside bf16 factors at most 64); false if there is an
    /// infinity or a NaN, which have no such terms.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn fill<C: Codes>(&mut self, x: &[f32]) -> bool {
        let mut largest = [0f32; 16];
        let mut finite = true;
        for x in x.chunks(16) {
            for (largest, x) in largest.iter_mut().zip(x) {
                let magnitude = x.abs();
                *largest = if magnitude > *largest { magnitude } else { *largest };
                finite &= magnitude < f32::INFINITY;
            }
        }
        let largest = largest.iter().fold(0f32, |a, b| if *b > a { *b } else { a });
        if !finite {
            return false;
        }
        let power_of_two = |log: i32| f32::from_bits(((log + 127) as u32) << 23);
        let exponent = (largest.to_bits() >> 23) as i32 - 127;
        if C::FLOAT {
            let log = exponent.clamp(-126, 126);
            self.unit = power_of_two(log);
            self.fill_bf16(x, power_of_two(-log));
        } else {
            // The smallest power of two by which the largest number stays within the limit.
            let log = (exponent - 22).clamp(-126, 126);
            let log = if largest * power_of_two(-log) > LIMIT { log + 1 } else { log };
            self.unit = power_of_two(log);
            self.fill_digits(x, power_of_two(-log));
        }
        true
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn fill_digits(&mut self, x: &[f32], inverse: f32) {
        let mut digits = [[0u8; MAX_GROUP]; TERMS];
        let [high, middle, low] = &mut digits;
        let mut sum = 0i32;
        for (((x, high), middle), low) in x.iter().zip(high).zip(middle).zip(low) {
            let number = (x * inverse).round_ties_even() as i32;
            sum += number;
            *low = number as u8;
            let rest = (number - i32::from(number as i8)) >> 8;
            *middle = rest as u8;
            *high = ((rest - i32::from(rest as i8)) >> 8) as u8;
        }
        self.sum = sum as f32 * self.unit;
        for (words, digits) in self.words.iter_mut().zip(&digits) {
            for (word, digits) in words.iter_mut().zip(digits.chunks_exact(4)) {
                *word = u32::from_le_bytes([digits[0], digits[1], digits[2], digits[3]]);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn fill_bf16(&mut self, x: &[f32], inverse: f32) {
        /// The nearest bf16 number, in the upper half of an f32.
        #[inline(always)]
        fn round(value: f32) -> f32 {
            let bits = value.to_bits();
            f32::from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF_0000)
        }
        for (place, pair) in x.chunks_exact(2).enumerate() {
            let mut rest = [pair[0] * inverse, pair[1] * inverse];
            for words in &mut self.words {
                let term = [round(rest[0]), round(rest[1])];
                rest = [rest[0] - term[0], rest[1] - term[1]];
                if let Some(word) = words.get_mut(place) {
                    *word = term[0].to_bits() >> 16 | term[1].to_bits();
                }
            }
        }
    }
}
