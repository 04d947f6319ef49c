//! Families of candle-transformers, each with a small random checkpoint, three times on the same inputs:
//!
//! * packed: the sources unchanged, this crate's candle_nn, weights as they are packed;
//! * dequantized: candle-transformers as it is, on `DequantizingBackend`;
//! * dense: candle-transformers and candle_nn as they are, on the dequantized weights in a file.
//!
//! How a family is built and run is in `table`, once for both crates.
#![allow(clippy::duplicate_mod)] // The table.

// The name that candle-transformers has for it, and the one that shared code has.
extern crate candle as candle_core;

mod checkpoint;
mod compare;
mod family;
mod packed;
mod recorder;
#[path = "../../../../tests/common/packed.rs"]
mod reference;
mod unchanged;

use candle::Result;
pub use family::*;

/// One test for each family.
macro_rules! families {
    ($($table:ident: $($family:ident)*;)*) => {$($(
        #[test]
        fn $family() -> Result<()> {
            compare::compare(stringify!($family), unchanged::$table::$family, packed::$table::$family)
        }
    )*)*};
}

families! {
    text: llama mistral qwen2 qwen3 gemma gemma2 gemma3 gemma4 phi phi3 olmo olmo2 starcoder2 stable_lm helium granite glm4
        glm4_new smollm3 falcon bigcode granitemoehybrid;
    moe: mixtral qwen2_moe qwen3_moe deepseek2;
    recurrent: mamba mamba2 recurrent_gemma lfm2;
    encoders: bert distilbert modernbert xlm_roberta debertav2 t5 marian;
    other: clip vit siglip whisper flux z_image stable_diffusion;
}
