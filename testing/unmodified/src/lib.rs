//! The modules of candle-transformers, whose sources are where cargo keeps them. build.rs writes one `mod` line for
//! each, and the names: `MODULES` those of its lib.rs, `MODELS` those of its `models`.
#![allow(warnings, clippy::all, macro_expanded_macro_exports_accessed_by_absolute_paths)]

include!(concat!(env!("OUT_DIR"), "/lib.rs"));
