//! Quantizes a checkpoint, or writes a packed one in another way: planned from headers, carried out in little
//! memory, measured on what is written.
//!
//! ```
//! use candle_quant_tools::convert::{convert, ConvertOptions, ConvertPlan, Recipe, RunOptions};
//! use candle_quant::Checkpoint;
//! use candle_quant_tools::diff;
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let [dense, out] = ["dense", "tiny-4bit"].map(|name| folder.path().join(name));
//! # let plan = ConvertPlan::new(&Checkpoint::open("assets/tiny")?, &ConvertOptions::dense())?;
//! # convert(&plan, &dense, &RunOptions::default(), &|_event| ())?;
//! let source = Checkpoint::open(&dense)?;
//! let plan = ConvertPlan::new(&source, &ConvertOptions::mlx(Recipe::safe("4".parse()?)))?;
//! assert_eq!(plan.tensors().next().unwrap().to, "affine 5-bit g64"); // the embedding is the head, too
//!
//! let report = convert(&plan, &out, &RunOptions::default(), &|_event| ())?;
//! assert!(report.tensors[0].relative_rms < 0.15); // the worst
//! assert_eq!(Checkpoint::open(&out)?.kind().to_string(), "MLX");
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! # The pipeline
//! ```text
//! recipe      rules: which tensor becomes which format
//!    ▼
//! output      what is written, as data: jobs, tensors, files
//!    ▼
//! gguf        what a GGUF file says of a model beside its weights
//!    ▼
//! target      what MLX, UQFF, Ollama, Hugging Face, GGUF and SLM1 do in their own ways: names, experts, files
//!    ▼
//! options     how a conversion is done: ConvertOptions
//!    ▼
//! plan        checkpoint + recipe + target, from headers alone: a ConvertPlan
//!    ▼
//! run         reads, quantizes, measures, writes; journal, resume, one rename at the end: a ConvertReport
//!    ▼
//! bit_budget  plans and measures every candidate, and chooses a recipe for a number of bits per weight
//! scales      runs the model, and chooses by what columns are multiplied before they are packed
//! ```
//! Each room knows those above it in this drawing, and no other.
//!
//! # What is written
//! * [`Target::Mlx`]: an MLX checkpoint, bit for bit what `mx.quantize` computes on a CPU:
//!   `model-00001-of-0000N.safetensors` with an index, the config with `quantization` and `quantization_config`, all
//!   else in it as it was, and the files of the tokenizer. Experts become stacks, as mlx-lm has them.
//! * [`Target::Uqff`]: a model of mistral.rs, in 4, 6 and 8 bits with the numbers that it computes itself.
//! * [`Target::Ollama`]: a model in a store of Ollama, with the bytes of its importer.
//! * [`Target::Gguf`]: a GGUF file of llama.cpp, with metadata and tokenizer.
//! * [`Target::Slm1`]: an SLM1 file of a model of the llama family, whose checksum is a placeholder.
//! * [`Target::HuggingFace`]: what transformers loads, with published names and layouts, dense or packed as compressed-tensors.
//! * [`Target::Dense`]: dense elements under the names of the source.
//!
//! # Weights that are packed already
//! are written as they are, if the output has their format: AWQ and symmetric integers get biases that change nothing
//! (of those with F32 scales, which are read for the plan, only if their products with codes are exact), and MXFP4
//! becomes `affine:5:g32` exactly where a rule asks for it. To pack them anew is a choice ([`ConvertOptions::requantize`]).

#![deny(clippy::wildcard_enum_match_arm)]

mod bit_budget;
mod gguf;
mod options;
mod output;
mod plan;
mod recipe;
mod run;
mod scales;
mod target;

pub use bit_budget::{BitAllocation, Sensitivities};
pub use options::ConvertOptions;
pub use output::TensorPlan;
pub use plan::ConvertPlan;
pub(crate) use plan::{count_elements, rearranged, Rearranged, UsualTensor};
pub use recipe::{FileType, Fp8Scales, Recipe, Role, Rule, Spec};
pub(crate) use run::distinct_name;
pub use run::{
    check_output, convert, measure, ConvertEvent, ConvertReport, Quality, RunOptions, WrittenFile,
};
pub use scales::column_scales;
pub use target::Target;
