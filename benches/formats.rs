//! Every format's product on the CPU per byte of the weight: does one take longer than its bytes say?
//!
//! `cargo bench --bench formats` multiplies one row of f32 activations, exactly, with copies of a weight in turn, which
//! together exceed any cache, and a prompt of 128 rows with one of them. Codes and scales are random: kernels take the same
//! time whatever they are. A filter (`cargo bench --bench formats -- q6_k`) leaves out the formats that it does not match.
//! With `CANDLE_QUANT_BENCH_OUT=FILE` the table is written there too.

mod common;

use candle_core::{DType, Device, Result, Tensor};
use candle_quant::format::{Scale, ZeroPoint, SUPER_BLOCK};
use candle_quant::{QuantFormat, QuantTensor, SuperBlocks};
use common::Bench;
use std::time::Duration;

const DIMS: (usize, usize) = (4096, 4096);

/// Twice the largest third-level cache there is in one piece.
const STREAMED_BYTES: usize = 1 << 29;

const PROMPT: usize = 128;

/// A weight of random codes, whose scales are small numbers.
fn weight(format: QuantFormat) -> Result<QuantTensor> {
    let (n, k) = DIMS;
    let device = &Device::Cpu;
    let bytes =
        |from: f32, to: f32, dims: (usize, usize)| Tensor::rand(from, to, dims, device)?.to_dtype(DType::U8);
    let floats = |dims: (usize, usize)| Tensor::rand(0.001f32, 0.002, dims, device)?.to_dtype(DType::F16);
    let half = || Tensor::rand(0f32, 65535.0, (n, k * format.bits() / 32), device)?.to_dtype(DType::U32);
    let packed = (half()? + (half()? * 65536.0)?)?;
    let groups = (n, format.groups_per_row(k)?);
    let has_biases = format.zero_point() == ZeroPoint::Bias;
    if format.scale() == Scale::SuperBlock {
        let steps = || bytes(0.0, 64.0, groups);
        let of_blocks = || floats((n, k / SUPER_BLOCK));
        let biases = has_biases.then(steps).transpose()?;
        let super_blocks =
            SuperBlocks { scales: of_blocks()?, biases: has_biases.then(of_blocks).transpose()? };
        return Ok(QuantTensor::with_super_blocks(format, packed, (steps()?, biases), super_blocks)?);
    }
    let scales = match format.scale() {
        Scale::E8m0 => bytes(110.0, 120.0, groups)?,
        Scale::E4m3 => bytes(8.0, 64.0, groups)?,
        _ => floats(groups)?,
    };
    let biases = has_biases.then(|| floats(groups)).transpose()?;
    Ok(QuantTensor::new(format, packed, scales, biases, None)?)
}

fn copy(weight: &QuantTensor) -> Result<QuantTensor> {
    let copy = |tensor: Option<&Tensor>| tensor.map(Tensor::copy).transpose();
    let packed = weight.packed().copy()?;
    let (scales, biases) = (weight.scales().copy()?, copy(weight.biases())?);
    Ok(match weight.super_blocks() {
        Some(of) => {
            let of = SuperBlocks { scales: of.scales.copy()?, biases: copy(of.biases.as_ref())? };
            QuantTensor::with_super_blocks(weight.format(), packed, (scales, biases), of)?
        }
        None => QuantTensor::new(weight.format(), packed, scales, biases, None)?,
    })
}

fn main() -> Result<()> {
    let prompt = format!("ms, {PROMPT} rows");
    let columns =
        ["weights", "bits per weight", "ms, 1 row", "GB/s", "time per byte", prompt.as_str(), "time"];
    let mut bench = Bench::new(&columns, Duration::from_millis(1000));
    let usual = QuantFormat::affine(4, 64)?;
    let others =
        QuantFormat::all().into_iter().chain(QuantFormat::only_read()).filter(|other| *other != usual);
    let rows = |m| Tensor::randn(0f32, 1.0, (m, DIMS.1), &Device::Cpu);
    let (row, prompt) = (rows(1)?, rows(PROMPT)?);
    let mut of_usual = None;
    for format in std::iter::once(usual).chain(others) {
        // None are made of a format that is left out.
        let mut copies = Vec::new();
        let mut next = 0;
        let one = bench.time(&format!("{format}/1"), || {
            if copies.is_empty() {
                copies.push(weight(format)?);
            }
            while copies.len() * copies[0].size_in_bytes() < STREAMED_BYTES {
                copies.push(copy(&copies[0])?);
            }
            next = (next + 1) % copies.len();
            copies[next].matmul(&row, None)
        });
        let Some(one) = one else { continue };
        let many = bench.time(&format!("{format}/{PROMPT}"), || copies[0].matmul(&prompt, None));
        let Some(many) = many else { continue };
        let rate = copies[0].size_in_bytes() as f64 / one / 1e6;
        let (rate_of_usual, many_of_usual) = *of_usual.get_or_insert((rate, many));
        bench.row(&[
            format.to_string(),
            format!("{:.2}", copies[0].bits_per_weight()),
            format!("{one:.3}"),
            format!("{rate:.1}"),
            format!("{:.2}", rate_of_usual / rate),
            format!("{many:.2}"),
            format!("{:.2}", many / many_of_usual),
        ]);
    }
    bench.finish()
}
