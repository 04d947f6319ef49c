//! A folder that a conversion is to replace.
#![no_main]

candle_quant_fuzz::target!("manifest");
