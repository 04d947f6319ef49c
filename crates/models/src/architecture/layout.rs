//! How transformers writes what the decoder asks for one by one. Which way experts in one parameter lie is known to readers
//! ([`FusedExperts`](candle_quant::checkpoint::FusedExperts)).

/// What is laid out in published checkpoints in another way than the decoder asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PublishedLayout {
    /// Whether queries, keys and values are one projection, `qkv_proj`.
    pub qkv: bool,
    /// Whether gate and up projections of a dense block are one, `gate_up_proj`.
    pub gate_up: bool,
    /// Whether the norms of queries and keys are a module for each head, where each has its own.
    pub norms_of_heads: bool,
    pub experts: PublishedExperts,
    /// The same of a checkpoint with packed weights.
    pub packed_experts: PublishedExperts,
    /// Whether experts are published in MXFP4, as parameters `_blocks` and `_scales`, gates and ups in turn.
    pub mxfp4_blocks: bool,
}

/// What experts are, if they are not stacks of modules in the block itself, as the config's names say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PublishedExperts {
    /// Modules of each expert: its gate, up and down projections.
    Each([&'static str; 3]),
    /// Parameters of all: `gate_up_proj` and `down_proj`.
    Parameters,
}

const EACH: PublishedExperts = PublishedExperts::Each(["gate_proj", "up_proj", "down_proj"]);

const OF_MIXTRAL: PublishedExperts = PublishedExperts::Each(["w1", "w3", "w2"]);

pub(super) const USUAL: PublishedLayout = PublishedLayout {
    qkv: false,
    gate_up: false,
    norms_of_heads: false,
    experts: EACH,
    packed_experts: EACH,
    mxfp4_blocks: false,
};

pub(super) const FUSED_MLP: PublishedLayout = PublishedLayout { gate_up: true, ..USUAL };

pub(super) const FUSED: PublishedLayout = PublishedLayout { qkv: true, ..FUSED_MLP };

pub(super) const NORMS_OF_HEADS: PublishedLayout = PublishedLayout { norms_of_heads: true, ..USUAL };

pub(super) const MIXTRAL: PublishedLayout =
    PublishedLayout { experts: OF_MIXTRAL, packed_experts: OF_MIXTRAL, ..USUAL };

/// gpt-oss, as openai/gpt-oss-20b has it.
pub(super) const PARAMETERS_OR_BLOCKS: PublishedLayout = PublishedLayout {
    experts: PublishedExperts::Parameters,
    packed_experts: PublishedExperts::Parameters,
    mxfp4_blocks: true,
    ..USUAL
};

/// Families whose packed experts are a module each: of Llama 4's transformers makes them (`SequentialLlama4TextExperts`), and
/// those of Qwen 3.5, as llm-compressor writes them, it puts together (`conversion_mapping.py`).
pub(super) const PARAMETERS_OR_EACH: PublishedLayout =
    PublishedLayout { experts: PublishedExperts::Parameters, ..USUAL };
