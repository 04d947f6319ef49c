//! The blocks of experts of a step: which experts a token uses, then two launches of these.

use super::super::bindings::{CqRoute, CQ_F32, CQ_MOST_ROUTED_EXPERTS, CQ_ROUTE_EXPERTS};
use super::super::experts_call::{ExpertsCall, ExpertsLaunch, StackPointers};
use super::super::kernel::Kernel;
use super::super::launch::Grid;
use super::super::memory::{float_dtype, u32_of, Locked};
use super::super::operand::{has_narrow_scales, LockedOperand, OperandPointers};
use super::super::plan;
use super::builder::{Builder, Places};
use super::output::OutputAt;
use super::LaunchParams;
use crate::backend::routing::GroupScore;
use crate::backend::step::{Activation, ExpertBlock, ExpertGating, Router, StackProjection};
use crate::backend::{Gating, Operand, Scores};
use crate::Error;
use candle_core::{bail, DType, Result};
use std::borrow::Cow;
use std::ffi::c_void;
use std::ptr;

/// Refuses blocks for which there are no kernels, for so many tokens.
pub(super) fn check(block: &ExpertBlock, tokens: usize) -> crate::Result<()> {
    let what = match block.gating {
        _ if block.routing.experts > CQ_MOST_ROUTED_EXPERTS as usize => "more than 1024 experts",
        _ if tokens > plan::tokens_of_launch(false, block.routing.top_k) => "so many experts for each token",
        _ if block.gate.weight.format() != block.up.weight.format() => {
            "gate and up projections of experts in different formats"
        }
        ExpertGating::Activation(Activation::Silu) | ExpertGating::Clamped { .. } => return Ok(()),
        ExpertGating::Activation(_) => "experts with another activation than SiLU",
    };
    Err(Error::Unsupported {
        what: format!("a step plan with {what} on a CUDA device"),
        remedy: "call the layers one by one".to_string(),
    })
}

/// What makes logits: rows of weights on the device, and what is added.
struct RouterPointers<'r> {
    weight: *const c_void,
    bias: Option<&'r [f32]>,
    dtype: u32,
}

impl Builder<'_> {
    /// `hidden += out(sum of what the chosen experts make of norm(hidden))`.
    pub(super) fn experts(&mut self, block: &ExpertBlock, places: &Places) -> Result<()> {
        let x = self.route(block, places)?;
        let gating = match block.gating {
            ExpertGating::Activation(_) => Gating::Plain(candle_nn::Activation::Silu),
            ExpertGating::Clamped { alpha, limit } => {
                Gating::Clamped { alpha: alpha.into(), limit: limit.into() }
            }
        };
        let stacks = [self.stack(&block.gate)?, self.stack(&block.up)?];
        let narrow =
            |stacks: &[&StackProjection]| stacks.iter().all(|stack| has_narrow_scales(&stack.weight));
        let gate_up = ExpertsCall {
            stacks: &stacks,
            format: block.up.weight.format(),
            narrow_scales: narrow(&[&block.gate, &block.up]),
            experts: block.routing.experts,
            rows: block.up.rows,
            k: self.plan.hidden,
            tokens: self.sequences,
            top_k: block.routing.top_k,
            gating: Some(gating),
            ids: places.expert_ids,
            routing_weights: if block.weighs_inputs { places.expert_shares } else { 0 },
            x,
            x_dtype: self.dtype,
            y: places.inner_of_experts,
            y_dtype: self.dtype,
            factor: 1.,
            residual: 0,
        };
        self.of_experts(&gate_up, places)?;

        let ones = gate_up.pairs();
        let shares = match block.weighs_inputs {
            true => self.constants.add(ones, || Cow::Owned(vec![1.; ones])),
            false => places.expert_shares,
        };
        let OutputAt { y, residual, factor } = OutputAt::new(&block.out, places);
        let down_stack = [self.stack(&block.down)?];
        let down = ExpertsCall {
            stacks: &down_stack,
            format: block.down.weight.format(),
            narrow_scales: narrow(&[&block.down]),
            rows: self.plan.hidden,
            k: block.down.k,
            gating: None,
            routing_weights: shares,
            x: places.inner_of_experts,
            y,
            factor,
            residual,
            ..gate_up
        };
        self.of_experts(&down, places)?;
        self.finish(&block.out, places)
    }

    /// Chooses experts. Where what they see is.
    fn route(&mut self, block: &ExpertBlock, places: &Places) -> Result<u64> {
        let hidden = self.plan.hidden;
        let routing = &block.routing;
        let router = self.router(&block.router)?;
        let gate = block.shared_gate.as_ref().map(|gate| self.router(&gate.router)).transpose()?;
        let fused = block.norm.as_ref().filter(|norm| norm.is_rms());
        let mut x = places.hidden;
        if let (Some(norm), None) = (&block.norm, fused) {
            self.norm(norm, (self.sequences, hidden), (x, places.normed), (1., 0))?;
            x = places.normed;
        }
        let norm = fused.map(|norm| self.weight_of(norm, hidden));
        let logits = routing.experts + usize::from(gate.is_some());
        let blocks = logits.div_ceil(CQ_ROUTE_EXPERTS as usize);
        let (_, arrivals) = self.split(0, self.sequences, places);
        let groups = routing.groups;
        let params = CqRoute {
            x: x as *const _,
            norm: norm.unwrap_or_default() as *const _,
            normed: places.normed as *mut _,
            weight: router.weight,
            bias: self.numbers(router.bias) as *const _,
            correction: self.numbers(routing.correction.as_deref()) as *const _,
            shared_gate: gate.as_ref().map_or(ptr::null(), |gate| gate.weight),
            shared: places.inner as *mut _,
            logits: places.logits_of_experts as *mut _,
            arrivals,
            ids: places.expert_ids as *mut _,
            shares: places.expert_shares as *mut _,
            hidden: u32_of("hidden size", hidden)?,
            experts: u32_of("experts", routing.experts)?,
            top_k: u32_of("experts of a token", routing.top_k)?,
            groups: u32_of("groups of experts", groups.map_or(0, |groups| groups.count))?,
            chosen_groups: u32_of("chosen groups", groups.map_or(0, |groups| groups.chosen))?,
            summed: if groups.is_some_and(|groups| groups.by == GroupScore::TwoLargest) { 2 } else { 1 },
            sigmoid: (routing.scores == Scores::Sigmoid).into(),
            normalize: routing.normalize.into(),
            scale: routing.scale,
            eps: fused.map_or(0., |norm| norm.eps),
            dtype: float_dtype(self.dtype)?,
            weight_dtype: router.dtype,
            shared_width: u32_of(
                "the shared expert",
                block.shared_gate.as_ref().map_or(0, |gate| gate.width),
            )?,
            shared_gate_dtype: gate.as_ref().map_or(router.dtype, |gate| gate.dtype),
            shared_bias: gate.and_then(|gate| gate.bias?.first().copied()).unwrap_or(-0.),
            unused: 0,
        };
        let grid = Grid {
            blocks: (blocks, self.sequences),
            shared_bytes: plan::route_shared_bytes(routing.experts),
        };
        self.push(Kernel::Route, grid, LaunchParams::Route(params));
        Ok(if norm.is_some() { places.normed } else { x })
    }

    fn router<'r>(&self, router: &'r Router) -> Result<RouterPointers<'r>> {
        let Router::Dense { weight, bias } = router else { bail!("routers are dense on a device") };
        let address = Locked::new(weight).view()?.address(self.stream)?.as_ptr();
        Ok(RouterPointers { weight: address, bias: bias.as_deref(), dtype: float_dtype(weight.dtype())? })
    }

    /// Projections of all pairs; those of down projections are added up.
    fn of_experts(&mut self, call: &ExpertsCall, places: &Places) -> Result<()> {
        if let Some(ExpertsLaunch { kernel, grid, mut params, parts }) =
            call.gemv(self.card.most_shared_bytes)?
        {
            if let Some((partial, arrivals)) = parts {
                (params.partial, params.arrivals) = self.split(partial, arrivals, places);
            }
            self.push(kernel, grid, LaunchParams::Experts(params));
            return Ok(());
        }
        if call.gating.is_some() {
            let (kernel, grid, params) = call.simt()?;
            self.push(kernel, grid, LaunchParams::Experts(params));
            return Ok(());
        }
        let (outputs, _) = self.split(call.pairs() * call.rows, 0, places);
        let outputs = outputs as u64;
        let (kernel, grid, params) = ExpertsCall { y: outputs, y_dtype: DType::F32, ..*call }.simt()?;
        self.push(kernel, grid, LaunchParams::Experts(params));
        let (kernel, grid, params) = call.weighted_sum(outputs)?;
        self.push(kernel, grid, LaunchParams::WeightedSum(params));
        Ok(())
    }

    fn stack(&mut self, stack: &StackProjection) -> Result<StackPointers> {
        let operand = LockedOperand::new(Operand { weight: &stack.weight, bias: None });
        let (pointers, global_scales) = operand.addresses(self.stream)?.stack()?;
        let bias = self.numbers(stack.bias.as_deref());
        Ok((OperandPointers { bias: bias as *const _, bias_dtype: CQ_F32, ..pointers }, global_scales))
    }
}
