//! Token ids to rows of packed or dense weights.

use crate::VarBuilder;
use candle_core::{Module, Result, Tensor};
use candle_nn::Init;
use candle_quant_packed::Weight;

/// An embedding table `[vocabulary, hidden]`; maps ids of any shape `[..]` to `[.., hidden]`.
///
/// Of a packed table only the rows that are asked for are dequantized.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Weight,
    hidden_size: usize,
}

impl Embedding {
    /// A layer from a table, packed if it is a [stand-in](candle_quant_packed::stand_in).
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        Self { weight: Weight::new(embeddings), hidden_size }
    }

    /// The table. A packed one is dequantized when it is first asked for, unless the caller probably makes the tied
    /// output head of it, `Linear::new(embedding.embeddings().clone(), None)`, which is packed then
    /// ([`Weight::tensor`]).
    pub fn embeddings(&self) -> &Tensor {
        self.weight.tensor()
    }

    /// Elements of a row.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match self.weight.packed() {
            Some(packed) => packed.rows(ids),
            None => candle_nn::Embedding::new(self.weight.tensor().clone(), self.hidden_size).forward(ids),
        }
    }
}

/// An embedding table from the tensor `weight` at the builder's path; rows have the builder's dtype.
///
/// # Errors
/// If the weight is missing, damaged, or not of shape `[in_size, out_size]`.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    let weight = vb.weight_tensor(in_size, out_size, Init::Randn { mean: 0., stdev: 1. })?;
    Ok(Embedding::new(weight, out_size))
}
