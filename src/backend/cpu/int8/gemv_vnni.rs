//! One row of x times integer codes, with AVX-512 VNNI.
//!
//! An f32 kernel is bound by its arithmetic here: sixteen multiply-adds an instruction, plus the dequantization. `vpdpbusd`
//! multiplies 64 bytes an instruction. So x becomes fixed-point numbers of three signed limbs, each a byte
//! ([`FixedPoint`]), and codes are multiplied as the integers that they are:
//! `sum(q * x) = sum(q * x2) * 256^2 + sum(q * x1) * 256 + sum(q * x0)`, exactly. Only the fixed point rounds: the
//! activations that meet a group of weights have a unit of their own, and keep 23 bits, about as many as f32 keeps.
//!
//! Codes are taken relative to a zero point z in the middle of their range,
//! `q * s + b = (2 * q - z) * (s / 2) + (b + z * s / 2)`, so that sums stay small even where all activations have one
//! sign: `z * sum(x)` is subtracted in integers, and the second term is a short dot product over the groups of a row.
//! E2M1 elements, doubled, are integers too, and so are those of GGML's IQ types. E4M3 elements are not: they have a kernel in `f32/fp8_gemv.rs`.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::fast_kernel::{each_row_of_x, Digits, NotRepresentable, PreparedX, RowKernel};
use super::super::group_params::ROWS_PER_PASS;
use super::super::isa::avx512::Avx512Vnni;
use super::super::matrix::PackedMatrix;
use super::super::row_gemv::scales::{output_multiplier, Scaling};
use super::super::row_gemv::{self, load, sums_of_lanes, Order, Pass, Room, LANES, ROWS};
use super::super::tasks::Threads;
use super::codes::{IntegerCodes, Kind};
use super::fixed_point::FixedPoint;
use super::outlier_windows::{most_by_windows, Windows};
use super::outliers::Found;
use super::tables::{AFFINE, IQ1_M, IQ1_S, IQ2, IQ3_S, IQ3_XXS, IQ4, MXFP4, NVFP4};
use super::units::LIMB_BITS;
use super::unpack::{splits_sum, unpack_vector};
use crate::format::{Bits, IqTable};
use crate::QuantFormat;
use std::arch::x86_64::*;
use std::ptr;

/// Bytes of codes from which on a row is long.
const LONG_ROW: usize = 1024;

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Int8GemvVnni {
    isa: Avx512Vnni,
    order: Order,
}

impl Int8GemvVnni {
    pub(in super::super) fn new(isa: Avx512Vnni) -> Self {
        Self { isa, order: Order::best() }
    }

    /// The kernels of all CPUs.
    #[cfg(test)]
    pub(in super::super) fn all(isa: Avx512Vnni) -> [Self; 3] {
        Order::ALL.map(|order| Self { isa, order })
    }
}

impl RowKernel for Int8GemvVnni {
    fn supports(&self, format: QuantFormat) -> bool {
        IntegerCodes::of(format).is_some()
    }

    fn prepare(
        &self,
        format: QuantFormat,
        k: usize,
        x: &[f32],
        digits: Digits,
    ) -> Result<Box<dyn PreparedX>, NotRepresentable> {
        let codes = IntegerCodes::of(format).ok_or(NotRepresentable)?;
        let (isa, group_size) = (self.isa.avx512, format.group_size());
        let found = Found::new(isa, (x, k), group_size, (digits, most_by_windows(k)), Threads::This)?;
        let x = found.taken_out_of(x, k);
        let row = |(row, x)| {
            let outliers = Windows::new(format, k, found.of_row(row));
            Ok((FixedPoint::new(isa, &codes, group_size, x, digits.count)?, outliers))
        };
        let rows = x.chunks_exact(k).enumerate().map(row).collect::<Result<_, _>>()?;
        Ok(Box::new(Prepared { kernel: *self, codes, rows }))
    }
}

/// Rows of x as fixed-point numbers for these codes, and what was taken out of each.
struct Prepared {
    kernel: Int8GemvVnni,
    codes: IntegerCodes,
    rows: Vec<(FixedPoint, Windows)>,
}

impl PreparedX for Prepared {
    fn m(&self) -> usize {
        self.rows.len()
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let Some((first, _)) = self.rows.first() else { return };
        let m = self.rows.len();
        // Rows of x have as many groups.
        let rows_of_pass = row_gemv::rows_of_pass(matrix);
        let mut room = Room::new(matrix, &self.scaling(first), rows_of_pass);
        let row_bytes = matrix.k * matrix.format.bits() / 8;
        let apart = self.kernel.order.rows_of_quarter(out.len() / m, row_bytes, rows_of_pass);
        let (quarters, rest) = out.split_at_mut(ROWS * apart * m);
        self.quarters(matrix, (first_row, apart), (&mut room, rows_of_pass / ROWS), quarters);
        let first_row = first_row + ROWS * apart;
        room.fetch_first(matrix, first_row, rest.len() / m, 1);
        // Every row of x, and its outliers, meet a few rows of the weight while these are in a near cache.
        for (pass, out) in rest.chunks_mut(rows_of_pass * m).enumerate() {
            each_row_of_x(m, out, |index, sums| {
                if let Some(x) = self.rows.get(index) {
                    self.multiply(matrix, x, &mut room, (first_row + pass * rows_of_pass, sums));
                }
            });
        }
    }
}

impl Prepared {
    fn scaling<'a>(&self, x: &'a FixedPoint) -> Scaling<'a> {
        Scaling::by_groups(&x.groups, self.codes.center as f32 * self.codes.unit)
    }

    /// The products of [`ROWS`] times `apart` rows, one of each quarter of them together, `[rows, m]`; so many of each in a pass.
    fn quarters(
        &self,
        matrix: &PackedMatrix,
        (first_row, apart): (usize, usize),
        (room, len): (&mut Room, usize),
        out: &mut [f32],
    ) {
        if apart == 0 {
            return;
        }
        (0..ROWS).for_each(|run| room.fetch_first(matrix, first_row + run * apart, apart, ROWS));
        let (isa, m) = (self.kernel.isa, self.rows.len());
        let sums = &mut [0.; ROWS_PER_PASS][..ROWS * len];
        for at in (0..apart).step_by(len) {
            for (index, (x, outliers)) in self.rows.iter().enumerate() {
                let (first_row, scaling) = (first_row + at, self.scaling(x));
                let of_runs = (first_row, apart, &mut *sums);
                row_gemv::dot_runs(isa.avx512, matrix, (&scaling, room), of_runs, |pass, sums| {
                    self.dot(pass, x, output_multiplier(matrix), sums);
                });
                for (run, sums) in sums.chunks_mut(len).enumerate() {
                    outliers.add_products(isa, matrix, first_row + run * apart, sums, &mut room.units);
                    let out = out.iter_mut().skip((run * apart + at) * m + index).step_by(m);
                    out.zip(sums).for_each(|(out, sum)| *out = *sum);
                }
            }
        }
    }

    /// The products of the rows of a pass with a row of x.
    fn multiply(
        &self,
        matrix: &PackedMatrix,
        (x, outliers): &(FixedPoint, Windows),
        room: &mut Room,
        (first_row, sums): (usize, &mut [f32]),
    ) {
        let (isa, scaling) = (self.kernel.isa, self.scaling(x));
        let output = (first_row, &mut *sums);
        row_gemv::dot_rows(isa.avx512, matrix, (&scaling, room), output, |pass, sums| {
            self.dot(pass, x, output_multiplier(matrix), sums);
        });
        outliers.add_products(isa, matrix, first_row, sums, &mut room.units);
    }

    /// The sums of a pass, times `multiplier`.
    fn dot(&self, pass: &Pass, x: &FixedPoint, multiplier: f32, sums: &mut [f32]) {
        let Int8GemvVnni { order, .. } = self.kernel;
        let (codes, sums) = (&self.codes, (x.unit * multiplier, sums));
        let alone = order == Order::Alone && pass.row_bytes() >= LONG_ROW;
        // SAFETY: the kernel proves that the CPU has the features of the functions.
        unsafe {
            match (x.count, alone, pass.has_streams()) {
                (1, false, false) => dot_pass::<1, ROWS, false>(codes, x, pass, sums),
                (2, false, false) => dot_pass::<2, ROWS, false>(codes, x, pass, sums),
                (_, false, false) => dot_pass::<3, ROWS, false>(codes, x, pass, sums),
                (1, true, _) => dot_pass::<1, 1, false>(codes, x, pass, sums),
                (2, true, _) => dot_pass::<2, 1, false>(codes, x, pass, sums),
                (_, true, _) => dot_pass::<3, 1, false>(codes, x, pass, sums),
                (1, false, true) => dot_pass::<1, ROWS, true>(codes, x, pass, sums),
                (2, false, true) => dot_pass::<2, ROWS, true>(codes, x, pass, sums),
                (_, false, true) => dot_pass::<3, ROWS, true>(codes, x, pass, sums),
            }
        }
    }
}

/// Dot products of the rows of a pass and `x`, times `unit`; so many rows together, each of which is a stream of its own or not.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")]
fn dot_pass<const LIMBS: usize, const TOGETHER: usize, const STREAMS: bool>(
    codes: &IntegerCodes,
    x: &FixedPoint,
    pass: &Pass<'_>,
    sums: (f32, &mut [f32]),
) {
    match codes.kind {
        // Codes of one to three bits take so many products for each byte that rows together are faster.
        Kind::Uint(Bits::One) => dot_blocks::<1, 8, AFFINE, LIMBS, ROWS, STREAMS>(x, pass, sums),
        Kind::Uint(Bits::Two) => dot_blocks::<2, 4, AFFINE, LIMBS, ROWS, STREAMS>(x, pass, sums),
        Kind::Uint(Bits::Three) => dot_blocks::<3, 2, AFFINE, LIMBS, ROWS, STREAMS>(x, pass, sums),
        Kind::Uint(Bits::Four) => dot_blocks::<4, 2, AFFINE, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
        Kind::Uint(Bits::Five) => dot_blocks::<5, 2, AFFINE, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
        Kind::Uint(Bits::Six) => dot_blocks::<6, 2, AFFINE, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
        Kind::Uint(Bits::Eight) => dot_blocks::<8, 2, AFFINE, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
        Kind::Mxfp4 => dot_blocks::<4, 2, MXFP4, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
        Kind::Nvfp4 => dot_blocks::<4, 2, NVFP4, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
        Kind::Iq4 => dot_blocks::<4, 2, IQ4, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
        Kind::Iq(IqTable::Iq1S) => dot_blocks::<2, 4, IQ1_S, LIMBS, ROWS, STREAMS>(x, pass, sums),
        Kind::Iq(IqTable::Iq1M) => dot_blocks::<3, 2, IQ1_M, LIMBS, ROWS, STREAMS>(x, pass, sums),
        Kind::Iq(IqTable::Iq2) => dot_blocks::<3, 2, IQ2, LIMBS, ROWS, STREAMS>(x, pass, sums),
        Kind::Iq(IqTable::Iq3Xxs) => dot_blocks::<4, 2, IQ3_XXS, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
        Kind::Iq(IqTable::Iq3S) => dot_blocks::<4, 2, IQ3_S, LIMBS, TOGETHER, STREAMS>(x, pass, sums),
    }
}

/// See [`dot_pass`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")]
fn dot_blocks<
    const BITS: usize,
    const VECTORS: usize,
    const KIND: u8,
    const LIMBS: usize,
    const TOGETHER: usize,
    const STREAMS: bool,
>(
    x: &FixedPoint,
    pass: &Pass<'_>,
    (unit, sums): (f32, &mut [f32]),
) {
    let block_bytes = const { 8 * VECTORS * BITS };
    let row_bytes = pass.row_bytes();
    let (blocks, whole) = (row_bytes.div_ceil(block_bytes), row_bytes / block_bytes);
    assert!(x.count == LIMBS && x.limbs.len() >= blocks * LIMBS * 64 * VECTORS);
    assert!(x.offsets.len() >= blocks * 2 * LANES);
    assert!(KIND != MXFP4 || x.lane_units.len() >= blocks * LANES);
    let last_group = (blocks.saturating_sub(1) * 64 * VECTORS) >> x.group_shift;
    assert!(pass.scales_per_row() >= last_group + LANES);
    for (part, sums) in sums.chunks_mut(ROWS).enumerate() {
        pass.fetch_ahead(part);
        let mut totals = [_mm512_setzero_ps(); ROWS];
        for (step, totals) in totals.as_chunks_mut::<TOGETHER>().0.iter_mut().enumerate() {
            let first = part * ROWS + step * TOGETHER;
            // SAFETY: the assertions cover every block of the rows.
            *totals = unsafe {
                dot_together::<BITS, VECTORS, KIND, LIMBS, TOGETHER, STREAMS>(x, pass, first, (whole, blocks))
            };
        }
        for (sum, total) in sums.iter_mut().zip(sums_of_lanes(totals)) {
            *sum = total * unit;
        }
    }
}

/// The products of some rows of so many blocks, the first of which are whole; lane by lane.
///
/// # Safety
/// `x` and scales cover the blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")]
unsafe fn dot_together<
    const BITS: usize,
    const VECTORS: usize,
    const KIND: u8,
    const LIMBS: usize,
    const TOGETHER: usize,
    const STREAMS: bool,
>(
    x: &FixedPoint,
    pass: &Pass<'_>,
    first_row: usize,
    (whole, blocks): (usize, usize),
) -> [__m512; TOGETHER] {
    let block_bytes = const { 8 * VECTORS * BITS };
    let (mut codes, mut scales) = ([ptr::null(); TOGETHER], [ptr::null(); TOGETHER]);
    // What rows have of an incomplete last block, and zeros.
    let mut ends = [[0u32; 32]; TOGETHER];
    let mut totals = [_mm512_setzero_ps(); TOGETHER];
    let (mut block, mut end) = (0, whole);
    // SAFETY: the caller vouches for the blocks. Whole ones lie in the rows, an incomplete one in `ends`; the biases of a row are a
    // vector.
    unsafe {
        for row in 0..TOGETHER {
            let of = pass.row(first_row + row);
            codes[row] = of.words.as_ptr().cast::<u8>();
            scales[row] = of.scales.as_ptr();
        }
        // One loop, lest the body of it be a function that is called.
        loop {
            while block < end {
                if STREAMS {
                    codes.iter().for_each(|row| pass.fetch.ahead_in_stream(*row, block, block_bytes));
                } else {
                    pass.fetch.ahead_of_rows(codes[0], block, TOGETHER * block_bytes);
                }
                totals = add_block::<BITS, VECTORS, KIND, LIMBS, TOGETHER>(x, codes, scales, block, totals);
                block += 1;
            }
            if block == blocks {
                break;
            }
            end = blocks;
            for row in 0..TOGETHER {
                let rest = pass.row(first_row + row).words.get(whole * block_bytes / 4..).unwrap_or_default();
                ends[row][..rest.len()].copy_from_slice(rest);
                codes[row] = ends[row].as_ptr().cast::<u8>().wrapping_sub(whole * block_bytes);
            }
        }
        // Last, since they are large: sums before them would be rounded as they are.
        for row in 0..TOGETHER {
            let biases = pass.row(first_row + row).biases;
            totals[row] = _mm512_add_ps(totals[row], _mm512_loadu_ps(biases.as_ptr()));
        }
        totals
    }
}

/// Multiplies a block of some rows, whose codes and scales begin at these addresses, and adds the products.
///
/// # Safety
/// `x` and scales cover the block; each row has its codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")]
unsafe fn add_block<
    const BITS: usize,
    const VECTORS: usize,
    const KIND: u8,
    const LIMBS: usize,
    const TOGETHER: usize,
>(
    x: &FixedPoint,
    codes: [*const u8; TOGETHER],
    scales: [*const f32; TOGETHER],
    block: usize,
    mut totals: [__m512; TOGETHER],
) -> [__m512; TOGETHER] {
    let block_bytes = const { 8 * VECTORS * BITS };
    // SAFETY: the caller vouches for what is loaded.
    unsafe {
        let (mut first, mut second) =
            ([_mm512_setzero_si512(); TOGETHER], [_mm512_setzero_si512(); TOGETHER]);
        for row in 0..TOGETHER {
            let at = codes[row].wrapping_add(block * block_bytes);
            first[row] = load(at, 0, block_bytes.min(64), block_bytes);
            second[row] = load(at, 64, block_bytes.saturating_sub(64), block_bytes);
        }
        let limbs = x.limbs.as_ptr().add(block * LIMBS * 64 * VECTORS);
        let offsets = x.offsets.as_ptr().add(block * 2 * LANES);
        let (highest, lowest) =
            (_mm512_loadu_si512(offsets.cast()), _mm512_loadu_si512(offsets.add(LANES).cast()));
        // A sum for each limb: instructions that share one would wait for each other.
        let mut sums = [[_mm512_setzero_si512(); LIMBS]; TOGETHER];
        for row in 0..TOGETHER {
            sums[row][0] = highest;
            sums[row][LIMBS - 1] = lowest;
        }
        for vector in 0..VECTORS {
            let mut integers = first;
            for row in 0..TOGETHER {
                integers[row] = unpack_vector::<BITS, KIND>(vector, first[row], second[row]);
            }
            for limb in 0..LIMBS {
                let x = _mm512_loadu_si512(limbs.add((limb * VECTORS + vector) * 64).cast());
                for row in 0..TOGETHER {
                    sums[row][limb] = _mm512_dpbusd_epi32(sums[row][limb], integers[row], x);
                }
            }
        }
        let group_of_lane = _mm512_loadu_si512(x.group_of_lane.as_ptr().cast());
        for row in 0..TOGETHER {
            let sums = sums[row];
            let mut sum = if LIMBS == 3 && splits_sum(BITS, KIND) {
                let high = _mm512_add_epi32(_mm512_slli_epi32::<LIMB_BITS>(sums[0]), sums[1]);
                let limb = _mm512_set1_ps((1 << LIMB_BITS) as f32);
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), limb, _mm512_cvtepi32_ps(sums[2]))
            } else {
                let mut all = sums[0];
                for limb in 1..LIMBS {
                    all = _mm512_add_epi32(_mm512_slli_epi32::<LIMB_BITS>(all), sums[limb]);
                }
                _mm512_cvtepi32_ps(all)
            };
            if KIND == MXFP4 {
                sum = _mm512_mul_ps(sum, _mm512_loadu_ps(x.lane_units.as_ptr().add(block * LANES)));
            }
            let scales = scales[row].add((block * 64 * VECTORS) >> x.group_shift);
            // Blocks of 128 have at most eight groups; shorter loads are less often two cache lines.
            let scales = match VECTORS {
                2 => _mm512_broadcast_f32x8(_mm256_loadu_ps(scales)),
                _ => _mm512_loadu_ps(scales),
            };
            totals[row] = _mm512_fmadd_ps(sum, _mm512_permutexvar_ps(group_of_lane, scales), totals[row]);
        }
    }
    totals
}
