//! Checkpoints on disk: which weights there are, and in which format each one is.
//!
//! [`Checkpoint::open`] recognises what it is given. Opening maps the files and checks their headers;
//! the bytes of a weight are read when [`PackedWeight::load`], [`GgmlWeight::load`] or
//! [`DenseTensor::load`] asks for them, and copied once.
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
//!     other => unreachable!("quantized in this checkpoint, not {other:?}"),
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
//! Files are memory-mapped, after their headers were read in the ordinary way: a file that shrinks while
//! it is opened is an error. As long as the [`Checkpoint`], or a weight taken from it, is alive, files
//! must not be changed in place. If one shrinks, reading beyond its new end kills the process (`SIGBUS`)
//! or, on Windows, is prevented by the system; if its bytes are overwritten, weights loaded afterwards
//! hold whatever is there then. Replacing a file by renaming another over it is safe.

mod container;
mod digest;
mod ggml;
mod gguf;
mod header;
mod hf;
pub(crate) mod json;
mod kind;
mod layout;
mod mapped;
mod mlx;
mod names;
mod ollama;
#[cfg(test)]
pub(crate) mod reads;
mod recognise;
mod rows;
mod section;
mod shards;
#[cfg(test)]
mod slices;
pub mod slm1;
mod uqff;
mod warnings;
mod weight;

pub(crate) use container::Companions;
pub use digest::Digest;
pub use kind::{CheckpointKind, QuantMethod};
pub use names::natural_order;
pub(crate) use names::{module_of, tensor_of};
pub(crate) use ollama::{Name as OllamaName, Store as OllamaStore};
pub use weight::{DenseTensor, GgmlWeight, PackedWeight, Weight};

use crate::{Error, Result};
use container::Opened;
use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};
use warnings::Warnings;

/// An open checkpoint. Cloning is cheap and shares the mapped files.
#[derive(Clone)]
pub struct Checkpoint(Arc<Inner>);

struct Inner {
    path: PathBuf,
    opened: Opened,
    warnings: Warnings,
}

impl Checkpoint {
    /// Opens what is at a path, or the model of that name in an Ollama store. No weight is read.
    ///
    /// | path | checkpoint |
    /// |---|---|
    /// | directory | `.uqff` shards; one GGUF model; the safetensors that `model.safetensors.index.json` lists, or else every `model*.safetensors` |
    /// | `.safetensors` | that file, with the `config.json` beside it, if there is one |
    /// | `.uqff`, or its name without `-0.uqff` | that file and the shards that belong to it |
    /// | `.gguf` | that file; of a model in parts, any of them |
    /// | SLM1 file | that file, read leniently; [`slm1::open`] has options |
    /// | manifest in an Ollama store, or a store of one model | that model |
    ///
    /// If there is nothing at the path, it may be a name as Ollama has it: `qwen3:4b`,
    /// `registry.ollama.ai/library/qwen3:4b`. Names are looked up in the directory that `OLLAMA_MODELS` names,
    /// or else in `.ollama/models` of the home directory and in the store of the Linux service.
    ///
    /// In a directory of UQFF files `uqff_report.json`, if there is one, says which shards belong to the model;
    /// a path to one of the files ignores it.
    ///
    /// Weights in safetensors may be packed by MLX or by one of the tools that [`QuantMethod`] lists.
    ///
    /// # Errors
    /// If there is neither a path nor a model of this name, if files are missing or malformed or not of the
    /// size that is stated, if two of them hold the same tensor, if the quantization
    /// object of the config is not understood, or if it names a `quant_method` that is not read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (path, warnings) = (path.as_ref(), Warnings::default());
        let opened = recognise::open(path, &warnings)?;
        Ok(Self::new(path, opened, warnings))
    }

    fn new(path: &Path, opened: Opened, warnings: Warnings) -> Self {
        Self(Arc::new(Inner { path: path.to_owned(), opened, warnings }))
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// What the checkpoint was recognised as, from its tensors.
    pub fn kind(&self) -> CheckpointKind {
        self.0.opened.kind
    }

    /// The content of `config.json`, or what a container without one says instead; null if there is
    /// neither. `NaN`, `Infinity` and `-Infinity`, as Python writes them, are strings in it.
    pub fn config(&self) -> &serde_json::Value {
        &self.0.opened.config
    }

    /// The path of `tokenizer.json`, if there is one.
    pub fn tokenizer_file(&self) -> Option<PathBuf> {
        self.0.opened.companions.path("tokenizer.json")
    }

    /// The tokenizer that lies in the same files as the weights, if there is one.
    pub(crate) fn stored_tokenizer(&self) -> Result<Option<tokenizers::Tokenizer>> {
        self.0.opened.container.tokenizer()
    }

    /// The content of a JSON file that belongs to the weights; `None` if there is no such file.
    pub(crate) fn read_json(&self, file: &str) -> Result<Option<serde_json::Value>> {
        self.0.opened.companions.json(file)
    }

    /// The names of all tensors, sorted, as models know them. A quantized weight is one tensor, of the name
    /// that it has in a dense checkpoint; its parts (scales and the like) have no names here.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.0.opened.container.names()
    }

    /// Whether there is a tensor of this full name, for example `model.norm.weight`.
    pub fn contains(&self, tensor: &str) -> bool {
        self.0.opened.container.contains(tensor)
    }

    /// The paths of all modules that have a weight, with numbers in counting order (layer 2 before
    /// layer 10).
    pub fn modules(&self) -> Vec<String> {
        let mut modules: Vec<_> = self.tensor_names().filter_map(module_of).collect();
        modules.sort_by(|a, b| names::natural_order(a, b));
        modules.into_iter().map(str::to_owned).collect()
    }

    /// The weight of a module, in the format in which the checkpoint has it.
    ///
    /// `module` is the path without `.weight`, empty at the root. `in_features` is K, the length of a row,
    /// as the model knows it. It decides the format where the checkpoint leaves more than one reading, and
    /// everything is checked against it. Without it the config decides, and has to fit the shapes.
    ///
    /// # Errors
    /// If the weight is missing, if its tensors contradict each other, the config or `in_features`, or if
    /// more than one format fits.
    pub fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Weight> {
        let weight = self.0.opened.container.weight(module, in_features)?;
        weight.ok_or_else(|| self.missing(&tensor_of(module, "weight")))
    }

    /// A tensor that is not quantized, by its full name.
    ///
    /// # Errors
    /// If there is none of that name, if it is a quantized weight, or if its dtype is not one of
    /// F16, BF16, F32, F64, U8, U32, I16, I32 and I64.
    pub fn dense(&self, tensor: &str) -> Result<DenseTensor> {
        self.0.opened.container.dense(tensor)?.ok_or_else(|| self.missing(tensor))
    }

    /// Any tensor by its full name, in the format in which the checkpoint has it; `in_features` as for
    /// [`weight`](Checkpoint::weight).
    ///
    /// # Errors
    /// As those of [`weight`](Checkpoint::weight) and [`dense`](Checkpoint::dense).
    pub fn tensor(&self, name: &str, in_features: Option<usize>) -> Result<Weight> {
        match self.0.opened.container.weight(module_of(name).unwrap_or(name), in_features)? {
            Some(weight) => Ok(weight),
            None => self.dense(name).map(Weight::Dense),
        }
    }

    /// The files that hold the tensors.
    pub(crate) fn weight_files(&self) -> BTreeSet<PathBuf> {
        let container = &self.0.opened.container;
        let parts = |name: &str| {
            let module = module_of(name).unwrap_or(name).to_owned();
            ["scales", "biases"].map(|part| tensor_of(&module, part))
        };
        let files = |name: &str| {
            let names = std::iter::once(name.to_owned()).chain(parts(name));
            names.filter_map(|name| container.file_of(&name).map(Path::to_owned)).collect::<Vec<_>>()
        };
        self.tensor_names().flat_map(files).collect()
    }

    /// Where the files are that belong to the weights: config, tokenizer and the like.
    pub(crate) fn companions(&self) -> &Companions {
        &self.0.opened.companions
    }

    /// The files of which the checkpoint states the SHA-256, with these digests: all blobs of a model of an
    /// Ollama store, none elsewhere. They are not checked while opening.
    pub fn digests(&self) -> &[Digest] {
        &self.0.opened.digests
    }

    /// Reads all files that have a digest, and compares. Returns how many they are.
    ///
    /// # Errors
    /// The first file that has another digest, or can't be read.
    pub fn verify_digests(&self) -> Result<usize> {
        self.digests().iter().try_for_each(Digest::verify)?;
        Ok(self.digests().len())
    }

    /// What was accepted although something about it is odd, so far. Each is also sent to [`log::warn!`].
    pub fn warnings(&self) -> Vec<String> {
        self.0.warnings.list()
    }

    /// The file that holds a tensor; the path that was opened, if it is not known.
    pub(crate) fn file_of(&self, tensor: &str) -> &Path {
        self.0.opened.container.file_of(tensor).unwrap_or(self.path())
    }

    /// The file that states the [`config`](Checkpoint::config), be it there or not: `config.json`, or that of the
    /// weights, if it tells everything itself.
    pub(crate) fn config_file(&self) -> PathBuf {
        match (self.kind(), self.companions()) {
            (CheckpointKind::Gguf | CheckpointKind::Slm1, _) => self.path().to_owned(),
            (_, Companions::Directory(dir)) => dir.join("config.json"),
            (_, files) => files.path("config.json").unwrap_or_else(|| self.path().to_owned()),
        }
    }

    fn missing(&self, tensor: &str) -> Error {
        Error::tensor(self.file_of(tensor), tensor, "a tensor of this name", "none", self.similar(tensor))
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
            .field("kind", &self.kind())
            .field("tensors", &self.tensor_names().count())
            .finish_non_exhaustive()
    }
}
