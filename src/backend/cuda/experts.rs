//! Experts that tokens chose. Which they are is read by kernels, never by the host.
//!
//! Few pairs of a token and an expert are multiplied ungrouped, each by a GEMV. More are grouped by expert on the
//! device, and multiplied in tiles; there are as many blocks as there could be tiles.

use super::bindings::{CqSortPairs, CqTile, CQ_TILE_ROWS};
use super::card::Card;
use super::experts_call::{ExpertsCall, ExpertsLaunch};
use super::formats::FormatKernels;
use super::kernel::Kernel;
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, u32_of, Locked, View};
use super::operand::{has_narrow_scales, LockedOperand, OperandAddresses};
use super::{plan, workspace};
use crate::backend::{ChosenExperts, Operand};
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, DType, Device, Layout, Result, Shape, Storage, Tensor};
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
        let addresses =
            locked.iter().map(|operand| operand.addresses(self.stream)).collect::<Result<Vec<_>>>()?;
        let stacks = addresses.iter().map(OperandAddresses::stack).collect::<Result<Vec<_>>>()?;
        let [of_gate_up @ .., of_down] = stacks.as_slice() else { bail!("three projections") };

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
        if self.grouped {
            self.sort(ids.get(), sorted.get())?;
        }
        let mut joined = allocate(self.device, &Shape::from((self.pairs(), inner)), dtype)?;
        let joined = address_mut(&mut joined, self.stream)?;
        let gate_up = ExpertsCall {
            stacks: of_gate_up,
            format: gate.weight.format(),
            half: half(&[gate, up]),
            experts: self.experts,
            rows: inner,
            k: hidden,
            tokens: self.tokens,
            top_k: self.top_k,
            gating: Some(self.chosen.gating),
            ids: ids.get(),
            routing_weights: 0,
            x: x.get(),
            x_dtype: dtype,
            y: joined.get(),
            y_dtype: dtype,
            factor: 1.,
            residual: 0,
        };
        if !self.gemv(&gate_up)? {
            self.all_pairs(&gate_up, sorted.get())?;
        }
        let down = ExpertsCall {
            stacks: std::slice::from_ref(of_down),
            format: down.weight.format(),
            half: half(&[down]),
            rows: hidden,
            k: inner,
            gating: None,
            routing_weights: routing_weights.get(),
            x: joined.get(),
            y,
            ..gate_up
        };
        if !self.gemv(&down)? {
            let mut outputs = allocate(self.device, &Shape::from((self.pairs(), hidden)), DType::F32)?;
            let outputs = address_mut(&mut outputs, self.stream)?;
            self.all_pairs(&ExpertsCall { y: outputs.get(), y_dtype: DType::F32, ..down }, sorted.get())?;
            let (kernel, grid, params) = down.weighted_sum(outputs.get())?;
            // SAFETY: outputs have a row for each pair, y one for each token, routing weights a number for each pair.
            unsafe { launch(self.stream, kernel, grid, &params)? };
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

    /// Behind the order of pairs, which begins at `sorted`.
    fn count_address(&self, sorted: u64) -> u64 {
        sorted + (self.pairs() * size_of::<u32>()) as u64
    }

    fn tiles_address(&self, sorted: u64) -> u64 {
        self.count_address(sorted) + size_of::<u32>() as u64
    }

    fn sort(&self, ids: u64, sorted: u64) -> Result<()> {
        let params = CqSortPairs {
            ids: ids as *const _,
            order: sorted as *mut _,
            tiles: self.tiles_address(sorted) as *mut _,
            tile_count: self.count_address(sorted) as *mut _,
            pairs: u32_of("pairs of tokens and experts", self.pairs())?,
            experts: u32_of("experts", self.experts)?,
            rows_of_tile: u32_of("rows of a tile", plan::TILE_COLUMNS)?,
            unused: 0,
        };
        let grid = Grid { blocks: (1, 1), shared_bytes: plan::sort_shared_bytes(self.experts) };
        // SAFETY: ids are held by the caller, and the tensor of sorted pairs has room for whatever they are.
        unsafe { launch(self.stream, Kernel::SortPairs, grid, &params) }
    }

    /// The GEMV of every pair. False if pairs are grouped, or no kernel takes these weights.
    fn gemv(&self, of: &ExpertsCall) -> Result<bool> {
        let gemv = if self.grouped { None } else { of.gemv(self.card.most_shared_bytes)? };
        let Some(ExpertsLaunch { kernel, grid, mut params, parts }) = gemv else { return Ok(false) };
        if let Some((sums, arrivals)) = parts {
            (params.partial, params.arrivals) =
                workspace::with(self.stream, |workspace| workspace.split_sums(sums, arrivals))?;
        }
        // SAFETY: all addresses are those of tensors that are held until after the launch, and of the workspace
        // of this thread and stream. Shapes were checked by the caller; x and its rows begin at multiples of 16
        // bytes, since K is a multiple of 16.
        unsafe { launch(self.stream, kernel, grid, &params)? };
        Ok(true)
    }

    /// The outputs of all pairs, `[pairs, rows]`: of tiles on tensor cores, else in fp32.
    fn all_pairs(&self, of: &ExpertsCall, sorted: u64) -> Result<()> {
        let (mut kernel, mut grid, mut params) = of.simt()?;
        if self.grouped {
            let bf16 = of.x_dtype == DType::BF16;
            params.order = sorted as *const _;
            params.tiles = self.tiles_address(sorted) as *const _;
            params.tile_count = self.count_address(sorted) as *const _;
            grid.blocks.1 = plan::most_tiles(self.pairs(), self.experts);
            // There is no bf16 on tensor cores before compute capability 8.0.
            if of.half && (!bf16 || self.card.bf16) {
                kernel = FormatKernels::of(of.format)?.tiles(bf16);
                grid.blocks.0 = of.blocks_of_rows(CQ_TILE_ROWS as usize);
                grid.shared_bytes = plan::tile_shared_bytes(of.format);
            }
        }
        // SAFETY: as above.
        unsafe { launch(self.stream, kernel, grid, &params) }
    }
}
