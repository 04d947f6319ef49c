//! The layout of this crate in a file: codes, scales and what else there is, each a tensor of its own.

use super::dense::DenseTensor;
use super::layout::Layout;
use super::mlx_form::MlxForm;
use super::names::tensor_of;
use super::slice::Slice;
use crate::checkpoint::file::{candle_dtype, StoredTensor};
use crate::format::{global_scale_from_absmax, ZeroPoint};
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use std::sync::Arc;

/// The layout of this crate, which is MLX's: codes, scales and what else there is, each a tensor of its own.
///
/// Of the codes only the bytes count: containers call them U32, I32, U8 or F8_E4M3, and shape them as they like.
/// The same holds for scales that are bytes.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct Parts {
    /// The module, for errors.
    pub module: String,
    pub format: QuantFormat,
    /// Logical shape `[.., N, K]`.
    pub dims: Vec<usize>,
    pub codes: StoredTensor,
    pub scales: StoredTensor,
    pub biases: Option<StoredTensor>,
    pub global_scale: Option<GlobalScale>,
}

/// A global scale, one value or one for each expert, and what its numbers mean.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct GlobalScale {
    /// The tensor's name within the module, for errors.
    pub name: &'static str,
    pub tensor: StoredTensor,
    pub meaning: GlobalScaleMeaning,
}

/// What the number in the file is to the multiplier of all scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum GlobalScaleMeaning {
    /// The largest magnitude of the tensor (MLX).
    Absmax,
    /// The multiplier itself (ModelOpt, Ollama).
    Multiplier,
    /// Its reciprocal (compressed-tensors).
    Reciprocal,
}

impl Parts {
    /// Scales and biases.
    fn of_groups(&self, device: &Device) -> Result<(Tensor, Option<Tensor>)> {
        let (_, groups) = self.format.part_dims(&self.dims)?;
        let of_groups = |part: &StoredTensor| Ok::<_, Error>(part.load(device)?.reshape(groups.as_slice())?);
        Ok((of_groups(&self.scales)?, self.biases.as_ref().map(of_groups).transpose()?))
    }

    /// The tensors by their names in a module of an MLX checkpoint, with MLX's dtypes and shapes; `None` if they are
    /// parts of stored tensors.
    fn of_mlx(&self) -> Result<Option<Vec<(&'static str, DenseTensor)>>> {
        if !(self.codes.is_whole() && self.scales.is_whole()) {
            return Ok(None);
        }
        let (words, groups) = self.format.part_dims(&self.dims)?;
        let of_groups = |part: &StoredTensor| {
            let dtype = if self.format.scale().is_byte() { Dtype::U8 } else { part.dtype() };
            part.as_numbers(dtype, &groups)
        };
        let parts = [
            ("weight", Some(self.codes.as_numbers(Dtype::U32, &words))),
            ("scales", Some(of_groups(&self.scales))),
            ("biases", self.biases.as_ref().map(of_groups)),
            ("global_scale", self.global_scale.as_ref().map(|scale| Some(scale.tensor.clone()))),
        ];
        let present = parts.into_iter().filter_map(|(name, part)| Some((name, part?)));
        let Some(parts) = present.map(|(name, part)| Some((name, part?))).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let dense = |(name, part)| Ok((name, DenseTensor::new(&tensor_of(&self.module, name), &part)?));
        parts.into_iter().map(dense).collect::<Result<_>>().map(Some)
    }
}

impl Layout for Parts {
    fn mlx_form(&self) -> Result<MlxForm> {
        if let (ZeroPoint::Midpoint, Some(bits)) = (self.format.zero_point(), self.format.element().uint()) {
            return MlxForm::of_symmetric(&self.scales, bits);
        }
        if self.global_scale.as_ref().is_some_and(|scale| scale.meaning != GlobalScaleMeaning::Absmax) {
            return Ok(MlxForm::Multiplied);
        }
        if let Some(parts) = self.of_mlx()? {
            return Ok(MlxForm::Stored(parts));
        }
        let dtype = match self.format.scale().is_byte() {
            true => Some(DType::U8),
            false => candle_dtype(self.scales.dtype()),
        };
        Ok(dtype.map_or(MlxForm::ROUNDED, MlxForm::Rearranged))
    }

    fn size_in_bytes(&self) -> usize {
        let optional = [self.biases.as_ref(), self.global_scale.as_ref().map(|scale| &scale.tensor)];
        let all = [Some(&self.codes), Some(&self.scales)].into_iter().chain(optional).flatten();
        all.map(StoredTensor::size_in_bytes).sum()
    }

    fn group_values(&self) -> Result<(Tensor, Option<Tensor>)> {
        self.of_groups(&Device::Cpu)
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let (words, _) = self.format.part_dims(&self.dims)?;
        let codes = Tensor::from_vec(self.codes.read::<u32>()?, words, device)?;
        let (scales, biases) = self.of_groups(device)?;
        let global_scale = self.global_scale.as_ref().map(|scale| scale.load(&self.module, device));
        QuantTensor::new(self.format, codes, scales, biases, global_scale.transpose()?)
    }

    fn granularity(&self) -> usize {
        self.format.group_size()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let group_size = self.format.group_size();
        let of_groups = |part: &StoredTensor| slice.of(part, group_size, part.dtype().bitsize() / 8);
        Ok(Arc::new(Self {
            dims: slice.part_dims(),
            codes: slice.of(&self.codes, group_size, group_size * self.format.bits() / 8)?,
            scales: of_groups(&self.scales)?,
            biases: self.biases.as_ref().map(of_groups).transpose()?,
            global_scale: self.global_scale.as_ref().map(|scale| scale.narrow(slice)).transpose()?,
            ..self.clone()
        }))
    }
}

impl GlobalScale {
    /// That of a part: one value serves every part, one for each matrix is cut with the stack.
    pub(in crate::checkpoint) fn narrow(&self, slice: &Slice) -> Result<Self> {
        let values = self.tensor.size_in_bytes() / size_of::<f32>();
        match slice.dims {
            [experts, _, _] if slice.dim == 0 && values == *experts => {
                let sizes = [values * size_of::<f32>()];
                let bytes = slice.range.start * size_of::<f32>()..slice.range.end * size_of::<f32>();
                Ok(Self { tensor: self.tensor.narrow(&sizes, 0, &bytes)?, ..self.clone() })
            }
            _ => Ok(self.clone()),
        }
    }

    /// The multipliers, F32 `[1]` or `[E]`.
    pub(in crate::checkpoint) fn load(&self, module: &str, device: &Device) -> Result<Tensor> {
        let mut values = self.tensor.read::<f32>()?;
        for value in &mut values {
            let multiplier = match self.meaning {
                GlobalScaleMeaning::Absmax => global_scale_from_absmax(*value),
                GlobalScaleMeaning::Multiplier => *value,
                GlobalScaleMeaning::Reciprocal => value.recip(),
            };
            if !multiplier.is_finite() || multiplier < 0.0 {
                return Err(Error::tensor(
                    self.tensor.path(),
                    tensor_of(module, self.name),
                    "a finite magnitude, zero or above",
                    value.to_string(),
                    "fetch or convert the file again",
                ));
            }
            *value = multiplier;
        }
        let count = values.len();
        Ok(Tensor::from_vec(values, count, device)?)
    }
}
