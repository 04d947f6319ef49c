//! The projections of a step: tensor cores where they take the weights, with the norm of x and all that becomes of outputs in
//! the same launch; else the fp32 kernel, and launches around it.

use super::super::bindings::{CqFinish, CQ_F32};
use super::super::formats::FormatKernels;
use super::super::gemv_call::{FusedNorm, GemvCall, GemvLaunch, MOST_WEIGHTS, PLAIN};
use super::super::matmul::simt_launch;
use super::super::operand::{has_narrow_scales, LockedOperand, OperandPointers};
use super::builder::{Builder, Places};
use super::memory::Addresses;
use super::LaunchParams;
use crate::backend::step::{same_order, Norm, Projection};
use crate::backend::Operand;
use crate::QuantTensor;
use candle_core::{bail, DType, Result};
use std::sync::Arc;

/// What a launch of projections is given.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) x: u64,
    pub(super) k: usize,
    pub(super) norm: Option<&'a Norm>,
}

/// Where it puts what, which is finished first; a single output is added to a residual.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) y: &'a [u64],
    /// Whether two projections make one output.
    pub(super) gated: bool,
    pub(super) finish: CqFinish,
    pub(super) residual: u64,
}

impl Builder<'_> {
    /// Projections of the same source: in one launch where there is one, which has the norm in it; of many in several.
    pub(super) fn project(
        &mut self,
        projections: &[&Projection],
        source: Source,
        target: Target,
        places: &Places,
    ) -> Result<()> {
        if projections.len() > MOST_WEIGHTS {
            let launches = projections.chunks(MOST_WEIGHTS).zip(target.y.chunks(MOST_WEIGHTS));
            for (projections, y) in launches {
                self.project(projections, source, Target { y, ..target }, places)?;
            }
            return Ok(());
        }
        let mut seen = Seen::default();
        let [first, rest @ ..] = projections else { return Ok(()) };
        if rest.iter().all(|other| same_order(other.columns.as_ref(), first.columns.as_ref())) {
            let source = self.in_order(first, source, &mut seen, places)?;
            if self.together(projections, source, target, &mut seen, places)? {
                return Ok(());
            }
        }
        if !target.gated {
            for (index, projection) in projections.iter().enumerate() {
                let target = Target { y: target.y.get(index..=index).unwrap_or_default(), ..target };
                self.single(projection, source, target, &mut seen, places)?;
            }
            return Ok(());
        }
        let rows = projections.first().map_or(0, |projection| projection.rows);
        let plain = Target { gated: false, finish: PLAIN, residual: 0, ..target };
        for (projection, y) in projections.iter().zip([places.gate, places.inner]) {
            self.single(projection, source, Target { y: &[y], ..plain }, &mut seen, places)?;
        }
        self.elementwise(places.gate, places.inner, rows, target)
    }

    /// One projection by any kernel.
    fn single(
        &mut self,
        projection: &Projection,
        source: Source,
        target: Target,
        seen: &mut Seen,
        places: &Places,
    ) -> Result<()> {
        let source = self.in_order(projection, source, seen, places)?;
        if self.together(&[projection], source, target, seen, places)? {
            return Ok(());
        }
        let Some(weight) = projection.weight.packed() else {
            bail!("dense weights have a kernel of their own")
        };
        let &[y] = target.y else { bail!("a projection has one output") };
        let x = self.normalized(source, seen, places)?;
        let is_finished = is_plain(&target.finish) && target.residual == 0;
        // A residual may be where the output goes.
        let place = if target.residual == 0 { y } else { places.output };
        let (format, shape) = (weight.format(), (self.sequences, source.k));
        let operand = self.operand(projection, weight)?;
        let (params, grid) = simt_launch(operand.into_rows(place), format, shape, (x, self.dtype))?;
        self.push(FormatKernels::of(format)?.simt(), grid, LaunchParams::Simt(params));
        if is_finished {
            return Ok(());
        }
        self.elementwise(place, 0, projection.rows, target)
    }

    /// Whether there is one kernel for all of them; if its x has to be normalized before, it is.
    fn together(
        &mut self,
        projections: &[&Projection],
        source: Source,
        target: Target,
        seen: &mut Seen,
        places: &Places,
    ) -> Result<bool> {
        let dense: Option<Vec<_>> =
            projections.iter().map(|projection| Some((*projection, projection.weight.dense()?))).collect();
        if let Some(dense) = dense {
            return self.dense(&dense, source, target, seen, places);
        }
        let packed: Option<Vec<_>> =
            projections.iter().map(|projection| Some((*projection, projection.weight.packed()?))).collect();
        match packed {
            Some(packed) => self.gemv(&packed, source, target, seen, places),
            None => Ok(false),
        }
    }

    /// The same, of packed weights.
    fn gemv(
        &mut self,
        projections: &[(&Projection, &QuantTensor)],
        source: Source,
        target: Target,
        seen: &mut Seen,
        places: &Places,
    ) -> Result<bool> {
        let Some((_, first)) = projections.first() else { return Ok(false) };
        let fits = |weight: &QuantTensor| weight.format() == first.format() && has_narrow_scales(weight);
        if self.dtype == DType::F32 || !projections.iter().all(|(_, weight)| fits(weight)) {
            return Ok(false);
        }
        let operands = projections.iter().map(|(projection, weight)| self.operand(projection, weight));
        let operands = operands.collect::<Result<Vec<_>>>()?;
        let (x_dtype, m) = (self.dtype, self.sequences);
        let call = |x, norm| GemvCall {
            format: first.format(),
            m,
            k: source.k,
            x,
            x_dtype,
            norm,
            operands: &operands,
            y: target.y,
            gated: target.gated,
            finish: target.finish,
            residual: target.residual,
        };
        let most_shared = self.card.most_shared_bytes;
        let mut launches = None;
        match source.norm {
            None => launches = call(source.x, None).launches(most_shared)?,
            Some(norm) if norm.is_rms() => {
                let fused = FusedNorm { weight: Addresses::NOWHERE, eps: norm.eps };
                launches = call(source.x, Some(fused)).launches(most_shared)?;
                if launches.is_some() {
                    let fused = FusedNorm { weight: self.weight_of(norm, source.k), ..fused };
                    launches = call(source.x, Some(fused)).launches(most_shared)?;
                }
            }
            Some(_) => {}
        }
        if launches.is_none() && source.norm.is_some() {
            launches = call(places.normed, None).launches(most_shared)?;
            if launches.is_some() {
                self.normalized(source, seen, places)?;
            }
        }
        let Some(launches) = launches else { return Ok(false) };
        for gemv in launches {
            let (grid, GemvLaunch { kernel, plan, mut params }) = (gemv.grid(self.card), gemv);
            if plan.splits > 1 {
                (params.partial, params.arrivals) = self.split(plan.partial_sums(), plan.blocks, places);
            }
            self.push(kernel, grid, LaunchParams::Gemv(params));
        }
        Ok(true)
    }

    /// Where the source is normalized, which happens once.
    pub(super) fn normalized(&mut self, source: Source, seen: &mut Seen, places: &Places) -> Result<u64> {
        let Some(norm) = source.norm else { return Ok(source.x) };
        if !seen.normed {
            let rows = (self.sequences, source.k);
            self.norm(norm, rows, (source.x, places.normed), (1., 0))?;
            seen.normed = true;
        }
        Ok(places.normed)
    }

    /// What a projection sees: the source, or the normalized source in the order of the projection's columns.
    fn in_order<'a>(
        &mut self,
        projection: &Projection,
        source: Source<'a>,
        seen: &mut Seen,
        places: &Places,
    ) -> Result<Source<'a>> {
        let Some(columns) = &projection.columns else { return Ok(source) };
        if !same_order(seen.order.as_ref(), Some(columns)) {
            let rows = (self.sequences, source.k);
            self.order(source.norm, columns, rows, (source.x, places.ordered))?;
            seen.order = Some(Arc::clone(columns));
        }
        Ok(Source { x: places.ordered, k: columns.len(), norm: None })
    }

    fn operand(&mut self, projection: &Projection, weight: &QuantTensor) -> Result<OperandPointers> {
        let operand = LockedOperand::new(Operand { weight, bias: None });
        let pointers = operand.addresses(self.stream)?.pointers(0)?;
        let bias = self.numbers(projection.bias.as_deref());
        Ok(OperandPointers { bias: bias as *const _, bias_dtype: CQ_F32, ..pointers })
    }
}

/// What there is of a source.
#[derive(Default)]
pub(super) struct Seen {
    /// Whether it is normalized.
    normed: bool,
    /// The order of columns that it was brought into last.
    order: Option<Arc<[u32]>>,
}

fn is_plain(finish: &CqFinish) -> bool {
    let CqFinish { activation, limit, factor, softcap } = *finish;
    (activation, limit, factor, softcap) == (PLAIN.activation, PLAIN.limit, PLAIN.factor, PLAIN.softcap)
}
