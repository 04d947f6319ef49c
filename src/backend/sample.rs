//! Drawing tokens from logits.

use super::cpu::sample::{draw_row, Row, Scratch};
use super::{cuda, unsupported_dtype};
use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use std::cell::RefCell;

/// Which tokens [`sample`] may draw. Temperature, top-k, top-p and min-p come in this order, each on what the one before has
/// left, as transformers orders them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleOptions {
    /// Divides the logits; 0 always takes the largest one.
    pub temperature: f64,
    /// Only the k most likely tokens; of equally likely ones the first.
    pub top_k: Option<usize>,
    /// Only the smallest set of most likely tokens whose probabilities sum to p or more; of equally likely ones the first.
    pub top_p: Option<f64>,
    /// Only tokens that are at least p times as likely as the most likely one.
    pub min_p: Option<f64>,
}

impl SampleOptions {
    /// Always the most likely token, and of equally likely ones the first.
    pub const GREEDY: Self = Self { temperature: 0., top_k: None, top_p: None, min_p: None };

    /// Whether the values have a meaning.
    ///
    /// # Errors
    /// If the temperature is negative or not finite, k is 0, or a p is no probability (0 counts for min-p alone).
    pub fn validate(&self) -> Result<()> {
        let check = |what: &str, expected: &str, value: f64, fits: bool| match fits {
            true => Ok(()),
            false => Err(Error::mismatch(what, expected, value.to_string())),
        };
        let Self { temperature, top_k, top_p, min_p } = *self;
        check(
            "temperature",
            "a finite number, at least 0",
            temperature,
            temperature.is_finite() && temperature >= 0.,
        )?;
        if top_k == Some(0) {
            return Err(Error::mismatch("top-k", "at least 1", "0"));
        }
        if let Some(p) = top_p {
            check("top-p", "above 0 and at most 1", p, p > 0. && p <= 1.)?;
        }
        if let Some(p) = min_p {
            check("min-p", "from 0 to 1", p, (0. ..=1.).contains(&p))?;
        }
        Ok(())
    }
}

/// Draws a token for each row of logits.
///
/// Probabilities are integers here: the weight of a token is 2^31 exp((logit - largest) / temperature), rounded down, and a draw
/// compares a random number with sums of weights. Such sums are exact in any order, so that a CUDA device, which reads the
/// logits where they are, draws the tokens that the CPU draws. A token that is 2^31 times less likely than the most likely one is
/// never drawn.
///
/// * `logits`: `[vocabulary]` or `[rows, vocabulary]`, floats; on a CUDA device 65535 rows at most. A logit of minus infinity is
///   a forbidden token.
/// * `seed`, `step`: the random number of row `r` is a function of `seed`, `step` and `r` (Philox4x32-10), so that each can be
///   drawn without those before it.
///
/// Returns a token for each row.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_quant::ops::{sample, SampleOptions};
///
/// let logits = Tensor::new(&[[0.1f32, 2., -1., 1.9], [3., 0., 0., 0.]], &Device::Cpu)?;
/// assert_eq!(sample(&logits, &SampleOptions::GREEDY, 0, 0)?, [1, 0]);
///
/// let options = SampleOptions { temperature: 0.8, top_k: Some(2), ..SampleOptions::GREEDY };
/// for step in 0..100 {
///     let tokens = sample(&logits, &options, 42, step)?;
///     assert!(matches!(tokens[0], 1 | 3));
///     assert_eq!(tokens, sample(&logits, &options, 42, step)?);
/// }
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// # Errors
/// As those of [`SampleOptions::validate`]; if `logits` is neither a vector nor a matrix of floats; or if a row is empty, has NaN
/// or infinity, or nothing but minus infinity.
pub fn sample(logits: &Tensor, options: &SampleOptions, seed: u64, step: u64) -> Result<Vec<u32>> {
    options.validate()?;
    let (rows, vocabulary) = match *logits.dims() {
        [vocabulary] => (1, vocabulary),
        [rows, vocabulary] => (rows, vocabulary),
        _ => {
            let found = format!("{:?}", logits.dims());
            return Err(Error::mismatch("logits", "[vocabulary] or [rows, vocabulary]", found));
        }
    };
    if !logits.dtype().is_float() {
        return Err(unsupported_dtype("sample", logits.dtype()).into());
    }
    let choice = Choice::new(options, vocabulary);
    let draw = Draw { seed, step };
    let tokens = match logits.device() {
        // No memory of CUDA's is empty.
        Device::Cuda(_) if rows * vocabulary > 0 => {
            let is_read = matches!(logits.dtype(), DType::F32 | DType::F16 | DType::BF16);
            let logits = if is_read { logits.clone() } else { logits.to_dtype(DType::F32)? };
            cuda::sample(&logits.reshape((rows, vocabulary))?.contiguous()?, &choice, draw)?
        }
        Device::Cpu | Device::Cuda(_) | Device::Metal(_) => {
            on_cpu(logits, (rows, vocabulary), &choice, draw)?
        }
    };
    finite(tokens)
}

/// Tokens, if all were drawn from logits with a meaning.
pub(crate) fn finite(tokens: Vec<u32>) -> Result<Vec<u32>> {
    match tokens.iter().all(|token| *token != NOT_FINITE) {
        true => Ok(tokens),
        false => Err(Error::mismatch("logits", "finite numbers", "NaN or infinity, or none at all")),
    }
}

/// The token of a row whose logits have no meaning.
pub(crate) const NOT_FINITE: u32 = u32::MAX;

/// The options for rows of some vocabulary, as numbers with which every device computes alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    /// 0: the largest logit.
    pub(crate) temperature: f32,
    /// Less than the vocabulary.
    pub(crate) top_k: Option<usize>,
    /// In units of 2^-32, at most 1.
    pub(crate) top_p: Option<u64>,
    /// What a token weighs at least, at least 1.
    pub(crate) least_weight: u32,
}

impl Choice {
    pub(crate) fn new(options: &SampleOptions, vocabulary: usize) -> Self {
        const UNIT: f64 = (1u64 << 32) as f64;
        let SampleOptions { temperature, top_k, top_p, min_p } = *options;
        Self {
            // Neither 0 nor infinity, which would make NaN of logits that are equal to the largest.
            temperature: match temperature == 0. {
                true => 0.,
                false => (temperature as f32).clamp(f32::MIN_POSITIVE, f32::MAX),
            },
            top_k: top_k.filter(|k| *k < vocabulary),
            top_p: top_p.filter(|p| *p < 1.).map(|p| (p * UNIT).round() as u64),
            // Rounded up.
            least_weight: min_p.map_or(1, |p| ((p * f64::from(i32::MAX)).ceil() as u32).max(1)),
        }
    }
}

/// Which random numbers are drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw {
    pub(crate) seed: u64,
    pub(crate) step: u64,
}

fn on_cpu(
    logits: &Tensor,
    (rows, vocabulary): (usize, usize),
    choice: &Choice,
    draw: Draw,
) -> Result<Vec<u32>> {
    thread_local! {
        /// Memory that is used again for every token.
        static SCRATCH: RefCell<Scratch> = RefCell::default();
    }
    let logits = logits.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?;
    // Logits that are in memory already are not copied.
    let (storage, layout) = logits.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) =
        (&*storage, layout.contiguous_offsets())
    else {
        return Err(unsupported_dtype("sample", logits.dtype()).into());
    };
    let values = values.get(start..end).unwrap_or_default();
    SCRATCH.with_borrow_mut(|scratch| {
        let tokens = (0..rows).map(|row| {
            let logits = values.get(row * vocabulary..(row + 1) * vocabulary).unwrap_or_default();
            draw_row(Row { logits, index: row as u64 }, choice, draw, scratch).unwrap_or(NOT_FINITE)
        });
        Ok(tokens.collect())
    })
}
