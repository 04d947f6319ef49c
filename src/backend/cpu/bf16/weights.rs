//! Packed rows as bf16, exactly: a code times its scale has six significant bits at most, and bf16 has eight.

use super::super::fast_kernel::NotRepresentable;
use super::super::isa::amx_tile::{Line, ROWS};
use super::super::isa::avx512_e4m3::{any_rare, by_bits, by_tables, rank};
use super::super::matrix::{GroupValues, PackedMatrix};
use crate::format::{Scale, E2M1};
use crate::QuantFormat;
use half::bf16;
use std::arch::x86_64::*;
use std::sync::LazyLock;

/// Codes of a row that are unpacked at a time, into a line of each of two tiles.
pub(super) const STEP: usize = 64;

/// The column, in a row of a tile, of element `index` of its 32: the elements of both halves alternate, four at a time, so
/// that one instruction can fetch nibbles from both.
pub(super) const fn column(index: usize) -> usize {
    let (half, within) = (index / 16, index % 16);
    8 * (within / 4) + 4 * half + within % 4
}

/// The most groups of a step.
const MAX_GROUPS: usize = 4;

/// log2 of a factor of weights with E8M0 scales, with which the smallest of them is a normal number.
const E8M0_SHIFT: i16 = 16;

/// The largest E8M0 scale whose weights leave room for sums: 2^40.
const LARGEST_E8M0: u8 = 127 + 40;

/// How codes and scales of a format become bf16 numbers.
pub(super) trait Weights: Copy {
    const FORMAT: QuantFormat;
    /// What one in a tile stands for.
    const UNIT: f32;

    /// Unpacks a step into a line at `to`, and one that is a tile further.
    ///
    /// # Safety
    /// `codes` and `scales` are valid for a step, `to` for both lines; the CPU has AVX-512 with VBMI and GFNI, and the caller
    /// enables it.
    unsafe fn unpack(self, codes: *const u8, scales: *const u8, to: *mut Line);
}

#[derive(Clone, Copy)]
pub(super) struct Nvfp4(&'static Table);

#[derive(Clone, Copy)]
pub(super) struct Mxfp4(&'static Table);

#[derive(Clone, Copy)]
pub(super) struct Mxfp8;

/// E2M1 numbers times a scale, as bf16.
#[repr(align(32))]
struct Scaled([u16; 16]);

/// For each byte of a scale.
type Table = [Scaled; 256];

/// The table of a kind of scales, for weights that are multiples of `unit`.
fn table(scales: Scale, unit: f32) -> Table {
    std::array::from_fn(|byte| {
        let scale = scales.value(byte as u8) / unit;
        Scaled(E2M1.map(|number| bf16::from_f32(scale * number).to_bits()))
    })
}

impl Nvfp4 {
    pub(super) fn new() -> Self {
        static TABLE: LazyLock<Table> = LazyLock::new(|| table(Scale::E4m3, Nvfp4::UNIT));
        Self(&TABLE)
    }
}

impl Mxfp4 {
    pub(super) fn new() -> Self {
        static TABLE: LazyLock<Table> = LazyLock::new(|| table(Scale::E8m0, Mxfp4::UNIT));
        Self(&TABLE)
    }
}

/// Thirty-two nibbles in [`column`] order, each in the lowest bits of a 16-bit lane; the other bits do not matter.
///
/// # Safety
/// `from` is valid for sixteen bytes; features as for [`Weights::unpack`].
#[inline(always)]
unsafe fn nibbles(from: *const u8) -> __m512i {
    /// Where the nibbles of a quadword begin: even ones take from the first eight bytes, odd ones from the others.
    const FROM_BIT: [i64; 8] = {
        let mut offsets = [0; 8];
        let mut lane = 0;
        while lane < 8 {
            offsets[lane] = 0x000C_0008_0004_0000 + (16 * (lane as i64 / 2)) * 0x0001_0001_0001_0001;
            lane += 1;
        }
        offsets
    };
    // SAFETY: sixteen bytes are read, for which the caller vouches, and a table of the size of a vector.
    unsafe {
        let bytes = _mm512_broadcast_i64x2(_mm_loadu_si128(from.cast()));
        _mm512_multishift_epi64_epi8(_mm512_loadu_si512(FROM_BIT.as_ptr().cast()), bytes)
    }
}

/// All E2M1 numbers times a scale.
///
/// # Safety
/// `scale` is valid; features as for [`Weights::unpack`].
#[inline(always)]
unsafe fn scaled(table: &Table, scale: *const u8) -> __m256i {
    // SAFETY: the table has an aligned entry for every byte.
    unsafe { _mm256_load_si256(table.get_unchecked(usize::from(*scale)).0.as_ptr().cast()) }
}

/// [`Weights::unpack`] of E2M1 codes, a scale for each of [`MAX_GROUPS`] groups of sixteen.
///
/// # Safety
/// As for [`Weights::unpack`].
#[inline(always)]
unsafe fn unpack_e2m1(table: &Table, codes: *const u8, scales: [*const u8; MAX_GROUPS], to: *mut Line) {
    // SAFETY: codes and scales of one step are read, and one aligned line of each tile is written, for all of which the
    // caller vouches.
    unsafe {
        // The second sixteen codes, in odd quadwords, are looked up in the second half.
        let (nibble, halves) = (_mm512_set1_epi16(15), _mm512_maskz_set1_epi16(0xF0F0_F0F0, 16));
        for tile in 0..2 {
            let numbers = _mm512_castsi256_si512(scaled(table, scales[2 * tile]));
            let numbers = _mm512_inserti64x4::<1>(numbers, scaled(table, scales[2 * tile + 1]));
            // (codes & nibble) | halves
            let codes = _mm512_ternarylogic_epi32::<0xEA>(nibbles(codes.add(16 * tile)), nibble, halves);
            _mm512_store_si512(to.add(tile * ROWS).cast(), _mm512_permutexvar_epi16(codes, numbers));
        }
    }
}

impl Weights for Nvfp4 {
    const FORMAT: QuantFormat = QuantFormat::NVFP4;
    const UNIT: f32 = 1.;

    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8, scales: *const u8, to: *mut Line) {
        // SAFETY: a step has four scales.
        unsafe { unpack_e2m1(self.0, codes, [scales, scales.add(1), scales.add(2), scales.add(3)], to) };
    }
}

impl Weights for Mxfp4 {
    const FORMAT: QuantFormat = QuantFormat::MXFP4;
    const UNIT: f32 = Mxfp8::UNIT;

    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8, scales: *const u8, to: *mut Line) {
        // SAFETY: a step has two scales, each for two groups of sixteen.
        unsafe { unpack_e2m1(self.0, codes, [scales, scales, scales.add(1), scales.add(1)], to) };
    }
}

impl Weights for Mxfp8 {
    const FORMAT: QuantFormat = QuantFormat::MXFP8;
    const UNIT: f32 = 1. / (1u32 << E8M0_SHIFT) as f32;

    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8, scales: *const u8, to: *mut Line) {
        // SAFETY: codes and scales of one step are read, and one aligned line of each tile is written, for all of which the
        // caller vouches.
        unsafe {
            // Unpacking interleaves the lower quadwords of each 128 bits of two vectors, then the upper ones.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let codes = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes.cast()));
            // Zeros and NaN stay what they are under any scale.
            let any_rare = any_rare(rank(codes));
            let (low, high) = if any_rare { by_tables(codes) } else { by_bits(codes) };
            let numbers = [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)];
            for (tile, numbers) in numbers.into_iter().enumerate() {
                let scale = *scales.add(tile);
                let exponent = _mm512_set1_epi16((i16::from(scale) - 127 + E8M0_SHIFT) << 7);
                let weights = if scale == u8::MAX {
                    _mm512_set1_epi16(bf16::NAN.to_bits() as i16)
                } else if any_rare {
                    // Twice the magnitude, less one: zero wraps around.
                    let magnitude =
                        _mm512_sub_epi16(_mm512_add_epi16(numbers, numbers), _mm512_set1_epi16(1));
                    let infinity = _mm512_set1_epi16((bf16::INFINITY.to_bits() << 1) as i16);
                    let number = _mm512_cmplt_epu16_mask(magnitude, infinity);
                    _mm512_mask_add_epi16(numbers, number, numbers, exponent)
                } else {
                    _mm512_add_epi16(numbers, exponent)
                };
                _mm512_store_si512(to.add(tile * ROWS).cast(), weights);
            }
        }
    }
}

/// Steps that are unpacked without a loop.
const UNROLLED: usize = 2;

/// Prefetch distance of codes.
const STEPS_AHEAD: usize = 8;

/// Up to sixteen rows, the height of a tile.
#[derive(Clone, Copy)]
pub(super) struct RowBlock<'a> {
    matrix: &'a PackedMatrix<'a>,
    words: &'a [u32],
    scales: &'a [u8],
    rows: usize,
}

impl<'a> RowBlock<'a> {
    /// # Errors
    /// If a scale is so large that sums could overflow where the output does not.
    #[inline(always)]
    pub(super) fn new(matrix: &'a PackedMatrix<'a>, first_row: usize) -> Result<Self, NotRepresentable> {
        let (words, rows) = matrix.rows_words(first_row, ROWS);
        let groups = matrix.groups_per_row();
        let GroupValues::Byte(scales) = matrix.scales.slice(first_row * groups, rows * groups) else {
            return Err(NotRepresentable);
        };
        if scales.len() != rows * groups {
            return Err(NotRepresentable);
        }
        // NaN becomes zero.
        let largest = scales.iter().fold(0, |largest: u8, scale| largest.max(scale.wrapping_add(1)));
        let fits = matrix.format.scale() != Scale::E8m0 || largest <= LARGEST_E8M0 + 1;
        if fits {
            Ok(Self { matrix, words, scales, rows })
        } else {
            Err(NotRepresentable)
        }
    }

    /// Unpacks `steps` steps from `first_step` on, two tiles for each.
    ///
    /// # Safety
    /// The caller enables the features of [`Weights::unpack`]. Rows have the steps, of which the last may be incomplete. `to`
    /// is valid for all tiles.
    #[inline(always)]
    pub(super) unsafe fn unpack<W: Weights>(
        &self,
        weights: W,
        first_step: usize,
        steps: usize,
        to: *mut Line,
    ) {
        let full = (first_step + steps).min(self.matrix.k / STEP).saturating_sub(first_step);
        // SAFETY: the first `full` steps lie completely in the rows; offsets of `to` stay inside the tiles of all steps.
        unsafe {
            for first in (0..full).step_by(UNROLLED) {
                let to = to.add(2 * first * ROWS);
                match full - first {
                    UNROLLED.. => self.unpack_whole::<W, UNROLLED>(weights, first_step + first, to),
                    rest => {
                        for step in 0..rest {
                            let to = to.add(2 * step * ROWS);
                            self.unpack_whole::<W, 1>(weights, first_step + first + step, to);
                        }
                    }
                }
            }
            if full < steps {
                self.unpack_last(weights, first_step + full, to.add(2 * full * ROWS));
            }
        }
    }

    /// Unpacks whole steps, in a loop of nothing else.
    ///
    /// # Safety
    /// The conditions of [`Self::unpack`]; the steps lie completely in the rows.
    #[inline(always)]
    unsafe fn unpack_whole<W: Weights, const STEPS: usize>(
        self,
        weights: W,
        first_step: usize,
        to: *mut Line,
    ) {
        let code_bytes = STEP * W::FORMAT.bits() / 8;
        let groups = STEP / W::FORMAT.group_size();
        let row_bytes = self.matrix.k * W::FORMAT.bits() / 8;
        let row_groups = self.matrix.k / W::FORMAT.group_size();
        let mut codes = self.words.as_ptr().cast::<u8>();
        codes = codes.wrapping_add(first_step * code_bytes);
        let mut scales = self.scales.as_ptr().wrapping_add(first_step * groups);
        for row in 0..self.rows {
            for line in (0..STEPS * code_bytes).step_by(64) {
                let ahead = codes.wrapping_add(STEPS_AHEAD * code_bytes + line);
                // SAFETY: a prefetch of any address is harmless: it neither faults nor changes what a program sees.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
            }
            for step in 0..STEPS {
                // SAFETY: the step lies in the row, with its codes and scales.
                unsafe {
                    let (codes, scales) = (codes.add(step * code_bytes), scales.add(step * groups));
                    weights.unpack(codes, scales, to.add(2 * step * ROWS + row));
                }
            }
            codes = codes.wrapping_add(row_bytes);
            scales = scales.wrapping_add(row_groups);
        }
    }

    /// Unpacks the last step, with zeros where rows end.
    ///
    /// # Safety
    /// The conditions of [`Self::unpack`].
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni")]
    unsafe fn unpack_last<W: Weights>(self, weights: W, step: usize, to: *mut Line) {
        let words = STEP * W::FORMAT.bits() / 32;
        let groups = STEP / W::FORMAT.group_size();
        let row_words = self.matrix.k * W::FORMAT.bits() / 32;
        for (row, row_words) in self.words.chunks_exact(row_words).enumerate() {
            let (mut codes, mut scales) = ([0u32; STEP / 4], [0u8; MAX_GROUPS]);
            let rest = row_words.iter().skip(step * words);
            codes.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            let row_scales = self.scales.chunks_exact(self.matrix.groups_per_row()).nth(row);
            let rest = row_scales.into_iter().flatten().skip(step * groups);
            scales.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            // SAFETY: the arrays have the codes and scales of a step; `to` is valid for the rows of two tiles.
            unsafe { weights.unpack(codes.as_ptr().cast(), scales.as_ptr(), to.add(row)) };
        }
    }
}
