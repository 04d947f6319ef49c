//! Linear attention by the gated delta rule, in one launch for all tokens.

use super::bindings::{
    CqDeltaNet, CqLane, CQ_DELTA_CHANNELS, CQ_DELTA_GROUPS, CQ_DELTA_KERNEL, CQ_DELTA_ROWS,
    CQ_DELTA_SHARED_BYTES,
};
use super::kernel::Kernel;
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, float_dtype, u32_of, Contiguous};
use super::plan::THREADS;
use crate::DeltaNetConfig;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{
    bail, CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor,
};
use std::sync::Arc;

/// What a launch has, beside its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaCall {
    pub(super) config: DeltaNetConfig,
    pub(super) sequences: usize,
    /// Of each sequence.
    pub(super) tokens: usize,
    /// Of all that lanes have, and of outputs.
    pub(super) dtype: DType,
    pub(super) eps: f32,
    pub(super) tiled: bool,
    /// Where each sequence begins, on the device; else whether all begin anew.
    pub(super) positions: Positions,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Positions {
    /// `[sequences]` u32, written two launches ago or more, as is the state.
    OnDevice(u64),
    /// Whether no sequence has tokens so far.
    Known { begins: bool },
}

/// Where something of the heads is: address, elements from one token to the next, and from one head of keys to the next.
pub(super) type LaneAt = (u64, usize, usize);

/// Addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaMemory {
    /// Queries, keys, values, gates, decays, betas.
    pub(super) lanes: [LaneAt; 6],
    /// Convolution, rates, bias of gates, norm.
    pub(super) weights: [u64; 4],
    /// `[sequences, value_heads, ..]`: the matrix, and what the convolution sees.
    pub(super) state: u64,
    pub(super) y: u64,
}

/// Elements of the heads that have a kernel of their own: those of all models that were published.
const WHOLE_DIM: usize = 128;

/// Threads that share a column of a state, if the kernel takes heads of these sizes.
pub(super) fn groups(config: &DeltaNetConfig) -> Option<usize> {
    let DeltaNetConfig { key_dim, value_dim, kernel, .. } = *config;
    let groups = (THREADS as usize).checked_div(value_dim)?.min(CQ_DELTA_GROUPS as usize);
    let fits = key_dim <= groups * CQ_DELTA_ROWS as usize
        && config.channels_of_head() <= CQ_DELTA_CHANNELS as usize
        && kernel <= CQ_DELTA_KERNEL as usize;
    fits.then_some(groups)
}

impl DeltaCall {
    pub(super) fn kernel(&self) -> Kernel {
        let DeltaNetConfig { key_dim, value_dim, .. } = self.config;
        let is_whole = (key_dim, value_dim) == (WHOLE_DIM, WHOLE_DIM);
        // Whoever changed the state last may be the kernel ahead; but in a step each layer has a state of its own.
        let starts_early = matches!(self.positions, Positions::OnDevice(_));
        Kernel::DeltaNet { head_dim: is_whole.then_some(WHOLE_DIM), starts_early }
    }

    pub(super) fn grid(&self) -> Grid {
        let blocks = (self.config.value_heads, self.sequences);
        Grid { blocks, shared_bytes: CQ_DELTA_SHARED_BYTES as usize }
    }

    /// # Errors
    /// If there is no kernel for it, or sizes are too large.
    pub(super) fn params(&self, memory: &DeltaMemory) -> Result<CqDeltaNet> {
        let DeltaNetConfig { value_heads, key_dim, value_dim, kernel, .. } = self.config;
        let Some(groups) = groups(&self.config) else {
            bail!("linear attention without a kernel: {:?}", self.config)
        };
        let rows = self.sequences.saturating_mul(self.tokens);
        let lane = |(x, of_token, of_head): LaneAt| {
            // Which the kernel counts in 32 bits.
            u32_of("numbers of a projection", rows.saturating_mul(of_token))?;
            Ok::<_, candle_core::Error>(CqLane {
                x: x as *const _,
                of_token: u32_of("elements of a token", of_token)?,
                of_head: u32_of("elements of a head", of_head)?,
            })
        };
        let ([q, k, v, gate, decay, beta], [convolution, rates, gate_bias, norm]) =
            (memory.lanes, memory.weights);
        let (positions, position) = match self.positions {
            Positions::OnDevice(address) => (address, 0),
            Positions::Known { begins } => (0, u32::from(!begins)),
        };
        Ok(CqDeltaNet {
            q: lane(q)?,
            k: lane(k)?,
            v: lane(v)?,
            gate: lane(gate)?,
            decay: lane(decay)?,
            beta: lane(beta)?,
            convolution: convolution as *const _,
            rates: rates as *const _,
            gate_bias: gate_bias as *const _,
            norm: norm as *const _,
            state: memory.state as *mut _,
            y: memory.y as *mut _,
            positions: positions as *const _,
            position,
            tokens: u32_of("tokens", self.tokens)?,
            value_heads: u32_of("heads of values", value_heads)?,
            shared: u32_of("heads of values", self.config.shared())?,
            key_dim: u32_of("elements of a head", key_dim)?,
            value_dim: u32_of("elements of a head", value_dim)?,
            kernel: u32_of("tokens of a convolution", kernel)?,
            groups: u32_of("threads of a column", groups)?,
            tiled: self.tiled.into(),
            dtype: float_dtype(self.dtype)?,
            eps: self.eps,
            unused: 0,
        })
    }
}

/// `[B, T, value_heads * value_dim]`, what the tokens give, whose state `numbers` are behind them then. None, with nothing changed,
/// if there is no kernel for it. `begins`: no sequence has tokens so far, whatever the state is. Inputs are queries, keys, values, gates,
/// decays and betas; weights those of the convolution, rates, bias of gates, norm.
pub(crate) fn delta_net(
    inputs: [&Tensor; 6],
    (weights, eps): ([&Tensor; 4], f64),
    config: &DeltaNetConfig,
    (numbers, begins): (&Tensor, bool),
) -> Result<Option<Tensor>> {
    let Device::Cuda(device) = numbers.device() else { return Ok(None) };
    if groups(config).is_none() {
        return Ok(None);
    }
    let [_, _, v, ..] = inputs;
    let (batch, tokens) = (v.dim(0)?, v.dim(1)?);
    // No input is rounded to the dtype of another.
    let is_one = inputs.iter().all(|input| input.dtype() == v.dtype());
    let dtype = if is_one { v.dtype() } else { DType::F32 };
    let stream = device.cuda_stream();
    let lanes = inputs.into_iter().map(|x| x.to_dtype(dtype));
    let wide = weights.into_iter().map(|x| x.to_dtype(DType::F32));
    let operands = lanes.chain(wide).collect::<Result<Vec<_>>>()?;
    let operands = operands.iter().map(|x| Contiguous::new(x, &stream)).collect::<Result<Vec<_>>>()?;
    let views = operands.iter().map(Contiguous::view).collect::<Result<Vec<_>>>()?;
    let addresses = views.iter().map(|view| view.address(&stream)).collect::<Result<Vec<_>>>()?;
    let places: Vec<_> = addresses.iter().map(|address| address.get()).collect();
    let &[q, k, v, gate, decay, beta, convolution, rates, gate_bias, norm] = places.as_slice() else {
        bail!("linear attention of {} operands", places.len())
    };
    let shared = config.shared();
    let lane = |x, size| (x, config.key_heads * size, size);
    let values = shared * config.value_dim;
    let lanes = [
        lane(q, config.key_dim),
        lane(k, config.key_dim),
        lane(v, values),
        lane(gate, values),
        lane(decay, shared),
        lane(beta, shared),
    ];
    let y_shape = Shape::from((batch, tokens, config.value_heads * config.value_dim));
    let mut output = allocate(device, &y_shape, dtype)?;
    {
        let y = address_mut(&mut output, &stream)?;
        let call = DeltaCall {
            config: *config,
            sequences: batch,
            tokens,
            dtype,
            eps: eps as f32,
            tiled: false,
            positions: Positions::Known { begins },
        };
        let memory =
            DeltaMemory { lanes, weights: [convolution, rates, gate_bias, norm], state: 0, y: y.get() };
        let (kernel, grid) = (call.kernel(), call.grid());
        numbers.inplace_op1(&Change { stream: &stream, kernel, grid, params: call.params(&memory)? })?;
    }
    Ok(Some(Tensor::from_storage(Storage::Cuda(output), y_shape, BackpropOp::none(), false)))
}

/// The launch, as an operation on the state.
struct Change<'a> {
    stream: &'a Arc<CudaStream>,
    kernel: Kernel,
    grid: Grid,
    /// Without the address of the state. All others are held until after the launch, and of the shapes that the header asks for.
    params: CqDeltaNet,
}

impl InplaceOp1 for Change<'_> {
    fn name(&self) -> &'static str {
        "gated-delta-net"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("linear attention on a CUDA device is needed here")
    }

    fn cuda_fwd(&self, state: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let Some((0, _)) = layout.contiguous_offsets() else {
            bail!("a contiguous state is needed here, found layout {layout:?}")
        };
        let state = address_mut(state, self.stream)?;
        let params = CqDeltaNet { state: state.get() as *mut _, ..self.params };
        // SAFETY: all addresses are those of tensors that are held until after the launch; shapes were checked by the caller.
        unsafe { launch(self.stream, self.kernel, self.grid, &params) }
    }
}
