//! Families of candle-transformers as a dependency, with a patched candle-nn: on packed weights, and on dense ones. The
//! repository's `testing/unmodified` says what a family is.
#![allow(clippy::duplicate_mod)] // The table.
#![allow(dead_code)] // The tables hold more families than are run here.

extern crate candle_core as candle;

#[path = "../../../../testing/unmodified/tests/families/checkpoint.rs"]
mod checkpoint;
#[path = "../../../../testing/unmodified/tests/families/compare.rs"]
mod compare;
#[path = "../../../../testing/unmodified/tests/families/family.rs"]
mod family;
mod packed;
#[path = "../../../../testing/unmodified/tests/families/recorder.rs"]
mod recorder;
#[path = "../../../../tests/common/packed.rs"]
mod reference;
mod unchanged;

pub use family::*;

use candle::Result;

macro_rules! families {
    ($($table:ident: $($family:ident)*;)*) => {$($(
        #[test]
        fn $family() -> Result<()> {
            compare::compare(stringify!($family), unchanged::$table::$family, packed::$table::$family)
        }
    )*)*};
}

families! {
    text: llama mistral qwen3 gemma2 phi3 olmo2;
    moe: qwen3_moe;
    encoders: bert;
    other: whisper flux;
}
