//! Layers, kernels and checkpoint readers that run quantized weights in candle **as they are packed**: affine 1- to
//! 8-bit, MXFP4, NVFP4, MXFP8, MXINT8 and NF4, from checkpoints that mlx-lm, mistral.rs, Ollama, ModelOpt,
//! compressed-tensors, GPTQModel, AutoAWQ, bitsandbytes or GGUF tools wrote.
//!
//! [`linear`], [`linear_no_bias`], [`Linear`], [`embedding`], [`Embedding`] and [`VarBuilder`] have the names and
//! arguments of their candle_nn namesakes, and become quantized or dense as the checkpoint says, tensor by tensor.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_quant::{linear_no_bias, Checkpoint, VarBuilder};
//!
//! # fn main() -> candle_core::Result<()> {
//! let checkpoint = Checkpoint::open("assets/tiny")?; // as mlx-lm writes it
//! let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
//! let gate = linear_no_bias(256, 512, vb.pp("model.layers.0.mlp.gate_proj"))?; // 4-bit, stays packed
//! let y = gate.forward(&Tensor::ones((1, 256), DType::F32, &Device::Cpu)?)?;
//! assert_eq!(y.dims(), [1, 512]);
//! # Ok(())
//! # }
//! ```
//!
//! | room | what it does |
//! |---|---|
//! | [`checkpoint`] | opens a checkpoint, checks it, names its weights; a weight is read when it is loaded |
//! | [`mod@format`] | what the bits mean: layout, scalar quantization and dequantization, the reference for everything else |
//! | [`QuantTensor`] | a packed weight in memory: matmul, embedding, dequantize, slices |
//! | [`nn`] | layers with candle_nn's names |
//! | [`parallel`] | ranks, and layers of which each rank has a slice |
//!
//! Three more crates stand on this one: `candle-quant-nn` (candle_nn's whole interface), `candle-quant-models` (language
//! models, generation) and `candle-quant-tools` (convert, verify, diff, the command line). It stands on a small one,
//! `candle-quant-packed`, by which layers of other crates hold packed weights. `docs/architecture.md` in the
//! repository maps the rooms and the way of a weight through them.
//!
//! # Instruction sets
//! The CPU kernels are chosen at run time: AVX-512 with AMX (int8 and bf16 tiles), AVX-512 with VNNI, AVX-512
//! with VBMI and GFNI, AVX2 with FMA, NEON with products of matrices of bytes or dot products of bytes, NEON, or portable Rust. The
//! environment variable `CANDLE_QUANT_SIMD`
//! (`avx512amx`, `avx512vnni`, `avx512`, `avx2`, `neoni8mm`, `neondotprod`, `neon`, `portable`) picks a lesser one, for comparison.
//!
//! Which algorithm multiplies depends on the format, the rows of x and the instruction set; one table says so, in
//! `src/backend/cpu/dispatch.rs`. A format without a fast kernel goes through the f32 kernels.
//!
//! # Machines with several memory nodes
//! With the environment variable `CANDLE_QUANT_NUMA=on`, every memory node (NUMA) has a part of each weight's rows, which its threads
//! multiply first in a step of a few tokens; while such a step lasts, threads stay on the CPUs of a node. Keys and values lie where they
//! were computed. Weights are copied once more while they are loaded. Without it, memory lies where the system puts it; `numactl
//! --interleave=all` is what spreads it evenly. A number in place of `on` pretends so many nodes. Linux only; results are the same
//! bits. Tested with pretended nodes: how much it gains on a machine with several has not been measured.
//!
//! # Precision of activations
//! With VNNI, AMX, AVX2 and dot products of bytes on ARM (the last two of some numbers of rows, as that table says), integer codes are
//! multiplied with activations as fixed-point numbers of one to three digits of eight bits.
//! [`ActivationPrecision`] chooses for the process, as does the environment variable `CANDLE_QUANT_ACTIVATIONS`: `exact` (a
//! relative error of about 2e-7, the default), `16` (about 3e-5) or `8` (about 6e-3, as in llama.cpp).
//!
//! # CUDA devices
//! With the feature `cuda`, a weight on a CUDA device is computed there, on the stream of candle's device.
//! Operands on different devices are an error; ids of embeddings and of experts are not read back, and one out of range
//! gives a row of NaN. On cards from compute capability 9.0 on, kernels load their weights while the one ahead still runs;
//! the environment variable `CANDLE_QUANT_EARLY_START=off` has them wait, which shows whether that is to blame for something.
//!
//! A [`StepPlan`](step::StepPlan) makes a decode step one CUDA graph for every position. A step of layers that are called
//! one by one can be captured, too, for the position it was captured at and no other. That needs a device with a stream of its own (`Device::new_cuda_with_stream`) and without event tracking
//! (`CudaDevice::disable_event_tracking`): run the same step once before on the same thread, under
//! `CudaDevice::enable_cuda_graph_htod_cache` for the sake of candle's own operations; in the capture, copy the result
//! into a tensor from before and drop all others. Buffers of this crate that a
//! captured step uses are never freed, but for those of a [`DeviceKvCache`] that grows.
//!
//! # Features
//! | feature | adds |
//! |---|---|
//! | `cuda` | kernels for NVIDIA GPUs, for candle's CUDA devices: needs nvcc to build, the driver to start |
//! | `hub` | models of the Hugging Face hub are fetched when they are opened by name; without it, what is in its cache is found |
//! | `processes` | ranks that are processes, which find each other over TCP, encrypted by the Noise protocol |
//! | `nccl` | `cuda`, `processes`, and ranks that are GPUs of one or many processes: needs NCCL to build and to start |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(missing_docs, unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod backend;
pub mod checkpoint;
mod distributed;
mod error;
pub mod format;
mod known;
mod memory_nodes;
pub mod nn;
mod tensor;

pub use backend::{instruction_set, ActivationPrecision};
pub use checkpoint::Checkpoint;
pub use error::{Error, Result, Untrusted};
pub use format::QuantFormat;
pub use nn::{
    embedding, layer_norm, layer_norm_no_bias, linear, linear_b, linear_no_bias, rms_norm,
    DequantizingBackend, Embedding, LayerWeight, Linear, VarBuilder, WeightSummary,
};
// What a model file imports beside the layers, so that one `use` line serves it.
pub use candle_nn::{Activation, Dropout, Init, LayerNorm, LayerNormConfig, Module, ModuleT, RmsNorm};
pub use tensor::{
    DeltaNetConfig, DeltaNetState, DeviceKvCache, KvCache, KvCacheConfig, KvFormat, QuantTensor, SuperBlocks,
};

/// Attention to a [`KvCache`] or [`DeviceKvCache`], linear attention, tokens drawn from logits, and operations on rows that are
/// no weights yet. Those of weights are methods of [`QuantTensor`].
pub mod ops {
    pub use crate::backend::{
        attention, decode_attention, gated_delta, gated_delta_net, prefill_attention, quantize_rows,
        rms_norm_matmul, sample, AttentionOptions, DeltaNetInputs, DeltaNetWeights, SampleOptions,
    };
}

/// A decoder whose layers are known before the first token, run in one call: see [`StepPlan`](step::StepPlan).
pub mod step {
    pub use crate::backend::step::{QueryGrowth, StepToken, Turn};
    pub use crate::nn::step::{
        AttentionBlock, BlockOutput, DeltaNetBlock, DeltaNetProjections, DeviceStep, ExpertsBlock,
        FeedForwardBlock, HeadBlock, StepBuilder, StepCaches, StepNorm, StepPlan,
    };
}

/// Tensor parallelism: several ranks, each on a device of its own and with its slices of the weights, compute
/// one model together.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::parallel;
///
/// let devices = [Device::Cpu, Device::Cpu, Device::Cpu];
/// let sums = parallel::run(&devices, |rank| {
///     let x = Tensor::new(&[rank.index() as f32, 1.], rank.device())?;
///     Ok(rank.all_reduce_sum(&x)?.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(sums, [[3., 3.], [3., 3.], [3., 3.]]);
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// Ranks are threads ([`run`](parallel::run)), or processes that a launcher has started
/// (`Launch::distributed`, with the features `processes` and `nccl`).
pub mod parallel {
    #[cfg(all(feature = "testing", feature = "processes"))]
    #[doc(hidden)]
    pub use crate::distributed::fuzzing;
    pub use crate::distributed::partition::{split, split_or_cut_units, whole_groups, MOST_RANKS};
    pub use crate::distributed::{run, Collective, Launch, Rank, StreamCollective, MOST_RANKS_OF_A_PROCESS};
    #[cfg(feature = "processes")]
    pub use crate::distributed::{Joined, RankInfo, Secret};
    pub use crate::nn::expert_split::{expert_shares, ExpertShare, ExpertSplit};
    pub use crate::nn::parallel::{
        column_parallel, parallel_experts, row_parallel, vocab_parallel_embedding, vocab_parallel_head,
        ParallelExperts, PartialSum, RowParallel, VocabParallelEmbedding, VocabParallelHead, VocabularyShare,
    };
}
