//! Steps against a decoder in f64 that is written out, and against themselves on other threads and in other pieces.

use super::super::team::Crew;
use super::{few, many};
use crate::backend::low_rank::Update;
use crate::backend::step::{Heads, Node, Norm, Plan, Projection, StepToken};
use crate::{KvCache, KvCacheConfig, QuantFormat, QuantTensor};
use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::sync::Arc;

const HIDDEN: usize = 128;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const INNER: usize = 192;
const VOCABULARY: usize = 80;
const LAYERS: usize = 3;
const EPS: f32 = 1e-5;

/// What differs from plan to plan.
#[derive(Clone, Copy)]
struct Kind {
    format: QuantFormat,
    bias: bool,
    qk_norm: bool,
    sinks: bool,
    /// Of the second layer.
    window: Option<usize>,
    /// Whether some projections have one, others two.
    adapters: bool,
}

/// A plan, and its weights in f64.
struct Model {
    plan: Plan,
    kind: Kind,
    updates: Vec<Vec<Arc<Update>>>,
}

/// Heads of queries, heads of keys, and values of a position.
type Rotated = (Vec<Vec<f64>>, Vec<Vec<f64>>, Vec<f64>);

fn numbers(rng: &mut StdRng, len: usize, size: f32) -> Vec<f32> {
    (0..len).map(|_| (rng.random::<f32>() - 0.5) * 2. * size).collect()
}

impl Model {
    fn new(kind: Kind) -> Self {
        let mut rng = StdRng::seed_from_u64(7);
        let weight = |rng: &mut StdRng, rows: usize, k: usize| {
            let all = numbers(rng, rows * k, 2. / (k as f32).sqrt());
            let tensor = Tensor::from_vec(all, (rows, k), &Device::Cpu).unwrap();
            QuantTensor::quantize(&tensor, kind.format).unwrap()
        };
        let mut updates = Vec::new();
        let mut projection = |rng: &mut StdRng, rows: usize, k: usize| {
            let index = updates.len();
            let count = if kind.adapters { index % 3 } else { 0 };
            updates.push((0..count).map(|which| Arc::new(update(rng, rows, k, which == 1))).collect());
            Projection {
                weight: weight(rng, rows, k),
                bias: kind.bias.then(|| numbers(rng, rows, 0.5)),
                rows,
                k,
                index,
            }
        };
        let norm = |rng: &mut StdRng, len: usize| Norm {
            weight: numbers(rng, len, 0.5).into_iter().map(|x| 1. + x).collect(),
            eps: EPS,
        };
        let mut nodes = vec![Node::Embed(weight(&mut rng, VOCABULARY, HIDDEN))];
        for layer in 0..LAYERS {
            let (queries, keys) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
            let of_layer = [queries, keys, keys].map(|rows| projection(&mut rng, rows, HIDDEN));
            nodes.push(Node::Queries(norm(&mut rng, HIDDEN), of_layer));
            nodes.push(Node::Attend(Heads {
                heads: HEADS,
                kv_heads: KV_HEADS,
                head_dim: HEAD_DIM,
                q_norm: kind.qk_norm.then(|| norm(&mut rng, HEAD_DIM)),
                k_norm: kind.qk_norm.then(|| norm(&mut rng, HEAD_DIM)),
                sinks: kind.sinks.then(|| numbers(&mut rng, HEADS, 2.)),
                layer,
            }));
            nodes.push(Node::AddAttended(projection(&mut rng, HIDDEN, queries)));
            let gate_up = [(); 2].map(|()| projection(&mut rng, INNER, HIDDEN));
            nodes.push(Node::Gate(norm(&mut rng, HIDDEN), gate_up));
            nodes.push(Node::AddInner(projection(&mut rng, HIDDEN, INNER)));
        }
        nodes.push(Node::Logits(norm(&mut rng, HIDDEN), projection(&mut rng, VOCABULARY, HIDDEN)));
        let inverse_frequencies = (0..HEAD_DIM / 2).map(|pair| 0.7f32.powi(pair as i32)).collect();
        let plan = Plan {
            nodes,
            hidden: HIDDEN,
            vocabulary: VOCABULARY,
            inverse_frequencies,
            attention_factor: 1.1,
        };
        Self { plan, kind, updates }
    }

    fn caches(&self) -> Vec<KvCache> {
        let window = |layer| self.kind.window.filter(|_| layer == 1);
        let config =
            |layer| KvCacheConfig { window: window(layer), ..KvCacheConfig::new(KV_HEADS, HEAD_DIM) };
        (0..LAYERS).map(|layer| KvCache::new(config(layer)).unwrap()).collect()
    }

    /// Logits of every token of a text, in f64.
    fn reference(&self, ids: &[u32]) -> Vec<Vec<f64>> {
        let mut hidden: Vec<Vec<f64>> = Vec::new();
        let (mut projected, mut attended, mut inner, mut logits) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for node in &self.plan.nodes {
            match node {
                Node::Embed(table) => {
                    let table = dense(table);
                    hidden = ids.iter().map(|id| table[*id as usize].clone()).collect();
                }
                Node::Queries(norm, projections) => {
                    let x: Vec<_> = hidden.iter().map(|x| normed(x, norm)).collect();
                    let [q, k, v] = projections.each_ref().map(|projection| self.products(projection, &x));
                    projected = q.into_iter().zip(k).zip(v).map(|((q, k), v)| [q, k, v]).collect::<Vec<_>>();
                }
                Node::Attend(heads) => {
                    let rotated: Vec<_> = projected
                        .iter()
                        .enumerate()
                        .map(|(position, [q, k, v])| {
                            let by_head = |x: &[f64], norm: &Option<Norm>| -> Vec<Vec<f64>> {
                                x.chunks(HEAD_DIM)
                                    .map(|head| self.rotated(head, norm.as_ref(), position))
                                    .collect()
                            };
                            (by_head(q, &heads.q_norm), by_head(k, &heads.k_norm), v.clone())
                        })
                        .collect();
                    attended = (0..ids.len())
                        .map(|position| self.attend(heads, &rotated, position))
                        .collect::<Vec<_>>();
                }
                Node::AddAttended(projection) => self.add(&mut hidden, projection, &attended),
                Node::Gate(norm, [gate, up]) => {
                    let x: Vec<_> = hidden.iter().map(|x| normed(x, norm)).collect();
                    inner = self.products(gate, &x);
                    for (gate, up) in
                        inner.iter_mut().flatten().zip(self.products(up, &x).into_iter().flatten())
                    {
                        *gate = *gate / (1. + (-*gate).exp()) * up;
                    }
                }
                Node::AddInner(projection) => self.add(&mut hidden, projection, &inner),
                Node::Logits(norm, head) => {
                    logits = self.products(head, &hidden.iter().map(|x| normed(x, norm)).collect::<Vec<_>>());
                }
            }
        }
        logits
    }

    fn rotated(&self, head: &[f64], norm: Option<&Norm>, position: usize) -> Vec<f64> {
        let head = norm.map_or(head.to_vec(), |norm| normed(head, norm));
        let half = HEAD_DIM / 2;
        let factor = f64::from(self.plan.attention_factor);
        (0..HEAD_DIM)
            .map(|index| {
                let angle = f64::from(position as f32 * self.plan.inverse_frequencies[index % half]);
                let (sin, cos) = angle.sin_cos();
                match index < half {
                    true => factor * (head[index] * cos - head[index + half] * sin),
                    false => factor * (head[index - half] * sin + head[index] * cos),
                }
            })
            .collect()
    }

    /// Outputs for each row of x.
    fn products(&self, projection: &Projection, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let weight = dense(&projection.weight);
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

    fn add(&self, hidden: &mut [Vec<f64>], projection: &Projection, x: &[Vec<f64>]) {
        let sums = self.products(projection, x);
        hidden.iter_mut().flatten().zip(sums.into_iter().flatten()).for_each(|(hidden, sum)| *hidden += sum);
    }

    /// What the heads of a position see.
    fn attend(&self, heads: &Heads, rotated: &[Rotated], position: usize) -> Vec<f64> {
        let window = self.kind.window.filter(|_| heads.layer == 1).unwrap_or(usize::MAX);
        let seen = (position + 1).saturating_sub(window)..position + 1;
        (0..HEADS)
            .flat_map(|head| {
                let kv_head = head / (HEADS / KV_HEADS);
                let score = |key: usize| {
                    let products = rotated[position].0[head].iter().zip(&rotated[key].1[kv_head]);
                    products.map(|(q, k)| q * k).sum::<f64>() / (HEAD_DIM as f64).sqrt()
                };
                let weights: Vec<f64> = seen.clone().map(|key| score(key).exp()).collect();
                let sink = heads.sinks.as_ref().map_or(0., |sinks| f64::from(sinks[head]).exp());
                let total = weights.iter().sum::<f64>() + sink;
                let first = seen.start;
                (0..HEAD_DIM)
                    .map(move |index| {
                        let values = weights.iter().enumerate();
                        values
                            .map(|(key, weight)| weight * rotated[first + key].2[kv_head * HEAD_DIM + index])
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

fn dense(weight: &QuantTensor) -> Vec<Vec<f64>> {
    weight.dequantize(DType::F32).unwrap().to_dtype(DType::F64).unwrap().to_vec2().unwrap()
}

fn normed(x: &[f64], norm: &Norm) -> Vec<f64> {
    let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt();
    x.iter().zip(&norm.weight).map(|(x, weight)| x / rms * f64::from(*weight)).collect()
}

fn text(len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| (index * index * 31 + 7) % VOCABULARY as u32).collect()
}

fn tokens(ids: &[u32], sequence: usize, first: usize) -> Vec<StepToken> {
    (first..).zip(ids).map(|(position, &id)| StepToken { id, sequence, position }).collect()
}

fn lent(caches: &mut [KvCache]) -> Vec<&mut KvCache> {
    caches.iter_mut().collect()
}

fn run(
    model: &Model,
    tokens: &[StepToken],
    caches: &mut [KvCache],
    wanted: &[usize],
) -> candle_core::Result<Vec<f32>> {
    crate::backend::step::run(&model.plan, &model.updates, tokens, &mut lent(caches), wanted)
}

fn all(len: usize) -> Vec<usize> {
    (0..len).collect()
}

/// The error relative to the spread of the logits.
fn check(found: &[f32], expected: &[Vec<f64>], what: &str) {
    let expected: Vec<f64> = expected.iter().flatten().copied().collect();
    assert_eq!(found.len(), expected.len(), "{what}");
    let spread = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    let worst = found.iter().zip(&expected).map(|(x, y)| (f64::from(*x) - y).abs()).fold(0., f64::max);
    assert!(worst <= 1e-5 * spread, "{what}: {worst:e} of {spread}");
}

const PLAIN: Kind = Kind {
    format: QuantFormat::affine_opt(4, 64).unwrap(),
    bias: false,
    qk_norm: false,
    sinks: false,
    window: None,
    adapters: false,
};

fn kinds() -> Vec<(&'static str, Kind)> {
    vec![
        ("plain", PLAIN),
        ("biases and norms", Kind { bias: true, qk_norm: true, ..PLAIN }),
        ("sinks and a window", Kind { sinks: true, window: Some(70), ..PLAIN }),
        ("mxfp8", Kind { format: QuantFormat::MXFP8, qk_norm: true, ..PLAIN }),
        ("adapters", Kind { bias: true, adapters: true, ..PLAIN }),
        ("8 bits", Kind { format: QuantFormat::affine_opt(8, 32).unwrap(), ..PLAIN }),
    ]
}

#[test]
fn steps_are_those_of_a_decoder_in_f64() {
    let ids = text(90);
    for (name, kind) in kinds() {
        let model = Model::new(kind);
        let expected = model.reference(&ids);

        let mut caches = model.caches();
        let found = many::run(
            &model.plan,
            &model.updates,
            &tokens(&ids, 0, 0),
            &mut lent(&mut caches),
            &all(ids.len()),
        )
        .unwrap();
        check(&found, &expected, &format!("{name}, at once"));

        let mut caches = model.caches();
        let mut first = 0;
        // One by one and in small pieces.
        for len in [1, 1, 2, 16, 1, 3, 8, 16, 16, 16, 9, 1] {
            let part = &ids[first..first + len];
            let found = run(&model, &tokens(part, 0, first), &mut caches, &all(len)).unwrap();
            check(&found, &expected[first..first + len], &format!("{name}, {len} tokens from {first} on"));
            first += len;
        }
        assert_eq!(first, ids.len());
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let ids = text(700);
    let model = Model::new(Kind { sinks: true, qk_norm: true, window: Some(100), adapters: true, ..PLAIN });
    let after_prompt = |threads: Option<usize>| -> Vec<Vec<u32>> {
        let mut caches = model.caches();
        let (prompt, rest) = ids.split_at(600);
        run(&model, &tokens(prompt, 0, 0), &mut caches, &[]).unwrap();
        // Long enough for several parts of a head.
        [1, 1, 5, 16]
            .iter()
            .scan(0, |first, len| {
                let part = tokens(&rest[*first..*first + len], 0, 600 + *first);
                *first += len;
                let threads = threads.map_or(Crew::Pool, Crew::Own);
                let logits =
                    few::run(threads, &model.plan, &model.updates, &part, &mut lent(&mut caches), &all(*len))
                        .unwrap();
                Some(logits.into_iter().map(f32::to_bits).collect())
            })
            .collect()
    };
    let alone = after_prompt(Some(1));
    for threads in [Some(2), Some(3), Some(7), None] {
        assert!(after_prompt(threads) == alone, "{threads:?}");
    }
}

#[test]
fn sequences_of_a_batch_do_not_see_each_other() {
    let model = Model::new(Kind { window: Some(70), ..PLAIN });
    let texts = [text(40), text(75).split_off(5), text(3)];
    let alone: Vec<_> = texts.iter().map(|ids| model.reference(ids)).collect();
    let mut caches = model.caches();
    // All but the last tokens, of one after another and together.
    let mut before = Vec::new();
    for (sequence, ids) in texts.iter().enumerate() {
        before.extend(tokens(&ids[..ids.len() - 2], sequence, 0));
    }
    run(&model, &before, &mut caches, &[]).unwrap();
    for back in [2, 1] {
        let step: Vec<StepToken> = texts
            .iter()
            .enumerate()
            .flat_map(|(sequence, ids)| {
                let position = ids.len() - back;
                tokens(&ids[position..=position], sequence, position)
            })
            .collect();
        let found = run(&model, &step, &mut caches, &all(3)).unwrap();
        for ((found, ids), alone) in found.chunks(VOCABULARY).zip(&texts).zip(&alone) {
            let position = ids.len() - back;
            check(found, &alone[position..=position], "a sequence of a batch");
        }
    }
}

#[test]
fn only_wanted_rows_have_logits() {
    let model = Model::new(PLAIN);
    for len in [5, 600] {
        let ids = text(len);
        let every = run(&model, &tokens(&ids, 0, 0), &mut model.caches(), &all(len)).unwrap();
        let wanted = [0, len / 2, len - 1];
        let some = run(&model, &tokens(&ids, 0, 0), &mut model.caches(), &wanted).unwrap();
        for (row, some) in wanted.iter().zip(some.chunks(VOCABULARY)) {
            let of_row =
                every[row * VOCABULARY..(row + 1) * VOCABULARY].iter().map(|logit| f64::from(*logit));
            check(some, &[of_row.collect()], &format!("row {row} of {len}"));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let model = Model::new(PLAIN);
    let small = KvCacheConfig { max_tokens: 4, ..KvCacheConfig::new(KV_HEADS, HEAD_DIM) };
    let caches = |config: KvCacheConfig| -> Vec<KvCache> {
        (0..LAYERS).map(|_| KvCache::new(config).unwrap()).collect()
    };
    let step = |tokens: &[StepToken], caches: &mut [KvCache]| {
        let before: Vec<usize> = caches.iter().map(|cache| cache.len(0)).collect();
        let result = run(&model, tokens, caches, &[0]);
        if result.is_err() {
            let after: Vec<usize> = caches.iter().map(|cache| cache.len(0)).collect();
            assert_eq!(before, after);
        }
        result.map_err(|error| error.to_string())
    };
    let mut full = caches(small);
    step(&tokens(&text(3), 0, 0), &mut full).unwrap();
    let cases = [
        (step(&tokens(&text(2), 0, 3), &mut full), "5 tokens"),
        (step(&tokens(&text(1), 0, 4), &mut full), "position: expected 3"),
        (step(&tokens(&[VOCABULARY as u32], 0, 3), &mut full), "each below 80"),
        (step(&[], &mut full), "at least one"),
        (step(&[tokens(&[1], 0, 3), tokens(&[1], 0, 5)].concat(), &mut full), "position: expected 4"),
        (
            step(&[tokens(&[1], 0, 3), tokens(&[1], 1, 0), tokens(&[1], 0, 4)].concat(), &mut full),
            "sequence 0 twice",
        ),
        (step(&tokens(&[1], 0, 0), &mut caches(KvCacheConfig::new(1, HEAD_DIM))), "2 heads of 32"),
        (
            step(&tokens(&[1], usize::MAX, 0), &mut caches(KvCacheConfig::new(KV_HEADS, HEAD_DIM))),
            "below 65536",
        ),
        (step(&tokens(&[1], 0, 0), &mut caches(small)[..2]), "one for each layer"),
    ];
    for (result, expected) in cases {
        let error = result.unwrap_err();
        assert!(error.contains(expected), "{error:?} has no {expected:?}");
    }
    step(&tokens(&text(1), 0, 3), &mut full).unwrap();

    // Logits in another order than asked for would be wrong numbers.
    for wanted in [[1, 0], [1, 1]] {
        let refused = run(&model, &tokens(&text(2), 0, 0), &mut model.caches(), &wanted);
        assert!(refused.unwrap_err().to_string().contains("ascending"), "{wanted:?}");
    }
}
