//! The tensors of a checkpoint as mlx-lm holds them, for whoever compares checkpoints of different layouts.

use super::arranged::Arranged;
use super::experts::{group, TensorGroup};
use crate::chunks::Chunks;
use crate::convert::output::{SourcePart, SourceTensor};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::{Error, Result};

/// Tensors that are the same numbers: those of a checkpoint, and what they are in mlx-lm's layout.
pub(crate) struct Rearranged {
    /// What they are called in the checkpoint, and how many numbers they have.
    pub stored: Vec<(String, u64)>,
    pub usual: Vec<UsualTensor>,
}

/// A tensor in mlx-lm's layout.
#[derive(Debug)]
pub(crate) struct UsualTensor(SourceTensor);

/// Brings tensors of a checkpoint into mlx-lm's layout, packed or not.
pub(crate) fn rearranged(source: &Checkpoint, tensors: Vec<(String, Weight)>) -> Result<Vec<Rearranged>> {
    let groups = group(tensors, &Arranged::for_comparison(source))?;
    Ok(groups.into_iter().map(Rearranged::from).collect())
}

impl From<TensorGroup> for Rearranged {
    fn from(group: TensorGroup) -> Self {
        let stored = if group.plain.is_empty() { &group.packed } else { &group.plain };
        let named = |tensor: &SourceTensor| (tensor.name.clone(), elements(&tensor.dims));
        let stored = stored.iter().map(named).collect();
        Self { stored, usual: group.packed.into_iter().map(UsualTensor).collect() }
    }
}

impl UsualTensor {
    /// Its name, where the text of a larger model is as a model of text alone has it.
    pub(crate) fn name(&self) -> String {
        let name = &self.0.name;
        for (root, usual) in [("language_model.", ""), ("model.language_model.", "model.")] {
            if let Some(rest) = name.strip_prefix(root) {
                return format!("{usual}{rest}");
            }
        }
        name.clone()
    }

    pub(crate) fn dims(&self) -> &[usize] {
        &self.0.dims
    }

    /// What it is in the checkpoint: `BF16`, `affine 4-bit g64`.
    pub(crate) fn format_name(&self) -> String {
        self.0.parts.first().map(SourcePart::format_name).unwrap_or_default()
    }

    /// How many matrices are read one after another.
    pub(crate) fn matrices(&self) -> usize {
        match self.0.dims.as_slice() {
            [matrices, _, _] => *matrices,
            _ => 1,
        }
    }

    /// The numbers of one of its matrices.
    pub(crate) fn matrix(&self, index: usize) -> Result<Chunks> {
        match (self.0.parts.as_slice(), self.matrices()) {
            ([part], 1) => part.load(),
            // Rows one after another.
            (parts, 1) => Chunks::joined(&parts.iter().map(SourcePart::load).collect::<Result<Vec<_>>>()?),
            ([SourcePart::Stored(dense)], _) => {
                let weight = Weight::Dense(dense.clone()).narrow(0, index..index + 1)?;
                SourcePart::Encoded(weight).load()
            }
            ([SourcePart::Encoded(weight)], _) => {
                SourcePart::Encoded(weight.narrow(0, index..index + 1)?).load()
            }
            (parts, matrices) if parts.len() == matrices => match parts.get(index) {
                Some(part) => part.load(),
                None => Err(self.impossible(index)),
            },
            _ => Err(self.impossible(index)),
        }
    }

    fn impossible(&self, index: usize) -> Error {
        let what = format!("matrix {index} of `{}`", self.0.name);
        Error::mismatch(what, "a part for each matrix", format!("{} parts", self.0.parts.len()))
    }
}

/// How many numbers a tensor of this shape has.
pub(crate) fn elements(dims: &[usize]) -> u64 {
    dims.iter().fold(1, |elements: u64, dim| elements.saturating_mul(*dim as u64))
}
