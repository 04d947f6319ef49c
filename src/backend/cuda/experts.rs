//! Experts that tokens chose. Which they are is read by kernels, never by the host.
//!
//! Few pairs of a token and an expert are multiplied ungrouped, each by a GEMV. More are grouped by expert on the
//! device, and multiplied in tiles; there are as many blocks as there could be tiles.

use super::bindings::{CqFinish, CqSortPairs, CqTile, CQ_ACTIVATION_SILU};
use super::card::Card;
use super::experts_call::{ExpertsCall, ExpertsLaunch};
use super::formats::FormatKernels;
use super::gemv_call::PLAIN;
use super::kernel::Kernel;
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, u32_of, Locked, View};
use super::operand::{has_narrow_scales, LockedOperand, OperandAddresses, OperandPointers};
use super::tiles::{self, Tiles};
use super::tiles_call::{self, SortedPairs, TilesCall};
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
    let mut of_launch = plan::tokens_of_launch(grouped, top_k);
    if grouped {
        // What the tile kernels take is in memory once more: the rows of all pairs, and of their tokens.
        let [_, inner, hidden] = chosen.gate.weight.dims()[..] else { bail!("experts are stacks [E, N, K]") };
        let rows = |k| tiles_call::rows_of_launch(k, x.dtype());
        of_launch = of_launch.min(rows(inner) / top_k).min(rows(hidden)).max(1);
    }
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
            let columns = match grouped {
                true => Some(columns_of_tiles(chosen, x.dtype(), count * top_k, experts, card)?),
                false => None,
            };
            let call = Call {
                device,
                stream: &stream,
                card,
                chosen,
                x_dtype: x.dtype(),
                experts,
                tokens: count,
                top_k,
                columns,
            };
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

/// Rows of halves of a tile: as many for all projections, of formats that may differ.
fn columns_of_tiles(
    chosen: &ChosenExperts,
    x_dtype: DType,
    pairs: usize,
    experts: usize,
    card: Card,
) -> Result<usize> {
    let columns = Tiles::columns_for_experts((pairs * tiles_call::terms(x_dtype)).div_ceil(experts.max(1)));
    let of = |operand: &Operand| -> Result<usize> {
        let format = operand.weight.format();
        let kernels = FormatKernels::of(format)?.tiles();
        Ok(Tiles::of_columns(format, kernels, columns, card.shared()).columns)
    };
    Ok(of(&chosen.gate)?.min(of(&chosen.down)?))
}

/// The experts of some tokens.
struct Call<'a> {
    device: &'a CudaDevice,
    stream: &'a Arc<CudaStream>,
    card: Card,
    chosen: &'a ChosenExperts<'a>,
    x_dtype: DType,
    experts: usize,
    tokens: usize,
    top_k: usize,
    /// If pairs are grouped by expert, rows of halves of a tile.
    columns: Option<usize>,
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
        let narrow = |operands: &[&Operand]| operands.iter().all(|operand| has_narrow_scales(operand.weight));
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
        if let Some(columns) = self.columns {
            self.sort(ids.get(), sorted.get(), self.pairs_of_tile(columns))?;
        }
        let mut joined = allocate(self.device, &Shape::from((self.pairs(), inner)), dtype)?;
        let joined = address_mut(&mut joined, self.stream)?;
        let gate_up = ExpertsCall {
            stacks: of_gate_up,
            format: gate.weight.format(),
            narrow_scales: narrow(&[gate, up]),
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
            narrow_scales: narrow(&[down]),
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
        let tiles = |columns| plan::most_tiles(self.pairs(), self.experts, self.pairs_of_tile(columns));
        self.columns.map_or(0, |columns| self.pairs() + 1 + tiles(columns) * WORDS_OF_TILE)
    }

    fn pairs_of_tile(&self, columns: usize) -> usize {
        columns / tiles_call::terms(self.x_dtype)
    }

    /// Behind the order of pairs, which begins at `sorted`.
    fn count_address(&self, sorted: u64) -> u64 {
        sorted + (self.pairs() * size_of::<u32>()) as u64
    }

    fn tiles_address(&self, sorted: u64) -> u64 {
        self.count_address(sorted) + size_of::<u32>() as u64
    }

    fn sort(&self, ids: u64, sorted: u64, rows_of_tile: usize) -> Result<()> {
        let params = CqSortPairs {
            ids: ids as *const _,
            order: sorted as *mut _,
            tiles: self.tiles_address(sorted) as *mut _,
            tile_count: self.count_address(sorted) as *mut _,
            pairs: u32_of("pairs of tokens and experts", self.pairs())?,
            experts: u32_of("experts", self.experts)?,
            rows_of_tile: u32_of("rows of a tile", rows_of_tile)?,
            unused: 0,
        };
        let grid = Grid { blocks: (1, 1), shared_bytes: plan::sort_shared_bytes(self.experts) };
        // SAFETY: ids are held by the caller, and the tensor of sorted pairs has room for whatever they are.
        unsafe { launch(self.stream, Kernel::SortPairs, grid, &params) }
    }

    /// The GEMV of every pair. False if pairs are grouped, or no kernel takes these weights.
    fn gemv(&self, of: &ExpertsCall) -> Result<bool> {
        let gemv = if self.columns.is_some() { None } else { of.gemv(self.card.most_shared_bytes)? };
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
        let fits =
            of.tensor_cores_take_weights() && tiles::can_index(of.format, self.experts * of.rows, of.k);
        if let Some(columns) = self.columns.filter(|_| fits) {
            return self.tiles(of, sorted, columns);
        }
        let (kernel, mut grid, mut params) = of.simt()?;
        if let Some(columns) = self.columns {
            params.order = sorted as *const _;
            params.tiles = self.tiles_address(sorted) as *const _;
            params.tile_count = self.count_address(sorted) as *const _;
            grid.blocks.1 = plan::most_tiles(self.pairs(), self.experts, self.pairs_of_tile(columns));
        }
        // SAFETY: as above.
        unsafe { launch(self.stream, kernel, grid, &params) }
    }

    fn tiles(&self, of: &ExpertsCall, sorted: u64, columns: usize) -> Result<()> {
        let params = of.params()?;
        let gated = of.gating.is_some();
        let pairs_of_x = if gated { self.top_k } else { 1 };
        let operands: Vec<OperandPointers> = of.stacks.iter().map(|(pointers, _)| *pointers).collect();
        let x = ((of.x, of.x_dtype), (self.pairs() / pairs_of_x, of.k));
        // SAFETY: as above: x has a row for each token, or for each pair.
        let x = unsafe { tiles_call::prepare(self.stream, of.format, x.0, x.1, None)? };
        let silu = CqFinish { activation: CQ_ACTIVATION_SILU, ..PLAIN };
        let call = TilesCall {
            format: of.format,
            x,
            operands: &operands,
            y: of.y,
            y_dtype: of.y_dtype,
            m: self.pairs(),
            gating: (params.gating, params.alpha, params.limit),
            finish: if gated { silu } else { PLAIN },
            residual: 0,
            pairs: Some(SortedPairs {
                order: sorted,
                tiles: self.tiles_address(sorted),
                tile_count: self.count_address(sorted),
                pairs_of_x,
                experts: self.experts,
                global_scales: params.global_scale,
            }),
        };
        let kernels = FormatKernels::of(of.format)?.tiles();
        let plan = Tiles::of_columns(of.format, kernels, columns, self.card.shared());
        // SAFETY: as above. The tensor of sorted pairs has been filled by the launch that sorts.
        unsafe { call.launch(self.stream, plan) }
    }
}
