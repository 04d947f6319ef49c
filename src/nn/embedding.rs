//! Token ids to rows, gathered from packed or dense weights.

use super::{LayerWeight, Linear, VarBuilder};
use crate::QuantTensor;
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::Init;

/// An embedding table `[vocabulary, hidden]`; maps ids of any shape `[..]` to `[.., hidden]`.
///
/// A packed table is never dequantized as a whole, only the rows that are asked for.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::{embedding, Checkpoint, Module, VarBuilder};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let checkpoint = Checkpoint::open("assets/tiny")?;
/// let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
/// let table = embedding(640, 256, vb.pp("model.embed_tokens"))?; // 4-bit, stays packed
/// let rows = table.forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?)?;
/// assert_eq!(rows.dims(), [1, 3, 256]);
///
/// let head = table.as_linear(); // the tied output head, on the same packed data
/// assert_eq!(head.forward(&rows)?.dims(), [1, 3, 640]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: LayerWeight,
    hidden_size: usize,
    dtype: DType,
}

impl Embedding {
    /// A dense table, as candle_nn makes it.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        let dtype = embeddings.dtype();
        Self { weight: embeddings.into(), hidden_size, dtype }
    }

    /// A packed table, whose rows are dequantized to `dtype`.
    ///
    /// # Errors
    /// If `embeddings` is not a matrix.
    pub fn from_quant(embeddings: QuantTensor, dtype: DType) -> crate::Result<Self> {
        let &[_, hidden_size] = embeddings.dims().as_slice() else {
            return Err(crate::Error::mismatch(
                "embedding table",
                "[vocabulary, hidden]",
                format!("{:?}", embeddings.dims()),
            ));
        };
        Ok(Self { weight: embeddings.into(), hidden_size, dtype })
    }

    pub(crate) fn from_weight(weight: LayerWeight, hidden_size: usize, dtype: DType) -> Self {
        Self { weight, hidden_size, dtype }
    }

    /// The table, `[vocabulary, hidden]`.
    pub fn embeddings(&self) -> &LayerWeight {
        &self.weight
    }

    /// Elements of a row.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// The tied output head: a linear layer on the same data, `[.., hidden]` to `[.., vocabulary]`.
    pub fn as_linear(&self) -> Linear {
        Linear::new(self.weight.clone(), None)
    }
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.weight {
            LayerWeight::Quantized(weight) => weight.embed(ids, self.dtype),
            LayerWeight::Reordered(weight) => weight.embed(ids, self.dtype),
            LayerWeight::ColumnScaled(weight) => weight.embed(ids, self.dtype),
            LayerWeight::Ggml(weight) => weight.embedding(ids)?.to_dtype(self.dtype),
            LayerWeight::Dense(weight) => {
                candle_nn::Embedding::new(weight.clone(), self.hidden_size).forward(ids)
            }
        }
    }
}

/// An embedding table from the tensor `weight` at the builder's path; rows have the builder's dtype.
///
/// # Errors
/// If the weight is missing, damaged, or not of shape `[in_size, out_size]`.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    let hint = Init::Randn { mean: 0., stdev: 1. };
    Ok(Embedding { weight: vb.weight(in_size, out_size, hint)?, hidden_size: out_size, dtype: vb.dtype() })
}
