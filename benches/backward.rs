//! The gradient of x, `dy * W`, on the CPU: packed weights beside dense f32, in one run.
//!
//! `cargo bench --bench backward` prints criterion's statistics and, at the end, one table: the median time, its ratio to
//! candle's dense f32 `dy.matmul(&w)` with the dequantized weight, and the error, relative RMS against f64 on the same
//! weight. `CANDLE_QUANT_BENCH_OUT=FILE` and filters work as for the bench `matmul`. For each weight:
//!
//! * `dense matmul`: `dy.matmul(&w)`;
//! * `dequantize, matmul`: the same, for which the whole packed weight is dequantized;
//! * `dense backward`: candle's `backward` of a frozen dense f32 layer;
//! * `packed backward`: the same of a packed layer of this crate.
//!
//! `backward` begins with a gradient of ones, as all do here, and adds what it computes to zeros: its time is more than
//! that of the product. Errors are those of a random gradient.

mod common;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_quant::{QuantFormat, QuantTensor};
use common::Bench;
use std::hint::black_box;
use std::time::Duration;

/// N and K.
const SHAPES: [(usize, usize); 2] = [(4096, 4096), (11008, 4096)];
const M: [usize; 2] = [32, 512];

const FORMATS: [QuantFormat; 4] = [
    QuantFormat::affine_opt(4, 64).unwrap(),
    QuantFormat::affine_opt(8, 64).unwrap(),
    QuantFormat::MXFP4,
    QuantFormat::NVFP4,
];

/// What the others are compared with.
const DENSE: &str = "dense matmul";

/// Rows and columns of a gradient whose error is computed.
const CHECKED: (usize, usize) = (4, 64);

/// One way to compute the gradient of x from that of y.
struct Contender<'a> {
    name: &'static str,
    /// From ones.
    compute: Box<dyn Fn() -> Result<Tensor> + 'a>,
    /// The result from random numbers.
    checked: Tensor,
}

/// The gradient of `x` if that of `y` is ones.
fn gradient(y: &Tensor, x: &Var) -> Result<Tensor> {
    y.backward()?.get(x).cloned().ok_or_else(|| candle_core::Error::Msg("no gradient".to_string()))
}

fn contenders<'a>(
    packed: &'a QuantTensor,
    dense: &'a Tensor,
    x: &'a Var,
    random: &Tensor,
) -> Result<Vec<Contender<'a>>> {
    let ones = random.ones_like()?;
    let layers = [x.matmul(&dense.t()?)?, packed.matmul(x, None)?];
    let [of_dense, of_packed] = layers.each_ref().map(|y| gradient(&(y * random)?, x));
    let [y_of_dense, y_of_packed] = layers;
    let dy = ones.clone();
    let whole = |dy: &Tensor| dy.matmul(&packed.dequantize(DType::F32)?);
    Ok(vec![
        Contender {
            name: DENSE,
            checked: random.matmul(dense)?,
            compute: Box::new(move || dy.matmul(dense)),
        },
        Contender {
            name: "dequantize, matmul",
            checked: whole(random)?,
            compute: Box::new(move || whole(&ones)),
        },
        Contender {
            name: "dense backward",
            checked: of_dense?,
            compute: Box::new(move || gradient(&y_of_dense, x)),
        },
        Contender {
            name: "packed backward",
            checked: of_packed?,
            compute: Box::new(move || gradient(&y_of_packed, x)),
        },
    ])
}

/// Relative RMS of a gradient against f64.
fn error(dx: &Tensor, dy: &Tensor, dense: &Tensor) -> Result<f64> {
    let (rows, columns) = CHECKED;
    let part = |of: &Tensor| of.narrow(1, 0, columns)?.to_dtype(DType::F64);
    let want = dy.narrow(0, 0, rows)?.to_dtype(DType::F64)?.matmul(&part(dense)?.contiguous()?)?;
    let got = part(&dx.narrow(0, 0, rows)?)?;
    let sum = |of: Tensor| of.sqr()?.sum_all()?.to_scalar::<f64>();
    Ok((sum((got - &want)?)? / sum(want)?).sqrt())
}

fn main() -> Result<()> {
    let columns = ["N x K", "M", "weight", "computed by", "ms", "dense / this", "error"];
    let mut bench = Bench::new(&columns, Duration::from_secs(3));
    for (n, k) in SHAPES {
        let weight = Tensor::randn(0f32, 0.02, (n, k), &Device::Cpu)?.to_dtype(DType::BF16)?;
        for format in FORMATS {
            let packed = QuantTensor::quantize(&weight, format)?;
            let dense = packed.dequantize(DType::F32)?;
            for m in M {
                let x = Var::from_tensor(&Tensor::randn(0f32, 1., (m, k), &Device::Cpu)?)?;
                let random = Tensor::randn(0f32, 1., (m, n), &Device::Cpu)?;
                let mut dense_ms = None;
                for Contender { name, compute, checked } in contenders(&packed, &dense, &x, &random)? {
                    let id = format!("{n}x{k}/M={m}/{format}/{name}");
                    let Some(ms) = bench.time(&id, || black_box(compute())) else { continue };
                    if name == DENSE {
                        dense_ms = Some(ms);
                    }
                    bench.row(&[
                        format!("{n} x {k}"),
                        m.to_string(),
                        format.to_string(),
                        name.to_string(),
                        format!("{ms:.2}"),
                        dense_ms.map_or("-".to_string(), |dense| format!("{:.2}", dense / ms)),
                        format!("{:.1e}", error(&checked, &random, &dense)?),
                    ]);
                }
            }
        }
    }
    bench.finish()
}
