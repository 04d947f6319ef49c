//! The kinds of output, and what each does in its own way: names, experts, files, and what describes them.

mod exact;
mod experts;
mod gguf;
mod hugging_face;
mod kind;
mod mlx;
mod ollama;
pub(super) mod ollama_manifest;
mod slm1;
mod uqff;
mod uqff_entries;
mod uqff_report;

pub(super) use exact::Exact;
pub(super) use experts::ExpertLayout;
pub(super) use hugging_face::{bitsandbytes_config, mxfp4_config, of_bitsandbytes, quantization_config};
pub(super) use kind::TargetKind;
pub(super) use slm1::parts as slm1_parts;

use crate::convert::recipe::{FileType, Recipe, Spec};
use candle_quant::{Error, QuantFormat, Result};

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// An MLX checkpoint.
    Mlx,
    /// Dense elements under the names of the source; stacks of experts under those that mlx-lm has.
    Dense,
    /// A checkpoint of Hugging Face's transformers, under the names and in the layout in which models are published.
    HuggingFace,
    /// A model of mistral.rs, UQFF 1.2.0.
    Uqff,
    /// A model in a store of Ollama.
    Ollama,
    /// A GGUF file, as llama.cpp reads it.
    Gguf,
    /// An SLM1 file, with a placeholder for the checksum, whose algorithm is not published.
    Slm1,
}

/// The rule of tensors that are written as they are.
pub(super) const PACKED_ALREADY: &str = "packed already";

impl Target {
    pub(in crate::convert) fn kind(self) -> &'static dyn TargetKind {
        match self {
            Self::Mlx => &mlx::Mlx,
            Self::Dense => &mlx::Dense,
            Self::HuggingFace => &hugging_face::HuggingFace,
            Self::Uqff => &uqff::Uqff,
            Self::Ollama => &ollama::Ollama,
            Self::Gguf => &gguf::Gguf,
            Self::Slm1 => &slm1::Slm1,
        }
    }

    /// Refuses a format that nothing quantizes to, or that this kind of output has no type for; `why` says where it
    /// comes from.
    pub(in crate::convert) fn check(self, tensor: &str, why: &str, format: QuantFormat) -> Result<()> {
        let kind = self.kind();
        if !QuantFormat::all().contains(&format) && kind.blocks(format).is_none() {
            let (what, remedy) = match why {
                PACKED_ALREADY => (
                    format!("`{tensor}`, {format}, as it is in {}", kind.name()),
                    "requantize or dequantize it".into(),
                ),
                _ => (
                    format!("quantizing `{tensor}` to {format} ({why})"),
                    format!("give it one of {}", QuantFormat::grammar()),
                ),
            };
            return Err(Error::Unsupported { what, remedy });
        }
        kind.check(format).map_err(|formats| Error::Unsupported {
            what: format!("`{tensor}` as {format} ({why}) in {}, which has {formats},", kind.name()),
            remedy: match why {
                PACKED_ALREADY => "requantize or dequantize it".into(),
                _ => "give it one of these formats".into(),
            },
        })
    }

    /// Refuses what is to be written so and has no type in this kind of output; `why` is the rule.
    pub(in crate::convert) fn check_spec(self, tensor: &str, why: &str, spec: Spec) -> Result<()> {
        match spec {
            Spec::Packed(format) => self.check(tensor, why, format),
            Spec::Type(of_files) if !self.kind().has_type(of_files) => Err(Error::Unsupported {
                what: format!("`{tensor}` as {} ({why}) in {}", of_files.name(), self.kind().name()),
                remedy: match of_files {
                    FileType::Ggml(_) => "write --to gguf or uqff, or give it another format".into(),
                    FileType::Uqff(_) => "write --to uqff, or give it another format".into(),
                    FileType::Fp8(_) | FileType::WithZeros(_) => {
                        "give it another format: it is only copied".into()
                    }
                    FileType::Slm1(_) => "write --to slm1, or give it another format".into(),
                },
            }),
            Spec::Type(_) | Spec::Cast(_) | Spec::Keep => Ok(()),
        }
    }

    /// The recipe that a format alone stands for: what the program does whose format the output has, or else the safe
    /// defaults.
    pub fn usual_recipe(self, format: Spec) -> Recipe {
        Recipe::named(self.kind().recipe(), format).unwrap_or_else(|_| Recipe::safe(format))
    }

    /// Whether this kind of output has a format.
    pub(crate) fn has(self, format: QuantFormat) -> bool {
        let is_known = QuantFormat::all().contains(&format) || self.kind().blocks(format).is_some();
        is_known && self.kind().check(format).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_up_is_the_next_width_that_exists() {
        let up =
            |text: &str| text.parse::<Spec>().unwrap().step_up(&|format| Target::Mlx.has(format)).to_string();
        assert_eq!(up("4:g32"), "affine:5:g32");
        assert_eq!(up("6"), "affine:8:g64");
        assert_eq!(up("8"), "affine:8:g64");
        assert_eq!(up("nvfp4"), "mxfp8");
        assert_eq!(up("bf16"), "bf16");
        let up = |text: &str| {
            text.parse::<Spec>().unwrap().step_up(&|format| Target::Uqff.has(format)).to_string()
        };
        assert_eq!(up("4"), "affine:6:g64");
        assert_eq!(up("mxfp4"), "q8_0");
    }
}
