//! How much the columns of weights count, by what their layers are given: collected by a model's own run on a text, or
//! read from an importance matrix of llama.cpp.
//!
//! A layer multiplies column `k` of its weight by element `k` of what it is given, so that an error there counts as much as
//! the mean square of that element. [`Statistics`] has it for each layer, for experts for each of them.
//! [`ConvertOptions::statistics`](crate::convert::ConvertOptions::statistics) takes them.
//!
//! ```
//! use candle_quant::Checkpoint;
//! use candle_quant_tools::importance::{CalibrationText, Collector};
//!
//! let source = Checkpoint::open("assets/tiny")?;
//! let text = CalibrationText::new(&source, "Once upon a time, there was a fox.\n\nThe fox could not sleep.", 512)?;
//! let mut collector = Collector::new(&source, &text)?;
//! while collector.advance()? {}
//! let statistics = collector.statistics();
//! let seen = statistics.module("model.layers.0.mlp.up_proj").unwrap();
//! assert_eq!((seen.columns(), seen.counts()), (256, &[text.tokens() as u64][..]));
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! ```text
//! columns       sums of squares of what a module is given
//!    ▼
//! statistics    those of all modules
//! text          texts as pieces of tokens
//!    ▼
//! file          statistics in a file
//! imatrix       those of llama.cpp
//! collect       a model's run
//! products      sums of products instead of squares
//!    ▼
//! feedback      how columns make up for each other by them
//! scales        by what columns are multiplied
//! ```

mod collect;
mod columns;
mod feedback;
mod file;
mod imatrix;
mod observed;
mod products;
mod scales;
mod statistics;
mod text;

pub use collect::Collector;
pub use columns::ColumnSums;
pub(crate) use columns::ColumnWeights;
pub(crate) use feedback::{Feedback, OfMatrices, ToFeed};
pub use imatrix::read_imatrix;
pub(crate) use products::products;
pub use scales::ColumnScales;
pub use statistics::Statistics;
pub(crate) use statistics::StatisticsOfInputs;
pub use text::CalibrationText;
