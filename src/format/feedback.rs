//! Error feedback: the columns of a weight make up for what those before them lose, as in GPTQ.
//!
//! What a layer loses of its outputs is `e^T H e` for the errors `e` of a row, where `H` is the sum of `x x^T` of what it is
//! given. With `H = (U + 1) D (U + 1)^T`, U strictly upper triangular and D diagonal, that is a sum over columns of
//! `D[k] (e[k] + sum of e[i] U[i][k] for i < k)^2`. So columns are quantized in order, each after what the earlier ones have
//! lost was added to it by U. This is GPTQ's update without its inverse (Chee et al., QuIP, theorem 6).

use super::bits::pack;
use super::clip_search::{nearest, Row};
use super::numeric::Real;
use super::{GroupScales, QuantFormat, QuantizedRows, Quantizer};
use crate::{Error, Result};
use rayon::prelude::*;

/// What is added to the diagonal, as a part of its mean: `H` of few rows has no inverse.
const DAMPING: f64 = 0.01;

/// Columns that are brought up to date at a time, so that rows stay in the cache.
const BLOCK: usize = 64;

/// How columns make up for what others lose.
#[derive(Clone, Debug)]
pub struct ErrorFeedback {
    k: usize,
    /// U, row after row.
    factors: Vec<f32>,
    /// D.
    counts: Vec<f32>,
}

impl ErrorFeedback {
    /// That of the sums of products `[K, K]`, of which the upper half is read; one hundredth of the mean of their diagonal is
    /// added to it.
    ///
    /// # Errors
    /// If these are no such sums: their number is another one, or they are not finite, or of no vectors.
    pub fn new(mut products: Vec<f64>, k: usize) -> Result<Self> {
        let wrong =
            |found: String| Error::mismatch("sums of products", format!("[{k}, {k}], of vectors"), found);
        if k == 0 || k.checked_mul(k) != Some(products.len()) {
            return Err(wrong(format!("{} numbers", products.len())));
        }
        if let Some(number) = products.iter().find(|number| !number.is_finite()) {
            return Err(wrong(number.to_string()));
        }
        let mean = products.iter().step_by(k + 1).sum::<f64>() / k as f64;
        // Nothing was seen: nothing is made up for.
        let damping = if mean > 0. { DAMPING * mean } else { 1. };
        products.iter_mut().step_by(k + 1).for_each(|number| *number += damping);
        decompose(&mut products, k).map_err(wrong)?;
        let diagonal: Vec<f64> = products.iter().step_by(k + 1).copied().collect();
        let row = |(index, row): (usize, &[f64])| {
            let of_column = move |(column, (number, diagonal)): (usize, (&f64, &f64))| match column > index {
                true => (number / diagonal) as f32,
                false => 0.,
            };
            row.iter().zip(&diagonal).enumerate().map(of_column).collect::<Vec<_>>()
        };
        let factors = products.chunks_exact(k).enumerate().flat_map(row).collect();
        // The largest is one: squares of many sums may be no f32.
        let largest = diagonal.iter().fold(0f64, |largest, number| largest.max(*number));
        let counts = diagonal.iter().map(|number| (number / largest).powi(2) as f32).collect();
        Ok(Self { k, factors, counts })
    }

    /// How much an error in each column counts that is left after it was made up for; the largest is 1.
    pub fn counts(&self) -> &[f32] {
        &self.counts
    }
}

/// `H = V V^T` with V upper triangular, which takes the place of the upper half of H.
fn decompose(h: &mut [f64], k: usize) -> std::result::Result<(), String> {
    for end in (0..k.div_ceil(BLOCK)).map(|block| k - block * BLOCK) {
        let start = end.saturating_sub(BLOCK);
        // What the columns behind the block have to do with it, for all rows at once.
        let (_, tails) = h.split_at(start * k);
        let tails: Vec<Vec<f64>> = tails
            .chunks_exact(k)
            .take(end - start)
            .map(|row| row.get(end..).unwrap_or_default().to_vec())
            .collect();
        h.par_chunks_exact_mut(k).take(end).for_each(|row| {
            let (head, tail) = row.split_at_mut(end);
            for (number, other) in head.iter_mut().skip(start).zip(&tails) {
                *number -= dot(tail, other);
            }
        });
        for column in (start..end).rev() {
            let own = h.get(column * k..).and_then(|rows| rows.get(column..end)).unwrap_or_default().to_vec();
            let (pivot, behind) = own.split_first().map_or((0., &[][..]), |(pivot, behind)| (*pivot, behind));
            let square = pivot - dot(behind, behind);
            if square.is_nan() || square <= 0. {
                return Err(format!("a square of {square} in column {column}"));
            }
            let root = square.sqrt();
            h.par_chunks_exact_mut(k).take(column + 1).for_each(|row| {
                if let Some((number, behind_it)) = row.get_mut(column..end).and_then(<[f64]>::split_first_mut)
                {
                    *number = (*number - dot(behind_it, behind)) / root;
                }
            });
            if let Some(number) = h.get_mut(column * k + column) {
                *number = root;
            }
        }
    }
    Ok(())
}

/// The sum of products, in an order that does not depend on anything but the length.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let (a, rest_a) = a.as_chunks::<LANES>();
    let (b, rest_b) = b.as_chunks::<LANES>();
    let mut sums = [0f64; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f64 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

impl<T: Real> QuantizedRows<T> {
    /// Quantizes rows of K finite weights, column after column: each after what the columns before it have lost was added to
    /// it. Scales and biases of a group are those of `quantizer` for its numbers by then; with `search` those of
    /// [`QuantizedRows::improve_weighted`], where columns count as [`ErrorFeedback::counts`] says.
    ///
    /// # Errors
    /// As those of [`QuantizedRows::quantize`]; if the feedback is that of other columns.
    pub fn quantize_with_feedback(
        format: QuantFormat,
        quantizer: Quantizer,
        weights: &[T],
        k: usize,
        feedback: &ErrorFeedback,
        search: bool,
    ) -> Result<Self> {
        if feedback.k != k || !weights.len().is_multiple_of(k) {
            let found = format!("{} weights, and feedback of {} columns", weights.len(), feedback.k);
            return Err(Error::mismatch("weights to quantize with feedback", format!("rows of {k}"), found));
        }
        let size = format.group_size();
        let mut all = Self::zeros(format, weights.len() / k, k)?;
        let mut errors = vec![0f32; weights.len()];
        for (group, start) in (0..k).step_by(size).enumerate() {
            let columns = start..start + size;
            let counts = feedback.counts.get(columns.clone()).unwrap_or_default();
            let shares = shares(feedback, &errors, columns.clone());
            let rows = weights.chunks_exact(k).zip(errors.chunks_exact_mut(k)).zip(shares.chunks_exact(size));
            for (index, ((weights, errors), shares)) in rows.enumerate() {
                let weights = weights.get(columns.clone()).unwrap_or_default();
                let numbers =
                    weights.iter().zip(shares).map(|(weight, share)| T::from_f32(weight.to_f32() + share));
                let numbers: Vec<T> = numbers.map(finite).collect();
                let mut one = Self::quantize(format, quantizer, &numbers, size, None)?;
                if search {
                    for row in one.rows_mut(format, size)? {
                        let columns = Some(counts);
                        row.improve(format, Row { weights: &numbers, columns })?;
                    }
                }
                let (scale, bias) = one.scale_and_bias(format);
                let errors = errors.get_mut(columns.clone()).unwrap_or_default();
                let codes = of_group(format, (scale, bias), weights, shares, (feedback, start), errors);
                all.set_group(format, (index, group), (k, &codes), &one);
            }
        }
        Ok(all)
    }

    /// Those of the first group; what format and scale say of the bias where none is stored.
    fn scale_and_bias(&self, format: QuantFormat) -> (f32, f32) {
        match &self.scales {
            GroupScales::Float { scales, biases } => {
                let first = |all: &[T]| all.first().map_or(0., |number| number.to_f32());
                (first(scales), first(biases))
            }
            GroupScales::Bytes(bytes) => (bytes.first().map_or(0., |byte| format.scale().value(*byte)), 0.),
        }
    }

    /// Puts the codes of one group of a row in their place, with the scales of `one`.
    fn set_group(
        &mut self,
        format: QuantFormat,
        (row, group): (usize, usize),
        (k, codes): (usize, &[u8]),
        one: &Self,
    ) {
        let groups = k / format.group_size();
        let of_group = codes.len() * format.bits() / 32;
        let at = (row * groups + group) * of_group;
        if let Some(words) = self.words.get_mut(at..at + of_group) {
            pack(codes, format.bits(), words);
        }
        let at = row * groups + group;
        let copy = |to: &mut [T], from: &[T]| {
            if let (Some(to), Some(from)) = (to.get_mut(at), from.first()) {
                *to = *from;
            }
        };
        match (&mut self.scales, &one.scales) {
            (
                GroupScales::Float { scales, biases },
                GroupScales::Float { scales: own_scales, biases: own_biases },
            ) => {
                copy(scales, own_scales);
                copy(biases, own_biases);
            }
            (GroupScales::Bytes(scales), GroupScales::Bytes(own)) => {
                if let (Some(to), Some(from)) = (scales.get_mut(at), own.first()) {
                    *to = *from;
                }
            }
            (GroupScales::Float { .. }, GroupScales::Bytes(_))
            | (GroupScales::Bytes(_), GroupScales::Float { .. }) => {}
        }
    }
}

/// What the columns before a group have lost, times its part of U, for each row.
fn shares(feedback: &ErrorFeedback, errors: &[f32], columns: std::ops::Range<usize>) -> Vec<f32> {
    let (k, size) = (feedback.k, columns.len());
    let mut shares = vec![0f32; errors.len() / k * size];
    for (before, factors) in feedback.factors.chunks_exact(k).take(columns.start).enumerate() {
        let factors = factors.get(columns.clone()).unwrap_or_default();
        for (errors, shares) in errors.chunks_exact(k).zip(shares.chunks_exact_mut(size)) {
            let error = errors.get(before).copied().unwrap_or_default();
            for (share, factor) in shares.iter_mut().zip(factors) {
                *share += error * factor;
            }
        }
    }
    shares
}

/// The codes of a group, whose columns make up for each other, too.
fn of_group<T: Real>(
    format: QuantFormat,
    (scale, bias): (f32, f32),
    weights: &[T],
    shares: &[f32],
    (feedback, start): (&ErrorFeedback, usize),
    errors: &mut [f32],
) -> Vec<u8> {
    let mut codes = vec![0; weights.len()];
    let mut shares = shares.to_vec();
    for column in 0..weights.len() {
        let (Some(weight), Some(share)) = (weights.get(column), shares.get(column)) else { continue };
        let weight = weight.to_f32();
        let code = nearest(format, &[weight + share], scale, bias).first().copied().unwrap_or_default();
        let mut number = [0.];
        format.element().map(&[code], &mut number, |value| value * scale + bias);
        let [number] = number;
        // What is no number can't be made up for.
        let error = Some(weight - number).filter(|error| error.is_finite()).unwrap_or_default();
        if let (Some(own), Some(to)) = (errors.get_mut(column), codes.get_mut(column)) {
            (*own, *to) = (error, code);
        }
        let row = feedback.factors.get((start + column) * feedback.k + start..).unwrap_or_default();
        for (share, factor) in shares.iter_mut().zip(row).skip(column + 1) {
            *share += error * factor;
        }
    }
    codes
}

/// The number; zero where what is made up for is beyond its dtype, lest the scale of the group becomes infinite.
fn finite<T: Real>(number: T) -> T {
    match number.to_f32().is_finite() {
        true => number,
        false => T::from_f32(0.),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    /// Sums of products of `rows` vectors whose elements have to do with each other.
    fn products(rows: usize, k: usize, seed: u64) -> Vec<f64> {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut products = vec![0.; k * k];
        for _ in 0..rows {
            let mut x = vec![0f64; k];
            let mut last = 0.;
            for (column, x) in x.iter_mut().enumerate() {
                last = 0.9 * last + rng.random_range(-1. ..1.);
                *x = last * (1. + (column % 7) as f64);
            }
            for i in 0..k {
                for j in 0..k {
                    products[i * k + j] += x[i] * x[j];
                }
            }
        }
        products
    }

    /// `(U + 1) D (U + 1)^T` is H with its damping, up to a factor; for sizes on either side of blocks.
    #[test]
    fn factors_multiply_to_the_sums() {
        for k in [1, 2, 32, 63, 64, 65, 128, 200] {
            let h = products(3 * k, k, k as u64);
            let feedback = ErrorFeedback::new(h.clone(), k).unwrap();
            let damping = 0.01 * (0..k).map(|i| h[i * k + i]).sum::<f64>() / k as f64;
            let u = |i: usize, j: usize| if i == j { 1. } else { f64::from(feedback.factors[i * k + j]) };
            let product = |i: usize, j: usize| -> f64 {
                (0..k).map(|l| u(i, l) * f64::from(feedback.counts[l]) * u(j, l)).sum()
            };
            // The last column has nothing behind it: its D is its own sum.
            let factor = (h[k * k - 1] + damping) / f64::from(feedback.counts[k - 1]);
            let scale = (0..k).map(|i| h[i * k + i]).fold(0., f64::max);
            for i in 0..k {
                for j in 0..k {
                    let expected = h[i * k + j] + if i == j { damping } else { 0. };
                    let found = product(i, j) * factor;
                    assert!((found - expected).abs() < 1e-5 * scale, "{k}: {i}, {j}: {found}, {expected}");
                    assert!(i <= j || feedback.factors[i * k + j] == 0.);
                }
            }
        }
    }

    #[test]
    fn what_is_no_sum_of_products_is_refused() {
        assert!(ErrorFeedback::new(vec![1.; 3], 2).is_err());
        assert!(ErrorFeedback::new(vec![], 0).is_err());
        assert!(ErrorFeedback::new(vec![1., f64::NAN, 0., 1.], 2).is_err());
        let error = ErrorFeedback::new(vec![1., 9., 9., 1.], 2).unwrap_err().to_string();
        assert!(error.contains("sums of products"), "{error}");
        // Of nothing that was seen, nothing is made up for.
        let nothing = ErrorFeedback::new(vec![0.; 4], 2).unwrap();
        assert_eq!((nothing.factors, nothing.counts), (vec![0.; 4], vec![1.; 2]));
    }

    /// Without anything to make up for, no format loses more than by plain quantization.
    #[test]
    fn columns_that_have_nothing_to_do_with_each_other_lose_no_more() {
        let mut rng = StdRng::seed_from_u64(3);
        let weights: Vec<half::bf16> =
            (0..2 * 256).map(|_| half::bf16::from_f32(rng.random_range(-1f32..1.))).collect();
        let mut diagonal = vec![0.; 256 * 256];
        diagonal.iter_mut().step_by(257).for_each(|number| *number = 2.);
        let feedback = ErrorFeedback::new(diagonal, 256).unwrap();
        for format in QuantFormat::all() {
            let mut plain = QuantizedRows::quantize(format, Quantizer::Mlx, &weights, 256, None).unwrap();
            let fed = |search| {
                QuantizedRows::quantize_with_feedback(
                    format,
                    Quantizer::Mlx,
                    &weights,
                    256,
                    &feedback,
                    search,
                )
                .unwrap()
            };
            let dequantized = |rows: &QuantizedRows<half::bf16>| rows.dequantize(format, 256, 1.).unwrap();
            let error = |rows: &QuantizedRows<half::bf16>| -> f64 {
                let pairs = weights.iter().zip(dequantized(rows));
                pairs.map(|(w, d)| f64::from(w.to_f32() - d).powi(2)).sum()
            };
            // Codes are those nearest with the scale as it is stored.
            assert!(error(&fed(false)) <= error(&plain) * (1. + 1e-6), "{format}");
            plain.improve(format, &weights, 256).unwrap();
            assert!(error(&fed(true)) <= error(&plain) * (1. + 1e-6), "{format}");
        }
    }

    /// It loses less of the outputs than plain quantization, with every family of formats.
    #[test]
    fn outputs_lose_less() {
        const K: usize = 256;
        let h = products(4 * K, K, 11);
        let feedback = ErrorFeedback::new(h.clone(), K).unwrap();
        let mut rng = StdRng::seed_from_u64(12);
        let weights: Vec<f32> = (0..4 * K).map(|_| rng.random_range(-1f32..1.)).collect();
        for format in [
            QuantFormat::affine(2, 64).unwrap(),
            QuantFormat::affine(4, 64).unwrap(),
            QuantFormat::MXFP4,
            QuantFormat::MXFP8,
            QuantFormat::NVFP4,
            QuantFormat::NF4,
        ] {
            let lost = |rows: &QuantizedRows<f32>| -> f64 {
                let numbers = rows.dequantize(format, K, 1.).unwrap();
                let rows = weights.chunks(K).zip(numbers.chunks(K));
                rows.map(|(weights, numbers)| {
                    let e: Vec<f64> = weights.iter().zip(numbers).map(|(w, n)| f64::from(w - n)).collect();
                    (0..K).map(|i| (0..K).map(|j| e[i] * h[i * K + j] * e[j]).sum::<f64>()).sum::<f64>()
                })
                .sum()
            };
            let plain = QuantizedRows::quantize(format, Quantizer::Mlx, &weights, K, None).unwrap();
            let fed = |search| {
                QuantizedRows::quantize_with_feedback(format, Quantizer::Mlx, &weights, K, &feedback, search)
                    .unwrap()
            };
            let (plain, fed, searched) = (lost(&plain), lost(&fed(false)), lost(&fed(true)));
            assert!(fed < 0.4 * plain && searched < 0.4 * plain, "{format}: {plain}, {fed}, {searched}");
        }
    }
}
