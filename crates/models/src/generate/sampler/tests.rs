//! Penalties, and that seeds and tokens before reach the draw.

use super::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// What transformers' `LogitsProcessor` of the repetition penalty defines, and OpenAI of those of frequency and presence, in f64.
fn defined(sampling: &Sampling, logits: &[f32], prompt: &[u32], text: &[u32]) -> Vec<f64> {
    let of_token = |(token, logit): (u32, &f32)| {
        let count = text.iter().filter(|seen| **seen == token).count() as f64;
        let mut score = f64::from(*logit);
        if count > 0. || prompt.contains(&token) {
            let penalty = sampling.repetition_penalty;
            score = if score < 0. { score * penalty } else { score / penalty };
        }
        score -= sampling.frequency_penalty * count;
        score - if count > 0. { sampling.presence_penalty } else { 0. }
    };
    (0u32..).zip(logits).map(of_token).collect()
}

#[test]
fn penalties_are_those_that_are_defined() {
    let mut rng = StdRng::seed_from_u64(9);
    for case in 0..1_000 {
        let vocabulary = rng.random_range(2..60);
        let mut logits: Vec<f32> = (0..vocabulary).map(|_| rng.random_range(-6f32..6.)).collect();
        let tokens = |rng: &mut StdRng| -> Vec<u32> {
            (0..rng.random_range(0..20)).map(|_| rng.random_range(0..vocabulary as u32)).collect()
        };
        let (prompt, text) = (tokens(&mut rng), tokens(&mut rng));
        let sampling = Sampling {
            repetition_penalty: if case % 7 > 2 { rng.random_range(0.5..2.) } else { 1. },
            presence_penalty: if case % 4 == 1 { rng.random_range(-2.0..2.) } else { 0. },
            frequency_penalty: if case % 4 > 1 { rng.random_range(-1.0..1.) } else { 0. },
            ..Sampling::GREEDY
        };
        let expected = defined(&sampling, &logits, &prompt, &text);
        let mut seen = Seen::default();
        seen.add_prompt(&prompt);
        text.iter().for_each(|token| seen.add(*token));
        seen.penalize(&sampling, &mut logits);
        for (token, (found, expected)) in logits.iter().zip(&expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            assert!(error < 2e-5, "case {case}, token {token}: {found} instead of {expected}");
        }
    }
}

#[test]
fn penalties_count_what_was_drawn() {
    let logits = Tensor::new(&[1f32, 0.9, 0.8, -1.], &Device::Cpu).unwrap();
    let draws = |sampling: Sampling, prompt: &[u32]| {
        let mut sampler = Sampler::new(sampling, Some(1)).unwrap().with_prompt(prompt);
        (0..5).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    let greedy = Sampling::GREEDY;
    assert_eq!(draws(greedy, &[0]), [0; 5]);
    assert_eq!(draws(Sampling { frequency_penalty: 0.5, ..greedy }, &[0]), [0, 1, 2, 0, 1]);
    assert_eq!(draws(Sampling { presence_penalty: 0.5, ..greedy }, &[0]), [0, 1, 2, 0, 0]);
    assert_eq!(draws(Sampling { repetition_penalty: 2., ..greedy }, &[0]), [1, 2, 0, 0, 0]);
    // Tokens beyond the logits, which some tokenizers have, count for nothing.
    assert_eq!(draws(Sampling { repetition_penalty: 2., ..greedy }, &[9]), [0, 1, 2, 0, 0]);
}

#[test]
fn a_seed_repeats_and_steps_differ() {
    let logits = Tensor::zeros(700, DType::F32, &Device::Cpu).unwrap();
    let draws = |seed, frequency_penalty| {
        let mut sampler =
            Sampler::new(Sampling { frequency_penalty, ..Sampling::default() }, Some(seed)).unwrap();
        (0..50).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    for penalty in [0., 1e-9] {
        assert_eq!(draws(1, penalty), draws(1, penalty));
        assert_ne!(draws(1, penalty), draws(2, penalty));
        assert!(draws(1, penalty).iter().any(|token| *token != draws(1, penalty)[0]));
    }
    assert!(Sampler::new(Sampling::GREEDY, None).unwrap().sample(&logits.unsqueeze(0).unwrap()).is_err());
}
