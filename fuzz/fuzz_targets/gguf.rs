//! The reader of GGUF.
#![no_main]

candle_quant_fuzz::target!("gguf");
