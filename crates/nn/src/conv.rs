//! Convolutions. They have no packed form: a packed weight is dequantized.

use crate::VarBuilder;
use candle_core::Result;

pub use candle_nn::conv::*;

/// candle_nn's constructors, which all have the same parameters, from this crate's [`VarBuilder`].
macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident($config:ty) -> $layer:ty;)+) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If a tensor is missing or has another shape.
        pub fn $name(
            in_channels: usize,
            out_channels: usize,
            kernel_size: usize,
            cfg: $config,
            vb: VarBuilder,
        ) -> Result<$layer> {
            candle_nn::$name(in_channels, out_channels, kernel_size, cfg, vb.dense())
        }
    )+};
}

constructors! {
    /// A convolution over one dimension, from the tensors `weight` and `bias`.
    conv1d(Conv1dConfig) -> Conv1d;

    /// A convolution over one dimension, from the tensor `weight`.
    conv1d_no_bias(Conv1dConfig) -> Conv1d;

    /// A transposed convolution over one dimension, from the tensors `weight` and `bias`.
    conv_transpose1d(ConvTranspose1dConfig) -> ConvTranspose1d;

    /// A transposed convolution over one dimension, from the tensor `weight`.
    conv_transpose1d_no_bias(ConvTranspose1dConfig) -> ConvTranspose1d;

    /// A convolution over two dimensions, from the tensors `weight` and `bias`.
    conv2d(Conv2dConfig) -> Conv2d;

    /// A convolution over two dimensions, from the tensor `weight`.
    conv2d_no_bias(Conv2dConfig) -> Conv2d;

    /// A transposed convolution over two dimensions, from the tensors `weight` and `bias`.
    conv_transpose2d(ConvTranspose2dConfig) -> ConvTranspose2d;

    /// A transposed convolution over two dimensions, from the tensor `weight`.
    conv_transpose2d_no_bias(ConvTranspose2dConfig) -> ConvTranspose2d;
}
