//! Dense stacks of experts whose numbers are in another order than models ask for.

use crate::checkpoint::weight::{DenseTensor, Dequantize, Slice, Weight};
use crate::Result;
use candle_core::{Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// A dense stack in another order.
#[derive(Clone, Debug)]
pub(super) struct Arranged {
    pub stored: DenseTensor,
    pub how: Order,
}

/// How the stored numbers lie.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    /// `[E, K, N]`, read as `[E, N, K]`.
    Transposed,
    /// Rows of two projections in turn along dimension 1: those of the first, or of the second.
    EverySecond { is_second: bool },
}

impl Arranged {
    /// The weight of this name.
    pub fn into_weight(self, name: &str) -> Weight {
        let mut dims = self.stored.dims().to_vec();
        match (self.how, dims.as_mut_slice()) {
            (Order::Transposed, [_, k, n]) => std::mem::swap(k, n),
            (Order::EverySecond { .. }, [_, rows, ..]) => *rows /= 2,
            _ => {}
        }
        Weight::Dense(DenseTensor::dequantized(name, self.stored.dtype(), dims, self))
    }
}

impl Dequantize for Arranged {
    fn size_in_bytes(&self) -> usize {
        Weight::Dense(self.stored.clone()).size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let stored = self.stored.load(self.stored.dtype(), device)?;
        Ok(match self.how {
            Order::Transposed => stored.transpose(1, 2)?.contiguous()?,
            Order::EverySecond { is_second } => {
                let (rows, rest) = (stored.dim(1)? / 2, stored.dims().get(2..).unwrap_or_default());
                let pairs = stored.reshape([&[stored.dim(0)?, rows, 2], rest].concat())?;
                pairs.narrow(2, usize::from(is_second), 1)?.squeeze(2)?.contiguous()?
            }
        })
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        let Range { start, end } = slice.range;
        let (dim, range) = match (self.how, slice.dim) {
            (Order::Transposed, 1) => (2, start..end),
            (Order::Transposed, 2) => (1, start..end),
            // With those of the other projection between them.
            (Order::EverySecond { .. }, 1) => (1, 2 * start..2 * end),
            (_, dim) => (dim, start..end),
        };
        match Weight::Dense(self.stored.clone()).narrow(dim, range)? {
            Weight::Dense(stored) => Ok(Some(Arc::new(Self { stored, ..*self }))),
            Weight::Packed(_) | Weight::Irregular(_) | Weight::Ggml(_) => Ok(None),
        }
    }
}
