//! Experts of which every rank has a part.

use super::PartialSum;
use crate::backend;
use crate::distributed::Rank;
use crate::nn::expert_split::{expert_shares, ExpertShare};
use crate::nn::experts::{chosen, Routed, StoredExperts};
use crate::nn::{Experts, ExpertsConfig, LayerWeight, VarBuilder};
use candle_core::{DType, Result, Tensor};

/// A block of experts split over ranks, inside each expert or across them: what the ranks make of a token is summed
/// once, after the down projections.
#[derive(Clone, Debug)]
pub struct ParallelExperts {
    own: Experts,
    /// The first of these experts in the block.
    first: usize,
    /// How many the block has.
    count: usize,
    /// None if the block is whole.
    rank: Option<Rank>,
}

/// This rank's part of a block of experts, from the tensors at the builder's path in any layout of
/// [`experts`](crate::nn::experts()), split as the builder says
/// ([`split_experts`](VarBuilder::split_experts)); the whole block if there is one rank, or fewer experts, or
/// elements inside them, than ranks.
///
/// Where a group or block of a down projection belongs to the elements of two ranks, both load it.
///
/// # Errors
/// As those of [`experts`](crate::nn::experts()).
pub fn parallel_experts(config: &ExpertsConfig, vb: VarBuilder) -> Result<ParallelExperts> {
    let stored = StoredExperts::find(config, &vb)?;
    let &ExpertsConfig { experts: count, intermediate_size: inner, .. } = config;
    let mut rank = vb.rank().cloned();
    let mut share = ExpertShare { experts: 0..count, inner: 0..inner };
    if let Some(of) = &rank {
        let shares = expert_shares(vb.expert_split(), count, inner, stored.granularity()?, of.world_size());
        match shares.and_then(|shares| shares.get(of.index()).cloned()) {
            Some(own) => share = own,
            None => rank = None,
        }
    }
    Ok(ParallelExperts { own: stored.load(&share)?, first: share.experts.start, count, rank })
}

impl ParallelExperts {
    /// As [`Experts::forward`], with the same `x`, `ids` and `routing_weights` on all ranks; all receive the sums.
    ///
    /// If ranks have whole experts, ids are read by the host.
    ///
    /// # Errors
    /// As those of [`Experts::forward`]; if another rank fails.
    pub fn forward(&self, x: &Tensor, ids: &Tensor, routing_weights: &Tensor) -> Result<Tensor> {
        let own = match self.own.count() == self.count {
            true => self.own.forward(x, ids, routing_weights)?,
            false => self.of_own_experts(x, ids, routing_weights)?,
        };
        match &self.rank {
            None => Ok(own),
            Some(rank) => Ok(rank.all_reduce_sum(&own)?),
        }
    }

    /// The sums as if all other experts gave zeros. Nothing is computed for those.
    fn of_own_experts(&self, x: &Tensor, ids: &Tensor, routing_weights: &Tensor) -> Result<Tensor> {
        let Routed { tokens, hidden, top_k, ungrouped } = Routed::new(x, ids, routing_weights)?;
        let chosen = chosen(ids, self.count)?;
        // Each pair of a token and an expert that is here as a token with one expert.
        let own = |id: &u32| (*id as usize).checked_sub(self.first).filter(|own| *own < self.own.count());
        let pairs = (0u32..).zip(&chosen).filter_map(|(pair, id)| Some((pair, own(id)? as u32)));
        let (pairs, own_ids): (Vec<u32>, Vec<u32>) = pairs.unzip();
        if pairs.is_empty() {
            return x.zeros_like();
        }
        let (count, device) = (pairs.len(), x.device());
        let of_pairs: Vec<u32> = pairs.iter().map(|pair| pair / top_k as u32).collect();
        let of_pairs = x.reshape((tokens, hidden))?.index_select(&Tensor::new(of_pairs, device)?, 0)?;
        let (batch, len) = if ungrouped { (count, 1) } else { (1, count) };
        let own_ids = Tensor::from_vec(own_ids, (batch, len, 1), device)?;
        let ones = own_ids.ones_like()?.to_dtype(DType::F32)?;
        let outputs = self.own.forward(&of_pairs.reshape((batch, len, hidden))?, &own_ids, &ones)?;
        let outputs = outputs.reshape((count, hidden))?;

        // All other pairs have the row of zeros behind these.
        let nothing = Tensor::zeros((1, hidden), outputs.dtype(), device)?;
        let mut order = vec![count as u32; chosen.len()];
        for (row, pair) in (0..).zip(&pairs) {
            if let Some(place) = order.get_mut(*pair as usize) {
                *place = row;
            }
        }
        let routing_weights = routing_weights.reshape((tokens, top_k))?.to_dtype(DType::F32)?;
        backend::weighted_sum(&[outputs, nothing], &order, &routing_weights)?.reshape(x.shape())
    }

    /// The block, or this rank's part of all experts and what is left to do after it; none if it has some experts alone.
    pub fn part(&self) -> Option<(&Experts, Option<PartialSum<'_>>)> {
        let sum = self.rank.as_ref().map(|rank| PartialSum { rank, bias: None });
        (self.own.count() == self.count).then_some((&self.own, sum))
    }

    /// How many experts the block has, on all ranks together.
    pub fn count(&self) -> usize {
        self.count
    }

    /// This rank's weights, for reports.
    pub fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        self.own.weights()
    }
}
