//! What the fuzz targets and the soak test share.
//!
//! An input is a [`Bundle`]: a few files. A [`Target`] gives them to something of ours that reads what others wrote. Nothing
//! may panic, whatever the bytes, and what is promised of it must hold.

mod bundle;
mod mutate;
mod targets;

// The writers of the crate's own tests.
#[path = "../../tests/common/checkpoint.rs"]
mod checkpoint;
#[allow(dead_code)]
#[path = "../../tests/common/tokenizers.rs"]
mod tokenizers;
#[allow(dead_code)]
#[path = "../../tests/gguf/writer.rs"]
mod writer;

pub use bundle::Bundle;
pub use mutate::mutate;
pub use targets::{Seeds, Target, TARGETS};

/// A fuzz target, and a mutator that keeps what an input is made of.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        libfuzzer_sys::fuzz_target!(|input: &[u8]| {
            if let Some(bundle) = $crate::Bundle::decode(input) {
                $crate::Target::of($name).run(&bundle);
            }
        });

        libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
            if let Some(mut bundle) = $crate::Bundle::decode(&data[..size]).filter(|_| seed % 4 != 0) {
                $crate::mutate(&mut bundle, u64::from(seed));
                let bytes = bundle.encode();
                if bytes.len() <= max_size {
                    data[..bytes.len()].copy_from_slice(&bytes);
                    return bytes.len();
                }
            }
            libfuzzer_sys::fuzzer_mutate(data, size, max_size)
        });
    };
}
