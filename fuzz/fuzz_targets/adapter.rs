//! Files of adapters.
#![no_main]

candle_quant_fuzz::target!("adapter");
