//! Who is told of what layers are given.

use super::{AdapterSlot, Adapters};
use candle_core::{Result, Tensor};
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// What a layer is about to multiply its weight by.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LayerInput<'a> {
    /// The path of the layer's module, as the model asks for it.
    pub module: &'a str,
    /// Which expert of a stack, if it is one.
    pub expert: Option<usize>,
    /// `[.., K]`.
    pub x: &'a Tensor,
}

/// Is told of every input of the layers that it observes; an error of it is one of the layer.
pub type Observer = Arc<dyn Fn(LayerInput) -> Result<()> + Send + Sync>;

impl AdapterSlot {
    /// Whether the layer is its frozen weight alone: no adapter is switched on, and nobody observes it.
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_active() && self.observer().is_none()
    }

    pub(super) fn tell(&self, expert: Option<usize>, x: &Tensor) -> Result<()> {
        // Not while it is locked: whoever is told may take its time.
        let observer = self.observer().clone();
        match observer {
            Some(observer) => observer(LayerInput { module: self.module(), expert, x }),
            None => Ok(()),
        }
    }
}

impl Adapters {
    /// Sets who is told of the inputs of all layers that there are, or that nobody is. Layers that are observed are computed
    /// one by one; what a [`StepPlan`](crate::step::StepPlan) computes that is run by hand, nobody is told of.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_quant::{linear_no_bias, Checkpoint, Module, VarBuilder};
    /// use std::sync::{Arc, Mutex};
    ///
    /// # fn main() -> candle_quant::Result<()> {
    /// let vb = VarBuilder::from_checkpoint(&Checkpoint::open("assets/tiny")?, DType::F32, &Device::Cpu);
    /// let path = "model.layers.0.mlp.up_proj";
    /// let layer = linear_no_bias(256, 512, vb.pp(path))?;
    /// let seen = Arc::new(Mutex::new(Vec::new()));
    /// let seen_by_it = seen.clone();
    /// vb.adapters().observe(Some(Arc::new(move |input| {
    ///     seen_by_it.lock().unwrap().push((input.module.to_owned(), input.x.dims().to_vec()));
    ///     Ok(())
    /// })));
    /// layer.forward(&Tensor::ones((3, 256), DType::F32, &Device::Cpu)?)?;
    /// vb.adapters().observe(None);
    /// assert_eq!(*seen.lock().unwrap(), [(path.to_owned(), vec![3, 256])]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn observe(&self, observer: Option<Observer>) {
        self.registry().is_observed.store(observer.is_some(), Ordering::Relaxed);
        self.slots().iter().for_each(|slot| *slot.observer_mut() = observer.clone());
    }

    /// Whether anybody is told of the inputs of layers.
    pub fn is_observed(&self) -> bool {
        self.registry().is_observed.load(Ordering::Relaxed)
    }
}
