//! Activations as fixed-point numbers for the kernel of `vnni.rs`, and codes as the integers that they meet.

#![allow(clippy::needless_range_loop)] // Loops over lanes, which the compiler vectorizes.

use crate::QuantFormat;

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
    /// `[block][lane]`: `centre *` the sum of the lane's numbers, without their lowest digit where
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
        let sum = |group: &[f32]| group.iter().map(|x| f64::from(*x)).sum::<f64>() as f32;
        this.group_sums = x.chunks(group_size).map(sum).chain([0.0; LANES]).collect();
        finite.then_some(this)
    }

    /// Writes digits, units and sums, sixteen lanes at a time: every loop below is one over lanes, which
    /// the compiler turns into vector instructions. Returns whether all numbers were finite.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn fill<const VECTORS: usize>(&mut self, codes: &Codes, x: &[f32]) -> bool {
        // The largest number of three balanced digits.
        const LIMIT: f32 = 0x7F_7F7F as f32;
        let split = splits_sum(codes.bits);
        let power_of_two = |log: i32| f32::from_bits(((log + 127) as u32) << 23);
        let mut all_finite = true;
        let places = self.digits.chunks_exact_mut(DIGITS * VECTORS * 64);
        let low = self.centred_low.chunks_exact_mut(LANES);
        let lanes = self.centred.chunks_exact_mut(LANES).zip(low).zip(self.units.chunks_exact_mut(LANES));
        for ((x, places), ((centred, centred_low), units)) in x.chunks(64 * VECTORS).zip(places).zip(lanes) {
            // [element of the lane][lane]
            let mut numbers = [[[0f32; LANES]; VECTORS]; 4];
            for (unit, x) in x.chunks(4 * VECTORS).enumerate() {
                let lane = codes.lane_of_unit(unit);
                for (element, x) in x.iter().enumerate() {
                    let (vector, byte) = codes.place_in_unit(element);
                    numbers[byte][vector][lane] = *x;
                }
            }
            let mut largest = [0f32; LANES];
            for numbers in numbers.as_flattened() {
                for lane in 0..LANES {
                    let magnitude = numbers[lane].abs();
                    largest[lane] = if magnitude > largest[lane] { magnitude } else { largest[lane] };
                    all_finite &= magnitude < f32::INFINITY;
                }
            }
            let mut inverse = [0f32; LANES];
            for lane in 0..LANES {
                // The smallest power of two by which the largest number stays within the limit.
                let exponent = (largest[lane].to_bits() >> 23) as i32 - 127;
                let log = (exponent - 22).clamp(-126, 126);
                let log = if largest[lane] * power_of_two(-log) > LIMIT { log + 1 } else { log };
                units[lane] = power_of_two(log);
                inverse[lane] = power_of_two(-log);
            }
            let mut sums = [0i32; LANES];
            let mut low_sums = [0i32; LANES];
            // Four bytes of a digit make a dword: the neighbours that a lane multiplies.
            let mut dwords = [[[0u32; LANES]; VECTORS]; DIGITS];
            for (byte, numbers) in numbers.iter().enumerate() {
                for (vector, numbers) in numbers.iter().enumerate() {
                    for lane in 0..LANES {
                        let number = (numbers[lane] * inverse[lane]).round_ties_even() as i32;
                        let low = i32::from(number as i8);
                        // Wrapping: infinities and NaN get this far, and their digits are not used.
                        let rest = number.wrapping_sub(low) >> DIGIT_BITS;
                        let middle = i32::from(rest as i8);
                        let high = rest.wrapping_sub(middle) >> DIGIT_BITS;
                        sums[lane] = sums[lane].wrapping_add(if split { rest } else { number });
                        low_sums[lane] += low;
                        dwords[0][vector][lane] |= (high as u32 & 0xFF) << (8 * byte);
                        dwords[1][vector][lane] |= (middle as u32 & 0xFF) << (8 * byte);
                        dwords[2][vector][lane] |= (low as u32 & 0xFF) << (8 * byte);
                    }
                }
            }
            for lane in 0..LANES {
                centred[lane] = codes.centre.wrapping_mul(sums[lane]);
                centred_low[lane] = codes.centre * low_sums[lane];
            }
            let dwords = dwords.as_flattened().as_flattened();
            for (place, dword) in places.chunks_exact_mut(4).zip(dwords) {
                place.copy_from_slice(&dword.to_le_bytes());
            }
        }
        all_finite
    }
}

/// Whether the sum of a lane can exceed 32 bits with all three digits, so that the lowest one has a sum
/// of its own. Eight codes of 6 bits, at most 32 off their centre, just fit: 8 * 32 * 0x7F7F7F < 2^31.
pub(super) const fn splits_sum(bits: usize) -> bool {
    bits == 8
}
