//! The scalar reference: attention in f64, one key after another.

use std::ops::Range;

/// One query head's output: `softmax(scale * q * k^T) * v` over the keys that the query sees. Scores end at `softcap`; `sink`
/// is the logit of one more key, which has no value.
pub(super) fn attend(
    q: &[f64],
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
    seen: Range<usize>,
    (scale, softcap, sink): (f64, Option<f64>, Option<f64>),
) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let capped = |score: f64| softcap.map_or(score, |cap| cap * (score / cap).tanh());
    let scores: Vec<f64> = keys[seen.clone()].iter().map(|key| capped(scale * dot(q, key))).collect();
    let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0., |sink| (sink - largest).exp());
    let mut output = vec![0.; q.len()];
    for (weight, value) in weights.iter().zip(&values[seen]) {
        output.iter_mut().zip(value).for_each(|(output, value)| *output += weight / total * value);
    }
    output
}
