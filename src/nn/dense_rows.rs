//! A weight in F32, some rows at a time: what is computed of all of it never needs all of it at once.

use super::LayerWeight;
use crate::Result;
use candle_core::quantized::{QStorage, QTensor};
use candle_core::{DType, Tensor};
use std::borrow::Cow;
use std::ops::Range;

/// Elements of a chunk: 4 MiB of F32.
const CHUNK: usize = 1 << 20;

/// What `map` makes of each chunk of rows of a weight `[N, K]`, in order.
pub(super) fn map_rows<T>(
    weight: &LayerWeight,
    mut map: impl FnMut(&Tensor, Range<usize>) -> candle_core::Result<T>,
) -> Result<Vec<T>> {
    let dims = weight.dims();
    let (n, k) = dims.split_first().map_or((0, 1), |(n, rest)| (*n, rest.iter().product::<usize>().max(1)));
    let step = (CHUNK / k).max(1);
    let chunks = (0..n).step_by(step).map(|start| start..n.min(start + step));
    chunks.map(|rows| Ok(map(&dense_rows(weight, &rows, k)?, rows)?)).collect()
}

fn dense_rows(weight: &LayerWeight, rows: &Range<usize>, k: usize) -> Result<Tensor> {
    match weight {
        LayerWeight::Quantized(weight) => weight.narrow(0, rows.start, rows.len())?.dequantize(DType::F32),
        LayerWeight::Reordered(weight) => weight.rows(rows.start, rows.len())?.dequantize(DType::F32),
        LayerWeight::ColumnScaled(weight) => weight.dequantize_rows(rows.start, rows.len(), DType::F32),
        LayerWeight::Dense(weight) => {
            Ok(weight.detach().narrow(0, rows.start, rows.len())?.to_dtype(DType::F32)?)
        }
        LayerWeight::Ggml(weight) => {
            // Rows are whole blocks, so that a part of the blocks is aligned as all of them are.
            let dtype = weight.dtype();
            let row = k / dtype.block_size().max(1) * dtype.type_size();
            let all = weight.data()?;
            let blocks = all.get(rows.start * row..rows.end * row).unwrap_or_default();
            let device = weight.device();
            let storage = QStorage::from_data(Cow::Borrowed(blocks), &device, dtype)?;
            Ok(QTensor::new(storage, (rows.len(), k))?.dequantize(&device)?)
        }
    }
}
