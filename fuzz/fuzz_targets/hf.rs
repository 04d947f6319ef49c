//! The reader of Hugging Face's quantization methods.
#![no_main]

candle_quant_fuzz::target!("hf");
