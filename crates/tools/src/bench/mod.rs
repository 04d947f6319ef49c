//! How fast a model runs here: prompts, decode steps at several depths, its matmuls alone.
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_quant::Checkpoint;
//! use candle_quant_models::Model;
//! use candle_quant_tools::bench::{bench, BenchOptions};
//!
//! let checkpoint = Checkpoint::open("assets/tiny")?;
//! let options = BenchOptions {
//!     prompts: vec![32],
//!     depths: vec![0, 64],
//!     decode_tokens: 8,
//!     repetitions: 2,
//!     bandwidth_bytes: 1 << 20, // far too little but for an example
//!     ..BenchOptions::default()
//! };
//! let load = || Model::load(&checkpoint, DType::F32, &Device::Cpu);
//! let report = bench(&checkpoint, load, &options, &mut |_event| ())?;
//! for figure in &report.decode {
//!     println!("{} tokens/s behind {}", figure.tokens_per_second.mean, figure.depth);
//! }
//! assert_eq!((report.prefill.len(), report.decode.len()), (1, 2));
//! assert_eq!(report.decode[1].seconds.len(), 2);
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! # What is measured
//! * A prompt, from an empty cache, in chunks as [`generate`](candle_quant_models::generate) feeds it, until the logits of
//!   its last token are there.
//! * Tokens one by one, behind a number of others. Tokens are random, and none is drawn: sampling is not in it.
//! * How fast all threads read memory, with which the share is computed that decoding reaches: a step can't be faster than
//!   its weights and its part of the KV cache are read. On other devices than the CPU that is left out.
//! * The most memory that the process needed, before the last.

mod machine;
mod matmuls;
mod options;
mod report;
mod spread;
mod texts;

pub use machine::{cpu_name, peak_resident, read_bandwidth};
pub use matmuls::MatmulFigure;
pub use options::{BenchOptions, Text};
pub use report::{BenchReport, BenchedModel, DecodeFigure, Machine, PrefillFigure, ReadBandwidth, Settings};
pub use spread::Spread;
pub use texts::{time_texts, Timing, Timings};

use candle_quant::{Checkpoint, Result};
use candle_quant_models::{Config, Model};
use std::time::Instant;

/// How often memory is read to measure its bandwidth.
const BANDWIDTH_ROUNDS: usize = 5;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BenchEvent {
    /// The model is loaded.
    Load,
    /// A text is computed.
    Text {
        /// Which one.
        text: Text,
        /// How often it was before; 0 to warm up.
        repetition: usize,
    },
    /// Weights of a shape are multiplied.
    Matmul {
        /// Rows of the weight.
        n: usize,
        /// Elements of a row.
        k: usize,
        /// Rows of x.
        m: usize,
    },
    /// Memory is read.
    Bandwidth,
}

/// Loads a model of `checkpoint` and measures it.
///
/// # Errors
/// As those of `load` and [`time_texts`].
pub fn bench(
    checkpoint: &Checkpoint,
    load: impl FnOnce() -> Result<Model>,
    options: &BenchOptions,
    progress: &mut dyn FnMut(BenchEvent),
) -> Result<BenchReport> {
    options.validate()?;
    let vocabulary = Config::from_checkpoint(checkpoint)?.vocab_size;
    progress(BenchEvent::Load);
    let start = Instant::now();
    let mut model = load()?;
    let load_seconds = start.elapsed().as_secs_f64();
    let texts = match options.texts().is_empty() {
        true => Timings::default(),
        false => time_texts(&mut model, vocabulary, options, progress)?,
    };
    let mut report = BenchReport::new(checkpoint, &model, options, load_seconds);
    report.left_out = texts.left_out;
    report.matmuls = matmuls::time_matmuls(&model, &options.matmul_rows, options.repetitions, progress)?;
    if model.device().is_cpu() {
        progress(BenchEvent::Bandwidth);
        let rounds = read_bandwidth(options.bandwidth_bytes, BANDWIDTH_ROUNDS);
        report.read_bandwidth = ReadBandwidth::of(&rounds, options.bandwidth_bytes);
        if rounds.is_empty() && options.bandwidth_bytes > 0 {
            let bytes = options.bandwidth_bytes;
            let note = format!("the bandwidth of memory was not measured: there are no {bytes} bytes for it");
            report.notes.push(note);
        }
    } else {
        report.notes.push("the bandwidth of memory is measured on the CPU alone".to_owned());
    }
    for timing in texts.timings {
        report.add(timing, &model);
    }
    Ok(report)
}
