//! Mixtures of experts: stacks of weights of which each token uses a few.

mod load;

pub use load::experts;
pub(crate) use load::StoredExperts;

use super::adapters::merged;
use super::linear::frozen;
use super::{AdapterSlot, LayerWeight};
pub use crate::backend::Gating;
use crate::backend::{self, ChosenExperts, Operand};
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{bail, DType, Device, IndexOp, Tensor, D};

/// The sizes of a block of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// How many there are.
    pub experts: usize,
    /// Elements of a token.
    pub hidden_size: usize,
    /// Elements inside an expert.
    pub intermediate_size: usize,
    /// Whether every projection of every expert has a bias.
    pub bias: bool,
    /// What joins gate and up.
    pub gating: Gating,
}

/// One projection of all experts.
#[derive(Clone, Debug)]
pub struct ExpertStack {
    weights: Weights,
    /// `[E, N]`.
    bias: Option<Tensor>,
    adapters: AdapterSlot,
}

#[derive(Clone, Debug)]
enum Weights {
    /// `[E, N, K]`, packed.
    Stack(QuantTensor),
    /// `[N, K]` for each expert.
    Each(Vec<LayerWeight>),
}

impl ExpertStack {
    /// A packed stack `[E, N, K]` with biases `[E, N]`.
    ///
    /// # Errors
    /// If the shapes are others.
    pub fn from_quant(stack: QuantTensor, bias: Option<Tensor>) -> Result<Self> {
        let &[experts, n, k] = stack.dims().as_slice() else {
            return Err(Error::mismatch("stack of experts", "[E, N, K]", format!("{:?}", stack.dims())));
        };
        Self::checked(Weights::Stack(stack), bias, [experts, n, k])
    }

    /// One weight `[N, K]` for each expert, packed or dense, all of one shape; biases `[E, N]`. Packed weights
    /// of one format are joined to a stack.
    ///
    /// # Errors
    /// If there are none, or shapes differ.
    pub fn from_each(weights: Vec<LayerWeight>, bias: Option<Tensor>) -> Result<Self> {
        let dims = weights.first().map(LayerWeight::dims).unwrap_or_default();
        let &[n, k] = dims.as_slice() else {
            return Err(Error::mismatch("experts", "one weight [N, K] for each", format!("{dims:?}")));
        };
        if let Some(other) = weights.iter().map(LayerWeight::dims).find(|other| *other != dims) {
            return Err(Error::mismatch("experts", format!("{dims:?} each"), format!("{other:?}")));
        }
        let experts = weights.len();
        let packed: Option<Vec<_>> = weights.iter().map(LayerWeight::quantized).collect();
        let weights = match packed {
            // Each may have a format of its own.
            Some(packed)
                if packed.iter().all(|part| packed.first().is_some_and(|first| is_alike(first, part))) =>
            {
                Weights::Stack(QuantTensor::stack(&packed)?)
            }
            _ => Weights::Each(weights),
        };
        Self::checked(weights, bias, [experts, n, k])
    }

    fn checked(weights: Weights, bias: Option<Tensor>, dims: [usize; 3]) -> Result<Self> {
        let [experts, n, _] = dims;
        match &bias {
            Some(bias) if bias.dims() != [experts, n] => Err(Error::mismatch(
                "biases of experts",
                format!("shape [{experts}, {n}]"),
                format!("{:?}", bias.dims()),
            )),
            _ => {
                let device = match &weights {
                    Weights::Stack(stack) => stack.device().clone(),
                    Weights::Each(weights) => weights.first().map_or(Device::Cpu, LayerWeight::device),
                };
                let adapters = AdapterSlot::whole_stack(&dims, &device);
                Ok(Self { weights, bias, adapters })
            }
        }
    }

    fn experts(&self) -> usize {
        match &self.weights {
            Weights::Stack(stack) => stack.dims().first().copied().unwrap_or(0),
            Weights::Each(weights) => weights.len(),
        }
    }

    /// The adapters of all experts, `[E, rank, K]` and `[E, N, rank]`.
    pub fn adapters(&self) -> &AdapterSlot {
        &self.adapters
    }

    /// The stack with its active adapters merged into the weights, and none of its own; see [`Linear::merged`].
    ///
    /// # Errors
    /// As those of [`Linear::merged`].
    ///
    /// [`Linear::merged`]: crate::Linear::merged
    pub fn merged(&self, format: Option<QuantFormat>) -> Result<Self> {
        let active = self.adapters.active()?;
        let of_expert = |index| {
            let active = active.iter().map(|active| active.expert(index)).collect::<Result<Vec<_>>>()?;
            merged(&self.weight(index)?, &active, format)
        };
        Self::from_each((0..self.experts()).map(of_expert).collect::<Result<_>>()?, self.bias.clone())
    }

    fn weight(&self, index: usize) -> candle_core::Result<LayerWeight> {
        match &self.weights {
            Weights::Stack(stack) => Ok(stack.matrix(index)?.into()),
            Weights::Each(weights) => match weights.get(index) {
                Some(weight) => Ok(weight.clone()),
                None => bail!("expert {index} of {}", weights.len()),
            },
        }
    }

    /// What one expert makes of `x` `[M, K]`.
    fn forward(&self, index: usize, x: &Tensor) -> candle_core::Result<Tensor> {
        let weight = self.weight(index)?;
        let bias = self.bias.as_ref().map(|bias| bias.i(index)).transpose()?;
        self.adapters.apply_expert(index, x, frozen(&weight, bias.as_ref(), x)?)
    }

    /// The stack and its biases, if it is packed.
    pub(crate) fn packed(&self) -> Option<Operand<'_>> {
        match &self.weights {
            Weights::Stack(weight) => Some(Operand { weight, bias: self.bias.as_ref() }),
            Weights::Each(_) => None,
        }
    }

    /// The same, if no adapter changes it.
    fn operand(&self) -> Option<Operand<'_>> {
        self.packed().filter(|_| self.adapters.is_idle())
    }

    /// The weights, for reports.
    pub(crate) fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        let (stack, each) = match &self.weights {
            Weights::Stack(stack) => (Some(LayerWeight::from(stack.clone())), &[][..]),
            Weights::Each(weights) => (None, weights.as_slice()),
        };
        stack.into_iter().chain(each.iter().cloned())
    }
}

/// Whether both can be in one stack.
fn is_alike(a: &QuantTensor, b: &QuantTensor) -> bool {
    let of = |weight: &QuantTensor| {
        let dtypes: Vec<_> = weight.parts().map(Tensor::dtype).collect();
        (weight.format(), weight.global_scale().map(Tensor::elem_count), dtypes)
    };
    of(a) == of(b)
}

/// A block of experts: gate, up and down projections, of which each token uses some.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::Activation;
/// use candle_quant::nn::{ExpertStack, Experts, Gating};
/// use candle_quant::{QuantFormat, QuantTensor};
///
/// # fn main() -> candle_quant::Result<()> {
/// let stack = |n: usize, k: usize| {
///     let weights = Tensor::randn(0f32, 1., (8, n, k), &Device::Cpu)?;
///     ExpertStack::from_quant(QuantTensor::quantize(&weights, QuantFormat::MXFP4)?, None)
/// };
/// let experts = Experts::new(stack(96, 64)?, stack(96, 64)?, stack(64, 96)?, Gating::Plain(Activation::Silu))?;
/// // Three tokens, two of eight experts each.
/// let x = Tensor::randn(0f32, 1., (1, 3, 64), &Device::Cpu)?;
/// let ids = Tensor::new(&[[[7u32, 0], [3, 4], [0, 1]]], &Device::Cpu)?;
/// let routing_weights = Tensor::full(0.5f32, (1, 3, 2), &Device::Cpu)?;
/// assert_eq!(experts.forward(&x, &ids, &routing_weights)?.dims(), [1, 3, 64]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Experts {
    gate: ExpertStack,
    up: ExpertStack,
    down: ExpertStack,
    gating: Gating,
    /// Inputs of the down projections before and after the outputs of gate and up: of groups that begin or end in
    /// another rank's part.
    padding: (usize, usize),
}

/// The sizes of what goes through a block of experts.
pub(crate) struct Routed {
    pub tokens: usize,
    pub hidden: usize,
    pub top_k: usize,
    /// Whether it is a step of a decode, in which pairs of a token and an expert are computed by themselves.
    pub ungrouped: bool,
}

impl Routed {
    /// Of `x` `[.., T, hidden]`, `ids` and `routing_weights` `[.., T, top_k]`.
    pub fn new(x: &Tensor, ids: &Tensor, routing_weights: &Tensor) -> candle_core::Result<Self> {
        let [outer @ .., hidden] = x.dims() else { bail!("x: a shape [.., T, hidden], found a scalar") };
        let [outer_ids @ .., top_k] = ids.dims() else {
            bail!("ids: a shape [.., T, top_k], found a scalar")
        };
        if outer != outer_ids || ids.dims() != routing_weights.dims() {
            bail!(
                "x {:?}, ids {:?} and routing_weights {:?} do not fit",
                x.dims(),
                ids.dims(),
                routing_weights.dims()
            );
        }
        let (tokens, ungrouped) = (outer.iter().product(), outer.last() == Some(&1));
        Ok(Self { tokens, hidden: *hidden, top_k: *top_k, ungrouped })
    }
}

/// The ids on the host, each of one of `count` experts.
pub(crate) fn chosen(ids: &Tensor, count: usize) -> candle_core::Result<Vec<u32>> {
    let chosen = ids.flatten_all()?.to_dtype(DType::U32)?.to_vec1::<u32>()?;
    match chosen.iter().find(|id| **id as usize >= count) {
        Some(id) => bail!("ids: each below {count}, the number of experts, found {id}"),
        None => Ok(chosen),
    }
}

impl Experts {
    /// A block of experts from its projections: gate and up `[E, inner, hidden]`, down `[E, hidden, inner]`.
    ///
    /// # Errors
    /// If the numbers of experts differ.
    pub fn new(gate: ExpertStack, up: ExpertStack, down: ExpertStack, gating: Gating) -> Result<Self> {
        let counts = [gate.experts(), up.experts(), down.experts()];
        match counts {
            [a, b, c] if a == b && b == c => Ok(Self { gate, up, down, gating, padding: (0, 0) }),
            _ => Err(Error::mismatch("gate, up and down", "as many experts each", format!("{counts:?}"))),
        }
    }

    /// How many experts there are.
    pub fn count(&self) -> usize {
        self.gate.experts()
    }

    /// The block with the active adapters of its projections merged into the weights; see
    /// [`Linear::merged`](crate::Linear::merged).
    ///
    /// # Errors
    /// As those of that.
    pub fn merged(&self, format: Option<QuantFormat>) -> Result<Self> {
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(|stack| stack.merged(format));
        Ok(Self { gate: gate?, up: up?, down: down?, ..self.clone() })
    }

    /// For each token of `x` `[.., T, hidden]` the sum of its experts' outputs, each times its routing weight.
    ///
    /// `ids` `[.., T, top_k]` (U32) names them, `routing_weights` is of that shape. With `T = 1`, the step of a
    /// decode, every expert of a token is computed by itself, so that the bits of its sum do not depend on
    /// what else is in the batch; with more, tokens are grouped by expert and each expert is read once.
    /// Sums are f32, in the order of `ids`.
    ///
    /// On a CUDA device, packed stacks are multiplied by kernels that read the ids where they are: an id of no
    /// expert makes NaN. Other weights, and activations other than SiLU, need the ids on the host.
    ///
    /// # Errors
    /// If shapes do not fit, or, where the host reads them, there is no expert of an id.
    pub fn forward(&self, x: &Tensor, ids: &Tensor, routing_weights: &Tensor) -> candle_core::Result<Tensor> {
        let Routed { tokens, hidden, top_k, ungrouped } = Routed::new(x, ids, routing_weights)?;
        let flat = x.reshape((tokens, hidden))?;
        if let Some(sum) = self.in_kernels(&flat, ids, routing_weights, ungrouped)? {
            return sum.reshape(x.shape());
        }
        let chosen = chosen(ids, self.count())?;
        if chosen.is_empty() {
            return x.zeros_like();
        }
        let (outputs, order) = match ungrouped {
            true => {
                let of_pair =
                    |(pair, id): (usize, &u32)| self.expert(*id as usize, &flat.narrow(0, pair / top_k, 1)?);
                let outputs = chosen.iter().enumerate().map(of_pair).collect::<candle_core::Result<_>>()?;
                (outputs, (0..chosen.len() as u32).collect())
            }
            false => self.by_expert(&flat, &chosen, top_k)?,
        };
        let routing_weights = routing_weights.reshape((tokens, top_k))?.to_dtype(DType::F32)?;
        backend::weighted_sum(&outputs, &order, &routing_weights)?.reshape(x.shape())
    }

    /// All of it in kernels that read the ids themselves; none where there are none for it.
    fn in_kernels(
        &self,
        x: &Tensor,
        ids: &Tensor,
        routing_weights: &Tensor,
        ungrouped: bool,
    ) -> candle_core::Result<Option<Tensor>> {
        let operands = (self.gate.operand(), self.up.operand(), self.down.operand());
        let (Some(gate), Some(up), Some(down)) = operands else {
            return Ok(None);
        };
        let pairs = (x.dim(0)?, ids.dim(D::Minus1)?);
        let ids = ids.reshape(pairs)?.to_dtype(DType::U32)?;
        let routing_weights = routing_weights.reshape(pairs)?.to_dtype(DType::F32)?;
        let gating = self.gating;
        backend::experts(
            &ChosenExperts {
                gate,
                up,
                down,
                gating,
                ids: &ids,
                routing_weights: &routing_weights,
                ungrouped,
            },
            x,
        )
    }

    /// The outputs of the `chosen` experts, each applied once, and for each of `chosen` its row in them.
    fn by_expert(
        &self,
        x: &Tensor,
        chosen: &[u32],
        top_k: usize,
    ) -> candle_core::Result<(Vec<Tensor>, Vec<u32>)> {
        let mut pairs: Vec<u32> = (0..chosen.len() as u32).collect();
        pairs.sort_by_key(|pair| chosen.get(*pair as usize));
        let device = x.device();
        let mut outputs = Vec::new();
        for pairs in pairs.chunk_by(|a, b| chosen.get(*a as usize) == chosen.get(*b as usize)) {
            let expert = pairs.first().and_then(|pair| chosen.get(*pair as usize)).copied().unwrap_or(0);
            let tokens: Vec<u32> = pairs.iter().map(|pair| pair / top_k as u32).collect();
            let x = x.index_select(&Tensor::new(tokens, device)?, 0)?;
            outputs.push(self.expert(expert as usize, &x)?);
        }
        let mut order = vec![0u32; pairs.len()];
        for (row, pair) in (0..).zip(&pairs) {
            if let Some(slot) = order.get_mut(*pair as usize) {
                *slot = row;
            }
        }
        Ok((outputs, order))
    }

    fn expert(&self, index: usize, x: &Tensor) -> candle_core::Result<Tensor> {
        let (gate, up) = (self.gate.forward(index, x)?, self.up.forward(index, x)?);
        let inner = self.gating.apply(&gate, &up)?;
        let inner = match self.padding {
            (0, 0) => inner,
            (before, after) => inner.pad_with_zeros(D::Minus1, before, after)?,
        };
        self.down.forward(index, &inner)
    }

    /// Gate, up and down projections, and what joins the first two, if all inputs of an expert are here.
    pub(crate) fn projections(&self) -> Option<([&ExpertStack; 3], Gating)> {
        (self.padding == (0, 0)).then_some(([&self.gate, &self.up, &self.down], self.gating))
    }

    /// The weights, for reports.
    pub(crate) fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        [&self.gate, &self.up, &self.down].into_iter().flat_map(ExpertStack::weights)
    }
}
