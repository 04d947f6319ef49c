//! Every weight of every fixture, whole and in halves, from mapped files: for sanitizers. That the bits are right is tested
//! in `tests/checkpoint`.

use candle_core::Device;
use candle_quant::checkpoint::Weight;
use candle_quant::Checkpoint;
use std::path::Path;

/// Loads a weight, and its first and second half along each dimension that can be cut there.
fn load(weight: &Weight) -> usize {
    let device = &Device::Cpu;
    let whole = weight.load(device).unwrap();
    assert_eq!(whole.dims(), weight.dims());
    let mut parts = 0;
    for (dim, &size) in weight.dims().iter().enumerate() {
        let unit = if dim + 1 == weight.dims().len() { weight.granularity() } else { 1 };
        let middle = size / 2 / unit * unit;
        if middle > 0 && middle < size {
            for range in [0..middle, middle..size] {
                weight.narrow(dim, range).unwrap().load(device).unwrap();
                parts += 1;
            }
        }
    }
    parts
}

#[test]
fn weights_of_every_fixture_load() {
    let fixtures = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures");
    let (mut weights, mut parts) = (0, 0);
    for kind in ["mlx", "hf", "uqff", "slm1"] {
        for entry in std::fs::read_dir(fixtures.join(kind)).unwrap() {
            let Ok(checkpoint) = Checkpoint::open(entry.unwrap().path()) else { continue };
            let names: Vec<_> = checkpoint.tensor_names().map(str::to_owned).collect();
            // Some need to be told K.
            for weight in names.iter().filter_map(|name| checkpoint.tensor(name, None).ok()) {
                parts += load(&weight);
                weights += 1;
            }
        }
    }
    assert!(weights > 500 && parts > weights, "{weights} weights, {parts} parts");
}
