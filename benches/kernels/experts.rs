//! Blocks of experts. The choices of calls are random and balanced, and each call's the experts that were not used
//! for longest: those are not in the second-level cache.

use crate::accuracy;
use crate::contenders::{affine, checked, checked_rows, Contender, Kind, Multiply};
use crate::options::Activations;
use crate::pools::{PackedPools, Pool, Pools};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Activation;
use candle_quant::nn::{ExpertStack, Experts, Gating};
use candle_quant::QuantFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::SeedableRng;
use rayon::prelude::*;
use serde::Deserialize;
use std::ops::Range;

/// What is compared on each block.
pub const KINDS: [Kind; 4] =
    [Kind::Dense, affine(4, 64), Kind::Quantized(QuantFormat::MXFP4), Kind::Quantized(QuantFormat::NVFP4)];

/// Of gpt-oss.
const CLAMPED: Gating = Gating::Clamped { alpha: 1.702, limit: 7. };

/// The experts of one layer of a model.
#[derive(Clone, Copy, Deserialize)]
pub struct Block {
    pub hidden: usize,
    pub inner: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Whether gate and up are joined, and biased, as in gpt-oss.
    #[serde(default)]
    pub clamped: bool,
}

/// The tokens of a call.
#[derive(Clone, Copy, PartialEq)]
pub enum Tokens {
    /// One of each of several sequences.
    Decode(usize),
    /// Of one sequence.
    Prefill(usize),
}

impl Tokens {
    pub fn count(self) -> usize {
        match self {
            Self::Decode(count) | Self::Prefill(count) => count,
        }
    }

    /// The shape of what has `last` numbers for each token.
    pub fn dims(self, last: usize) -> [usize; 3] {
        match self {
            Self::Decode(count) => [count, 1, last],
            Self::Prefill(count) => [1, count, last],
        }
    }
}

impl Block {
    /// Weights of all experts.
    pub fn weights(&self) -> usize {
        3 * self.experts * self.inner * self.hidden
    }

    /// Multiplications of a call.
    pub fn multiplications(&self, tokens: Tokens) -> usize {
        3 * tokens.count() * self.top_k * self.inner * self.hidden
    }

    fn stacks(&self) -> [[usize; 3]; 3] {
        let Self { hidden, inner, experts, .. } = *self;
        [[experts, inner, hidden], [experts, inner, hidden], [experts, hidden, inner]]
    }

    /// Of each of its experts in a token's sum.
    fn weight(&self) -> f32 {
        1. / self.top_k as f32
    }

    fn gating(&self) -> Gating {
        if self.clamped {
            CLAMPED
        } else {
            Gating::Plain(Activation::Silu)
        }
    }

    /// The choices of so many calls that all experts were used before one is again.
    fn choices(&self, tokens: Tokens) -> Vec<Vec<u32>> {
        let pairs = tokens.count() * self.top_k;
        let mut rng = StdRng::seed_from_u64(4);
        let mut deck: Vec<u32> = (0..self.experts as u32).collect();
        deck.shuffle(&mut rng);
        let calls = (self.experts / pairs).max(2);
        let mut dealt = Vec::new();
        while dealt.len() < calls * pairs {
            // Within a call that uses all of them, tokens may well choose in another order.
            if pairs > self.experts {
                deck.shuffle(&mut rng);
            }
            dealt.extend(&deck);
        }
        dealt.chunks_exact(pairs).take(calls).map(<[u32]>::to_vec).collect()
    }

    /// None where there is nothing to compare with.
    pub fn make<'p>(
        &self,
        kind: Kind,
        pools: &'p Pools,
        tokens: Tokens,
        dtype: Activations,
    ) -> Result<Option<Contender<'p>>> {
        match (kind, tokens) {
            (Kind::Quantized(format), _) => self.packed(pools, format, tokens, dtype).map(Some),
            (Kind::Dense, Tokens::Prefill(count)) => self.dense(pools, count * self.top_k, dtype).map(Some),
            _ => Ok(None),
        }
    }

    fn packed<'p>(
        &self,
        pools: &'p Pools,
        format: QuantFormat,
        tokens: Tokens,
        dtype: Activations,
    ) -> Result<Contender<'p>> {
        let device = &pools.gpu.device;
        let choices = self.choices(tokens);
        let [gate, up, down] = self.stacks().map(|dims| pools.packed(format, &dims, dtype));
        let packed = [gate?, up?, down?];
        let biases = if self.clamped { Some(pools.dense(dtype)?) } else { None };
        let mut bytes = 0;
        let mut stack = |which: usize| -> Result<ExpertStack> {
            let weight = packed[which].weight(which)?;
            bytes += weight.size_in_bytes();
            let bias = biases.map(|pool| pool.view(which, &self.stacks()[which][..2])).transpose()?;
            Ok(ExpertStack::from_quant(weight, bias)?)
        };
        let experts = Experts::new(stack(0)?, stack(1)?, stack(2)?, self.gating())?;
        let dims = tokens.dims(self.top_k);
        let routing_weights = Tensor::full(self.weight(), &dims, &Device::Cpu)?.to_device(device)?;
        let copy = |ids: &Vec<u32>| -> Result<Multiply> {
            let ids = Tensor::new(ids.as_slice(), device)?.reshape(&dims)?;
            let (experts, routing_weights) = (experts.clone(), routing_weights.clone());
            Ok(Box::new(move |x: &Tensor| experts.forward(x, &ids, &routing_weights)))
        };
        let copies = choices.iter().map(copy).collect::<Result<_>>()?;
        let chosen = self.experts.min(choices[0].len());
        let of_last = choices[0][choices[0].len() - self.top_k..].to_vec();
        let reference = Reference { block: *self, packed, biases, of_last };
        Ok(Contender {
            name: format.to_string(),
            library: "candle-quant",
            bytes: bytes / self.experts * chosen,
            copies,
            exact: Box::new(move |x| reference.last_token(x)),
        })
    }

    /// As many multiplications in two products: with gate and up as one, and with down. Tensors lie over one
    /// another in the pool, which does not matter to what arithmetic limits.
    fn dense<'p>(&self, pools: &'p Pools, rows: usize, dtype: Activations) -> Result<Contender<'p>> {
        let Self { hidden, inner, .. } = *self;
        let pool = pools.dense(dtype)?;
        let (gate_up, down) = ([2 * inner, hidden], [hidden, inner]);
        let (x, joined) = (pool.view(0, &[rows, hidden])?, pool.view(0, &[rows, inner])?);
        let multiply = |copy| -> Result<Multiply> {
            let (gate_up, down) = (pool.view(copy, &gate_up)?.t()?, pool.view(copy, &down)?.t()?);
            let (x, joined) = (x.clone(), joined.clone());
            Ok(Box::new(move |_| {
                x.matmul(&gate_up)?;
                joined.matmul(&down)
            }))
        };
        let bytes = 3 * hidden * inner * 2;
        let on_host = |dims: [usize; 2], rows| -> Result<Vec<Vec<f32>>> {
            pool.rows(0, &dims, rows)?.to_dtype(DType::F32)?.to_vec2()
        };
        let first = on_host([rows, inner], 0..1)?.remove(0);
        Ok(Contender {
            name: "dense of equal FLOPs".into(),
            library: "cuBLAS",
            bytes,
            copies: (0..pools.copies(bytes)).map(multiply).collect::<Result<_>>()?,
            exact: accuracy::first_row(checked(hidden, |rows| on_host(down, rows))?, first),
        })
    }
}

/// What a call should give.
struct Reference<'p> {
    block: Block,
    /// Gate, up and down; each is the copy of its number.
    packed: [PackedPools<'p>; 3],
    biases: Option<&'p Pool>,
    /// The experts of the last token.
    of_last: Vec<u32>,
}

impl Reference<'_> {
    fn last_token(&self, x: &[Vec<f32>]) -> Result<Vec<(usize, usize, f64)>> {
        let token = x.len() - 1;
        let columns: Vec<Range<usize>> = checked_rows(self.block.hidden);
        let mut sums = vec![0.; columns.iter().map(Range::len).sum()];
        for expert in self.of_last.iter().map(|id| *id as usize) {
            let gate = self.project(0, expert, &x[token], 0..self.block.inner)?;
            let up = self.project(1, expert, &x[token], 0..self.block.inner)?;
            let joined: Vec<f64> = gate.into_iter().zip(up).map(|(gate, up)| self.join(gate, up)).collect();
            let mut sums = sums.iter_mut();
            for rows in &columns {
                for (output, sum) in
                    self.project(2, expert, &joined, rows.clone())?.into_iter().zip(&mut sums)
                {
                    *sum += f64::from(self.block.weight()) * output;
                }
            }
        }
        Ok(columns.into_iter().flatten().zip(sums).map(|(column, sum)| (token, column, sum)).collect())
    }

    /// Some rows of one expert's projection.
    fn project<X: Copy + Into<f64> + Sync>(
        &self,
        which: usize,
        expert: usize,
        x: &[X],
        rows: Range<usize>,
    ) -> Result<Vec<f64>> {
        let [experts, n, _] = self.block.stacks()[which];
        let weights = self.packed[which].decoded(which, expert * n + rows.start..expert * n + rows.end)?;
        let mut products: Vec<f64> = weights.par_iter().map(|row| accuracy::dot(row, x)).collect();
        if let Some(pool) = self.biases {
            let biases = pool.rows(which, &[experts, n], expert..expert + 1)?.to_dtype(DType::F32)?;
            for (product, bias) in products.iter_mut().zip(&biases.to_vec2::<f32>()?[0][rows]) {
                *product += f64::from(*bias);
            }
        }
        Ok(products)
    }

    fn join(&self, gate: f64, up: f64) -> f64 {
        match self.block.gating() {
            Gating::Clamped { alpha, limit } => {
                let gate = gate.min(limit);
                gate / (1. + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.)
            }
            _ => gate / (1. + (-gate).exp()) * up,
        }
    }
}
