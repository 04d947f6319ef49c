//! Linear attention of GGUF files whose columns can't be put in the order of heads.

use candle_core::quantized::gguf_file::{write, Content};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::Device;
use std::fs::File;
use std::path::Path;

/// A GGUF file with the output projections of linear attention in Q8_0, whose blocks are two heads in these models.
pub fn with_blocks_of_two_heads(source: &Path, out: &Path) {
    let mut file = File::open(source).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut tensors = Vec::new();
    for name in content.tensor_infos.keys() {
        let mut tensor = content.tensor(&mut file, name, &Device::Cpu).unwrap();
        if name.ends_with("ssm_out.weight") {
            let numbers = tensor.dequantize(&Device::Cpu).unwrap();
            tensor = QTensor::quantize(&numbers, GgmlDType::Q8_0).unwrap();
        }
        tensors.push((name.as_str(), tensor));
    }
    let metadata: Vec<_> = content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    write(&mut File::create(out).unwrap(), &metadata, &tensors).unwrap();
}
