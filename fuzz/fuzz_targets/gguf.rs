//! The reader of GGUF.
#![no_main]

candle_quant_fuzz::reader_target!();
