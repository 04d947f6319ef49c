//! `--target-bpw`: the formats for a number of bits per weight.

use super::{check_writable, code, Options, BAD_INPUT, IO};
use candle_quant::{Checkpoint, Error};
use candle_quant_tools::convert::{BitAllocation, ConvertOptions, Recipe, Sensitivities, Spec};

/// What weights may become.
pub fn candidates(options: &Options) -> Vec<Spec> {
    match options.candidates.as_slice() {
        [] => BitAllocation::candidates(options.target()),
        given => given.to_vec(),
    }
}

/// The recipe of the conversion with formats for this number of bits per weight.
pub fn choose(
    options: &Options,
    source: &Checkpoint,
    conversion: &ConvertOptions,
    bits_per_weight: f64,
) -> Result<Recipe, (anyhow::Error, u8)> {
    let bad_input = |error: Error| (error.into(), BAD_INPUT);
    let in_file = |error: Error| {
        let code = code(&error);
        (error.into(), code)
    };
    let allocation = BitAllocation::new(source, conversion, &candidates(options)).map_err(bad_input)?;
    let known = options.sensitivities.as_ref().map(Sensitivities::read).transpose().map_err(in_file)?;
    let sensitivities = match known.flatten() {
        Some(known) => known,
        None => {
            if let Some(path) = &options.sensitivities {
                check_writable(path).map_err(|error| (error, IO))?;
            }
            let (tensors, bytes) = allocation.work();
            let progress = super::progress(options, tensors, bytes);
            let measured = allocation.measure(&|event| super::tell_progress(&progress, &event));
            progress.finish();
            let measured = measured.map_err(bad_input)?;
            if let Some(path) = &options.sensitivities {
                measured.write(path).map_err(in_file)?;
            }
            measured
        }
    };
    allocation.recipe(&sensitivities, bits_per_weight).map_err(bad_input)
}
