//! The reader of UQFF.
#![no_main]

candle_quant_fuzz::reader_target!();
