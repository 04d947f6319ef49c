//! One row of x times integer codes, with AVX2.
//!
//! As in [`gemv_vnni`], x becomes fixed-point numbers, and codes are multiplied as the integers that they are. `vpmaddubsw`
//! multiplies 32 bytes of codes with 32 digits of x and adds neighbours in 16 bits, in which products of codes of six bits
//! and less have room: as many of them are added there as fit ([`sums_in_16_bits`]), and then in 32 bits. Codes of eight
//! bits do not fit. They are widened, and meet digits of 12 or 16 bits ([`word_digits`]).
//!
//! Codes of 1, 2 and 4 bits are shifted and masked, so that a lane of 32 bits covers neighbours ([`XRow`] says which);
//! all others are unpacked in their order.
//!
//! [`gemv_vnni`]: super::gemv_vnni

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

pub(super) mod unpack;
mod x;

use super::super::aligned::Aligned;
use super::super::fast_kernel::{each_row_of_x, Digits, NotRepresentable, PreparedX, RowKernel};
use super::super::group_params::ROWS_PER_PASS;
use super::super::isa::avx2::Avx2;
use super::super::matrix::PackedMatrix;
use super::super::row_gemv::Fetch;
use super::super::tasks::Threads;
use super::codes::{IntegerCodes, Kind};
use super::outliers::{most_by_columns, Found, Outliers};
use super::tables::{kind_of, with_layout, MXFP4};
use crate::format::Bits;
use crate::QuantFormat;
use std::arch::x86_64::*;
use unpack::{load_block, sums_in_16_bits};
use x::{block_digits, multiply, parts, word_digits, Geometry, XRow};

/// 32-bit lanes of a vector.
const LANES: usize = 8;

/// Rows of the weight whose lanes are summed together.
const ROWS: usize = 4;

/// How many bytes ahead of the codes that are multiplied others are fetched.
const AHEAD: usize = 4096;

/// How many rows ahead scales and biases are fetched.
const ROWS_AHEAD: usize = 4 * ROWS_PER_PASS;

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Int8GemvAvx2 {
    isa: Avx2,
}

impl Int8GemvAvx2 {
    pub(in super::super) fn new(isa: Avx2) -> Self {
        Self { isa }
    }
}

/// The codes of a format that the kernel has room for.
fn codes_of(format: QuantFormat) -> Option<IntegerCodes> {
    let codes = IntegerCodes::of(format)?;
    match codes.kind {
        Kind::Uint(Bits::Eight) if format.group_size() < 32 => None,
        // Integers up to 240 have no room.
        Kind::Iq4 => None,
        Kind::Uint(_) | Kind::Mxfp4 | Kind::Nvfp4 | Kind::Iq(_) => Some(codes),
    }
}

impl RowKernel for Int8GemvAvx2 {
    fn supports(&self, format: QuantFormat) -> bool {
        codes_of(format).is_some()
    }

    fn prepare(
        &self,
        format: QuantFormat,
        k: usize,
        x: &[f32],
        digits: Digits,
    ) -> Result<Box<dyn PreparedX>, NotRepresentable> {
        let codes = codes_of(format).ok_or(NotRepresentable)?;
        let group_size = format.group_size();
        let found = Found::new(self.isa, (x, k), group_size, (digits, most_by_columns(k)), Threads::This)?;
        let x = found.taken_out_of(x, k);
        let geometry = Geometry::of(&codes, group_size);
        let rows = x.chunks_exact(k).map(|x| XRow::new(self.isa, &codes, geometry, x, digits.count));
        let rows = rows.collect::<Result<_, _>>()?;
        Ok(Box::new(Prepared { codes, rows, outliers: found.by_columns(), _isa: self.isa }))
    }
}

/// Rows of x as fixed-point numbers for these codes.
struct Prepared {
    codes: IntegerCodes,
    rows: Vec<XRow>,
    outliers: Outliers,
    /// The CPU has the features of all functions here.
    _isa: Avx2,
}

impl PreparedX for Prepared {
    fn m(&self) -> usize {
        self.rows.len()
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        // SAFETY: `_isa` proves that the CPU has the features of the function.
        unsafe { self.rows_avx2(matrix, first_row, out) }
    }
}

impl Prepared {
    /// See [`PreparedX::rows`].
    #[target_feature(enable = "avx2,fma,f16c")]
    fn rows_avx2(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let m = self.rows.len().max(1);
        let groups = matrix.groups_per_row();
        let [mut scales, mut biases] = [(); 2].map(|()| vec![0f32; ROWS_PER_PASS * groups]);
        let mut scaled = Scaled::new(groups);
        // Every row of x, and its outliers, meet a few rows of the weight while these are in a near cache.
        for (pass, out) in out.chunks_mut(ROWS_PER_PASS * m).enumerate() {
            let first_row = first_row + pass * ROWS_PER_PASS;
            let rows = out.len() / m;
            for (ahead, bytes) in matrix.scales_from(first_row + ROWS_AHEAD) {
                Fetch::Second.bytes(ahead, ROWS_PER_PASS * bytes);
            }
            // Rows lie one behind the other: their groups are those of one long row.
            matrix.row_params(first_row, 0..rows * groups, &mut scales, &mut biases);
            each_row_of_x(m, out, |index, sums| {
                if let Some(x) = self.rows.get(index) {
                    let center = self.codes.center as f32 * self.codes.unit;
                    scaled.fill((&scales, &biases), (rows, groups), x, center);
                    self.dot_pass(x, (matrix, first_row), &scaled, sums);
                }
            });
            self.outliers.add_products(matrix, first_row, m, out);
        }
    }

    /// Dot products of rows of a weight with `x`, one for each sum.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn dot_pass(&self, x: &XRow, of: (&PackedMatrix, usize), scaled: &Scaled, sums: &mut [f32]) {
        /// The function for these bits, vectors and kind, with as many digits as x has.
        macro_rules! dot {
            ($bits:literal, $vectors:literal, $kind:ident) => {
                match x.digits {
                    1 => dot_rows::<$bits, $vectors, $kind, 1>(x, of, scaled, sums),
                    2 => dot_rows::<$bits, $vectors, $kind, 2>(x, of, scaled, sums),
                    // Codes of eight bits have two at most.
                    _ => dot_rows::<$bits, $vectors, $kind, { 3 - $bits / 8 }>(x, of, scaled, sums),
                }
            };
        }
        // `codes_of` has no IQ4.
        with_layout!((x.geometry.bits, x.geometry.vectors, kind_of(self.codes.kind)), dot)
    }
}

/// Scales of the rows of a pass times the units of x, and what biases add.
struct Scaled {
    /// For each row, partial sums of the bias term, one for each lane, then a scale for each group, and zeros.
    all: Aligned<f32>,
    stride: usize,
}

impl Scaled {
    fn new(groups: usize) -> Self {
        // A vector may be read from the last group on.
        let stride = LANES + (groups + LANES).next_multiple_of(LANES);
        Self { all: Aligned::new(ROWS_PER_PASS * stride), stride }
    }

    /// Those of some rows, with so many groups in each. `center *` scales are added to biases.
    #[target_feature(enable = "avx2,fma")]
    fn fill(
        &mut self,
        (scales, biases): (&[f32], &[f32]),
        (rows, groups): (usize, usize),
        x: &XRow,
        center: f32,
    ) {
        let whole = groups / LANES * LANES;
        assert!(scales.len() >= rows * groups && biases.len() >= rows * groups);
        assert!(x.units.len() >= groups && x.sums.len() >= groups && LANES + groups <= self.stride);
        let center_of_lanes = _mm256_set1_ps(center);
        for (row, to) in self.all.chunks_exact_mut(self.stride).take(rows).enumerate() {
            let (scales, biases) = (&scales[row * groups..][..groups], &biases[row * groups..][..groups]);
            let (totals, to) = to.split_at_mut(LANES);
            // SAFETY: the assertions: all have the numbers of whole vectors of groups.
            unsafe {
                let mut total = _mm256_setzero_ps();
                for first in (0..whole).step_by(LANES) {
                    let scales = _mm256_loadu_ps(scales.as_ptr().add(first));
                    let biases = _mm256_loadu_ps(biases.as_ptr().add(first));
                    let units = _mm256_loadu_ps(x.units.as_ptr().add(first));
                    let sums = _mm256_loadu_ps(x.sums.as_ptr().add(first));
                    _mm256_storeu_ps(to.as_mut_ptr().add(first), _mm256_mul_ps(scales, units));
                    let biases = _mm256_fmadd_ps(center_of_lanes, scales, biases);
                    total = _mm256_fmadd_ps(biases, sums, total);
                }
                _mm256_storeu_ps(totals.as_mut_ptr(), total);
            }
            for group in whole..groups {
                to[group] = scales[group] * x.units[group];
                let bias = center.mul_add(scales[group], biases[group]);
                totals[group - whole] = bias.mul_add(x.sums[group], totals[group - whole]);
            }
        }
    }
}

/// See [`Prepared::dot_pass`].
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_rows<const BITS: usize, const VECTORS: usize, const KIND: u8, const DIGITS: usize>(
    x: &XRow,
    (matrix, first_row): (&PackedMatrix, usize),
    scaled: &Scaled,
    sums: &mut [f32],
) {
    let block_bytes = const { 4 * VECTORS * BITS };
    let block_digits = const { block_digits(BITS, VECTORS) * DIGITS };
    let geometry = x.geometry;
    let (words, count) = matrix.rows_words(first_row, sums.len());
    let row_bytes = words.len() / count.max(1) * 4;
    let (blocks, whole) = (row_bytes.div_ceil(block_bytes), row_bytes / block_bytes);
    // Blocks of other widths are not larger than groups, of which rows have whole ones.
    assert!(count == sums.len() && (blocks == whole || block_bytes <= 32));
    assert!(geometry.bits == BITS && geometry.vectors == VECTORS && x.digits == DIGITS);
    assert!(
        x.bytes.len() >= blocks * block_digits && x.offsets.len() >= blocks * parts(BITS, DIGITS) * LANES
    );
    assert!(KIND != MXFP4 || x.lane_units.len() >= blocks * LANES);
    let last_group = (blocks.saturating_sub(1) * 32 * VECTORS) >> geometry.group_shift;
    assert!(LANES + last_group + LANES <= scaled.stride && count * scaled.stride <= scaled.all.len());
    let mut rows = words.chunks_exact((row_bytes / 4).max(1)).zip(scaled.all.chunks_exact(scaled.stride));
    for sums in sums.chunks_mut(ROWS) {
        let mut totals = [_mm256_setzero_ps(); ROWS];
        for (total, (words, scaled)) in totals.iter_mut().zip(&mut rows) {
            // One row after the other is one stream of bytes, which a CPU fetches by itself best.
            let codes = words.as_ptr().cast::<u8>();
            let scales = scaled.as_ptr().wrapping_add(LANES);
            // SAFETY: a row begins with a vector of what biases add. The assertions cover every block; whole ones lie in
            // the row, an incomplete one in `end`, with zeros behind it, and less than a block is copied there.
            unsafe {
                for block in 0..whole {
                    let at = codes.wrapping_add(block * block_bytes);
                    Fetch::Second.bytes(at.wrapping_add(AHEAD), block_bytes);
                    *total = add_block::<BITS, VECTORS, KIND, DIGITS>(x, at, scales, block, *total);
                }
                if whole < blocks {
                    let mut end = [0u8; 32];
                    let rest = row_bytes - whole * block_bytes;
                    std::ptr::copy_nonoverlapping(codes.add(whole * block_bytes), end.as_mut_ptr(), rest);
                    *total = add_block::<BITS, VECTORS, KIND, DIGITS>(x, end.as_ptr(), scales, whole, *total);
                }
                // Last, since it may be far larger than what the blocks add.
                *total = _mm256_add_ps(*total, _mm256_loadu_ps(scaled.as_ptr()));
            }
        }
        for (sum, total) in sums.iter_mut().zip(sums_of_lanes(totals)) {
            *sum = total * x.unit;
        }
    }
}

/// Multiplies a block of a row, whose codes begin `at` this address, and adds the products.
///
/// # Safety
/// `x` and `scales`, those of the row, cover the block; it has its codes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_block<const BITS: usize, const VECTORS: usize, const KIND: u8, const DIGITS: usize>(
    x: &XRow,
    at: *const u8,
    scales: *const f32,
    block: usize,
    total: __m256,
) -> __m256 {
    let block_digits = const { block_digits(BITS, VECTORS) * DIGITS };
    let in_16_bits = const { sums_in_16_bits(BITS, KIND) };
    // SAFETY: the caller vouches for what is loaded.
    unsafe {
        let codes = load_block::<BITS, VECTORS, KIND>(at);
        let digits = x.bytes.as_ptr().add(block * block_digits);
        let sums = multiply::<BITS, VECTORS, DIGITS>(codes, digits, in_16_bits);
        let offsets = x.offsets.as_ptr().add(block * const { parts(BITS, DIGITS) } * LANES);
        let mut sum = joined::<BITS, DIGITS>(sums, offsets);
        if KIND == MXFP4 {
            sum = _mm256_mul_ps(sum, _mm256_loadu_ps(x.lane_units.as_ptr().add(block * LANES)));
        }
        let scales = scales.add((block * 32 * VECTORS) >> x.geometry.group_shift);
        let scales = match x.geometry.has_groups {
            false => _mm256_broadcast_ss(&*scales),
            true => {
                let group_of_lane = _mm256_loadu_si256(x.geometry.group_of_lane.as_ptr().cast());
                _mm256_permutevar8x32_ps(_mm256_loadu_ps(scales), group_of_lane)
            }
        };
        _mm256_fmadd_ps(sum, scales, total)
    }
}

/// The sums of digits as one number, once offsets are added.
///
/// # Safety
/// There is a vector of offsets for each of [`parts`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn joined<const BITS: usize, const DIGITS: usize>(
    sums: [__m256i; DIGITS],
    offsets: *const i32,
) -> __m256 {
    // SAFETY: the caller vouches for the offsets.
    let (first, second) = unsafe {
        let second = if parts(BITS, DIGITS) > 1 { offsets.add(LANES) } else { offsets };
        (_mm256_loadu_si256(offsets.cast()), _mm256_loadu_si256(second.cast()))
    };
    let mut high = sums[0];
    if DIGITS > 1 && !word_digits(BITS) {
        high = _mm256_add_epi32(high, sums[1]);
    }
    let high = _mm256_cvtepi32_ps(_mm256_add_epi32(high, first));
    if parts(BITS, DIGITS) == 1 {
        return high;
    }
    let unit = if word_digits(BITS) { 4096. } else { 256. };
    let low = _mm256_cvtepi32_ps(_mm256_add_epi32(sums[DIGITS - 1], second));
    _mm256_fmadd_ps(high, _mm256_set1_ps(unit), low)
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_of_lanes([a, b, c, d]: [__m256; ROWS]) -> [f32; ROWS] {
    let all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    let quarter = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
    let mut sums = [0.; ROWS];
    // SAFETY: `sums` has room for the four numbers that are written.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), quarter) };
    sums
}
