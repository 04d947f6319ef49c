//! Every format goes through every door of the crate: quantize, dequantize, matmul, experts, embed, narrow, save and load,
//! verify, convert; with the kernels of every instruction set that this CPU has; `tests/cuda` does the same on a CUDA device.
//! A format that is only read goes through those from dequantize to narrow.
//!
//! Whoever adds a format adds nothing here, but for an independent reading of its elements in `common/packed.rs`: a door
//! that takes the new format for another one is off by far more than the bounds of this test.

#[path = "../../../../tests/common/convert.rs"]
mod conversion;
mod format;
#[path = "../../../../tests/common/packed.rs"]
mod packed;

use candle_core::Device;
use candle_quant::QuantFormat;
use std::process::Command;

fn every_format(device: &Device) {
    for format in QuantFormat::all() {
        format::passes_every_door(format, device);
    }
    for format in QuantFormat::only_read() {
        format::read_only_passes_every_door(format, device);
    }
}

#[test]
fn every_format_passes_every_door() {
    const SIMD: &str = "CANDLE_QUANT_SIMD";
    if std::env::var(SIMD).is_ok() {
        return every_format(&Device::Cpu);
    }
    // The kernels are chosen once for a process. A name that this CPU does not have leaves the best there are.
    let sets = ["avx512amx", "avx512vnni", "avx512", "avx2", "neoni8mm", "neondotprod", "neon", "portable"];
    // Once more with weights in parts of two memory nodes, as it were.
    for (set, nodes) in sets.map(|set| (set, "off")).into_iter().chain([("best", "2")]) {
        let this = std::env::current_exe().unwrap();
        let test = ["--exact", "every_format_passes_every_door", "--nocapture"];
        let output =
            Command::new(this).args(test).env(SIMD, set).env("CANDLE_QUANT_NUMA", nodes).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{set}: {text}");
    }
}
