//! Several vectors of activations, up to sixteen to a *panel*.
//!
//! Each of the three terms of a panel's activations fills the sixteen columns of a tile. Up to eight fill
//! them with two groups of weights: column `2 * activation + group` has zeros where the other group has
//! its activations. So a tile of sums covers a *cluster* of groups, and a row's
//! scales repeat along it. It is scaled while the next cluster is multiplied: vectors that read what a
//! tile has just written, and the other way round, wait long.

use super::super::matrix::PackedMatrix;
use super::super::tasks;
use super::activations::{Group, TERMS};
use super::codes::STEP;
use super::rows::Rows;
use super::tile::{self, Line, Tiles, COLUMNS, LEFT, RIGHT, ROWS};
use super::Output;
use std::arch::x86_64::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Rows that share the loads of the activations, two tiles of them.
pub(super) const ROWS_PER_PASS: usize = 2 * ROWS;

/// Tiles of each of the two that are unpacked together.
const CHUNK_TILES: usize = 4;

/// Bytes of activations that are multiplied before the next ones take their turn: they stay in the
/// second-level cache.
const SLAB_BYTES: usize = 1 << 20;

/// Clusters whose tiles a thread fills at a time.
const CLUSTERS_OF_TASK: usize = 16;

/// Columns that are multiplied in one pass over the weights.
pub(super) fn columns_per_slab(k: usize) -> usize {
    let panel_bytes = COLUMNS * TERMS * k;
    COLUMNS * (SLAB_BYTES / panel_bytes.max(1)).max(1)
}

/// Vectors of activations as tiles.
pub(super) struct Panels {
    /// Of `[panel][cluster][piece][term]` the right-hand tiles, `depth / 4` lines each.
    tiles: Vec<Line>,
    /// Of `[panel][cluster]`.
    scales: Vec<Scale>,
    /// Vectors of activations.
    count: usize,
    clusters: usize,
    shape: Shape,
}

/// How a cluster is cut into tiles.
#[derive(Clone, Copy)]
struct Shape {
    group_size: usize,
    /// Groups of a cluster.
    groups: usize,
    /// Tiles that a cluster fills, if it does not fill a part of one.
    pieces: usize,
    /// Bytes of a cluster in a row of a tile.
    depth: usize,
}

impl Shape {
    fn new(group_size: usize, count: usize) -> Self {
        // Not four for up to four: a vector should have the same product, bit for bit, in any company.
        let groups = if count <= COLUMNS / 2 { 2 } else { 1 };
        let bytes = groups * group_size;
        Self { group_size, groups, pieces: bytes.div_ceil(64), depth: bytes.min(64) }
    }

    fn lines(self) -> usize {
        self.pieces * TERMS * self.depth / 4
    }

    /// Activations of a panel.
    fn columns(self) -> usize {
        COLUMNS / self.groups
    }
}

/// What turns the sums of a panel's cluster into products.
#[derive(Clone, Copy)]
#[repr(C)]
struct Scale {
    /// What each column is a multiple of.
    units: Line,
    /// The sum of each column's activations.
    sums: Line,
}

impl Panels {
    /// `x` is `[count, k]`; weights are multiples of `unit`. `None` if there is a number that [`Group`] does not take.
    pub(super) fn new(group_size: usize, unit: f32, k: usize, x: &[f32]) -> Option<Self> {
        let count = x.len() / k;
        let shape = Shape::new(group_size, count);
        let cluster_size = shape.groups * group_size;
        let clusters = k.div_ceil(cluster_size);
        let all = count.div_ceil(shape.columns()) * clusters;
        let mut tiles = vec![Line::ZERO; all * shape.lines()];
        let mut scales = vec![Scale { units: Line::ZERO, sums: Line::ZERO }; all];
        let finite = AtomicBool::new(true);
        let parts =
            tiles.chunks_mut(CLUSTERS_OF_TASK * shape.lines()).zip(scales.chunks_mut(CLUSTERS_OF_TASK));
        tasks::for_each(parts, |part, (tiles, scales)| {
            for (index, (lines, scale)) in tiles.chunks_mut(shape.lines()).zip(scales).enumerate() {
                let index = part * CLUSTERS_OF_TASK + index;
                let (panel, cluster) = (index / clusters, index % clusters);
                let rows = x.chunks_exact(k).skip(panel * shape.columns()).take(shape.columns());
                for (place, row) in rows.enumerate() {
                    let x = row.chunks(cluster_size).nth(cluster).unwrap_or_default();
                    // SAFETY: the instruction set was detected before its kernels were handed out.
                    if !unsafe { fill(shape, place, x, unit, (lines, scale)) } {
                        return finite.store(false, Ordering::Relaxed);
                    }
                }
            }
        });
        finite.into_inner().then_some(Self { tiles, scales, count, clusters, shape })
    }
}

/// Fills the columns of a cluster's tiles that belong to the activations `x` of one vector; false if there
/// is an infinity or a NaN.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn fill(shape: Shape, place: usize, x: &[f32], unit: f32, (lines, scale): (&mut [Line], &mut Scale)) -> bool {
    let mut group = Group::EMPTY;
    let words_per_piece = shape.depth / 4;
    let words_per_group = shape.group_size / Group::PER_WORD;
    for (index, x) in x.chunks(shape.group_size).enumerate() {
        if !group.fill(x) {
            return false;
        }
        let column = place * shape.groups + index;
        for (term, words) in group.words.iter().enumerate() {
            for (word, value) in words.iter().take(x.len() / Group::PER_WORD).enumerate() {
                let word = index * words_per_group + word;
                let (piece, within) = (word / words_per_piece, word % words_per_piece);
                lines[(piece * TERMS + term) * words_per_piece + within].0[column] = *value;
            }
        }
        scale.units.0[column] = (group.unit * unit).to_bits();
        scale.sums.0[column] = group.sum.to_bits();
    }
    true
}

/// Sums of a cluster, for each term and each of two blocks of rows.
type Counts = [[[Line; ROWS]; 2]; TERMS];

/// Sums of a panel, for each of two blocks of rows.
type Sums = [[Line; ROWS]; 2];

/// Products of `rows` rows from `first_row` on and all vectors of activations, `x` `[count, k]`; false if the rows do
/// not [keep](Rows::keep) them.
///
/// # Safety
/// [`super::detected`] has returned true; `panels` is of the matrix's K, and of groups and a unit as `R` has them;
/// `output` has the rows' places for every vector, and nobody else uses them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
pub(super) unsafe fn products<'a, R: Rows<'a>>(
    matrix: &'a PackedMatrix<'a>,
    (panels, x): (&Panels, &[f32]),
    first_row: usize,
    rows: usize,
    output: Output,
) -> bool {
    // SAFETY: the caller's promise; no other tiles are in use here.
    unsafe {
        let _tiles = Tiles::configure(panels.shape.depth);
        let mut blocks = [R::new(matrix), R::new(matrix)];
        let mut sums = vec![[[Line::ZERO; ROWS]; 2]; panels.count.div_ceil(panels.shape.columns())];
        for pass in (0..rows).step_by(ROWS_PER_PASS) {
            let rows = (rows - pass).min(ROWS_PER_PASS);
            blocks[0].take(first_row + pass, rows);
            blocks[1].take(first_row + pass + ROWS, rows.saturating_sub(ROWS));
            sums.fill([[Line::ZERO; ROWS]; 2]);
            let kept = match panels.shape.groups {
                2 => add_clusters::<R, 2>(&blocks, (panels, x), matrix.k, &mut sums),
                _ => add_clusters::<R, 1>(&blocks, (panels, x), matrix.k, &mut sums),
            };
            if !kept {
                return false;
            }
            let groups = panels.shape.groups;
            for index in 0..panels.count {
                let (panel, place) = (index / panels.shape.columns(), index % panels.shape.columns());
                let to = output.first.add(index * output.stride + first_row + pass);
                for (row, line) in sums[panel].as_flattened().iter().take(rows).enumerate() {
                    let lanes = line.0[place * groups..][..groups].iter();
                    let sum = lanes.fold(0.0, |sum, lane| sum + f32::from_bits(*lane));
                    *to.add(row) = sum * matrix.global_scale;
                }
            }
        }
    }
    true
}

/// A cluster whose sums wait to be scaled.
struct Waiting<'a> {
    first_group: usize,
    scale: &'a Scale,
    panel: usize,
}

/// Adds the products of two blocks of rows and all panels to `sums`; false as [`products`].
///
/// # Safety
/// As [`products`]; tiles are configured.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
unsafe fn add_clusters<'a, R: Rows<'a>, const GROUPS: usize>(
    blocks: &[R; 2],
    (panels, x): (&Panels, &[f32]),
    k: usize,
    sums: &mut [Sums],
) -> bool {
    let cluster_size = panels.shape.group_size * GROUPS;
    let lines_per_cluster = panels.shape.lines();
    let steps = k.div_ceil(STEP);
    let clusters_per_chunk = CHUNK_TILES * STEP / cluster_size;
    let mut left = [[Line::ZERO; CHUNK_TILES * ROWS]; 2];
    let mut counts: [Counts; 2] = [[[[Line::ZERO; ROWS]; 2]; TERMS]; 2];
    let mut turn = 0;
    for (chunk, first_step) in (0..steps).step_by(CHUNK_TILES).enumerate() {
        let end_step = (first_step + CHUNK_TILES).min(steps);
        let first_cluster = chunk * clusters_per_chunk;
        let end_cluster = (first_cluster + clusters_per_chunk).min(panels.clusters);
        let chunk_steps = first_step..end_step;
        if !blocks.iter().all(|block| block.keep(&chunk_steps, x)) {
            return false;
        }
        for pass in 0..blocks[0].passes(&chunk_steps).max(blocks[1].passes(&chunk_steps)) {
            // SAFETY: the caller's promise.
            unsafe {
                for (block, left) in blocks.iter().zip(&mut left) {
                    if chunk_steps.len() < CHUNK_TILES {
                        left.fill(Line::ZERO); // the last cluster may be incomplete
                    }
                    block.unpack(chunk_steps.clone(), pass, left.as_mut_ptr());
                }
                let mut waiting: Option<Waiting> = None;
                for panel in 0..sums.len() {
                    for cluster in first_cluster..end_cluster {
                        let index = panel * panels.clusters + cluster;
                        let right = tile::bytes(&panels.tiles[index * lines_per_cluster..]);
                        let at = (cluster - first_cluster) * cluster_size;
                        let at = at / 64 * ROWS * 64 + at % 64;
                        let left = [tile::bytes(&left[0]).add(at), tile::bytes(&left[1]).add(at)];
                        multiply::<0, 1>(left, right, panels.shape, 0, &mut counts[turn]);
                        multiply::<2, 3>(left, right, panels.shape, 1, &mut counts[turn]);
                        multiply::<0, 1>(left, right, panels.shape, 2, &mut counts[turn]);
                        turn ^= 1;
                        if let Some(waiting) = waiting {
                            flush::<R, GROUPS>(
                                blocks,
                                pass,
                                &waiting,
                                &counts[turn],
                                &mut sums[waiting.panel],
                            );
                        }
                        let first_group = cluster * GROUPS;
                        waiting = Some(Waiting { first_group, scale: &panels.scales[index], panel });
                    }
                }
                if let Some(waiting) = waiting {
                    flush::<R, GROUPS>(blocks, pass, &waiting, &counts[turn ^ 1], &mut sums[waiting.panel]);
                }
            }
        }
    }
    true
}

/// Counts a cluster of two blocks of rows in one term of a panel's activations.
///
/// # Safety
/// As [`products`]; tiles are configured.
#[inline(always)]
unsafe fn multiply<const S0: u8, const S1: u8>(
    left: [*const u8; 2],
    right: *const u8,
    Shape { pieces, depth, .. }: Shape,
    term: usize,
    counts: &mut Counts,
) {
    // SAFETY: the caller's promise.
    unsafe {
        tile::zero::<S0>();
        tile::zero::<S1>();
        for piece in 0..pieces {
            let right = right.add((piece * TERMS + term) * 16 * depth);
            tile::load::<RIGHT>(right, 64);
            if term == 0 || pieces > 1 {
                tile::load::<{ LEFT[0] }>(left[0].add(piece * 64 * ROWS), 64);
                tile::load::<{ LEFT[1] }>(left[1].add(piece * 64 * ROWS), 64);
            }
            tile::multiply_digits::<S0, { LEFT[0] }, RIGHT>();
            tile::multiply_digits::<S1, { LEFT[1] }, RIGHT>();
        }
        tile::store::<S0>(counts[term][0].as_mut_ptr());
        tile::store::<S1>(counts[term][1].as_mut_ptr());
    }
}

/// Adds what the tiles of sums count, scaled, and the biases' part.
///
/// # Safety
/// As [`products`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
unsafe fn flush<'a, R: Rows<'a>, const GROUPS: usize>(
    blocks: &[R; 2],
    pass: usize,
    waiting: &Waiting,
    counts: &Counts,
    sums: &mut Sums,
) {
    // SAFETY: there are parameters of sixteen rows, and of the group.
    unsafe {
        let units = _mm512_load_ps(waiting.scale.units.0.as_ptr().cast());
        let group_sums = _mm512_load_ps(waiting.scale.sums.0.as_ptr().cast());
        let weights = [_mm512_set1_ps(Group::WEIGHTS[0]), _mm512_set1_ps(Group::WEIGHTS[1])];
        for (block, sums) in sums.iter_mut().enumerate() {
            let Some((scales, biases, stride)) = blocks[block].parameters(pass) else { continue };
            for (row, sum) in sums.iter_mut().enumerate() {
                let at = row * stride + waiting.first_group;
                let mut count = float(&counts[2][block][row]);
                count = _mm512_fmadd_ps(float(&counts[1][block][row]), weights[1], count);
                count = _mm512_fmadd_ps(float(&counts[0][block][row]), weights[0], count);
                let scale = repeated::<GROUPS>(scales.add(at));
                let mut total = _mm512_load_ps(sum.0.as_ptr().cast());
                total = _mm512_fmadd_ps(_mm512_mul_ps(count, units), scale, total);
                if R::BIASES {
                    total = _mm512_fmadd_ps(repeated::<GROUPS>(biases.add(at)), group_sums, total);
                }
                _mm512_store_ps(sum.0.as_mut_ptr().cast(), total);
            }
        }
    }
}

/// The parameters of a cluster's groups, over and over.
///
/// # Safety
/// There are `GROUPS` numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn repeated<const GROUPS: usize>(from: *const f32) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        match GROUPS {
            2 => _mm512_castpd_ps(_mm512_set1_pd(from.cast::<f64>().read_unaligned())),
            _ => _mm512_set1_ps(*from),
        }
    }
}

/// What lanes count, as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn float(line: &Line) -> __m512 {
    // SAFETY: a line is a vector.
    _mm512_cvtepi32_ps(unsafe { _mm512_load_si512(line.0.as_ptr().cast()) })
}
