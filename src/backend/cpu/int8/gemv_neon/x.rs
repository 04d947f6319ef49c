//! x as fixed-point numbers, for the NEON kernel. Plain loops: a row is prepared once for all rows of a weight.

use super::super::super::aligned::Aligned;
use super::super::super::fast_kernel::NotRepresentable;
use super::super::codes::{IntegerCodes, Kind};
use super::super::units::{normalize, sum, unit_of, LIMB_BITS};
use super::LANES;

/// How codes of some format are read.
#[derive(Clone, Copy)]
pub(super) struct Geometry {
    pub(super) bits: usize,
    group_size: usize,
    /// log2 of it.
    pub(super) group_shift: u32,
    /// Vectors of sixteen codes in a block.
    pub(super) vectors: usize,
    /// The lanes of a block that have codes of one group: 1, 2, or all.
    pub(super) lanes_of_group: usize,
}

impl Geometry {
    pub(super) fn of(codes: &IntegerCodes, group_size: usize) -> Self {
        let bits = codes.bits().get();
        let vectors = match bits {
            // As many as come from one load.
            1 | 2 | 4 => 8 / bits,
            // In their order: a block has codes of one group.
            _ if group_size < 32 => 1,
            _ => 2,
        };
        let lanes_of_group = match bits {
            1 | 2 | 4 => (group_size / (4 * vectors)).min(LANES),
            _ => LANES,
        };
        Self { bits, group_size, group_shift: group_size.trailing_zeros(), vectors, lanes_of_group }
    }

    /// Elements of a lane that are neighbours.
    pub(super) fn of_lane(&self) -> usize {
        match self.bits {
            1 | 2 | 4 => 4 * self.vectors,
            _ => 4,
        }
    }

    /// Elements of a block.
    fn block(&self) -> usize {
        16 * self.vectors
    }

    /// The vector and the byte of it that have an element of a block, as [`load_block`](super::unpack::load_block) leaves codes.
    fn place(&self, element: usize) -> (usize, usize) {
        match self.bits {
            1 | 2 | 4 => (element % self.vectors, element / self.vectors),
            _ => (element / 16, element % 16),
        }
    }
}

/// A row of x in the order of codes. The numbers that meet a group of weights are multiples of its unit.
pub(super) struct XRow {
    pub(super) geometry: Geometry,
    /// Digits of a number.
    pub(super) digits: usize,
    /// `[block][digit, highest first][vector][16]`.
    pub(super) bytes: Aligned<i8>,
    /// Multipliers of scales, for each group.
    pub(super) units: Vec<f32>,
    /// Sums of the activations of a group, which biases are multiplied by.
    pub(super) sums: Vec<f32>,
    /// What all sums are multiples of.
    pub(super) unit: f32,
    /// The unit of integers for each block, which is a group, if scales are E8M0; else there are none.
    pub(super) block_units: Vec<f32>,
}

impl XRow {
    /// # Errors
    /// If there is an infinity or a NaN, which no fixed-point number is.
    pub(super) fn new(
        codes: &IntegerCodes,
        geometry: Geometry,
        x: &[f32],
        digits: usize,
    ) -> Result<Self, NotRepresentable> {
        let blocks = x.len().div_ceil(geometry.block());
        let groups = x.len() / geometry.group_size;
        let mut this = Self {
            geometry,
            digits,
            bytes: Aligned::new(blocks * digits * geometry.block()),
            units: Vec::with_capacity(groups),
            sums: Vec::with_capacity(groups),
            unit: 1.,
            block_units: Vec::new(),
        };
        for (group, x) in x.chunks_exact(geometry.group_size).enumerate() {
            let unit = unit_of(x, digits).ok_or(NotRepresentable)?;
            this.units.push(unit);
            // Elements of tables have no biases to multiply.
            this.sums.push(if codes.has_biases() { (sum(x) / f64::from(unit)) as f32 } else { 0. });
            this.fill(group * geometry.group_size, x, 1. / unit);
        }
        this.scale_units(codes);
        Ok(this)
    }

    /// Writes the digits of a group's numbers, the first of which is `x` number `first`.
    fn fill(&mut self, first: usize, x: &[f32], inverse: f32) {
        let Geometry { vectors, .. } = self.geometry;
        for (element, x) in (first..).zip(x) {
            let (block, element) = (element / self.geometry.block(), element % self.geometry.block());
            let (vector, byte) = self.geometry.place(element);
            let mut rest = (x * inverse).round_ties_even() as i32;
            for digit in (0..self.digits).rev() {
                // The lowest byte, signed, is subtracted and shifted out.
                let value = rest as i8;
                let at = ((block * self.digits + digit) * vectors + vector) * 16 + byte;
                if let Some(to) = self.bytes.get_mut(at) {
                    *to = value;
                }
                rest = (rest - i32::from(value)) >> LIMB_BITS;
            }
        }
    }

    /// Scales units and sums to [`XRow::unit`].
    fn scale_units(&mut self, codes: &IntegerCodes) {
        if matches!(codes.kind, Kind::Mxfp4) {
            self.block_units = self.units.iter().map(|unit| unit * codes.unit).collect();
            // Scales stay as they are.
            self.units.fill(1.);
            return;
        }
        let largest = self.units.iter().fold(0f32, |largest, unit| largest.max(*unit));
        self.unit = normalize(codes, largest, self.units.iter_mut().zip(&mut self.sums));
    }
}
