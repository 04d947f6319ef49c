//! Blocks of experts in a plan.

use super::checked::{check_rows, expert_gating, factor, norm, numbers, stack, unsupported};
use super::{BlockOutput, ExpertsBlock, FeedForwardBlock, PartialSum, StepBuilder};
use crate::backend::routing::Routing;
use crate::backend::step::{ExpertBlock, Node, Router, SharedGate};
use crate::tensor::LayerWeight;
use crate::{Error, Linear, Result};
use candle_core::DType;

impl StepBuilder {
    /// Adds a feed-forward block of experts.
    ///
    /// # Errors
    /// As those of [`feed_forward`](Self::feed_forward); if experts are not packed stacks, or there are fewer than a token is to
    /// use; if the shared expert has a norm or an output of its own, or there is one beside a norm behind the block; if there is a
    /// gate of a shared expert without one, or beside a bias of its last projection.
    pub fn experts(&mut self, block: ExpertsBlock) -> Result<()> {
        if let Some(FeedForwardBlock { norm, out, .. }) = block.shared {
            if norm.is_some() || out.norm.is_some() || out.scale != 1. || block.out.norm.is_some() {
                let found = "with a norm or a scale of its own, or a norm behind the block";
                return Err(unsupported("shared expert", found));
            }
        }
        match block.shared {
            None if block.shared_gate.is_some() => {
                return Err(Error::mismatch("shared expert", "one, as there is a gate of it", "none"));
            }
            // The gate multiplies what the last projection sees.
            Some(FeedForwardBlock { down_proj, out, .. })
                if block.shared_gate.is_some()
                    && (down_proj.bias().is_some() || out.sum.is_some_and(|sum| sum.bias.is_some())) =>
            {
                return Err(unsupported("shared expert", "with a gate, and a bias behind it"));
            }
            _ => {}
        }
        let shared = block.shared.map(|shared| {
            let out = BlockOutput { sum: shared.out.sum, ..block.out };
            self.feed_forward_nodes(FeedForwardBlock { norm: block.norm, out, ..shared })
        });
        let shared = shared.transpose()?;
        let width = match &shared {
            Some([Node::Inner { up, .. }, _]) => up.rows,
            _ => 0,
        };
        let experts = Node::Experts(Box::new(self.expert_block(&block, width)?));
        match shared {
            None => self.plan.nodes.push(experts),
            // Both see what the block is given.
            Some([inner, add_inner]) => self.plan.nodes.extend([inner, experts, add_inner]),
        }
        Ok(())
    }

    /// `width`: elements inside the shared expert.
    fn expert_block(&mut self, block: &ExpertsBlock, width: usize) -> Result<ExpertBlock> {
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
        if let Some(PartialSum { rank, bias }) = block.out.sum {
            self.part_of(rank)?;
            bias.map_or(Ok(()), |_| Err(unsupported("sum of experts", "with a bias")))?;
        }
        let gate_of = |gate| {
            Ok::<_, Error>(SharedGate {
                router: self.router("gate of the shared expert", gate, (1, hidden))?,
                width,
            })
        };
        let shared_gate = block.shared_gate.map(gate_of).transpose()?;
        let device = self.device.clone();
        let of_up = stack("up projections of experts", up, (experts, None, hidden), &device)?;
        let inner = of_up.rows;
        let block = ExpertBlock {
            norm: norm("norm before experts", block.norm, hidden)?,
            router: self.router("router", block.router, (experts, hidden))?,
            routing,
            weighs_inputs: block.weighs_inputs,
            shared_gate,
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
    fn router(&mut self, what: &str, router: &Linear, (experts, hidden): (usize, usize)) -> Result<Router> {
        if self.device.is_cpu() && matches!(router.weight(), LayerWeight::Quantized(_)) {
            let projection = self.projection(what, router, hidden)?;
            check_rows(what, &projection, experts)?;
            return Ok(Router::Packed(projection));
        }
        let weight = match router.weight() {
            LayerWeight::Dense(weight) if self.device.is_cpu() => weight.to_dtype(DType::F32)?,
            LayerWeight::Dense(weight) => weight.clone(),
            LayerWeight::Quantized(weight) => weight.dequantize(DType::F32)?,
            LayerWeight::Reordered(weight) => weight.dequantize(DType::F32)?,
            LayerWeight::ColumnScaled(weight) => weight.dequantize(DType::F32)?,
            other @ LayerWeight::Ggml(_) => {
                return Err(unsupported(what, &format!("as {}", other.format_name())))
            }
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

#[cfg(test)]
mod tests {
    use super::super::HeadBlock;
    use super::*;
    use crate::backend::step::StepToken;
    use crate::nn::{ExpertGroups, ExpertStack, Experts, Gating, GroupScore, Lora};
    use crate::{Embedding, KvCache, QuantFormat, QuantTensor};
    use candle_core::{Device, Tensor};
    use candle_nn::{Activation, RmsNorm};

    const EXPERTS: usize = 4;
    const HIDDEN: usize = 64;

    fn packed(dims: &[usize]) -> QuantTensor {
        QuantTensor::quantize(&Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap(), QuantFormat::MXFP4)
            .unwrap()
    }

    fn dense(dims: &[usize]) -> Tensor {
        Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap()
    }

    fn stack(experts: usize, n: usize, k: usize) -> ExpertStack {
        ExpertStack::from_quant(packed(&[experts, n, k]), None).unwrap()
    }

    /// Experts of so many inputs.
    fn experts(hidden: usize) -> Experts {
        let silu = Gating::Plain(Activation::Silu);
        Experts::new(stack(EXPERTS, 32, hidden), stack(EXPERTS, 32, hidden), stack(EXPERTS, hidden, 32), silu)
            .unwrap()
    }

    fn builder() -> (StepBuilder, Embedding) {
        let table = Embedding::from_quant(packed(&[32, HIDDEN]), DType::F32).unwrap();
        (StepBuilder::new(&table, 1.).unwrap(), table)
    }

    #[test]
    fn blocks_that_do_not_fit_are_refused() {
        let (experts, router) = (experts(HIDDEN), Linear::new(dense(&[EXPERTS, HIDDEN]), None));
        let refused = |block: ExpertsBlock, told: &str| {
            let error = builder().0.experts(block).unwrap_err().to_string();
            assert!(error.contains(told), "{error:?} has no {told:?}");
        };
        let plain = ExpertsBlock::new(&router, 2, &experts);
        for top_k in [0, EXPERTS + 1] {
            refused(ExpertsBlock { top_k, ..plain }, "1 to 4, the number of experts");
        }
        let others = Linear::new(dense(&[EXPERTS + 1, HIDDEN]), None);
        refused(ExpertsBlock { router: &others, ..plain }, "expected [4, 64]");
        let groups = Some(ExpertGroups { count: 3, chosen: 1, by: GroupScore::Largest });
        refused(ExpertsBlock { groups, ..plain }, "a divisor of the 4 experts");
        let correction = dense(&[EXPERTS + 1]);
        refused(ExpertsBlock { correction: Some(&correction), ..plain }, "4 numbers");
        refused(ExpertsBlock { scale: 0., ..plain }, "above zero");
        let narrow = self::experts(32);
        refused(ExpertsBlock::new(&router, 2, &narrow), "a stack [4, N, 64]");

        let each = |n, k| ExpertStack::from_each(vec![dense(&[n, k]).into(); EXPERTS], None).unwrap();
        let silu = Gating::Plain(Activation::Silu);
        let of_dense = Experts::new(each(32, HIDDEN), each(32, HIDDEN), each(HIDDEN, 32), silu).unwrap();
        refused(ExpertsBlock::new(&router, 2, &of_dense), "experts that are dense");

        let linear = |n, k| Linear::from_quant(packed(&[n, k]), None);
        let (gate, up, down) = (linear(32, HIDDEN), linear(32, HIDDEN), linear(HIDDEN, 32));
        let norm = RmsNorm::new(dense(&[HIDDEN]), 1e-6);
        let shared = FeedForwardBlock::new(Some(&gate), &up, &down);
        let own_norm = FeedForwardBlock { norm: Some((&norm).into()), ..shared };
        refused(ExpertsBlock { shared: Some(own_norm), ..plain }, "a norm or a scale of its own");
        let own_scale = FeedForwardBlock { out: BlockOutput { scale: 0.5, ..Default::default() }, ..shared };
        refused(ExpertsBlock { shared: Some(own_scale), ..plain }, "a norm or a scale of its own");
        let out = BlockOutput { norm: Some((&norm).into()), ..Default::default() };
        refused(ExpertsBlock { shared: Some(shared), out, ..plain }, "behind the block");
        builder().0.experts(ExpertsBlock { shared: Some(shared), ..plain }).unwrap();

        let [one, two] = [1, 2].map(|rows| Linear::new(dense(&[rows, HIDDEN]), None));
        refused(ExpertsBlock { shared_gate: Some(&one), ..plain }, "one, as there is a gate of it");
        let gated = ExpertsBlock { shared: Some(shared), shared_gate: Some(&one), ..plain };
        refused(
            ExpertsBlock { shared_gate: Some(&two), ..gated },
            "gate of the shared expert: expected [1, 64]",
        );
        let biased = Linear::from_quant(packed(&[HIDDEN, 32]), Some(dense(&[HIDDEN])));
        let shared = Some(FeedForwardBlock::new(Some(&gate), &up, &biased));
        refused(ExpertsBlock { shared, ..gated }, "with a gate, and a bias behind it");
        builder().0.experts(gated).unwrap();
    }

    /// A plan does not compute adapters of experts: whoever runs it is told.
    #[test]
    fn active_adapters_of_experts_are_refused() {
        let (experts, router) = (experts(HIDDEN), Linear::new(dense(&[EXPERTS, HIDDEN]), None));
        let (mut plan, table) = builder();
        plan.experts(ExpertsBlock::new(&router, 2, &experts)).unwrap();
        let norm = RmsNorm::new(dense(&[HIDDEN]), 1e-6);
        let plan = plan.head(HeadBlock::new(&norm, &table.as_linear())).unwrap();
        let token = StepToken { id: 3, sequence: 0, position: 0 };
        let run = || plan.run(&[token], &mut [] as &mut [KvCache], &[0]);
        run().unwrap();
        let ([gate, ..], _) = experts.projections().unwrap();
        let lora =
            Lora { a: dense(&[EXPERTS, 2, HIDDEN]), b: dense(&[EXPERTS, 32, 2]), scale: 1., magnitude: None };
        gate.adapters().add("mine", lora).unwrap();
        assert!(!plan.computes_adapters());
        let error = run().unwrap_err().to_string();
        assert!(error.contains("an adapter of experts or their router in a step plan"), "{error}");
        gate.adapters().set_active("mine", false);
        assert!(plan.computes_adapters());
        run().unwrap();
    }
}
