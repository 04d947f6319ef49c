//! Turns the bf16 checkpoint into the 4-bit one, laid out as mlx-lm writes it.

use crate::export::{save_tensors, write_json};
use anyhow::{Context, Result};
use candle_core::Device;
use candle_quant::{QuantFormat, QuantTensor};
use serde_json::{json, Value};
use std::collections::HashMap;
use std::path::Path;

const BITS: usize = 4;
const GROUP_SIZE: usize = 64;

/// Quantizes every matrix (projections and embedding) of the checkpoint in `from` and writes the result,
/// with the other files of the checkpoint, to `to`.
pub fn quantize_checkpoint(from: &Path, to: &Path) -> Result<()> {
    let path = from.join("model.safetensors");
    let dense = candle_core::safetensors::load(&path, &Device::Cpu)
        .with_context(|| format!("reading {}", path.display()))?;
    let format = QuantFormat::affine(BITS, GROUP_SIZE)?;
    let mut tensors = HashMap::new();
    for (name, tensor) in dense {
        match name.strip_suffix(".weight") {
            Some(layer) if tensor.rank() == 2 => {
                let quantized =
                    QuantTensor::quantize(&tensor, format).with_context(|| format!("quantizing {name}"))?;
                tensors.insert(name.clone(), quantized.packed().clone());
                tensors.insert(format!("{layer}.scales"), quantized.scales().clone());
                if let Some(biases) = quantized.biases() {
                    tensors.insert(format!("{layer}.biases"), biases.clone());
                }
            }
            _ => {
                tensors.insert(name, tensor);
            }
        }
    }
    std::fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    save_tensors(&tensors, "mlx", to)?;

    let mut config: Value = serde_json::from_slice(&read(&from.join("config.json"))?)?;
    for key in ["quantization", "quantization_config"] {
        config[key] = json!({ "group_size": GROUP_SIZE, "bits": BITS, "mode": "affine" });
    }
    write_json(&to.join("config.json"), &config)?;
    for name in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let path = to.join(name);
        std::fs::write(&path, read(&from.join(name))?)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("reading {}", path.display()))
}
