//! Steps against a decoder in f64 that is written out, and against themselves on other threads and in other pieces.

mod experts;
mod kinds;
mod linear;
mod model;

use super::super::team::Crew;
use super::{few, many};
use crate::backend::step::StepToken;
use crate::backend::StepCaches;
use crate::{DeltaNetConfig, DeltaNetState, KvCache, KvCacheConfig};
use candle_core::Device;
use kinds::{kinds, Kind, Norms, Over, QkNorm, Turns, HEAD_DIM, PLAIN};
use linear::LINEAR;
use model::{Model, KV_HEADS, LAYERS, VOCABULARY};

fn text(len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| (index * index * 31 + 7) % VOCABULARY as u32).collect()
}

fn tokens(ids: &[u32], sequence: usize, first: usize) -> Vec<StepToken> {
    (first..).zip(ids).map(|(position, &id)| StepToken { id, sequence, position }).collect()
}

/// What the layers of a plan keep.
struct Kept {
    keys: Vec<KvCache>,
    states: Vec<DeltaNetState>,
}

impl Kept {
    fn lent(&mut self) -> StepCaches<'_, KvCache> {
        StepCaches::new(&mut self.keys, &mut self.states)
    }

    /// The tokens of a sequence in each layer.
    fn lens(&self, sequence: usize) -> Vec<usize> {
        let keys = self.keys.iter().map(|cache| cache.len(sequence));
        keys.chain(self.states.iter().map(|state| state.len(sequence))).collect()
    }
}

fn run(
    model: &Model,
    tokens: &[StepToken],
    caches: &mut Kept,
    wanted: &[usize],
) -> candle_core::Result<Vec<f32>> {
    crate::backend::step::run(&model.plan, model.input(tokens, wanted), &mut caches.lent())
}

fn all(len: usize) -> Vec<usize> {
    (0..len).collect()
}

/// The error relative to the spread of the logits: products are within 2e-7, of which linear attention makes up to 2.3e-5.
fn bound(kind: &Kind) -> f64 {
    if kind.linear.is_some() {
        4e-5
    } else {
        1e-5
    }
}

/// Whether logits are as far from those of f64 as [`bound`] says, or nearer.
fn check(found: &[f32], expected: &[Vec<f64>], bound: f64, what: &str) {
    let expected: Vec<f64> = expected.iter().flatten().copied().collect();
    assert_eq!(found.len(), expected.len(), "{what}");
    let spread = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    let worst = found.iter().zip(&expected).map(|(x, y)| (f64::from(*x) - y).abs()).fold(0., f64::max);
    assert!(worst <= bound * spread, "{what}: {worst:e} of {spread}");
}

#[test]
fn steps_are_those_of_a_decoder_in_f64() {
    let ids = text(90);
    for (name, kind) in kinds() {
        let model = Model::new(kind);
        let expected = model.reference(&ids);

        let mut caches = model.caches();
        let (every, wanted) = (tokens(&ids, 0, 0), all(ids.len()));
        let found = many::run(&model.plan, model.input(&every, &wanted), &mut caches.lent()).unwrap();
        check(&found, &expected, bound(&kind), &format!("{name}, at once"));

        let mut caches = model.caches();
        let mut first = 0;
        // One by one and in small pieces.
        for len in [1, 1, 2, 16, 1, 3, 8, 16, 16, 16, 9, 1] {
            let part = &ids[first..first + len];
            let found = run(&model, &tokens(part, 0, first), &mut caches, &all(len)).unwrap();
            let what = format!("{name}, {len} tokens from {first} on");
            check(&found, &expected[first..first + len], bound(&kind), &what);
            first += len;
        }
        assert_eq!(first, ids.len());
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let ids = text(700);
    let qk_norm = |over| Some(QkNorm { over, turns_first: false });
    let usual =
        Kind { sinks: true, qk_norm: qk_norm(Over::Head), window: Some(100), adapters: true, ..PLAIN };
    let unusual = Kind {
        norms: Norms::Layer { bias: true },
        norms_around: (true, true),
        qk_norm: qk_norm(Over::All),
        turns: Turns::Neighbours,
        factors: true,
        ..PLAIN
    };
    let experts = Kind { experts: Some(experts::PLAIN_EXPERTS), ..unusual };
    let dense_router = experts::ExpertKind { packed_router: false, ..experts::PLAIN_EXPERTS };
    let dense_router = Kind { experts: Some(dense_router), ..usual };
    let linear = Kind { linear: Some(LINEAR), has_gates: true, ..PLAIN };
    for model in [usual, unusual, experts, dense_router, linear].map(Model::new) {
        let after_prompt = |threads: Option<(usize, usize)>| -> Vec<Vec<u32>> {
            let mut caches = model.caches();
            let (prompt, rest) = ids.split_at(600);
            run(&model, &tokens(prompt, 0, 0), &mut caches, &[]).unwrap();
            // Long enough for several parts of a head.
            [1, 1, 5, 16]
                .iter()
                .scan(0, |first, len| {
                    let (part, wanted) = (tokens(&rest[*first..*first + len], 0, 600 + *first), all(*len));
                    *first += len;
                    let threads =
                        threads.map_or(Crew::Pool, |(members, nodes)| Crew::OnNodes(members, nodes));
                    let input = model.input(&part, &wanted);
                    let logits = few::run(threads, &model.plan, input, &mut caches.lent()).unwrap();
                    Some(logits.into_iter().map(f32::to_bits).collect())
                })
                .collect()
        };
        let alone = after_prompt(Some((1, 1)));
        for threads in
            [Some((2, 1)), Some((3, 1)), Some((7, 1)), Some((1, 2)), Some((2, 2)), Some((5, 3)), None]
        {
            assert!(after_prompt(threads) == alone, "{threads:?}");
        }
    }
}

#[test]
fn sequences_of_a_batch_do_not_see_each_other() {
    for kind in [Kind { window: Some(70), ..PLAIN }, Kind { linear: Some(LINEAR), has_gates: true, ..PLAIN }]
    {
        texts_of_a_batch(&Model::new(kind), bound(&kind));
    }
}

fn texts_of_a_batch(model: &Model, bound: f64) {
    let texts = [text(40), text(75).split_off(5), text(3)];
    let alone: Vec<_> = texts.iter().map(|ids| model.reference(ids)).collect();
    let mut caches = model.caches();
    // All but the last tokens, of one after another and together.
    let mut before = Vec::new();
    for (sequence, ids) in texts.iter().enumerate() {
        before.extend(tokens(&ids[..ids.len() - 2], sequence, 0));
    }
    run(model, &before, &mut caches, &[]).unwrap();
    for back in [2, 1] {
        let step: Vec<StepToken> = texts
            .iter()
            .enumerate()
            .flat_map(|(sequence, ids)| {
                let position = ids.len() - back;
                tokens(&ids[position..=position], sequence, position)
            })
            .collect();
        let found = run(model, &step, &mut caches, &all(3)).unwrap();
        for ((found, ids), alone) in found.chunks(VOCABULARY).zip(&texts).zip(&alone) {
            let position = ids.len() - back;
            check(found, &alone[position..=position], bound, "a sequence of a batch");
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
            check(some, &[of_row.collect()], bound(&PLAIN), &format!("row {row} of {len}"));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let model = Model::new(PLAIN);
    let small = KvCacheConfig { max_tokens: 4, ..KvCacheConfig::new(KV_HEADS, HEAD_DIM) };
    let caches = |config: KvCacheConfig| Kept {
        keys: (0..LAYERS).map(|_| KvCache::new(config).unwrap()).collect(),
        states: Vec::new(),
    };
    let step = |tokens: &[StepToken], caches: &mut Kept| {
        let before = caches.lens(0);
        let result = run(&model, tokens, caches, &[0]);
        if result.is_err() {
            assert_eq!(before, caches.lens(0));
        }
        result.map_err(|error| error.to_string())
    };
    let mut full = caches(small);
    step(&tokens(&text(3), 0, 0), &mut full).unwrap();
    let mut two_layers = caches(small);
    two_layers.keys.truncate(2);
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
        (step(&tokens(&[1], 0, 0), &mut two_layers), "one for each layer"),
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

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let kind = Kind { linear: Some(LINEAR), ..PLAIN };
    let model = Model::new(kind);
    let mut kept = model.caches();
    run(&model, &tokens(&text(3), 0, 0), &mut kept, &[]).unwrap();
    let refused = |change: &dyn Fn(&mut Kept), expected: &str| {
        let mut other = model.caches();
        run(&model, &tokens(&text(3), 0, 0), &mut other, &[]).unwrap();
        change(&mut other);
        let before = other.lens(0);
        let error = run(&model, &tokens(&[1], 0, 3), &mut other, &[0]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} has no {expected:?}");
        assert_eq!(before, other.lens(0));
    };
    let other = DeltaNetConfig { key_dim: 16, ..LINEAR.config() };
    refused(&|kept| kept.states.truncate(1), "one on the CPU for each layer");
    refused(&|kept| kept.states[1].clear(), "position: expected 0");
    refused(&|kept| kept.states[0] = DeltaNetState::new(other, &Device::Cpu).unwrap(), "key_dim: 20");
    // A text that begins anew does not see the one before.
    let ids = text(5);
    let expected = model.reference(&ids);
    assert!(!kept.states[0].truncate(0, 2) && kept.states.iter_mut().all(|state| state.truncate(0, 0)));
    assert!(kept.keys[0].truncate(0, 0));
    let found = run(&model, &tokens(&ids, 0, 0), &mut kept, &all(5)).unwrap();
    check(&found, &expected, bound(&kind), "a text behind another");
}
