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
//! and a file that contradicts itself or its config is an [`Error`](crate::Error) that names file and tensor.
//! Oddities that leave no doubt about the numbers are accepted and listed by [`Checkpoint::warnings`].
//!
//! # What opening costs
//! Memory and time grow with the headers and configs, and with nothing else: a header takes three times its size at most,
//! while it is read. A [`Budget`] says how much of them there may be; beyond it, opening is an error. The values of configs
//! may take some 200 MB within the usual budget, by an estimate. Of SLM1 files all scales are read and checked, too.
//!
//! # Files that change
//! By default files are memory-mapped, after their headers were read in the ordinary way: a file that shrinks while
//! it is opened is an error. As long as the [`Checkpoint`], or a weight taken from it, is alive, files
//! must not be changed in place. If one shrinks, reading beyond its new end kills the process (`SIGBUS`)
//! or, on Windows, is prevented by the system; if its bytes are overwritten, weights loaded afterwards
//! hold whatever is there then. Replacing a file by renaming another over it is safe. With
//! [`Reads::Positioned`] nothing is mapped, and a file that shrinks is an error.

#![deny(clippy::wildcard_enum_match_arm)]

mod adapter;
mod chat;
mod container;
mod family_layouts;
mod file;
mod gguf;
mod hf;
mod hub;
mod kind;
mod locate;
mod mlx;
mod ollama;
mod opened;
mod recognise;
mod sidecar;
pub mod slm1;
mod tokenizer;
mod uqff;
mod views;
mod weight;

pub use adapter::{write as write_adapter, AdapterFile, AdapterFormat, LoraTensors, StoredLora};
pub use chat::StoredChatTemplates;
pub use family_layouts::{is_one_plus_norm, FusedExperts};
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use file::reads;
#[doc(hidden)]
pub use file::with_masked_literals;
pub use file::{Budget, Digest, GgmlKernels, OpenOptions, Reads};
pub use gguf::{gguf_pre_tokenizer, module_of_gguf, GgufForm, GgufKey, GgufKind, GgufValue, HeadRows};
pub use hub::{CachedModel, HubCache, HubEvent, HubOptions, HubProgress, Name as HubName};
pub use kind::{CheckpointKind, QuantMethod};
pub use locate::locate;
pub use ollama::{Name as OllamaName, Store as OllamaStore};
pub use opened::Checkpoint;
pub use sidecar::SidecarFiles;
pub use tokenizer::StoredTokenizer;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use weight::block_types;
pub use weight::{module_of, tensor_of};
pub use weight::{
    natural_order, DenseTensor, GgmlWeight, IntegerGroups, IrregularWeight, MlxForm, PackedWeight, Weight,
};
pub use weight::{StoredBlocks, StoredForm, StoredFourBits, StoredFp8, StoredHqq};

use crate::Result;
use file::Opening;
use std::path::Path;

impl Checkpoint {
    /// Opens what is at a path, or the model of that name in an Ollama store or of the Hugging Face hub. No weight is read.
    ///
    /// | path | checkpoint |
    /// |---|---|
    /// | directory | `.uqff` shards; one GGUF model; one `.slm` file; the safetensors that `model.safetensors.index.json` lists, or else every `model*.safetensors` |
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
    /// Otherwise it may be a [name of the Hugging Face hub](HubName): `org/model`, `org/model@revision`,
    /// `hf.co/org/model:Q4_K_M`. What its cache has is opened without the network; what it lacks is fetched, with the
    /// feature `hub`, and [`HubOptions::from_env`] says whence and whereto. [`locate`] takes other options, and somebody
    /// to tell of the progress.
    ///
    /// In a directory of UQFF files `uqff_report.json`, if there is one, says which shards belong to the model;
    /// a path to one of the files ignores it.
    ///
    /// Weights in safetensors may be packed by MLX or by one of the tools that [`QuantMethod`] lists.
    ///
    /// # Errors
    /// If there is neither a path nor a model of this name, if it can't be fetched, if files are missing or malformed or not of the
    /// size that is stated, if their headers and configs exceed the [`Budget`], if two of them hold the same tensor, if
    /// the quantization object of the config is not understood, or if it names a `quant_method` that is not read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, OpenOptions::default())
    }

    /// As [`open`](Checkpoint::open), with another budget for headers and configs, or another way to read weights.
    ///
    /// # Errors
    /// As those of [`open`](Checkpoint::open).
    pub fn open_with(path: impl AsRef<Path>, options: OpenOptions) -> Result<Self> {
        let opening = Opening::with(options);
        let path = locate::find(path.as_ref(), HubOptions::from_env, &opening)?;
        let opened = recognise::open(&path, &opening)?;
        Ok(Self::new(&path, opened, opening))
    }

    /// Opens these files, and no others, if weights in them are quantized; `None` if all are dense.
    ///
    /// For safetensors, the `config.json` beside them says how, if they lie in one folder. Of a UQFF or GGUF model, the
    /// first file is enough.
    ///
    /// # Errors
    /// As those of [`open`](Checkpoint::open), if the config or the first file says that weights are quantized.
    pub fn open_quantized(files: &[impl AsRef<Path>]) -> Result<Option<Self>> {
        let files: Vec<_> = files.iter().map(|file| file.as_ref().to_owned()).collect();
        let opening = Opening::default();
        let opened = recognise::open_quantized(&files, &opening)?;
        let path = match files.as_slice() {
            [file] => file,
            [file, ..] => file.parent().unwrap_or(file),
            [] => return Ok(None),
        };
        Ok(opened.map(|opened| Self::new(path, opened, opening)))
    }
}
