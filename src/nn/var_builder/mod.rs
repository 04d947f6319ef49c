//! candle_nn's `VarBuilder` verbs, with packed weights behind them.

mod parts;
mod renamed;
mod sources;

use super::adapters::Frozen;
use super::dequantizing::{shape_error, DequantizingBackend};
use super::expert_split::ExpertSplit;
use super::loaded::{Loaded, LoadedAs};
use super::{AdapterSlot, Adapters, LayerWeight};
use crate::backend::has_kernels;
use crate::checkpoint::{tensor_of, Checkpoint, DenseTensor, GgmlKernels, GgmlWeight, PackedWeight, Weight};
use crate::distributed::Rank;
use crate::{QuantFormat, QuantTensor};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_quant_packed::load_packed;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Finds the tensors of a model by path, as [`candle_nn::VarBuilder`] does.
///
/// The layers of this crate ([`linear`](crate::linear), [`embedding`](crate::embedding)) receive
/// packed weights from it. [`get`](VarBuilder::get) keeps candle's meaning, a dense tensor of the
/// builder's dtype; asked for a packed weight it dequantizes it, whole, into a new tensor.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_quant::{linear_no_bias, Checkpoint, VarBuilder};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let checkpoint = Checkpoint::open("assets/tiny")?;
/// let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
/// let mlp = vb.pp("model.layers").pp(0).pp("mlp");
/// let up = linear_no_bias(256, 512, mlp.pp("up_proj"))?;
/// assert!(up.weight().quantized().is_some());
///
/// let dequantized = mlp.get((512, 256), "up_proj.weight")?;
/// assert_eq!(dequantized.dtype(), DType::F32);
/// # Ok(())
/// # }
/// ```
///
/// Names that the checkpoint lacks are looked up as [`Checkpoint::weight`] does: a model finds single experts in
/// stacks, and a tied head in the embedding.
///
/// All of candle_nn's constructors exist. [`from_mmaped_safetensors`](VarBuilder::from_mmaped_safetensors) opens the
/// checkpoint that the files belong to, so that candle's own examples run on packed weights. A
/// `candle_nn::VarBuilder` of any source converts into this one.
#[derive(Clone)]
pub struct VarBuilder<'a> {
    /// Path and device, and every dense tensor.
    inner: candle_nn::VarBuilder<'a>,
    /// The dtype of dense tensors and of activations.
    pub dtype: DType,
    /// Where packed weights come from, if from a checkpoint.
    checkpoint: Option<Checkpoint>,
    /// What dense weights of layers are quantized to while loading.
    quantize: Option<Formats>,
    /// Which of several ranks this one is.
    rank: Option<Rank>,
    /// What ranks have of experts.
    expert_split: ExpertSplit,
    /// In which form weights were loaded.
    loaded: Loaded,
    /// The slots of the layers that were built.
    adapters: Adapters,
}

/// The format of each weight that is to have one, by the path of its module.
type Formats = Arc<dyn Fn(&str) -> Option<QuantFormat> + Send + Sync>;

impl VarBuilder<'static> {
    /// A builder at the root of a checkpoint. `dtype` is that of dense tensors and activations.
    pub fn from_checkpoint(checkpoint: &Checkpoint, dtype: DType, device: &Device) -> Self {
        let backend = Box::new(DequantizingBackend::new(checkpoint));
        let (checkpoint, loaded) = (Some(checkpoint.clone()), backend.loaded().clone());
        let dense = candle_nn::VarBuilder::from_backend(backend, dtype, device.clone());
        Self { checkpoint, loaded, ..dense.into() }
    }

    /// A builder for one of several ranks, on its device: models built on it load this rank's slices of their
    /// weights and compute together with the other ranks. With one rank it is
    /// [`from_checkpoint`](VarBuilder::from_checkpoint).
    ///
    /// What is asked for by itself, with [`get`](VarBuilder::get) and the layers of [`nn`](crate::nn), is whole
    /// on every rank; the layers of [`parallel`](crate::parallel) take slices.
    pub fn sharded(checkpoint: &Checkpoint, rank: &Rank, dtype: DType) -> Self {
        let rank_of_several = Some(rank.clone()).filter(|rank| rank.world_size() > 1);
        Self { rank: rank_of_several, ..Self::from_checkpoint(checkpoint, dtype, rank.device()) }
    }
}

impl<'a> VarBuilder<'a> {
    /// candle_nn's own builder at the same path, for layers this crate does not replace and for
    /// unmodified models. It gives packed weights dequantized, except to layers that know of packed ones: those of this
    /// crate and of candle-quant-nn.
    pub fn dense(&self) -> candle_nn::VarBuilder<'a> {
        self.inner.to_dtype(self.dtype)
    }

    /// Quantizes the dense weights of linear layers, embeddings and experts to `format` while they are loaded.
    ///
    /// Weights that are packed already keep their format, and those whose K is no multiple of the
    /// group size stay dense. Scales have the dtype in which the weight is stored.
    #[must_use]
    pub fn quantize_to(self, format: QuantFormat) -> Self {
        self.quantize_with(move |_| Some(format))
    }

    /// As [`quantize_to`](VarBuilder::quantize_to), with a format for each weight by the path of its module
    /// (`model.layers.0.mlp.up_proj`); where there is none it stays dense.
    ///
    /// One weight at a time is in memory as it was stored. A rank of several quantizes its own parts.
    #[must_use]
    pub fn quantize_with(
        self,
        formats: impl Fn(&str) -> Option<QuantFormat> + Send + Sync + 'static,
    ) -> Self {
        Self { quantize: Some(Arc::new(formats)), ..self }
    }

    /// What a dense weight at the current path, with rows of K elements, is quantized to.
    fn format(&self, k: usize) -> Option<QuantFormat> {
        let format = self.quantize.as_ref()?(&self.prefix());
        format.filter(|format| k.is_multiple_of(format.group_size()))
    }

    /// How the experts of a model are split, if the builder is for one of several ranks.
    #[must_use]
    pub fn split_experts(self, how: ExpertSplit) -> Self {
        Self { expert_split: how, ..self }
    }

    /// The tensor `weight` at the current path, of logical shape `[n, k]`, packed if the checkpoint
    /// has it packed. This is what layers are made of. The hint serves sources that create tensors.
    ///
    /// # Errors
    /// If it is missing or damaged, or its shape is not `[n, k]`.
    pub fn weight(&self, n: usize, k: usize, hint: Init) -> Result<LayerWeight> {
        match self.stored_weight(&[n, k])? {
            None => match self.asked_for(n, k, hint)?.into() {
                LayerWeight::Dense(dense) => self.quantized(dense, k),
                packed => Ok(packed),
            },
            Some(weight) => self.load(&weight),
        }
    }

    /// The tensor `weight` at the current path, of shape `[n, k]`, for a layer that knows of packed weights: the
    /// [stand-in](candle_quant_packed::stand_in) of a packed weight, or a dense tensor.
    ///
    /// # Errors
    /// As those of [`weight`](VarBuilder::weight).
    pub fn weight_tensor(&self, n: usize, k: usize, hint: Init) -> Result<Tensor> {
        match &self.quantize {
            None => self.asked_for(n, k, hint),
            Some(_) => {
                let path = self.prefix();
                let shared = self
                    .checkpoint
                    .as_ref()
                    .is_some_and(|checkpoint| checkpoint.is_only_vocabulary(&path, n));
                self.weight(n, k, hint)?.into_tensor(self.dtype(), shared)
            }
        }
    }

    /// What the source of the builder answers to a layer that knows of packed weights.
    fn asked_for(&self, n: usize, k: usize, hint: Init) -> Result<Tensor> {
        load_packed(|| self.get_with_hints((n, k), "weight", hint))
    }

    /// In which form each weight was loaded so far, by the path of its module, if a checkpoint is behind the builder.
    pub fn loaded(&self) -> BTreeMap<String, LoadedAs> {
        self.loaded.weights()
    }

    /// The adapters of all layers that are built on this builder and on those made of it.
    pub fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    /// This builder for layers that take no adapters: those whose inputs are in another order than in the model as published.
    pub fn without_adapters(&self) -> Self {
        Self { adapters: Adapters::default(), ..self.clone() }
    }

    /// The slot for adapters of the layer at the current path, which has `part` of a weight of dimensions `dims`.
    pub(crate) fn adapter_slot(&self, dims: &[usize], part: &[Range<usize>], frozen: Frozen) -> AdapterSlot {
        self.adapters.register(&self.prefix(), dims, part, frozen)
    }

    fn load(&self, weight: &Weight) -> Result<LayerWeight> {
        let form = match weight {
            Weight::Dense(_) => LoadedAs::Dense,
            _ => LoadedAs::Packed,
        };
        self.loaded.add(&self.prefix(), form);
        let k = weight.dims().last().copied().unwrap_or(0);
        match weight {
            Weight::Packed(packed) => Ok(packed.load(self.device())?.into()),
            Weight::Irregular(reordered) => Ok(reordered.load(self.device())?),
            Weight::Ggml(blocks) => match self.own_format(blocks) {
                Some(packed) => Ok(packed.load(self.device())?.into()),
                None => Ok(blocks.load(self.device())?.into()),
            },
            Weight::Dense(dense) => self.load_dense(dense, k),
        }
    }

    /// Blocks of a GGML type in the format of this crate, if it is to compute with them on the device.
    pub(super) fn own_format(&self, blocks: &GgmlWeight) -> Option<PackedWeight> {
        let asked_for = self.checkpoint.as_ref().map(Checkpoint::ggml_kernels).unwrap_or_default();
        let packed = blocks.packed().filter(|packed| has_kernels(packed.format(), self.device()))?;
        match asked_for {
            GgmlKernels::Own => Some(packed),
            // candle multiplies by these on a CPU only.
            GgmlKernels::Candle if matches!(blocks.dtype(), GgmlDType::Q8_1 | GgmlDType::Q8K) => {
                Some(packed).filter(|_| !self.device().is_cpu())
            }
            GgmlKernels::Candle => None,
        }
    }

    /// A dense weight with rows of K elements, quantized if that was asked for and is possible.
    pub(super) fn load_dense(&self, dense: &DenseTensor, k: usize) -> Result<LayerWeight> {
        match self.format(k) {
            // It starts from the stored values, not from their rounding to `dtype`.
            Some(_) => self.quantized(dense.load(dense.dtype(), self.device())?, k),
            None => Ok(dense.load(self.dtype(), self.device())?.into()),
        }
    }

    /// Dense rows of K elements, quantized if that was asked for and is possible.
    pub(super) fn quantized(&self, dense: Tensor, k: usize) -> Result<LayerWeight> {
        match self.format(k) {
            Some(format) => Ok(QuantTensor::quantize(&dense, format)?.into()),
            None => Ok(dense.to_dtype(self.dtype())?.into()),
        }
    }

    /// The weight at the current path, of logical shape `dims`, as the checkpoint has it; `None` if the
    /// builder has no checkpoint behind it.
    pub(super) fn stored_weight(&self, dims: &[usize]) -> Result<Option<Weight>> {
        let Some(checkpoint) = &self.checkpoint else { return Ok(None) };
        let module = self.prefix();
        let weight = checkpoint.weight(&module, dims.last().copied())?;
        if weight.dims() != dims {
            return Err(shape_error(checkpoint, &tensor_of(&module, "weight"), dims, weight.dims()));
        }
        Ok(Some(weight))
    }

    /// The tensor `name` at the current path as a dense tensor of the builder's dtype.
    ///
    /// # Errors
    /// If it is missing or damaged, or has another shape.
    pub fn get<S: Into<Shape>>(&self, shape: S, name: &str) -> Result<Tensor> {
        self.dense().get(shape, name)
    }

    /// As [`get`](VarBuilder::get); the hint serves sources that create tensors, such as a `VarMap`.
    ///
    /// # Errors
    /// As those of [`get`](VarBuilder::get).
    pub fn get_with_hints<S: Into<Shape>>(&self, shape: S, name: &str, hint: Init) -> Result<Tensor> {
        self.dense().get_with_hints(shape, name, hint)
    }

    /// As [`get_with_hints`](VarBuilder::get_with_hints), of a chosen dtype.
    ///
    /// # Errors
    /// As those of [`get`](VarBuilder::get).
    pub fn get_with_hints_dtype<S: Into<Shape>>(
        &self,
        shape: S,
        name: &str,
        hint: Init,
        dtype: DType,
    ) -> Result<Tensor> {
        self.dense().get_with_hints_dtype(shape, name, hint, dtype)
    }

    /// The tensor `name` at the current path, of whatever shape it has.
    ///
    /// # Errors
    /// If it is missing or damaged, or packed in a way that its shape alone does not tell.
    pub fn get_unchecked(&self, name: &str) -> Result<Tensor> {
        self.inner.get_unchecked(name)
    }

    /// As [`get_unchecked`](VarBuilder::get_unchecked), of a chosen dtype.
    ///
    /// # Errors
    /// As those of [`get_unchecked`](VarBuilder::get_unchecked).
    pub fn get_unchecked_dtype(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.inner.get_unchecked_dtype(name, dtype)
    }

    /// Whether a tensor called `name` is stored at the current path. A bias counts, too, if
    /// [`Checkpoint::dense`] finds it under another name: without it a layer would be another one.
    pub fn contains_tensor(&self, name: &str) -> bool {
        self.inner.contains_tensor(name)
    }

    /// The current path, its parts joined by dots.
    pub fn prefix(&self) -> String {
        self.inner.prefix()
    }

    /// A builder one step down, as `cd` into a directory.
    pub fn push_prefix<S: ToString>(&self, part: S) -> Self {
        self.with(self.inner.push_prefix(part))
    }

    /// Short for [`push_prefix`](VarBuilder::push_prefix).
    pub fn pp<S: ToString>(&self, part: S) -> Self {
        self.push_prefix(part)
    }

    /// A builder at the path `prefix`, seen from the root.
    pub fn set_prefix(&self, prefix: impl ToString) -> Self {
        self.with(self.inner.set_prefix(prefix))
    }

    /// A builder at the root.
    pub fn root(&self) -> Self {
        self.with(self.inner.root())
    }

    /// The device that tensors are put on.
    pub fn device(&self) -> &Device {
        self.inner.device()
    }

    /// The dtype of dense tensors and of activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A builder with another dtype.
    pub fn to_dtype(&self, dtype: DType) -> Self {
        Self { dtype, ..self.clone() }
    }

    /// This builder with another dtype.
    pub fn set_dtype(self, dtype: DType) -> Self {
        let inner = self.inner.clone().set_dtype(dtype);
        Self { inner, dtype, ..self }
    }

    /// This builder with another device.
    pub fn set_device(self, device: Device) -> Self {
        let inner = self.inner.clone().set_device(device);
        Self { inner, ..self }
    }

    /// Which of several ranks the builder is for; `None` if it is for the only one.
    pub fn rank(&self) -> Option<&Rank> {
        self.rank.as_ref()
    }

    /// What ranks have of experts.
    pub(crate) fn expert_split(&self) -> ExpertSplit {
        self.expert_split
    }

    /// The checkpoint behind this builder, if there is one.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref()
    }

    fn with(&self, inner: candle_nn::VarBuilder<'a>) -> Self {
        Self { inner, ..self.clone() }
    }
}

impl<'a> From<candle_nn::VarBuilder<'a>> for VarBuilder<'a> {
    fn from(inner: candle_nn::VarBuilder<'a>) -> Self {
        Self {
            dtype: inner.dtype(),
            inner,
            checkpoint: None,
            quantize: None,
            rank: None,
            expert_split: ExpertSplit::default(),
            loaded: Loaded::default(),
            adapters: Adapters::default(),
        }
    }
}

/// Of each dimension of a weight a range.
fn narrow(weight: Weight, part: &[Range<usize>]) -> crate::Result<Weight> {
    part.iter().enumerate().try_fold(weight, |weight, (dim, range)| weight.narrow(dim, range.clone()))
}
