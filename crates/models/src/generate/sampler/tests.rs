//! Which tokens are drawn, and how often.

use super::*;
use candle_core::Device;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::cmp::Reverse;

fn sampler(temperature: f64, top_k: Option<usize>, top_p: Option<f64>, seed: u64) -> Sampler {
    Sampler::new(Sampling { temperature, top_k, top_p }, Some(seed)).unwrap()
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
        let mut sampler = sampler(temperature, top_k, None, 11);
        let mut counts = vec![0u32; logits.len()];
        for _ in 0..DRAWS {
            counts[sampler.sample_slice(&logits).unwrap() as usize] += 1;
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
            let need = share(p, expected.iter().map(|(_, weight)| u64::from(*weight)).sum());
            expected.sort_by_key(|(token, weight)| (Reverse(*weight), *token));
            let mut sum = 0;
            let enough = expected.iter().position(|(_, weight)| {
                sum += u64::from(*weight);
                sum >= need
            });
            expected.truncate(enough.unwrap() + 1);
        }
        expected.sort_unstable();

        let mut sampler = sampler(temperature, top_k, top_p, case);
        let drawn = sampler.sample_slice(&logits).unwrap();
        let is_limited = top_p.is_some() || top_k.is_some_and(|k| k < logits.len());
        if is_limited {
            assert_eq!(sampler.scratch.candidates, expected, "case {case}");
        }
        let total = expected.iter().map(|(_, weight)| u64::from(*weight)).sum();
        let at = below(philox::random(case, 0, 0), total);
        assert_eq!(drawn, draw(expected.iter().copied(), at), "case {case}");
        assert!(expected.iter().any(|(token, weight)| *token == drawn && *weight > 0), "case {case}");
    }
}

#[test]
fn a_share_is_never_short() {
    assert_eq!(share(0.5, 10), 5);
    assert_eq!(share(0.51, 10), 6);
    assert_eq!(share(1e-300, 10), 1);
    assert_eq!(share(1. - 1e-16, 10), 10);
    assert_eq!(share(0.5, u64::from(u32::MAX) << 16), u64::from(u32::MAX) << 15);
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
                let drawn = sampler(temperature, top_k, top_p, 1).sample_slice(&logits).unwrap();
                assert_eq!(drawn as usize, at, "of {vocabulary}");
            }
            // The first of equal ones.
            logits.fill(5.);
            assert_eq!(sampler(0., None, None, 1).sample_slice(&logits).unwrap(), 0);
            logits[at] = f32::NAN;
            assert!(sampler(0., None, None, 1).sample_slice(&logits).is_err());
        }
    }
}

#[test]
fn a_seed_repeats_and_steps_differ() {
    let logits = some_logits(700);
    let draws = |seed| {
        let mut sampler = sampler(1., None, None, seed);
        (0..50).map(|_| sampler.sample_slice(&logits).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(draws(1), draws(1));
    assert_ne!(draws(1), draws(2));
    assert!(draws(1).iter().any(|token| *token != draws(1)[0]));
}

#[test]
fn extreme_temperatures_and_logits_are_drawn_from() {
    for temperature in [f64::MIN_POSITIVE, 1e-30, 1., 1e30, f64::MAX] {
        for logits in [[0f32, 1., f32::NEG_INFINITY], [f32::MIN, f32::MAX, f32::NEG_INFINITY]] {
            for seed in 0..50 {
                let drawn = sampler(temperature, None, None, seed).sample_slice(&logits).unwrap();
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
    let expected = sampler(1., None, None, 3).sample_slice(&logits).unwrap();
    let tensor = Tensor::from_slice(&logits, (1, 700), &Device::Cpu).unwrap();
    let pair = Tensor::cat(&[&tensor.zeros_like().unwrap(), &tensor], 0).unwrap();
    let strided = pair.t().unwrap().contiguous().unwrap().narrow(1, 1, 1).unwrap().squeeze(1).unwrap();
    for view in [
        tensor.squeeze(0).unwrap(),
        pair.get(1).unwrap(),
        strided,
        pair.get(1).unwrap().to_dtype(DType::F64).unwrap(),
    ] {
        assert_eq!(sampler(1., None, None, 3).sample(&view).unwrap(), expected);
    }
    assert!(sampler(1., None, None, 3).sample(&tensor).is_err());
}
