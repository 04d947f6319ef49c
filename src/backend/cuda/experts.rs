//! Experts that tokens chose. Which they are is read by kernels, never by the host.
//!
//! Few pairs of a token and an expert are multiplied ungrouped, each by a GEMV. More are grouped by expert on the
//! device, and multiplied in tiles; there are as many blocks as there could be tiles.

use super::bindings::{
    CqExperts, CqOperand, CqSortPairs, CqTile, CqWeightedSum, CQ_CLAMPED, CQ_NOT_GATED, CQ_SILU,
    CQ_SIMT_SHARED_BYTES, CQ_TILE_ROWS,
};
use super::card::Card;
use super::formats::FormatKernels;
use super::gemv::{ExpertGemv, Outputs};
use super::kernel::Kernel;
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, float_dtype, u32_of, Locked, View};
use super::operand::{has_narrow_scales, LockedOperand, OperandAddresses};
use super::{plan, workspace};
use crate::backend::{ChosenExperts, Gating, Operand};
use crate::QuantFormat;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, DType, Device, Layout, Result, Shape, Storage, Tensor};
use candle_nn::Activation;
use std::sync::Arc;

/// For each token of `x` `[tokens, hidden]` the weighted sum of its experts' outputs. None if there are too many
/// experts to group by.
pub(crate) fn experts(chosen: &ChosenExperts, x: &Tensor) -> Result<Option<Tensor>> {
    let (tokens, top_k) = chosen.ids.dims2()?;
    let experts = chosen.down.weight.dims().first().copied().unwrap_or(0);
    let grouped = !chosen.ungrouped && tokens * top_k > plan::most_ungrouped_pairs(experts);
    if grouped && experts > plan::MOST_GROUPED_EXPERTS {
        return Ok(None);
    }
    if x.elem_count() == 0 || top_k == 0 {
        return x.zeros_like().map(Some);
    }
    let of_launch = plan::tokens_of_launch(grouped, top_k);
    let Device::Cuda(device) = x.device() else { bail!("experts on a CUDA device are needed here") };
    let (ids, routing_weights) = (chosen.ids.contiguous()?, chosen.routing_weights.contiguous()?);
    let stream = device.cuda_stream();
    let mut sums = allocate(device, x.shape(), x.dtype())?;
    {
        let y = address_mut(&mut sums, &stream)?;
        for first in (0..tokens).step_by(of_launch) {
            let count = of_launch.min(tokens - first);
            let part = |tensor: &Tensor| tensor.narrow(0, first, count);
            let row_bytes = x.elem_count() / tokens * x.dtype().size_in_bytes();
            let card = Card::of(stream.context())?;
            let call = Call { device, stream: &stream, card, chosen, experts, tokens: count, top_k, grouped };
            call.sum(
                &part(x)?,
                &part(&ids)?,
                &part(&routing_weights)?,
                y.get() + (first * row_bytes) as u64,
            )?;
        }
    }
    Ok(Some(Tensor::from_storage(Storage::Cuda(sums), x.shape(), BackpropOp::none(), false)))
}

/// The experts of some tokens.
struct Call<'a> {
    device: &'a CudaDevice,
    stream: &'a Arc<CudaStream>,
    card: Card,
    chosen: &'a ChosenExperts<'a>,
    experts: usize,
    tokens: usize,
    top_k: usize,
    /// Whether pairs are grouped by expert.
    grouped: bool,
}

/// Where kernels find the pairs.
struct Pairs {
    ids: u64,
    routing_weights: u64,
    /// `[pairs]`, the number of tiles, and the tiles; 0 if ungrouped.
    sorted: u64,
}

/// What is multiplied, and where that goes.
struct Projection<'a> {
    operands: &'a [OperandAddresses<'a>],
    format: QuantFormat,
    kernels: FormatKernels,
    /// Whether tensor cores take weights and x.
    half: bool,
    /// Rows of an expert, `[N]`.
    rows: usize,
    k: usize,
    x: u64,
    x_dtype: DType,
    pairs_of_x: usize,
    y: u64,
}

impl Call<'_> {
    fn pairs(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Writes `[tokens, hidden]`, of the dtype of x, to `y`.
    fn sum(&self, x: &Tensor, ids: &Tensor, routing_weights: &Tensor, y: u64) -> Result<()> {
        let ChosenExperts { gate, up, down, .. } = self.chosen;
        let [_, inner, hidden] = gate.weight.dims()[..] else { bail!("experts are stacks [E, N, K]") };
        let dtype = x.dtype();
        let half = |operands: &[&Operand]| {
            dtype != DType::F32 && operands.iter().all(|operand| has_narrow_scales(operand.weight))
        };
        let locked = [gate, up, down].map(|operand| LockedOperand::new(*operand));
        let operands =
            locked.iter().map(|operand| operand.addresses(self.stream)).collect::<Result<Vec<_>>>()?;
        let [gate_up @ .., _] = operands.as_slice() else { bail!("three projections") };
        let Some(down_operand) = operands.last().map(std::slice::from_ref) else {
            bail!("three projections")
        };

        let (x, ids, routing_weights) = (Locked::new(x), Locked::new(ids), Locked::new(routing_weights));
        let realigned = x.view()?.realigned(self.stream)?;
        let layout = Layout::contiguous((self.tokens, hidden));
        let x = match &realigned {
            Some(storage) => View { storage, layout: &layout },
            None => x.view()?,
        };
        let (x, ids, routing_weights) = (
            x.address(self.stream)?,
            ids.view()?.address(self.stream)?,
            routing_weights.view()?.address(self.stream)?,
        );

        let mut sorted = allocate(self.device, &Shape::from(self.words_of_sorted()), DType::U32)?;
        let sorted = address_mut(&mut sorted, self.stream)?;
        let pairs = Pairs {
            ids: ids.get(),
            routing_weights: routing_weights.get(),
            sorted: if self.grouped { sorted.get() } else { 0 },
        };
        if self.grouped {
            self.sort(&pairs)?;
        }
        let mut joined = allocate(self.device, &Shape::from((self.pairs(), inner)), dtype)?;
        let joined = address_mut(&mut joined, self.stream)?;
        let gate_up = Projection {
            operands: gate_up,
            format: gate.weight.format(),
            kernels: FormatKernels::of(gate.weight.format())?,
            half: half(&[gate, up]),
            rows: inner,
            k: hidden,
            x: x.get(),
            x_dtype: dtype,
            pairs_of_x: self.top_k,
            y: joined.get(),
        };
        if !self.gemv(&gate_up, &pairs, Some(self.chosen.gating), dtype)? {
            self.all_pairs(&gate_up, &pairs, Some(self.chosen.gating), dtype)?;
        }
        let down = Projection {
            operands: down_operand,
            format: down.weight.format(),
            kernels: FormatKernels::of(down.weight.format())?,
            half: half(&[down]),
            rows: hidden,
            k: inner,
            x: joined.get(),
            x_dtype: dtype,
            pairs_of_x: 1,
            y,
        };
        if !self.gemv(&down, &pairs, None, dtype)? {
            let mut outputs = allocate(self.device, &Shape::from((self.pairs(), hidden)), DType::F32)?;
            let outputs = address_mut(&mut outputs, self.stream)?;
            let to = Projection { y: outputs.get(), ..down };
            self.all_pairs(&to, &pairs, None, DType::F32)?;
            self.weighted_sum(outputs.get(), pairs.routing_weights, y, hidden, dtype)?;
        }
        Ok(())
    }

    /// Words of the order of pairs, the number of tiles, and the tiles.
    fn words_of_sorted(&self) -> usize {
        const WORDS_OF_TILE: usize = size_of::<CqTile>() / size_of::<u32>();
        match self.grouped {
            false => 0,
            true => self.pairs() + 1 + plan::most_tiles(self.pairs(), self.experts) * WORDS_OF_TILE,
        }
    }

    fn count_address(&self, pairs: &Pairs) -> u64 {
        pairs.sorted + (self.pairs() * size_of::<u32>()) as u64
    }

    fn tiles_address(&self, pairs: &Pairs) -> u64 {
        self.count_address(pairs) + size_of::<u32>() as u64
    }

    fn sort(&self, pairs: &Pairs) -> Result<()> {
        let params = CqSortPairs {
            ids: pairs.ids as *const _,
            order: pairs.sorted as *mut _,
            tiles: self.tiles_address(pairs) as *mut _,
            tile_count: self.count_address(pairs) as *mut _,
            pairs: u32_of("pairs of tokens and experts", self.pairs())?,
            experts: u32_of("experts", self.experts)?,
            rows_of_tile: u32_of("rows of a tile", plan::TILE_COLUMNS)?,
            unused: 0,
        };
        let grid = Grid { blocks: (1, 1), shared_bytes: plan::sort_shared_bytes(self.experts) };
        // SAFETY: ids are held by the caller, and the tensor of sorted pairs has room for whatever they are.
        unsafe { launch(self.stream, Kernel::SortPairs, grid, &params) }
    }

    /// The GEMV of every pair in one launch; for down projections, also their sums. False if pairs are grouped, or no
    /// kernel takes these weights.
    fn gemv(&self, of: &Projection, pairs: &Pairs, gating: Option<Gating>, y_dtype: DType) -> Result<bool> {
        let Some(kernels) = of.kernels.gemv().filter(|_| of.half && !self.grouped) else { return Ok(false) };
        let alignment = plan::common_alignment(of.operands.iter().map(OperandAddresses::packed));
        let outputs = if gating.is_some() { Outputs::Gated } else { Outputs::Each };
        let most_shared = self.card.most_shared_bytes;
        let plan = ExpertGemv::plan(of.format, of.rows, outputs, self.top_k, of.k, alignment, most_shared);
        // It counts the rows of all experts in 32 bits.
        let fits = self.experts.saturating_mul(of.rows) <= u32::MAX as usize;
        let Some(plan) = plan.filter(|_| fits) else {
            return Ok(false);
        };
        let several_parts = plan.splits > 1 || (gating.is_none() && self.top_k > 1);
        let (partial, arrivals) = match several_parts {
            false => (std::ptr::null_mut(), std::ptr::null_mut()),
            true => workspace::with(self.stream, |workspace| {
                workspace.split_sums(plan.partial_sums(self.pairs()), plan.blocks * self.pairs())
            })?,
        };
        let params = CqExperts {
            routing_weights: match gating {
                Some(_) => std::ptr::null(),
                None => pairs.routing_weights as *const _,
            },
            partial,
            arrivals,
            splits: u32_of("splits of K", plan.splits)?,
            k_per_split: u32_of("K", plan.k_per_split)?,
            ..self.params(of, pairs, gating, y_dtype)?
        };
        let grid =
            Grid { blocks: (plan.blocks, self.pairs() * plan.splits), shared_bytes: plan.shared_bytes };
        // SAFETY: all addresses are those of tensors that are held until after the launch, and of the workspace
        // of this thread and stream. Shapes were checked by the caller; x and its rows begin at multiples of 16
        // bytes, since K is a multiple of 16.
        unsafe { launch(self.stream, Kernel::GemvExperts(kernels), grid, &params)? };
        Ok(true)
    }

    /// The outputs of all pairs, `[pairs, rows]`: of tiles on tensor cores, else in fp32.
    fn all_pairs(
        &self,
        of: &Projection,
        pairs: &Pairs,
        gating: Option<Gating>,
        y_dtype: DType,
    ) -> Result<()> {
        let params = self.params(of, pairs, gating, y_dtype)?;
        // Gate and up have twice the rows of one.
        let rows = if gating.is_some() { 2 * of.rows } else { of.rows };
        let bf16 = of.x_dtype == DType::BF16;
        // There is no bf16 on tensor cores before compute capability 8.0.
        let on_tensor_cores = of.half && self.grouped && (!bf16 || self.card.bf16);
        let tiles = match self.grouped {
            false => self.pairs(),
            true => plan::most_tiles(self.pairs(), self.experts),
        };
        let (kernel, rows_of_block, shared_bytes) = match on_tensor_cores {
            true => (of.kernels.tiles(bf16), CQ_TILE_ROWS as usize, plan::tile_shared_bytes(of.format)),
            // Any x and any alignment of weights.
            false => (of.kernels.simt_experts(), plan::SIMT_ROWS, CQ_SIMT_SHARED_BYTES as usize),
        };
        let blocks = rows.div_ceil(rows_of_block);
        // SAFETY: as above.
        unsafe { launch(self.stream, kernel, Grid { blocks: (blocks, tiles), shared_bytes }, &params) }
    }

    fn params(
        &self,
        of: &Projection,
        pairs: &Pairs,
        gating: Option<Gating>,
        y_dtype: DType,
    ) -> Result<CqExperts> {
        let operand = |index: usize| -> Result<(CqOperand, *const f32)> {
            let Some(operand) = of.operands.get(index).or(of.operands.last()) else { bail!("no operands") };
            let (pointers, global_scales) = operand.stack()?;
            Ok((pointers.into_rows(of.y), global_scales))
        };
        let [(first, first_scales), (second, second_scales)] = [operand(0)?, operand(1)?];
        let (gating, alpha, limit) = match gating {
            None => (CQ_NOT_GATED, 0., 0.),
            Some(Gating::Plain(Activation::Silu | Activation::Swish)) => (CQ_SILU, 0., 0.),
            Some(Gating::Plain(other)) => bail!("no kernel of experts has the activation {other:?}"),
            Some(Gating::Clamped { alpha, limit }) => (CQ_CLAMPED, alpha as f32, limit as f32),
        };
        Ok(CqExperts {
            operand: [first, second],
            global_scale: [first_scales, second_scales],
            ids: pairs.ids as *const _,
            routing_weights: std::ptr::null(),
            order: pairs.sorted as *const _,
            tiles: if self.grouped { self.tiles_address(pairs) as *const _ } else { std::ptr::null() },
            tile_count: if self.grouped { self.count_address(pairs) as *const _ } else { std::ptr::null() },
            x: of.x as *const _,
            partial: std::ptr::null_mut(),
            arrivals: std::ptr::null_mut(),
            pairs_of_x: u32_of("pairs of a token", of.pairs_of_x)?,
            experts: u32_of("experts", self.experts)?,
            top_k: u32_of("experts of a token", self.top_k)?,
            splits: 1,
            k: u32_of("K", of.k)?,
            k_per_split: u32_of("K", of.k)?,
            group_size: u32_of("group size", of.format.group_size())?,
            x_dtype: float_dtype(of.x_dtype)?,
            y_dtype: float_dtype(y_dtype)?,
            gating,
            alpha,
            limit,
        })
    }

    fn weighted_sum(&self, z: u64, routing_weights: u64, y: u64, rows: usize, dtype: DType) -> Result<()> {
        let params = CqWeightedSum {
            z: z as *const _,
            routing_weights: routing_weights as *const _,
            y: y as *mut _,
            top_k: u32_of("experts of a token", self.top_k)?,
            rows: u32_of("rows of a weight", rows)?,
            y_dtype: float_dtype(dtype)?,
            unused: 0,
        };
        let blocks = (rows.div_ceil(plan::THREADS as usize), self.tokens);
        // SAFETY: z has a row for each pair, y one for each token, routing_weights a number for each pair.
        unsafe { launch(self.stream, Kernel::WeightedSum, Grid { blocks, shared_bytes: 0 }, &params) }
    }
}
