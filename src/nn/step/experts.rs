//! Blocks of experts in a plan.

use super::checked::{check_rows, expert_gating, factor, norm, numbers, stack, unsupported};
use super::{ExpertsBlock, StepBuilder};
use crate::backend::routing::Routing;
use crate::backend::step::{ExpertBlock, Node, Router};
use crate::tensor::LayerWeight;
use crate::{Error, Linear, Result};
use candle_core::DType;

impl StepBuilder {
    /// Adds a feed-forward block of experts.
    ///
    /// # Errors
    /// As those of [`feed_forward`](Self::feed_forward); if experts are not packed stacks, or there are fewer than a token is to
    /// use; if the shared expert has a norm or an output of its own.
    pub fn experts(&mut self, block: ExpertsBlock) -> Result<()> {
        let experts = Node::Experts(Box::new(self.expert_block(&block)?));
        let Some(shared) = block.shared else {
            self.plan.nodes.push(experts);
            return Ok(());
        };
        if shared.norm.is_some() || shared.out.norm.is_some() || block.out.norm.is_some() {
            return Err(unsupported("shared expert", "beside a norm of its own or behind the block"));
        }
        let [inner, add_inner] =
            self.feed_forward_nodes(super::FeedForwardBlock { norm: block.norm, out: block.out, ..shared })?;
        // Both see what the block is given.
        self.plan.nodes.extend([inner, experts, add_inner]);
        Ok(())
    }

    fn expert_block(&mut self, block: &ExpertsBlock) -> Result<ExpertBlock> {
        let hidden = self.plan.hidden;
        let Some(([gate, up, down], gating)) = block.experts.projections() else {
            return Err(unsupported("experts", "of which a rank has a part"));
        };
        let experts = block.experts.count();
        if block.top_k == 0 || block.top_k > experts {
            let expected = format!("1 to {experts}, the number of experts");
            return Err(Error::mismatch("experts of a token", expected, block.top_k.to_string()));
        }
        block.groups.map_or(Ok(()), |groups| groups.validate(experts))?;
        let correction = block.correction.map(|numbers_| numbers("correction of scores", numbers_, experts));
        let routing = Routing {
            experts,
            top_k: block.top_k,
            scores: block.scores,
            correction: correction.transpose()?,
            groups: block.groups,
            normalize: block.normalize,
            scale: factor("scale of experts", block.scale)?,
        };
        let device = self.device.clone();
        let of_up = stack("up projections of experts", up, (experts, None, hidden), &device)?;
        let inner = of_up.rows;
        let block = ExpertBlock {
            norm: norm("norm before experts", block.norm, hidden)?,
            router: self.router(block.router, (experts, hidden))?,
            routing,
            weighs_inputs: block.weighs_inputs,
            gate: stack("gate projections of experts", gate, (experts, Some(inner), hidden), &device)?,
            up: of_up,
            gating: expert_gating(gating)?,
            down: stack("down projections of experts", down, (experts, Some(hidden), inner), &device)?,
            out: self.out("norm behind experts", block.out)?,
        };
        self.others.extend([gate, up, down].map(|stack| stack.adapters().clone()));
        Ok(block)
    }

    /// What is packed stays so on the CPU; elsewhere a kernel of its own takes dense routers, which are small.
    fn router(&mut self, router: &Linear, (experts, hidden): (usize, usize)) -> Result<Router> {
        let what = "router";
        if self.device.is_cpu() && matches!(router.weight(), LayerWeight::Quantized(_)) {
            let projection = self.projection(what, router, hidden)?;
            check_rows(what, &projection, experts)?;
            return Ok(Router::Packed(projection));
        }
        let weight = match router.weight() {
            LayerWeight::Dense(weight) if self.device.is_cpu() => weight.to_dtype(DType::F32)?,
            LayerWeight::Dense(weight) => weight.clone(),
            LayerWeight::Quantized(weight) => weight.dequantize(DType::F32)?,
            other => return Err(unsupported(what, &format!("as {}", other.format_name()))),
        };
        if weight.dims() != [experts, hidden] || !weight.device().same_device(&self.device) {
            let expected = format!("[{experts}, {hidden}] on {:?}", self.device.location());
            return Err(Error::mismatch(
                what,
                expected,
                format!("{:?} on {:?}", weight.dims(), weight.device().location()),
            ));
        }
        let bias = router.bias().map(|bias| numbers(what, bias, experts)).transpose()?;
        self.others.push(router.adapters().clone());
        let weight = if self.device.is_cpu() { weight.t()? } else { weight };
        Ok(Router::Dense { weight: weight.detach().contiguous()?, bias })
    }
}
