//! What ranks say to each other.
#![no_main]

candle_quant_fuzz::target!("connection");
