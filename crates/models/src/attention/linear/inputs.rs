//! The projections to queries, keys, values and gates.

use crate::config::LinearAttentionConfig;
use crate::projection::{columns_of, projection};
use candle_core::{Result, Tensor, D};
use candle_nn::Module;
use candle_quant::nn::{forward_all, LayerWeight, Linear, VarBuilder};
use std::ops::Range;

/// The projections, of some heads.
#[derive(Debug)]
pub(super) enum Inputs {
    /// For each head of keys, its queries, keys, values and gates, and what makes `beta` and `decay`.
    Grouped { linear: LinearAttentionConfig, qkvz: Linear, ba: Linear },
    /// One of queries, keys and values, or one each, and one each of the others.
    Apart { qkv: Vec<Linear>, others: [Linear; 3] },
}

/// What is made of hidden states.
pub(super) struct Projected {
    /// Queries, keys and values of all heads, `[B, T, channels]`.
    pub qkv: Tensor,
    /// `[B, T, value_heads * value_dim]`.
    pub gate: Tensor,
    /// `[B, T, value_heads]`, both.
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
            let (qkvz, ba) = (of_heads(qkvz, "in_proj_qkvz")?, of_heads(ba, "in_proj_ba")?);
            // From here on, heads are those of this rank.
            let linear = LinearAttentionConfig {
                key_heads: own.len(),
                value_heads: own.len() * linear.shared(),
                ..linear.clone()
            };
            return Ok(Self::Grouped { linear, qkvz, ba });
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

    pub fn project(&self, x: &Tensor) -> Result<Projected> {
        match self {
            Self::Grouped { linear, qkvz, ba } => {
                let (batch, len, _) = x.dims3()?;
                let [qkvz, ba] = forward_all([qkvz, ba], x)?;
                let heads = linear.key_heads;
                let (keys, values) = linear.elements(1);
                let (qkvz, ba) =
                    (qkvz.reshape((batch, len, heads, ()))?, ba.reshape((batch, len, heads, ()))?);
                let part = |x: &Tensor, start: usize, size: usize| {
                    x.narrow(D::Minus1, start, size)?.contiguous()?.flatten_from(2)
                };
                let qkv = [(0, keys), (keys, keys), (2 * keys, values)];
                let qkv = qkv.map(|(start, size)| part(&qkvz, start, size));
                let [q, k, v] = qkv;
                Ok(Projected {
                    qkv: Tensor::cat(&[q?, k?, v?], D::Minus1)?,
                    gate: part(&qkvz, 2 * keys + values, values)?,
                    beta: part(&ba, 0, linear.shared())?,
                    decay: part(&ba, linear.shared(), linear.shared())?,
                })
            }
            Self::Apart { qkv, others: [z, a, b] } => {
                let qkv = qkv.iter().map(|linear| linear.forward(x)).collect::<Result<Vec<_>>>()?;
                let [gate, decay, beta] = forward_all([z, a, b], x)?;
                Ok(Projected { qkv: Tensor::cat(&qkv, D::Minus1)?, gate, decay, beta })
            }
        }
    }

    pub fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        let linears: Vec<&Linear> = match self {
            Self::Grouped { qkvz, ba, .. } => vec![qkvz, ba],
            Self::Apart { qkv, others } => qkv.iter().chain(others).collect(),
        };
        linears.into_iter().map(|linear| linear.weight().clone())
    }
}
