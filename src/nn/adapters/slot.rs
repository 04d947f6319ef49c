//! Where a layer carries its adapters.

use super::super::LayerWeight;
use super::row_norms::{self, OwnColumns};
use super::{Lora, Observer};
use crate::backend::low_rank::{updated, Update};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

/// The adapters of one layer, by name. Clones share them: a model's adapters are changed while its layers stay as they
/// are.
///
/// Of several that are active, each changes what those before it have made, in the order in which they were added, as in
/// PEFT: LoRA's updates add up, and DoRA rescales the sum so far, by the lengths of rows of the frozen weight with its own
/// update alone.
#[derive(Clone, Debug)]
pub struct AdapterSlot(Arc<Slot>);

pub(super) struct Slot {
    module: String,
    /// Of the whole weight.
    dims: Vec<usize>,
    /// Of each of `dims` the range that the layer has, which is one rank's.
    part: Vec<Range<usize>>,
    frozen: Frozen,
    /// Of each row of the frozen weight, once they are needed.
    squares: OnceLock<Tensor>,
    adapters: RwLock<Vec<Named>>,
    observer: RwLock<Option<Observer>>,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { module, dims, part, adapters, .. } = self;
        f.debug_struct("Slot")
            .field("module", module)
            .field("dims", dims)
            .field("part", part)
            .field("adapters", adapters)
            .finish_non_exhaustive()
    }
}

/// What adapters change.
#[derive(Clone, Debug)]
pub(crate) enum Frozen {
    /// A weight `[N, K]`; if ranks sum their outputs, the columns of this one.
    Matrix(LayerWeight, Option<OwnColumns>),
    /// A stack of experts `[E, N, K]` on a device.
    Stack(Device),
}

#[derive(Clone, Debug)]
struct Named {
    name: String,
    lora: Lora,
    is_active: bool,
    /// What DoRA multiplies rows by, if nothing of it is trained.
    rescale: Option<Tensor>,
    /// It as numbers on the host, once they are needed.
    update: Arc<OnceLock<Arc<Update>>>,
}

/// An active adapter, and what DoRA multiplies rows by.
pub(crate) struct Active {
    pub lora: Lora,
    pub rescale: Option<Tensor>,
}

impl Active {
    /// That of one expert of a stack.
    pub fn expert(&self, index: usize) -> Result<Self> {
        Ok(Self { lora: self.lora.expert(index)?, rescale: None })
    }
}

impl AdapterSlot {
    /// The slot of a layer that has `part` of a weight of dimensions `dims`.
    pub(crate) fn new(
        module: impl Into<String>,
        dims: &[usize],
        part: Vec<Range<usize>>,
        frozen: Frozen,
    ) -> Self {
        let (squares, adapters, observer) = Default::default();
        let (module, dims) = (module.into(), dims.to_vec());
        Self(Arc::new(Slot { module, dims, part, frozen, squares, adapters, observer }))
    }

    /// The slot of a layer that has all of a weight, and no name.
    pub(crate) fn whole(weight: &LayerWeight) -> Self {
        let dims = weight.dims();
        let part = dims.iter().map(|size| 0..*size).collect();
        Self::new("", &dims, part, Frozen::Matrix(weight.clone(), None))
    }

    /// The slot of a whole stack of experts without a name.
    pub(crate) fn whole_stack(dims: &[usize], device: &Device) -> Self {
        Self::new("", dims, dims.iter().map(|size| 0..*size).collect(), Frozen::Stack(device.clone()))
    }

    pub(super) fn downgrade(&self) -> Weak<Slot> {
        Arc::downgrade(&self.0)
    }

    pub(super) fn upgrade(slot: &Weak<Slot>) -> Option<Self> {
        slot.upgrade().map(Self)
    }

    /// The path of the layer's module; empty if the layer was built by hand.
    pub fn module(&self) -> &str {
        &self.0.module
    }

    /// The dimensions of the whole weight, `[N, K]` or `[E, N, K]`.
    pub fn dims(&self) -> &[usize] {
        &self.0.dims
    }

    /// Which part of the weight the layer has: of each dimension a range.
    pub fn part(&self) -> &[Range<usize>] {
        &self.0.part
    }

    /// Where the layer is.
    pub fn device(&self) -> Device {
        match &self.0.frozen {
            Frozen::Matrix(weight, _) => weight.device(),
            Frozen::Stack(device) => device.clone(),
        }
    }

    /// Whether the layer has all of its weight.
    pub fn is_whole(&self) -> bool {
        self.0.dims.iter().zip(&self.0.part).all(|(size, part)| *part == (0..*size))
    }

    /// Adds an adapter, active, of the layer's part of the weight.
    ///
    /// With DoRA the lengths of the rows are computed here, once, unless one of its tensors is a variable; ranks that have
    /// other columns each compute them together, and all have to add it.
    ///
    /// # Errors
    /// If its shapes do not fit, or there is one of that name. DoRA of experts is not supported, nor is its training where
    /// ranks have other columns each.
    pub fn add(&self, name: &str, lora: Lora) -> Result<()> {
        lora.check(&self.0.part.iter().map(ExactSizeIterator::len).collect::<Vec<_>>())?;
        if self.names().iter().any(|taken| taken == name) {
            return Err(Error::mismatch("adapter", "a name that is not taken", format!("`{name}` again")));
        }
        let rescale = match (&lora.magnitude, &self.0.frozen) {
            (None, _) => None,
            (Some(_), Frozen::Stack(_)) => {
                return Err(self.unsupported("DoRA of experts", "use LoRA for them"));
            }
            (Some(_), Frozen::Matrix(_, Some(_))) if lora.is_trained() => {
                let remedy = "train with LoRA, or on one device";
                return Err(
                    self.unsupported("training with DoRA where ranks have other columns each", remedy)
                );
            }
            (Some(_), Frozen::Matrix(..)) if lora.is_trained() => None,
            (Some(_), Frozen::Matrix(..)) => self.rescale(&lora)?,
        };
        let (name, update) = (name.to_owned(), Arc::default());
        self.write().push(Named { name, lora, is_active: true, rescale, update });
        Ok(())
    }

    fn unsupported(&self, what: &str, remedy: &str) -> Error {
        Error::Unsupported { what: format!("{what} (`{}`)", self.0.module), remedy: remedy.to_string() }
    }

    /// The lengths of the rows of the frozen weight, `[N]` in F32: what the magnitudes of a new DoRA adapter begin with.
    ///
    /// # Errors
    /// If the layer is a stack of experts, or the device fails.
    pub fn row_norms(&self) -> Result<Tensor> {
        match &self.0.frozen {
            Frozen::Matrix(weight, columns) => Ok(self.squares(weight, columns.as_ref())?.sqrt()?),
            Frozen::Stack(_) => Err(self.unsupported("DoRA of experts", "use LoRA for them")),
        }
    }

    fn squares(&self, weight: &LayerWeight, columns: Option<&OwnColumns>) -> Result<Tensor> {
        match self.0.squares.get() {
            Some(squares) => Ok(squares.clone()),
            None => {
                let squares = row_norms::squares(weight, columns)?;
                Ok(self.0.squares.get_or_init(|| squares).clone())
            }
        }
    }

    /// What DoRA multiplies rows by: magnitudes over lengths, of which the lengths are constants in training.
    fn rescale(&self, lora: &Lora) -> Result<Option<Tensor>> {
        let (Some(magnitude), Frozen::Matrix(weight, columns)) = (&lora.magnitude, &self.0.frozen) else {
            return Ok(None);
        };
        let squares = self.squares(weight, columns.as_ref())?;
        let norms = row_norms::updated(weight, &squares, lora, columns.as_ref())?;
        Ok(Some(magnitude.to_dtype(DType::F32)?.div(&norms)?))
    }

    /// Removes an adapter, and returns it if there was one of that name.
    pub fn remove(&self, name: &str) -> Option<Lora> {
        let mut adapters = self.write();
        let index = adapters.iter().position(|adapter| adapter.name == name)?;
        Some(adapters.remove(index).lora)
    }

    /// The adapter of that name.
    pub fn get(&self, name: &str) -> Option<Lora> {
        self.read().iter().find(|adapter| adapter.name == name).map(|adapter| adapter.lora.clone())
    }

    /// The names of all adapters, in the order in which they were added.
    pub fn names(&self) -> Vec<String> {
        self.read().iter().map(|adapter| adapter.name.clone()).collect()
    }

    /// Switches an adapter on or off; false if there is none of that name.
    pub fn set_active(&self, name: &str, is_active: bool) -> bool {
        match self.write().iter_mut().find(|adapter| adapter.name == name) {
            Some(adapter) => {
                adapter.is_active = is_active;
                true
            }
            None => false,
        }
    }

    /// Whether any adapter is switched on.
    pub fn is_active(&self) -> bool {
        self.read().iter().any(|adapter| adapter.is_active)
    }

    /// Whether any adapter that is switched on has variables, so that its outputs may have gradients.
    pub fn is_trained(&self) -> bool {
        self.read().iter().any(|adapter| adapter.is_active && adapter.lora.is_trained())
    }

    /// The adapters that are switched on, as numbers on the host. None of them may be trained.
    pub(crate) fn updates(&self) -> Result<Vec<Arc<Update>>> {
        let update = |adapter: &Named| match adapter.update.get() {
            Some(update) => Ok(update.clone()),
            None => {
                let numbers = |tensor: &Tensor| -> candle_core::Result<Vec<f32>> {
                    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
                };
                let Lora { a, b, scale, .. } = &adapter.lora;
                let rescale = adapter.rescale.as_ref().map(numbers).transpose()?;
                let update = Arc::new(Update {
                    a: numbers(a)?,
                    b: numbers(b)?,
                    rank: adapter.lora.rank(),
                    k: a.dims().last().copied().unwrap_or_default(),
                    n: b.dims().iter().rev().nth(1).copied().unwrap_or_default(),
                    scale: *scale as f32,
                    rescale,
                });
                Ok(adapter.update.get_or_init(|| update).clone())
            }
        };
        self.read().iter().filter(|adapter| adapter.is_active).map(update).collect()
    }

    /// The adapters that are switched on.
    pub(crate) fn active(&self) -> Result<Vec<Active>> {
        let active: Vec<Named> = self.read().iter().filter(|adapter| adapter.is_active).cloned().collect();
        let complete = |Named { lora, rescale, .. }: Named| {
            let rescale = rescale.map_or_else(|| self.rescale(&lora), |rescale| Ok(Some(rescale)))?;
            Ok(Active { lora, rescale })
        };
        active.into_iter().map(complete).collect()
    }

    /// `y`, the output of the frozen layer with this bias for `x`, with what the active adapters make of it. The observer
    /// is told of `x`.
    pub(crate) fn apply(&self, x: &Tensor, y: Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
        self.tell(None, x)?;
        if let Some(y) = self.by_numbers(0, x, &y, bias)? {
            return Ok(y);
        }
        let apply = |y: Tensor, Active { lora, rescale }: Active| lora.apply(x, &y, bias, rescale.as_ref());
        self.active()?.into_iter().try_fold(y, apply)
    }

    /// As [`apply`](Self::apply), for one expert of a stack.
    pub(crate) fn apply_expert(&self, index: usize, x: &Tensor, y: Tensor) -> candle_core::Result<Tensor> {
        self.tell(Some(index), x)?;
        if let Some(y) = self.by_numbers(index, x, &y, None)? {
            return Ok(y);
        }
        let apply = |y: Tensor, active: Active| active.expert(index)?.lora.apply(x, &y, None, None);
        self.active()?.into_iter().try_fold(y, apply)
    }

    /// As [`apply`](Self::apply) on the CPU for few rows, without gradients; none elsewhere, or if no adapter is active.
    fn by_numbers(
        &self,
        expert: usize,
        x: &Tensor,
        y: &Tensor,
        bias: Option<&Tensor>,
    ) -> candle_core::Result<Option<Tensor>> {
        match x.device().is_cpu() && self.is_active() && !self.is_trained() {
            true => updated(&self.updates()?, expert, x, y, bias),
            false => Ok(None),
        }
    }

    pub(super) fn observer(&self) -> RwLockReadGuard<'_, Option<Observer>> {
        self.0.observer.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn observer_mut(&self) -> RwLockWriteGuard<'_, Option<Observer>> {
        self.0.observer.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Named>> {
        self.0.adapters.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Named>> {
        self.0.adapters.write().unwrap_or_else(PoisonError::into_inner)
    }
}
