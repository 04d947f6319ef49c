//! One tensor of the output: where its numbers come from, and what is done to them.

use super::scaling::Scaling;
use super::source::SourcePart;
use super::tensor::OutputTensor;
use crate::convert::recipe::{FileType, Role, Spec};
use crate::importance::ColumnWeights;
use crate::sha256;
use candle_core::{DType, Device};
use candle_quant::checkpoint::{DenseTensor, PackedWeight, StoredBlocks, Weight};
use candle_quant::format::{GgmlType, Quantizer, Slm1Type, UqffType};
use candle_quant::QuantFormat;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// What holds MXFP4 exactly. A number `v` of E2M1 and a scale `s` become the code `2v + 12`, the scale `s / 2` and the
/// bias `-6s`: `(2v + 12) * s / 2 - 6s` is `v * s`.
pub(in crate::convert) const WIDE_MXFP4: QuantFormat = QuantFormat::affine_opt(5, 32).unwrap();

/// Elements that a thread works on at a time, unless one row has more.
const BLOCK: usize = 1 << 18;

/// What becomes of one tensor.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TensorPlan {
    /// Its name in the output; a packed weight is one tensor.
    pub name: String,
    /// Its logical shape.
    pub shape: Vec<usize>,
    /// What it is for.
    pub role: Role,
    /// The rule that decided.
    pub rule: String,
    /// What it is in the source: `BF16`, `affine 4-bit g64`.
    pub from: String,
    /// What it becomes, in the same words.
    pub to: String,
    /// Bytes in the source.
    pub source_bytes: u64,
    /// Bytes in the output.
    pub bytes: u64,
    /// Why it does not become what the rule says, if so.
    pub fallback: Option<String>,
    /// The file it goes to; in a store of Ollama the layer.
    pub file: String,
}

/// One tensor of the output; a packed weight is one.
#[derive(Clone, Debug)]
pub(in crate::convert) struct Job {
    pub planned: TensorPlan,
    pub work: Work,
    pub outputs: Vec<OutputTensor>,
    /// What the rule says that it becomes.
    pub spec: Spec,
    /// Whether it consists of tensors of other names.
    pub is_stacked: bool,
    /// The order of its rows in the output, if it is another one.
    pub order: Option<HeadOrder>,
    /// What its numbers are multiplied and divided by before, if they are.
    pub scaling: Option<Scaling>,
}

/// Rows of heads as llama.cpp has them, which rotates adjacent elements: of each head the first row of its first half, then the
/// first of its second half, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::convert) struct HeadOrder {
    /// Rows of a head, an even number.
    pub size: usize,
}

impl HeadOrder {
    /// Where a row is in the output.
    pub(in crate::convert) fn place(self, row: usize) -> usize {
        let (size, half) = (self.size.max(2), self.size.max(2) / 2);
        let (head, row) = (row / size, row % size);
        head * size + row % half * 2 + row / half
    }
}

/// What is done.
#[derive(Clone, Debug)]
pub(in crate::convert) enum Work {
    /// For each tensor of the output, the tensors whose bytes it consists of, and what they are if they are packed. Floats of an
    /// F32 one that are narrower are widened.
    Copy(Vec<Vec<DenseTensor>>, Option<Spec>),
    /// Numbers are converted to a dtype.
    Cast(Vec<SourcePart>, DType),
    /// Numbers are rounded to a dtype and packed.
    Pack(Vec<SourcePart>, Packing),
    /// Codes are brought into another layout, or into a format that holds them exactly; of several weights the rows are in turn.
    Repack(Vec<PackedWeight>, QuantFormat, Encoding),
    /// Blocks of a type of GGML are copied, row by row.
    Blocks(StoredBlocks),
}

/// How numbers are packed.
#[derive(Clone, Debug)]
pub(in crate::convert) struct Packing {
    /// What they are rounded to before.
    pub dtype: DType,
    pub format: QuantFormat,
    pub quantizer: Quantizer,
    /// Whether what the quantizer leaves is improved.
    pub search: bool,
    pub encoding: Encoding,
    /// How much columns count, if not all alike.
    pub columns: Option<Columns>,
    /// The digest of the text by which what a column loses is made up for by those behind it, if it is.
    pub feedback: Option<Arc<str>>,
}

/// How packed rows are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::convert) enum Encoding {
    /// Codes, scales and biases are a tensor each.
    Parts,
    /// Rows are blocks of a type of GGML. Of weights with a multiplier of their scales, it is a tensor of its own.
    Blocks(GgmlType),
    /// Signed codes and their F32 scales are a tensor each.
    Signed(Slm1Type),
    /// A type of which a matrix is made as a whole.
    Whole(UqffType),
    /// Codes, scales and zeros that are codes are a tensor each, the zeros of a group one stream along N.
    WithZeros,
}

/// How much the columns of a weight count.
#[derive(Clone)]
pub(in crate::convert) struct Columns(Arc<ColumnWeights>);

impl Columns {
    pub(in crate::convert) fn new(weights: ColumnWeights) -> Self {
        Self(Arc::new(weights))
    }

    /// What they are where columns are multiplied by these scales.
    pub(in crate::convert) fn of_scaled(&self, scales: &[Vec<f32>]) -> Self {
        Self::new(self.0.of_scaled(scales))
    }

    /// Those of one matrix of a stack.
    pub(in crate::convert) fn of_matrix(&self, matrix: usize) -> Option<&[f32]> {
        self.0.of_matrix(matrix)
    }
}

/// A digest, which tells whether an output is made of the same.
impl fmt::Debug for Columns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut hasher = sha256::Hasher::default();
        self.0.bytes().for_each(|bytes| hasher.update(bytes));
        f.write_str(&hasher.finish())
    }
}

impl Packing {
    /// Whether a device quantizes so. All else is done by the CPU.
    pub(in crate::convert) fn runs_on(&self, device: &Device) -> bool {
        device.is_cuda() && self.quantizer == Quantizer::Mlx && self.encoding == Encoding::Parts
    }
}

impl Job {
    /// How it is packed, if it is packed here.
    pub(in crate::convert) fn packing(&self) -> Option<&Packing> {
        match &self.work {
            Work::Pack(_, packing) => Some(packing),
            Work::Copy(..) | Work::Cast(..) | Work::Repack(..) | Work::Blocks(..) => None,
        }
    }

    /// Gives its rows another order.
    pub(in crate::convert) fn order_heads(&mut self, order: HeadOrder) {
        self.order = Some(order);
        // What is copied as it lies has no rows.
        if let Work::Copy(runs, None) = &self.work {
            let dtype = runs.iter().flatten().next().map_or(DType::F32, |run| run.dtype());
            let parts = runs.iter().flatten().cloned().map(SourcePart::Stored).collect();
            self.work = Work::Cast(parts, dtype);
        }
    }

    /// Whether what a column loses is made up for by those behind it.
    pub(in crate::convert) fn has_feedback(&self) -> bool {
        self.packing().is_some_and(|packing| packing.feedback.is_some())
    }

    /// Rows of each of the matrices that it consists of.
    pub(in crate::convert) fn rows_of_matrix(&self) -> usize {
        self.planned.shape.iter().rev().nth(1).copied().unwrap_or(1).max(1)
    }

    /// By what its columns are multiplied, of each matrix or of all; none if they stay.
    pub(in crate::convert) fn column_scales(&self) -> &[Vec<f32>] {
        self.scaling.as_ref().map_or(&[], |scaling| &scaling.columns)
    }

    /// Whether its codes and scales are searched for.
    pub(in crate::convert) fn is_searched(&self) -> bool {
        self.packing().is_some_and(|packing| packing.search)
    }

    /// The format of the output, if it is packed.
    pub(in crate::convert) fn format(&self) -> Option<QuantFormat> {
        match &self.work {
            Work::Copy(_, spec) => spec.and_then(Spec::format),
            Work::Cast(..) => None,
            Work::Pack(_, packing) => Some(packing.format),
            Work::Repack(_, format, _) => Some(*format),
            Work::Blocks(blocks) => blocks.format(),
        }
    }

    /// What it becomes, if it is packed.
    pub(in crate::convert) fn becomes(&self) -> Option<Spec> {
        match &self.work {
            Work::Pack(_, Packing { encoding: Encoding::Blocks(kind), .. }) => Some(Spec::ggml(*kind)),
            Work::Pack(_, Packing { encoding: Encoding::Whole(kind), .. }) => {
                Some(Spec::Type(FileType::Uqff(*kind)))
            }
            Work::Pack(_, Packing { encoding: Encoding::Signed(kind), .. })
            | Work::Repack(_, _, Encoding::Signed(kind)) => Some(Spec::Type(FileType::Slm1(*kind))),
            Work::Repack(_, format, Encoding::WithZeros) => Some(Spec::Type(FileType::WithZeros(*format))),
            Work::Blocks(blocks) => {
                let known = GgmlType::ALL.into_iter().find(|kind| kind.id() == blocks.type_id());
                known.map(Spec::ggml).or_else(|| self.format().map(Spec::Packed))
            }
            Work::Copy(_, spec) => *spec,
            Work::Cast(..) | Work::Pack(..) | Work::Repack(..) => self.format().map(Spec::Packed),
        }
    }

    /// What was asked for, if it is not that.
    pub(in crate::convert) fn asked(&self) -> Option<Spec> {
        Some(self.spec).filter(|spec| self.planned.fallback.is_some() && spec.format().is_some())
    }

    /// Elements of a row.
    pub(in crate::convert) fn k(&self) -> usize {
        self.planned.shape.last().copied().unwrap_or(1).max(1)
    }

    /// Rows that a thread works on at a time.
    pub(in crate::convert) fn block_rows(&self) -> usize {
        (BLOCK / self.k()).max(1)
    }

    /// About the memory that a thread needs for one block.
    pub(in crate::convert) fn block_bytes(&self) -> u64 {
        // Numbers as they are stored and as f32, dequantized ones, and codes before and after packing.
        (self.block_rows() as u64).saturating_mul(self.k() as u64).saturating_mul(16)
    }

    /// The memory for a weight that has to be loaded as a whole.
    pub(in crate::convert) fn whole_bytes(&self) -> u64 {
        let whole = |part: &SourcePart| match part {
            SourcePart::Stored(_) => 0,
            SourcePart::Encoded(weight) => (weight.size_in_bytes() as u64).saturating_mul(2),
            // Dequantized, and in another order.
            SourcePart::Viewed(weights, _) => {
                let bytes = |weight: &Weight| {
                    weight.dims().iter().fold(4u64, |bytes, dim| bytes.saturating_mul(*dim as u64))
                };
                weights.iter().fold(0u64, |sum, weight| sum.saturating_add(bytes(weight))).saturating_mul(3)
            }
        };
        match &self.work {
            Work::Copy(..) => 0,
            // Some rows at a time.
            Work::Blocks(weight) => (weight.size_in_bytes() as u64).min(1 << 24),
            // Numbers as they are stored, in the order of groups, and dequantized.
            Work::Pack(parts, Packing { encoding: Encoding::Whole(_), .. }) => {
                let elements =
                    self.planned.shape.iter().fold(1u64, |all, dim| all.saturating_mul(*dim as u64));
                let parts = parts.iter().map(whole).max().unwrap_or(0);
                elements.saturating_mul(16).saturating_add(parts).max(1)
            }
            Work::Cast(parts, _) | Work::Pack(parts, ..) => parts.iter().map(whole).max().unwrap_or(0),
            Work::Repack(weights, ..) => {
                // Once read and once loaded, and once more if they are put together; then a matrix as numbers and as bytes.
                let whole = weights
                    .iter()
                    .fold(0u64, |sum, packed| sum.saturating_add(packed.size_in_bytes() as u64));
                let copies = if weights.len() > 1 { 3 } else { 2 };
                let stack = self.planned.shape.iter().rev().skip(2).product::<usize>().max(1) as u64;
                whole.saturating_mul(copies).saturating_add((whole / stack).saturating_mul(3))
            }
        }
    }
}
