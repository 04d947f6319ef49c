//! Rows of x, up to sixteen to a *panel*, as the right-hand operands of tiles.
//!
//! Each of the three limbs of a panel's activations fills the sixteen columns of a tile. Up to eight rows of x fill them
//! with two groups of weights: column `2 * row + group` has zeros where the other group has its activations. So a tile of
//! sums covers a *cluster* of groups, and a row's scales repeat along it.

use super::super::isa::amx_tile::{Line, COLUMNS};
use super::super::isa::avx512::Avx512;
use super::super::tasks;
use super::fixed_point::LIMBS;
use super::group_limbs::Group;

/// Bytes of x that are multiplied in one pass over the weights: they stay in the second-level cache.
const BYTES_PER_PASS: usize = 1 << 20;

/// Clusters whose tiles a thread fills at a time.
const CLUSTERS_OF_TASK: usize = 16;

/// Rows of x that are multiplied in one pass over the weights.
pub(super) fn m_per_pass(k: usize) -> usize {
    let panel_bytes = COLUMNS * LIMBS * k;
    COLUMNS * (BYTES_PER_PASS / panel_bytes.max(1)).max(1)
}

/// Rows of x as tiles.
pub(super) struct Panels {
    /// `[panel][cluster][tile][limb]`: the right-hand tiles, `depth / 4` lines each.
    pub(super) lines: Vec<Line>,
    /// `[panel][cluster]`.
    pub(super) scales: Vec<PanelScale>,
    /// Rows of x.
    pub(super) m: usize,
    pub(super) clusters: usize,
    pub(super) shape: Shape,
}

/// How a cluster is cut into tiles.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) group_size: usize,
    /// Groups of a cluster.
    pub(super) groups: usize,
    /// Tiles that a cluster fills; one if it fills a part of one.
    pub(super) tiles: usize,
    /// Bytes of a cluster in a row of a tile.
    pub(super) depth: usize,
}

impl Shape {
    fn new(group_size: usize, m: usize) -> Self {
        // Not four groups for up to four rows: a row of x should have the same output, bit for bit, in any batch.
        let groups = if m <= COLUMNS / 2 { 2 } else { 1 };
        let bytes = groups * group_size;
        Self { group_size, groups, tiles: bytes.div_ceil(64), depth: bytes.min(64) }
    }

    pub(super) fn lines(self) -> usize {
        self.tiles * LIMBS * self.depth / 4
    }

    /// Rows of x in a panel.
    pub(super) fn m_of_panel(self) -> usize {
        COLUMNS / self.groups
    }
}

/// What scales the sums of a panel's cluster.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct PanelScale {
    /// The unit of each column.
    pub(super) units: Line,
    /// The sum of each column's activations.
    pub(super) sums: Line,
}

impl Panels {
    /// `x` is `[m, k]`, without outliers; weights are multiples of `unit`.
    pub(super) fn new(_isa: Avx512, (group_size, unit): (usize, f32), k: usize, x: &[f32]) -> Self {
        let m = x.len() / k;
        let shape = Shape::new(group_size, m);
        let cluster_size = shape.groups * group_size;
        let clusters = k.div_ceil(cluster_size);
        let all = m.div_ceil(shape.m_of_panel()) * clusters;
        let mut all_lines = vec![Line::ZERO; all * shape.lines()];
        let mut scales = vec![PanelScale { units: Line::ZERO, sums: Line::ZERO }; all];
        let parts =
            all_lines.chunks_mut(CLUSTERS_OF_TASK * shape.lines()).zip(scales.chunks_mut(CLUSTERS_OF_TASK));
        tasks::for_each(parts, |part, (lines, scales)| {
            for (index, (lines, scale)) in lines.chunks_mut(shape.lines()).zip(scales).enumerate() {
                let index = part * CLUSTERS_OF_TASK + index;
                let (panel, cluster) = (index / clusters, index % clusters);
                let rows = x.chunks_exact(k).skip(panel * shape.m_of_panel()).take(shape.m_of_panel());
                for (row, x) in rows.enumerate() {
                    let x = x.chunks(cluster_size).nth(cluster).unwrap_or_default();
                    // SAFETY: `_isa` proves that the CPU has the features of the function.
                    unsafe { fill(shape, row, x, unit, (lines, scale)) };
                }
            }
        });
        Self { lines: all_lines, scales, m, clusters, shape }
    }
}

/// Fills the columns of row `row` of a panel in a cluster's tiles with its activations `x`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn fill(shape: Shape, row: usize, x: &[f32], unit: f32, (lines, scale): (&mut [Line], &mut PanelScale)) {
    let mut group = Group::EMPTY;
    let words_per_tile = shape.depth / 4;
    let words_per_group = shape.group_size / Group::PER_WORD;
    for (index, x) in x.chunks(shape.group_size).enumerate() {
        group.fill(x);
        let column = row * shape.groups + index;
        for (limb, words) in group.words.iter().enumerate() {
            for (word, value) in words.iter().take(x.len() / Group::PER_WORD).enumerate() {
                let word = index * words_per_group + word;
                let (tile, within) = (word / words_per_tile, word % words_per_tile);
                lines[(tile * LIMBS + limb) * words_per_tile + within].0[column] = *value;
            }
        }
        scale.units.0[column] = (group.unit * unit).to_bits();
        scale.sums.0[column] = group.sum.to_bits();
    }
}
