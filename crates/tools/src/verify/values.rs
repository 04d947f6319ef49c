//! Numbers that are not finite, and the codes that stand for them.

use super::report::Finding;
use crate::chunks::Chunks;
use candle_core::{DType, Tensor};
use candle_quant::checkpoint::Weight;
use candle_quant::format::{Element, Scale};
use candle_quant::{QuantTensor, Result};
use rayon::prelude::*;

/// Reads a weight and looks at all its numbers.
pub(super) fn check(name: &str, weight: &Weight) -> Vec<Finding> {
    let result = Chunks::load(weight).and_then(|chunks| problems(&chunks));
    match result {
        Ok(problems) => problems.into_iter().map(|problem| Finding::error(name, problem)).collect(),
        Err(error) => vec![Finding::from_error(Some(name), &error)],
    }
}

fn problems(chunks: &Chunks) -> Result<Vec<String>> {
    if !chunks.is_float() {
        return Ok(Vec::new());
    }
    let mut problems = match chunks.packed() {
        Some(packed) => problems_of_parts(packed)?,
        None => Vec::new(),
    };
    let dequantized = chunks
        .map(|numbers| Tally::of(numbers.iter().copied()))?
        .into_iter()
        .fold(Tally::default(), Tally::add);
    match (dequantized.problem(), chunks.packed()) {
        // The parts that make them so are told of.
        (Some(_), Some(_)) if !problems.is_empty() => {}
        (Some(problem), Some(_)) => {
            problems.push(format!("dequantized, {problem}: its scales are too large for f32"));
        }
        (Some(problem), None) => problems.push(problem),
        (None, _) => {}
    }
    Ok(problems)
}

/// What is wrong with scales, biases and codes, each by itself.
fn problems_of_parts(weight: &QuantTensor) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let floats = |part: &str, tensor: &Tensor| -> Result<Option<String>> {
        let numbers = tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let tally = Tally::of(numbers.iter().map(|&number| f64::from(number)));
        Ok(tally.problem().map(|problem| format!("{part}: {problem}")))
    };
    let bytes = |is_nan: fn(u8) -> bool, code: &str| -> Result<Option<String>> {
        let scales = weight.scales().flatten_all()?.to_vec1::<u8>()?;
        let count = scales.par_iter().filter(|byte| is_nan(**byte)).count();
        Ok((count > 0).then(|| format!("scales: {count} of {} are NaN ({code})", scales.len())))
    };
    problems.extend(match weight.format().scale() {
        Scale::Float => floats("scales", weight.scales())?,
        Scale::E8m0 => bytes(|byte| byte == u8::MAX, "E8M0 255")?,
        Scale::E4m3 => bytes(is_e4m3_nan, "E4M3 0x7F or 0xFF")?,
        // Every byte is a number; what it counts may not be.
        Scale::SuperBlock => None,
        other => Some(format!("scales: {other:?} are of a kind that is not checked")),
    });
    if let Some(biases) = weight.biases().filter(|biases| biases.dtype().is_float()) {
        problems.extend(floats("biases", biases)?);
    }
    if let Some(super_blocks) = weight.super_blocks() {
        problems.extend(floats("scales of super-blocks", &super_blocks.scales)?);
        if let Some(biases) = &super_blocks.biases {
            problems.extend(floats("biases of super-blocks", biases)?);
        }
    }
    if weight.format().element() == Element::E4m3 {
        let words = weight.packed().flatten_all()?.to_vec1::<u32>()?;
        let nan_codes = |word: &u32| word.to_le_bytes().into_iter().filter(|code| is_e4m3_nan(*code)).count();
        let count: usize = words.par_iter().map(nan_codes).sum();
        if count > 0 {
            let all = words.len() * size_of::<u32>();
            problems.push(format!("codes: {count} of {all} are NaN (E4M3 0x7F or 0xFF)"));
        }
    }
    Ok(problems)
}

fn is_e4m3_nan(code: u8) -> bool {
    code & 0x7F == 0x7F
}

/// How many numbers are not finite.
#[derive(Clone, Copy, Default)]
struct Tally {
    numbers: usize,
    nan: usize,
    infinite: usize,
}

impl Tally {
    fn of(numbers: impl IntoIterator<Item = f64>) -> Self {
        let mut tally = Self::default();
        for number in numbers {
            tally.numbers += 1;
            tally.nan += usize::from(number.is_nan());
            tally.infinite += usize::from(number.is_infinite());
        }
        tally
    }

    fn add(self, other: Self) -> Self {
        Self {
            numbers: self.numbers + other.numbers,
            nan: self.nan + other.nan,
            infinite: self.infinite + other.infinite,
        }
    }

    fn problem(&self) -> Option<String> {
        let Self { numbers, nan, infinite } = *self;
        match (nan, infinite) {
            (0, 0) => None,
            (nan, 0) => Some(format!("{nan} of {numbers} numbers are NaN")),
            (0, infinite) => Some(format!("{infinite} of {numbers} numbers are infinite")),
            _ => Some(format!("{nan} of {numbers} numbers are NaN and {infinite} infinite")),
        }
    }
}
