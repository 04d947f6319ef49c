//! Embedding tables, packed or dense.

pub use candle_quant::nn::{embedding, Embedding};
