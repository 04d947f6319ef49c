//! The error of a result, against f64 on the same weights.

use crate::contenders::Contender;
use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};

const CHECKED_ROWS_OF_X: usize = 3;

/// Some elements of a result, by row and column, from the rows of x.
pub type Exact<'p> = Box<dyn Fn(&[Vec<f32>]) -> Result<Vec<(usize, usize, f64)>> + 'p>;

pub struct Error {
    /// L2, relative to the exact result.
    pub relative: f64,
    /// The same, in units of what rounding the exact result costs.
    pub over_rounding: f64,
}

/// Products of some rows of a weight.
pub fn products(checked: Vec<(usize, Vec<f32>)>) -> Exact<'static> {
    Box::new(move |x| {
        let step = x.len().div_ceil(CHECKED_ROWS_OF_X);
        let rows_of_x = (0..x.len()).step_by(step).chain([x.len() - 1]);
        let product = |m: usize, (row, weights): &(usize, Vec<f32>)| (m, *row, dot(weights, &x[m]));
        Ok(rows_of_x.flat_map(|m| checked.iter().map(move |weights| product(m, weights))).collect())
    })
}

/// Products with the first row of another x, which is given here.
pub fn first_row(checked: Vec<(usize, Vec<f32>)>, x: Vec<f32>) -> Exact<'static> {
    Box::new(move |_| Ok(checked.iter().map(|(row, weights)| (0, *row, dot(weights, &x))).collect()))
}

pub fn dot<X: Copy + Into<f64>>(weights: &[f32], x: &[X]) -> f64 {
    weights.iter().zip(x).map(|(w, x)| f64::from(*w) * (*x).into()).sum()
}

/// The error of the contender's first copy for `x`.
pub fn of(contender: &Contender, x: &Tensor) -> Result<Error> {
    let y = (contender.copies[0])(x)?.to_device(&Device::Cpu)?;
    let round: fn(f64) -> f64 = match y.dtype() {
        DType::F16 => |value| f16::from_f64(value).to_f64(),
        DType::BF16 => |value| bf16::from_f64(value).to_f64(),
        _ => |value| f64::from(value as f32),
    };
    let (y, x) = (rows(&y)?, rows(&x.to_device(&Device::Cpu)?)?);
    let (mut error, mut rounding, mut size) = (0f64, 0f64, 0f64);
    for (row, column, exact) in (contender.exact)(&x)? {
        error += (f64::from(y[row][column]) - exact).powi(2);
        rounding += (round(exact) - exact).powi(2);
        size += exact * exact;
    }
    Ok(Error { relative: (error / size).sqrt(), over_rounding: (error / rounding).sqrt() })
}

/// `[.., K]` as `[rows, K]`.
fn rows(tensor: &Tensor) -> Result<Vec<Vec<f32>>> {
    tensor.flatten_to(tensor.rank() - 2)?.to_dtype(DType::F32)?.to_vec2()
}
