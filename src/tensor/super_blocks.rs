//! The upper level of scales of formats that have two.

use crate::format::{Scale, SUPER_BLOCK};
use crate::{Error, QuantFormat, Result};
use candle_core::{DType, Tensor};

/// What the scales and biases of groups count: for each super-block of 256 elements an F16 number for its scales, and one
/// for its biases if it has any. Both are `[.., N, K / 256]`.
#[derive(Clone, Debug)]
pub struct SuperBlocks {
    /// A scale is so many of these as its byte says.
    pub scales: Tensor,
    /// The same for biases; none where the format has none.
    pub biases: Option<Tensor>,
}

impl SuperBlocks {
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.scales).chain(&self.biases)
    }

    pub(super) fn map(
        &self,
        change: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Self> {
        Ok(Self { scales: change(&self.scales)?, biases: self.biases.as_ref().map(change).transpose()? })
    }

    /// Those of weights of one format, joined as the weights are; `None` if these have none.
    pub(super) fn join<'a>(
        parts: impl Iterator<Item = Option<&'a Self>>,
        join: impl Fn(&[&Tensor]) -> candle_core::Result<Tensor>,
    ) -> Result<Option<Self>> {
        let parts: Vec<_> = parts.flatten().collect();
        if parts.is_empty() {
            return Ok(None);
        }
        let scales: Vec<_> = parts.iter().map(|part| &part.scales).collect();
        let biases: Vec<_> = parts.iter().filter_map(|part| part.biases.as_ref()).collect();
        let biases = if biases.is_empty() { None } else { Some(join(&biases)?) };
        Ok(Some(Self { scales: join(&scales)?, biases }))
    }
}

/// Checks that there are super-blocks if the format has them, for rows of `k` elements beside codes of shape `packed`.
pub(super) fn check(
    format: QuantFormat,
    super_blocks: Option<&SuperBlocks>,
    packed: &[usize],
    k: usize,
) -> Result<()> {
    let has_them = format.scale() == Scale::SuperBlock;
    let found = match (has_them, super_blocks) {
        (false, None) => return Ok(()),
        (true, None) => "none",
        (false, Some(_)) => "some",
        (true, Some(of)) if of.biases.is_some() != format.has_biases() => {
            if of.biases.is_some() {
                "some with biases"
            } else {
                "some without biases"
            }
        }
        (true, Some(of)) => {
            let rows = packed.split_last().map_or(&[][..], |(_, rows)| rows);
            let dims = [rows, &[k / SUPER_BLOCK]].concat();
            let wrong = of.tensors().find(|tensor| tensor.dtype() != DType::F16 || tensor.dims() != dims);
            return wrong.map_or(Ok(()), |tensor| {
                let found = format!("{:?} {:?}", tensor.dtype(), tensor.dims());
                Err(Error::mismatch(
                    format!("super-blocks of a {format} weight"),
                    format!("F16 {dims:?}"),
                    found,
                ))
            });
        }
    };
    let expected = match (has_them, format.has_biases()) {
        (false, _) => "none",
        (true, false) => "scales of super-blocks, without biases (QuantTensor::with_super_blocks)",
        (true, true) => "scales and biases of super-blocks (QuantTensor::with_super_blocks)",
    };
    Err(Error::mismatch(format!("super-blocks of a {format} weight"), expected, found))
}
