//! The tensors of a file by module, and what they have to be.

use super::StoredLora;
use crate::checkpoint::file::Tensors;
use crate::checkpoint::DenseTensor;
use crate::{Error, Result};
use candle_core::DType;
use std::collections::BTreeMap;
use std::path::Path;

/// What a tensor is to its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    A,
    B,
    Magnitude,
}

/// The tensors of one module.
#[derive(Default)]
pub(super) struct Parts {
    a: Option<DenseTensor>,
    b: Option<DenseTensor>,
    magnitude: Option<DenseTensor>,
}

/// What the config says of one module.
pub(super) struct Stated {
    pub rank: usize,
    pub scale: f64,
    pub is_dora: bool,
}

const REMEDY: &str = "write the adapter again with the tool that trained it";

/// All tensors of a file by module. `name` tells module and role.
pub(super) fn by_module(
    file: &Path,
    tensors: &Tensors,
    expected: &str,
    name: impl Fn(&str) -> Option<(&str, Role)>,
) -> Result<BTreeMap<String, Parts>> {
    let mut modules = BTreeMap::<String, Parts>::new();
    for (full, tensor) in tensors.iter() {
        let wrong = |expected: &str, found: String| Error::tensor(file, full, expected, found, REMEDY);
        let Some((module, role)) = name(full) else {
            return Err(wrong(expected, "another name".into()));
        };
        let dense = DenseTensor::new(full, tensor)?;
        if !matches!(dense.dtype(), DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
            return Err(wrong("F16, BF16 or F32", format!("{:?}", dense.dtype())));
        }
        let parts = modules.entry(module.to_owned()).or_default();
        let part = match role {
            Role::A => &mut parts.a,
            Role::B => &mut parts.b,
            Role::Magnitude => &mut parts.magnitude,
        };
        if let Some(other) = part.replace(dense) {
            return Err(wrong("one tensor of its kind for a module", format!("`{}`, too", other.name())));
        }
    }
    Ok(modules)
}

impl Parts {
    /// The adapter of a module. A `[rank, K]` and B `[N, rank]` are `transposed` or not; of stacks they never are.
    pub fn complete(
        self,
        file: &Path,
        module: &str,
        stated: &Stated,
        transposed: bool,
    ) -> Result<StoredLora> {
        let missing = |expected: &str, found: &str| Error::tensor(file, module, expected, found, REMEDY);
        let (a, b) = match (self.a, self.b) {
            (Some(a), Some(b)) => (a, b),
            (Some(_), None) => return Err(missing("both A and B", "A alone")),
            (None, Some(_)) => return Err(missing("both A and B", "B alone")),
            (None, None) => return Err(missing("both A and B", "a magnitude alone")),
        };
        let wrong = |tensor: &DenseTensor, expected: String| {
            Error::tensor(file, tensor.name(), expected, format!("shape {:?}", tensor.dims()), REMEDY)
        };
        let rank = stated.rank;
        let (dims, transposed) = match (a.dims(), b.dims(), transposed) {
            (&[of_a, k], &[n, of_b], false) | (&[k, of_a], &[of_b, n], true) => {
                if of_a != rank {
                    return Err(wrong(&a, format!("rank {rank}, as adapter_config.json says")));
                }
                if of_b != rank {
                    return Err(wrong(&b, format!("rank {rank}, as that of A")));
                }
                (vec![n, k], transposed)
            }
            (&[experts, of_a, k], &[experts_of_b, n, of_b], _) => {
                if of_a != rank {
                    return Err(wrong(&a, format!("rank {rank}, as adapter_config.json says")));
                }
                if of_b != rank || experts_of_b != experts {
                    return Err(wrong(&b, format!("[{experts}, N, {rank}], as A has it")));
                }
                (vec![experts, n, k], false)
            }
            ([_, _] | [_, _, _], ..) => return Err(wrong(&b, "as many dimensions as A has".into())),
            _ => return Err(wrong(&a, "2 dimensions, or 3 of a stack of experts".into())),
        };
        if dims.contains(&0) {
            return Err(wrong(&a, "sizes of 1 and more".into()));
        }
        match (&self.magnitude, stated.is_dora) {
            (None, false) => {}
            (Some(magnitude), true) if Some(magnitude.dims()) == dims.get(..1) && dims.len() == 2 => {}
            (Some(magnitude), true) => {
                let n = dims.iter().rev().nth(1).copied().unwrap_or_default();
                return Err(wrong(magnitude, format!("[{n}], the rows of a weight, and no experts")));
            }
            (None, true) => {
                return Err(missing("magnitudes, as adapter_config.json says that it is DoRA", "none"));
            }
            (Some(magnitude), false) => {
                return Err(wrong(
                    magnitude,
                    "no magnitudes: adapter_config.json says that it is not DoRA".into(),
                ));
            }
        }
        Ok(StoredLora { a, b, magnitude: self.magnitude, scale: stated.scale, rank, dims, transposed })
    }
}
