//! Names of models.
#![no_main]

candle_quant_fuzz::target!("name");
