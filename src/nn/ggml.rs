//! Matmuls with blocks of GGML types, which are candle's, and their gradient, which candle leaves out.

use super::dense_rows::map_rows;
use super::LayerWeight;
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor};
use std::sync::Arc;

/// `x w^T` for blocks `w` `[N, K]` of a GGML type; the output has the dtype of `x`.
pub(super) fn ggml_matmul(weight: &Arc<QTensor>, x: &Tensor) -> Result<Tensor> {
    let in_f32 = x.to_dtype(DType::F32)?.contiguous()?;
    let output = match (QMatMul::from_arc(weight.clone())?, x.track_op()) {
        (QMatMul::QTensor(weight), true) => in_f32.apply_op1(WithGradient(weight))?,
        (weight, _) => weight.forward(&in_f32)?,
    };
    output.to_dtype(x.dtype())
}

/// candle's matmul, with the gradient of x. That is of the weight as its blocks stand for it: activations are not rounded.
struct WithGradient(Arc<QTensor>);

impl CustomOp1 for WithGradient {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.cpu_fwd(x, layout)
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.0.cuda_fwd(x, layout)
    }

    /// `grad w`, some rows of the weight after another.
    fn bwd(&self, x: &Tensor, _output: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (n, _) = self.0.shape().dims2()?;
        let grad = grad.contiguous()?.reshape(((), n))?;
        let mut sum: Option<Tensor> = None;
        map_rows(&LayerWeight::Ggml(self.0.clone()), |weight, rows| {
            let part = grad.narrow(1, rows.start, rows.len())?.contiguous()?.matmul(weight)?;
            sum = Some(match sum.take() {
                Some(sum) => (sum + part)?,
                None => part,
            });
            Ok(())
        })?;
        sum.map(|sum| sum.reshape(x.shape())).transpose()
    }
}
