//! Linear attention in plans of the tests, and its formulas in f64.

use super::kinds::{numbers, EPS};
use super::model::normed;
use crate::backend::step::{DeltaLanes, DeltaNet, Lane, Norm};
use crate::DeltaNetConfig;
use rand::rngs::StdRng;

/// What differs from plan to plan: the layers but the second one are linear.
#[derive(Clone, Copy)]
pub(super) struct LinearKind {
    /// Whether the two projections are of one head of keys after another.
    pub is_grouped: bool,
    /// Else, whether queries, keys and values have one each.
    pub in_three: bool,
    pub tiled: bool,
    pub kernel: usize,
}

pub(super) const LINEAR: LinearKind =
    LinearKind { is_grouped: false, in_three: false, tiled: false, kernel: 4 };

impl LinearKind {
    pub fn config(&self) -> DeltaNetConfig {
        DeltaNetConfig { key_heads: 2, value_heads: 6, key_dim: 20, value_dim: 32, kernel: self.kernel }
    }

    /// The rows of each projection.
    pub fn rows(&self) -> Vec<usize> {
        // 2 heads of keys, each with 3 of values.
        match (self.is_grouped, self.in_three) {
            (true, _) => vec![2 * (40 + 2 * 96), 2 * 6],
            (false, true) => vec![40, 40, 192, 192, 6, 6],
            (false, false) => vec![272, 192, 6, 6],
        }
    }

    pub fn net(&self, rng: &mut StdRng, layer: usize) -> DeltaNet {
        let config = self.config();
        let rows = self.rows();
        let lane =
            |projection: usize, start, stride| Lane { projection, width: rows[projection], start, stride };
        let [q, k, v, gate, decay, beta] = match (self.is_grouped, self.in_three) {
            (true, _) => [(0, 0), (0, 20), (0, 40), (0, 136), (1, 3), (1, 0)]
                .map(|(projection, start)| lane(projection, start, [232, 6][projection])),
            (false, true) => [(0, 20), (1, 20), (2, 96), (3, 96), (4, 3), (5, 3)]
                .map(|(which, stride)| lane(which, 0, stride)),
            (false, false) => [(0, 0, 20), (0, 40, 20), (0, 80, 96), (1, 0, 96), (2, 0, 3), (3, 0, 3)]
                .map(|(projection, start, stride)| lane(projection, start, stride)),
        };
        DeltaNet {
            config,
            lanes: DeltaLanes { q, k, v, gate, decay, beta },
            convolution: numbers(rng, config.kernel * config.channels(), 0.8),
            rates: numbers(rng, 6, 1.).into_iter().map(|rate| -rate.abs()).collect(),
            gate_bias: numbers(rng, 6, 1.),
            norm: Norm { weight: Some(numbers(rng, 32, 1.)), bias: None, subtracts_mean: false, eps: EPS },
            tiled: self.tiled,
            layer,
        }
    }
}

/// What linear attention makes of all rows of projections.
pub(super) fn mixed(net: &DeltaNet, projected: &[Vec<Vec<f64>>]) -> Vec<Vec<f64>> {
    let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, kernel } = net.config;
    let shared = value_heads / key_heads;
    let silu = |x: f64| x / (1. + (-x).exp());
    let mut out = vec![vec![0.; value_heads * value_dim]; projected.len()];
    for head in 0..value_heads {
        let (key_head, part) = (head / shared, head % shared);
        let of = |lane: Lane, row: usize, index: usize| {
            projected[row][lane.projection][lane.start + key_head * lane.stride + index]
        };
        // One channel of a row, behind the convolution.
        let channel = |lane: Lane, index: usize, channel: usize, row: usize| {
            let tap = |tap: usize| match (row + tap + 1).checked_sub(kernel) {
                Some(row) => {
                    f64::from(net.convolution[tap * net.config.channels() + channel]) * of(lane, row, index)
                }
                None => 0.,
            };
            silu((0..kernel).map(tap).sum())
        };
        let keys = key_heads * key_dim;
        let unit = |lane: Lane, first: usize, row: usize| -> Vec<f64> {
            let x: Vec<f64> =
                (0..key_dim).map(|i| channel(lane, i, first + key_head * key_dim + i, row)).collect();
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x / length).collect()
        };
        let mut state = vec![vec![0.; value_dim]; key_dim];
        for (row, out) in out.iter_mut().enumerate() {
            let (q, k) = (unit(net.lanes.q, 0, row), unit(net.lanes.k, keys, row));
            let value =
                |j: usize| channel(net.lanes.v, part * value_dim + j, 2 * keys + head * value_dim + j, row);
            let decay = of(net.lanes.decay, row, part) + f64::from(net.gate_bias[head]);
            let decay = (f64::from(net.rates[head]) * (1. + decay.exp()).ln()).exp();
            let beta = 1. / (1. + (-of(net.lanes.beta, row, part)).exp());
            let mut y = vec![0.; value_dim];
            for (j, y) in y.iter_mut().enumerate() {
                state.iter_mut().for_each(|state| state[j] *= decay);
                let known: f64 = state.iter().zip(&k).map(|(state, k)| state[j] * k).sum();
                let delta = beta * (value(j) - known);
                for (state, (k, q)) in state.iter_mut().zip(k.iter().zip(&q)) {
                    state[j] += k * delta;
                    *y += q * state[j] / (key_dim as f64).sqrt();
                }
            }
            let place = if net.tiled { part * key_heads + key_head } else { head };
            for (j, y) in normed(&y, Some(&net.norm)).into_iter().enumerate() {
                out[place * value_dim + j] = y * silu(of(net.lanes.gate, row, part * value_dim + j));
            }
        }
    }
    out
}
