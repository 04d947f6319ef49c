//! Panels times tiles of x, with AVX2: `vpmaddubsw`, whose sums of two products are added up in 16 bits as long as they have
//! room there. One half of a panel's lanes after the other, so that sums stay in registers.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::isa::avx2::Avx2;
use super::super::row_gemv::LANES;
use super::codes::IntegerCodes;
use super::gemm::{Chunk, Multiplier, Sums, Task};
use super::gemv_avx2::unpack::sums_in_16_bits;
use super::tables::with_codes;
use super::units::LIMB_BITS;
use super::weight_panels::DEPTH;
use super::x_tiles::{Layout, Tile};
use std::arch::x86_64::*;

/// How many vectors of a panel add up in 16 bits: none of eight bits. (As two codes of four bits, these took as much time as f32.)
fn vectors_in_16_bits(codes: &IntegerCodes) -> usize {
    fn of<const BITS: usize, const KIND: u8>() -> usize {
        const { sums_in_16_bits(BITS, KIND) }
    }
    with_codes!(codes.kind, of())
}

impl Multiplier for Avx2 {
    type Panels = Self;

    const LAYOUT: Layout = Layout::Words;
    // Sums in 16 and in 32 bits fill 12 registers at most.
    const LARGEST_TILE: [usize; 3] = [4, 2, 2];
    const SMALLER_TILES: &'static [usize] = &[];
    const TOGETHER: usize = 1;
    const LEAST_GROUP: usize = 0;
    type InUse = ();

    fn panels(self) -> Self {
        self
    }

    fn has_room(codes: &IntegerCodes) -> bool {
        vectors_in_16_bits(codes) > 0
    }

    unsafe fn begin(self, _size: usize, _group_size: usize) {}

    #[target_feature(enable = "avx2,fma")]
    unsafe fn add<const DIGITS: usize>(chunk: Chunk, tiles: &[Tile], sums: &mut Sums) {
        let in_16_bits = vectors_in_16_bits(chunk.of);
        // A panel stays in the first-level cache, while all rows of x pass by.
        for (panel, (codes, params)) in chunk.codes.chunks_exact(DEPTH / 4).zip(chunk.params).enumerate() {
            for tile in tiles {
                let task =
                    Task { codes, params, tile, elements: chunk.elements, group_size: chunk.group_size };
                let sums = &mut sums.rows_from(panel, tile.first)[..tile.size];
                match (DIGITS, in_16_bits) {
                    (1, 4..) => add_tile::<DIGITS, 4, 4>(task, sums),
                    (1, 2..) => add_tile::<DIGITS, 4, 2>(task, sums),
                    (1, _) => add_tile::<DIGITS, 4, 1>(task, sums),
                    (_, 4..) => add_tile::<DIGITS, 2, 4>(task, sums),
                    (_, 2..) => add_tile::<DIGITS, 2, 2>(task, sums),
                    _ => add_tile::<DIGITS, 2, 1>(task, sums),
                }
            }
        }
    }
}

/// Adds the products of a panel with a tile of `M` rows of x to their sums; those of `VECTORS` vectors, a part of a group, are
/// added up in 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_tile<const DIGITS: usize, const M: usize, const VECTORS: usize>(
    task: Task,
    sums: &mut [[f32; LANES]],
) {
    let groups = task.groups::<DIGITS, M>();
    let Task { codes, params, tile, elements: (first, _), group_size } = task;
    let vectors = group_size / 4;
    assert!(sums.len() == M && vectors.is_multiple_of(VECTORS));
    assert!(tile.offsets.len() >= groups.end * M * DIGITS);
    let ones = _mm256_set1_epi16(1);
    for group in groups {
        let first_vector = group * vectors - first / 4;
        for half in [0, LANES / 2] {
            // SAFETY: the tile and the panel have what [`Task::groups`] says for every group, and there are sums for all rows. A
            // half of sixteen lanes is a vector, in bytes four times as far on.
            unsafe {
                let offsets = tile.offsets.as_ptr().add(group * M * DIGITS);
                let mut counts = [[_mm256_setzero_si256(); DIGITS]; M];
                for row in 0..M {
                    for digit in 0..DIGITS {
                        counts[row][digit] = _mm256_set1_epi32(*offsets.add(row * DIGITS + digit));
                    }
                }
                let mut words = tile.words.as_ptr().add((first / 4 + first_vector) * M * DIGITS);
                let mut codes = codes.as_ptr().add(first_vector).cast::<u8>().add(4 * half);
                for _ in 0..vectors / VECTORS {
                    let mut pairs = [[_mm256_setzero_si256(); DIGITS]; M];
                    for vector in 0..VECTORS {
                        let weights = _mm256_loadu_si256(codes.cast());
                        for row in 0..M {
                            for digit in 0..DIGITS {
                                let x = _mm256_set1_epi32(*words.add(row * DIGITS + digit));
                                let products = _mm256_maddubs_epi16(weights, x);
                                pairs[row][digit] = match vector {
                                    0 => products,
                                    _ => _mm256_add_epi16(pairs[row][digit], products),
                                };
                            }
                        }
                        codes = codes.add(4 * LANES);
                        words = words.add(M * DIGITS);
                    }
                    for row in 0..M {
                        for digit in 0..DIGITS {
                            let pairs = _mm256_madd_epi16(pairs[row][digit], ones);
                            counts[row][digit] = _mm256_add_epi32(counts[row][digit], pairs);
                        }
                    }
                }
                let scales = _mm256_loadu_ps(params.scales.as_ptr().add(group).cast::<f32>().add(half));
                let biases = match params.biases.is_empty() {
                    true => _mm256_setzero_ps(),
                    false => _mm256_loadu_ps(params.biases.as_ptr().add(group).cast::<f32>().add(half)),
                };
                let (units, x) = (tile.units.as_ptr().add(group * M), tile.sums.as_ptr().add(group * M));
                for row in 0..M {
                    let at = sums.as_mut_ptr().add(row).cast::<f32>().add(half);
                    let of_row = (*units.add(row), *x.add(row));
                    _mm256_storeu_ps(at, scaled(counts[row], of_row, (scales, biases), _mm256_loadu_ps(at)));
                }
            }
        }
    }
}

/// What becomes of the sum of eight lanes for a row of x: `sum + counts * unit * scales + x * biases`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn scaled<const DIGITS: usize>(
    counts: [__m256i; DIGITS],
    (unit, x): (f32, f32),
    (scales, biases): (__m256, __m256),
    sum: __m256,
) -> __m256 {
    // Upper digits of a group fit into 32 bits together, all three do not.
    let mut high = counts[0];
    if DIGITS > 1 {
        high = _mm256_add_epi32(_mm256_slli_epi32::<{ LIMB_BITS as i32 }>(high), counts[1]);
    }
    let mut product = _mm256_cvtepi32_ps(high);
    if DIGITS > 2 {
        let limb = _mm256_set1_ps((1 << LIMB_BITS) as f32);
        product = _mm256_fmadd_ps(product, limb, _mm256_cvtepi32_ps(counts[DIGITS - 1]));
    }
    // A unit first: scales may have any exponent that f32 has.
    product = _mm256_mul_ps(product, _mm256_set1_ps(unit));
    _mm256_fmadd_ps(product, scales, _mm256_fmadd_ps(biases, _mm256_set1_ps(x), sum))
}
