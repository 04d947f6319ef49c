//! What is left of a training between two runs of a program.

use super::{AdamW, Options, Variable};
use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use candle_quant::{Error, Result};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The file in the folder. One file, so that its parts are never of two steps.
const FILE: &str = "training_state.safetensors";

/// The entry in the file's metadata that holds [`Progress`] as JSON.
const KEY: &str = "candle_quant_training";

/// How far a training has come, and what must not change meanwhile.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct Written {
    version: u32,
    /// Steps of the optimizer.
    step: usize,
    seed: u64,
    batch: usize,
    accumulation: usize,
    /// SHA-256 of the sequences.
    data: String,
}

impl Written {
    fn new(step: usize, options: &Options, data: &str) -> Self {
        let &Options { seed, batch, accumulation, .. } = options;
        Self { version: 1, step, seed, batch, accumulation, data: data.to_owned() }
    }
}

/// The parts of a variable that are saved, behind its name.
const PARTS: [&str; 3] = ["value", "mean", "square"];

/// Writes the variables, the optimizer's state, and how far it has come.
///
/// # Errors
/// If the file can't be written; one that was there is then as before.
pub(super) fn write(
    folder: &Path,
    variables: &[Variable],
    optimizer: &AdamW,
    options: &Options,
    data: &str,
) -> Result<()> {
    let path = folder.join(FILE);
    let io = |error| Error::Io { path: path.clone(), error };
    let written = Written::new(optimizer.steps(), options, data);
    let json = serde_json::to_string(&written).map_err(|error| io(error.into()))?;
    let mut tensors = Vec::new();
    for (Variable { name, var }, [mean, square]) in variables.iter().zip(optimizer.moments()) {
        for (part, tensor) in PARTS.iter().zip([var.as_detached_tensor(), mean.clone(), square.clone()]) {
            tensors.push((format!("{name}.{part}"), tensor));
        }
    }
    let metadata = HashMap::from([(KEY.to_owned(), json)]);
    let bytes =
        safetensors::serialize(tensors, Some(metadata)).map_err(|error| io(std::io::Error::other(error)))?;
    fs::create_dir_all(folder).map_err(io)?;
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(io)?;
    file.write_all(&bytes).and_then(|()| file.as_file().sync_all()).map_err(io)?;
    file.persist(&path).map_err(|error| io(error.error))?;
    Ok(())
}

/// Sets the variables and the optimizer to what a folder holds; returns the steps that were made.
///
/// # Errors
/// If there is no such file, it is damaged, or it belongs to another training.
pub(super) fn read(
    folder: &Path,
    variables: &[Variable],
    optimizer: &mut AdamW,
    options: &Options,
    data: &str,
) -> Result<usize> {
    let path = folder.join(FILE);
    let bytes = fs::read(&path).map_err(|error| Error::Io { path: path.clone(), error })?;
    let file = StateFile { path, tensors: SafeTensors::deserialize(&bytes) };
    let written = file.written(&bytes)?;
    file.check(&written, &Written::new(written.step, options, data))?;
    let parts = variables.iter().map(|variable| file.parts(variable)).collect::<Result<Vec<_>>>()?;
    let expected = variables.len() * PARTS.len();
    if file.tensors()?.len() != expected {
        return Err(
            file.foreign(&format!("{} tensors, not {expected}: of other modules", file.tensors()?.len()))
        );
    }
    let mut moments = Vec::new();
    for (Variable { var, .. }, [value, mean, square]) in variables.iter().zip(parts) {
        var.set(&value)?;
        moments.push([mean, square]);
    }
    optimizer.restore(written.step, moments)?;
    Ok(written.step)
}

/// A file that may be anything.
struct StateFile<'a> {
    path: PathBuf,
    tensors: Result<SafeTensors<'a>, safetensors::SafeTensorError>,
}

impl StateFile<'_> {
    fn tensors(&self) -> Result<&SafeTensors<'_>> {
        self.tensors.as_ref().map_err(|error| self.damaged(&error.to_string()))
    }

    fn written(&self, bytes: &[u8]) -> Result<Written> {
        self.tensors()?;
        let (_, metadata) =
            SafeTensors::read_metadata(bytes).map_err(|error| self.damaged(&error.to_string()))?;
        let json = metadata.metadata().as_ref().and_then(|metadata| metadata.get(KEY));
        let json = json.ok_or_else(|| self.damaged("no state of a training"))?;
        serde_json::from_str(json).map_err(|error| self.damaged(&error.to_string()))
    }

    fn check(&self, found: &Written, expected: &Written) -> Result<()> {
        let differs = [
            ("version of the file", found.version == expected.version),
            ("seed", found.seed == expected.seed),
            ("batch", found.batch == expected.batch),
            ("accumulation", found.accumulation == expected.accumulation),
            ("training data", found.data == expected.data),
        ];
        match differs.into_iter().find(|(_, is_same)| !is_same) {
            Some((what, _)) => Err(self.foreign(&format!("another {what}: {found:?}, not {expected:?}"))),
            None => Ok(()),
        }
    }

    /// The value of a variable and its two moments.
    fn parts(&self, Variable { name, var }: &Variable) -> Result<[Tensor; 3]> {
        let part = |part: &str| {
            let name = format!("{name}.{part}");
            let view = self.tensors()?.tensor(&name);
            let view = view.map_err(|_| self.foreign(&format!("no tensor `{name}`")))?;
            if view.dtype() != safetensors::Dtype::F32 || view.shape() != var.dims() {
                let found = format!("{:?} {:?}", view.dtype(), view.shape());
                let expected = format!("F32 {:?}", var.dims());
                let remedy = "resume with the options that it was begun with";
                return Err(Error::tensor(&self.path, name, expected, found, remedy));
            }
            Ok(view.load(&Device::Cpu)?.to_dtype(DType::F32)?.to_device(var.device())?)
        };
        let [value, mean, square] = PARTS;
        Ok([part(value)?, part(mean)?, part(square)?])
    }

    fn damaged(&self, problem: &str) -> Error {
        Error::file(&self.path, format!("not the state of a training: {problem}"), "begin again without it")
    }

    fn foreign(&self, problem: &str) -> Error {
        let remedy = "resume with the options and the data that it was begun with";
        Error::file(&self.path, format!("the state of another training: {problem}"), remedy)
    }
}
