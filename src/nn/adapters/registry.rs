//! The adapters of all layers of a model.

use super::slot::{Frozen, Slot};
use super::AdapterSlot;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The slots of all layers that one [`VarBuilder`](crate::VarBuilder) has built, by the paths of their modules: what a
/// model's adapters are added to, switched by, and removed from. Clones share them.
///
/// A slot is here as long as its layer is. Layers that are built twice of one module on one builder share their slot.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::checkpoint::{AdapterFile, AdapterFormat, Checkpoint};
/// use candle_quant::nn::Lora;
/// use candle_quant::{linear_no_bias, Module, VarBuilder};
///
/// # fn main() -> candle_quant::Result<()> {
/// let checkpoint = Checkpoint::open("assets/tiny")?;
/// let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
/// let path = "model.layers.0.mlp.up_proj";
/// let layer = linear_no_bias(256, 512, vb.pp(path))?;
/// let x = Tensor::ones((1, 256), DType::F32, &Device::Cpu)?;
/// let alone = layer.forward(&x)?;
///
/// // One by hand, saved for PEFT; `Model::adapters` has those of a whole model.
/// let random = |dims| Tensor::randn(0f32, 0.1, dims, &Device::Cpu);
/// let lora = Lora { a: random((4, 256))?, b: random((512, 4))?, scale: 2., magnitude: None };
/// vb.adapters().slot(path).expect("a layer").add("style", lora)?;
/// let dir = std::env::temp_dir().join(format!("style-{}", std::process::id()));
/// vb.adapters().save("style", &dir, AdapterFormat::Peft)?;
///
/// // One from a file, beside it; then that alone.
/// vb.adapters().load("again", &AdapterFile::open(&dir)?)?;
/// vb.adapters().set_active("style", false);
/// let changed = layer.forward(&x)?;
/// vb.adapters().remove("again");
/// assert_eq!(layer.forward(&x)?.to_vec2::<f32>()?, alone.to_vec2::<f32>()?);
/// assert_ne!(changed.to_vec2::<f32>()?, alone.to_vec2::<f32>()?);
/// # std::fs::remove_dir_all(dir).ok();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Adapters(Arc<Registry>);

#[derive(Debug, Default)]
pub(super) struct Registry {
    slots: Mutex<BTreeMap<String, Weak<Slot>>>,
    /// Whether layers are observed, which is asked for at every step of a model.
    pub is_observed: AtomicBool,
}

/// The shape of a new adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rows of A and columns of B.
    pub rank: usize,
    /// What the update is multiplied by is `alpha / rank`, or with `rs_lora` `alpha / sqrt(rank)`.
    pub alpha: f64,
    /// Whether the scale is that of rsLoRA.
    pub rs_lora: bool,
    /// Whether rows have DoRA's magnitudes.
    pub dora: bool,
}

impl LoraConfig {
    /// What `B A` is multiplied by.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rs_lora { rank.sqrt() } else { rank }
    }
}

impl Adapters {
    /// The slot of a layer, made at the first call for its module, and again if it is to have another part.
    pub(crate) fn register(
        &self,
        module: &str,
        dims: &[usize],
        part: &[Range<usize>],
        frozen: Frozen,
    ) -> AdapterSlot {
        let mut slots = self.lock();
        let known = slots.get(module).and_then(AdapterSlot::upgrade);
        if let Some(slot) = known.filter(|slot| slot.dims() == dims && slot.part() == part) {
            return slot;
        }
        let slot = AdapterSlot::new(module, dims, part.to_vec(), frozen);
        slots.insert(module.to_owned(), slot.downgrade());
        slot
    }

    /// All slots, by the paths of their modules.
    pub fn slots(&self) -> Vec<AdapterSlot> {
        self.lock().values().filter_map(AdapterSlot::upgrade).collect()
    }

    /// The slot of a module.
    pub fn slot(&self, module: &str) -> Option<AdapterSlot> {
        self.lock().get(module).and_then(AdapterSlot::upgrade)
    }

    /// Removes an adapter from all modules; false if none has it.
    pub fn remove(&self, name: &str) -> bool {
        self.slots().iter().filter(|slot| slot.remove(name).is_some()).count() > 0
    }

    /// Switches an adapter on or off in all modules; false if none has it.
    pub fn set_active(&self, name: &str, is_active: bool) -> bool {
        self.slots().iter().filter(|slot| slot.set_active(name, is_active)).count() > 0
    }

    /// Whether any adapter is switched on.
    pub fn is_active(&self) -> bool {
        self.slots().iter().any(AdapterSlot::is_active)
    }

    /// Whether any adapter that is switched on has variables, so that outputs may have gradients.
    pub fn is_trained(&self) -> bool {
        self.slots().iter().any(AdapterSlot::is_trained)
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.0
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Weak<Slot>>> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
