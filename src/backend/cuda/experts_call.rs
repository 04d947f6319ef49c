//! The launches of experts, each pair of a token and an expert by itself: shapes and addresses in, parameters out.

use super::bindings::{
    CqExperts, CqOperand, CqWeightedSum, CQ_CLAMPED, CQ_NOT_GATED, CQ_SILU, CQ_SIMT_SHARED_BYTES,
};
use super::formats::FormatKernels;
use super::gemv::{ExpertGemv, Outputs};
use super::kernel::Kernel;
use super::launch::Grid;
use super::memory::{float_dtype, u32_of};
use super::operand::{are_alike, OperandPointers};
use super::plan;
use crate::backend::Gating;
use crate::QuantFormat;
use candle_core::{bail, DType, Result};
use candle_nn::Activation;

/// The first matrix of a stack, and the multipliers of all, if they differ.
pub(super) type StackPointers = (OperandPointers, *const f32);

/// Gate and up projections, or the down projection, of the experts that tokens chose.
#[derive(Clone, Copy)]
pub(super) struct ExpertsCall<'a> {
    /// One stack, or gate and up.
    pub(super) stacks: &'a [StackPointers],
    pub(super) format: QuantFormat,
    /// Whether scales and biases have 16 bits or less.
    pub(super) narrow_scales: bool,
    pub(super) experts: usize,
    /// Rows of an expert.
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) tokens: usize,
    /// Experts of a token.
    pub(super) top_k: usize,
    /// What joins gate and up.
    pub(super) gating: Option<Gating>,
    /// `[tokens, top_k]`.
    pub(super) ids: u64,
    /// The same shape: factors of what gate and up see, or of what down projections add up to. Null: of pairs of their own, 1.
    pub(super) routing_weights: u64,
    /// A row for each token, for gate and up; else for each pair.
    pub(super) x: u64,
    pub(super) x_dtype: DType,
    pub(super) y: u64,
    pub(super) y_dtype: DType,
    /// By what sums are multiplied, and what is added to them, `[tokens, rows]` of the dtype of y; null: nothing.
    pub(super) factor: f32,
    pub(super) residual: u64,
}

/// A launch of the GEMV, which may need room for partial sums.
pub(super) struct ExpertsLaunch {
    pub(super) kernel: Kernel,
    pub(super) grid: Grid,
    pub(super) params: CqExperts,
    /// Partial sums and arrivals.
    pub(super) parts: Option<(usize, usize)>,
}

impl ExpertsCall<'_> {
    pub(super) fn pairs(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Whether the kernels on tensor cores take the weights, and join them.
    pub(super) fn tensor_cores_take_weights(&self) -> bool {
        self.narrow_scales && are_alike(self.stacks.iter().map(|(pointers, _)| pointers))
    }

    /// The GEMV of every pair in one launch; for down projections, also their sums. None if no kernel takes these weights.
    pub(super) fn gemv(&self, most_shared_bytes: usize) -> Result<Option<ExpertsLaunch>> {
        let takes_all = self.x_dtype != DType::F32 && self.tensor_cores_take_weights();
        let Some(kernels) = FormatKernels::of(self.format)?.gemv().filter(|_| takes_all) else {
            return Ok(None);
        };
        let packed = self.stacks.iter().map(|(pointers, _)| pointers.matrix.packed as usize);
        let alignment = plan::common_alignment(packed);
        let outputs = if self.gating.is_some() { Outputs::Gated } else { Outputs::Each };
        let plan = ExpertGemv::plan(
            self.format,
            self.rows,
            outputs,
            self.top_k,
            self.k,
            alignment,
            most_shared_bytes,
        );
        // It counts the rows of all experts in 32 bits.
        let fits = self.experts.saturating_mul(self.rows) <= u32::MAX as usize;
        let Some(plan) = plan.filter(|_| fits) else { return Ok(None) };
        let several_parts = plan.splits > 1 || (self.gating.is_none() && self.top_k > 1);
        let params = CqExperts {
            routing_weights: self.routing_weights as *const _,
            splits: u32_of("splits of K", plan.splits)?,
            k_per_split: u32_of("K", plan.k_per_split)?,
            ..self.params()?
        };
        Ok(Some(ExpertsLaunch {
            kernel: Kernel::GemvExperts(kernels),
            grid: Grid { blocks: (plan.blocks, self.pairs() * plan.splits), shared_bytes: plan.shared_bytes },
            params,
            parts: several_parts.then(|| (plan.partial_sums(self.pairs()), plan.blocks * self.pairs())),
        }))
    }

    /// The outputs of all pairs, `[pairs, rows]`, in fp32: takes any x and any alignment of weights.
    pub(super) fn simt(&self) -> Result<(Kernel, Grid, CqExperts)> {
        let kernel = FormatKernels::of(self.format)?.simt_experts();
        let blocks = (self.blocks_of_rows(plan::SIMT_ROWS), self.pairs());
        let gated = if self.gating.is_some() { self.routing_weights } else { 0 };
        let params = CqExperts { routing_weights: gated as *const _, ..self.params()? };
        Ok((kernel, Grid { blocks, shared_bytes: CQ_SIMT_SHARED_BYTES as usize }, params))
    }

    /// Blocks that cover the rows of an expert; gate and up have twice those of one.
    pub(super) fn blocks_of_rows(&self, rows_of_block: usize) -> usize {
        let rows = if self.gating.is_some() { 2 * self.rows } else { self.rows };
        rows.div_ceil(rows_of_block)
    }

    /// The sums of outputs of pairs, in f32 at `z`.
    pub(super) fn weighted_sum(&self, z: u64) -> Result<(Kernel, Grid, CqWeightedSum)> {
        let params = CqWeightedSum {
            z: z as *const _,
            routing_weights: self.routing_weights as *const _,
            residual: self.residual as *const _,
            y: self.y as *mut _,
            top_k: u32_of("experts of a token", self.top_k)?,
            rows: u32_of("rows of a weight", self.rows)?,
            y_dtype: float_dtype(self.y_dtype)?,
            factor: self.factor,
        };
        let blocks = (self.rows.div_ceil(plan::THREADS as usize), self.tokens);
        Ok((Kernel::WeightedSum, Grid { blocks, shared_bytes: 0 }, params))
    }

    /// Parameters of a launch that has no routing weights, no order of pairs, and no parts.
    pub(super) fn params(&self) -> Result<CqExperts> {
        let operand = |index: usize| -> Result<(CqOperand, *const f32)> {
            let Some((pointers, global_scales)) = self.stacks.get(index).or(self.stacks.last()) else {
                bail!("no stacks of experts")
            };
            Ok((pointers.into_rows(self.y), *global_scales))
        };
        let [(first, first_scales), (second, second_scales)] = [operand(0)?, operand(1)?];
        let (gating, alpha, limit) = match self.gating {
            None => (CQ_NOT_GATED, 0., 0.),
            Some(Gating::Plain(Activation::Silu | Activation::Swish)) => (CQ_SILU, 0., 0.),
            Some(Gating::Plain(other)) => bail!("no kernel of experts has the activation {other:?}"),
            Some(Gating::Clamped { alpha, limit }) => (CQ_CLAMPED, alpha as f32, limit as f32),
        };
        let pairs_of_x = if self.gating.is_some() { self.top_k } else { 1 };
        Ok(CqExperts {
            operand: [first, second],
            global_scale: [first_scales, second_scales],
            ids: self.ids as *const _,
            routing_weights: std::ptr::null(),
            residual: self.residual as *const _,
            order: std::ptr::null(),
            tiles: std::ptr::null(),
            tile_count: std::ptr::null(),
            x: self.x as *const _,
            partial: std::ptr::null_mut(),
            arrivals: std::ptr::null_mut(),
            pairs_of_x: u32_of("pairs of a token", pairs_of_x)?,
            experts: u32_of("experts", self.experts)?,
            top_k: u32_of("experts of a token", self.top_k)?,
            splits: 1,
            k: u32_of("K", self.k)?,
            k_per_split: u32_of("K", self.k)?,
            group_size: u32_of("group size", self.format.group_size())?,
            x_dtype: float_dtype(self.x_dtype)?,
            y_dtype: float_dtype(self.y_dtype)?,
            gating,
            alpha,
            limit,
            factor: self.factor,
            unused: 0,
        })
    }
}
