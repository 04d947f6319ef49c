//! What the positions of a run of tokens do to queries and keys.

use super::{Rope, Rotation};
use crate::config::LayerRope;
use crate::Config;
use candle_core::{DType, Device, Result, Tensor};
use candle_quant::step::{self, QueryGrowth};
use std::ops::Range;

/// How queries and keys turn in the layers of a model.
#[derive(Debug)]
pub(crate) struct Turns {
    all: Turn,
    /// In layers with a window, if they turn otherwise.
    local: Option<Turn>,
    query_growth: Option<QueryGrowth>,
    /// Whether queries grow only in layers in which they do not turn.
    grows_unturned: bool,
}

#[derive(Debug)]
struct Turn {
    rope: Rope,
    /// In short texts, and in long ones.
    inverse_frequencies: [Vec<f32>; 2],
}

impl Turn {
    fn new(rope: &Rope) -> Self {
        let inverse_frequencies = [false, true].map(|is_long| rope.inverse_frequencies(is_long));
        Self { rope: rope.clone(), inverse_frequencies }
    }

    fn rotation(&self, tokens: &Range<usize>, is_long: bool, like: (DType, &Device)) -> Result<Rotation> {
        let [short, long] = &self.inverse_frequencies;
        let frequencies = if is_long { long } else { short };
        let factor = self.rope.attention_factor();
        Rotation::new((frequencies, self.rope.interleaved), factor, tokens.clone(), like)
    }
}

impl Turns {
    pub fn new(config: &Config) -> Self {
        Self {
            all: Turn::new(&config.rope),
            local: config.local_rope.as_ref().map(Turn::new),
            query_growth: config.query_growth,
            grows_unturned: config.grows_unturned,
        }
    }

    /// Those of the tokens at these positions, of a text that is longer than [`short_context`](Self::short_context) or not.
    pub fn at(&self, tokens: &Range<usize>, is_long: bool, like: (DType, &Device)) -> Result<Positions> {
        let growth = |growth: QueryGrowth| {
            let factors: Vec<f32> = tokens.clone().map(|position| growth.factor(position)).collect();
            Tensor::from_vec(factors, (1, tokens.len(), 1, 1), like.1)?.to_dtype(like.0)
        };
        Ok(Positions {
            all: self.all.rotation(tokens, is_long, like)?,
            local: self.local.as_ref().map(|turn| turn.rotation(tokens, is_long, like)).transpose()?,
            query_factors: self.query_growth.map(growth).transpose()?,
            grows_unturned: self.grows_unturned,
        })
    }

    /// The longest text whose keys turn as those of shorter ones, if those of longer ones turn otherwise: cached keys have to
    /// be computed anew when a text exceeds it.
    pub fn short_context(&self) -> Option<usize> {
        self.all.rope.short_context()
    }

    /// What a layer does in a plan.
    pub fn of_step(&self, layer: LayerRope) -> step::Turn {
        let query_growth = self.query_growth.filter(|_| layer == LayerRope::None || !self.grows_unturned);
        let turn = match layer {
            LayerRope::None => return step::Turn { query_growth, ..step::Turn::default() },
            LayerRope::All => &self.all,
            LayerRope::Local => self.local.as_ref().unwrap_or(&self.all),
        };
        let Turn { rope, inverse_frequencies: [short, long] } = turn;
        step::Turn {
            inverse_frequencies: short.clone(),
            of_long_texts: rope.short_context().map(|_| long.clone()),
            interleaved: rope.interleaved,
            factor: rope.attention_factor(),
            query_growth,
        }
    }
}

/// [`Turns`] of a run of tokens.
pub(crate) struct Positions {
    all: Rotation,
    local: Option<Rotation>,
    query_factors: Option<Tensor>,
    /// Whether queries grow only in layers in which they do not turn.
    grows_unturned: bool,
}

impl Positions {
    /// Queries and keys of a layer, `[B, T, heads, head_dim]`, turned by their positions.
    pub fn place(&self, layer: LayerRope, q: Tensor, k: Tensor) -> Result<[Tensor; 2]> {
        let rotation = match layer {
            LayerRope::None => None,
            LayerRope::All => Some(&self.all),
            LayerRope::Local => Some(self.local.as_ref().unwrap_or(&self.all)),
        };
        match rotation {
            None => Ok([q, k]),
            Some(rotation) => Ok([rotation.apply(&q)?, rotation.apply(&k)?]),
        }
    }

    /// Queries of a layer as large as their positions make them.
    pub fn grown(&self, layer: LayerRope, q: Tensor) -> Result<Tensor> {
        match &self.query_factors {
            Some(factors) if layer == LayerRope::None || !self.grows_unturned => q.broadcast_mul(factors),
            _ => Ok(q),
        }
    }
}
