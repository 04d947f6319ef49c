//! Tokens drawn from logits: those of the CPU.

use crate::device;
use candle_core::{DType, Device, Tensor};
use candle_quant::ops::{sample, SampleOptions};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Logits of which many are equal, some are forbidden, and some are zeros of both signs.
fn logits(rng: &mut StdRng, count: usize) -> Vec<f32> {
    let kinds = rng.random_range(1..200);
    let range = [0.1f32, 3., 40.][rng.random_range(0..3)];
    let mut logits: Vec<f32> = (0..count)
        .map(|_| match rng.random_range(0..20) {
            0 => f32::NEG_INFINITY,
            1 => -0.,
            2 => 0.,
            3..8 => rng.random_range(-range..range),
            _ => rng.random_range(0..kinds) as f32 * (range / 64.) - range,
        })
        .collect();
    logits[0] = logits[0].max(-range);
    logits
}

fn options(rng: &mut StdRng, vocabulary: usize) -> SampleOptions {
    let chance = |rng: &mut StdRng, of: u32| rng.random_range(0..of) == 0;
    SampleOptions {
        temperature: if chance(rng, 8) { 0. } else { rng.random_range(0.05f64..3.) },
        top_k: chance(rng, 2).then(|| rng.random_range(1..vocabulary + 2)),
        top_p: chance(rng, 2).then(|| rng.random_range(0.01f64..1.).powf(0.3)),
        min_p: chance(rng, 4).then(|| rng.random_range(0f64..1.).powi(4)),
    }
}

/// Rows of a few vocabularies, the largest of more than one block, in every combination of options. `CANDLE_QUANT_SAMPLE_ROWS`
/// is how many rows are drawn from.
#[test]
fn tokens_are_those_of_the_cpu() {
    const ROWS: usize = 40;
    let Some(device) = device() else { return };
    let wanted = std::env::var("CANDLE_QUANT_SAMPLE_ROWS").map_or(1000, |rows| rows.parse().unwrap());
    let mut rng = StdRng::seed_from_u64(31);
    for case in 0..(wanted / ROWS) as u64 {
        let vocabulary = match case % 4 {
            0 => rng.random_range(1..40),
            1 => rng.random_range(250..260),
            2 => rng.random_range(1..1025),
            _ => rng.random_range(1025..4000),
        };
        let dtype = [DType::F32, DType::F32, DType::F16, DType::BF16][rng.random_range(0..4)];
        let values: Vec<f32> = (0..ROWS).flat_map(|_| logits(&mut rng, vocabulary)).collect();
        let rows = Tensor::from_vec(values, (ROWS, vocabulary), &Device::Cpu).unwrap();
        let rows = rows.to_dtype(dtype).unwrap();
        let options = options(&mut rng, vocabulary);
        let (seed, step) = (rng.random(), rng.random::<u64>() >> rng.random_range(0..64));
        let expected = sample(&rows, &options, seed, step).unwrap();
        let found = sample(&rows.to_device(&device).unwrap(), &options, seed, step).unwrap();
        assert_eq!(found, expected, "case {case}: {options:?} of {vocabulary} {dtype:?}");
    }
}

/// As many blocks as there can be, and more logits in each than it has threads.
#[test]
fn large_vocabularies_are_drawn_from() {
    let Some(device) = device() else { return };
    let mut rng = StdRng::seed_from_u64(32);
    for vocabulary in [256 * 1024, 256 * 1024 + 1] {
        let rows = Tensor::from_vec(logits(&mut rng, vocabulary), vocabulary, &Device::Cpu).unwrap();
        let options =
            SampleOptions { temperature: 1.5, top_k: Some(50_000), top_p: Some(0.97), min_p: Some(1e-6) };
        let expected = sample(&rows, &options, 5, 6).unwrap();
        assert_eq!(sample(&rows.to_device(&device).unwrap(), &options, 5, 6).unwrap(), expected);
    }
}

/// The last bit of a weight, and of the part that top-p asks for, decides whether a token can be drawn.
#[test]
fn borders_are_those_of_the_cpu() {
    const ROWS: usize = 32;
    /// What the largest logit weighs.
    const MOST: u64 = i32::MAX as u64;
    let Some(device) = device() else { return };
    let is_drawn = |tokens: &[u32]| tokens.contains(&1);
    for case in 0..24 {
        let other = (case as f32 + 0.37) * -0.0411;
        let rows = Tensor::new(&[0f32, other], &Device::Cpu).unwrap().broadcast_as((ROWS, 2)).unwrap();
        let rows = rows.contiguous().unwrap();
        let there = rows.to_device(&device).unwrap();
        let all = SampleOptions { temperature: 1., ..SampleOptions::GREEDY };
        let draw = |rows: &Tensor, options: SampleOptions| sample(rows, &options, 34, case).unwrap();
        // In the middle between two weights, where it is rounded up.
        let at_least = |weight: u64| {
            let min_p = Some((weight as f64 - 0.5) / MOST as f64);
            SampleOptions { min_p, ..all }
        };
        let (mut weight, mut beyond) = (1, MOST);
        while beyond - weight > 1 {
            let middle = (weight + beyond) / 2;
            match is_drawn(&draw(&rows, at_least(middle))) {
                true => weight = middle,
                false => beyond = middle,
            }
        }
        // A little more than the first token weighs: less than one more.
        let units = (u128::from(MOST) << 32) / u128::from(MOST + weight) + 1;
        let top_p = Some(units as f64 / 2f64.powi(32));
        for (options, expected) in
            [(at_least(weight), true), (at_least(weight + 1), false), (SampleOptions { top_p, ..all }, true)]
        {
            let (found, of_cpu) = (draw(&there, options), draw(&rows, options));
            assert_eq!((&found, is_drawn(&found)), (&of_cpu, expected), "{other}: {options:?}");
        }
    }
}

#[test]
fn rows_without_meaning_are_errors_and_leave_nothing_behind() {
    let Some(device) = device() else { return };
    let mut rng = StdRng::seed_from_u64(33);
    let good = Tensor::from_vec(logits(&mut rng, 3000), (1, 3000), &Device::Cpu).unwrap();
    let all = SampleOptions { temperature: 1., top_k: Some(900), top_p: Some(0.9), min_p: Some(0.01) };
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        for at in [0, 1500, 2999] {
            let mut values: Vec<f32> = good.flatten_all().unwrap().to_vec1().unwrap();
            values[at] = bad;
            let row = Tensor::from_vec(values, (1, 3000), &Device::Cpu).unwrap();
            let rows = Tensor::cat(&[&good, &row], 0).unwrap().to_device(&device).unwrap();
            for options in [all, SampleOptions::GREEDY] {
                let error = sample(&rows, &options, 1, 2).unwrap_err().to_string();
                assert!(error.contains("NaN or infinity"), "{error}");
                let found = sample(&good.to_device(&device).unwrap(), &options, 1, 2).unwrap();
                assert_eq!(found, sample(&good, &options, 1, 2).unwrap());
            }
        }
    }
    let forbidden = Tensor::full(f32::NEG_INFINITY, 9, &device).unwrap();
    assert!(sample(&forbidden, &all, 1, 2).is_err());
    let none = Tensor::zeros((3, 0), DType::F32, &device);
    assert!(none.is_err() || sample(&none.unwrap(), &all, 1, 2).is_err());
}
