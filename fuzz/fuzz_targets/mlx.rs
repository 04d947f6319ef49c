//! The reader of MLX.
#![no_main]

candle_quant_fuzz::reader_target!();
