//! The program `candle-quant`.
#![cfg(feature = "cli")]

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/convert.rs"]
mod conversion;
#[path = "../common/damage.rs"]
mod damage;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../gguf/writer.rs"]
#[allow(dead_code)] // more than is needed here
mod writer;

mod convert;
mod diff;
mod inspect;
mod kinds;
mod parallel;
mod verify;
