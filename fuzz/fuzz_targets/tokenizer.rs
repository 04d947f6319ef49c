//! Files beside the weights.
#![no_main]

candle_quant_fuzz::target!("tokenizer");
