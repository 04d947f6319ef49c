//! Activations of one and two digits: how far results may be off.

use super::*;

/// About a Gaussian.
fn bell(rng: &mut StdRng) -> f32 {
    (0..6).map(|_| rng.random_range(-1.0f32..1.0)).sum()
}

/// The error of candle's and llama.cpp's eight-bit activations (blocks of 256) on the same weights.
fn error_of_blocks(dequantized: &[f32], k: usize, x: &[f32], want: &[(f64, f64)]) -> f64 {
    let rounded: Vec<f32> = x
        .chunks(256)
        .flat_map(|block| {
            let unit = block.iter().fold(0f32, |largest, x| largest.max(x.abs())) / 127.;
            block.iter().map(|x| (x / unit).round() * unit).collect::<Vec<_>>()
        })
        .collect();
    relative_error(matmul_in_f64(dequantized, k, &rounded, None).iter().map(|(y, _)| *y), want)
}

#[test]
fn fewer_digits_lose_no_more_than_they_say() {
    let k = 1024;
    // So many results that it is not chance which of two errors is larger.
    let sizes = [(960, 1), (480, 2), (112, 9), (48, 40)];
    let mut rng = StdRng::seed_from_u64(41);
    for (format, (n, m)) in formats_for(k).flat_map(|format| sizes.map(|size| (format, size))) {
        let weight = Weight::random(format, n, k, &mut rng);
        let dequantized = weight.dequantized();
        for outlier in [1., 50.] {
            let mut x: Vec<f32> = (0..m * k).map(|_| bell(&mut rng)).collect();
            x.iter_mut().step_by(k).for_each(|x| *x *= outlier);
            let want = matmul_in_f64(&dequantized, k, &x, None);
            let eight = error_of_blocks(&dequantized, k, &x, &want);
            for isa in isa::available() {
                for (precision, bound) in [
                    (ActivationPrecision::Exact, 1e-6),
                    (ActivationPrecision::Bits16, 1e-4),
                    (ActivationPrecision::Bits8, 1.1 * eight),
                ] {
                    let got: Vec<f32> = dispatch::matmul(isa, &weight.view(), &x, None, precision);
                    let error = relative_error(got.iter().map(|y| f64::from(*y)), &want);
                    let name = (isa.name(), format, m, outlier, precision);
                    assert!(error <= bound, "{name:?}: {error:e} > {bound:e}");
                }
            }
        }
    }
}
