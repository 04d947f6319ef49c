//! What an earlier conversion has left.
#![no_main]

candle_quant_fuzz::target!("journal");
