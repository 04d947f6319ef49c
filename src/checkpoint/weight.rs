//! Weights of a checkpoint that are still in their file.

use super::mapped::{candle_dtype, StoredTensor};
use super::tensor_of;
use crate::{format::decode, Error, QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};

/// The weight of a module, as the checkpoint holds it.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Quantized: packed words, scales and what else the format has.
    Packed(PackedWeight),
    /// Plain numbers.
    Dense(DenseTensor),
}

/// A quantized weight, checked but not read. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    pub(super) name: String,
    pub(super) format: QuantFormat,
    pub(super) dims: Vec<usize>,
    pub(super) weight: StoredTensor,
    pub(super) scales: StoredTensor,
    pub(super) biases: Option<StoredTensor>,
    pub(super) global_scale: Option<StoredTensor>,
}

impl PackedWeight {
    /// The module path, for example `model.layers.0.mlp.down_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the weight is quantized.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// The logical shape `[.., N, K]`: leading dimensions (experts), out features, in features.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Bytes of all its tensors in the file.
    pub fn size_in_bytes(&self) -> usize {
        let optional = [&self.biases, &self.global_scale].into_iter().flatten();
        [&self.weight, &self.scales].into_iter().chain(optional).map(StoredTensor::size_in_bytes).sum()
    }

    /// Copies the packed bytes to `device`. Nothing is decoded.
    ///
    /// # Errors
    /// If a global scale is negative or not finite, or the device refuses the memory.
    pub fn load(&self, device: &Device) -> Result<QuantTensor> {
        let load = |tensor: &StoredTensor| tensor.load(device);
        QuantTensor::new(
            self.format,
            load(&self.weight)?,
            load(&self.scales)?,
            self.biases.as_ref().map(load).transpose()?,
            self.load_global_scale(device)?,
        )
    }

    /// The global scale as a multiplier. MLX stores the largest magnitude of the tensor instead.
    fn load_global_scale(&self, device: &Device) -> Result<Option<Tensor>> {
        let Some(tensor) = &self.global_scale else {
            return Ok(None);
        };
        let mut values = tensor.read::<f32>()?;
        for value in &mut values {
            if !value.is_finite() || *value < 0.0 {
                return Err(Error::Tensor {
                    file: tensor.path().into(),
                    tensor: tensor_of(&self.name, "global_scale"),
                    expected: "a finite magnitude, zero or above".into(),
                    found: value.to_string(),
                    remedy: "fetch or convert the file again".into(),
                });
            }
            *value = decode::global_scale_from_absmax(*value);
        }
        Ok(Some(Tensor::from_vec(values, tensor.dims(), device)?))
    }
}

/// A tensor of plain numbers, not read yet. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct DenseTensor {
    name: String,
    dtype: DType,
    tensor: StoredTensor,
}

impl DenseTensor {
    pub(super) fn new(name: &str, tensor: &StoredTensor) -> Result<Self> {
        let dtype = candle_dtype(tensor.dtype()).ok_or_else(|| Error::Tensor {
            file: tensor.path().into(),
            tensor: name.to_owned(),
            expected: "a dtype that is loaded as numbers (F16, BF16, F32, F64, U8, U32, I16, I32, I64)"
                .into(),
            found: format!("{:?}", tensor.dtype()),
            remedy: "convert the tensor to F16, BF16 or F32".into(),
        })?;
        Ok(Self { name: name.to_owned(), dtype, tensor: tensor.clone() })
    }

    /// The tensor's full name, for example `model.norm.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The dtype in the file.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape.
    pub fn dims(&self) -> &[usize] {
        self.tensor.dims()
    }

    /// Bytes in the file.
    pub fn size_in_bytes(&self) -> usize {
        self.tensor.size_in_bytes()
    }

    /// Copies the tensor to `device` and converts it to `dtype` there.
    ///
    /// # Errors
    /// If the device refuses the memory or the conversion.
    pub fn load(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        Ok(self.tensor.load(device)?.to_dtype(dtype)?)
    }
}
