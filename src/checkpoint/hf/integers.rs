//! Integer codes with float scales, and zeros that are integers too: `w = (code - zero) * scale`, in the orders of the
//! tools that write them.
//!
//! A weight with zeros is affine here, with `-(zero * scale)` for its bias. Beside 16-bit scales such biases are exact
//! in F32, and so is all that kernels make of them: dequantized, a weight has the bits of `(code - zero) * scale` in
//! f32. Where the biases of a symmetric file fit the dtype of its scales, they have that. Beside F32 scales product and
//! bias are rounded, each once.

use super::column_order::ReorderedIntegers;
use super::filled_rows::FilledRows;
use super::groups::Groups;
use super::module::Module;
use crate::checkpoint::file::{candle_dtype, StoredTensor};
use crate::checkpoint::weight::{IrregularWeight, Layout, MlxForm, PackedWeight, Slice, Weight};
use crate::format::unpack;
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Rows that are transposed at once: a cache line of words.
const TILE: usize = 16;
/// Bytes of a word.
const WORD: usize = size_of::<u32>();

/// How the codes of a matrix lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// `[N, K * bits / 32]` words, as in this crate.
    Rows,
    /// `[N, K]` bytes in two's complement.
    Signed,
    /// `[K * bits / 32, N]` words, each of one row of the weight.
    Columns,
}

/// How the zeros of all groups lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ZeroOrder {
    /// `[groups, N * bits / 32]` words: for each group the stream of its codes along N.
    GroupsFirst,
    /// The same, transposed: `[N * bits / 32, groups]` words.
    GroupsLast,
    /// `[N, groups * bits / 32]` words, as many as there is room for: for each row the stream of its groups.
    Rows,
    /// `[N, groups]` bytes in two's complement, or a single one for all.
    Signed,
}

/// The zeros of a weight.
#[derive(Clone, Debug)]
pub(super) struct Zeros {
    pub stored: StoredTensor,
    pub order: ZeroOrder,
    /// Zeros of the first words that belong to what lies before the part.
    pub first: usize,
    /// Whether they are stored less one.
    pub less_one: bool,
}

/// A matrix of integer codes.
#[derive(Clone, Debug)]
pub(super) struct Integers {
    pub format: QuantFormat,
    pub n: usize,
    pub k: usize,
    pub groups: Groups,
    pub codes: StoredTensor,
    pub order: Order,
    /// `[N, groups]` or more columns, `[groups, N]` if codes are in [`Order::Columns`]; or a single one for all.
    pub scales: StoredTensor,
    /// What all scales are multiplied by.
    pub multiplier: Option<f32>,
    pub zeros: Option<Zeros>,
    /// Whether biases have the dtype of the scales if they are exact in it.
    pub narrow_biases: bool,
}

impl Integers {
    fn groups_first(&self) -> bool {
        self.order == Order::Columns
    }

    fn has_one_scale(&self) -> bool {
        self.scales.size_in_bytes() == self.scales.dtype().bitsize() / 8
    }

    /// The scales of so many groups of the file, `[N, groups]`.
    fn scales(&self, groups: usize) -> Result<Tensor> {
        let scales = self.scales.load(&Device::Cpu)?;
        let scales = match self.groups_first() {
            _ if self.has_one_scale() => {
                scales.reshape((1, 1))?.broadcast_as((self.n, groups))?.contiguous()?
            }
            true => scales.reshape((groups, self.n))?.t()?,
            false => {
                let columns = scales.elem_count() / self.n.max(1);
                scales.reshape((self.n, columns))?.narrow(1, 0, groups)?
            }
        };
        Ok(match self.multiplier {
            None => scales,
            Some(multiplier) => (scales.to_dtype(DType::F32)? * f64::from(multiplier))?,
        })
    }

    /// Scales and biases of so many groups of the file, `[N, groups]`.
    pub(super) fn scales_and_biases(&self, groups: usize) -> Result<(Tensor, Option<Tensor>)> {
        let scales = self.scales(groups)?;
        let Some(zeros) = &self.zeros else { return Ok((scales, None)) };
        let zeros = zeros.load(self.format.bits(), self.n, groups)?;
        let biases = (zeros * scales.to_dtype(DType::F32)?)?.neg()?;
        let biases = match self.narrow_biases {
            true => narrowed(biases, scales.dtype())?,
            false => biases,
        };
        Ok((scales, Some(biases)))
    }

    /// The codes in words, `[N, K * bits / 32]`.
    pub(super) fn words(&self) -> Result<Vec<u32>> {
        let mut words = self.codes.read::<u32>()?;
        match self.order {
            Order::Rows => {}
            Order::Signed => words.par_iter_mut().for_each(|word| *word ^= 0x8080_8080),
            Order::Columns => words = transposed(&words, self.n),
        }
        Ok(words)
    }

    /// Bytes in the file.
    pub(super) fn stored_bytes(&self) -> usize {
        let zeros = self.zeros.as_ref().map_or(0, |zeros| zeros.stored.size_in_bytes());
        self.codes.size_in_bytes() + self.scales.size_in_bytes() + zeros
    }

    /// Bytes that so many elements take when they are loaded. Biases take F32, unless they may have the dtype of the scales;
    /// beside 16-bit scales those of symmetric codes are written out.
    pub(super) fn bytes_of(&self, elements: u64) -> u64 {
        let dtype = match self.multiplier {
            None => candle_dtype(self.scales.dtype()).unwrap_or(DType::F32),
            Some(_) => DType::F32,
        };
        let of_format = |format: QuantFormat| format.size_in_bytes(elements, dtype);
        match (&self.zeros, dtype) {
            (None, DType::F32) => of_format(self.format),
            (None, _) => of_format(self.format.with_biases()),
            (Some(_), _) if self.narrow_biases => of_format(self.format),
            (Some(_), _) => {
                let groups = elements / self.format.group_size() as u64;
                of_format(self.format) + groups * (4 - dtype.size_in_bytes() as u64)
            }
        }
    }

    /// Some rows, some columns at whole words (or bytes), and some of `count` groups of the file, which stay what they are to all
    /// columns.
    pub(super) fn part(
        &self,
        (rows, of_k): (&Range<usize>, &Range<usize>),
        count: usize,
        of_groups: &Range<usize>,
    ) -> Result<Self> {
        let bits = self.format.bits();
        let words = |k: usize| k / 32 * bits;
        let of_words = words(of_k.start)..words(of_k.end);
        let codes = match self.order {
            // Also where rows are no whole 32.
            Order::Rows if bits == 8 => part(&self.codes, [self.n, self.k], rows, of_k)?,
            Order::Rows => part(&self.codes, [self.n, words(self.k) * WORD], rows, &scaled(&of_words, WORD))?,
            Order::Signed => part(&self.codes, [self.n, self.k], rows, of_k)?,
            Order::Columns => {
                part(&self.codes, [words(self.k), self.n * WORD], &of_words, &scaled(rows, WORD))?
            }
        };
        let size = self.scales.dtype().bitsize() / 8;
        let scales = match self.groups_first() {
            _ if self.has_one_scale() => self.scales.clone(),
            true => part(&self.scales, [count, self.n * size], of_groups, &scaled(rows, size))?,
            false => {
                let columns = self.scales.size_in_bytes() / self.n.max(1);
                part(&self.scales, [self.n, columns], rows, &scaled(of_groups, size))?
            }
        };
        let zeros = self.zeros.as_ref().map(|zeros| zeros.narrow(bits, [self.n, count], rows, of_groups));
        let zeros = zeros.transpose()?;
        Ok(Self { n: rows.len(), k: of_k.len(), codes, scales, zeros, ..self.clone() })
    }
}

impl Integers {
    /// The weight of a module, whose columns may have groups of their own. Rows of 8 bits need not be whole groups, if they are a
    /// group each.
    pub(super) fn into_weight(self, module: &Module, order: Option<Vec<u32>>) -> Result<Weight> {
        let dims = vec![self.n, self.k];
        if !self.k.is_multiple_of(self.format.group_size()) {
            return Ok(Weight::Irregular(IrregularWeight::new(module.path, dims, FilledRows::new(self)?)));
        }
        Ok(match order {
            None => Weight::Packed(PackedWeight::new(module.path, self.format, dims, self)),
            Some(groups) => {
                let layout = ReorderedIntegers::new(self, groups)?;
                Weight::Irregular(IrregularWeight::new(module.path, dims, layout))
            }
        })
    }
}

impl Layout for Integers {
    fn mlx_form(&self) -> Result<MlxForm> {
        match (&self.zeros, self.format.element().uint()) {
            (None, _) if self.multiplier.is_some() => Ok(MlxForm::WithoutBiases(DType::F32)),
            (None, Some(bits)) => MlxForm::of_symmetric(&self.scales, bits),
            (Some(_), _) if self.narrow_biases => {
                Ok(candle_dtype(self.scales.dtype()).map_or(MlxForm::ROUNDED, MlxForm::Rearranged))
            }
            (Some(_), _) => Ok(MlxForm::of_zeros(&self.scales)),
            (None, None) => Ok(MlxForm::ROUNDED),
        }
    }

    fn size_in_bytes(&self) -> usize {
        self.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        self.bytes_of((self.n * self.k) as u64)
    }

    fn group_values(&self) -> Result<(Tensor, Option<Tensor>)> {
        let spread = |values: &Tensor| self.groups.spread(values, self.format, self.k);
        let (scales, biases) = self.scales_and_biases(self.groups.count(self.k))?;
        Ok((spread(&scales)?, biases.as_ref().map(spread).transpose()?))
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let (scales, biases) = self.group_values()?;
        let biases = biases.map(|biases| biases.to_device(device)).transpose()?;
        let codes = Tensor::from_vec(self.words()?, (self.n, self.format.words_per_row(self.k)?), device)?;
        QuantTensor::new(self.format, codes, scales.to_device(device)?, biases, None)
    }

    fn granularity(&self) -> usize {
        self.format.group_size()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let count = self.groups.count(self.k);
        let (rows, of_k, (of_groups, groups)) = match slice.along_k() {
            true => (0..self.n, slice.range.clone(), self.groups.narrow(&slice.range)),
            false => (slice.range.clone(), 0..self.k, (0..count, self.groups)),
        };
        Ok(Arc::new(Self { groups, ..self.part((&rows, &of_k), count, &of_groups)? }))
    }
}

/// Some rows and, of these, some bytes of a matrix of `[rows, bytes]`.
pub(super) fn part(
    stored: &StoredTensor,
    [rows, bytes]: [usize; 2],
    of_rows: &Range<usize>,
    of_bytes: &Range<usize>,
) -> Result<StoredTensor> {
    stored.narrow(&[rows, bytes], 0, of_rows)?.narrow(&[of_rows.len(), bytes], 1, of_bytes)
}

/// A range in units of `size`.
fn scaled(range: &Range<usize>, size: usize) -> Range<usize> {
    range.start * size..range.end * size
}

impl Zeros {
    /// Whether a single one is for all.
    fn is_one(&self) -> bool {
        self.order == ZeroOrder::Signed && self.stored.size_in_bytes() == 1
    }

    /// The zeros, F32 `[n, groups]`.
    fn load(&self, bits: usize, n: usize, groups: usize) -> Result<Tensor> {
        if self.order == ZeroOrder::Signed {
            let bytes = self.stored.read::<u8>()?.into_iter();
            let zeros: Vec<f32> = bytes.map(|byte| f32::from(byte ^ 0x80)).collect();
            let dims = if self.is_one() { (1, 1) } else { (n, groups) };
            return Ok(Tensor::from_vec(zeros, dims, &Device::Cpu)?
                .broadcast_as((n, groups))?
                .contiguous()?);
        }
        let mut words = self.stored.read::<u32>()?;
        let (streams, length) = match self.order {
            ZeroOrder::Rows => (n, groups),
            ZeroOrder::GroupsFirst | ZeroOrder::GroupsLast | ZeroOrder::Signed => (groups, n),
        };
        if self.order == ZeroOrder::GroupsLast {
            words = transposed(&words, groups);
        }
        if self.less_one && 32 % bits == 0 {
            // Tools count a word up as a whole, so that a zero that was counted down below 0 borrows from the next.
            let one = (0..32).step_by(bits).fold(0u32, |word, at| word | 1 << at);
            words.iter_mut().for_each(|word| *word = word.wrapping_add(one));
        }
        let mut zeros = Vec::with_capacity(streams * length);
        let mut codes = vec![0; self.first + length];
        for stream in words.chunks(words.len().checked_div(streams).unwrap_or(0).max(1)) {
            unpack(stream, bits, &mut codes);
            let of_stream = codes.iter().skip(self.first);
            zeros.extend(of_stream.map(|code| match self.less_one && 32 % bits != 0 {
                true => f32::from((code + 1) & ((1 << bits) - 1)),
                false => f32::from(*code),
            }));
        }
        let zeros = Tensor::from_vec(zeros, (streams, length), &Device::Cpu)?;
        Ok(if self.order == ZeroOrder::Rows { zeros } else { zeros.t()? })
    }

    /// The words in which the zeros of these rows and groups are, of all `[n, groups]`.
    fn narrow(
        &self,
        bits: usize,
        [n, count]: [usize; 2],
        rows: &Range<usize>,
        groups: &Range<usize>,
    ) -> Result<Self> {
        let (along, across, streams) = match self.order {
            ZeroOrder::Rows => (groups, rows, n),
            ZeroOrder::GroupsFirst | ZeroOrder::GroupsLast => (rows, groups, count),
            ZeroOrder::Signed if self.is_one() => return Ok(self.clone()),
            ZeroOrder::Signed => {
                return Ok(Self { stored: part(&self.stored, [n, count], rows, groups)?, ..self.clone() })
            }
        };
        // Codes and words that are whole together.
        let (codes, words) = if 32 % bits == 0 { (32 / bits, 1) } else { (32, bits) };
        let (start, end) = (self.first + along.start, self.first + along.end);
        let length = self.stored.size_in_bytes() / WORD / streams.max(1);
        let of_words = start / codes * words..(end.div_ceil(codes) * words).min(length);
        let stored = match self.order {
            ZeroOrder::GroupsLast => {
                part(&self.stored, [length, streams * WORD], &of_words, &scaled(across, WORD))?
            }
            ZeroOrder::GroupsFirst | ZeroOrder::Rows | ZeroOrder::Signed => {
                part(&self.stored, [streams, length * WORD], across, &scaled(&of_words, WORD))?
            }
        };
        Ok(Self { stored, first: start % codes, ..self.clone() })
    }
}

/// F32 numbers in `dtype` if all of them are exact in it, else as they are.
fn narrowed(numbers: Tensor, dtype: DType) -> Result<Tensor> {
    let narrow = numbers.to_dtype(dtype)?;
    let exact = narrow.to_dtype(DType::F32)?.eq(&numbers)?.to_dtype(DType::U32)?.sum_all()?;
    Ok(if exact.to_scalar::<u32>()? as usize == numbers.elem_count() { narrow } else { numbers })
}

/// The transposed of a matrix of words with so many columns.
fn transposed(words: &[u32], columns: usize) -> Vec<u32> {
    let rows = words.len().checked_div(columns).unwrap_or(0);
    let mut output = vec![0; words.len()];
    output.par_chunks_mut((TILE * rows).max(1)).enumerate().for_each(|(tile, output)| {
        for (index, row) in words.chunks_exact(columns.max(1)).enumerate() {
            let columns = output.chunks_exact_mut(rows.max(1));
            for (word, column) in row.iter().skip(tile * TILE).zip(columns) {
                if let Some(place) = column.get_mut(index) {
                    *place = *word;
                }
            }
        }
    });
    output
}
