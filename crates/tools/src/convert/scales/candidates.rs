//! The scales that are tried.

use super::numbers_of;
use crate::convert::output::{Job, SourcePart, Work};
use crate::convert::plan::ScaledGroup;
use candle_core::{DType, Device, Tensor};
use candle_quant::Result;

/// How many exponents are tried, in even steps below one.
const STEPS: u32 = 20;

/// The most that a scale, or one over it, is.
const MOST: f64 = 256.;

/// The weight of the norm that makes an input.
pub(super) struct Norm {
    numbers: Vec<f32>,
    /// What is added to them.
    offset: f32,
    /// What they are rounded to.
    dtype: DType,
}

impl Norm {
    pub fn of(job: &Job, offset: f32) -> Result<Self> {
        let (parts, dtype) = match &job.work {
            Work::Cast(parts, dtype) => (parts.clone(), *dtype),
            Work::Copy(runs, _) => {
                let runs: Vec<_> = runs.iter().flatten().cloned().collect();
                let dtype = runs.first().map_or(DType::F32, |run| run.dtype());
                (runs.into_iter().map(SourcePart::Stored).collect(), dtype)
            }
            Work::Pack(parts, packing) => (parts.clone(), packing.dtype),
            Work::Repack(..) | Work::Blocks(..) => (Vec::new(), DType::F32),
        };
        let numbers = parts.iter().flat_map(numbers_of).collect::<Result<Vec<_>>>()?.concat();
        Ok(Self { numbers, offset, dtype })
    }

    /// Scales by which it can be divided without an error: what it is then, rounded, times the scale is what it was.
    fn exact(&self, scales: &mut [f32]) -> Result<()> {
        let divided = self.numbers.iter().zip(&*scales);
        let divided: Vec<f32> =
            divided.map(|(number, scale)| (number + self.offset) / scale - self.offset).collect();
        let count = divided.len();
        let rounded = Tensor::from_vec(divided, count, &Device::Cpu)?.to_dtype(self.dtype)?;
        let rounded: Vec<f32> = rounded.to_dtype(DType::F32)?.to_vec1()?;
        for ((number, rounded), scale) in self.numbers.iter().zip(rounded).zip(scales) {
            let exact = (number + self.offset) / (rounded + self.offset);
            // What is zero, or becomes so, stays what it is.
            *scale = if exact.is_finite() && exact > 0. { exact } else { 1. };
        }
        Ok(())
    }
}

/// For each exponent above zero, the scales of all matrices of an input whose elements have these roots of squares.
pub(super) fn candidates<'a>(
    group: &'a ScaledGroup,
    rms: impl Iterator<Item = &'a [f64]>,
    norm: Option<&'a Norm>,
) -> impl Iterator<Item = Result<Vec<Vec<f32>>>> + 'a {
    let rms: Vec<Vec<f64>> = rms.map(|rms| shared(rms, &group.shared_with)).collect();
    (1..STEPS).map(move |step| {
        let alpha = f64::from(step) / f64::from(STEPS);
        let of_matrix = |rms: &Vec<f64>| {
            let mut scales = powers(rms, alpha);
            if group.has_dense {
                scales.iter_mut().for_each(|scale| *scale = scale.log2().round().exp2());
            }
            norm.map_or(Ok(()), |norm| norm.exact(&mut scales)).map(|()| scales)
        };
        rms.iter().map(of_matrix).collect()
    })
}

/// The roots of the squares of all columns that have one scale, for each of them.
fn shared(rms: &[f64], with: &[usize]) -> Vec<f64> {
    let mut sums = vec![0.; rms.len()];
    for (rms, first) in rms.iter().zip(with) {
        sums.get_mut(*first).into_iter().for_each(|sum: &mut f64| *sum += rms * rms);
    }
    with.iter().map(|first| sums.get(*first).copied().unwrap_or_default().sqrt()).collect()
}

/// `rms^alpha`, as much above one as below it.
fn powers(rms: &[f64], alpha: f64) -> Vec<f32> {
    let smallest = rms.iter().copied().filter(|rms| *rms > 0.).fold(f64::INFINITY, f64::min);
    let largest = rms.iter().copied().fold(0., f64::max);
    let middle = (smallest * largest).sqrt();
    let scale = |rms: &f64| match *rms > 0. && middle.is_finite() && middle > 0. {
        true => (rms / middle).powf(alpha).clamp(1. / MOST, MOST) as f32,
        // Columns that are given nothing lose nothing.
        false => 1.,
    };
    rms.iter().map(scale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_as_much_above_one_as_below() {
        assert_eq!(powers(&[1., 4., 16.], 0.5), [0.5, 1., 2.]);
        assert_eq!(powers(&[0., 4., 16., 1e30], 1.)[0], 1.);
        assert_eq!(powers(&[1., 1e30], 1.), [1. / 256., 256.]);
        assert_eq!(powers(&[0., 0.], 0.5), [1., 1.]);
        assert_eq!(shared(&[3., 1., 4., 1.], &[0, 1, 0, 1]), [5., 2f64.sqrt(), 5., 2f64.sqrt()]);
    }

    /// What a norm is divided by is exactly what its weight was over what it becomes.
    #[test]
    fn a_norm_is_undone_exactly() {
        for (offset, dtype) in [(0., DType::BF16), (1., DType::BF16), (0., DType::F16), (1., DType::F32)] {
            let numbers: Vec<f32> =
                [0.7, -0.3, 1.5, 0., -1.].map(|x| half::bf16::from_f32(x).to_f32()).into();
            let norm = Norm { numbers: numbers.clone(), offset, dtype };
            let mut scales = vec![1.37, 0.61, 3.3, 2.2, 1.9];
            norm.exact(&mut scales).unwrap();
            for (number, scale) in numbers.iter().zip(scales) {
                let divided = (number + offset) / scale - offset;
                let written = Tensor::new(divided, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                let written: f32 = written.to_dtype(DType::F32).unwrap().to_scalar().unwrap();
                let again = (written + offset) * scale;
                assert!((again - (number + offset)).abs() < 2e-7 * (number + offset).abs().max(1e-3));
            }
        }
    }
}
