//! Whole texts without a cache, with gradients of the adapters.

use super::Model;
use crate::rope::Positions;
use candle_core::{Result, Tensor};
use candle_quant::Error;
use std::ops::Range;

impl Model {
    /// Logits `[B, T, vocabulary]` of whole texts `ids` `[B, T]`, through which gradients flow to variables in adapters. They
    /// are those of [`forward`](Model::forward) with an empty cache, which is neither used nor changed.
    ///
    /// Texts of several lengths are padded at their ends, with any token: what is before a token does not depend on it. All
    /// activations are kept until the result is dropped; [`train::gradients`](crate::train::gradients) keeps those of one
    /// layer.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use candle_quant::{nn::Lora, Checkpoint};
    /// use candle_quant_models::Model;
    ///
    /// # fn main() -> candle_quant::Result<()> {
    /// let model = Model::load(&Checkpoint::open("assets/tiny")?, DType::F32, &Device::Cpu)?;
    /// let b = Var::zeros((512, 4), DType::F32, &Device::Cpu)?;
    /// let a = Tensor::ones((4, 256), DType::F32, &Device::Cpu)?;
    /// let slot = model.adapters().slot("model.layers.1.mlp.up_proj").unwrap();
    /// slot.add("style", Lora { a, b: b.as_tensor().clone(), scale: 1., magnitude: None })?;
    ///
    /// let logits = model.forward_whole(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?)?;
    /// let gradients = logits.sqr()?.mean_all()?.backward()?;
    /// assert_eq!(gradients.get(&b).unwrap().dims(), [512, 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the model is one rank's part of another, a text is longer than its context, or an id is outside of the vocabulary.
    pub fn forward_whole(&self, ids: &Tensor) -> Result<Tensor> {
        let positions = self.positions(ids)?;
        let x = self.embed(ids)?;
        self.head(&self.run_segment(0..self.layers.len(), &x, &positions)?)
    }

    /// Where the tokens of whole texts stand.
    pub(crate) fn positions(&self, ids: &Tensor) -> Result<Positions> {
        if self.rank.is_some() {
            return Err(Error::Unsupported {
                what: "a gradient of one rank's part of a model".to_string(),
                remedy: "load the whole model".to_string(),
            }
            .into());
        }
        let (_, len) = ids.dims2()?;
        if ids.elem_count() == 0 {
            return Err(
                Error::mismatch("ids", "at least one token", format!("shape {:?}", ids.dims())).into()
            );
        }
        if len > self.context {
            return Err(Error::OutOfContext { needed: len, context: self.context }.into());
        }
        let is_long = self.turns.short_context().is_some_and(|context| len > context);
        self.turns.at(&(0..len), is_long, (self.dtype, &self.device))
    }

    /// Some of the layers, one after another.
    pub(crate) fn run_segment(
        &self,
        layers: Range<usize>,
        x: &Tensor,
        positions: &Positions,
    ) -> Result<Tensor> {
        let layers = self.layers.iter().take(layers.end).skip(layers.start);
        layers.into_iter().try_fold(x.clone(), |x, layer| {
            let window = self.window.filter(|_| layer.slides);
            layer.forward_whole(&x, positions, window)
        })
    }

    /// The logits of what the last layer has made.
    pub(crate) fn head(&self, x: &Tensor) -> Result<Tensor> {
        self.logits(&self.norm.forward(x)?)
    }

    /// How many layers there are.
    pub(crate) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// How many tokens there are.
    pub(crate) fn vocabulary(&self) -> usize {
        self.embed_tokens.embeddings().dims().first().copied().unwrap_or_default()
    }
}
