//! Steps against a decoder in f64 that is written out, and against themselves on other threads and in other pieces.

mod experts;
mod kinds;
mod model;

use super::super::team::Crew;
use super::{few, many};
use crate::backend::step::StepToken;
use crate::{KvCache, KvCacheConfig};
use kinds::{kinds, Kind, Norms, Over, QkNorm, Turns, HEAD_DIM, PLAIN};
use model::{Model, KV_HEADS, LAYERS, VOCABULARY};

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
    crate::backend::step::run(&model.plan, model.input(tokens, wanted), &mut lent(caches))
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

#[test]
fn steps_are_those_of_a_decoder_in_f64() {
    let ids = text(90);
    for (name, kind) in kinds() {
        let model = Model::new(kind);
        let expected = model.reference(&ids);

        let mut caches = model.caches();
        let (every, wanted) = (tokens(&ids, 0, 0), all(ids.len()));
        let found = many::run(&model.plan, model.input(&every, &wanted), &mut lent(&mut caches)).unwrap();
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
    for model in [usual, unusual, experts, dense_router].map(Model::new) {
        let after_prompt = |threads: Option<usize>| -> Vec<Vec<u32>> {
            let mut caches = model.caches();
            let (prompt, rest) = ids.split_at(600);
            run(&model, &tokens(prompt, 0, 0), &mut caches, &[]).unwrap();
            // Long enough for several parts of a head.
            [1, 1, 5, 16]
                .iter()
                .scan(0, |first, len| {
                    let (part, wanted) = (tokens(&rest[*first..*first + len], 0, 600 + *first), all(*len));
                    *first += len;
                    let threads = threads.map_or(Crew::Pool, Crew::Own);
                    let input = model.input(&part, &wanted);
                    let logits = few::run(threads, &model.plan, input, &mut lent(&mut caches)).unwrap();
                    Some(logits.into_iter().map(f32::to_bits).collect())
                })
                .collect()
        };
        let alone = after_prompt(Some(1));
        for threads in [Some(2), Some(3), Some(7), None] {
            assert!(after_prompt(threads) == alone, "{threads:?}");
        }
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
