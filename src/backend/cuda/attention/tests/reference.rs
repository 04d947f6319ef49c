//! What a new token of each sequence sees, in f64, from its operands as the launch reads them.

use candle_core::DType;
use half::{bf16, f16};

/// Sequences, each at a position of its own, and what is done with their queries and keys.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    /// Of each sequence; `u32::MAX`: none.
    pub(super) positions: Vec<u32>,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) capacity: usize,
    pub(super) window: Option<usize>,
    pub(super) is_chunked: bool,
    pub(super) norm: Norm,
    pub(super) turns_first: bool,
    pub(super) turn_rows: usize,
    pub(super) pairs: usize,
    pub(super) interleaved: bool,
    pub(super) grows: bool,
    /// Whether each query has a gate behind it.
    pub(super) has_gate: bool,
}

/// Of queries and keys, with other numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Norm {
    None,
    /// Of keys alone, without numbers.
    PlainKeys,
    Rms {
        of_each_head: bool,
    },
    Layer {
        of_each_head: bool,
    },
}

/// Numbers around 0 that depend on `seed` alone.
pub(super) fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (0..6).map(|_| uniform()).sum::<f32>() - 3.).collect()
}

#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that no kernel takes")]
pub(super) fn rounded(x: f64, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f64(x).to_f32(),
        DType::BF16 => bf16::from_f64(x).to_f32(),
        _ => x as f32,
    }
}

/// Which of the two is placed.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Of {
    Queries,
    Keys,
}

/// The numbers that a case has beside queries, keys and values.
pub(super) struct Tables {
    /// Weights and biases of all heads, of queries and of keys.
    pub(super) norms: [[Vec<f32>; 2]; 2],
    /// `[turn_rows][pairs][2]`.
    pub(super) turns: Vec<f32>,
    pub(super) growth: Vec<f32>,
}

pub(super) const EPS: f32 = 0.01;

impl Case {
    pub(super) fn tables(&self) -> Tables {
        let of = |heads: usize, seed| {
            let more = |by: f32, seed| numbers(heads * self.head_dim, seed).into_iter().map(move |x| x + by);
            [more(1.2, seed).collect(), more(-0.1, seed + 1).collect()]
        };
        let turns = (0..self.turn_rows * self.pairs).flat_map(|index| {
            let angle = index as f32 * 0.37;
            [1.1 * angle.cos(), 1.1 * angle.sin()]
        });
        let growth = |position: usize| 1. + (position / 8) as f32 * 0.03;
        Tables {
            norms: [of(self.heads, 71), of(self.kv_heads, 73)],
            turns: turns.collect(),
            growth: (0..self.turn_rows).map(growth).collect(),
        }
    }

    /// Whether a sequence has a new token, and a row for it.
    pub(super) fn is_active(&self, position: u32) -> bool {
        let position = position as usize;
        position < self.capacity && (position < self.turn_rows || (self.pairs == 0 && !self.grows))
    }

    pub(super) fn first_seen(&self, position: usize) -> usize {
        match self.window {
            None => 0,
            Some(window) if self.is_chunked => position / window * window,
            Some(window) => (position + 1).saturating_sub(window),
        }
    }

    /// A head of queries or keys, number `index` of its sequence, as it is multiplied, but for rounding.
    pub(super) fn placed(
        &self,
        of: Of,
        tables: &Tables,
        index: usize,
        position: usize,
        x: &[f32],
    ) -> Vec<f64> {
        let mut x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        if self.turns_first {
            self.turn(tables, position, &mut x);
        }
        self.normalize(of, tables, index, &mut x);
        if !self.turns_first {
            self.turn(tables, position, &mut x);
        }
        if self.grows && of == Of::Queries {
            x.iter_mut().for_each(|x| *x *= f64::from(tables.growth[position]));
        }
        x
    }

    fn turn(&self, tables: &Tables, position: usize, x: &mut [f64]) {
        let before = x.to_vec();
        for pair in 0..self.pairs {
            let at = 2 * (position * self.pairs + pair);
            let [cos, sin] = [at, at + 1].map(|at| f64::from(tables.turns[at]));
            let (a, b) = match self.interleaved {
                true => (before[2 * pair], before[2 * pair + 1]),
                false => (before[pair], before[pair + self.pairs]),
            };
            (x[pair], x[pair + self.pairs]) = (a * cos - b * sin, a * sin + b * cos);
        }
    }

    fn normalize(&self, of: Of, tables: &Tables, index: usize, x: &mut [f64]) {
        let (subtracts_mean, start) = match self.norm {
            Norm::None => return,
            Norm::PlainKeys if of == Of::Queries => return,
            Norm::PlainKeys => (false, None),
            Norm::Rms { of_each_head } => (false, Some(if of_each_head { index } else { 0 })),
            Norm::Layer { of_each_head } => (true, Some(if of_each_head { index } else { 0 })),
        };
        let len = x.len() as f64;
        let mean = if subtracts_mean { x.iter().sum::<f64>() / len } else { 0. };
        let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / len;
        let root = (square + f64::from(EPS)).sqrt();
        let [weight, bias] = &tables.norms[usize::from(of == Of::Keys)];
        for (i, x) in x.iter_mut().enumerate() {
            let at = start.map(|head| head * self.head_dim + i);
            *x = (*x - mean) / root * at.map_or(1., |at| f64::from(weight[at]));
            if subtracts_mean {
                *x += at.map_or(0., |at| f64::from(bias[at]));
            }
        }
    }

    /// What a query head sees of keys and values, which are rows of its head of keys, the new one the last.
    pub(super) fn attended(&self, query: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>]) -> Vec<f64> {
        let dot = |key: &Vec<f64>| key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>();
        let scores: Vec<f64> = keys.iter().map(|key| dot(key) * f64::from(self.scale())).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        let mut sums = vec![0.; self.head_dim];
        for (score, value) in scores.iter().zip(values) {
            let weight = (score - largest).exp() / total;
            sums.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
        }
        sums
    }

    /// So that some keys count more than others.
    pub(super) fn scale(&self) -> f32 {
        1.5 / (self.head_dim as f32).sqrt()
    }
}

/// Root mean square of the difference, relative to the expected.
pub(super) fn relative_error(found: impl Iterator<Item = f32>, expected: &[f64]) -> f64 {
    let difference: f64 = found.zip(expected).map(|(a, e)| (f64::from(a) - e).powi(2)).sum();
    (difference / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
}
