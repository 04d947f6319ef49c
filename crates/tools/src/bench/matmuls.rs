//! The matmuls of a model, each kind by itself.

use super::spread::Spread;
use super::BenchEvent;
use candle_core::{Module, Tensor};
use candle_quant::{LayerWeight, Linear, Result};
use candle_quant_models::Model;
use serde::Serialize;
use std::time::Instant;

/// How long a repetition takes at least.
const LEAST_SECONDS: f64 = 0.02;

/// What a matmul with weights of one shape and format took.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MatmulFigure {
    /// Rows of the weight: outputs.
    pub n: usize,
    /// Elements of a row: inputs.
    pub k: usize,
    /// The format, `affine 4-bit g64` for example.
    pub format: String,
    /// How many weights of the model are of this kind. They take turns.
    pub count: usize,
    /// Rows of x.
    pub m: usize,
    /// The time of one matmul.
    pub seconds: Spread,
    /// Bytes of the weight.
    pub bytes: u64,
    /// Bytes of the weight in a second.
    pub bytes_per_second: f64,
    /// 2 * M * N * K in a second.
    pub flops_per_second: f64,
}

/// Weights of one shape and format.
struct Kind {
    n: usize,
    k: usize,
    format: String,
    weights: Vec<LayerWeight>,
}

/// Multiplies each kind of weight of a model with each number of rows of x.
pub(super) fn time_matmuls(
    model: &Model,
    rows: &[usize],
    repetitions: usize,
    progress: &mut dyn FnMut(BenchEvent),
) -> Result<Vec<MatmulFigure>> {
    let mut figures = Vec::new();
    for kind in kinds(model)? {
        for &m in rows {
            progress(BenchEvent::Matmul { n: kind.n, k: kind.k, m });
            figures.push(kind.time(model, m, repetitions)?);
        }
    }
    Ok(figures)
}

/// In the order in which the model has the first of each.
fn kinds(model: &Model) -> Result<Vec<Kind>> {
    let mut kinds: Vec<Kind> = Vec::new();
    for weight in model.matmul_weights() {
        let format = weight.format_name();
        let (n, k) = match *weight.dims().as_slice() {
            [.., n, k] => (n, k),
            _ => continue,
        };
        let matrices = matrices(weight)?;
        match kinds.iter_mut().find(|kind| (kind.n, kind.k, &kind.format) == (n, k, &format)) {
            Some(kind) => kind.weights.extend(matrices),
            None => kinds.push(Kind { n, k, format, weights: matrices }),
        }
    }
    Ok(kinds)
}

/// The matrices of a stack, or the weight itself.
fn matrices(weight: LayerWeight) -> Result<Vec<LayerWeight>> {
    match (weight.quantized(), weight.dims().as_slice()) {
        (Some(stack), &[count, _, _]) => {
            (0..count).map(|index| Ok(LayerWeight::from(stack.matrix(index)?))).collect()
        }
        _ => Ok(vec![weight]),
    }
}

impl Kind {
    fn time(&self, model: &Model, m: usize, repetitions: usize) -> Result<MatmulFigure> {
        let x = Tensor::randn(0f32, 1., (m, self.k), model.device())?.to_dtype(model.dtype())?;
        let layers: Vec<_> = self.weights.iter().map(|weight| Linear::new(weight.clone(), None)).collect();
        let mut in_turn = layers.iter().cycle();
        let mut multiply = |enough: &dyn Fn(usize, f64) -> bool| -> Result<(usize, f64)> {
            let (start, mut done) = (Instant::now(), 0);
            for layer in in_turn.by_ref() {
                layer.forward(&x)?;
                done += 1;
                if enough(done, start.elapsed().as_secs_f64()) {
                    break;
                }
            }
            model.device().synchronize()?;
            Ok((done, start.elapsed().as_secs_f64()))
        };
        // The first one may arrange weights or start threads.
        multiply(&|_, _| true)?;
        let (count, _) = multiply(&|_, seconds| seconds >= LEAST_SECONDS)?;
        let times = (0..repetitions).map(|_| Ok(multiply(&|done, _| done >= count)?.1 / count.max(1) as f64));
        let seconds = Spread::of(&times.collect::<Result<Vec<_>>>()?);
        let bytes = self.weights.first().map_or(0, LayerWeight::size_in_bytes) as u64;
        let per_second = |amount: f64| amount / seconds.mean.max(f64::MIN_POSITIVE);
        Ok(MatmulFigure {
            n: self.n,
            k: self.k,
            format: self.format.clone(),
            count: self.weights.len(),
            m,
            seconds,
            bytes,
            bytes_per_second: per_second(bytes as f64),
            flops_per_second: per_second(2. * m as f64 * self.n as f64 * self.k as f64),
        })
    }
}
