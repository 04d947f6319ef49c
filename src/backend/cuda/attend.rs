//! The launch of attention for one new token of each sequence: arithmetic on shapes, so that all cards add up in the same
//! order. Only how many tiles a warp has on their way depends on the card, which changes no bit.

use super::bindings::{
    CQ_ATTEND_HEADS, CQ_ATTEND_KEYS, CQ_ATTEND_SPLITS, CQ_ATTEND_THREADS, CQ_ATTEND_UNSPLIT, CQ_PROMPT_ROWS,
};
use super::kernel::Kernel;
use super::plan::{SharedBytes, MOST_BLOCKS};
use crate::{DeviceKvCache, KvFormat};
use candle_core::DType;
use half::f16;
use std::ops::RangeInclusive;

/// The most elements of a head of the kernel for f32.
const MOST_HEAD_DIM: usize = 256;

const KEYS: usize = CQ_ATTEND_KEYS as usize;
const HEADS: usize = CQ_ATTEND_HEADS as usize;
const WARPS: usize = CQ_ATTEND_THREADS as usize / 32;
const MOST_SPLITS: usize = CQ_ATTEND_SPLITS as usize;
const UNSPLIT: usize = CQ_ATTEND_UNSPLIT as usize;

/// Blocks that a launch has if there are keys for them: two for each of 132 multiprocessors.
const BLOCKS: usize = 264;

/// What a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cached {
    /// Numbers of the dtype of queries.
    Numbers,
    /// Codes, of keys and of values.
    Codes([KvFormat; 2]),
}

/// Queries, and the keys that they share.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttendShape {
    pub(super) sequences: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

/// A launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attend {
    pub(super) kernel: Kernel,
    /// Query heads are dealt to blocks by eights, or fewer, of one key head of one sequence.
    pub(super) shares: usize,
    /// Blocks for each share.
    pub(super) splits: usize,
    /// The most splits of a text of any length.
    pub(super) most_splits: usize,
    pub(super) stages: usize,
    pub(super) shared_bytes: usize,
}

impl Attend {
    /// The launch for tokens at the last of the positions `seen`; without them, for any, of which it learns when it runs. None
    /// if no kernel takes heads of this size or dtype, or the card, which multiplies `bf16` or does not, has too little
    /// shared memory for it.
    pub(super) fn plan(
        shape: AttendShape,
        (dtype, cached): (DType, Cached),
        seen: Option<RangeInclusive<usize>>,
        (bf16, shared): (bool, SharedBytes),
    ) -> Option<Self> {
        let AttendShape { sequences, heads, kv_heads, head_dim } = shape;
        let kernel = match cached {
            Cached::Numbers => kernel(head_dim, dtype).filter(|_| bf16 || dtype != DType::BF16)?,
            Cached::Codes(formats) => codes_kernel(head_dim, dtype, formats)?,
        };
        let bytes = |stages| shared_bytes(kernel, head_dim, stages);
        // Rather a block alone than none.
        let fits = |most| [2, 1].into_iter().find(|stages| bytes(*stages) <= most);
        let stages = fits(shared.of_two).or_else(|| fits(shared.of_one))?;
        let shares = sequences * kv_heads * (heads / kv_heads).div_ceil(HEADS);
        let most_splits = (BLOCKS / shares.max(1)).clamp(1, MOST_SPLITS);
        let splits = seen.map_or(most_splits, |seen| {
            let tiles = seen.end() / KEYS - seen.start() / KEYS + 1;
            tiles.div_ceil(tiles_of_split(tiles, most_splits))
        });
        (shares <= MOST_BLOCKS).then_some(Self {
            kernel,
            shares,
            splits,
            most_splits,
            stages,
            shared_bytes: bytes(stages),
        })
    }

    /// Numbers that blocks leave to the one that joins them.
    pub(super) fn partial(&self, head_dim: usize) -> usize {
        if self.splits > 1 {
            self.shares * self.splits * HEADS * (head_dim + 2)
        } else {
            0
        }
    }
}

/// As the kernels have it: no warp is without one, if there is more than one split.
fn tiles_of_split(tiles: usize, most_splits: usize) -> usize {
    match tiles {
        ..=UNSPLIT => tiles,
        _ => tiles.div_ceil(most_splits).max(WARPS),
    }
}

#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that no kernel takes")]
fn kernel(head_dim: usize, dtype: DType) -> Option<Kernel> {
    let halves = |bf16| {
        DeviceKvCache::KERNEL_HEAD_DIMS.contains(&head_dim).then_some(Kernel::Attend { head_dim, bf16 })
    };
    match dtype {
        DType::F16 => halves(false),
        DType::BF16 => halves(true),
        DType::F32 => (head_dim <= MOST_HEAD_DIM).then_some(Kernel::AttendF32),
        _ => None,
    }
}

/// Whether kernels read queries of this dtype beside codes.
fn is_read_beside_codes(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
}

fn codes_kernel(head_dim: usize, dtype: DType, [keys, values]: [KvFormat; 2]) -> Option<Kernel> {
    (DeviceKvCache::KERNEL_HEAD_DIMS.contains(&head_dim) && is_read_beside_codes(dtype))
        .then_some(Kernel::AttendCodes { head_dim, keys, values })
}

/// A launch for several new tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttendPrompt {
    pub(super) kernel: Kernel,
    /// Of codes that are on their way or at hand.
    pub(super) stages: usize,
    pub(super) shared_bytes: usize,
}

impl AttendPrompt {
    /// None if there is no kernel for heads of this size and dtype, or the card, which multiplies `bf16` or does not, has no room for
    /// its blocks.
    pub(super) fn plan(
        head_dim: usize,
        (dtype, cached): (DType, Cached),
        (bf16, shared): (bool, SharedBytes),
    ) -> Option<Self> {
        if !DeviceKvCache::KERNEL_HEAD_DIMS.contains(&head_dim) {
            return None;
        }
        let (kernel, stages): (_, &[usize]) = match cached {
            Cached::Numbers => {
                let is_half = dtype == DType::F16 || (bf16 && dtype == DType::BF16);
                (is_half.then_some(Kernel::AttendPrompt { head_dim, bf16: dtype == DType::BF16 })?, &[2])
            }
            Cached::Codes(_) => {
                (is_read_beside_codes(dtype).then_some(Kernel::AttendPromptCodes { head_dim })?, &[2, 1])
            }
        };
        let plans = stages.iter().map(|&stages| {
            let shared_bytes = match cached {
                Cached::Numbers => stages * prompt_tile_bytes(head_dim),
                Cached::Codes(formats) => prompt_codes_shared_bytes(head_dim, formats, stages),
            };
            Self { kernel, stages, shared_bytes }
        });
        plans.into_iter().find(|plan| plan.shared_bytes <= shared.of_one)
    }
}

/// Queries of a block: those of large heads are shared by two warps.
pub(super) fn prompt_rows(head_dim: usize) -> usize {
    CQ_PROMPT_ROWS as usize / if head_dim > 128 { 2 } else { 1 }
}

/// Keys of a step of its blocks.
fn prompt_keys(head_dim: usize) -> usize {
    if head_dim > 128 {
        32
    } else {
        64
    }
}

/// Keys and values of a step as halves. `PromptShape` of `cuda/attend_prompt.cuh` has the same numbers.
pub(super) fn prompt_tile_bytes(head_dim: usize) -> usize {
    let key_row = ((2 * head_dim).div_ceil(64) | 1) * 64;
    let value_row = ((head_dim / 8) | 1) * 16;
    prompt_keys(head_dim) * (key_row + value_row)
}

/// A tile, stages of codes, a factor for each row.
pub(super) fn prompt_codes_shared_bytes(head_dim: usize, formats: [KvFormat; 2], stages: usize) -> usize {
    let of_row = |format: KvFormat| head_dim * format.bits() / 8 + 4 * format.groups(head_dim);
    let of_rows: usize = formats.into_iter().map(of_row).sum();
    let factors = prompt_rows(head_dim) * size_of::<f32>();
    prompt_tile_bytes(head_dim) + stages * prompt_keys(head_dim) * of_rows + factors
}

/// What warps copy, `stages` tiles each, or what they found, or the factors of splits behind a flag: one after the other. Behind
/// the copies, or in f32 behind what is found, queries and the new key, ready to be multiplied.
pub(super) fn shared_bytes(kernel: Kernel, head_dim: usize, stages: usize) -> usize {
    // Chunks of 16 bytes: of keys as many for each of four lanes, of values an odd number in a row.
    let chunks = head_dim.div_ceil(32) * 4 + ((head_dim / 8) | 1);
    let found = WARPS * HEADS * (head_dim + 4 + 2) * size_of::<f32>();
    let factors = 16 + MOST_SPLITS * HEADS * size_of::<f32>();
    let placed = (HEADS + 1) * head_dim;
    let used = if let Kernel::AttendCodes { keys, values, .. } = kernel {
        let formats = [keys, values];
        // Of each plane codes for each lane, of groups that may be cut short, and scales and biases; then a tile of values as halves.
        let plane = |format: KvFormat| {
            let group_bytes = format.group_size().unwrap_or_default() * format.bits() / 8;
            (KEYS * format.groups(head_dim) * (group_bytes + 4)).next_multiple_of(16)
        };
        let stage: usize = formats.into_iter().map(plane).sum();
        let warp = KEYS * ((head_dim / 8) | 1) * 16 + stages * stage;
        let row = |format: KvFormat| (head_dim * format.bits() / 8).next_multiple_of(16) + 32;
        let rows: usize = formats.into_iter().map(row).sum();
        let of_head = head_dim * size_of::<f16>() + (1 + keys.groups(head_dim)) * size_of::<f32>();
        let placed = HEADS * of_head + rows + WARPS * head_dim * size_of::<f32>();
        // Outputs that are to be rotated back.
        let outputs = if values.is_rotated() { HEADS * head_dim * size_of::<f32>() } else { 0 };
        (WARPS * warp + placed).max(found + outputs)
    } else if kernel == Kernel::AttendF32 {
        found + placed * size_of::<f32>()
    } else {
        (WARPS * stages * KEYS * chunks * 16 + placed * size_of::<f16>()).max(found)
    };
    used.max(factors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const H200: (bool, SharedBytes) = (true, SharedBytes { of_two: 113 << 10, of_one: 227 << 10 });

    /// A card whose multiprocessors have so much shared memory.
    fn with_shared(kilobytes: usize, bf16: bool) -> (bool, SharedBytes) {
        (bf16, SharedBytes { of_two: (kilobytes / 2) << 10, of_one: kilobytes << 10 })
    }

    fn plan(shape: AttendShape, seen: RangeInclusive<usize>) -> Attend {
        Attend::plan(shape, (DType::BF16, Cached::Numbers), Some(seen), H200).unwrap()
    }

    #[test]
    fn splits_have_tiles_for_all_warps_and_leave_none_out() {
        for (sequences, heads, kv_heads) in [(1, 32, 8), (1, 16, 1), (2, 71, 1), (16, 64, 8), (300, 8, 8)] {
            let shape = AttendShape { sequences, heads, kv_heads, head_dim: 128 };
            for (first, position) in [(0, 0), (0, 15), (0, 63), (0, 64), (5, 133), (0, 4095), (37, 131_071)] {
                let Attend { splits, most_splits, shares, .. } = plan(shape, first..=position);
                let tiles = position / 16 - first / 16 + 1;
                let tiles_per_split = tiles_of_split(tiles, most_splits);
                assert!(splits * tiles_per_split >= tiles && (splits - 1) * tiles_per_split < tiles);
                assert!(tiles_per_split >= 4 || splits == 1);
                assert!(splits <= 64 && (tiles > 12 || splits == 1));
                assert!(shares >= sequences * kv_heads && (shares * splits <= 264 || splits == 1));
                // One launch for all positions has blocks for each.
                let all = Attend::plan(shape, (DType::BF16, Cached::Numbers), None, H200).unwrap();
                assert!(all.splits == most_splits && splits <= most_splits);
                assert_eq!(Attend { splits, ..all }, plan(shape, first..=position));
            }
        }
        // 8 key heads at 4224 tokens: 33 splits of 8 tiles, two for each warp, for 264 blocks.
        let llama = AttendShape { sequences: 1, heads: 32, kv_heads: 8, head_dim: 128 };
        let Attend { shares, splits, most_splits, .. } = plan(llama, 0..=4223);
        assert_eq!((shares, splits, most_splits, tiles_of_split(264, 33)), (8, 33, 33, 8));
    }

    #[test]
    fn cards_differ_in_what_is_on_its_way_alone() {
        let shape = AttendShape { sequences: 1, heads: 32, kv_heads: 8, head_dim: 128 };
        let on = |most_shared| {
            let of = (DType::F16, Cached::Numbers);
            Attend::plan(shape, of, Some(0..=700), with_shared(most_shared, false)).unwrap()
        };
        let (small, large) = (on(96), on(226));
        assert_eq!((small.stages, large.stages), (1, 2));
        assert_eq!((small.shared_bytes, large.shared_bytes), (36_096, 69_888));
        assert_eq!(Attend { stages: 2, shared_bytes: large.shared_bytes, ..small }, large);
    }

    #[test]
    fn what_has_no_kernel_has_no_plan() {
        let of = |head_dim, dtype, card| {
            Attend::plan(
                AttendShape { sequences: 1, heads: 8, kv_heads: 2, head_dim },
                (dtype, Cached::Numbers),
                Some(0..=9),
                card,
            )
        };
        assert!(of(72, DType::F16, H200).is_none() && of(72, DType::F32, H200).is_some());
        assert!(of(512, DType::F32, H200).is_none() && of(64, DType::F64, H200).is_none());
        // A card without bf16, and one with little shared memory.
        assert!(
            of(64, DType::BF16, with_shared(64, false)).is_none()
                && of(64, DType::F16, with_shared(64, false)).is_some()
        );
        assert!(of(256, DType::F16, with_shared(64, true)).is_none() && of(256, DType::F16, H200).is_some());
        // A block of heads of 256 has a multiprocessor of 100 KB alone.
        let alone = of(256, DType::F16, with_shared(100, true)).unwrap();
        assert_eq!((alone.stages, alone.shared_bytes > 50 << 10), (1, true));

        let prompt = |head_dim, dtype, cached, card| {
            AttendPrompt::plan(head_dim, (dtype, cached), card).map(|plan| plan.stages)
        };
        let (turing, codes) = (with_shared(64, false), Cached::Codes([KvFormat::Affine8; 2]));
        assert_eq!(prompt(128, DType::F16, Cached::Numbers, turing), None);
        assert_eq!(prompt(128, DType::F32, Cached::Numbers, H200), None);
        // Codes leave room for one stage, whatever multiplies.
        assert_eq!(prompt(128, DType::BF16, codes, turing), Some(1));
        assert_eq!(prompt(128, DType::F32, codes, H200), Some(2));
        assert_eq!((prompt(128, DType::F64, codes, H200), prompt(72, DType::F16, codes, H200)), (None, None));
    }

    /// The kernels' own source, compiled for the host, has the same numbers.
    #[test]
    fn shared_memory_of_prompts_is_that_of_the_kernels() {
        let source = include_str!("../../../cuda/attend_prompt.cuh");
        let begin = source.find("template <int D> struct PromptShape").expect("the shape");
        let shape = &source[begin..begin + source[begin..].find("};").expect("its end") + 2];
        let mut program = format!(
            "#include <cstdio>\nconstexpr int PROMPT_THREADS = {CQ_ATTEND_THREADS};\n{shape}\nint main() {{\n"
        );
        for head_dim in DeviceKvCache::KERNEL_HEAD_DIMS {
            program += &format!(
                "printf(\"%d %d\\n\", PromptShape<{head_dim}>::STAGE, PromptShape<{head_dim}>::ROWS);\n"
            );
        }
        let dir = tempfile::tempdir().unwrap();
        let (file, binary) = (dir.path().join("shape.cpp"), dir.path().join("shape"));
        std::fs::write(&file, program + "}\n").unwrap();
        let mut compiler = Command::new(std::env::var("CXX").unwrap_or("c++".into()));
        assert!(compiler
            .args(["-std=c++17", "-o"])
            .args([&binary, &file])
            .status()
            .expect("a compiler")
            .success());
        let told = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
        assert_eq!(
            told.lines().collect::<Vec<_>>(),
            DeviceKvCache::KERNEL_HEAD_DIMS.map(|d| format!("{} {}", prompt_tile_bytes(d), prompt_rows(d)))
        );
    }
}
