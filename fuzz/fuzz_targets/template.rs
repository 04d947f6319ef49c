//! Chat templates.
#![no_main]

candle_quant_fuzz::target!("template");
