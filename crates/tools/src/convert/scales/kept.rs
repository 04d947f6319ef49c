//! Scales that were found so far, in a file: a search that was interrupted goes on behind them.

use super::super::plan::ConvertPlan;
use super::super::run::fingerprint as of_plan;
use crate::importance::CalibrationText;
use crate::sha256;
use crate::source::fingerprint;
use crate::staging::{io, write_file};
use candle_quant::{Error, Result};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// What the metadata says of what they were found for.
const KEY: &str = "candle_quant.column_scales";
const REMEDY: &str = "remove it, or give another file";

/// What was found for an input: rows of scales, or that none are better than none.
pub(super) type Found = Option<Vec<Vec<f32>>>;

/// What was found for the first inputs of a plan.
pub(super) struct Kept<'p> {
    path: Option<&'p Path>,
    of: String,
    pub found: Vec<Found>,
}

impl<'p> Kept<'p> {
    /// Those in a file for this plan and text, of inputs that have so many matrices and columns; without a file there are none.
    pub fn read(
        path: Option<&'p Path>,
        plan: &ConvertPlan,
        text: &CalibrationText,
        dims: &[(usize, usize)],
    ) -> Result<Self> {
        let mut of = String::new();
        let Some(file) = path else { return Ok(Self { path, of, found: Vec::new() }) };
        for part in [&fingerprint(&plan.source)?, text.digest(), &of_plan(plan)?] {
            of.push_str(part);
        }
        let of = sha256::of_bytes(of);
        let bytes = match fs::read(file) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Self { path, of, found: Vec::new() })
            }
            read => read.map_err(io(file))?,
        };
        let wrong = |problem: String| Error::file(file, format!("no scales of columns: {problem}"), REMEDY);
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| wrong(error.to_string()))?;
        let stated = metadata.metadata().as_ref().and_then(|entries| entries.get(KEY));
        if stated.ok_or_else(|| wrong(format!("its metadata have no `{KEY}`")))? != &of {
            let problem =
                "scales of another source, text or conversion, or of this source before it was changed";
            return Err(Error::file(file, problem, REMEDY));
        }
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| wrong(error.to_string()))?;
        let found = (0..tensors.len()).map(|index| {
            let tensor = tensors.tensor(&index.to_string()).map_err(|error| wrong(error.to_string()))?;
            let expected = dims.get(index).map(|(matrices, k)| [*matrices, *k]);
            match (tensor.dtype(), tensor.shape(), expected) {
                (Dtype::F32, [0], Some(_)) => Ok(None),
                (Dtype::F32, shape, Some(expected)) if shape == expected => {
                    let numbers =
                        tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                    let numbers: Vec<f32> = numbers.collect();
                    if let Some(number) = numbers.iter().find(|number| !(number.is_finite() && **number > 0.))
                    {
                        return Err(wrong(format!(
                            "`{index}`: expected finite numbers above zero, found {number}"
                        )));
                    }
                    let [_, k] = expected;
                    Ok(Some(numbers.chunks_exact(k.max(1)).map(<[f32]>::to_vec).collect()))
                }
                (dtype, shape, Some(expected)) => Err(wrong(format!(
                    "`{index}`: expected {expected:?} or [0] of F32, found {shape:?} of {dtype:?}"
                ))),
                (.., None) => Err(wrong(format!("there are more than {}", dims.len()))),
            }
        });
        Ok(Self { path, of, found: found.collect::<Result<_>>()? })
    }

    /// Writes what was found to the file, if there is one; it appears when it is complete.
    pub fn write(&self) -> Result<()> {
        let Some(path) = self.path else { return Ok(()) };
        let wrong = |error: safetensors::SafeTensorError| Error::file(path, error.to_string(), "report this");
        let bytes = |found: &Found| -> Vec<u8> {
            found.iter().flatten().flatten().flat_map(|scale| scale.to_le_bytes()).collect()
        };
        let shape = |found: &Found| match found {
            Some(rows) => vec![rows.len(), rows.first().map_or(0, Vec::len)],
            None => vec![0],
        };
        let parts: Vec<_> = self.found.iter().map(|found| (shape(found), bytes(found))).collect();
        let tensors = parts.iter().enumerate().map(|(index, (shape, bytes))| {
            Ok((index.to_string(), TensorView::new(Dtype::F32, shape.clone(), bytes)?))
        });
        let tensors = tensors.collect::<Result<BTreeMap<_, _>, _>>().map_err(wrong)?;
        let metadata = HashMap::from([(KEY.to_owned(), self.of.clone())]);
        write_file(path, &safetensors::serialize(tensors, Some(metadata)).map_err(wrong)?)
    }
}
