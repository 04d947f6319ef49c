//! x as fixed-point numbers, for the VNNI kernel.
//!
//! A number is three signed limbs of eight bits, or fewer where less precision is asked for. The numbers that meet a group
//! of weights share a unit.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::aligned::Aligned;
use super::super::fast_kernel::NotRepresentable;
use super::super::isa::avx512::Avx512;
use super::super::row_gemv::scales::GroupActivations;
use super::super::row_gemv::LANES;
use super::codes::{IntegerCodes, Kind};
use super::units::{normalize, sum, unit_of, LIMB_BITS};
use std::arch::x86_64::*;

/// A row of x in the order of [`IntegerCodes`]. The numbers that meet a group of weights are multiples of its unit.
pub(super) struct FixedPoint {
    /// Limbs of a number.
    pub(super) count: usize,
    /// `[block][limb, highest first][vector][64]`.
    pub(super) limbs: Aligned<u8>,
    /// `[block][2][lane]`: `-center *` the sum of the lane's numbers, as a multiple of the highest limb's unit, and
    /// the rest; with one limb, the rest is all. Sums of products begin with them.
    pub(super) offsets: Aligned<i32>,
    /// For all groups, and zeros behind them.
    pub(super) groups: Vec<GroupActivations>,
    /// The unit of integers times [`GroupActivations::units`]; one if scales are E8M0.
    pub(super) unit: f32,
    /// `[block][lane]`: the unit of integers if scales are E8M0; else there are none.
    pub(super) lane_units: Aligned<f32>,
    /// For each lane of a block, its group counted from the block's first.
    pub(super) group_of_lane: [i32; LANES],
    /// log2 of the group size.
    pub(super) group_shift: u32,
}

impl FixedPoint {
    /// # Errors
    /// If there is an infinity or a NaN, which no fixed-point number is.
    pub(super) fn new(
        _isa: Avx512,
        codes: &IntegerCodes,
        group_size: usize,
        x: &[f32],
        count: usize,
    ) -> Result<Self, NotRepresentable> {
        let blocks = x.len().div_ceil(codes.block());
        let mut this = Self {
            count,
            limbs: Aligned::new(blocks * count * codes.block()),
            offsets: Aligned::new(blocks * 2 * LANES),
            groups: vec![GroupActivations::default(); (x.len() / group_size).div_ceil(LANES) + 1],
            unit: 1.,
            lane_units: Aligned::new(if matches!(codes.kind, Kind::Mxfp4) { blocks * LANES } else { 0 }),
            group_of_lane: [0; LANES],
            group_shift: group_size.trailing_zeros(),
        };
        for unit in 0..LANES {
            this.group_of_lane[codes.lane_of_unit(unit)] = (unit * 4 * codes.vectors() / group_size) as i32;
        }
        // SAFETY: `_isa` proves that the CPU has the features of the functions.
        unsafe {
            this.measure(codes, group_size, x).ok_or(NotRepresentable)?;
            match count {
                1 => this.fill_vectors::<1>(codes, x),
                2 => this.fill_vectors::<2>(codes, x),
                _ => this.fill_vectors::<3>(codes, x),
            }
        }
        this.scale_units(codes);
        Ok(this)
    }

    /// Finds units of the groups and sums, in these units. The features make the loops wide.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn measure(&mut self, codes: &IntegerCodes, group_size: usize, x: &[f32]) -> Option<()> {
        for (index, x) in x.chunks(group_size).enumerate() {
            let group = self.groups.get_mut(index / LANES)?;
            let unit = unit_of(x, self.count)?;
            group.units[index % LANES] = unit;
            // Elements of tables have no biases to multiply.
            group.sums[index % LANES] =
                if codes.has_biases() { (sum(x) / f64::from(unit)) as f32 } else { 0. };
        }
        Some(())
    }

    /// Scales units and sums to [`FixedPoint::unit`].
    fn scale_units(&mut self, codes: &IntegerCodes) {
        if matches!(codes.kind, Kind::Mxfp4) {
            self.lane_units.iter_mut().for_each(|unit| *unit *= codes.unit);
            return;
        }
        let units = self.groups.iter().flat_map(|groups| &groups.units);
        let largest = units.fold(0f32, |largest, unit| largest.max(*unit));
        let groups = self.groups.iter_mut().flat_map(|groups| groups.units.iter_mut().zip(&mut groups.sums));
        self.unit = normalize(codes, largest, groups);
    }

    /// See [`Self::fill`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn fill_vectors<const LIMBS: usize>(&mut self, codes: &IntegerCodes, x: &[f32]) {
        match codes.vectors() {
            2 => self.fill::<2, LIMBS>(codes, x),
            4 => self.fill::<4, LIMBS>(codes, x),
            _ => self.fill::<8, LIMBS>(codes, x),
        }
    }

    /// Writes limbs and offsets, sixteen lanes at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn fill<const VECTORS: usize, const LIMBS: usize>(&mut self, codes: &IntegerCodes, x: &[f32]) {
        let mut first_element = [0i32; LANES];
        for unit in 0..LANES {
            first_element[codes.lane_of_unit(unit)] = (unit * 4 * VECTORS) as i32;
        }
        // SAFETY: the array has the sixteen numbers of a vector.
        let first_element = unsafe { _mm512_loadu_si512(first_element.as_ptr().cast()) };
        let center = _mm512_set1_epi32(-codes.center);
        let mut last = [0f32; 64 * 8];
        let out = self.limbs.chunks_exact_mut(LIMBS * VECTORS * 64);
        let lanes = self.offsets.chunks_exact_mut(2 * LANES);
        for (block, ((x, out), offsets)) in x.chunks(64 * VECTORS).zip(out).zip(lanes).enumerate() {
            let x = if x.len() == 64 * VECTORS {
                x
            } else {
                last.iter_mut().zip(x).for_each(|(to, from)| *to = *from);
                &last[..64 * VECTORS]
            };
            let first_group = (block * 64 * VECTORS) >> self.group_shift;
            let groups = self.group_of_lane.map(|group| first_group + group as usize);
            let units = groups.map(|group| self.groups[group / LANES].units[group % LANES]);
            if let Some(to) = self.lane_units.chunks_exact_mut(LANES).nth(block) {
                to.copy_from_slice(&units);
            }
            // SAFETY: the array has the sixteen numbers of a vector.
            let units = unsafe { _mm512_loadu_ps(units.as_ptr()) };
            // Behind the last group they are zero, as all numbers are.
            let inverse =
                _mm512_div_ps(_mm512_set1_ps(1.), _mm512_max_ps(units, _mm512_set1_ps(f32::MIN_POSITIVE)));
            let mut sum = _mm512_setzero_si512();
            // Four bytes of a limb make a lane: the neighbours that it multiplies.
            let mut limbs = [[_mm512_setzero_si512(); VECTORS]; LIMBS];
            for vector in 0..VECTORS {
                for byte in 0..4 {
                    let element = codes.element_of_unit(vector, byte);
                    let index = _mm512_add_epi32(first_element, _mm512_set1_epi32(element as i32));
                    // SAFETY: `x` has 64 * VECTORS numbers. An index is that of a unit in the block plus that of an element in
                    // the unit, and so below.
                    let number = unsafe { _mm512_i32gather_ps::<4>(index, x.as_ptr()) };
                    let mut rest = _mm512_cvtps_epi32(_mm512_mul_ps(number, inverse));
                    sum = _mm512_add_epi32(sum, rest);
                    for limb in (0..LIMBS).rev() {
                        // The lowest byte, signed, is subtracted and shifted to its position.
                        let value = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(rest));
                        let placed = _mm512_and_si512(value, _mm512_set1_epi32(0xFF));
                        let placed = _mm512_sllv_epi32(placed, _mm512_set1_epi32(8 * byte as i32));
                        limbs[limb][vector] = _mm512_or_si512(limbs[limb][vector], placed);
                        rest = _mm512_srai_epi32::<8>(_mm512_sub_epi32(rest, value));
                    }
                }
            }
            for (to, limb) in out.chunks_exact_mut(64).zip(limbs.as_flattened()) {
                // SAFETY: a chunk has the 64 bytes of a vector.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), *limb) };
            }
            // -center * sum may have more than 32 bits; the rest below the upper part has not.
            let shift = const { (LIMBS as u32 - 1) * LIMB_BITS };
            let share = if LIMBS == 1 { 0. } else { -codes.center as f32 / (1i32 << shift) as f32 };
            let upper = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(share)));
            let rest = _mm512_mullo_epi32(sum, center);
            let rest = _mm512_sub_epi32(rest, _mm512_sllv_epi32(upper, _mm512_set1_epi32(shift as i32)));
            // SAFETY: the chunk has twice the sixteen numbers of a vector.
            unsafe {
                _mm512_storeu_si512(offsets.as_mut_ptr().cast(), upper);
                _mm512_storeu_si512(offsets[LANES..].as_mut_ptr().cast(), rest);
            }
        }
    }
}
