//! The program `candle-quant`.
#![cfg(feature = "cli")]

#[path = "../../../../tests/common/checkpoint.rs"]
mod checkpoint;
#[path = "../../../../tests/common/mod.rs"]
mod common;
#[path = "../../../../tests/common/convert.rs"]
mod conversion;
#[path = "../../../../tests/hub/server.rs"]
#[allow(dead_code)] // more than is needed here
mod hub_server;
#[path = "../../../../tests/common/packed.rs"]
mod packed;
#[path = "../../../../tests/gguf/writer.rs"]
#[allow(dead_code)] // more than is needed here
mod writer;

mod adapters;
mod bench;
mod cache;
mod chat;
mod convert;
mod damage;
mod diff;
mod ggml;
mod hub;
mod importance;
mod inspect;
#[cfg(unix)]
mod kill;
mod kinds;
mod memory;
mod output;
mod parallel;
mod patch_candle;
mod provenance;
#[cfg(unix)]
mod pty;
mod untrusted;
mod verify;

use std::process::{Command, Output};

/// The program with these arguments.
fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-quant"));
    // No test asks the hub, unless it brings its own.
    command.args(args).env_remove("RUST_BACKTRACE").env("HF_HUB_OFFLINE", "1");
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}
