//! Plans of random weights, and the same decoder in f64, written out.

use super::experts::{of_dense, of_experts, Shared, EXPERTS, SHARED_INNER};
use super::kinds::{numbers, Kind, Turns, EPS, HEAD_DIM};
use super::linear::{mixed, LinearKind};
use super::Kept;
use crate::backend::low_rank::Update;
use crate::backend::step::StepToken;
use crate::backend::step::{
    Activation, HeadNorm, Heads, Input, Matrix, Node, Norm, Out, Plan, Projection, Router, Turn,
};
use crate::{DeltaNetState, KvCache, KvCacheConfig, QuantTensor};
use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::SeedableRng;
use std::cell::Cell;
use std::sync::Arc;

const HIDDEN: usize = 128;
const HEADS: usize = 6;
pub(super) const KV_HEADS: usize = 2;
const INNER: usize = 192;
pub(super) const VOCABULARY: usize = 80;
pub(super) const LAYERS: usize = 3;

/// A plan, and its weights in f64.
pub(super) struct Model {
    pub plan: Plan,
    kind: Kind,
    updates: Vec<Vec<Arc<Update>>>,
}

/// Heads of queries, heads of keys, and values of a position.
type Placed = (Vec<Vec<f64>>, Vec<Vec<f64>>, Vec<f64>);

impl Model {
    pub fn new(kind: Kind) -> Self {
        let mut rng = StdRng::seed_from_u64(7);
        let count = Cell::new(0);
        let weight = |rng: &mut StdRng, rows: usize, k: usize| {
            let all = numbers(rng, rows * k, 2. / (k as f32).sqrt());
            let tensor = Tensor::from_vec(all, (rows, k), &Device::Cpu).unwrap();
            count.set(count.get() + 1);
            match kind.dense.filter(|_| count.get() % 2 == 1) {
                Some(dtype) => Matrix::Dense(tensor.to_dtype(dtype).unwrap()),
                None => Matrix::Packed(QuantTensor::quantize(&tensor, kind.format).unwrap()),
            }
        };
        let mut updates = Vec::new();
        let mut projection = |rng: &mut StdRng, rows: usize, k: usize| {
            let index = updates.len();
            let count = if kind.adapters { index % 3 } else { 0 };
            updates.push((0..count).map(|which| Arc::new(update(rng, rows, k, which == 1))).collect());
            Projection {
                columns: None,
                weight: weight(rng, rows, k),
                bias: kind.bias.then(|| numbers(rng, rows, 0.5)),
                rows,
                k,
                index,
            }
        };
        let (before, behind) = kind.norms_around;
        let norm = |rng: &mut StdRng| before.then(|| kind.norm(rng, HIDDEN));
        let out = |rng: &mut StdRng| Out {
            is_part: false,
            norm: behind.then(|| kind.norm(rng, HIDDEN)),
            scale: kind.factor(0.4),
        };
        let table = weight(&mut rng, VOCABULARY, HIDDEN);
        let mut nodes = vec![Node::Embed { table, factor: kind.factor(3.), first_token: None }];
        for layer in 0..LAYERS {
            let (queries, keys) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
            let linear = kind.linear.filter(|_| layer != 1);
            let of_layer = linear.map(|linear| linear.rows());
            let with_gates = if kind.has_gates { 2 * queries } else { queries };
            let of_layer = of_layer.unwrap_or(vec![with_gates, keys, keys]);
            let of_layer = of_layer.into_iter().map(|rows| projection(&mut rng, rows, HIDDEN)).collect();
            nodes.push(Node::Project(norm(&mut rng), of_layer, kind.limit(1.5)));
            nodes.push(match linear {
                Some(linear) => Node::DeltaNet(Box::new(linear.net(&mut rng, layer / 2))),
                None => Node::Attend(Heads {
                    heads: HEADS,
                    kv_heads: KV_HEADS,
                    head_dim: HEAD_DIM,
                    q_norm: kind.head_norm(&mut rng, HEADS),
                    k_norm: kind.head_norm(&mut rng, KV_HEADS),
                    has_gate: kind.has_gates,
                    turns_first: kind.qk_norm.is_some_and(|norm| norm.turns_first),
                    turn: layer,
                    scale: kind.factor(0.7) / (HEAD_DIM as f32).sqrt(),
                    softcap: kind.limit(1.2),
                    sinks: kind.sinks.then(|| numbers(&mut rng, HEADS, 2.)),
                    layer: if kind.linear.is_some() { 0 } else { layer },
                }),
            });
            let add = Node::AddAttended(projection(&mut rng, HIDDEN, queries), out(&mut rng));
            // The first layer is dense.
            if let Some(experts) = kind.experts.filter(|_| layer > 0) {
                nodes.push(add);
                let dense = (experts.shared != Shared::None).then(|| {
                    let [gate, up] = [(); 2].map(|()| projection(&mut rng, SHARED_INNER, HIDDEN));
                    (gate, up, projection(&mut rng, HIDDEN, SHARED_INNER))
                });
                let router = projection(&mut rng, EXPERTS, HIDDEN);
                let gate = (experts.shared == Shared::Gated).then(|| projection(&mut rng, 1, HIDDEN));
                let seen = norm(&mut rng);
                let parts = (seen.clone(), (router, gate), out(&mut rng));
                let block = Node::Experts(Box::new(experts.block(&mut rng, kind.format, HIDDEN, parts)));
                match dense {
                    None => nodes.push(block),
                    Some((gate, up, down)) => nodes.extend([
                        Node::Inner { norm: seen, gate: Some(gate), up, activation: kind.activation },
                        block,
                        Node::AddInner(down, out(&mut rng)),
                    ]),
                }
                continue;
            }
            let gate = kind.gate.then(|| projection(&mut rng, INNER, HIDDEN));
            let (up, activation) = (projection(&mut rng, INNER, HIDDEN), kind.activation);
            let inner = Node::Inner { norm: norm(&mut rng), gate, up, activation };
            nodes.extend(if kind.parallel { [inner, add] } else { [add, inner] });
            nodes.push(Node::AddInner(projection(&mut rng, HIDDEN, INNER), out(&mut rng)));
        }
        nodes.push(Node::Logits {
            norm: Some(kind.norm(&mut rng, HIDDEN)),
            head: projection(&mut rng, VOCABULARY, HIDDEN),
            scale: kind.factor(1.7),
            softcap: kind.limit(2.5),
            parts: None,
        });
        let turns = (0..LAYERS).map(|layer| kind.turn(layer)).collect();
        let plan = Plan { nodes, hidden: HIDDEN, vocabulary: VOCABULARY, turns, rank: None };
        Self { plan, kind, updates }
    }

    pub fn input<'a>(&'a self, tokens: &'a [StepToken], wanted: &'a [usize]) -> Input<'a> {
        Input { tokens, wanted, updates: &self.updates, is_long: self.kind.turns == Turns::Long }
    }

    pub fn caches(&self) -> Kept {
        let window = |layer| self.kind.window.filter(|_| layer == 1);
        let config =
            |layer| KvCacheConfig { window: window(layer), ..KvCacheConfig::new(KV_HEADS, HEAD_DIM) };
        let (layers, linear) = if self.kind.linear.is_some() { (1, 2) } else { (LAYERS, 0) };
        let state = |kind: LinearKind| DeltaNetState::new(kind.config(), &Device::Cpu).unwrap();
        Kept {
            keys: (0..layers).map(|layer| KvCache::new(config(layer)).unwrap()).collect(),
            states: (0..linear).filter_map(|_| self.kind.linear.map(state)).collect(),
        }
    }

    /// Logits of every token of a text, in f64.
    pub fn reference(&self, ids: &[u32]) -> Vec<Vec<f64>> {
        let mut hidden: Vec<Vec<f64>> = Vec::new();
        let (mut projected, mut attended, mut inner, mut logits) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for node in &self.plan.nodes {
            match node {
                Node::Embed { table, factor: scale, .. } => {
                    let table = numbers_of(table);
                    let row = |id: &u32| table[*id as usize].iter().map(|x| x * f64::from(*scale)).collect();
                    hidden = ids.iter().map(row).collect();
                }
                Node::Project(norm, projections, clip) => {
                    let x: Vec<_> = hidden.iter().map(|x| normed(x, norm.as_ref())).collect();
                    let made = projections.iter().map(|projection| {
                        let mut y = self.products(projection, &x);
                        if let Some(clip) = clip.map(f64::from) {
                            y.iter_mut().flatten().for_each(|y| *y = y.clamp(-clip, clip));
                        }
                        y
                    });
                    let made: Vec<_> = made.collect();
                    let of_row = |row: usize| made.iter().map(|made| made[row].clone()).collect();
                    projected = (0..ids.len()).map(of_row).collect::<Vec<Vec<Vec<f64>>>>();
                }
                Node::DeltaNet(net) => attended = mixed(net, &projected),
                Node::Attend(heads) => {
                    let gated = |(index, x): (usize, f64), gates: &[f64]| {
                        let gate = gates[index / HEAD_DIM * 2 * HEAD_DIM + HEAD_DIM + index % HEAD_DIM];
                        x / (1. + (-gate).exp())
                    };
                    let place = |(position, projected): (usize, &Vec<Vec<f64>>)| {
                        let [q, k, v] = projected.as_slice() else { panic!("queries, keys and values") };
                        // A query, then its gate.
                        let queries = q.chunks(heads.query_stride()).flat_map(|both| &both[..HEAD_DIM]);
                        let q = &queries.copied().collect::<Vec<_>>();
                        let mut q = self.placed(heads, q, heads.q_norm.as_ref(), position);
                        if let Some(growth) = self.plan.turns[heads.turn].query_growth {
                            let factor = 1.
                                + growth.beta
                                    * (1. + ((position + growth.first) / growth.period) as f64).ln();
                            q.iter_mut().flatten().for_each(|q| *q *= factor);
                        }
                        (q, self.placed(heads, k, heads.k_norm.as_ref(), position), v.clone())
                    };
                    let placed: Vec<_> = projected.iter().enumerate().map(place).collect();
                    let attend = |position: usize| {
                        let mut attended = self.attend(heads, &placed, position);
                        if heads.has_gate {
                            for (index, x) in attended.iter_mut().enumerate() {
                                *x = gated((index, *x), &projected[position][0]);
                            }
                        }
                        attended
                    };
                    attended = (0..ids.len()).map(attend).collect::<Vec<_>>();
                }
                Node::AddAttended(projection, out) => self.add(&mut hidden, projection, &attended, out),
                Node::Inner { norm, gate, up, activation } => {
                    let x: Vec<_> = hidden.iter().map(|x| normed(x, norm.as_ref())).collect();
                    inner = self.products(gate.as_ref().unwrap_or(up), &x);
                    inner.iter_mut().flatten().for_each(|x| *x = activated(*activation, *x));
                    if gate.is_some() {
                        let ups = self.products(up, &x);
                        inner
                            .iter_mut()
                            .flatten()
                            .zip(ups.into_iter().flatten())
                            .for_each(|(x, up)| *x *= up);
                    }
                }
                Node::AddInner(projection, out) => self.add(&mut hidden, projection, &inner, out),
                Node::Experts(block) => {
                    for (row, hidden) in hidden.iter_mut().enumerate() {
                        let x = normed(hidden, block.norm.as_ref());
                        let logits = |router: &Router| match router {
                            Router::Packed(router) => {
                                self.products(router, std::slice::from_ref(&x)).remove(0)
                            }
                            Router::Dense { weight, bias } => of_dense(weight, bias.as_deref(), &x),
                        };
                        let output = of_experts(block, hidden, &logits(&block.router));
                        hidden.iter_mut().zip(output).for_each(|(hidden, y)| *hidden += y);
                        if let Some(gate) = &block.shared_gate {
                            let share = 1. / (1. + (-logits(&gate.router)[0]).exp());
                            inner[row].iter_mut().for_each(|inner| *inner *= share);
                        }
                    }
                }
                Node::Logits { norm, head, scale, softcap, .. } => {
                    let x: Vec<_> = hidden.iter().map(|x| normed(x, norm.as_ref())).collect();
                    logits = self.products(head, &x);
                    logits.iter_mut().flatten().for_each(|y| *y = capped(*y * f64::from(*scale), *softcap));
                }
            }
        }
        logits
    }

    /// Heads of queries or keys.
    fn placed(&self, heads: &Heads, x: &[f64], norm: Option<&HeadNorm>, position: usize) -> Vec<Vec<f64>> {
        let turn = &self.plan.turns[heads.turn];
        let x = match norm.filter(|norm| norm.over_all) {
            Some(norm) => normed(x, Some(&norm.norm)),
            None => x.to_vec(),
        };
        let of_head = |(index, head): (usize, &[f64])| {
            let own_norm = |head: &[f64]| match norm.filter(|norm| !norm.over_all).map(|norm| &norm.norm) {
                None => head.to_vec(),
                Some(norm) => {
                    let own = |numbers: &Vec<f32>| match numbers.len() == HEAD_DIM {
                        true => numbers.clone(),
                        false => numbers[index * HEAD_DIM..][..HEAD_DIM].to_vec(),
                    };
                    let (weight, bias) = (norm.weight.as_ref().map(own), norm.bias.as_ref().map(own));
                    normed(head, Some(&Norm { weight, bias, ..*norm }))
                }
            };
            match heads.turns_first {
                true => own_norm(&self.turned(turn, head, position)),
                false => self.turned(turn, &own_norm(head), position),
            }
        };
        x.chunks(HEAD_DIM).enumerate().map(of_head).collect()
    }

    /// Pairs stay where they are: products of queries and keys are the same.
    fn turned(&self, turn: &Turn, head: &[f64], position: usize) -> Vec<f64> {
        let frequencies = match &turn.of_long_texts {
            Some(frequencies) => frequencies,
            None => &turn.inverse_frequencies,
        };
        let mut turned = head.to_vec();
        for (pair, frequency) in frequencies.iter().enumerate() {
            let (a, b) = match turn.interleaved {
                true => (2 * pair, 2 * pair + 1),
                false => (pair, pair + frequencies.len()),
            };
            let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
            let factor = f64::from(turn.factor);
            turned[a] = factor * (head[a] * cos - head[b] * sin);
            turned[b] = factor * (head[a] * sin + head[b] * cos);
        }
        turned
    }

    /// Outputs for each row of x.
    fn products(&self, projection: &Projection, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let weight = numbers_of(&projection.weight);
        let bias = |row| projection.bias.as_ref().map_or(0., |bias| f64::from(bias[row]));
        let dot = |a: &[f32], x: &[f64]| a.iter().zip(x).map(|(a, x)| f64::from(*a) * x).sum::<f64>();
        let product = |x: &Vec<f64>| {
            let output = |(row, w): (usize, &Vec<f64>)| {
                let mut y = w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
                for update in &self.updates[projection.index] {
                    let inner: Vec<f64> = update.a.chunks(projection.k).map(|a| dot(a, x)).collect();
                    y += f64::from(update.scale) * dot(&update.b[row * update.rank..][..update.rank], &inner);
                    y *= update.rescale.as_ref().map_or(1., |rescale| f64::from(rescale[row]));
                }
                y + bias(row)
            };
            weight.iter().enumerate().map(output).collect()
        };
        x.iter().map(product).collect()
    }

    fn add(&self, hidden: &mut [Vec<f64>], projection: &Projection, x: &[Vec<f64>], out: &Out) {
        let output = self.products(projection, x);
        for (hidden, output) in hidden.iter_mut().zip(output) {
            let output = normed(&output, out.norm.as_ref());
            hidden.iter_mut().zip(output).for_each(|(hidden, y)| *hidden += y * f64::from(out.scale));
        }
    }

    /// What the heads of a position see.
    fn attend(&self, heads: &Heads, placed: &[Placed], position: usize) -> Vec<f64> {
        let window = self.kind.window.filter(|_| heads.layer == 1).unwrap_or(usize::MAX);
        let seen = (position + 1).saturating_sub(window)..position + 1;
        (0..HEADS)
            .flat_map(|head| {
                let kv_head = head / (HEADS / KV_HEADS);
                let score = |key: usize| {
                    let products = placed[position].0[head].iter().zip(&placed[key].1[kv_head]);
                    let product = products.map(|(q, k)| q * k).sum::<f64>();
                    capped(product * f64::from(heads.scale), heads.softcap)
                };
                let weights: Vec<f64> = seen.clone().map(|key| score(key).exp()).collect();
                let sink = heads.sinks.as_ref().map_or(0., |sinks| f64::from(sinks[head]).exp());
                let total = weights.iter().sum::<f64>() + sink;
                let first = seen.start;
                (0..HEAD_DIM)
                    .map(move |index| {
                        let values = weights.iter().enumerate();
                        values
                            .map(|(key, weight)| weight * placed[first + key].2[kv_head * HEAD_DIM + index])
                            .sum::<f64>()
                            / total
                    })
                    .collect::<Vec<_>>()
            })
            .collect()
    }
}

/// Of rank 3, with or without DoRA's factors.
fn update(rng: &mut StdRng, rows: usize, k: usize, is_dora: bool) -> Update {
    let (a, b) = (numbers(rng, 3 * k, 0.2), numbers(rng, 3 * rows, 0.3));
    let rescale = is_dora.then(|| numbers(rng, rows, 0.4).into_iter().map(|factor| 1. + factor).collect());
    Update { a, b, rank: 3, k, n: rows, scale: 0.7, rescale }
}

fn numbers_of(weight: &Matrix) -> Vec<Vec<f64>> {
    match weight {
        Matrix::Packed(weight) => dense(weight),
        Matrix::Dense(weight) => weight.to_dtype(DType::F64).unwrap().to_vec2().unwrap(),
    }
}

pub(super) fn dense(weight: &QuantTensor) -> Vec<Vec<f64>> {
    weight.dequantize(DType::F32).unwrap().to_dtype(DType::F64).unwrap().to_vec2().unwrap()
}

pub(super) fn normed(x: &[f64], norm: Option<&Norm>) -> Vec<f64> {
    let Some(norm) = norm else { return x.to_vec() };
    let len = x.len() as f64;
    let mean = if norm.subtracts_mean { x.iter().sum::<f64>() / len } else { 0. };
    let length = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / len + f64::from(EPS)).sqrt();
    let number =
        |numbers: &Option<Vec<f32>>, index: usize| numbers.as_ref().map(|numbers| f64::from(numbers[index]));
    let of = |(index, x): (usize, &f64)| {
        (x - mean) / length * number(&norm.weight, index).unwrap_or(1.)
            + number(&norm.bias, index).unwrap_or(0.)
    };
    x.iter().enumerate().map(of).collect()
}

pub(super) fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1. + (-x).exp()),
        Activation::Gelu => {
            0.5 * x * (1. + candle_core::cpu::erf::erf_f64(x * std::f64::consts::FRAC_1_SQRT_2))
        }
        Activation::GeluTanh => {
            let y = (2. / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1. + y.tanh())
        }
        Activation::Relu2 => x.max(0.).powi(2),
    }
}

fn capped(x: f64, cap: Option<f32>) -> f64 {
    cap.map(f64::from).map_or(x, |cap| cap * (x / cap).tanh())
}
