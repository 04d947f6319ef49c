//! The reader of UQFF.
#![no_main]

candle_quant_fuzz::target!("uqff");
