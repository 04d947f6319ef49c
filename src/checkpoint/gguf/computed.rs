//! Numbers that the converter computes of those that models have.

use crate::checkpoint::weight::{DenseTensor, Dequantize, Slice, Weight};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// What the file has of a number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Computed {
    /// One more.
    Sum,
    /// Minus its exponential.
    Rate,
}

/// The numbers of a model, of what the file has of them.
#[derive(Clone, Debug)]
struct Inverse {
    stored: DenseTensor,
    computed: Computed,
}

impl Computed {
    /// The tensor of this name.
    pub fn inverse(self, name: &str, stored: DenseTensor) -> DenseTensor {
        let (dtype, dims) = (stored.dtype(), stored.dims().to_vec());
        DenseTensor::dequantized(name, dtype, dims, Inverse { stored, computed: self })
    }
}

impl Dequantize for Inverse {
    fn size_in_bytes(&self) -> usize {
        self.stored.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let mut numbers = self.stored.load(DType::F64, &Device::Cpu)?.flatten_all()?.to_vec1::<f64>()?;
        for number in &mut numbers {
            *number = match self.computed {
                Computed::Sum => *number - 1.,
                Computed::Rate if *number < 0. => (-*number).ln(),
                Computed::Rate => {
                    let what = format!("`{}`", self.stored.name());
                    return Err(Error::mismatch(what, "rates below zero", number.to_string()));
                }
            };
        }
        Ok(Tensor::from_vec(numbers, self.stored.dims(), &Device::Cpu)?
            .to_dtype(self.stored.dtype())?
            .to_device(device)?)
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        match Weight::Dense(self.stored.clone()).narrow(slice.dim, slice.range.clone())? {
            Weight::Dense(stored) => Ok(Some(Arc::new(Self { stored, ..*self }))),
            Weight::Packed(_) | Weight::Irregular(_) | Weight::Ggml(_) => Ok(None),
        }
    }
}
