//! Whole models on the CPU: loading, prefill, decode steps, forwards of a few tokens, sampling.
//!
//! `cargo bench -p candle-quant-models --bench decode` writes checkpoints of the shapes of Qwen3-0.6B and 1.7B, with random
//! weights from a fixed seed, and keeps them in a folder (`--files`). It measures this crate and, in the same process and in
//! turns round by round, candle-transformers' `quantized_qwen3` on a GGUF file of the same shape. Each figure is the median
//! of the rounds, with the least and the greatest. It prints a table; `--json FILE` writes a line of JSON for each figure.
//! `benches/peers/decode_cpu.py` drives it (`--paced`) together with programs of other languages.
//!
//! What is measured (`--parts`):
//!
//! * `load`: a process of its own loads the model and computes 16 tokens: the time of both, and its peak resident memory;
//! * `memory`: the same with a prompt of 2048 tokens (candle's in one process of its own, too), for the peak alone;
//! * `prefill`: prompts in chunks of 256 tokens, as `generate` feeds them;
//! * `decode`: steps of one token behind so many tokens of context; beside it the byte floor, which is the time to read all
//!   packed weights and a cache of 16-bit elements at the read bandwidth that was measured on all threads;
//! * `forward`: 1 to 16 tokens of one text at once; `batch`: one token of 1 to 16 texts. candle's model takes no batches on
//!   the CPU, and gives the logits of the last token alone;
//! * `sampling`: one token of 151,936 logits, beside candle's `LogitsProcessor`.
//!
//! The contexts of candle's model are filled by chunks that do not see each other, for its prefill takes minutes beyond
//! 2048 tokens. What the cache holds makes no difference to the time of a step.

mod child;
mod contenders;
mod files;
mod gguf;
#[path = "../../../tools/src/bench/machine.rs"]
#[allow(dead_code)] // more than is needed here
mod machine;
mod options;
mod parts;
mod report;
mod sampling;
mod shapes;

use anyhow::Result;
use clap::Parser;
use options::{Options, Part};
use report::Report;

fn main() -> Result<()> {
    let options = Options::parse().for_tests();
    if let Some(contender) = &options.child {
        return child::run(contender, &options);
    }
    if options.make {
        for shape in options.shapes() {
            options.bits.iter().try_for_each(|&bits| files::make(&options, &shape, bits).map(drop))?;
        }
        return Ok(());
    }
    let mut report = Report::new(&options)?;
    let bandwidth = machine::read_bandwidth(options.bandwidth_bytes(), options.rounds.max(3) as usize);
    report.write(report::figure("bandwidth", "GB/s", &bandwidth))?;
    for shape in options.shapes() {
        for &bits in &options.bits {
            let files = files::make(&options, &shape, bits)?;
            if options.wants(Part::Load) {
                child::load(&options, &files, &mut report)?;
            }
            if options.wants(Part::Memory) {
                child::memory(&options, &files, &mut report)?;
            }
            if options.parts.iter().any(|part| part.needs_models()) {
                parts::measure(&options, &files, &bandwidth, &mut report)?;
            }
        }
    }
    if options.wants(Part::Sampling) {
        sampling::measure(&options, &mut report)?;
    }
    report.finish()
}
