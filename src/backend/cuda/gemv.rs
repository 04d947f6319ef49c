//! The geometry of the tensor-core GEMV, and how its launches are planned: pure arithmetic on shapes, so that cards of
//! one kind agree bit for bit.
//!
//! [`GemvShape`] has the numbers of `cuda/gemv_shape.cuh` and `cuda/gemv_staging.cuh`.

use super::plan::{tokens_of_launch, MOST_BLOCKS};
use crate::format::{Element, Scale};
use crate::QuantFormat;

/// Blocks that fill a large card, two for each of 132 multiprocessors. Not a number of the device at hand: how k is split
/// decides how sums are rounded, and cards of one architecture round alike.
const ENOUGH_BLOCKS: usize = 264;

/// The geometry of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GemvShape {
    format: QuantFormat,
    /// Rows of x: 1, 2, 4, 8 or 16.
    pub rows: usize,
    /// Consecutive weights that a lane loads; k has to be a multiple.
    chunk: usize,
    /// Weights between two applications of scales; the unit in which k is split.
    round: usize,
    /// Elements of x with a factor in common.
    x_group: usize,
    /// Bytes of weights that are on their way to a warp at a time.
    ring_bytes: usize,
    /// Blocks of rows whose sums wait to be added up.
    waiting: usize,
}

impl GemvShape {
    fn new(format: QuantFormat, rows: usize) -> Self {
        let (bits, group) = (format.bits(), format.group_size());
        let columns = if rows < 8 { 8 / rows } else { 1 };
        let longest = if bits == 8 { 256 } else { 512 };
        let slots = if columns * group > 512 { longest / group } else { columns };
        let folded = !has_offsets(format) && rows >= 8;
        let wide = if bits == 4 { 32 } else { 64 };
        let chunk = match (bits, rows) {
            (8, _) => 16,
            (1 | 3 | 5, 1) if has_units(format) => 64,
            (1 | 3 | 5, 1) => 128,
            (1 | 3 | 5, _) => 32,
            _ if folded => group.min(32),
            (_, 1..8) if 4 * wide <= 2 * slots * group => wide,
            _ if group < 128 => 16,
            _ => 32,
        };
        let round = if folded { 256 } else { (4 * chunk).max(slots * group) };
        let (words, steps) = (chunk * bits / 32, round / (4 * chunk));
        let has_passes = !folded && round > slots * group;
        let on_their_way = if rows < 8 { 16 } else { 8 };
        let batch = match steps * words {
            some if has_passes || 2 * some > on_their_way => 1,
            some if 4 * some > on_their_way => 2,
            _ => 4,
        };
        let most = (on_their_way / words).clamp(1, batch * steps);
        let ring = 1 << most.ilog2();
        let waiting = match rows {
            1 if words > 16 => 4,
            1 => 8,
            2 => 2,
            _ => 1,
        };
        let x_group = if folded { round } else { group };
        Self { format, rows, chunk, round, x_group, ring_bytes: ring * words * 256, waiting }
    }

    /// The most rows of x in one launch.
    pub(super) fn most_rows(format: QuantFormat) -> usize {
        let has_registers = format.bits().is_multiple_of(2);
        match format.group_size() {
            ..32 if has_offsets(format) && has_registers => 4,
            ..32 if has_offsets(format) => 2,
            ..64 if has_units(format) && !has_registers => 4,
            ..64 => 8,
            _ => 16,
        }
    }

    /// The smallest kernel that takes `m` rows of x (or the most that one takes), rows of k weights, and
    /// weights of this alignment in bytes.
    pub(super) fn choose(format: QuantFormat, m: usize, k: usize, alignment: usize) -> Option<Self> {
        let most = Self::most_rows(format);
        [1, 2, 4, 8, 16]
            .into_iter()
            .filter(|rows| (m.min(most)..=most).contains(rows))
            .map(|rows| Self::new(format, rows))
            .find(|shape| k.is_multiple_of(shape.chunk) && alignment.is_multiple_of(shape.load_bytes()))
    }

    /// Bytes of one load of weights.
    fn load_bytes(&self) -> usize {
        match self.chunk * self.format.bits() / 32 {
            words if words % 4 == 0 => 16,
            words if words % 2 == 0 => 8,
            _ => 4,
        }
    }

    /// Whether it takes x that is to be normalized.
    pub(super) fn takes_norm(&self) -> bool {
        self.rows < 16
    }

    fn tiles(&self) -> usize {
        self.rows.min(8)
    }

    pub(super) fn rows_per_block(&self) -> usize {
        16 * self.tiles()
    }

    /// Warps that share the k of a row tile.
    pub(super) fn k_warps(&self) -> usize {
        8 / self.tiles()
    }

    /// Shared memory of a block whose share of k has `rounds` rounds.
    fn shared_bytes(&self, rounds: usize) -> usize {
        let (k, group_bytes) = (rounds * self.round, if has_offsets(self.format) { 16 } else { 8 });
        let of_row = 2 * k + group_bytes * (k / self.x_group) + 2 * self.waiting * 4 * 8 * 16 + 4;
        let zeros = if self.rows > 1 { 64 * (self.rows + 1) } else { 0 };
        8 * self.ring_bytes + zeros + self.rows * of_row
    }

    /// Into how many parts k is split, and the rounds of each but the last, for blocks of at most so much shared memory.
    fn split(&self, blocks: usize, k: usize, most_shared_bytes: usize) -> (usize, usize) {
        let rounds = k.div_ceil(self.round);
        let fixed = self.shared_bytes(0);
        let most_rounds = (most_shared_bytes.saturating_sub(fixed) / (self.shared_bytes(1) - fixed)).max(1);
        let to_fill = ENOUGH_BLOCKS / blocks;
        // With fewer rounds than that, more than half of a block's warps would be idle.
        let useful = (2 * rounds / self.k_warps()).clamp(1, rounds);
        let splits = to_fill.clamp(1, useful).max(rounds.div_ceil(most_rounds));
        let per_split = rounds.div_ceil(splits);
        (rounds.div_ceil(per_split), per_split)
    }
}

/// Whether codes as halves carry offsets, which are taken out of sums. Scales cannot be folded into such weights.
fn has_offsets(format: QuantFormat) -> bool {
    match format.element() {
        Element::Uint(_) | Element::Iq4Nl | Element::Iq(_) => true,
        Element::E2m1 | Element::E4m3 | Element::Int8 | Element::Nf4 | Element::Fp4 => false,
    }
}

/// Whether scales count units of super-blocks.
fn has_units(format: QuantFormat) -> bool {
    format.scale() == Scale::SuperBlock
}

/// The outputs of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outputs {
    /// One for each weight.
    Each,
    /// SwiGLU of two weights.
    Gated,
}

/// One launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gemv {
    pub shape: GemvShape,
    /// Rows of x that this launch multiplies.
    pub m: usize,
    /// That cover the rows of all weights.
    pub blocks: usize,
    pub splits: usize,
    pub k_per_split: usize,
    pub shared_bytes: usize,
}

impl Gemv {
    /// Blocks of a launch on a card that has so many multiprocessors, along rows and k: as many as it has room for take turns,
    /// for two of which registers are enough on each.
    pub(super) fn grid(&self, multiprocessors: usize) -> (usize, usize) {
        let blocks = if self.splits == 1 { self.blocks.min(2 * multiprocessors) } else { self.blocks };
        (blocks, self.splits)
    }

    /// The launch for the first of `m` rows of x, as many as it takes, or none if k or the alignment of
    /// the weights fits no kernel.
    ///
    /// `rows_of_weights` has the rows of each weight, of which one is enough for SwiGLU; `alignment` is the
    /// largest power of two, in bytes, that divides the addresses of all packed weights.
    pub(super) fn plan(
        format: QuantFormat,
        rows_of_weights: &[usize],
        outputs: Outputs,
        m: usize,
        k: usize,
        alignment: usize,
        most_shared_bytes: usize,
    ) -> Option<Self> {
        let shape = GemvShape::choose(format, m, k, alignment)?;
        let blocks = match outputs {
            Outputs::Each => {
                rows_of_weights.iter().map(|rows| rows.div_ceil(shape.rows_per_block())).sum::<usize>()
            }
            Outputs::Gated => rows_of_weights.first()?.div_ceil(shape.rows_per_block() / 2),
        };
        let (splits, rounds) = shape.split(blocks, k, most_shared_bytes);
        Some(Self {
            shape,
            m: m.min(shape.rows),
            blocks,
            splits,
            k_per_split: rounds * shape.round,
            shared_bytes: shape.shared_bytes(rounds),
        })
    }

    /// The number of partial sums, if k is split: of outputs, and of the squares of x.
    pub(super) fn partial_sums(&self) -> usize {
        self.splits * self.blocks * (self.shape.rows_per_block() + 1) * self.shape.rows
    }
}

/// One launch for experts, each with one row of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpertGemv {
    /// That cover the rows of an expert.
    pub blocks: usize,
    pub splits: usize,
    pub k_per_split: usize,
    pub shared_bytes: usize,
}

impl ExpertGemv {
    /// The launch for experts of so many rows, or none if k or the alignment of the weights do not fit, or k
    /// has too many parts. Independent of the batch, so a token's result is too.
    pub(super) fn plan(
        format: QuantFormat,
        rows: usize,
        outputs: Outputs,
        top_k: usize,
        k: usize,
        alignment: usize,
        most_shared_bytes: usize,
    ) -> Option<Self> {
        let shape = GemvShape::choose(format, 1, k, alignment).filter(|shape| shape.rows == 1)?;
        let blocks = match outputs {
            Outputs::Each => rows.div_ceil(shape.rows_per_block()),
            Outputs::Gated => rows.div_ceil(shape.rows_per_block() / 2),
        };
        let (splits, rounds) = shape.split(blocks * top_k, k, most_shared_bytes);
        let k_per_split = rounds * shape.round;
        let fits = splits * tokens_of_launch(false, top_k) * top_k <= MOST_BLOCKS;
        fits.then(|| Self { blocks, splits, k_per_split, shared_bytes: shape.shared_bytes(rounds) })
    }

    /// The number of partial sums for so many pairs, if a sum has several parts.
    pub(super) fn partial_sums(&self, pairs: usize) -> usize {
        pairs * self.splits * self.blocks * 16
    }
}

#[cfg(test)]
mod tests {
    use super::super::formats::FormatKernels;
    use super::super::plan::MOST_UNGROUPED_PAIRS;
    use super::*;
    use std::process::Command;

    /// The most shared memory of a block on cards of compute capability 7.5, 8.0, 8.6 and 9.0.
    const CARDS: [usize; 4] = [48 << 10, 81 << 10, 49 << 10, 113 << 10];

    /// Those that have such kernels.
    fn formats() -> impl Iterator<Item = QuantFormat> {
        let all = QuantFormat::all().into_iter().chain(QuantFormat::only_read());
        all.filter(|format| FormatKernels::of(*format).is_ok_and(|kernels| kernels.gemv().is_some()))
    }

    fn shapes() -> Vec<GemvShape> {
        let of_format = |format| {
            let rows = [1, 2, 4, 8, 16].into_iter().filter(move |rows| *rows <= GemvShape::most_rows(format));
            rows.map(move |rows| GemvShape::new(format, rows))
        };
        formats().flat_map(of_format).collect()
    }

    /// The kernels' own header, compiled for the host, has the same numbers.
    #[test]
    fn shapes_are_those_of_the_kernels() {
        let dir = tempfile::tempdir().unwrap();
        let mut source = String::from(
            "#define __host__\n#define __device__\n#include <cstdio>\n#include \"gemv_shape.cuh\"\n\
             template <int B, bool O, bool U> struct Format { enum { BITS = B, HAS_OFFSETS = O, HAS_UNITS = U }; };\n\
             template <class S> void show() {\n  printf(\"%d %d %d %d %d %d %d %d\\n\", S::CHUNK, S::ROUND, \
             S::X_GROUP, S::ROWS_PER_BLOCK, S::K_WARPS, 4 * S::VECTOR, S::RING * S::STEP_BYTES, S::WAITING);\n\
             }\nint main() {\n",
        );
        for GemvShape { format, rows, .. } in shapes() {
            let (bits, group) = (format.bits(), format.group_size());
            let (offsets, units) = (has_offsets(format), has_units(format));
            source +=
                &format!("show<cq::GemvShape<Format<{bits}, {offsets}, {units}>, {group}, {rows}>>();\n");
        }
        let (file, program) = (dir.path().join("shapes.cpp"), dir.path().join("shapes"));
        std::fs::write(&file, source + "}\n").unwrap();
        let cuda = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda");
        let mut compiler = Command::new(std::env::var("CXX").unwrap_or("c++".into()));
        let compiled = compiler.args(["-std=c++17", "-I", cuda, "-o"]).args([&program, &file]).status();
        assert!(compiled.expect("a C++ compiler").success());
        let told = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
        let ours = |shape: GemvShape| {
            let GemvShape { chunk, round, x_group, ring_bytes, waiting, .. } = shape;
            let (rows, k_warps) = (shape.rows_per_block(), shape.k_warps());
            format!(
                "{chunk} {round} {x_group} {rows} {k_warps} {} {ring_bytes} {waiting}",
                shape.load_bytes()
            )
        };
        let shapes = shapes();
        assert_eq!(told.lines().count(), shapes.len());
        for (shape, theirs) in shapes.into_iter().zip(told.lines()) {
            assert_eq!(ours(shape), theirs, "{shape:?}");
        }
    }

    #[test]
    fn splits_cover_k_and_fit_shared_memory() {
        for shape in shapes() {
            let group = shape.format.group_size();
            for k in [group, 3 * group, 96 * group, 2880, 4096, 28672, 1 << 20] {
                if k % group != 0 {
                    continue;
                }
                for (blocks, most) in
                    [1, 2, 32, 100, 256, 4000].into_iter().flat_map(|n| CARDS.map(|most| (n, most)))
                {
                    let (splits, rounds) = shape.split(blocks, k, most);
                    let covered = |splits: usize| splits * rounds * shape.round;
                    assert!(covered(splits) >= k && covered(splits - 1) < k, "{shape:?} k={k}");
                    assert!(shape.shared_bytes(rounds) <= most, "{shape:?} k={k} {most}");
                }
            }
        }
    }

    #[test]
    fn every_row_of_whole_groups_has_a_kernel() {
        for format in formats() {
            for groups in 1..=17 {
                let k = groups * format.granularity();
                for m in [1, 2, 3, 4, 7, 8, 9, 16, 40] {
                    let shape = GemvShape::choose(format, m, k, 16).expect("a kernel");
                    assert!(k.is_multiple_of(shape.chunk));
                    assert!(shape.rows >= m.min(GemvShape::most_rows(format)), "{format} k={k} m={m}");
                }
            }
        }
    }

    #[test]
    fn weights_that_are_not_aligned_go_to_kernels_with_narrower_loads_or_none() {
        let four_bits = QuantFormat::affine(4, 64).unwrap();
        assert_eq!(GemvShape::choose(four_bits, 1, 64, 16).map(|shape| shape.rows), Some(1));
        // Eight rows of x mean 16 weights, 8 bytes, at a time.
        assert_eq!(GemvShape::choose(four_bits, 1, 64, 8).map(|shape| shape.rows), Some(8));
        assert_eq!(GemvShape::choose(four_bits, 1, 64, 4), None);
    }

    #[test]
    fn launches_for_experts_fit_a_grid() {
        let format = QuantFormat::MXFP4;
        let plan = |k| ExpertGemv::plan(format, 16, Outputs::Each, 8, k, 16, CARDS[0]);
        assert!(plan(4096).is_some_and(|plan| plan.splits * MOST_UNGROUPED_PAIRS <= MOST_BLOCKS));
        // x has to fit shared memory: too many parts of K.
        assert_eq!(plan(1 << 20), None);
    }

    #[test]
    fn small_outputs_are_split_and_large_ones_are_not() {
        let format = QuantFormat::affine(4, 64).unwrap();
        let plan = |rows: usize, m, k| {
            Gemv::plan(format, &[rows], Outputs::Each, m, k, 16, CARDS[3]).expect("a kernel")
        };
        assert_eq!((plan(4096, 1, 4096).blocks, plan(4096, 1, 4096).splits), (256, 1));
        assert!(plan(1024, 1, 8192).splits > 1);
        // x alone would not fit a block's shared memory.
        assert!(plan(4096, 16, 4096).splits >= 4);
        assert_eq!(plan(4096, 5, 4096).shape.rows, 8);
        assert_eq!(plan(4096, 33, 4096).m, 16);
        let merged = Gemv::plan(format, &[4096, 1024, 1000], Outputs::Each, 1, 4096, 16, CARDS[0]);
        assert_eq!(merged.map(|plan| plan.blocks), Some(256 + 64 + 63));
        let gated = Gemv::plan(format, &[1000], Outputs::Gated, 2, 4096, 16, CARDS[0]);
        assert_eq!(gated.map(|plan| plan.blocks), Some(63));
    }
}
