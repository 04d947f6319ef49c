//! What the launch of attention takes, beside the memory that it works on: for one position of all sequences, or for those that
//! it finds in device memory when it runs.

use super::super::attend::{Attend, AttendShape, Cached};
use super::super::bindings::{
    CqAttend, CqHeadNorm, CQ_ATTEND_KEYS, CQ_HEADS_AS_THEY_ARE, CQ_HEADS_LAYER, CQ_HEADS_RMS,
};
use super::super::card::Card;
use super::super::kernel::Kernel;
use super::super::memory::{float_dtype, u32_of};
use crate::tensor::DeviceRows;
use candle_core::{bail, DType, Result};
use std::f64::consts::LOG2_E;

/// Attention of one new token of each sequence. Addresses are those of device memory; 0 is none.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct AttendCall {
    pub(in super::super) shape: AttendShape,
    /// Of queries, keys, values and outputs; and what the cache holds.
    pub(in super::super) dtype: DType,
    pub(in super::super) cached: Cached,
    /// Rows of the cache, and whether these are a ring.
    pub(in super::super) capacity: usize,
    pub(in super::super) is_ring: bool,
    pub(in super::super) positions: Positions,
    /// How many tokens a new one sees, itself included; if `is_chunked`, those since the last multiple of that.
    pub(in super::super) window: Option<usize>,
    pub(in super::super) is_chunked: bool,
    pub(in super::super) scale: f32,
    pub(in super::super) softcap: Option<f32>,
    /// Whether each query has a gate behind it.
    pub(in super::super) has_gate: bool,
    pub(in super::super) q_norm: Option<HeadNormCall>,
    pub(in super::super) k_norm: Option<HeadNormCall>,
    /// Whether norms come behind the turn.
    pub(in super::super) turns_first: bool,
    pub(in super::super) turns: Turns,
}

/// Where the new tokens are.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Positions {
    /// All at one, from which tokens back to `first` are seen. `settled` rows of the cache were there before the work that was
    /// put into the stream last.
    Known { first: usize, position: usize, settled: usize },
    /// `[sequences]` u32, written two launches ago or more, or by a copy since; of a sequence that has no new token `u32::MAX`.
    OnDevice(u64),
}

/// A norm of each head of queries or keys.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct HeadNormCall {
    /// f32 numbers of elements, which all heads share unless `of_each_head`; the same of biases.
    pub(in super::super) weight: u64,
    pub(in super::super) bias: u64,
    pub(in super::super) of_each_head: bool,
    pub(in super::super) subtracts_mean: bool,
    pub(in super::super) eps: f32,
}

/// How positions turn queries and keys; not at all by default.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Turns {
    /// `[rows][pairs][2]` f32: cosine and sine of each position and pair, times a factor.
    pub(in super::super) table: u64,
    /// `[rows]` f32: by what queries of each position are multiplied.
    pub(in super::super) growth: u64,
    pub(in super::super) rows: usize,
    pub(in super::super) pairs: usize,
    /// Whether neighbours are pairs, which stand in the two halves behind the turn.
    pub(in super::super) interleaved: bool,
}

/// Where a cache is: `[sequences, kv_heads, capacity]` rows of keys and of values, and, of codes, of their groups.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct CacheAddresses {
    pub(in super::super) keys: u64,
    pub(in super::super) values: u64,
    pub(in super::super) key_groups: u64,
    pub(in super::super) value_groups: u64,
}

impl CacheAddresses {
    /// Of rows whose memory begins here.
    pub(in super::super) fn of(rows: &DeviceRows, memory: u64) -> Self {
        let [keys, values, key_groups, value_groups] = rows.offsets().map(|offset| memory + offset as u64);
        match rows.codes() {
            None => Self { keys, values, ..Self::default() },
            Some(_) => Self { keys, values, key_groups, value_groups },
        }
    }
}

impl Cached {
    pub(in super::super) fn of(rows: &DeviceRows) -> Self {
        rows.codes().map_or(Self::Numbers, Self::Codes)
    }
}

/// The addresses of what is computed.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct AttendMemory {
    /// `[sequences, heads, head_dim]`, of two such with gates.
    pub(in super::super) q: u64,
    /// `[sequences, kv_heads, head_dim]`.
    pub(in super::super) k: u64,
    pub(in super::super) v: u64,
    pub(in super::super) cache: CacheAddresses,
    /// `[heads]` f32.
    pub(in super::super) sinks: u64,
    /// `[sequences, heads, head_dim]`.
    pub(in super::super) y: u64,
    /// As many f32 as [`Attend::partial`] says, and a u32 for each share, zero between launches; of a launch with several splits.
    pub(in super::super) partial: u64,
    pub(in super::super) arrivals: u64,
}

impl AttendCall {
    /// The launch, with all blocks that there may ever be if positions are on the device. None if there is no kernel for it.
    pub(in super::super) fn plan(&self, card: Card) -> Option<Attend> {
        let seen = match self.positions {
            Positions::Known { first, position, .. } => Some(first..=position),
            Positions::OnDevice(_) => None,
        };
        Attend::plan(self.shape, (self.dtype, self.cached), seen, (card.bf16, card.shared()))
    }

    /// What the launch takes.
    ///
    /// # Errors
    /// If sizes do not fit each other, or kernels.
    pub(in super::super) fn params(&self, plan: &Attend, memory: &AttendMemory) -> Result<CqAttend> {
        let AttendShape { heads, kv_heads, head_dim, .. } = self.shape;
        let Turns { rows, pairs, .. } = self.turns;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!("{heads} query heads are no multiple of {kv_heads} heads of keys");
        }
        if !self.capacity.is_multiple_of(CQ_ATTEND_KEYS as usize) {
            bail!("a cache of {} rows is no multiple of {CQ_ATTEND_KEYS}", self.capacity);
        }
        if self.is_ring && (plan.kernel == Kernel::AttendF32 || self.window.is_none()) {
            bail!("a ring of {} rows for a window of {:?}, {:?}", self.capacity, self.window, plan.kernel);
        }
        if 2 * pairs > head_dim || (pairs > 0 && self.turns.table == 0) {
            bail!("{pairs} pairs cannot turn in heads of {head_dim} elements, or have no table");
        }
        if plan.splits > 1 && (memory.partial == 0 || memory.arrivals == 0) {
            bail!("{} splits of keys have no memory to be joined in", plan.splits);
        }
        let (positions, position, settled) = match self.positions {
            Positions::OnDevice(address) => (address, 0, 0),
            Positions::Known { position, .. } if position >= self.capacity && !self.is_ring => {
                bail!("position {position} in a cache of {} rows", self.capacity)
            }
            Positions::Known { position, .. }
                if (pairs > 0 || self.turns.growth != 0) && position >= rows =>
            {
                bail!("position {position} in tables of {rows} rows")
            }
            Positions::Known { position, settled, .. } => (0, position, settled),
        };
        let (scale, cap) = logit_factors(self.scale, self.softcap);
        Ok(CqAttend {
            q: memory.q as *const _,
            k: memory.k as *const _,
            v: memory.v as *const _,
            keys: memory.cache.keys as *mut _,
            values: memory.cache.values as *mut _,
            key_groups: memory.cache.key_groups as *mut _,
            value_groups: memory.cache.value_groups as *mut _,
            sinks: memory.sinks as *const _,
            y: memory.y as *mut _,
            partial: memory.partial as *mut _,
            arrivals: memory.arrivals as *mut _,
            positions: positions as *const _,
            turns: self.turns.table as *const _,
            growth: self.turns.growth as *const _,
            q_norm: head_norm(self.q_norm, head_dim)?,
            k_norm: head_norm(self.k_norm, head_dim)?,
            group: u32_of("heads", heads / kv_heads)?,
            kv_heads: u32_of("heads of keys", kv_heads)?,
            head_dim: u32_of("elements of a head", head_dim)?,
            capacity: u32_of("rows of a cache", self.capacity)?,
            position: u32_of("position", position)?,
            settled: u32_of("position", settled)?,
            window: window_of(self.window, self.capacity)?,
            chunked: self.is_chunked.into(),
            splits: u32_of("splits of keys", plan.most_splits)?,
            stages: u32_of("stages", plan.stages)?,
            turn_rows: u32_of("rows of a table", rows)?,
            pairs: u32_of("pairs", pairs)?,
            interleaved: self.turns.interleaved.into(),
            turns_first: self.turns_first.into(),
            scale,
            cap,
            dtype: float_dtype(self.dtype)?,
            ring: self.is_ring.into(),
            gated: self.has_gate.into(),
            unused: 0,
        })
    }
}

/// A window as kernels take it: one beyond the cache is none.
pub(in super::super) fn window_of(window: Option<usize>, capacity: usize) -> Result<u32> {
    let window = window.filter(|window| *window < capacity).map_or(0, |window| window.max(1));
    u32_of("tokens of a window", window)
}

/// By what kernels multiply scores, and where these end, if they do. Logits are of base 2; with a cap, a score is first what tanh
/// takes.
pub(in super::super) fn logit_factors(scale: f32, softcap: Option<f32>) -> (f32, f32) {
    let scale = f64::from(scale);
    let (scale, cap) = match softcap.map(f64::from) {
        None => (scale * LOG2_E, 0.),
        Some(cap) => (scale / cap, cap * LOG2_E),
    };
    (scale as f32, cap as f32)
}

fn head_norm(norm: Option<HeadNormCall>, head_dim: usize) -> Result<CqHeadNorm> {
    let none = HeadNormCall { weight: 0, bias: 0, of_each_head: false, subtracts_mean: false, eps: 0. };
    let HeadNormCall { weight, bias, of_each_head, subtracts_mean, eps } = norm.unwrap_or(none);
    Ok(CqHeadNorm {
        weight: weight as *const _,
        bias: bias as *const _,
        stride: if of_each_head { u32_of("elements of a head", head_dim)? } else { 0 },
        kind: match norm {
            None => CQ_HEADS_AS_THEY_ARE,
            Some(_) if subtracts_mean => CQ_HEADS_LAYER,
            Some(_) => CQ_HEADS_RMS,
        },
        eps,
        unused: 0,
    })
}
