//! Importance matrices of llama.cpp.
#![no_main]

candle_quant_fuzz::target!("imatrix");
