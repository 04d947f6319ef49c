//! The layout of this crate in a file: codes, scales and what else there is, each a tensor of its own.

use super::layout::Layout;
use super::names::tensor_of;
use super::slice::Slice;
use crate::checkpoint::file::StoredTensor;
use crate::format::global_scale_from_absmax;
use crate::format::Scale;
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{Device, Tensor};
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

impl Layout for Parts {
    fn has_multiplier(&self) -> bool {
        self.global_scale.as_ref().is_some_and(|scale| scale.meaning != GlobalScaleMeaning::Absmax)
    }

    fn affine_scales(&self) -> Result<Option<Dtype>> {
        match self.biases.is_none() && self.format.scale() == Scale::Float {
            true => exact_biases(&self.scales, self.format.bits()),
            false => Ok(None),
        }
    }

    fn as_mlx(&self) -> Result<Option<Vec<(&'static str, StoredTensor)>>> {
        if self.biases.is_none() && self.format.scale() == Scale::Float {
            return Ok(None); // symmetric codes
        }
        if !(self.codes.is_whole() && self.scales.is_whole()) {
            return Ok(None);
        }
        let rows_of = |last: usize| {
            let rows = self.dims.len().saturating_sub(1);
            [self.dims.get(..rows).unwrap_or_default(), &[last]].concat()
        };
        let k = self.dims.last().copied().unwrap_or(0);
        let groups = rows_of(self.format.groups_per_row(k)?);
        let scale_dtype = |part: &StoredTensor| match self.format.scale() {
            Scale::Float => part.dtype(),
            Scale::E8m0 | Scale::E4m3 => Dtype::U8,
        };
        let of_groups = |part: &StoredTensor| part.as_numbers(scale_dtype(part), &groups);
        let mut parts = vec![
            ("weight", self.codes.as_numbers(Dtype::U32, &rows_of(self.format.words_per_row(k)?))),
            ("scales", of_groups(&self.scales)),
        ];
        if let Some(biases) = &self.biases {
            parts.push(("biases", of_groups(biases)));
        }
        if let Some(scale) = &self.global_scale {
            let means_the_same = scale.meaning == GlobalScaleMeaning::Absmax;
            parts.push(("global_scale", means_the_same.then(|| scale.tensor.clone())));
        }
        Ok(parts.into_iter().map(|(name, part)| Some((name, part?))).collect())
    }

    fn size_in_bytes(&self) -> usize {
        let optional = [self.biases.as_ref(), self.global_scale.as_ref().map(|scale| &scale.tensor)];
        let all = [Some(&self.codes), Some(&self.scales)].into_iter().chain(optional).flatten();
        all.map(StoredTensor::size_in_bytes).sum()
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let k = self.dims.last().copied().unwrap_or(0);
        let rows_of = |last: usize| {
            let mut dims = self.dims.clone();
            dims.pop();
            dims.push(last);
            dims
        };
        let words = rows_of(self.format.words_per_row(k)?);
        let groups = rows_of(self.format.groups_per_row(k)?);
        let codes = Tensor::from_vec(self.codes.read::<u32>()?, words, device)?;
        let load_groups = |part: &StoredTensor| match self.format.scale() {
            Scale::Float => Ok::<_, Error>(part.load(device)?.reshape(groups.as_slice())?),
            Scale::E8m0 | Scale::E4m3 => Ok(Tensor::from_vec(part.read::<u8>()?, groups.as_slice(), device)?),
        };
        let (scales, biases) =
            (load_groups(&self.scales)?, self.biases.as_ref().map(load_groups).transpose()?);
        let global_scale = self.global_scale.as_ref().map(|scale| scale.load(&self.module, device));
        QuantTensor::new(self.format, codes, scales, biases, global_scale.transpose()?)
    }

    fn unit(&self) -> usize {
        self.format.group_size()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let group_size = self.format.group_size();
        let of_groups = |part: &StoredTensor| {
            let bytes = match self.format.scale() {
                Scale::Float => part.dtype().bitsize() / 8,
                Scale::E8m0 | Scale::E4m3 => 1,
            };
            slice.of(part, group_size, bytes)
        };
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

/// The dtype of the scales of symmetric codes of `bits` bits, if products of them and codes are exact: then biases are
/// too, and `q * scale + bias` is `(q - zero) * scale`. Those of 16-bit scales are, and those of F32 ones that have as
/// many bits to spare.
pub(in crate::checkpoint) fn exact_biases(scales: &StoredTensor, bits: usize) -> Result<Option<Dtype>> {
    let codes = 1u32 << bits.min(8);
    let is_exact = |bytes: &[u8; 4]| {
        let scale = f32::from_le_bytes(*bytes);
        scale.to_bits().is_multiple_of(codes) && (scale * codes as f32).is_finite()
    };
    let mut all = match scales.dtype() {
        Dtype::F16 | Dtype::BF16 => return Ok(Some(scales.dtype())),
        Dtype::F32 => true,
        _ => return Ok(None),
    };
    scales.for_each_chunk(size_of::<f32>(), |chunk| all = all && chunk.as_chunks().0.iter().all(is_exact))?;
    Ok(all.then_some(Dtype::F32))
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
