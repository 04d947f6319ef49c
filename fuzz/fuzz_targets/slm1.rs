//! The reader of SLM1.
#![no_main]

candle_quant_fuzz::target!("slm1");
