//! Operations of weights whose columns have an order of their own: x is brought into it, what they stand for out of it.

use crate::tensor::{ReorderedTensor, NO_COLUMN};
use crate::{Error, Result};
use candle_core::{bail, CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, WithDType, D};
use rayon::prelude::*;
use std::sync::Arc;

/// Elements from which on rows are shared among threads.
const FEW: usize = 1 << 16;

impl ReorderedTensor {
    /// The elements of `x` `[.., K]` in the order of the packed columns, `[.., K']`. Layers with one order share it.
    ///
    /// # Errors
    /// If x has another K or is on another device.
    pub fn gather(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let k = self.places().elem_count();
        if x.dims().last() != Some(&k) {
            let expected = format!("last dimension {k} (K of {self:?})");
            return Err(Error::mismatch("x", expected, format!("shape {:?}", x.dims())).into());
        }
        super::check_device("x", x, self.weight().device())?;
        let x = x.contiguous()?;
        match x.device() {
            Device::Cpu if !x.track_op() => x.apply_op1_no_bwd(&Gather(self.columns().into())),
            // candle's own operation has the gradient.
            Device::Cpu | Device::Cuda(_) | Device::Metal(_) => {
                x.index_select(self.columns_on_device(), x.rank() - 1)
            }
        }
    }

    /// `x * weight^T + bias`, as [`QuantTensor::matmul`](crate::QuantTensor::matmul).
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn matmul(&self, x: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
        self.weight().matmul(&self.gather(x)?, bias)
    }

    /// All weights as a dense tensor `[N, K]`, columns in the order of x; see
    /// [`QuantTensor::dequantize`](crate::QuantTensor::dequantize).
    ///
    /// # Errors
    /// If `dtype` is not F32, F16 or BF16, or the device fails.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        Ok(self.scattered(&self.weight().dequantize(dtype)?)?)
    }

    /// Rows of the weight, as [`QuantTensor::embed`](crate::QuantTensor::embed).
    ///
    /// # Errors
    /// As those of it.
    pub fn embed(&self, ids: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
        self.scattered(&self.weight().embed(ids, dtype)?)
    }

    /// Packed columns in the order of x.
    fn scattered(&self, packed: &Tensor) -> candle_core::Result<Tensor> {
        let last = D::Minus1;
        packed.contiguous()?.index_select(self.places(), last)
    }
}

/// Elements of rows in another order.
struct Gather(Arc<[u32]>);

impl Gather {
    fn rows<T: WithDType>(&self, x: &[T], layout: &Layout) -> candle_core::Result<Vec<T>> {
        let x = super::contiguous(x, layout)?;
        let k = layout.dims().last().copied().unwrap_or(0);
        let (columns, rows) = (&self.0, x.len().checked_div(k).unwrap_or(0));
        let mut output = vec![T::zero(); rows * columns.len()];
        let gather = |(to, x): (&mut [T], &[T])| {
            for (to, column) in to.iter_mut().zip(columns.iter()) {
                // What has no column is beyond all rows.
                *to = x.get(*column as usize).copied().unwrap_or(T::zero());
            }
        };
        let (width, k) = (columns.len().max(1), k.max(1));
        match output.len() < FEW {
            true => output.chunks_exact_mut(width).zip(x.chunks_exact(k)).for_each(gather),
            false => output.par_chunks_exact_mut(width).zip(x.par_chunks_exact(k)).for_each(gather),
        }
        Ok(output)
    }
}

// A row is never so long that the mark is an element of it.
const _: () = assert!(NO_COLUMN == u32::MAX);

impl CustomOp1 for Gather {
    fn name(&self) -> &'static str {
        "gather-columns"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        #[allow(clippy::wildcard_enum_match_arm, reason = "candle has more dtypes than activations")]
        let gathered = match x {
            CpuStorage::F32(x) => CpuStorage::F32(self.rows(x, layout)?),
            CpuStorage::F16(x) => CpuStorage::F16(self.rows(x, layout)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.rows(x, layout)?),
            _ => bail!("x is F32, F16 or BF16"),
        };
        let mut dims = layout.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = self.0.len();
        }
        Ok((gathered, dims.into()))
    }
}
