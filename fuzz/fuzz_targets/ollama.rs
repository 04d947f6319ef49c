//! The reader of Ollama stores.
#![no_main]

candle_quant_fuzz::target!("ollama");
