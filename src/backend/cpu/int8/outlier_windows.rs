//! Outliers of a row of x times the weights of some rows, with AVX-512: up to sixteen whose codes lie in one load of a row, a
//! *window*, at once.

use super::super::isa::avx512::Avx512Vnni;
use super::super::matrix::PackedMatrix;
use super::super::row_gemv::scales::{output_multiplier, with_stored, Stored, WithStored};
use super::super::row_gemv::{sums_of_lanes, LANES, ROWS};
use super::outliers::OfRow;
use crate::format::{Element, ZeroPoint};
use crate::QuantFormat;
use std::arch::x86_64::*;

/// Bytes of a load.
const WINDOW: usize = 64;

/// Numbers of a table of elements: their codes have up to four bits.
const TABLE: usize = 16;

/// So many in a row of `k` numbers take less time than f32 does, computed: where every window of codes of four bits is full, they take
/// half as many instructions as the row's products.
pub(super) fn most_by_windows(k: usize) -> usize {
    16 + k / 8
}

/// Outliers whose codes lie in [`WINDOW`] bytes, and whose groups in sixteen that begin at a multiple of sixteen: what
/// super-blocks count is the same for all or for each half of these.
struct Window {
    /// In the codes of a row, and which of them are there.
    first_byte: usize,
    bytes: u64,
    /// In the groups of a row, and which of them are there.
    first_group: usize,
    groups: u16,
    lanes: u16,
    /// Of each outlier, where its code begins among the bits of the window.
    first_bit: [u16; LANES],
    /// Its group in the window.
    group: [u8; LANES],
    x: [f32; LANES],
}

/// The outliers of a row of x, for weights of a format with as many columns.
pub(super) struct Windows {
    format: QuantFormat,
    k: usize,
    windows: Vec<Window>,
}

impl Windows {
    pub(super) fn new(format: QuantFormat, k: usize, outliers: OfRow) -> Self {
        let (bits, group_size) = (format.bits(), format.group_size());
        let (row_bytes, row_groups) = (k * bits / 8, k / group_size);
        let mut windows: Vec<Window> = Vec::new();
        for outlier in outliers.iter() {
            let (bit, group) = (outlier.column() * bits, outlier.column() / group_size);
            let first_group = group / LANES * LANES;
            let has_room = |window: &&mut Window| {
                window.lanes != u16::MAX
                    && window.first_group == first_group
                    && bit + bits <= (window.first_byte + WINDOW) * 8
            };
            let window = match windows.last_mut().filter(has_room) {
                Some(window) => window,
                None => {
                    let first_byte = bit / 8;
                    windows.push(Window {
                        first_byte,
                        bytes: u64::MAX >> WINDOW.saturating_sub(row_bytes - first_byte),
                        first_group,
                        groups: u16::MAX >> LANES.saturating_sub(row_groups - first_group),
                        lanes: 0,
                        first_bit: [0; LANES],
                        group: [0; LANES],
                        x: [0.; LANES],
                    });
                    let last = windows.len() - 1;
                    &mut windows[last]
                }
            };
            let lane = window.lanes.count_ones() as usize;
            window.lanes |= 1 << lane;
            window.first_bit[lane] = (bit - window.first_byte * 8) as u16;
            window.group[lane] = (group - first_group) as u8;
            window.x[lane] = outlier.x;
        }
        Self { format, k, windows }
    }

    /// Adds the products with so many rows of a weight. `units` is as [`with_stored`] has it.
    ///
    /// # Panics
    /// If the weight is of another format, or has no such rows.
    pub(super) fn add_products(
        &self,
        isa: Avx512Vnni,
        matrix: &PackedMatrix,
        first_row: usize,
        sums: &mut [f32],
        units: &mut [f32],
    ) {
        if self.windows.is_empty() {
            return;
        }
        let rows = sums.len();
        let (words, count) = matrix.rows_words(first_row, rows);
        assert!(
            matrix.format == self.format && matrix.k == self.k,
            "windows are for {} columns of {}",
            self.k,
            self.format
        );
        assert!(count == rows, "{count} of {rows} rows");
        let multiplier = output_multiplier(matrix);
        let add = AddProducts { of: self, words, multiplier, sums, _isa: isa };
        // SAFETY: `isa` proves that the CPU has the features of the function.
        unsafe { with_stored(matrix, (first_row, rows), units, add) };
    }
}

/// See [`Windows::add_products`].
struct AddProducts<'a> {
    of: &'a Windows,
    words: &'a [u32],
    multiplier: f32,
    sums: &'a mut [f32],
    /// Proves that the CPU has VBMI, too.
    _isa: Avx512Vnni,
}

impl WithStored for AddProducts<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma")]
    unsafe fn call<S: Stored, B: Stored>(self, scales: S, biases: B) {
        let Self { of: Windows { format, windows, .. }, words, multiplier, sums, .. } = self;
        let (rows, row_words) = (sums.len(), words.len() / sums.len().max(1));
        let groups = row_words * 32 / format.bits() / format.group_size();
        assert!(scales.count() == rows * groups && (!B::ANY || biases.count() == rows * groups));
        let elements = Elements::new(*format);
        for (part, sums) in sums.chunks_mut(ROWS).enumerate() {
            let mut totals = [_mm512_setzero_ps(); ROWS];
            for window in windows {
                let places = Places::new(window);
                for (row, total) in totals.iter_mut().enumerate() {
                    // Behind the last row, that one again.
                    let row = (part * ROWS + row).min(rows - 1);
                    // SAFETY: windows are made for rows of the format; the assertions: there are as many rows, with scales and
                    // biases for all.
                    unsafe {
                        let at = words.as_ptr().add(row * row_words).cast::<i8>().add(window.first_byte);
                        let element = elements.of(_mm512_maskz_loadu_epi8(window.bytes, at), &places);
                        let at = row * groups + window.first_group;
                        let of_lanes = |values| _mm512_permutexvar_ps(places.group, values);
                        let mut weight = _mm512_mul_ps(element, of_lanes(scales.load(window.groups, at)));
                        if B::ANY {
                            // Two roundings, as the reference has them: a weight of zero is exactly zero.
                            weight = _mm512_add_ps(weight, of_lanes(biases.load(window.groups, at)));
                        }
                        *total = _mm512_mask3_fmadd_ps(weight, places.x, *total, window.lanes);
                    }
                }
            }
            for (sum, total) in sums.iter_mut().zip(sums_of_lanes(totals)) {
                *sum = total.mul_add(multiplier, *sum);
            }
        }
    }
}

/// Where outliers have their codes and scales, one in each lane.
struct Places {
    /// The two bytes in which a code lies, the lower ones of the lane, and whatever above them.
    bytes: __m512i,
    /// Bits below the code in these.
    shift: __m512i,
    group: __m512i,
    x: __m512,
}

impl Places {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn new(window: &Window) -> Self {
        // SAFETY: arrays have the sixteen numbers of a vector.
        unsafe {
            let first_bit = _mm512_cvtepu16_epi32(_mm256_loadu_si256(window.first_bit.as_ptr().cast()));
            let byte = _mm512_srli_epi32::<3>(first_bit);
            let next = _mm512_add_epi32(byte, _mm512_set1_epi32(1));
            Self {
                bytes: _mm512_or_si512(byte, _mm512_slli_epi32::<8>(next)),
                shift: _mm512_and_si512(first_bit, _mm512_set1_epi32(7)),
                group: _mm512_cvtepu8_epi32(_mm_loadu_si128(window.group.as_ptr().cast())),
                x: _mm512_loadu_ps(window.x.as_ptr()),
            }
        }
    }
}

/// How codes are numbers before they are scaled.
struct Elements {
    mask: __m512i,
    /// What is subtracted from integers.
    zero: __m512,
    /// Numbers of codes that are no integers.
    table: Option<__m512>,
}

impl Elements {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new(format: QuantFormat) -> Self {
        let element = format.element();
        let zero = match format.zero_point() {
            ZeroPoint::Midpoint => format.midpoint(),
            ZeroPoint::Bias | ZeroPoint::None => 0.,
        };
        let table = element.uint().is_none().then(|| table(element));
        // SAFETY: the table has the sixteen numbers of a vector.
        let table = table.map(|table| unsafe { _mm512_loadu_ps(table.as_ptr()) });
        Self { mask: _mm512_set1_epi32((1 << format.bits()) - 1), zero: _mm512_set1_ps(zero), table }
    }

    /// The numbers in some places of a window.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn of(&self, window: __m512i, places: &Places) -> __m512 {
        let codes = _mm512_srlv_epi32(_mm512_permutexvar_epi8(places.bytes, window), places.shift);
        let codes = _mm512_and_si512(codes, self.mask);
        match self.table {
            Some(table) => _mm512_permutexvar_ps(codes, table),
            None => _mm512_sub_ps(_mm512_cvtepi32_ps(codes), self.zero),
        }
    }
}

/// What codes that are no integers stand for.
fn table(element: Element) -> [f32; TABLE] {
    std::array::from_fn(|code| element.value(code as u8))
}
