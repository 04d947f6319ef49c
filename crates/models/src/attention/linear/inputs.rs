//! The projections to queries, keys, values and gates.

use crate::config::LinearAttentionConfig;
use crate::projection::{columns_of, projection};
use candle_core::{Result, Tensor, D};
use candle_nn::Module;
use candle_quant::nn::{forward_all, LayerWeight, Linear, VarBuilder};
use candle_quant::step::DeltaNetProjections;
use candle_quant::DeltaNetConfig;
use std::ops::Range;

/// The projections, of some heads.
#[derive(Debug)]
pub(super) enum Inputs {
    /// For each head of keys, its queries, keys, values and gates, and what makes `beta` and `decay`.
    Grouped { qkvz: Linear, ba: Linear },
    /// One of queries, keys and values, or one each, and one each of the others.
    Apart { qkv: Vec<Linear>, others: [Linear; 3] },
}

/// What is made of hidden states, as [`ops::gated_delta_net`](candle_quant::ops::gated_delta_net) takes it.
pub(super) struct Projected {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub gate: Tensor,
    pub decay: Tensor,
    pub beta: Tensor,
}

impl Inputs {
    /// `own` are the heads of keys of this rank.
    pub fn new(
        hidden: usize,
        linear: &LinearAttentionConfig,
        own: &Range<usize>,
        vb: &VarBuilder,
    ) -> Result<Self> {
        let of_heads = |rows: usize, name: &str| {
            let part = own.start * rows..own.end * rows;
            columns_of(hidden, linear.key_heads * rows, part, false, vb.pp(name))
        };
        if linear.is_grouped {
            let [qkvz, ba] = linear.rows_of_group();
            return Ok(Self::Grouped {
                qkvz: of_heads(qkvz, "in_proj_qkvz")?,
                ba: of_heads(ba, "in_proj_ba")?,
            });
        }
        let (channels, vb_qkv) = (linear.channels(), vb.pp("in_proj_qkv"));
        let qkv = match *own == (0..linear.key_heads) {
            true => vec![projection(hidden, channels, false, vb_qkv)?],
            false => {
                // Three runs of rows are no part that an adapter of the module could have: without a module, adding one is
                // an error.
                let part = |rows| {
                    let part = columns_of(hidden, channels, rows, false, vb_qkv.clone())?;
                    Ok(Linear::new(part.weight().clone(), None))
                };
                linear.channels_of(own).into_iter().map(part).collect::<Result<_>>()?
            }
        };
        let shared = linear.shared();
        let others = [
            of_heads(shared * linear.value_dim, "in_proj_z")?,
            of_heads(shared, "in_proj_a")?,
            of_heads(shared, "in_proj_b")?,
        ];
        Ok(Self::Apart { qkv, others })
    }

    /// As plans take them.
    pub fn of_step(&self) -> DeltaNetProjections<'_> {
        match self {
            Self::Grouped { qkvz, ba } => DeltaNetProjections::Grouped { qkvz, ba },
            Self::Apart { qkv, others: [z, a, b] } => DeltaNetProjections::Apart { qkv, z, a, b },
        }
    }

    /// Of `x` `[B, T, hidden]`, for the heads of this rank.
    pub fn project(&self, x: &Tensor, sizes: &DeltaNetConfig) -> Result<Projected> {
        let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = *sizes;
        let (batch, len, _) = x.dims3()?;
        let shared = value_heads / key_heads;
        let parts = |x: &Tensor, sizes: &[usize]| {
            let starts = sizes.iter().scan(0, |next, size| Some(std::mem::replace(next, *next + size)));
            let part = |(start, size): (usize, &usize)| x.narrow(D::Minus1, start, *size)?.contiguous();
            starts.zip(sizes).map(part).collect::<Result<Vec<_>>>()
        };
        let by_heads = |x: Tensor, heads: usize| x.reshape((batch, len, heads, ()));
        match self {
            Self::Grouped { qkvz, ba } => {
                let [qkvz, ba] = forward_all([qkvz, ba], x)?;
                let values = shared * value_dim;
                let of_qkvz = parts(&by_heads(qkvz, key_heads)?, &[key_dim, key_dim, values, values])?;
                let of_ba = parts(&by_heads(ba, key_heads)?, &[shared, shared])?;
                let ([q, k, v, gate], [beta, decay]) = (of_qkvz.as_slice(), of_ba.as_slice()) else {
                    candle_core::bail!("linear attention with other parts than it has")
                };
                let of_values = |x: &Tensor| x.reshape((batch, len, value_heads, value_dim));
                Ok(Projected {
                    q: q.clone(),
                    k: k.clone(),
                    v: of_values(v)?,
                    gate: of_values(gate)?,
                    decay: decay.flatten_from(2)?,
                    beta: beta.flatten_from(2)?,
                })
            }
            Self::Apart { qkv, others: [z, a, b] } => {
                let mut of_qkv = qkv.iter().map(|linear| linear.forward(x)).collect::<Result<Vec<_>>>()?;
                if let [all] = of_qkv.as_slice() {
                    let keys = key_heads * key_dim;
                    of_qkv = parts(all, &[keys, keys, value_heads * value_dim])?;
                }
                let [q, k, v] = of_qkv.as_slice() else {
                    candle_core::bail!("linear attention with other parts than it has")
                };
                let [gate, decay, beta] = forward_all([z, a, b], x)?;
                Ok(Projected {
                    q: by_heads(q.clone(), key_heads)?,
                    k: by_heads(k.clone(), key_heads)?,
                    v: by_heads(v.clone(), value_heads)?,
                    gate: by_heads(gate, value_heads)?,
                    decay,
                    beta,
                })
            }
        }
    }

    pub fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        let linears: Vec<&Linear> = match self {
            Self::Grouped { qkvz, ba } => vec![qkvz, ba],
            Self::Apart { qkv, others } => qkv.iter().chain(others).collect(),
        };
        linears.into_iter().map(|linear| linear.weight().clone())
    }
}
