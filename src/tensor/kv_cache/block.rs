//! Blocks of 64 tokens, and what one head of one sequence holds of them.

use super::KvFormat;
use half::f16;
use std::collections::VecDeque;

/// Tokens of a block.
pub(crate) const BLOCK: usize = 64;

/// A cache line: blocks begin at one, and vectors do not cross any.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; 16]);

// SAFETY: sixteen words, which may be zero; 64 bytes at an alignment of 64, so no padding.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; every bit pattern is a value.
unsafe impl bytemuck::Pod for Line {}

/// How the keys or the values of a block lie in memory: a matrix of numbers or codes, row after row, and behind it, where
/// the format has them, scales and biases, each `[groups][64 tokens]` in f16.
///
/// Keys are transposed, `[head_dim][64 tokens]`: the products of one query with 64 keys are then sums of whole rows, and no
/// vector has to be added up across its lanes. Values are `[64 tokens][head_dim]`, rows padded with zeros. Of 4-bit codes,
/// each 16 bytes of a row hold 32: the low halves the first 16 of them, the high halves the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Layout {
    pub(crate) format: KvFormat,
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
    /// Groups of a token; none for floats.
    pub(crate) groups: usize,
}

impl Layout {
    pub(super) fn of_keys(format: KvFormat, head_dim: usize) -> Self {
        Self::new(format, (head_dim, BLOCK), head_dim)
    }

    pub(super) fn of_values(format: KvFormat, head_dim: usize) -> Self {
        Self::new(format, (BLOCK, Self::padded(head_dim)), head_dim)
    }

    /// Numbers of a row of values: whole vectors of every instruction set.
    pub(crate) fn padded(head_dim: usize) -> usize {
        head_dim.next_multiple_of(16)
    }

    fn new(format: KvFormat, (rows, columns): (usize, usize), head_dim: usize) -> Self {
        let columns = if format.bits() == 4 { columns.next_multiple_of(32) } else { columns };
        Self { format, rows, row_bytes: columns * format.bits() / 8, groups: format.groups(head_dim) }
    }

    /// Where scales begin: behind whole lines of codes.
    fn scales_at(&self) -> usize {
        (self.rows * self.row_bytes).next_multiple_of(size_of::<Line>())
    }

    pub(super) fn bytes(&self) -> usize {
        self.scales_at() + 2 * self.groups * BLOCK * size_of::<f16>()
    }
}

/// The keys or the values of a block.
pub(crate) struct Plane(Box<[Line]>);

/// The scales or the biases of a block.
type Groups<'a> = &'a mut [f16];

impl Plane {
    fn new(layout: &Layout) -> Self {
        Self(vec![Line([0; 16]); layout.bytes().div_ceil(size_of::<Line>())].into())
    }

    /// Numbers or codes, `rows * row_bytes` of the layout.
    pub(crate) fn codes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    /// Scales and biases, each `[groups][64]`.
    pub(crate) fn groups(&self, layout: &Layout) -> (&[f16], &[f16]) {
        let all: &[f16] = half_slice(bytemuck::cast_slice(&self.0));
        let count = layout.groups * BLOCK;
        let of_groups = all.get(layout.scales_at() / 2..).unwrap_or_default();
        of_groups
            .split_at_checked(count)
            .map_or((&[], &[]), |(scales, rest)| (scales, &rest[..count.min(rest.len())]))
    }

    /// Makes the scales and biases of the tokens from `token` on zero.
    fn forget_groups(&mut self, layout: &Layout, token: usize) {
        let (_, scales, biases) = self.parts_mut(layout);
        for group in scales.chunks_mut(BLOCK).chain(biases.chunks_mut(BLOCK)) {
            group.iter_mut().skip(token).for_each(|number| *number = f16::ZERO);
        }
    }

    /// Numbers or codes, scales, biases.
    pub(crate) fn parts_mut(&mut self, layout: &Layout) -> (&mut [u8], Groups<'_>, Groups<'_>) {
        let count = layout.groups * BLOCK;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.0);
        let (codes, groups) = bytes.split_at_mut(layout.scales_at().min(bytes.len()));
        let groups = half_slice_mut(bytemuck::cast_slice_mut(groups));
        let (scales, biases) = groups.split_at_mut(count.min(groups.len()));
        (codes, scales, biases)
    }
}

fn half_slice(words: &[u16]) -> &[f16] {
    half::slice::HalfBitsSliceExt::reinterpret_cast(words)
}

fn half_slice_mut(words: &mut [u16]) -> &mut [f16] {
    half::slice::HalfBitsSliceExt::reinterpret_cast_mut(words)
}

/// Keys and values of 64 tokens of one head.
pub(crate) struct Block {
    pub(crate) keys: Plane,
    pub(crate) values: Plane,
}

/// What one head of one sequence holds: consecutive blocks, the oldest first.
///
/// Block `n` holds the tokens `64 n .. 64 n + 64`. With a sliding window, blocks that are out of sight become the next new
/// ones, so that `ceil(window / 64) + 1` of them suffice.
#[derive(Default)]
pub(crate) struct HeadCache {
    /// The number of the first block.
    first: usize,
    blocks: VecDeque<Block>,
    /// Blocks without tokens, for the next ones.
    free: Vec<Block>,
}

impl HeadCache {
    /// Block `number`, if there is one.
    pub(crate) fn block(&self, number: usize) -> Option<&Block> {
        self.blocks.get(number.checked_sub(self.first)?)
    }

    /// Block `number`, made if it does not exist yet; nothing if it was dropped.
    pub(crate) fn block_mut(&mut self, number: usize, keys: &Layout, values: &Layout) -> Option<&mut Block> {
        let index = number.checked_sub(self.first)?;
        while self.blocks.len() <= index {
            let new = || Block { keys: Plane::new(keys), values: Plane::new(values) };
            let mut block = self.free.pop().unwrap_or_else(new);
            // Kernels multiply those of tokens to come by weights of zero: they have to be numbers.
            block.keys.forget_groups(keys, 0);
            block.values.forget_groups(values, 0);
            self.blocks.push_back(block);
        }
        self.blocks.get_mut(index)
    }

    /// Frees the blocks before block `number`.
    pub(super) fn drop_before(&mut self, number: usize) {
        while self.first < number {
            match self.blocks.pop_front() {
                Some(block) => {
                    self.free.push(block);
                    self.first += 1;
                }
                None => self.first = number,
            }
        }
    }

    /// The first token that is not freed.
    pub(super) fn first_token(&self) -> usize {
        self.first * BLOCK
    }

    /// Frees the blocks of the tokens from `len` on.
    pub(super) fn truncate(&mut self, len: usize, keys: &Layout, values: &Layout) {
        let count = len.div_ceil(BLOCK).saturating_sub(self.first);
        self.free.extend(self.blocks.drain(count.min(self.blocks.len())..));
        let last = self.blocks.get_mut(count.saturating_sub(1)).filter(|_| !len.is_multiple_of(BLOCK));
        if let Some(block) = last {
            // As in a new block.
            block.keys.forget_groups(keys, len % BLOCK);
            block.values.forget_groups(values, len % BLOCK);
        }
    }

    /// Keeps no more than `count` blocks, but those with tokens.
    pub(super) fn shrink_to(&mut self, count: usize) {
        self.free.truncate(count.saturating_sub(self.blocks.len()));
    }

    /// Frees all blocks.
    pub(super) fn clear(&mut self) {
        self.free.extend(self.blocks.drain(..));
        self.first = 0;
    }

    /// Blocks, with tokens or without.
    pub(super) fn allocated(&self) -> usize {
        self.blocks.len() + self.free.len()
    }
}
