//! A quantized checkpoint as candle_nn sees any other one: tensors by name.

use super::loaded::{Loaded, LoadedAs};
use crate::checkpoint::{module_of, Checkpoint, Weight};
use crate::Error;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;
use candle_quant_packed::takes_packed;

/// Lets an unmodified candle model load a quantized checkpoint, each weight dequantized when asked for.
/// Names that the checkpoint lacks are looked up as [`Checkpoint::weight`] does.
///
/// Layers that know of packed weights ([`load_packed`](candle_quant_packed::load_packed)) get them packed.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_quant::{Checkpoint, DequantizingBackend};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backend = DequantizingBackend::new(&Checkpoint::open("assets/tiny")?);
/// let vb = candle_nn::VarBuilder::from_backend(Box::new(backend), DType::F32, Device::Cpu);
/// let weight = vb.pp("model.layers.0.mlp.up_proj").get((512, 256), "weight")?; // 4-bit in the file
/// assert_eq!(weight.dtype(), DType::F32);
/// # Ok(())
/// # }
/// ```
///
/// Initialization hints are ignored: a tensor that the checkpoint lacks is an error.
#[derive(Clone, Debug)]
pub struct DequantizingBackend {
    checkpoint: Checkpoint,
    loaded: Loaded,
}

impl DequantizingBackend {
    /// A backend on an open checkpoint.
    pub fn new(checkpoint: &Checkpoint) -> Self {
        Self { checkpoint: checkpoint.clone(), loaded: Loaded::default() }
    }

    /// Where it is written down in which form weights were loaded.
    pub(super) fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// The tensor called `name`, dequantized if it is the packed weight of a module. The expected shape
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
        let form = match (&weight, weight.dims()) {
            (Weight::Dense(_), _) => LoadedAs::Dense,
            (_, [_, _]) if takes_packed() => LoadedAs::Packed,
            _ => LoadedAs::Dequantized,
        };
        self.loaded.add(module, form);
        match (form, weight.dims()) {
            (LoadedAs::Packed, [rows, _]) => {
                weight.load(device)?.into_tensor(dtype, self.checkpoint.is_only_vocabulary(module, *rows))
            }
            _ => Ok(weight.to_dense(dtype, device)?),
        }
    }
}

impl SimpleBackend for DequantizingBackend {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.load(name, Some(shape.dims()), dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.load(name, None, dtype, device)
    }

    /// A model that asks about a weight chooses among layouts, or between a head of its own and the embedding: what
    /// is stored is the best choice. One that asks about a bias computes without it if there is none: a bias that is
    /// stored under another name counts.
    fn contains_tensor(&self, name: &str) -> bool {
        match name.ends_with(".bias") {
            true => self.checkpoint.provides(name),
            false => self.checkpoint.contains(name),
        }
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
        file: checkpoint.file_of(tensor).into(),
        tensor: tensor.to_string(),
        expected: format!("shape {expected:?}"),
        found: format!("shape {found:?}"),
        remedy: "check that config.json belongs to these weights".to_string(),
    }
    .into()
}
