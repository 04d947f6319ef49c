//! The launches of the tile kernels: what [`super::tiles`] plans, with addresses.

use super::bindings::{
    CqFinish, CqTile, CqTiles, CqTilesX, CQ_NORM_SHARED_BYTES, CQ_NOT_GATED, CQ_ORDER_QUARTERS,
    CQ_ORDER_SPLIT, CQ_SILU,
};
use super::formats::FormatKernels;
use super::gemv_call::FusedNorm;
use super::kernel::Kernel;
use super::launch::{launch, Grid};
use super::memory::{float_dtype, u32_of};
use super::operand::OperandPointers;
use super::tiles::{self, Tiles};
use super::workspace;
use crate::QuantFormat;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, DType, Result};
use std::sync::Arc;

/// Bytes of x as halves in one launch, so that with its sums it has room in 32 MB; of very long rows as many as 128 take.
const MOST_BYTES_OF_X: usize = 28 << 20;

/// x as tile kernels of a format take it, in the workspace of the thread and stream: until the next one.
#[derive(Clone, Copy)]
pub(super) struct PreparedX {
    halves: u64,
    units: u64,
    sums: u64,
    /// Rows of halves for each of x.
    terms: usize,
    k: usize,
}

/// Halves that a number is the sum of: of an f32 one does not have enough digits.
pub(super) fn terms(x_dtype: DType) -> usize {
    if x_dtype == DType::F32 {
        2
    } else {
        1
    }
}

/// Rows of x of one launch.
pub(super) fn rows_of_launch(k: usize, x_dtype: DType) -> usize {
    let row = terms(x_dtype) * tiles::padded(k) * size_of::<u16>();
    (MOST_BYTES_OF_X / row / tiles::MOST_COLUMNS).max(1) * tiles::MOST_COLUMNS
}

/// Brings `rows` of x, `[rows, k]` at an address, into the form that the kernels of a format take.
///
/// # Safety
/// As for [`launch`].
pub(super) unsafe fn prepare(
    stream: &Arc<CudaStream>,
    format: QuantFormat,
    (x, x_dtype): (u64, DType),
    (rows, k): (usize, usize),
    norm: Option<FusedNorm>,
) -> Result<PreparedX> {
    let kernels = FormatKernels::of(format)?.tiles();
    let (terms, k_padded) = (terms(x_dtype), tiles::padded(k));
    let count = rows * terms;
    let (of_halves, of_sums) =
        (count * k_padded * size_of::<u16>(), count * (k_padded / kernels.group) * size_of::<f32>());
    let bytes = of_halves + of_sums + count * size_of::<f32>();
    let halves = workspace::with(stream, |workspace| workspace.x_of_tiles(bytes))?;
    let sums = halves + of_halves as u64;
    let units = sums + of_sums as u64;
    let split = if tiles::is_split(format) { CQ_ORDER_SPLIT } else { 0 };
    let params = CqTilesX {
        x: x as *const _,
        norm: norm.map_or(std::ptr::null(), |norm| norm.weight as *const _),
        halves: halves as *mut _,
        units: units as *mut _,
        sums: sums as *mut _,
        k: u32_of("K", k)?,
        k_padded: u32_of("K", k_padded)?,
        x_stride: u32_of("K", k)?,
        x_dtype: float_dtype(x_dtype)?,
        group: u32_of("group", kernels.group)?,
        order: split | if kernels.group == 16 { CQ_ORDER_QUARTERS } else { 0 },
        terms: u32_of("halves of a number", terms)?,
        eps: norm.map_or(0., |norm| norm.eps),
    };
    let grid = Grid { blocks: (rows, 1), shared_bytes: CQ_NORM_SHARED_BYTES as usize };
    // SAFETY: the workspace has room for what is written; the caller answers for the rest.
    unsafe { launch(stream, Kernel::TilesX, grid, &params)? };
    Ok(PreparedX { halves, units, sums, terms, k })
}

/// Pairs of tokens and experts, brought together by expert.
#[derive(Clone, Copy)]
pub(super) struct SortedPairs {
    pub(super) order: u64,
    pub(super) tiles: u64,
    pub(super) tile_count: u64,
    /// That share a row of x.
    pub(super) pairs_of_x: usize,
    pub(super) experts: usize,
    pub(super) global_scales: [*const f32; 2],
}

/// One weight, or two that are joined, times x.
pub(super) struct TilesCall<'a> {
    pub(super) format: QuantFormat,
    pub(super) x: PreparedX,
    pub(super) operands: &'a [OperandPointers],
    /// `[m, rows]`.
    pub(super) y: u64,
    pub(super) y_dtype: DType,
    pub(super) m: usize,
    /// [`super::bindings::CqGating`] of two operands, and the numbers that one of them has.
    pub(super) gating: (u32, f32, f32),
    pub(super) finish: CqFinish,
    /// `[m, rows]`, or null.
    pub(super) residual: u64,
    pub(super) pairs: Option<SortedPairs>,
}

impl TilesCall<'_> {
    /// Puts the kernel into the stream, right behind [`prepare`].
    ///
    /// # Safety
    /// As for [`launch`].
    pub(super) unsafe fn launch(&self, stream: &Arc<CudaStream>, plan: Tiles) -> Result<()> {
        let kernels = FormatKernels::of(self.format)?.tiles();
        let (partial, arrivals) = workspace::with(stream, |workspace| {
            let (sums, arrivals) = plan.parts();
            workspace.split_sums(sums, arrivals)
        })?;
        let params = self.params(plan, partial, arrivals)?;
        let grid = Grid { blocks: (plan.blocks, 1), shared_bytes: plan.shared_bytes };
        let kernel = Kernel::Tiles { format: kernels, columns: plan.most_columns };
        // SAFETY: the workspace has room for the parts; the caller answers for the rest.
        unsafe { launch(stream, kernel, grid, &params) }
    }

    fn params(&self, plan: Tiles, partial: *mut f32, arrivals: *mut u32) -> Result<CqTiles> {
        let Some(first) = self.operands.first() else { bail!("no operands") };
        // A single weight stands for both.
        let second = self.operands.get(1).unwrap_or(first);
        let row_bytes = self.x.k * self.format.bits() / 8;
        let packed = [first, second].map(|operand| operand.matrix.packed as usize);
        let whole = packed.into_iter().chain([row_bytes]).all(|bytes| bytes.is_multiple_of(16));
        let (gating, alpha, limit) = self.gating;
        Ok(CqTiles {
            operand: [first, second].map(|operand| operand.into_rows(self.y)),
            halves: self.x.halves as *const _,
            units: self.x.units as *const _,
            sums: self.x.sums as *const _,
            global_scale: self.pairs.map_or([std::ptr::null(); 2], |pairs| pairs.global_scales),
            order: self.pairs.map_or(std::ptr::null(), |pairs| pairs.order as *const _),
            tiles: self.pairs.map_or(std::ptr::null(), |pairs| pairs.tiles as *const CqTile),
            tile_count: self.pairs.map_or(std::ptr::null(), |pairs| pairs.tile_count as *const _),
            residual: self.residual as *const _,
            partial,
            arrivals,
            m: u32_of("rows of x", self.m)?,
            terms: u32_of("halves of a number", self.x.terms)?,
            k: u32_of("K", self.x.k)?,
            k_padded: u32_of("K", tiles::padded(self.x.k))?,
            words_of_row: u32_of("words of a row", row_bytes / size_of::<u32>())?,
            log_group_size: self.format.group_size().ilog2(),
            columns: u32_of("columns", plan.columns)?,
            stages: u32_of("stages", plan.stages)?,
            whole_copies: whole.into(),
            pairs_of_x: u32_of("pairs of a row of x", self.pairs.map_or(1, |pairs| pairs.pairs_of_x))?,
            experts: u32_of("experts", self.pairs.map_or(1, |pairs| pairs.experts))?,
            unused: 0,
            gating,
            y_dtype: float_dtype(self.y_dtype)?,
            alpha,
            limit,
            finish: self.finish,
        })
    }
}

/// The activation of one of two operands times the other, or a single one.
pub(super) fn plain_gating(gated: bool) -> (u32, f32, f32) {
    (if gated { CQ_SILU } else { CQ_NOT_GATED }, 0., 0.)
}
