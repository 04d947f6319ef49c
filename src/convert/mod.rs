//! Quantizes a checkpoint, or writes a packed one in another way: planned from headers, carried out in little
//! memory, measured on what is written.
//!
//! ```
//! use candle_quant::convert::{self, Options, Plan, Recipe, RunOptions};
//! use candle_quant::{diff, Checkpoint};
//!
//! let source = Checkpoint::open("assets/tiny-bf16")?;
//! let plan = Plan::new(&source, &Options::mlx(Recipe::safe("4".parse()?)))?;
//! assert_eq!(plan.tensors().next().unwrap().to, "affine 5-bit g64"); // the embedding is the head, too
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let out = folder.path().join("tiny-4bit");
//! let report = convert::run(&plan, &out, &RunOptions::default(), &|_event| ())?;
//! assert!(report.tensors[0].relative_rms < 0.15); // the worst
//! assert_eq!(Checkpoint::open(&out)?.kind().to_string(), "MLX");
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! # What is written
//! * [`Target::Mlx`]: an MLX checkpoint, bit for bit what `mx.quantize` computes on a CPU:
//!   `model-00001-of-0000N.safetensors` with an index, the config with `quantization` and `quantization_config`, all
//!   else in it as it was, and the files of the tokenizer. Experts become stacks, as mlx-lm has them.
//! * [`Target::Uqff`]: a model of mistral.rs, in 4, 6 and 8 bits with the numbers that it computes itself.
//! * [`Target::Ollama`]: a model in a store of Ollama, with the bytes of its importer.
//! * [`Target::Dense`]: plain numbers.
//!
//! # Weights that are packed already
//! are written as they are, if the output has their format: AWQ and symmetric integers get biases that change nothing
//! (of those with F32 scales, which are read for the plan, only if their products with codes are exact), and MXFP4
//! becomes `affine:5:g32` exactly where a rule asks for it. To pack them anew is a choice ([`Options::requantize`]).

mod alternatives;
mod block;
mod choice;
mod config;
mod device;
mod disk;
mod experts;
mod importer;
mod job;
mod journal;
mod kind;
mod mixed;
mod place;
mod plan;
mod planner;
mod quality;
mod recipe;
mod repack;
mod role;
mod run;
mod saved;
mod sensitivities;
mod shard;
mod spec;
mod staging;
mod writer;

pub use alternatives::Alternatives;
pub use disk::available_space;
pub use place::check_output;
pub use plan::{Plan, PlannedTensor};
pub use quality::{Quality, Report, WrittenFile};
pub use recipe::{Recipe, Rule};
pub use role::Role;
pub use run::{measure, run, Event, RunOptions};
pub use sensitivities::Sensitivities;
pub use spec::Spec;

use crate::checkpoint::OllamaName;
use crate::{Error, Result};
use candle_core::{DType, Device};

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// An MLX checkpoint.
    Mlx,
    /// Plain numbers under the names of the source.
    Dense,
    /// A model of mistral.rs, UQFF 1.2.0.
    Uqff,
    /// A model in a store of Ollama.
    Ollama,
}

/// What a conversion is to do.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// What is written.
    pub target: Target,
    /// Which tensor becomes what.
    pub recipe: Recipe,
    /// Rounds all float numbers to F16, BF16 or F32 first: those that stay plain numbers, those that are packed,
    /// and their scales. Without it they keep the dtype of the source; decoded ones get that of the config.
    pub dtype: Option<DType>,
    /// Decodes weights that are packed already, to pack them as the recipe says.
    pub requantize: bool,
    /// Looks for codes and scales of a smaller squared error than those of the encoder, group by group; see
    /// [`search`](crate::format::search). The bytes are no longer those of the program whose format it is.
    pub search: bool,
    /// Refuses a plan in which a tensor can't become what its rule says.
    pub strict: bool,
    /// The size of a file of weights that is not exceeded, unless one weight does.
    pub max_shard_size: u64,
    /// What packs: a CUDA device, or the CPU (the default). The bytes are the same; what a device has no kernel for is
    /// done by the CPU, and noted in the plan.
    pub device: Device,
    /// What an output of Ollama is called.
    model: Option<OllamaName>,
}

impl Options {
    /// The default size of a file of weights, 5 GB, as Hugging Face has it.
    pub const MAX_SHARD_SIZE: u64 = 5_000_000_000;

    /// An MLX checkpoint by a recipe.
    pub fn mlx(recipe: Recipe) -> Self {
        let max_shard_size = Self::MAX_SHARD_SIZE;
        Self {
            target: Target::Mlx,
            recipe,
            dtype: None,
            requantize: false,
            search: false,
            strict: false,
            max_shard_size,
            device: Device::Cpu,
            model: None,
        }
    }

    /// A UQFF model by a recipe, of which [`Recipe::named`] has one that is meant for it, `mistralrs`.
    pub fn uqff(recipe: Recipe) -> Self {
        Self { target: Target::Uqff, ..Self::mlx(recipe) }
    }

    /// A model called `name`, `[[host/]namespace/]model[:tag]`, in a store of Ollama, by a recipe, of which
    /// [`Recipe::named`] has one that is meant for it, `ollama`. The output is the store, which may have other models.
    ///
    /// # Errors
    /// If Ollama has no such names.
    pub fn ollama(recipe: Recipe, name: &str) -> Result<Self> {
        let Some(model) = OllamaName::parse(name) else {
            let expected = "[[host/]namespace/]model[:tag] of letters, digits, `-`, `_` and `.`";
            return Err(Error::mismatch("name of a model", expected, format!("`{name}`")));
        };
        Ok(Self { target: Target::Ollama, model: Some(model), ..Self::mlx(recipe) })
    }

    /// The model of a store that is written, if one is.
    fn model(&self) -> Result<Option<&OllamaName>> {
        match (self.target, &self.model) {
            (Target::Ollama, None) => {
                Err(Error::mismatch("model of Ollama", "a name, as `Options::ollama` takes one", "none"))
            }
            (Target::Ollama, model) => Ok(model.as_ref()),
            _ => Ok(None),
        }
    }

    /// Plain numbers.
    pub fn dense() -> Self {
        Self { target: Target::Dense, ..Self::mlx(Recipe::safe(Spec::Keep)) }
    }
}
