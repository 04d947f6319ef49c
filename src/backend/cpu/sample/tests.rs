//! Which tokens are drawn, and how often.

use super::*;
use crate::backend::{sample, SampleOptions};
use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::cmp::Reverse;

fn options(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> SampleOptions {
    SampleOptions { temperature, top_k, top_p, min_p: None }
}

/// A token, and the memory in which it was drawn.
fn drawn_in(logits: &[f32], options: &SampleOptions, seed: u64, step: u64) -> (Option<u32>, Scratch) {
    let mut scratch = Scratch::default();
    let choice = Choice::new(options, logits.len());
    let token = draw_row(Row { logits, index: 0 }, &choice, Draw { seed, step }, &mut scratch);
    (token, scratch)
}

fn drawn(logits: &[f32], options: &SampleOptions, seed: u64, step: u64) -> u32 {
    drawn_in(logits, options, seed, step).0.unwrap()
}

/// Logits over several blocks, the last of which is not whole; a few of them are likely.
fn some_logits(vocabulary: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(7);
    (0..vocabulary).map(|_| rng.random_range(-4f32..0.).powi(2) * -0.4 + 3.).collect()
}

/// The chi-square statistic of `counts` against these probabilities, over its degrees of freedom, in deviations from what
/// it is expected to be. Tokens that are expected less than ten times are one.
fn chi_square(counts: &[u32], probabilities: &[f64]) -> f64 {
    let draws = f64::from(counts.iter().sum::<u32>());
    let (mut sum, mut kinds, mut rest) = (0., 0., (0., 0.));
    for (count, probability) in counts.iter().map(|count| f64::from(*count)).zip(probabilities) {
        let expected = draws * probability;
        if expected < 10. {
            rest = (rest.0 + count, rest.1 + expected);
        } else {
            sum += (count - expected).powi(2) / expected;
            kinds += 1.;
        }
    }
    if rest.1 > 0. {
        sum += (rest.0 - rest.1).powi(2) / rest.1;
        kinds += 1.;
    }
    (sum - (kinds - 1.)) / (2. * (kinds - 1.)).sqrt()
}

fn probabilities(logits: &[f32], temperature: f64, kept: &[u32]) -> Vec<f64> {
    let weight = |token: usize| match kept.contains(&(token as u32)) {
        true => (f64::from(logits[token]) / temperature).exp(),
        false => 0.,
    };
    let weights: Vec<f64> = (0..logits.len()).map(weight).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

#[test]
fn tokens_are_drawn_as_often_as_they_are_likely() {
    const DRAWS: usize = 200_000;
    /// Deviations; one in a million runs would be beyond, but seeds are fixed.
    const BOUND: f64 = 5.;
    let logits = some_logits(300);
    let all: Vec<u32> = (0..300).collect();
    let mut sorted = all.clone();
    sorted.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    for (temperature, top_k, kept) in
        [(1., None, &all[..]), (0.7, None, &all), (1.5, Some(200), &sorted[..200])]
    {
        let options = options(temperature, top_k, None);
        let mut counts = vec![0u32; logits.len()];
        for step in 0..DRAWS {
            counts[drawn(&logits, &options, 11, step as u64) as usize] += 1;
        }
        let found = chi_square(&counts, &probabilities(&logits, temperature, kept));
        assert!(found.abs() < BOUND, "temperature {temperature}, top-k {top_k:?}: {found} deviations");
        // The test would notice a temperature that is off by a tenth, and a neighbour that is taken instead.
        let off = chi_square(&counts, &probabilities(&logits, temperature * 1.1, kept));
        assert!(off > 2. * BOUND, "{off} deviations");
        counts.rotate_right(1);
        assert!(chi_square(&counts, &probabilities(&logits, temperature, kept)) > 2. * BOUND);
    }
}

#[test]
fn what_is_kept_is_what_sorting_all_keeps() {
    let mut rng = StdRng::seed_from_u64(8);
    for case in 0..10_000 {
        let kinds = rng.random_range(1..200);
        let logit = |rng: &mut StdRng| match rng.random_range(0..20) {
            0 => f32::NEG_INFINITY,
            1 => -0.,
            2 => 0.,
            3..6 => rng.random_range(-20f32..9.),
            _ => rng.random_range(0..kinds) as f32 / 8. - 3.,
        };
        let mut logits: Vec<f32> = (0..rng.random_range(1..900)).map(|_| logit(&mut rng)).collect();
        logits[0] = logits[0].max(-9.);
        let temperature = rng.random_range(0.2f64..2.);
        let top_k = (case % 3 > 0).then(|| rng.random_range(1..logits.len() + 2));
        let top_p = (case % 3 < 2).then(|| rng.random_range(0.01f64..1.));
        let min_p = (case % 5 == 0).then(|| rng.random_range(0f64..1.).powi(4));

        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut expected: Vec<Candidate<u32>> =
            (0..).zip(logits.iter().map(|logit| *logit + 0.).map(f32::to_bits)).collect();
        let value = |(_, bits): &Candidate<u32>| f32::from_bits(*bits);
        expected.sort_by(|a, b| value(b).total_cmp(&value(a)));
        expected.truncate(top_k.unwrap_or(usize::MAX));
        for (token, kept) in &mut expected {
            *kept = weight((logits[*token as usize] - largest) / temperature as f32);
        }
        if let Some(p) = top_p {
            let need = share(
                Choice::new(&SampleOptions { top_p: Some(p), ..SampleOptions::GREEDY }, 1).top_p.unwrap(),
                expected.iter().map(|(_, weight)| u64::from(*weight)).sum(),
            );
            expected.sort_by_key(|(token, weight)| (Reverse(*weight), *token));
            let mut sum = 0;
            let enough = expected.iter().position(|(_, weight)| {
                sum += u64::from(*weight);
                sum >= need
            });
            expected.truncate(enough.unwrap() + 1);
        }
        if let Some(p) = min_p.filter(|p| *p > 0.) {
            expected.retain(|(_, kept)| f64::from(*kept) >= p * f64::from(weight(0.)));
        }
        expected.sort_unstable();

        let options = SampleOptions { min_p, ..options(temperature, top_k, top_p) };
        let (drawn, scratch) = drawn_in(&logits, &options, case, 0);
        let drawn = drawn.unwrap();
        let is_limited = top_p.is_some() || min_p.is_some() || top_k.is_some_and(|k| k < logits.len());
        if is_limited {
            assert_eq!(scratch.candidates, expected, "case {case}");
        }
        let total = expected.iter().map(|(_, weight)| u64::from(*weight)).sum();
        let at = below(philox::random(case, 0, 0), total);
        assert_eq!(drawn, draw_from(expected.iter().copied(), at), "case {case}");
        assert!(expected.iter().any(|(token, weight)| *token == drawn && *weight > 0), "case {case}");
    }
}

#[test]
fn a_share_is_never_short() {
    let half = 1 << 31;
    assert_eq!(share(half, 10), 5);
    assert_eq!(share(half + (half >> 4), 10), 6);
    assert_eq!(share(0, 10), 1);
    assert_eq!(share(1 << 32, 10), 10);
    assert_eq!(share(half, u64::from(u32::MAX) << 16), u64::from(u32::MAX) << 15);
}

#[test]
fn blocks_make_no_difference() {
    // At the ends of blocks, of lanes, and of what is left.
    for vocabulary in [1, 15, 16, 17, 255, 256, 257, 511, 512, 600] {
        for at in [0, vocabulary / 2, vocabulary - 1] {
            let mut logits = vec![-30f32; vocabulary];
            logits[at] = 5.;
            for (temperature, top_k, top_p) in
                [(0., None, None), (1., None, None), (1., Some(1), None), (1., None, Some(0.5))]
            {
                let drawn = drawn(&logits, &options(temperature, top_k, top_p), 1, 0);
                assert_eq!(drawn as usize, at, "of {vocabulary}");
            }
            // The first of equal ones.
            logits.fill(5.);
            assert_eq!(drawn(&logits, &SampleOptions::GREEDY, 1, 0), 0);
            logits[at] = f32::NAN;
            assert_eq!(drawn_in(&logits, &SampleOptions::GREEDY, 1, 0).0, None);
        }
    }
}

#[test]
fn a_seed_repeats_and_steps_differ() {
    let logits = some_logits(700);
    let draws =
        |seed| (0..50).map(|step| drawn(&logits, &options(1., None, None), seed, step)).collect::<Vec<_>>();
    assert_eq!(draws(1), draws(1));
    assert_ne!(draws(1), draws(2));
    assert!(draws(1).iter().any(|token| *token != draws(1)[0]));
}

#[test]
fn extreme_temperatures_and_logits_are_drawn_from() {
    for temperature in [f64::MIN_POSITIVE, 1e-30, 1., 1e30, f64::MAX] {
        for logits in [[0f32, 1., f32::NEG_INFINITY], [f32::MIN, f32::MAX, f32::NEG_INFINITY]] {
            for seed in 0..50 {
                let drawn = drawn(&logits, &options(temperature, None, None), seed, 0);
                assert!(
                    drawn == 1 || (drawn == 0 && temperature >= 1.),
                    "{drawn} of {logits:?} at {temperature}"
                );
            }
        }
    }
}

#[test]
fn logits_may_be_a_view_or_of_another_dtype() {
    let logits = some_logits(700);
    let options = options(1., None, None);
    let expected = drawn(&logits, &options, 3, 0);
    let tensor = Tensor::from_slice(&logits, (1, 700), &Device::Cpu).unwrap();
    let pair = Tensor::cat(&[&tensor.zeros_like().unwrap(), &tensor], 0).unwrap();
    let strided = pair.t().unwrap().contiguous().unwrap().narrow(1, 1, 1).unwrap().squeeze(1).unwrap();
    for view in [
        tensor.squeeze(0).unwrap(),
        tensor.clone(),
        pair.get(1).unwrap(),
        strided,
        pair.get(1).unwrap().to_dtype(DType::F64).unwrap(),
    ] {
        assert_eq!(sample(&view, &options, 3, 0).unwrap(), [expected]);
    }
    // Rows are drawn each for itself, by random numbers of their own.
    let rows = tensor.broadcast_as((20, 700)).unwrap();
    let drawn = sample(&rows, &options, 3, 0).unwrap();
    assert!(drawn[0] == expected && drawn.iter().any(|token| *token != expected), "{drawn:?}");
    assert!(sample(&rows.narrow(0, 0, 0).unwrap(), &options, 3, 0).unwrap().is_empty());
    for (bad, problem) in [
        (tensor.unsqueeze(0).unwrap(), "[rows, vocabulary]"),
        (tensor.to_dtype(DType::U32).unwrap(), "U32"),
        (tensor.narrow(1, 0, 0).unwrap(), "none at all"),
        (Tensor::cat(&[&rows, &rows.affine(f64::NAN, 0.).unwrap()], 0).unwrap(), "NaN"),
        (Tensor::full(f32::NEG_INFINITY, 5, &Device::Cpu).unwrap(), "finite"),
        (Tensor::new(&[0f32, f32::INFINITY], &Device::Cpu).unwrap(), "infinity"),
    ] {
        let error = sample(&bad, &options, 3, 0).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

/// What transformers' `LogitsProcessor`s define, in f64: temperature, top-k, top-p, min-p. The probabilities of what is left.
fn defined(options: &SampleOptions, logits: &[f32]) -> Vec<f64> {
    let mut scores: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    scores.iter_mut().for_each(|score| *score /= options.temperature);
    let softmax = |scores: &[f64]| {
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / total).collect::<Vec<_>>()
    };
    let forbid = |scores: &mut [f64], keep: &dyn Fn(usize) -> bool| {
        for (token, score) in scores.iter_mut().enumerate() {
            if !keep(token) {
                *score = f64::NEG_INFINITY;
            }
        }
    };
    if let Some(k) = options.top_k {
        let mut sorted = scores.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let least = sorted[k.min(sorted.len()) - 1];
        let kept: Vec<bool> = scores.iter().map(|score| *score >= least).collect();
        forbid(&mut scores, &|token| kept[token]);
    }
    if let Some(p) = options.top_p {
        let probabilities = softmax(&scores);
        let mut ascending: Vec<usize> = (0..scores.len()).collect();
        ascending.sort_by(|a, b| scores[*a].total_cmp(&scores[*b]));
        let (mut sum, mut kept) = (0., vec![true; scores.len()]);
        for token in &ascending[..scores.len() - 1] {
            sum += probabilities[*token];
            kept[*token] = sum > 1. - p;
        }
        forbid(&mut scores, &|token| kept[token]);
    }
    if let Some(p) = options.min_p {
        let probabilities = softmax(&scores);
        let top = probabilities.iter().copied().fold(0., f64::max);
        forbid(&mut scores, &|token| probabilities[token] >= p * top);
    }
    softmax(&scores)
}

#[test]
fn probabilities_are_those_that_transformers_defines() {
    let mut rng = StdRng::seed_from_u64(9);
    for case in 0..2_000 {
        let vocabulary = rng.random_range(2..600);
        let logits: Vec<f32> = (0..vocabulary).map(|_| rng.random_range(-6f32..6.)).collect();
        let options = SampleOptions {
            temperature: rng.random_range(0.3..2.),
            top_k: (case % 2 == 0).then(|| rng.random_range(1..vocabulary + 9)),
            top_p: (case % 3 > 0).then(|| rng.random_range(0.1..1.)),
            min_p: (case % 5 > 2).then(|| rng.random_range(0f64..1.).powi(3)),
        };
        let expected = defined(&options, &logits);
        let (drawn, scratch) = drawn_in(&logits, &options, case, 0);
        assert!(expected[drawn.unwrap() as usize] > 0., "case {case}: {options:?}");

        let mut found = vec![0.; vocabulary];
        let is_limited = options.top_p.is_some()
            || options.min_p.is_some()
            || options.top_k.is_some_and(|k| k < vocabulary);
        match is_limited {
            true => scratch.candidates.iter().for_each(|(token, weight)| {
                found[*token as usize] = f64::from(*weight);
            }),
            false => found.iter_mut().zip(&scratch.weights).for_each(|(to, from)| *to = f64::from(*from)),
        }
        let total: f64 = found.iter().sum();
        for (token, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = (found / total - expected).abs();
            assert!(error < 2e-5, "case {case}, token {token}: {} instead of {expected}", found / total);
        }
    }
}
