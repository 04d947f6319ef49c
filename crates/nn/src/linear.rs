//! Linear layers, on packed or dense weights.

pub use candle_quant::nn::{linear, linear_b, linear_no_bias, Linear};
