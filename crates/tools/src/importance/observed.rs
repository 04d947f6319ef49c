//! A model whose layers tell what they are given.

use super::text::CalibrationText;
use candle_core::{DType, Device, Tensor};
use candle_quant::nn::LayerInput;
use candle_quant::{Checkpoint, Error, Result};
use candle_quant_models::Model;
use std::sync::{Arc, Mutex, PoisonError};

/// A model whose layers tell what they are given to a `T`.
pub(super) struct ObservedModel<T> {
    model: Model,
    seen: Arc<Mutex<T>>,
}

impl<T: Send + 'static> ObservedModel<T> {
    /// The model of a checkpoint, computed in f32; `see` gets what each layer is given, in rows, and which expert it is.
    ///
    /// # Errors
    /// If there is no model, or it is none of those that are known.
    pub fn new(
        source: &Checkpoint,
        seen: impl FnOnce(&Model) -> Result<T>,
        see: impl Fn(&mut T, &LayerInput, &Tensor) -> candle_core::Result<()> + Send + Sync + 'static,
    ) -> Result<Self> {
        let model = Model::load(source, DType::F32, &Device::Cpu)?;
        let seen = Arc::new(Mutex::new(seen(&model)?));
        let of_observer = seen.clone();
        model.adapters().observe(Some(Arc::new(move |input: LayerInput| {
            let k = input.x.dim(candle_core::D::Minus1)?;
            let rows = input.x.reshape(((), k))?.to_dtype(DType::F32)?;
            see(&mut of_observer.lock().unwrap_or_else(PoisonError::into_inner), &input, &rows)
        })));
        Ok(Self { model, seen })
    }

    /// Runs it on one piece of a text.
    ///
    /// # Errors
    /// If the model can't run, or what is seen is refused.
    pub fn run(&mut self, piece: &[u32]) -> Result<()> {
        self.model.clear_kv_cache();
        let ids = Tensor::new(piece, &Device::Cpu)?.unsqueeze(0)?;
        self.model.forward(&ids, 0).map(drop).map_err(Error::from)
    }

    /// Runs it on all pieces, and returns what was seen.
    pub fn run_all(mut self, text: &CalibrationText) -> Result<T>
    where
        T: Default,
    {
        text.pieces().iter().try_for_each(|piece| self.run(piece))?;
        Ok(self.seen(std::mem::take))
    }

    /// What was seen so far.
    pub fn seen<R>(&self, of: impl FnOnce(&mut T) -> R) -> R {
        of(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
