//! The error of a product, against f64 on the same weights.

use crate::contenders::Contender;
use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};

const CHECKED_ROWS_OF_X: usize = 3;

pub struct Error {
    /// L2, relative to the exact product.
    pub relative: f64,
    /// The same, in units of what rounding the exact product costs.
    pub over_rounding: f64,
}

/// The error of the contender's first copy for `x`, on some rows.
pub fn of(contender: &Contender, x: &Tensor) -> Result<Error> {
    let y = (contender.copies[0])(x)?.to_device(&Device::Cpu)?;
    let round: fn(f64) -> f64 = match y.dtype() {
        DType::F16 => |value| f16::from_f64(value).to_f64(),
        DType::BF16 => |value| bf16::from_f64(value).to_f64(),
        _ => |value| f64::from(value as f32),
    };
    let (y, x) = (rows(&y)?, rows(&x.to_device(&Device::Cpu)?)?);
    let (mut error, mut rounding, mut size) = (0f64, 0f64, 0f64);
    let step = x.len().div_ceil(CHECKED_ROWS_OF_X);
    for m in (0..x.len()).step_by(step).chain([x.len() - 1]) {
        for (row, weights) in &contender.checked {
            let exact: f64 = weights.iter().zip(&x[m]).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            error += (f64::from(y[m][*row]) - exact).powi(2);
            rounding += (round(exact) - exact).powi(2);
            size += exact * exact;
        }
    }
    Ok(Error { relative: (error / size).sqrt(), over_rounding: (error / rounding).sqrt() })
}

fn rows(tensor: &Tensor) -> Result<Vec<Vec<f32>>> {
    tensor.to_dtype(DType::F32)?.to_vec2()
}
