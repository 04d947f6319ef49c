//! Activations as fixed-point numbers for the kernel of `vnni.rs`, and codes as the integers that they meet.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use crate::QuantFormat;
use std::arch::x86_64::*;

/// How the codes of a format are integers.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) bits: usize,
    /// Whether codes are E2M1 elements, to be looked up.
    pub(super) e2m1: bool,
    /// The integer of a code less this is a multiple of `unit`, and around zero.
    pub(super) centre: i32,
    pub(super) unit: f32,
}

/// Whether codes of this width are doubled, so that their centre is an integer. Those of 6 and 8 bits
/// are not, for want of room in a sum and a byte; their centre is off by a small part of their range.
pub(super) const fn doubled(bits: usize) -> bool {
    bits < 6
}

impl Codes {
    pub(super) fn of(format: QuantFormat) -> Option<Self> {
        let (bits, e2m1, centre, unit) = match format {
            QuantFormat::Affine { bits, .. } if doubled(bits) => (bits, false, (1 << bits) - 1, 0.5),
            QuantFormat::Affine { bits, .. } => (bits, false, 1 << (bits - 1), 1.0),
            QuantFormat::Mxfp4 | QuantFormat::Nvfp4 => (4, true, 12, 0.5),
            QuantFormat::Mxfp8 => return None,
        };
        Some(Self { bits, e2m1, centre, unit })
    }

    /// Vectors of 64 codes in a block: for widths that divide a byte as many as come from one load, for
    /// others two, from two loads.
    pub(super) fn vectors(&self) -> usize {
        match self.bits {
            1 | 2 | 4 => 8 / self.bits,
            _ => 2,
        }
    }

    /// Elements of a block. Each dword lane covers `4 * vectors` neighbours, a *unit*.
    pub(super) fn block(&self) -> usize {
        64 * self.vectors()
    }

    /// The lane that covers a unit: where two loads are shuffled together, each 128-bit part has two
    /// units of the first and two of the second.
    fn lane_of_unit(&self, unit: usize) -> usize {
        match self.bits {
            1 | 2 | 4 => unit,
            _ => unit % 8 / 2 * 4 + unit / 8 * 2 + unit % 2,
        }
    }

    /// The vector, and the byte of the lane, of an element of a unit.
    fn place_in_unit(&self, element: usize) -> (usize, usize) {
        match self.bits {
            1 | 2 | 4 => (element % self.vectors(), element / self.vectors()),
            _ => (element / 4, element % 4),
        }
    }

    /// Packed bytes of a block.
    pub(super) fn block_bytes(&self) -> usize {
        self.block() * self.bits / 8
    }
}

/// Digits of a number.
pub(super) const DIGITS: usize = 3;

/// 32-bit lanes of a vector.
pub(super) const LANES: usize = 16;

/// Bits of a digit.
pub(super) const DIGIT_BITS: u32 = 8;

/// Activations as fixed-point numbers in the order of [`Codes`].
pub(super) struct Digits {
    /// `[block][digit, highest first][vector][64]`.
    pub(super) digits: Vec<u8>,
    /// `[block][lane]`: `-centre *` the sum of the lane's numbers, without their lowest digit where
    /// [`splits_sum`], and then the sum of those digits in `centred_low`.
    pub(super) centred: Vec<i32>,
    pub(super) centred_low: Vec<i32>,
    /// `[block][lane]`: what the lane's numbers are multiples of, a power of two.
    pub(super) units: Vec<f32>,
    /// Sums of the activations of each group of weights, padded with 16 zeros.
    pub(super) group_sums: Vec<f32>,
    /// For each lane of a block, its group counted from the block's first.
    pub(super) group_of_lane: [i32; 16],
    /// log2 of the group size.
    pub(super) group_shift: u32,
}

impl Digits {
    /// `None` if there is an infinity or a NaN, which no fixed-point number is.
    pub(super) fn new(codes: &Codes, group_size: usize, x: &[f32]) -> Option<Self> {
        let blocks = x.len().div_ceil(codes.block());
        let mut this = Self {
            digits: vec![0; blocks * DIGITS * codes.block()],
            centred: vec![0; blocks * LANES],
            centred_low: vec![0; blocks * LANES],
            units: vec![0.0; blocks * LANES],
            group_sums: Vec::new(),
            group_of_lane: [0; LANES],
            group_shift: group_size.trailing_zeros(),
        };
        for unit in 0..LANES {
            this.group_of_lane[codes.lane_of_unit(unit)] = (unit * 4 * codes.vectors() / group_size) as i32;
        }
        // SAFETY: this instruction set is in use only where its features were detected.
        let finite = unsafe {
            match codes.vectors() {
                2 => this.fill::<2>(codes, x),
                4 => this.fill::<4>(codes, x),
                _ => this.fill::<8>(codes, x),
            }
        };
        this.group_sums = x.chunks(group_size).map(sum).chain([0.0; LANES]).collect();
        finite.then_some(this)
    }

    /// Writes digits, units and sums, sixteen lanes at a time. Returns whether all numbers were finite.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn fill<const VECTORS: usize>(&mut self, codes: &Codes, x: &[f32]) -> bool {
        // The largest number of three balanced digits.
        const LIMIT: f32 = 0x7F_7F7F as f32;
        let split = splits_sum(codes.bits);
        let mut first_element = [0i32; LANES];
        for unit in 0..LANES {
            first_element[codes.lane_of_unit(unit)] = (unit * 4 * VECTORS) as i32;
        }
        // SAFETY (loads and stores): sixteen numbers each.
        let first_element = unsafe { _mm512_loadu_si512(first_element.as_ptr().cast()) };
        let power_of_two =
            |log: __m512i| _mm512_slli_epi32::<23>(_mm512_add_epi32(log, _mm512_set1_epi32(127)));
        let infinity = _mm512_set1_ps(f32::INFINITY);
        let centre = _mm512_set1_epi32(-codes.centre);
        let mut finite = !0;
        let mut last = [0f32; 64 * 8];
        let places = self.digits.chunks_exact_mut(DIGITS * VECTORS * 64);
        let low = self.centred_low.chunks_exact_mut(LANES);
        let lanes = self.centred.chunks_exact_mut(LANES).zip(low).zip(self.units.chunks_exact_mut(LANES));
        for ((x, places), ((centred, centred_low), units)) in x.chunks(64 * VECTORS).zip(places).zip(lanes) {
            let x = if x.len() == 64 * VECTORS {
                x
            } else {
                last.iter_mut().zip(x).for_each(|(to, from)| *to = *from);
                &last[..64 * VECTORS]
            };
            // [vector][byte of the lane]
            let mut numbers = [[_mm512_setzero_ps(); 4]; VECTORS];
            let mut largest = _mm512_setzero_ps();
            for element in 0..4 * VECTORS {
                let (vector, byte) = codes.place_in_unit(element);
                let index = _mm512_add_epi32(first_element, _mm512_set1_epi32(element as i32));
                // SAFETY: indices are below 64 * VECTORS.
                let number = unsafe { _mm512_i32gather_ps::<4>(index, x.as_ptr()) };
                let magnitude = _mm512_abs_ps(number);
                largest = _mm512_max_ps(largest, magnitude);
                finite &= _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitude, infinity);
                numbers[vector][byte] = number;
            }
            // The smallest power of two by which the largest number stays within the limit.
            let exponent = _mm512_srli_epi32::<23>(_mm512_castps_si512(largest));
            let log = _mm512_sub_epi32(exponent, _mm512_set1_epi32(127 + 22));
            let log = _mm512_max_epi32(log, _mm512_set1_epi32(-126));
            let log = _mm512_min_epi32(log, _mm512_set1_epi32(126));
            let zero = _mm512_setzero_si512();
            let inverse = _mm512_castsi512_ps(power_of_two(_mm512_sub_epi32(zero, log)));
            let above =
                _mm512_cmp_ps_mask::<_CMP_GT_OQ>(_mm512_mul_ps(largest, inverse), _mm512_set1_ps(LIMIT));
            let log = _mm512_mask_add_epi32(log, above, log, _mm512_set1_epi32(1));
            let inverse = _mm512_castsi512_ps(power_of_two(_mm512_sub_epi32(zero, log)));
            let (mut sum, mut low_sum) = (zero, zero);
            // Four bytes of a digit make a lane: the neighbours that it multiplies.
            let mut digits = [[zero; VECTORS]; DIGITS];
            for vector in 0..VECTORS {
                for byte in 0..4 {
                    let mut rest = _mm512_cvtps_epi32(_mm512_mul_ps(numbers[vector][byte], inverse));
                    if !split {
                        sum = _mm512_add_epi32(sum, rest);
                    }
                    for digit in (0..DIGITS).rev() {
                        // The lowest byte, signed, taken away and put in its place.
                        let value = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(rest));
                        let placed = _mm512_and_si512(value, _mm512_set1_epi32(0xFF));
                        let placed = _mm512_sllv_epi32(placed, _mm512_set1_epi32(8 * byte as i32));
                        digits[digit][vector] = _mm512_or_si512(digits[digit][vector], placed);
                        rest = _mm512_srai_epi32::<8>(_mm512_sub_epi32(rest, value));
                        if split && digit == DIGITS - 1 {
                            low_sum = _mm512_add_epi32(low_sum, value);
                            sum = _mm512_add_epi32(sum, rest);
                        }
                    }
                }
            }
            let mut places = places.chunks_exact_mut(64);
            for digit in digits.as_flattened() {
                if let Some(place) = places.next() {
                    // SAFETY: as above.
                    unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), *digit) };
                }
            }
            // SAFETY: as above.
            unsafe {
                let sum = _mm512_mullo_epi32(sum, centre);
                _mm512_storeu_si512(centred.as_mut_ptr().cast(), sum);
                let low_sum = _mm512_mullo_epi32(low_sum, centre);
                _mm512_storeu_si512(centred_low.as_mut_ptr().cast(), low_sum);
                _mm512_storeu_si512(units.as_mut_ptr().cast(), power_of_two(log));
            }
        }
        finite == !0
    }
}

/// The sum of a group's activations.
#[inline(always)]
fn sum(group: &[f32]) -> f32 {
    let mut sums = [0f64; 8];
    for eight in group.chunks_exact(8) {
        sums.iter_mut().zip(eight).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    sums.iter().sum::<f64>() as f32
}

/// Whether the sum of a lane can exceed 32 bits with all three digits, so that the lowest one has a sum
/// of its own. Eight codes of 6 bits, at most 32 off their centre, just fit: 8 * 32 * 0x7F7F7F < 2^31.
pub(super) const fn splits_sum(bits: usize) -> bool {
    bits == 8
}
