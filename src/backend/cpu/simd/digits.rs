//! Activations as fixed-point numbers for the kernel of `vnni.rs`, and codes as the integers that they meet.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::aligned::Aligned;
use crate::format::{Element, Scale};
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
    /// Whether scales are of any size (E8M0), so that only products are sure to be numbers.
    pub(super) any_scale: bool,
}

/// Whether codes of this width are doubled, so that their centre is an integer. Those of 6 and 8 bits
/// are not, for want of room in a sum and a byte; their centre is off by a small part of their range.
pub(super) const fn doubled(bits: usize) -> bool {
    bits < 6
}

impl Codes {
    pub(super) fn of(format: QuantFormat) -> Option<Self> {
        let bits = format.bits();
        let (e2m1, centre, unit) = match format.element() {
            Element::Uint(_) if doubled(bits) => (false, (1 << bits) - 1, 0.5),
            Element::Uint(_) => (false, 1 << (bits - 1), 1.0),
            Element::E2m1 => (true, 12, 0.5),
            Element::E4m3 => return None,
        };
        let any_scale = format.scale() == Scale::E8m0;
        Some(Self { bits, e2m1, centre, unit, any_scale })
    }

    /// Vectors of 64 codes in a block: for 1, 2 and 4 bits as many as come from one load, for others two, from one load
    /// (3 bits) or two.
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

    /// The lane that covers a unit: that of its number, but of 8 bits two loads are shuffled together, and each 128-bit
    /// part has two units of the first and two of the second.
    fn lane_of_unit(&self, unit: usize) -> usize {
        match self.bits {
            8 => unit % 8 / 2 * 4 + unit / 8 * 2 + unit % 2,
            _ => unit,
        }
    }

    /// The element of a unit in a vector and a byte of the lane.
    fn element_of_unit(&self, vector: usize, byte: usize) -> usize {
        match self.bits {
            1 | 2 | 4 => byte * self.vectors() + vector,
            _ => 4 * vector + byte,
        }
    }
}

/// Digits of a number.
pub(super) const DIGITS: usize = 3;

/// 32-bit lanes of a vector.
pub(super) const LANES: usize = 16;

/// Bits of a digit.
pub(super) const DIGIT_BITS: u32 = 8;

/// Activations as fixed-point numbers in the order of [`Codes`]: those of a group of weights are multiples of a power
/// of two.
pub(super) struct Digits {
    /// `[block][digit, highest first][vector][64]`.
    pub(super) digits: Aligned<u8>,
    /// `[block][2][lane]`: `-centre *` the sum of the lane's numbers, as a multiple of the highest digit's unit, and
    /// what that leaves. Sums of products begin with them.
    pub(super) centred: Aligned<i32>,
    /// For all groups, and zeros behind them.
    pub(super) groups: Vec<Groups>,
    /// What products of integers and [`Groups::units`] are multiples of; one if scales are of any size.
    pub(super) unit: f32,
    /// `[block][lane]`: what products of integers are multiples of if scales are of any size; else there are none.
    pub(super) lane_units: Aligned<f32>,
    /// For each lane of a block, its group counted from the block's first.
    pub(super) group_of_lane: [i32; LANES],
    /// log2 of the group size.
    pub(super) group_shift: u32,
}

/// What belongs to sixteen groups of weights.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Groups {
    /// Factors of scales, but where these are of any size; 0 where there is no group.
    pub(super) units: [f32; LANES],
    /// Sums of the activations, in units of [`Digits::unit`].
    pub(super) sums: [f32; LANES],
}

impl Digits {
    /// `None` if there is an infinity or a NaN, which no fixed-point number is.
    pub(super) fn new(codes: &Codes, group_size: usize, x: &[f32]) -> Option<Self> {
        let blocks = x.len().div_ceil(codes.block());
        let mut this = Self {
            digits: Aligned::new(blocks * DIGITS * codes.block()),
            centred: Aligned::new(blocks * 2 * LANES),
            groups: vec![Groups::default(); (x.len() / group_size).div_ceil(LANES) + 1],
            unit: 1.,
            lane_units: Aligned::new(if codes.any_scale { blocks * LANES } else { 0 }),
            group_of_lane: [0; LANES],
            group_shift: group_size.trailing_zeros(),
        };
        for unit in 0..LANES {
            this.group_of_lane[codes.lane_of_unit(unit)] = (unit * 4 * codes.vectors() / group_size) as i32;
        }
        // SAFETY: this instruction set is in use only where its features were detected.
        unsafe {
            this.measure(codes, group_size, x)?;
            match codes.vectors() {
                2 => this.fill::<2>(codes, x),
                4 => this.fill::<4>(codes, x),
                _ => this.fill::<8>(codes, x),
            }
        }
        this.scale_units(codes);
        Some(this)
    }

    /// Finds units of the groups and sums, in these units. The loops become those of the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn measure(&mut self, codes: &Codes, group_size: usize, x: &[f32]) -> Option<()> {
        for (index, x) in x.chunks(group_size).enumerate() {
            let group = self.groups.get_mut(index / LANES)?;
            let unit = unit_of(x)?;
            group.units[index % LANES] = unit;
            // E2M1 elements have no biases to multiply.
            group.sums[index % LANES] = if codes.e2m1 { 0. } else { (sum(x) / f64::from(unit)) as f32 };
        }
        Some(())
    }

    /// Brings units to where their products with scales are normal numbers, and sums to [`Digits::unit`].
    fn scale_units(&mut self, codes: &Codes) {
        /// Sums of integers are below 2^33: their products with units below one leave room for any usual scale.
        const HEADROOM: f32 = 4096.;
        if codes.any_scale {
            self.lane_units.iter_mut().for_each(|unit| *unit *= codes.unit);
            return;
        }
        let units = self.groups.iter().flat_map(|groups| &groups.units);
        let largest = units.fold(0f32, |largest, unit| largest.max(*unit));
        self.unit = largest * codes.unit * HEADROOM;
        for groups in &mut self.groups {
            for (unit, sum) in groups.units.iter_mut().zip(&mut groups.sums) {
                *unit = *unit / largest / HEADROOM;
                *sum *= *unit / codes.unit;
            }
        }
    }

    /// Writes digits, centres and what is left of them, sixteen lanes at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn fill<const VECTORS: usize>(&mut self, codes: &Codes, x: &[f32]) {
        let mut first_element = [0i32; LANES];
        for unit in 0..LANES {
            first_element[codes.lane_of_unit(unit)] = (unit * 4 * VECTORS) as i32;
        }
        // SAFETY (loads and stores): sixteen numbers each.
        let first_element = unsafe { _mm512_loadu_si512(first_element.as_ptr().cast()) };
        let centre = _mm512_set1_epi32(-codes.centre);
        let mut last = [0f32; 64 * 8];
        let places = self.digits.chunks_exact_mut(DIGITS * VECTORS * 64);
        let lanes = self.centred.chunks_exact_mut(2 * LANES);
        for (block, ((x, places), centred)) in x.chunks(64 * VECTORS).zip(places).zip(lanes).enumerate() {
            let x = if x.len() == 64 * VECTORS {
                x
            } else {
                last.iter_mut().zip(x).for_each(|(to, from)| *to = *from);
                &last[..64 * VECTORS]
            };
            let first_group = (block * 64 * VECTORS) >> self.group_shift;
            let groups = self.group_of_lane.map(|group| first_group + group as usize);
            let units = groups.map(|group| self.groups[group / LANES].units[group % LANES]);
            if let Some(place) = self.lane_units.chunks_exact_mut(LANES).nth(block) {
                place.copy_from_slice(&units);
            }
            // SAFETY: as above.
            let units = unsafe { _mm512_loadu_ps(units.as_ptr()) };
            // Behind the last group they are zero, as all numbers are.
            let inverse =
                _mm512_div_ps(_mm512_set1_ps(1.), _mm512_max_ps(units, _mm512_set1_ps(f32::MIN_POSITIVE)));
            let mut sum = _mm512_setzero_si512();
            // Four bytes of a digit make a lane: the neighbours that it multiplies.
            let mut digits = [[_mm512_setzero_si512(); VECTORS]; DIGITS];
            for vector in 0..VECTORS {
                for byte in 0..4 {
                    let element = codes.element_of_unit(vector, byte);
                    let index = _mm512_add_epi32(first_element, _mm512_set1_epi32(element as i32));
                    // SAFETY: indices are below 64 * VECTORS.
                    let number = unsafe { _mm512_i32gather_ps::<4>(index, x.as_ptr()) };
                    let mut rest = _mm512_cvtps_epi32(_mm512_mul_ps(number, inverse));
                    sum = _mm512_add_epi32(sum, rest);
                    for digit in (0..DIGITS).rev() {
                        // The lowest byte, signed, taken away and put in its place.
                        let value = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(rest));
                        let placed = _mm512_and_si512(value, _mm512_set1_epi32(0xFF));
                        let placed = _mm512_sllv_epi32(placed, _mm512_set1_epi32(8 * byte as i32));
                        digits[digit][vector] = _mm512_or_si512(digits[digit][vector], placed);
                        rest = _mm512_srai_epi32::<8>(_mm512_sub_epi32(rest, value));
                    }
                }
            }
            for (place, digit) in places.chunks_exact_mut(64).zip(digits.as_flattened()) {
                // SAFETY: as above.
                unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), *digit) };
            }
            // The product may have more than 32 bits, but not what is left of it.
            let highest = (1i32 << (2 * DIGIT_BITS)) as f32;
            let share = _mm512_set1_ps(-codes.centre as f32 / highest);
            let upper = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), share));
            let rest = _mm512_mullo_epi32(sum, centre);
            let rest = _mm512_sub_epi32(rest, _mm512_slli_epi32::<{ 2 * DIGIT_BITS }>(upper));
            // SAFETY: as above.
            unsafe {
                _mm512_storeu_si512(centred.as_mut_ptr().cast(), upper);
                _mm512_storeu_si512(centred[LANES..].as_mut_ptr().cast(), rest);
            }
        }
    }
}

/// What the activations of a group are multiples of; `None` if there is an infinity or a NaN.
#[inline(always)]
fn unit_of(group: &[f32]) -> Option<f32> {
    let bits = group.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
    let largest = f32::from_bits(bits);
    largest.is_finite().then(|| unit_for(largest))
}

/// The smallest power of two of which three signed digits of eight bits make numbers of up to this magnitude.
#[inline(always)]
pub(in crate::backend::cpu) fn unit_for(largest: f32) -> f32 {
    /// The largest number of three balanced digits.
    const LIMIT: f32 = 0x7F_7F7F as f32;
    let power_of_two = |log: i32| f32::from_bits(((log + 127) as u32) << 23);
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    let log = (exponent - 22).clamp(-126, 126);
    power_of_two(log + i32::from(largest * power_of_two(-log) > LIMIT))
}

/// The sum of a group's activations.
#[inline(always)]
fn sum(group: &[f32]) -> f64 {
    let mut sums = [0f64; 8];
    for eight in group.chunks_exact(8) {
        sums.iter_mut().zip(eight).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    sums.iter().sum()
}

/// Whether the sum of a lane can exceed 32 bits with all three digits, so that the lowest one's is added in f32. Eight
/// codes of 6 bits, at most 32 off their centre, just fit: 8 * 32 * 0x7F7F7F < 2^31.
pub(super) const fn splits_sum(bits: usize) -> bool {
    bits == 8
}
