//! Checkpoints on disk: which weights there are, and in which format each one is.
//!
//! [`Checkpoint::open`] takes a directory as `mlx_lm.convert` writes it (`config.json`, one or many
//! safetensors files, an index) or a single `.safetensors` file. Opening maps the files and checks
//! their headers; the bytes of a weight are read when [`PackedWeight::load`] or [`DenseTensor::load`]
//! asks for them, and copied once.
//!
//! ```
//! use candle_core::Device;
//! use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
//!
//! let checkpoint = Checkpoint::open("assets/tiny")?;
//! assert_eq!(checkpoint.kind(), CheckpointKind::Mlx);
//!
//! // 256 input features, as the model knows; `None` leaves it to the config.
//! match checkpoint.weight("model.layers.0.mlp.up_proj", Some(256))? {
//!     Weight::Packed(packed) => {
//!         assert_eq!(packed.format().to_string(), "affine 4-bit g64");
//!         assert_eq!(packed.dims(), [512, 256]);
//!         let tensor = packed.load(&Device::Cpu)?;
//!         assert_eq!(tensor.size_in_bytes(), packed.size_in_bytes());
//!     }
//!     Weight::Dense(_) => unreachable!("quantized in this checkpoint"),
//! }
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! # Trust
//! Files may come from anywhere: sizes, offsets, shapes and numbers are checked before they are used,
//! and a file that contradicts itself or its config is an [`Error`] that names file and tensor.
//! Oddities that leave no doubt about the numbers are accepted and listed by [`Checkpoint::warnings`].
//!
//! # Files that change
//! Files are memory-mapped. As long as the [`Checkpoint`], or a weight taken from it, is alive, they
//! must not be changed in place. If one shrinks, reading beyond its new end kills the process (`SIGBUS`)
//! or, on Windows, is prevented by the system; if its bytes are overwritten, weights loaded afterwards
//! hold whatever is there then. Replacing a file by renaming another over it is safe.

mod config;
mod header;
mod mapped;
mod mlx;
mod shards;
mod weight;

pub use weight::{DenseTensor, PackedWeight, Weight};

use crate::{Error, Result};
use config::Quantization;
use safetensors::Dtype;
use shards::Tensors;
use std::{
    cmp::Ordering,
    fmt, fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// An open checkpoint. Cloning is cheap and shares the mapped files.
#[derive(Clone)]
pub struct Checkpoint(Arc<Inner>);

struct Inner {
    path: PathBuf,
    /// Where config and tokenizer lie.
    dir: PathBuf,
    kind: CheckpointKind,
    config: serde_json::Value,
    quantization: Quantization,
    tensors: Tensors,
    warnings: Warnings,
}

/// What a checkpoint was recognised as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointKind {
    /// Packed weights in MLX's layout, or a mix of these and dense ones.
    Mlx,
    /// Plain numbers only.
    Dense,
}

impl fmt::Display for CheckpointKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mlx => "MLX",
            Self::Dense => "dense safetensors",
        })
    }
}

impl Checkpoint {
    /// Opens a directory, or a single `.safetensors` file with the `config.json` beside it, if there
    /// is one. No weight is read.
    ///
    /// In a directory `model.safetensors.index.json` says which files belong to the checkpoint;
    /// without it every `model*.safetensors` does.
    ///
    /// # Errors
    /// If files are missing or malformed, if two of them hold the same tensor, if the quantization
    /// object of the config is not understood, or if it names a `quant_method` of another tool.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let metadata = fs::metadata(path).map_err(|error| Error::Io { path: path.to_owned(), error })?;
        let warnings = Warnings::default();
        let (dir, tensors) = if metadata.is_dir() {
            (path, shards::open_directory(path, &warnings)?)
        } else {
            (path.parent().unwrap_or(Path::new("")), mapped::open(path)?)
        };

        let config_path = dir.join("config.json");
        let config: serde_json::Value = shards::read_json(&config_path)?.unwrap_or_default();
        if !(config.is_object() || config.is_null()) {
            return Err(Error::File {
                path: config_path,
                problem: "not a JSON object".into(),
                remedy: "fetch it again".into(),
            });
        }
        let is_module = |module: &str| tensors.contains_key(&tensor_of(module, "weight"));
        let quantization = config::parse(&config, &config_path, is_module, &warnings)?;

        let is_packed = |(name, tensor): (&String, &mapped::StoredTensor)| {
            tensor.dtype() == Dtype::U32
                && module_of(name).is_some_and(|module| tensors.contains_key(&tensor_of(module, "scales")))
        };
        let kind = match tensors.iter().any(is_packed) {
            true => CheckpointKind::Mlx,
            false => CheckpointKind::Dense,
        };
        Ok(Self(Arc::new(Inner {
            path: path.to_owned(),
            dir: dir.to_owned(),
            kind,
            config,
            quantization,
            tensors,
            warnings,
        })))
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// What the checkpoint was recognised as, from its tensors.
    pub fn kind(&self) -> CheckpointKind {
        self.0.kind
    }

    /// The content of `config.json`; null if there is none.
    pub fn config(&self) -> &serde_json::Value {
        &self.0.config
    }

    /// The path of `tokenizer.json`, if there is one.
    pub fn tokenizer_file(&self) -> Option<PathBuf> {
        Some(self.0.dir.join("tokenizer.json")).filter(|path| path.is_file())
    }

    /// The content of a JSON file beside the weights; `None` if there is no such file.
    pub(crate) fn read_json(&self, file: &str) -> Result<Option<serde_json::Value>> {
        shards::read_json(&self.0.dir.join(file))
    }

    /// The names of all tensors, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.0.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this full name, for example `model.norm.weight`.
    pub fn contains(&self, tensor: &str) -> bool {
        self.0.tensors.contains_key(tensor)
    }

    /// The paths of all modules that have a weight, with numbers in counting order (layer 2 before
    /// layer 10).
    pub fn modules(&self) -> Vec<String> {
        let mut modules: Vec<_> = self.tensor_names().filter_map(module_of).collect();
        modules.sort_by(|a, b| natural_order(a, b));
        modules.into_iter().map(str::to_owned).collect()
    }

    /// The weight of a module, packed or dense as the checkpoint has it.
    ///
    /// `module` is the path without `.weight`, empty at the root. `in_features` is K, the length of a row,
    /// as the model knows it. It decides the format where the config has no entry for the module, and
    /// everything is checked against it. Without it the top level of the config decides, and has to fit
    /// the shapes.
    ///
    /// # Errors
    /// If the weight is missing, if its tensors contradict each other, the config or `in_features`, or if
    /// more than one format fits.
    pub fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Weight> {
        let Some(triplet) = mlx::Triplet::find(&self.0.tensors, module)? else {
            return self.dense_weight(module).map(Weight::Dense);
        };
        let format = triplet.resolve(&self.0.quantization, in_features, &self.0.warnings)?;
        Ok(Weight::Packed(PackedWeight {
            name: module.to_owned(),
            format,
            dims: triplet.dims(format),
            weight: triplet.weight.clone(),
            scales: triplet.scales.clone(),
            biases: triplet.biases.cloned(),
            global_scale: triplet.global_scale.cloned(),
        }))
    }

    /// A weight without scales, which therefore has to be floats.
    fn dense_weight(&self, module: &str) -> Result<DenseTensor> {
        let dense = self.dense(&tensor_of(module, "weight"))?;
        if dense.dtype().is_float() {
            return Ok(dense);
        }
        Err(self.wrong(
            dense.name(),
            "a float weight, as there are no scales beside it",
            format!("{:?}", dense.dtype()),
            "this looks like the layout of another tool; use an MLX conversion of the model",
        ))
    }

    /// A tensor that is not quantized, by its full name.
    ///
    /// # Errors
    /// If there is none of that name, if it is a packed weight, or if its dtype is not one of
    /// F16, BF16, F32, F64, U8, U32, I16, I32 and I64.
    pub fn dense(&self, tensor: &str) -> Result<DenseTensor> {
        let Some(stored) = self.0.tensors.get(tensor) else {
            return Err(self.wrong(tensor, "a tensor of this name", "none", self.similar(tensor)));
        };
        match module_of(tensor) {
            Some(module) if stored.dtype() == Dtype::U32 => {
                let (found, remedy) = match self.contains(&tensor_of(module, "scales")) {
                    true => ("a packed weight", "load the module's weight instead"),
                    false => ("U32 words without scales", "fetch or convert the file again"),
                };
                Err(self.wrong(tensor, "a dense tensor", found, remedy))
            }
            _ => DenseTensor::new(tensor, stored),
        }
    }

    /// What was accepted although something about it is odd, so far. Each is also sent to [`log::warn!`].
    pub fn warnings(&self) -> Vec<String> {
        self.0.warnings.list()
    }

    fn wrong(
        &self,
        tensor: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        let stored = self.0.tensors.get(tensor);
        Error::Tensor {
            file: stored.map_or(self.path(), mapped::StoredTensor::path).into(),
            tensor: tensor.to_owned(),
            expected: expected.into(),
            found: found.into(),
            remedy: remedy.into(),
        }
    }

    /// Help for a name that does not exist: the same name under another prefix.
    fn similar(&self, tensor: &str) -> String {
        let tail_of =
            |long: &str, short: &str| long.strip_suffix(short).is_some_and(|prefix| prefix.ends_with('.'));
        match self.tensor_names().find(|name| tail_of(name, tensor) || tail_of(tensor, name)) {
            Some(name) => format!("there is `{name}`"),
            None => "check that the model fits the checkpoint".into(),
        }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.0.path)
            .field("kind", &self.0.kind)
            .field("tensors", &self.0.tensors.len())
            .finish_non_exhaustive()
    }
}

/// The module path of a weight's name; that of a weight at the root is empty.
pub(crate) fn module_of(tensor: &str) -> Option<&str> {
    match tensor.strip_suffix("weight")? {
        "" => Some(""),
        path => path.strip_suffix('.'),
    }
}

/// The name of one tensor of a module.
pub(crate) fn tensor_of(module: &str, suffix: &str) -> String {
    match module {
        "" => suffix.to_owned(),
        path => format!("{path}.{suffix}"),
    }
}

/// Compares dotted paths piece by piece, numbers by value.
fn natural_order(a: &str, b: &str) -> Ordering {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Piece<'a> {
        Number(u64),
        Text(&'a str),
    }
    fn pieces(path: &str) -> impl Iterator<Item = Piece<'_>> {
        let piece = |text: &'_ str| text.parse().map(Piece::Number);
        path.split('.').map(move |text| piece(text).unwrap_or(Piece::Text(text)))
    }
    pieces(a).cmp(pieces(b)).then_with(|| a.cmp(b))
}

/// Warnings in the order of their discovery.
#[derive(Default)]
struct Warnings(Mutex<Vec<Warning>>);

struct Warning {
    /// Equal for warnings that say the same of several modules.
    key: String,
    message: String,
}

impl Warnings {
    fn add(&self, message: String) {
        self.once(message.clone(), message);
    }

    /// Adds a warning unless there is one with this key.
    fn once(&self, key: String, message: String) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.iter().all(|warning| warning.key != key) {
            log::warn!("{message}");
            list.push(Warning { key, message });
        }
    }

    fn list(&self) -> Vec<String> {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().map(|warning| warning.message.clone()).collect()
    }
}
