//! The numbers of a weight, dequantized a few rows at a time.

use candle_core::quantized::{QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::Weight;
use candle_quant::nn::LayerWeight;
use candle_quant::{Error, QuantTensor, Result};
use rayon::prelude::*;
use std::borrow::Cow;

/// Elements of a chunk, unless one row has more.
const CHUNK: usize = 1 << 18;

/// A weight in memory, still in its format.
pub(crate) struct Chunks {
    /// Packed `[N, K]` or `[E, N, K]`; dense in one dimension.
    loaded: LayerWeight,
    /// How many matrices `[N, K]` there are, in row-major order.
    matrices: usize,
    n: usize,
    k: usize,
}

impl Chunks {
    /// Loads a weight as it is stored.
    pub fn load(weight: &Weight) -> Result<Self> {
        let loaded = match weight.load(&Device::Cpu)? {
            LayerWeight::Quantized(packed) if packed.dims().len() > 2 => packed.flatten_stack()?.into(),
            LayerWeight::Dense(tensor) => tensor.flatten_all()?.into(),
            other => other,
        };
        let (matrices, n, k) = match weight.dims() {
            [] => (1, 1, 1),
            [k] => (1, 1, *k),
            [stack @ .., n, k] => (stack.iter().product(), *n, *k),
        };
        Ok(Self { loaded, matrices, n, k })
    }

    /// What was loaded.
    pub fn loaded(&self) -> &LayerWeight {
        &self.loaded
    }

    /// The packed weight, if it is one; stacks have one leading dimension here.
    pub fn packed(&self) -> Option<&QuantTensor> {
        self.loaded.quantized()
    }

    /// Whether anything but finite numbers can be in it.
    pub fn is_float(&self) -> bool {
        self.loaded.dense().is_none_or(|tensor| tensor.dtype().is_float())
    }

    /// Applies `of` to every chunk, in parallel; the results are in order. Weights of one shape have the
    /// same chunks.
    pub fn map<R: Send>(&self, of: impl Fn(&[f64]) -> R + Sync) -> Result<Vec<R>> {
        self.indices().map(|index| Ok(of(&self.dequantize(index)?))).collect()
    }

    /// Applies `of` to every chunk of two weights of one shape.
    pub fn zip<R: Send>(&self, other: &Self, of: impl Fn(&[f64], &[f64]) -> R + Sync) -> Result<Vec<R>> {
        self.indices().map(|index| Ok(of(&self.dequantize(index)?, &other.dequantize(index)?))).collect()
    }

    /// Applies `of` to every chunk, in one dimension, and to the number of its first row, in parallel; the results
    /// are in order.
    pub fn map_tensors<R: Send>(&self, of: impl Fn(usize, Tensor) -> R + Sync) -> Result<Vec<R>> {
        let apply = |index| {
            let (row, numbers) = self.numbers(index)?;
            Ok(of(row, numbers.flatten_all()?))
        };
        self.indices().map(apply).collect()
    }

    /// What `view` sees of the rows of all weights, which have one length, as one matrix.
    pub fn viewed(weights: &[Weight], view: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let chunks = weights.iter().map(Self::load).collect::<Result<Vec<_>>>()?;
        Self::of_matrix(&view(&rows_of_all(&chunks)?)?)
    }

    /// The rows of all, which have one length, as one matrix.
    pub fn joined(chunks: &[Self]) -> Result<Self> {
        Self::of_matrix(&rows_of_all(chunks)?)
    }

    fn of_matrix(matrix: &Tensor) -> Result<Self> {
        let (n, k) = matrix.dims2()?;
        Ok(Self { loaded: LayerWeight::Dense(matrix.flatten_all()?), matrices: 1, n, k })
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.k
    }

    /// Rows of all matrices.
    pub fn rows_in_all(&self) -> usize {
        self.matrices.saturating_mul(self.n)
    }

    /// Rows of a chunk.
    fn rows(&self) -> usize {
        (CHUNK / self.k.max(1)).clamp(1, self.n.max(1))
    }

    fn indices(&self) -> rayon::range::Iter<usize> {
        let of_matrix = if self.k == 0 { 0 } else { self.n.div_ceil(self.rows()) };
        (0..self.matrices.saturating_mul(of_matrix)).into_par_iter()
    }

    /// Dequantizes one chunk. Packed weights become f32 as they do for products; of dense numbers nothing is
    /// lost.
    fn dequantize(&self, index: usize) -> Result<Vec<f64>> {
        Ok(self.numbers(index)?.1.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
    }

    /// One chunk in the dtype that it dequantizes to, and the number of its first row.
    fn numbers(&self, index: usize) -> Result<(usize, Tensor)> {
        let (n, k, rows) = (self.n, self.k, self.rows());
        let of_matrix = n.div_ceil(rows);
        let (matrix, row) = (index / of_matrix, index % of_matrix * rows);
        let rows = rows.min(n - row);
        let first = (matrix * n + row) * k;
        let numbers = match &self.loaded {
            LayerWeight::Quantized(packed) if packed.dims().len() > 2 => {
                packed.matrix(matrix)?.narrow(0, row, rows)?.dequantize(DType::F32)?
            }
            LayerWeight::Quantized(packed) => packed.narrow(0, row, rows)?.dequantize(DType::F32)?,
            LayerWeight::Reordered(packed) => packed.rows(row, rows)?.dequantize(DType::F32)?,
            LayerWeight::ColumnScaled(packed) => packed.dequantize_rows(row, rows, DType::F32)?,
            LayerWeight::Ggml(ggml) => ggml_rows(ggml, first, rows, k)?,
            LayerWeight::Dense(tensor) => tensor.narrow(0, first, rows * k)?,
            other => {
                return Err(Error::Unsupported {
                    what: format!("reading rows of a weight in {}", other.format_name()),
                    remedy: "update candle-quant-tools with candle-quant".into(),
                })
            }
        };
        Ok((matrix * n + row, numbers))
    }
}

/// One matrix, of numbers that all have one dtype.
fn rows_of_all(chunks: &[Chunks]) -> Result<Tensor> {
    let (mut numbers, mut k) = (Vec::new(), 0);
    for of_one in chunks {
        if k != 0 && of_one.k != k {
            let (expected, found) = (format!("rows of {k}"), of_one.k.to_string());
            return Err(Error::mismatch("a weight of several", expected, found));
        }
        k = of_one.k;
        numbers.extend(of_one.map_tensors(|_, numbers| numbers)?);
    }
    let dtype = numbers.first().map_or(DType::F32, Tensor::dtype);
    if numbers.iter().any(|of_chunk| of_chunk.dtype() != dtype) {
        numbers = numbers
            .iter()
            .map(|of_chunk| of_chunk.to_dtype(DType::F32))
            .collect::<candle_core::Result<_>>()?;
    }
    Ok(Tensor::cat(&numbers, 0)?.reshape(((), k))?)
}

/// Dequantizes `rows` rows of K elements, from element `first` on.
fn ggml_rows(ggml: &QTensor, first: usize, rows: usize, k: usize) -> Result<Tensor> {
    let dtype = ggml.dtype();
    let bytes_of = |elements: usize| elements / dtype.block_size() * dtype.type_size();
    let data = ggml.data()?;
    let blocks = data.get(bytes_of(first)..).and_then(|rest| rest.get(..bytes_of(rows * k)));
    let blocks = blocks.ok_or_else(|| {
        Error::mismatch(format!("{dtype:?} blocks"), format!("{rows} rows of {k}"), "fewer")
    })?;
    let storage = QStorage::from_data(Cow::Borrowed(blocks), &Device::Cpu, dtype)?;
    Ok(QTensor::new(storage, (rows, k))?.dequantize(&Device::Cpu)?)
}
