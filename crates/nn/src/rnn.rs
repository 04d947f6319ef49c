//! Recurrent layers. They have no packed form: a packed weight is dequantized.

use crate::VarBuilder;
use candle_core::{Result, Tensor};
use std::fmt;

pub use candle_nn::rnn::*;

/// candle_nn's layer of the same name, but `new` takes this crate's [`VarBuilder`].
macro_rules! layer {
    ($(#[$doc:meta])* $layer:ident($config:ty) -> $state:ty; $(#[$constructor_doc:meta])* $constructor:ident) => {
        $(#[$doc])*
        #[allow(clippy::upper_case_acronyms)] // candle_nn's name
        #[derive(Clone)]
        pub struct $layer(candle_nn::$layer);

        impl $layer {
            /// A layer of `hidden_dim` units on inputs of `in_dim` features.
            ///
            /// # Errors
            /// If a tensor is missing or has another shape.
            pub fn new(in_dim: usize, hidden_dim: usize, config: $config, vb: VarBuilder) -> Result<Self> {
                Ok(Self(candle_nn::$layer::new(in_dim, hidden_dim, config, vb.dense())?))
            }

            /// What the layer was made with.
            pub fn config(&self) -> &$config {
                self.0.config()
            }
        }

        impl fmt::Debug for $layer {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, formatter)
            }
        }

        impl RNN for $layer {
            type State = $state;

            fn zero_state(&self, batch_dim: usize) -> Result<$state> {
                self.0.zero_state(batch_dim)
            }

            fn step(&self, input: &Tensor, state: &$state) -> Result<$state> {
                self.0.step(input, state)
            }

            fn states_to_tensor(&self, states: &[$state]) -> Result<Tensor> {
                self.0.states_to_tensor(states)
            }
        }

        $(#[$constructor_doc])*
        ///
        /// # Errors
        /// If a tensor is missing or has another shape.
        pub fn $constructor(
            in_dim: usize,
            hidden_dim: usize,
            config: $config,
            vb: VarBuilder,
        ) -> Result<$layer> {
            $layer::new(in_dim, hidden_dim, config, vb)
        }
    };
}

layer! {
    /// A long short-term memory (LSTM) layer.
    LSTM(LSTMConfig) -> LSTMState;
    /// An LSTM layer from the tensors `weight_ih_l0`, `weight_hh_l0` and, if the config has them, `bias_ih_l0` and
    /// `bias_hh_l0`. The number is the config's `layer_idx`; names of a backward layer end in `_reverse`.
    lstm
}

layer! {
    /// A gated recurrent unit (GRU) layer.
    GRU(GRUConfig) -> GRUState;
    /// A GRU layer from the tensors `weight_ih_l0`, `weight_hh_l0` and, if the config has them, `bias_ih_l0` and
    /// `bias_hh_l0`.
    gru
}
