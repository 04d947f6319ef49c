//! In which formats a model fits into the memory of its devices.

use crate::convert::{ConvertOptions, ConvertPlan, Spec, Target};
use candle_quant::{Checkpoint, QuantFormat, Result};
use candle_quant_models::sharding::{Footprint, ShardPlan, ShardedTensor, Workload};
use std::cmp::Reverse;

/// What a model needs if its dense weights get a format.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Fit {
    /// The format, with which the output head and others get what the usual recipe says; [`Spec::Keep`]: as stored.
    pub format: Spec,
    /// Bits for each element of all matrices together.
    pub bits_per_weight: f64,
    /// What each rank needs.
    pub footprints: Vec<Footprint>,
}

impl Fit {
    /// The rank that needs most.
    pub fn largest(&self) -> Footprint {
        self.footprints.iter().copied().max_by_key(|footprint| footprint.total()).unwrap_or_default()
    }

    /// Whether every rank has enough with so many bytes.
    pub fn fits(&self, memory: u64) -> bool {
        self.largest().total() <= memory
    }
}

/// Whether there is anything that a format would change.
pub fn has_dense_matrices(plan: &ShardPlan) -> bool {
    plan.tensors().iter().any(|tensor| tensor.dense.is_some() && tensor.dims.len() > 1)
}

/// The formats that are tried for a kind of output: affine ones of 2 bits and more in groups of 64, and those with small
/// floats, as far as it has them.
pub fn formats(target: Target) -> Vec<Spec> {
    let affine = [8, 6, 5, 4, 3, 2].into_iter().filter_map(|bits| QuantFormat::affine_opt(bits, 64));
    let floats = [QuantFormat::MXFP8, QuantFormat::NVFP4, QuantFormat::MXFP4];
    affine.chain(floats).filter(|format| target.has(*format)).map(Spec::Packed).collect()
}

/// What the model of `source` needs as it is, and with its dense weights in each of `formats`; the largest first, of equal
/// ones in the order given. Of weights nothing is read.
///
/// ```
/// use candle_core::DType;
/// use candle_quant::Checkpoint;
/// use candle_quant_models::sharding::{ShardPlan, Workload};
/// use candle_quant_tools::convert::Target;
/// use candle_quant_tools::fit::{fits, formats};
///
/// # use candle_quant_tools::convert::{convert, ConvertOptions, ConvertPlan, RunOptions};
/// # let folder = tempfile::tempdir().unwrap();
/// # let dense = folder.path().join("dense");
/// # let plan = ConvertPlan::new(&Checkpoint::open("assets/tiny")?, &ConvertOptions::dense())?;
/// # convert(&plan, &dense, &RunOptions::default(), &|_event| ())?;
/// let source = Checkpoint::open(&dense)?;
/// let plan = ShardPlan::new(&source, 1)?;
/// let workload = Workload::on_cpu(DType::F32, 512);
/// let fits = fits(&source, Target::Mlx, &formats(Target::Mlx), &plan, &workload)?;
/// let widest = fits.iter().find(|fit| fit.fits(6_400_000)).expect("one fits");
/// assert_eq!(widest.format.to_string(), "affine:6:g64");
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// # Errors
/// As those of [`ConvertPlan::new`] with each of the formats.
pub fn fits(
    source: &Checkpoint,
    target: Target,
    formats: &[Spec],
    plan: &ShardPlan,
    workload: &Workload,
) -> Result<Vec<Fit>> {
    // What is planned is what `convert` and `--quantize` do by default.
    let fit = |format: &Spec| {
        let recipe = target.usual_recipe(*format);
        let options = match target {
            Target::Mlx => ConvertOptions::mlx(recipe),
            Target::Uqff => ConvertOptions::uqff(recipe),
            Target::Ollama => ConvertOptions::ollama(recipe, "model")?,
            Target::HuggingFace => ConvertOptions::hugging_face(recipe),
            Target::Gguf => ConvertOptions::gguf(recipe),
            Target::Slm1 => ConvertOptions::slm1(recipe),
            Target::Dense => ConvertOptions::dense(),
        };
        let conversion = ConvertPlan::new(source, &options)?;
        let packed = conversion.formats();
        Ok(Fit {
            format: *format,
            bits_per_weight: conversion.bits_per_weight(),
            footprints: plan.footprints(workload, |module| packed.get(module).copied()),
        })
    };
    let as_stored = Fit {
        format: Spec::Keep,
        bits_per_weight: bits_per_weight(plan),
        footprints: plan.footprints(workload, |_| None),
    };
    let fits = std::iter::once(Ok(as_stored)).chain(formats.iter().map(fit));
    let mut fits = fits.collect::<Result<Vec<_>>>()?;
    fits.sort_by_key(|fit| Reverse(fit.largest().weights));
    Ok(fits)
}

/// Of the matrices as they are stored.
fn bits_per_weight(plan: &ShardPlan) -> f64 {
    let matrices = || plan.tensors().iter().filter(|tensor| tensor.dims.len() > 1);
    let elements = |tensor: &ShardedTensor| tensor.dims.iter().map(|size| *size as f64).product::<f64>();
    let bytes: u64 = matrices().map(|tensor| tensor.stored_bytes).sum();
    bytes as f64 * 8. / matrices().map(elements).sum::<f64>().max(1.)
}
