//! A quantized checkpoint as candle_nn sees any other one: dense tensors by name.

use crate::checkpoint::{module_of, Checkpoint};
use crate::Error;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;

/// Lets an unmodified candle model load a quantized checkpoint, each weight decoded when asked for.
///
/// ```no_run
/// use candle_core::{DType, Device};
/// use candle_quant::{Checkpoint, DequantizingBackend};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backend = DequantizingBackend::new(&Checkpoint::open("Qwen3-0.6B-4bit")?);
/// let vb = candle_nn::VarBuilder::from_backend(Box::new(backend), DType::F32, Device::Cpu);
/// let weight = vb.pp("model.layers.0.mlp.up_proj").get((3072, 1024), "weight")?;
/// # Ok(())
/// # }
/// ```
///
/// Initialization hints are ignored: a tensor that the checkpoint lacks is an error.
#[derive(Clone, Debug)]
pub struct DequantizingBackend {
    checkpoint: Checkpoint,
}

impl DequantizingBackend {
    /// A backend on an open checkpoint.
    pub fn new(checkpoint: &Checkpoint) -> Self {
        Self { checkpoint: checkpoint.clone() }
    }

    /// The tensor called `name`, decoded if it is the packed weight of a module. The expected shape
    /// supplies the K that tells, say, 4 bits in groups of 32 from 2 bits in groups of 64.
    fn load(&self, name: &str, shape: Option<&[usize]>, dtype: DType, device: &Device) -> Result<Tensor> {
        let check = |dims: &[usize]| match shape {
            Some(expected) if expected != dims => Err(shape_error(&self.checkpoint, name, expected, dims)),
            _ => Ok(()),
        };
        let Some(module) = module_of(name) else {
            let tensor = self.checkpoint.dense(name)?;
            check(tensor.dims())?;
            return Ok(tensor.load(dtype, device)?);
        };
        let in_features = match shape {
            Some([.., _, k]) => Some(*k),
            _ => None,
        };
        let weight = self.checkpoint.weight(module, in_features)?;
        check(weight.dims())?;
        Ok(weight.decode(dtype, device)?)
    }
}

impl SimpleBackend for DequantizingBackend {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.load(name, Some(shape.dims()), dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.load(name, None, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.checkpoint.contains(name)
    }
}

/// The model asks for one shape and the checkpoint holds another.
pub(super) fn shape_error(
    checkpoint: &Checkpoint,
    tensor: &str,
    expected: &[usize],
    found: &[usize],
) -> candle_core::Error {
    Error::Tensor {
        file: checkpoint.path().into(),
        tensor: tensor.to_string(),
        expected: format!("shape {expected:?}"),
        found: format!("shape {found:?}"),
        remedy: "check that config.json belongs to these weights".to_string(),
    }
    .into()
}
