//! Packed rows as bf16 numbers, exactly: a code and its scale have six significant bits together, bf16 has eight.

use super::super::matrix::{GroupValues, PackedMatrix};
use super::super::simd::avx512::e4m3_halves;
use super::tile::{Line, ROWS};
use crate::format::decode::scale_from_byte;
use crate::format::element::E2M1;
use crate::format::ScaleKind;
use crate::QuantFormat;
use half::bf16;
use std::arch::x86_64::*;
use std::sync::LazyLock;

/// Codes of a row that are unpacked at a time, into a line of each of two tiles.
pub(super) const STEP: usize = 64;

/// The most groups of a step.
const MAX_GROUPS: usize = 4;

/// log2 of what weights with E8M0 scales are multiplied by, so that the smallest of them is a normal number.
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
    /// `codes` and `scales` have those of a step, `to` has room; AVX-512 with VBMI and GFNI is there, and enabled
    /// in the caller.
    unsafe fn unpack(self, codes: *const u8, scales: *const u8, to: *mut Line);
}

#[derive(Clone, Copy)]
pub(super) struct Mxfp4(&'static Table);

#[derive(Clone, Copy)]
pub(super) struct Nvfp4(&'static Table);

#[derive(Clone, Copy)]
pub(super) struct Mxfp8;

/// E2M1 numbers times a scale, as bf16.
#[repr(align(32))]
struct Scaled([u16; 16]);

/// For each byte of a scale.
type Table = [Scaled; 256];

fn table(kind: ScaleKind, unit: f32) -> Table {
    std::array::from_fn(|byte| {
        // In f64, where the largest E8M0 scale has room for its product.
        let scale = f64::from(scale_from_byte(kind, byte as u8, 1.)) / f64::from(unit);
        Scaled(E2M1.map(|number| bf16::from_f64(scale * f64::from(number)).to_bits()))
    })
}

impl Mxfp4 {
    pub(super) fn new() -> Self {
        static TABLE: LazyLock<Table> = LazyLock::new(|| table(ScaleKind::E8m0, Mxfp4::UNIT));
        Self(&TABLE)
    }
}

impl Nvfp4 {
    pub(super) fn new() -> Self {
        static TABLE: LazyLock<Table> = LazyLock::new(|| table(ScaleKind::E4m3, Nvfp4::UNIT));
        Self(&TABLE)
    }
}

// SAFETY (all `unsafe` below): reads and writes are those that the trait names; the intrinsics' features
// are enabled where the trait's caller is.

/// Thirty-two nibbles, one in each 16-bit lane.
#[inline(always)]
unsafe fn nibbles(from: *const u8) -> __m512i {
    unsafe {
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
        // (bytes | bytes << 12) & 0xF
        _mm512_ternarylogic_epi32::<0xA8>(bytes, _mm512_slli_epi32::<12>(bytes), _mm512_set1_epi16(0xF))
    }
}

#[inline(always)]
unsafe fn scaled(table: &Table, scale: *const u8) -> __m256i {
    unsafe { _mm256_load_si256(table.get_unchecked(usize::from(*scale)).0.as_ptr().cast()) }
}

impl Weights for Mxfp4 {
    const FORMAT: QuantFormat = QuantFormat::Mxfp4;
    const UNIT: f32 = 1. / (1u32 << E8M0_SHIFT) as f32;

    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8, scales: *const u8, to: *mut Line) {
        unsafe {
            for tile in 0..2 {
                let numbers = _mm512_broadcast_i64x4(scaled(self.0, scales.add(tile)));
                let weights = _mm512_permutexvar_epi16(nibbles(codes.add(16 * tile)), numbers);
                _mm512_store_si512(to.add(tile * ROWS).cast(), weights);
            }
        }
    }
}

impl Weights for Nvfp4 {
    const FORMAT: QuantFormat = QuantFormat::Nvfp4;
    const UNIT: f32 = 1.;

    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8, scales: *const u8, to: *mut Line) {
        unsafe {
            // The second sixteen codes are looked up in the second half.
            let halves = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(16));
            for tile in 0..2 {
                let (first, second) = (scales.add(2 * tile), scales.add(2 * tile + 1));
                let numbers = _mm512_castsi256_si512(scaled(self.0, first));
                let numbers = _mm512_inserti64x4::<1>(numbers, scaled(self.0, second));
                let codes = _mm512_or_si512(nibbles(codes.add(16 * tile)), halves);
                _mm512_store_si512(to.add(tile * ROWS).cast(), _mm512_permutexvar_epi16(codes, numbers));
            }
        }
    }
}

impl Weights for Mxfp8 {
    const FORMAT: QuantFormat = QuantFormat::Mxfp8;
    const UNIT: f32 = Mxfp4::UNIT;

    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8, scales: *const u8, to: *mut Line) {
        unsafe {
            // Unpacking interleaves the even quadwords of two vectors, then the odd ones.
            let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            let codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes.cast()));
            let (low, high) = e4m3_halves(codes);
            for (tile, weights) in
                [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)].into_iter().enumerate()
            {
                let scale = *scales.add(tile);
                let weights = if scale == u8::MAX {
                    _mm512_set1_epi16(bf16::NAN.to_bits() as i16)
                } else {
                    let exponent = (i16::from(scale) - 127 + E8M0_SHIFT) << 7;
                    // Not of zero, which wraps around, and not of NaN.
                    let magnitude =
                        _mm512_sub_epi16(_mm512_add_epi16(weights, weights), _mm512_set1_epi16(1));
                    let infinity = _mm512_set1_epi16((bf16::INFINITY.to_bits() << 1) as i16);
                    let number = _mm512_cmplt_epu16_mask(magnitude, infinity);
                    _mm512_mask_add_epi16(weights, number, weights, _mm512_set1_epi16(exponent))
                };
                _mm512_store_si512(to.add(tile * ROWS).cast(), weights);
            }
        }
    }
}

/// Up to sixteen rows, the height of a tile.
pub(super) struct RowBlock<'a> {
    matrix: &'a PackedMatrix<'a>,
    scales: &'a [u8],
    first_row: usize,
    rows: usize,
}

impl<'a> RowBlock<'a> {
    /// `None` if a scale is so large that sums could overflow where products do not.
    #[inline(always)]
    pub(super) fn new(matrix: &'a PackedMatrix<'a>, first_row: usize) -> Option<Self> {
        let rows = matrix.rows.saturating_sub(first_row).min(ROWS);
        let GroupValues::Byte(scales) = matrix.scales else { return None };
        let groups = matrix.groups_per_row();
        let scales = scales.get(first_row * groups..)?.get(..rows * groups)?;
        // NaN becomes zero.
        let largest = scales.iter().fold(0, |largest: u8, scale| largest.max(scale.wrapping_add(1)));
        let fits = matrix.format.scale_kind() != ScaleKind::E8m0 || largest <= LARGEST_E8M0 + 1;
        fits.then_some(Self { matrix, scales, first_row, rows })
    }

    /// Unpacks `steps` steps from `first_step` on, two tiles for each.
    ///
    /// # Safety
    /// The features of [`Weights::unpack`] are enabled; rows have the steps, of which the last may be incomplete;
    /// `to` has room.
    #[inline(always)]
    pub(super) unsafe fn unpack<W: Weights>(
        &self,
        weights: W,
        first_step: usize,
        steps: usize,
        to: *mut Line,
    ) {
        let (group_size, code_bytes) = (W::FORMAT.group_size(), STEP * W::FORMAT.bits() / 8);
        let groups = STEP / group_size;
        let full = (first_step + steps).min(self.matrix.k / STEP).saturating_sub(first_step);
        for (row, scales) in
            self.scales.chunks_exact(self.matrix.groups_per_row()).take(self.rows).enumerate()
        {
            let words = self.matrix.row_words(self.first_row + row);
            let codes = words.as_ptr().cast::<u8>().wrapping_add(first_step * code_bytes);
            let scales_of = scales.as_ptr().wrapping_add(first_step * groups);
            // SAFETY: the caller's promise; the tail has all of a step.
            unsafe {
                for step in 0..full {
                    let (codes, scales) = (codes.add(step * code_bytes), scales_of.add(step * groups));
                    _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(steps * code_bytes).cast());
                    weights.unpack(codes, scales, to.add(2 * step * ROWS + row));
                }
                if full < steps {
                    let (mut last_codes, mut last_scales) = ([0u8; STEP], [0u8; MAX_GROUPS]);
                    let done = first_step + full;
                    let rest = words.iter().skip(done * code_bytes / 4).flat_map(|word| word.to_le_bytes());
                    last_codes.iter_mut().zip(rest).for_each(|(to, from)| *to = from);
                    last_scales
                        .iter_mut()
                        .zip(scales.iter().skip(done * groups))
                        .for_each(|(to, from)| *to = *from);
                    weights.unpack(last_codes.as_ptr(), last_scales.as_ptr(), to.add(2 * full * ROWS + row));
                }
            }
        }
    }
}
