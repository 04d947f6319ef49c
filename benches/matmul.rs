//! `x * W^T` on the CPU: every format of this crate beside candle's dense f32 `matmul` and candle's
//! `QMatMul`, in one run.
//!
//! `cargo bench --bench matmul` prints criterion's statistics and, at the end, one table: the median time,
//! its ratio to dense f32, and the error, relative RMS against f64 on the same quantized weights. Activations
//! are f32, for M = 1 and the formats of this crate also bf16 (whose error is that of rounding to bf16), and f32 with 16
//! or 8 bits in products of integers, as candle's `QMatMul` has 8. With
//! `CANDLE_QUANT_BENCH_OUT=FILE` the table is written there too. A filter (`cargo bench -- 11008x4096/M=1/`)
//! leaves out what it does not match.
//!
//! A single weight stays in a large cache from one product to the next, as those of a model do not. `streamed`
//! multiplies with copies in turn, which together exceed any cache; all contenders' copies take 8 GB of memory.

mod common;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_quant::{ActivationPrecision, QuantFormat, QuantTensor};
use common::Bench;
use std::cell::Cell;
use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;

/// N and K, values of M, and whether weights are streamed.
const CASES: [(usize, usize, &[usize], bool); 3] = [
    (4096, 4096, &[1, 2, 4, 8, 16, 32, 512], false),
    (11008, 4096, &[1, 8, 32, 512], false),
    (11008, 4096, &[1, 8], true),
];

/// Bytes of the copies that are multiplied with in turn: twice the largest third-level cache there is in one piece.
const STREAMED_BYTES: usize = 1 << 29;

/// Rows and columns of the product whose error is computed.
const CHECKED_ROWS: usize = 64;
const CHECKED_COLUMNS: usize = 4;

type Multiply = Rc<dyn Fn(&Tensor) -> Result<Tensor>>;

/// One way to multiply.
struct Contender {
    name: String,
    bits_per_weight: f64,
    /// Whether it also takes bf16 activations.
    takes_bf16: bool,
    multiply: Multiply,
    activations: ActivationPrecision,
    /// The first [`CHECKED_ROWS`] rows of what it multiplies with.
    weights: Vec<Vec<f32>>,
}

/// As many copies as make up that many bytes, and at least one, with which it multiplies in turn.
fn in_turn<T: 'static>(
    weight: T,
    copied: usize,
    (bytes, copy): (usize, impl Fn(&T) -> Result<T>),
    x: &Tensor,
    multiply: impl Fn(&T, &Tensor) -> Result<Tensor> + 'static,
) -> Result<Multiply> {
    let mut copies = vec![weight];
    while copies.len() * bytes < copied {
        copies.push(copy(&copies[0])?);
    }
    // Candle arranges weights anew for its first product with them.
    copies.iter().try_for_each(|copy| multiply(copy, x).map(drop))?;
    let next = Cell::new(0);
    Ok(Rc::new(move |x| multiply(&copies[next.replace((next.get() + 1) % copies.len())], x)))
}

/// What the others are compared with.
const DENSE: &str = "candle dense f32";

fn contenders(n: usize, k: usize, streamed: bool) -> Result<Vec<Contender>> {
    let device = Device::Cpu;
    let copied = if streamed { STREAMED_BYTES } else { 0 };
    let x = Tensor::zeros((1, k), DType::F32, &device)?;
    let weight = Tensor::randn(0f32, 0.02, (n, k), &device)?;
    let head = |dense: &Tensor| dense.narrow(0, 0, CHECKED_ROWS)?.to_dtype(DType::F32)?.to_vec2::<f32>();
    let mut all = vec![Contender {
        name: DENSE.to_string(),
        bits_per_weight: 32.0,
        takes_bf16: false,
        activations: ActivationPrecision::Exact,
        weights: head(&weight)?,
        multiply: in_turn(weight.clone(), copied, (n * k * 4, Tensor::copy), &x, |weight, x| {
            x.matmul(&weight.t()?)
        })?,
    }];
    for (name, dtype) in [("Q4_0", GgmlDType::Q4_0), ("Q8_0", GgmlDType::Q8_0), ("Q4_K", GgmlDType::Q4K)] {
        let packed = QTensor::quantize(&weight, dtype)?;
        let bytes = packed.storage_size_in_bytes();
        let bits_per_weight = bytes as f64 * 8.0 / (n * k) as f64;
        let weights = head(&packed.dequantize(&device)?)?;
        let copy = |_: &QMatMul| {
            let copy = QStorage::from_data(packed.data()?.to_vec().into(), &device, dtype)?;
            QMatMul::from_qtensor(QTensor::new(copy, (n, k))?)
        };
        let multiply =
            in_turn(copy(&QMatMul::Tensor(weight.clone()))?, copied, (bytes, copy), &x, QMatMul::forward)?;
        let name = format!("candle {name}");
        let activations = ActivationPrecision::Exact;
        all.push(Contender { name, bits_per_weight, takes_bf16: false, multiply, activations, weights });
    }
    let affine = [4, 8, 1, 2, 3, 5, 6].into_iter().map(|bits| QuantFormat::affine(bits, 64).unwrap());
    let weight = weight.to_dtype(DType::BF16)?;
    for format in affine.chain([QuantFormat::MXFP4, QuantFormat::NVFP4, QuantFormat::MXFP8]) {
        let packed = QuantTensor::quantize(&weight, format)?;
        let weights = head(&packed.narrow(0, 0, CHECKED_ROWS)?.dequantize(DType::F32)?)?;
        let bits_per_weight = packed.bits_per_weight();
        let bytes = (packed.size_in_bytes(), copy);
        let multiply = in_turn(packed, copied, bytes, &x, |packed, x| packed.matmul(x, None))?;
        let name = format.to_string();
        for activations in [ActivationPrecision::Bits16, ActivationPrecision::Bits8] {
            let (name, multiply) = (format!("{name}, activations {activations}"), multiply.clone());
            let weights = weights.clone();
            all.push(Contender { name, bits_per_weight, takes_bf16: false, multiply, activations, weights });
        }
        let activations = ActivationPrecision::Exact;
        all.push(Contender { name, bits_per_weight, takes_bf16: true, multiply, activations, weights });
    }
    Ok(all)
}

fn copy(packed: &QuantTensor) -> Result<QuantTensor> {
    let copy = |tensor: Option<&Tensor>| tensor.map(Tensor::copy).transpose();
    let (words, scales) = (packed.packed().copy()?, packed.scales().copy()?);
    Ok(QuantTensor::new(
        packed.format(),
        words,
        scales,
        copy(packed.biases())?,
        copy(packed.global_scale())?,
    )?)
}

/// Relative RMS of the product against f64.
fn error(contender: &Contender, x: &Tensor) -> Result<f64> {
    let product = (contender.multiply)(x)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let (mut error, mut size) = (0.0, 0.0);
    for (x, product) in x.to_dtype(DType::F32)?.to_vec2::<f32>()?.iter().zip(&product).take(CHECKED_COLUMNS) {
        for (weights, got) in contender.weights.iter().zip(product) {
            let want: f64 = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            error += (f64::from(*got) - want).powi(2);
            size += want * want;
        }
    }
    Ok((error / size).sqrt())
}

fn main() -> Result<()> {
    let columns = ["N x K", "M", "x", "weights", "bits per weight", "ms", "dense / this", "error"];
    let mut bench = Bench::new(&columns, Duration::from_millis(1500));
    // A filter that names a shape keeps the weights of others from being made.
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let named = filter.split_once('/').map_or("", |(shape, _)| shape);
    for (n, k, columns, streamed) in CASES {
        let shape = format!("{n}x{k}{}", if streamed { " streamed" } else { "" });
        if named.starts_with(|first: char| first.is_ascii_digit()) && named != shape {
            continue;
        }
        let contenders = contenders(n, k, streamed)?;
        for &m in columns {
            let f32s = Tensor::randn(0f32, 1.0, (m, k), &Device::Cpu)?;
            let bf16s = f32s.to_dtype(DType::BF16)?;
            let mut dense = None;
            let in_bf16 = contenders.iter().filter(|contender| m == 1 && contender.takes_bf16);
            let in_f32 = contenders.iter().map(|contender| (contender, "f32", &f32s));
            for (contender, dtype, x) in in_f32.chain(in_bf16.map(|contender| (contender, "bf16", &bf16s))) {
                let Contender { name, bits_per_weight, .. } = contender;
                let id = format!("{shape}/M={m}/{dtype}/{name}");
                contender.activations.set();
                let Some(ms) = bench.time(&id, || (contender.multiply)(black_box(x))) else { continue };
                if name == DENSE {
                    dense = Some(ms);
                }
                // A filter may have left out dense f32.
                let ratio = dense.map_or("-".to_string(), |dense| format!("{:.2}", dense / ms));
                bench.row(&[
                    shape.clone(),
                    m.to_string(),
                    dtype.to_string(),
                    name.clone(),
                    format!("{bits_per_weight:.2}"),
                    format!("{ms:.3}"),
                    ratio,
                    format!("{:.1e}", error(contender, x)?),
                ]);
            }
        }
    }
    bench.finish()
}
