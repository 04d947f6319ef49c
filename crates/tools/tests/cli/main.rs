//! The program `candle-quant`.
#![cfg(feature = "cli")]

#[path = "../../../../tests/common/checkpoint.rs"]
mod checkpoint;
#[path = "../../../../tests/common/mod.rs"]
mod common;
#[path = "../../../../tests/common/convert.rs"]
mod conversion;
#[path = "../../../../tests/common/packed.rs"]
mod packed;
#[path = "../../../../tests/gguf/writer.rs"]
#[allow(dead_code)] // more than is needed here
mod writer;

mod bench;
mod chat;
mod convert;
mod damage;
mod diff;
mod inspect;
#[cfg(unix)]
mod kill;
mod kinds;
mod output;
mod parallel;
mod patch_candle;
mod untrusted;
mod verify;

use std::process::{Command, Output};

/// The program with these arguments.
fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-quant"));
    command.args(args).env_remove("RUST_BACKTRACE");
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}
