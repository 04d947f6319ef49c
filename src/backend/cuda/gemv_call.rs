//! The launches of a GEMV: what [`super::gemv`] plans, with addresses.

use super::bindings::{CqFinish, CqGemv, CQ_ACTIVATION_NONE, CQ_MAX_WEIGHTS};
use super::card::Card;
use super::formats::FormatKernels;
use super::gemv::{Gemv, Outputs};
use super::kernel::Kernel;
use super::launch::Grid;
use super::memory::{float_dtype, u32_of};
use super::operand::{are_alike, OperandPointers};
use super::plan;
use crate::QuantFormat;
use candle_core::{bail, DType, Result};

/// The most weights of one launch.
pub(super) const MOST_WEIGHTS: usize = CQ_MAX_WEIGHTS as usize;

/// Outputs as they come.
pub(super) const PLAIN: CqFinish =
    CqFinish { activation: CQ_ACTIVATION_NONE, limit: 0., factor: 1., softcap: 0. };

/// The weight of an RMS norm, `[k]` in f32, and what is added to the mean square.
#[derive(Clone, Copy, Debug)]
pub(super) struct FusedNorm {
    pub(super) weight: u64,
    pub(super) eps: f32,
}

/// Up to three weights of one format times x, all at addresses that the caller holds.
pub(super) struct GemvCall<'a> {
    pub(super) format: QuantFormat,
    pub(super) m: usize,
    pub(super) k: usize,
    /// `[m, k]`.
    pub(super) x: u64,
    pub(super) x_dtype: DType,
    /// Of x.
    pub(super) norm: Option<FusedNorm>,
    pub(super) operands: &'a [OperandPointers],
    /// Where the result of each operand goes, `[m, rows]`; a single one if gated.
    pub(super) y: &'a [u64],
    /// Whether the result is one of two operands: the activation of the first, times the second.
    pub(super) gated: bool,
    pub(super) finish: CqFinish,
    /// `[m, rows]`, or null.
    pub(super) residual: u64,
}

/// One launch; if k is split, it needs room for partial sums.
pub(super) struct GemvLaunch {
    pub(super) kernel: Kernel,
    pub(super) plan: Gemv,
    pub(super) params: CqGemv,
}

impl GemvLaunch {
    pub(super) fn grid(&self, card: Card) -> Grid {
        Grid { blocks: self.plan.grid(card.multiprocessors), shared_bytes: self.plan.shared_bytes }
    }
}

impl GemvCall<'_> {
    /// Launches for up to 16 rows of x each, on a card whose blocks have so much shared memory. None if no kernel takes these
    /// weights, or joins them, or a norm with so many rows.
    pub(super) fn launches(&self, most_shared_bytes: usize) -> Result<Option<Vec<GemvLaunch>>> {
        if self.gated && !are_alike(self.operands) {
            return Ok(None);
        }
        let Some(format) = FormatKernels::of(self.format)?.gemv() else { return Ok(None) };
        let packed = self.operands.iter().map(|operand| operand.matrix.packed as usize);
        let alignment = plan::common_alignment(packed);
        let rows: Vec<usize> = self.operands.iter().map(|operand| operand.matrix.rows as usize).collect();
        let outputs = if self.gated { Outputs::Gated } else { Outputs::Each };
        let (mut launches, mut first_row) = (Vec::new(), 0);
        while first_row < self.m {
            let left = self.m - first_row;
            let plan = Gemv::plan(self.format, &rows, outputs, left, self.k, alignment, most_shared_bytes);
            let Some(plan) = plan.filter(|plan| self.norm.is_none() || plan.shape.takes_norm()) else {
                return Ok(None);
            };
            let kernel = Kernel::Gemv { format, rows: plan.shape.rows };
            launches.push(GemvLaunch { kernel, plan, params: self.params(first_row, plan)? });
            first_row += plan.m;
        }
        Ok(Some(launches))
    }

    fn params(&self, first_row: usize, plan: Gemv) -> Result<CqGemv> {
        let (Some(first), Some(last)) = (self.operands.first(), self.y.last()) else { bail!("no operands") };
        // Bytes of a column of so many rows.
        let above = (first_row * self.x_dtype.size_in_bytes()) as u64;
        // Kernels do not look at operands beyond their number.
        let mut operand = [first.into_rows(*last); MOST_WEIGHTS];
        for (index, (place, source)) in operand.iter_mut().zip(self.operands).enumerate() {
            let y = self.y.get(index).unwrap_or(last);
            *place = source.into_rows(y + above * u64::from(source.matrix.rows));
        }
        let columns = first.matrix.rows;
        let residual = match self.residual {
            0 => 0,
            residual => residual + above * u64::from(columns),
        };
        Ok(CqGemv {
            operand,
            x: (self.x + above * self.k as u64) as *const _,
            norm: self.norm.map_or(std::ptr::null(), |norm| norm.weight as *const _),
            residual: residual as *const _,
            partial: std::ptr::null_mut(),
            arrivals: std::ptr::null_mut(),
            operands: u32_of("weights of a launch", self.operands.len())?,
            m: u32_of("rows of x", plan.m)?,
            k: u32_of("K", self.k)?,
            k_per_split: u32_of("K", plan.k_per_split)?,
            x_stride: u32_of("K", self.k)?,
            residual_stride: columns,
            x_dtype: float_dtype(self.x_dtype)?,
            gated: self.gated.into(),
            eps: self.norm.map_or(0., |norm| norm.eps),
            finish: self.finish,
            blocks: u32_of("blocks", plan.blocks)?,
        })
    }
}
