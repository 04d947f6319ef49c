//! One family, in each way.

use crate::checkpoint::Written;
use crate::recorder::Recorder;
use crate::{packed, unchanged, Run, STEPS};
use candle::{Result, Tensor};
use candle_quant::{Checkpoint, QuantFormat};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// How far logits of packed weights may be from those of dequantized ones, in standard deviations of the latter.
const BOUND: f64 = 1e-5;

/// Held while packed weights are computed on: the count of dense copies is one for the process.
static ALONE: Mutex<()> = Mutex::new(());

pub fn compare(
    name: &str,
    unchanged: fn() -> unchanged::Family,
    swapped: fn() -> packed::Family,
) -> Result<()> {
    let family = unchanged();
    let recorder = Recorder::new(family.optional);
    drop((family.build)(&family.config, unchanged::on(recorder.clone()))?);
    let tensors = recorder.tensors();

    for format in [QuantFormat::affine(4, 64)?, QuantFormat::MXFP4] {
        let name = format!("{name} {format}");
        let written = Written::new(family.config.clone(), &tensors, format)?;
        let folder = written.file().parent().unwrap().to_owned();
        let builder = unchanged::dequantized(&Checkpoint::open(folder)?);
        let dequantized = run((family.build)(&family.config, builder)?)?;
        not_degenerate(&name, &dequantized)?;
        let dense = run((family.build)(&family.config, unchanged::dense(&written.dense_file())?)?)?;
        for (step, (dequantized, dense)) in dequantized.iter().zip(&dense).enumerate() {
            assert_eq!(flat(dequantized)?, flat(dense)?, "{name}, step {step}: dequantized and dense");
        }

        let swapped = swapped();
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let copies = packed::dense_copies();
        let (builder, record) = packed::open(&written.file())?;
        let outputs = run((swapped.build)(&swapped.config, builder)?)?;
        let copies = packed::dense_copies() - copies;
        drop(alone);
        for (step, (output, expected)) in outputs.iter().zip(&dequantized).enumerate() {
            let distance = distance(output, expected)?;
            println!("{name}, step {step}: {distance:.1e} standard deviations");
            assert!(distance <= BOUND, "{name}, step {step}: {distance:e} standard deviations");
        }
        println!("{name}: {} packed weights, {copies} dense copies", written.packed.len());
        assert_eq!(copies, named(&written, swapped.copied).len(), "{name}: dense copies of packed weights");
        let loaded = record.loaded();
        let form = |weight: &String| loaded.get(weight.strip_suffix(".weight").unwrap()).copied();
        let elsewise = written.packed.iter().filter(|weight| form(weight) != Some(packed::LoadedAs::Packed));
        let elsewise: BTreeSet<_> = elsewise.map(|weight| (weight, form(weight))).collect();
        let expected = named(&written, swapped.read_dense).into_iter();
        let expected: BTreeSet<_> =
            expected.map(|weight| (weight, Some(packed::LoadedAs::Dequantized))).collect();
        assert_eq!(elsewise, expected, "{name}: packed weights that the model got in another form");
    }
    Ok(())
}

/// The packed weights whose names end as a table says.
fn named<'a>(written: &'a Written, table: &[(&str, &str)]) -> Vec<&'a String> {
    let end_with = |end| written.packed.iter().filter(move |weight| weight.ends_with(end)).peekable();
    let named = table.iter().flat_map(|(end, _)| {
        let mut weights = end_with(*end);
        assert!(weights.peek().is_some(), "the table names {end}, of which there is none");
        weights
    });
    named.collect()
}

fn run(model: Run) -> Result<Vec<Tensor>> {
    (0..STEPS).map(model).collect()
}

fn flat(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

fn deviation(values: &[f32]) -> f64 {
    let mean = values.iter().copied().map(f64::from).sum::<f64>() / values.len() as f64;
    (values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}

/// The largest difference, in standard deviations of what is expected.
fn distance(actual: &Tensor, expected: &Tensor) -> Result<f64> {
    assert_eq!(actual.dims(), expected.dims());
    let (actual, expected) = (flat(actual)?, flat(expected)?);
    assert!(actual.iter().all(|value| value.is_finite()), "not finite");
    let differences = actual.iter().zip(&expected).map(|(a, e)| f64::from((a - e).abs()));
    Ok(differences.fold(0., f64::max) / deviation(&expected))
}

/// Outputs are finite and vary; those of one position are not those of the next one, nor of the next step.
fn not_degenerate(name: &str, outputs: &[Tensor]) -> Result<()> {
    let mut rows = Vec::new();
    for output in outputs {
        let width = output.dim(candle::D::Minus1)?;
        rows.extend(output.reshape(((), width))?.to_vec2::<f32>()?);
    }
    assert!(rows.iter().flatten().all(|value| value.is_finite()), "{name}: not finite");
    let deviation = deviation(&rows.concat());
    assert!(deviation > 1e-3, "{name}: a standard deviation of {deviation}");
    for (row, next) in rows.iter().zip(&rows[1..]) {
        let differs = row.iter().zip(next).any(|(a, b)| f64::from((a - b).abs()) > deviation / 100.);
        assert!(differs, "{name}: two positions with equal outputs");
    }
    Ok(())
}
