//! Panels times tiles of x on ARM CPUs: with dot products of bytes, or where CPUs have them with products of small matrices, which
//! are twice as many in an instruction.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::isa::neon::{dot, matrix_dot, Neon, NeonDotprod, NeonI8mm};
use super::gemm::{Chunk, Multiplier, Sums, Task};
use super::units::LIMB_BITS;
use super::weight_panels::{DEPTH, LANES};
use super::x_tiles::{Layout, Tile};
use std::arch::aarch64::*;

/// Lanes of a vector, and how many of these a panel's vector is.
const FOUR: usize = 4;
const QUARTERS: usize = LANES / FOUR;

impl Multiplier for NeonDotprod {
    type Panels = Neon;

    const LAYOUT: Layout = Layout::Rows(1);
    // Sums fill 24 of 32 registers at most.
    const LARGEST_TILE: [usize; 3] = [4, 2, 2];
    const SMALLER_TILES: &'static [usize] = &[];
    const TOGETHER: usize = 1;
    const LEAST_GROUP: usize = 0;
    type InUse = ();

    fn panels(self) -> Neon {
        self.neon
    }

    unsafe fn begin(self, _size: usize, _group_size: usize) {}

    #[target_feature(enable = "neon,dotprod")]
    unsafe fn add<const DIGITS: usize>(chunk: Chunk, tiles: &[Tile], sums: &mut Sums) {
        for_each_tile(chunk, tiles, sums, |task, sums| {
            // SAFETY: the function around it has the features.
            unsafe {
                match DIGITS {
                    1 => add_vectors::<DIGITS, 4>(task, sums),
                    _ => add_vectors::<DIGITS, 2>(task, sums),
                }
            }
        });
    }
}

impl Multiplier for NeonI8mm {
    type Panels = Neon;

    const LAYOUT: Layout = Layout::Rows(2);
    // As above.
    const LARGEST_TILE: [usize; 3] = [6, 2, 2];
    const SMALLER_TILES: &'static [usize] = &[2];
    const TOGETHER: usize = 1;
    const LEAST_GROUP: usize = 0;
    type InUse = ();

    fn panels(self) -> Neon {
        self.dotprod.neon
    }

    unsafe fn begin(self, _size: usize, _group_size: usize) {}

    #[target_feature(enable = "neon,i8mm")]
    unsafe fn add<const DIGITS: usize>(chunk: Chunk, tiles: &[Tile], sums: &mut Sums) {
        for_each_tile(chunk, tiles, sums, |task, sums| {
            // SAFETY: the function around it has the features.
            unsafe {
                match (DIGITS, task.tile.size) {
                    (1, 6) => add_matrices::<DIGITS, 6, 3>(task, sums),
                    _ => add_matrices::<DIGITS, 2, 1>(task, sums),
                }
            }
        });
    }
}

/// Calls `add` with every panel and tile. A panel stays in the first-level cache, while all rows of x pass by.
#[inline(always)]
fn for_each_tile(chunk: Chunk, tiles: &[Tile], sums: &mut Sums, add: impl Fn(Task, &mut [[f32; LANES]])) {
    let Chunk { codes, params, elements, group_size, .. } = chunk;
    for (panel, (codes, params)) in codes.chunks_exact(DEPTH / 4).zip(params).enumerate() {
        for tile in tiles {
            let task = Task { codes, params, tile, elements, group_size };
            add(task, &mut sums.rows_from(panel, tile.first)[..tile.size]);
        }
    }
}

/// Adds the products of a panel with a tile of `M` rows of x to their sums, a row of x and four of the weight to a vector.
///
/// # Safety
/// The CPU has the features.
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_vectors<const DIGITS: usize, const M: usize>(task: Task, sums: &mut [[f32; LANES]]) {
    let groups = task.groups::<DIGITS, M>();
    let Task { codes, params: _, tile, elements: (first, _), group_size } = task;
    assert!(sums.len() == M);
    let mut words = tile.words[first / 4 * DIGITS * M..].as_ptr();
    let mut codes = codes.as_ptr().cast::<i8>();
    for group in groups {
        let mut counts = [[[vdupq_n_s32(0); QUARTERS]; DIGITS]; M];
        for _ in 0..group_size / 4 {
            // SAFETY: the tile and the panel have what [`Task::groups`] says for every group.
            unsafe {
                let mut weights = [vdupq_n_s8(0); QUARTERS];
                for quarter in 0..QUARTERS {
                    weights[quarter] = vld1q_s8(codes.add(16 * quarter));
                }
                for row in 0..M {
                    for digit in 0..DIGITS {
                        let x = vreinterpretq_s8_s32(vld1q_dup_s32(words.add(digit * M + row)));
                        for quarter in 0..QUARTERS {
                            let count = &mut counts[row][digit][quarter];
                            *count = dot(*count, weights[quarter], x);
                        }
                    }
                }
                codes = codes.add(4 * LANES);
                words = words.add(DIGITS * M);
            }
        }
        for row in 0..M {
            let mut of_row = [[vdupq_n_s32(0); DIGITS]; QUARTERS];
            for (quarter, of_row) in of_row.iter_mut().enumerate() {
                for digit in 0..DIGITS {
                    of_row[digit] = counts[row][digit][quarter];
                }
            }
            add_scaled(of_row, task, (group, row), &mut sums[row]);
        }
    }
}

/// The same, two rows of x, of which `PAIRS` are the tile, and two of the weight to a vector.
///
/// # Safety
/// The CPU has the features.
#[target_feature(enable = "neon,i8mm")]
unsafe fn add_matrices<const DIGITS: usize, const M: usize, const PAIRS: usize>(
    task: Task,
    sums: &mut [[f32; LANES]],
) {
    const EIGHTHS: usize = LANES / 2;
    let groups = task.groups::<DIGITS, M>();
    let Task { codes, params: _, tile, elements: (first, _), group_size } = task;
    assert!(sums.len() == M && M == 2 * PAIRS);
    let mut words = tile.words[first / 4 * DIGITS * M..].as_ptr();
    let mut codes = codes.as_ptr().cast::<i8>();
    for group in groups {
        let mut counts = [[[vdupq_n_s32(0); EIGHTHS]; DIGITS]; PAIRS];
        // Two vectors of the panel, which lie interleaved, have eight elements of two rows in sixteen bytes; so has x.
        for _ in 0..group_size / 8 {
            // SAFETY: the tile and the panel have what [`Task::groups`] says for every group, and groups are multiples of 16.
            unsafe {
                let mut x = [[vdupq_n_s8(0); DIGITS]; PAIRS];
                for pair in 0..PAIRS {
                    for digit in 0..DIGITS {
                        x[pair][digit] = vld1q_s8(words.add((digit * M + 2 * pair) * 2).cast());
                    }
                }
                for eighth in 0..EIGHTHS {
                    let weights = vld1q_s8(codes.add(16 * eighth));
                    for pair in 0..PAIRS {
                        for digit in 0..DIGITS {
                            let count = &mut counts[pair][digit][eighth];
                            *count = matrix_dot(*count, x[pair][digit], weights);
                        }
                    }
                }
                codes = codes.add(8 * LANES);
                words = words.add(2 * DIGITS * M);
            }
        }
        for row in 0..M {
            let mut of_row = [[vdupq_n_s32(0); DIGITS]; QUARTERS];
            for (quarter, of_row) in of_row.iter_mut().enumerate() {
                for digit in 0..DIGITS {
                    let [low, high] = [2 * quarter, 2 * quarter + 1]
                        .map(|eighth| vreinterpretq_s64_s32(counts[row / 2][digit][eighth]));
                    let both = if row % 2 == 0 { vzip1q_s64(low, high) } else { vzip2q_s64(low, high) };
                    of_row[digit] = vreinterpretq_s32_s64(both);
                }
            }
            add_scaled(of_row, task, (group, row), &mut sums[row]);
        }
    }
}

/// Adds to the sums of a row of x what becomes of a group's: `counts * unit * scales + x * biases`.
#[inline]
#[target_feature(enable = "neon")]
fn add_scaled<const DIGITS: usize>(
    counts: [[int32x4_t; DIGITS]; QUARTERS],
    Task { params, tile, .. }: Task,
    (group, row): (usize, usize),
    sums: &mut [f32; LANES],
) {
    let at = group * tile.size + row;
    let (unit, x) = (tile.units[at], tile.sums[at]);
    let scales = &params.scales[group];
    let biases = params.biases.get(group).unwrap_or(&[0.; LANES]);
    for quarter in 0..QUARTERS {
        let counts = counts[quarter];
        // Upper digits of a group fit into 32 bits together, all three do not.
        let mut high = counts[0];
        if DIGITS > 1 {
            high = vaddq_s32(vshlq_n_s32::<{ LIMB_BITS as i32 }>(high), counts[1]);
        }
        let mut product = vcvtq_f32_s32(high);
        if DIGITS > 2 {
            let limb = vdupq_n_f32((1 << LIMB_BITS) as f32);
            product = vfmaq_f32(vcvtq_f32_s32(counts[DIGITS - 1]), product, limb);
        }
        // A unit first: scales may have any exponent that f32 has.
        product = vmulq_n_f32(product, unit);
        let first = FOUR * quarter;
        // SAFETY: all have four numbers from `first` on.
        unsafe {
            let [scales, biases, sum] =
                [scales, biases, &*sums].map(|numbers| vld1q_f32(numbers[first..][..FOUR].as_ptr()));
            let sum = vfmaq_f32(vfmaq_n_f32(sum, biases, x), product, scales);
            vst1q_f32(sums[first..][..FOUR].as_mut_ptr(), sum);
        }
    }
}
