//! What checkpoints are recognised as.

use std::fmt;

/// What a checkpoint was recognised as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointKind {
    /// Packed weights in MLX's layout, or a mix of these and dense ones.
    Mlx,
    /// UQFF, the container of mistral.rs.
    Uqff,
    /// A model of an Ollama store, in safetensors blobs.
    Ollama,
    /// Safetensors with weights that another tool has packed, the one that the config names.
    HuggingFace(QuantMethod),
    /// A GGUF file.
    Gguf,
    /// An SLM1 file.
    Slm1,
    /// Dense elements only.
    Dense,
}

impl fmt::Display for CheckpointKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mlx => f.write_str("MLX"),
            Self::Uqff => f.write_str("UQFF"),
            Self::Ollama => f.write_str("Ollama"),
            Self::HuggingFace(method) => write!(f, "Hugging Face {method}"),
            Self::Gguf => f.write_str("GGUF"),
            Self::Slm1 => f.write_str("SLM1"),
            Self::Dense => f.write_str("dense safetensors"),
        }
    }
}

/// What a config calls the tool that quantized the weights, its `quant_method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantMethod {
    /// AutoAWQ, 4 bits in the "gemm" layout.
    Awq,
    /// bitsandbytes: NF4, FP4, and 8-bit integers.
    BitsAndBytes,
    /// compressed-tensors: NVFP4, MXFP4, floats of 8 bits, and integers of 2 to 6 and 8 bits.
    CompressedTensors,
    /// 8-bit floats with scales for tiles of a matrix.
    Fp8,
    /// GPTQ, as AutoGPTQ and GPTQModel write it.
    Gptq,
    /// HQQ, with the settings of each module beside it.
    Hqq,
    /// NVIDIA ModelOpt's NVFP4.
    ModelOpt,
    /// MXFP4, as gpt-oss was published.
    Mxfp4,
    /// MXFP8.
    Mxfp8,
}

impl fmt::Display for QuantMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Awq => "awq",
            Self::BitsAndBytes => "bitsandbytes",
            Self::CompressedTensors => "compressed-tensors",
            Self::Fp8 => "fp8",
            Self::Gptq => "gptq",
            Self::Hqq => "hqq",
            Self::ModelOpt => "modelopt",
            Self::Mxfp4 => "mxfp4",
            Self::Mxfp8 => "mxfp8",
        })
    }
}
