//! Statistics that a conversion keeps.
#![no_main]

candle_quant_fuzz::target!("statistics");
