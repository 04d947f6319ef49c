//! The attention of a step: its launch, and the tables of what positions do to queries and keys.

use super::super::attend::{Attend, AttendShape, Cached};
use super::super::attention::{AttendCall, AttendMemory, CacheAddresses, HeadNormCall, Positions, Turns};
use super::super::card::Card;
use super::super::launch::Grid;
use super::super::memory::Locked;
use super::builder::{Builder, Places};
use super::LaunchParams;
use crate::backend::step::{HeadNorm, Heads, Node, Plan, Turn};
use crate::tensor::DeviceRows;
use crate::Error;
use candle_core::{bail, DType, Result};
use std::borrow::Cow;

impl Builder<'_> {
    pub(super) fn attend(&mut self, heads: &Heads, places: &Places, turns: &[Turns]) -> Result<()> {
        let &Heads { heads: count, kv_heads, head_dim, .. } = heads;
        let [q, k, v, ..] = places.projected;
        for (norm, x, heads) in [(&heads.q_norm, q, count), (&heads.k_norm, k, kv_heads)] {
            if let Some(HeadNorm { norm, over_all: true }) = norm {
                self.norm(norm, (self.sequences, heads * head_dim), (x, x), (1., 0))?;
            }
        }
        let Some(cache) = self.memory.caches.get(heads.layer) else {
            bail!("layer {} has no cache", heads.layer)
        };
        let rows = &cache.rows;
        let &DeviceRows { sequences, kv_heads: of_cache, capacity, is_ring, head_dim: size, .. } = rows;
        let is_of_dtype = rows.codes().is_some() || rows.memory.dtype() == self.dtype;
        if (sequences, of_cache, size) != (self.sequences, kv_heads, head_dim) || !is_of_dtype {
            let expected =
                format!("{:?} for {} sequences, {kv_heads} heads of {head_dim}", self.dtype, self.sequences);
            let found = format!("{} for {sequences}, {of_cache} of {size}", rows.formats[0]);
            return Err(Error::mismatch("cache of a step plan", expected, found).into());
        }
        let memory = Locked::new(&rows.memory).view()?.address(self.stream)?.get();
        let cached = CacheAddresses::of(rows, memory);
        let call = AttendCall {
            shape: AttendShape { sequences, heads: count, kv_heads, head_dim },
            dtype: self.dtype,
            cached: Cached::of(rows),
            capacity,
            is_ring,
            positions: Positions::OnDevice(places.positions),
            window: cache.window,
            is_chunked: cache.is_chunked,
            scale: heads.scale,
            softcap: heads.softcap,
            has_gate: heads.has_gate,
            q_norm: self.head_norm(heads.q_norm.as_ref(), head_dim),
            k_norm: self.head_norm(heads.k_norm.as_ref(), head_dim),
            turns_first: heads.turns_first,
            turns: turns.get(heads.turn).copied().unwrap_or_default(),
        };
        let Some(plan) = call.plan(self.card) else {
            let [keys, values] = rows.formats;
            return Err(Error::Unsupported {
                what: format!("a step plan with heads of {head_dim} elements, keys in {keys} and values in {values} on this device"),
                remedy: "call the layers one by one".to_string(),
            }
            .into());
        };
        let (partial, arrivals) = match plan.splits {
            1 => Default::default(),
            _ => {
                let (partial, arrivals) = self.split(plan.partial(head_dim), plan.shares, places);
                (partial as u64, arrivals as u64)
            }
        };
        let memory = AttendMemory {
            q,
            k,
            v,
            cache: cached,
            sinks: self.numbers(heads.sinks.as_deref()),
            y: places.attended,
            partial,
            arrivals,
        };
        let params = call.params(&plan, &memory)?;
        let grid = Grid { blocks: (plan.splits, plan.shares), shared_bytes: plan.shared_bytes };
        self.push(plan.kernel, grid, LaunchParams::Attend(params));
        Ok(())
    }

    /// What attention does itself: norms of each head.
    fn head_norm(&mut self, norm: Option<&HeadNorm>, head_dim: usize) -> Option<HeadNormCall> {
        let HeadNorm { norm, over_all: false } = norm? else { return None };
        let numbers = norm.weight.as_ref().or(norm.bias.as_ref());
        Some(HeadNormCall {
            weight: self.numbers(norm.weight.as_deref()),
            bias: self.numbers(norm.bias.as_deref()),
            of_each_head: numbers.is_some_and(|numbers| numbers.len() != head_dim),
            subtracts_mean: norm.subtracts_mean,
            eps: norm.eps,
        })
    }

    /// Tables of what each turn does at the positions that there are.
    pub(super) fn turns(&mut self) -> Result<Vec<Turns>> {
        let rows = self.turn_rows;
        let is_long = self.is_long;
        let constants = &mut self.constants;
        let tables = self.plan.turns.iter().map(|turn| {
            let pairs = turn.frequencies(is_long).len();
            let table =
                || Cow::Owned((0..rows).flat_map(|position| angles(turn, is_long, position)).collect());
            let growth = turn.query_growth.map(|growth| {
                constants.add(rows, || (0..rows).map(|position| growth.factor(position)).collect())
            });
            Turns {
                table: if pairs == 0 { 0 } else { constants.add(2 * rows * pairs, table) },
                growth: growth.unwrap_or_default(),
                rows,
                pairs,
                interleaved: turn.interleaved,
            }
        });
        Ok(tables.collect())
    }
}

/// Refuses a plan with heads for which a card has no kernel.
pub(super) fn check(plan: &Plan, dtype: DType, sequences: usize, card: Card) -> crate::Result<()> {
    let heads = plan.nodes.iter().filter_map(|node| match node {
        Node::Attend(heads) => Some(heads),
        Node::Embed { .. } | Node::Project(..) | Node::DeltaNet(_) | Node::AddAttended(..) => None,
        Node::Inner { .. } | Node::AddInner(..) | Node::Experts(_) | Node::Logits { .. } => None,
    });
    for heads in heads {
        if heads.has_gate && heads.q_norm.as_ref().is_some_and(|norm| norm.over_all) {
            return Err(Error::Unsupported {
                what: "a step plan with a norm of all queries together, which have gates, on a CUDA device"
                    .to_string(),
                remedy: "call the layers one by one".to_string(),
            });
        }
        let &Heads { heads, kv_heads, head_dim, .. } = heads;
        let shape = AttendShape { sequences, heads, kv_heads, head_dim };
        if Attend::plan(shape, (dtype, Cached::Numbers), None, (card.bf16, card.shared())).is_none() {
            return Err(Error::Unsupported {
                what: format!("a step plan with heads of {head_dim} elements in {dtype:?} on this device"),
                remedy: "call the layers one by one".to_string(),
            });
        }
    }
    Ok(())
}

/// Cosines and sines of a position, times the turn's factor. Angles are f32 products, as in the implementations that models
/// were trained with.
fn angles(turn: &Turn, is_long: bool, position: usize) -> impl Iterator<Item = f32> + '_ {
    turn.frequencies(is_long).iter().flat_map(move |frequency| {
        let (sin, cos) = (position as f32 * frequency).sin_cos();
        [cos * turn.factor, sin * turn.factor]
    })
}
