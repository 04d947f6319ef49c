//! Panels times tiles of x, with AVX-512 VNNI: words of x, one after the other, meet the sixteen lanes of a panel.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::isa::avx512::Avx512Vnni;
use super::super::row_gemv::LANES;
use super::gemm::{Chunk, Multiplier, Sums, Task};
use super::units::LIMB_BITS;
use super::weight_panels::DEPTH;
use super::x_tiles::{Layout, Tile};
use std::arch::x86_64::*;

impl Multiplier for Avx512Vnni {
    type Panels = Self;

    const LAYOUT: Layout = Layout::Words;
    // Sums fill 24 registers at most.
    const LARGEST_TILE: [usize; 3] = [16, 12, 8];
    const SMALLER_TILES: &'static [usize] = &[1, 2, 4, 8, 12];
    const TOGETHER: usize = 1;
    const LEAST_GROUP: usize = 0;
    type InUse = ();

    fn panels(self) -> Avx512Vnni {
        self
    }

    unsafe fn begin(self, _size: usize, _group_size: usize) {}

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
    unsafe fn add<const DIGITS: usize>(chunk: Chunk, tiles: &[Tile], sums: &mut Sums) {
        let Chunk { codes, params, elements, group_size, .. } = chunk;
        for tile in tiles {
            for (panel, (codes, params)) in codes.chunks_exact(DEPTH / 4).zip(params).enumerate() {
                let task = Task { codes, params, tile, elements, group_size };
                let sums = &mut sums.rows_from(panel, tile.first)[..tile.size];
                match tile.size {
                    1 => add_tile::<DIGITS, 1>(task, sums),
                    2 => add_tile::<DIGITS, 2>(task, sums),
                    4 => add_tile::<DIGITS, 4>(task, sums),
                    8 => add_tile::<DIGITS, 8>(task, sums),
                    12 if DIGITS < 3 => add_tile::<DIGITS, 12>(task, sums),
                    16 if DIGITS < 2 => add_tile::<DIGITS, 16>(task, sums),
                    other => panic!("{other} rows are no tile of {DIGITS} digits"),
                }
            }
        }
    }
}

/// Adds the products of a panel with a tile of `M` rows of x to their sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
fn add_tile<const DIGITS: usize, const M: usize>(task: Task, sums: &mut [[f32; LANES]]) {
    let groups = task.groups::<DIGITS, M>();
    let Task { codes, params, tile, elements: (first, _), group_size } = task;
    assert!(sums.len() == M && tile.offsets.len() >= groups.end * M * DIGITS);
    let mut words = tile.words[first / 4 * M * DIGITS..].as_ptr();
    let mut codes = codes.as_ptr();
    for group in groups {
        // SAFETY: the tile and the panel have what [`Task::groups`] says for every group, and there are sums for all rows.
        unsafe {
            let offsets = tile.offsets.as_ptr().add(group * M * DIGITS);
            let mut counts = [[_mm512_setzero_si512(); DIGITS]; M];
            for row in 0..M {
                for digit in 0..DIGITS {
                    counts[row][digit] = _mm512_set1_epi32(*offsets.add(row * DIGITS + digit));
                }
            }
            for _ in 0..group_size / 4 {
                let weights = _mm512_loadu_si512(codes.cast());
                for row in 0..M {
                    for digit in 0..DIGITS {
                        let x = _mm512_set1_epi32(*words.add(row * DIGITS + digit));
                        counts[row][digit] = _mm512_dpbusd_epi32(counts[row][digit], weights, x);
                    }
                }
                codes = codes.add(1);
                words = words.add(M * DIGITS);
            }
            let scales = _mm512_loadu_ps(params.scales.as_ptr().add(group).cast());
            let biases = match params.biases.is_empty() {
                true => _mm512_setzero_ps(),
                false => _mm512_loadu_ps(params.biases.as_ptr().add(group).cast()),
            };
            let (units, x) = (tile.units.as_ptr().add(group * M), tile.sums.as_ptr().add(group * M));
            // Registers are for counts: sums stay in memory, of which the compiler must not know what it holds.
            let to = std::hint::black_box(sums.as_mut_ptr().cast::<f32>());
            for row in 0..M {
                let at = to.add(row * LANES);
                let of_row = (*units.add(row), *x.add(row));
                _mm512_storeu_ps(at, scaled(counts[row], of_row, (scales, biases), _mm512_loadu_ps(at)));
            }
        }
    }
}

/// What becomes of the sum of sixteen lanes for a row of x: `sum + counts * unit * scales + x * biases`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn scaled<const DIGITS: usize>(
    counts: [__m512i; DIGITS],
    (unit, x): (f32, f32),
    (scales, biases): (__m512, __m512),
    sum: __m512,
) -> __m512 {
    // Upper digits of a group fit into 32 bits together, all three do not.
    let mut high = counts[0];
    if DIGITS > 1 {
        high = _mm512_add_epi32(_mm512_slli_epi32::<LIMB_BITS>(high), counts[1]);
    }
    let mut product = _mm512_cvtepi32_ps(high);
    if DIGITS > 2 {
        let limb = _mm512_set1_ps((1 << LIMB_BITS) as f32);
        product = _mm512_fmadd_ps(product, limb, _mm512_cvtepi32_ps(counts[DIGITS - 1]));
    }
    // A unit first: scales may have any exponent that f32 has.
    product = _mm512_mul_ps(product, _mm512_set1_ps(unit));
    _mm512_fmadd_ps(product, scales, _mm512_fmadd_ps(biases, _mm512_set1_ps(x), sum))
}
