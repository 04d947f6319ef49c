//! SLM1 files: the fixtures bit for bit, every rule of the format, and damaged files.

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../common/process.rs"]
mod process;

mod entries;
mod fixtures;
mod headers;
mod memory;
mod models;
mod mutations;
mod writer;

use candle_quant::checkpoint::slm1::{self, ChecksumPolicy, Slm1, Slm1Options};
use candle_quant::Result;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// The path of a fixture.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/slm1").join(format!("{name}.slm"))
}

fn fixture_bytes(name: &str) -> Vec<u8> {
    fs::read(fixture(name)).unwrap()
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn open_with(bytes: &[u8], options: &Slm1Options) -> Result<Slm1> {
    let dir = checkpoint::folder_of(&[("model.slm", bytes)]);
    slm1::open(dir.path().join("model.slm"), options)
}

/// Opens a file as `Checkpoint::open` does.
fn open(bytes: &[u8]) -> Result<Slm1> {
    open_with(bytes, &Slm1Options::default())
}

/// A checksum, as the real one is not published.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().enumerate().map(|(at, byte)| u64::from(*byte) * (at as u64 + 1)).sum()
}

/// Opens a file strictly, with [`sum`] as its checksum.
fn open_strictly(bytes: &[u8]) -> Result<Slm1> {
    let checksum = ChecksumPolicy::Verify(sum);
    let sum = sum(&with(bytes, 100, &[0; 8])).to_le_bytes();
    open_with(&with(bytes, 100, &sum), &Slm1Options { strict: true, checksum, ..Slm1Options::default() })
}

/// FNV-1a, 64 bits.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf29ce484222325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100000001b3))
}

/// Where the entry of a tensor begins.
fn entry(bytes: &[u8], name: &str) -> usize {
    let directory = u64_at(bytes, 80) as usize;
    let count = u32_at(bytes, 88) as usize;
    (0..count).map(|i| directory + 64 * i).find(|at| u64_at(bytes, *at) == hash(name)).unwrap()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The file with other bytes at some place.
fn with(bytes: &[u8], at: usize, patch: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + patch.len()].copy_from_slice(patch);
    bytes
}
