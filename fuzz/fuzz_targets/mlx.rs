//! The reader of MLX.
#![no_main]

candle_quant_fuzz::target!("mlx");
