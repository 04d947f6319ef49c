//! The geometry of the tile kernels, and how their launches are planned: pure arithmetic on shapes and on what a kind of card
//! has, so that cards of one kind agree bit for bit.

use super::bindings::{CQ_TILE_K, CQ_TILE_ROWS};
use super::formats::TileKernels;
use super::plan::SharedBytes;
use crate::format::{Element, ZeroPoint};
use crate::QuantFormat;

/// The most columns, rows of x as halves, of the two kernels of a format.
#[cfg(test)]
pub(super) const COLUMNS: [usize; 2] = [FEW_COLUMNS, MOST_COLUMNS];
pub(super) const FEW_COLUMNS: usize = 32;
pub(super) const MOST_COLUMNS: usize = 128;

const ROWS: usize = CQ_TILE_ROWS as usize;
const K: usize = CQ_TILE_K as usize;

/// Blocks that share all steps, as many as a large card, of 132 multiprocessors, has room for. Not a number of the device at
/// hand: where tiles are cut decides how sums are rounded.
const BLOCKS: [usize; 2] = [264, 132];

/// The most steps that are on their way or at hand.
const MOST_STAGES: usize = 4;

/// One launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiles {
    /// The kernel: [`FEW_COLUMNS`] or [`MOST_COLUMNS`].
    pub(super) most_columns: usize,
    /// Rows of halves that a block multiplies at a time.
    pub(super) columns: usize,
    pub(super) stages: usize,
    pub(super) blocks: usize,
    pub(super) shared_bytes: usize,
}

impl Tiles {
    /// For so many rows of halves.
    pub(super) fn plan(format: QuantFormat, kernels: TileKernels, halves: usize, card: SharedBytes) -> Self {
        let tiles = halves.div_ceil(MOST_COLUMNS).max(1);
        let unit = if halves <= FEW_COLUMNS { 16 } else { 32 };
        let columns = halves.div_ceil(tiles).next_multiple_of(unit).max(unit);
        Self::of_columns(format, kernels, columns, card)
    }

    /// Columns for pairs of tokens and experts, of which those of one expert are `mean` rows of halves in the mean. There is room
    /// for twice as many: another tile would bring the weights once more.
    pub(super) fn columns_for_experts(mean: usize) -> usize {
        (2 * mean).next_multiple_of(FEW_COLUMNS).clamp(FEW_COLUMNS, MOST_COLUMNS)
    }

    /// For so many columns, or as many as a card has room for.
    pub(super) fn of_columns(
        format: QuantFormat,
        kernels: TileKernels,
        mut columns: usize,
        card: SharedBytes,
    ) -> Self {
        let (most_columns, blocks) = match columns {
            ..=FEW_COLUMNS => (FEW_COLUMNS, BLOCKS[0]),
            _ => (MOST_COLUMNS, BLOCKS[1]),
        };
        let bytes = |columns, stages| shared_bytes(format, kernels, most_columns, columns, stages);
        let fit_twice = most_columns == FEW_COLUMNS && bytes(columns, 2) <= card.of_two;
        let most = if fit_twice { card.of_two } else { card.of_one };
        while columns > FEW_COLUMNS && bytes(columns, 2) > most {
            columns -= FEW_COLUMNS;
        }
        let stages = (2..=MOST_STAGES).rev().find(|stages| bytes(columns, *stages) <= most).unwrap_or(2);
        Self { most_columns, columns, stages, blocks, shared_bytes: bytes(columns, stages) }
    }

    /// Sums of parts of tiles, and arrivals, that there has to be room for.
    pub(super) fn parts(&self) -> (usize, usize) {
        (2 * self.blocks * self.columns * ROWS, self.blocks)
    }
}

/// Whether the kernels, which count words and groups of all experts in 32 bits, can find so many rows.
pub(super) fn can_index(format: QuantFormat, rows: usize, k: usize) -> bool {
    let of_row = (k * format.bits() / 32).max(k / format.group_size());
    rows.checked_mul(of_row).is_some_and(|all| all <= u32::MAX as usize)
}

/// K as rows of halves have it.
pub(super) fn padded(k: usize) -> usize {
    k.next_multiple_of(K)
}

/// Whether fields of codes i and i + 4 of eight are in one word, else those of neighbours: the `SPLIT` of the kernels.
pub(super) fn is_split(format: QuantFormat) -> bool {
    match format.element() {
        Element::Uint(bits) => bits.get() < 8,
        Element::E2m1 => true,
        Element::E4m3 | Element::Int8 | Element::Nf4 | Element::Fp4 | Element::Iq4Nl | Element::Iq(_) => {
            false
        }
    }
}

/// What a step takes of weights, sums of x for all columns that there could be, and some columns of x.
fn stage_bytes(format: QuantFormat, kernels: TileKernels, most_columns: usize, columns: usize) -> usize {
    let padding = match format.bits() {
        8 => 32,
        bits if bits % 2 == 1 => 0,
        _ => 16,
    };
    let sums = match format.zero_point() == ZeroPoint::Bias {
        true => most_columns * (K / kernels.group) * size_of::<f32>(),
        false => 0,
    };
    ROWS * (K / 8 * format.bits() + padding) + sums + columns * K * 2
}

/// Shared memory of a block; `TileMemory` of `cuda/tiles.cuh` has the same numbers.
fn shared_bytes(
    format: QuantFormat,
    kernels: TileKernels,
    most_columns: usize,
    columns: usize,
    stages: usize,
) -> usize {
    let finished = columns * (ROWS + 4) * size_of::<f32>();
    (stages * stage_bytes(format, kernels, most_columns, columns)).max(finished) + columns * size_of::<u32>()
}

/// The most that a launch of a kernel asks for on a card.
#[cfg(test)]
pub(super) fn most_shared_bytes(kernels: TileKernels, most_columns: usize, card: SharedBytes) -> usize {
    use super::formats::FormatKernels;
    let all = QuantFormat::all().into_iter().chain(QuantFormat::only_read());
    let those = all.filter(|format| FormatKernels::of(*format).is_ok_and(|of| of.tiles() == kernels));
    let of = |format| Tiles::plan(format, kernels, most_columns, card).shared_bytes;
    those.map(of).max().expect("a format")
}

#[cfg(test)]
mod tests {
    use super::super::formats::FormatKernels;
    use super::*;
    use std::process::Command;

    const KB: usize = 1 << 10;
    /// Of compute capability 7.5, 8.0, 8.6 and 9.0.
    const CARDS: [SharedBytes; 4] = [
        SharedBytes { of_two: 48 * KB, of_one: 64 * KB },
        SharedBytes { of_two: 81 * KB, of_one: 163 * KB },
        SharedBytes { of_two: 49 * KB, of_one: 99 * KB },
        SharedBytes { of_two: 113 * KB, of_one: 227 * KB },
    ];

    fn formats() -> Vec<(QuantFormat, TileKernels)> {
        let all = QuantFormat::all().into_iter().chain(QuantFormat::only_read());
        all.filter_map(|format| Some((format, FormatKernels::of(format).ok()?.tiles()))).collect()
    }

    #[test]
    fn launches_fit_every_card() {
        for (format, kernels) in formats() {
            for card in CARDS {
                for halves in (1..=300).chain([448, 1024, 4096]) {
                    let plan = Tiles::plan(format, kernels, halves, card);
                    assert!(plan.shared_bytes <= card.of_one, "{format} {halves} {plan:?}");
                    assert!(
                        plan.columns <= plan.most_columns && plan.columns.is_multiple_of(16),
                        "{format} {plan:?}"
                    );
                    assert!(halves <= 32 || plan.columns.is_multiple_of(32), "{format} {plan:?}");
                }
            }
            let plan = Tiles::plan(format, kernels, 128, CARDS[3]);
            assert!(plan.columns == 128 && plan.stages >= 3, "{format} {plan:?}");
            let plan = Tiles::plan(format, kernels, 32, CARDS[3]);
            assert!(plan.shared_bytes <= CARDS[3].of_two && plan.stages >= 3, "{format} {plan:?}");
        }
    }

    #[test]
    fn rows_are_dealt_out_evenly() {
        let format = QuantFormat::affine(4, 64).unwrap();
        let kernels = FormatKernels::of(format).unwrap().tiles();
        let columns = |halves| {
            let plan = Tiles::plan(format, kernels, halves, CARDS[3]);
            (plan.most_columns, plan.columns)
        };
        let expected = [
            (9, (32, 16)),
            (17, (32, 32)),
            (33, (128, 64)),
            (128, (128, 128)),
            (130, (128, 96)),
            (300, (128, 128)),
        ];
        for (halves, of) in expected {
            assert_eq!(columns(halves), of, "{halves}");
        }
        assert_eq!([0, 3, 16, 17, 40, 500].map(Tiles::columns_for_experts), [32, 32, 32, 64, 96, 128]);
    }

    #[test]
    fn weights_of_more_than_16_gib_are_left_to_others() {
        let format = QuantFormat::affine(8, 64).unwrap();
        let rows_of_16_gib = (1 << 34) / 4096;
        assert!(can_index(format, rows_of_16_gib - 1, 4096) && !can_index(format, rows_of_16_gib, 4096));
        assert!(!can_index(format, usize::MAX, 4096));
    }

    /// The kernels' own header, compiled for the host, has the same numbers.
    #[test]
    fn shapes_are_those_of_the_kernels() {
        let dir = tempfile::tempdir().unwrap();
        let mut source = String::from(
            "#include <cstdio>\n#include \"tiles_shape.cuh\"\n\
             template <int B, bool A> struct Format { enum { BITS = B, HAS_BIASES = A }; };\n\
             template <class S> void show() { printf(\"%d\\n\", CQ_TILE_ROWS * S::ROW_BYTES + S::SUM_BYTES); }\n\
             int main() {\n",
        );
        let all: Vec<_> =
            formats().into_iter().flat_map(|of| COLUMNS.map(|columns| (of.0, of.1, columns))).collect();
        for (format, kernels, columns) in &all {
            let (bits, sums, group) = (format.bits(), format.zero_point() == ZeroPoint::Bias, kernels.group);
            source += &format!("show<cq::TileShape<Format<{bits}, {sums}>, {group}, {columns}>>();\n");
        }
        let (file, program) = (dir.path().join("shapes.cpp"), dir.path().join("shapes"));
        std::fs::write(&file, source + "}\n").unwrap();
        let cuda = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda");
        let mut compiler = Command::new(std::env::var("CXX").unwrap_or("c++".into()));
        let compiled = compiler.args(["-std=c++17", "-I", cuda, "-o"]).args([&program, &file]).status();
        assert!(compiled.expect("a C++ compiler").success());
        let told = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
        assert_eq!(told.lines().count(), all.len());
        for ((format, kernels, columns), theirs) in all.into_iter().zip(told.lines()) {
            assert_eq!(stage_bytes(format, kernels, columns, 0).to_string(), theirs, "{format} {columns}");
        }
    }
}
