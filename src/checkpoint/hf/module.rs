//! The tensors of one quantized module, and the errors about them.

use crate::checkpoint::file::{StoredTensor, Tensors};
use crate::checkpoint::weight::{GlobalScale, GlobalScaleMeaning, PackedWeight, Parts, Weight};
use crate::format::Scale;
use crate::{Error, QuantFormat, Result};
use safetensors::Dtype;

pub(super) const REMEDY: &str = "the file contradicts itself or its config: fetch or convert it again";

/// One quantized module.
pub(super) struct Module<'a> {
    pub tensors: &'a Tensors,
    /// Its stored name, and what stands between that and the names of its tensors.
    pub path: &'a str,
    pub separator: &'static str,
}

/// Where the parts of a weight are whose bytes are those of this crate's layout.
pub(super) struct PartNames {
    pub codes: &'static str,
    pub scales: &'static str,
    pub global_scale: Option<(&'static str, GlobalScaleMeaning)>,
}

impl<'a> Module<'a> {
    /// The stored name of one of its tensors.
    pub(super) fn name(&self, part: &str) -> String {
        format!("{}{}{part}", self.path, self.separator)
    }

    pub(super) fn get(&self, part: &str) -> Option<&'a StoredTensor> {
        self.tensors.get(&self.name(part))
    }

    /// A tensor that there has to be, of one of these dtypes.
    pub(super) fn require(&self, part: &str, beside: &str, dtypes: &[Dtype]) -> Result<&'a StoredTensor> {
        let Some(tensor) = self.get(part) else {
            let file = self.tensors.get(&self.name(beside)).map(StoredTensor::path).unwrap_or("".as_ref());
            let expected = format!("this tensor beside `{}`", self.name(beside));
            return Err(Error::tensor(file, self.name(part), expected, "none", REMEDY));
        };
        if !dtypes.contains(&tensor.dtype()) {
            let names: Vec<_> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
            return Err(self.wrong(part, tensor, names.join(" or "), format!("{:?}", tensor.dtype())));
        }
        Ok(tensor)
    }

    /// A tensor that there must not be, since what it says can't be followed.
    pub(super) fn refuse(&self, part: &str, why: &str) -> Result<()> {
        match self.get(part) {
            None => Ok(()),
            Some(tensor) => Err(Error::tensor(
                tensor.path(),
                self.name(part),
                format!("no such tensor: {why}"),
                format!("{:?} {:?}", tensor.dtype(), tensor.dims()),
                "use another quantization of the model",
            )),
        }
    }

    /// All dimensions of a tensor but the last, and the last.
    pub(super) fn rows(&self, part: &str, tensor: &'a StoredTensor) -> Result<(&'a [usize], usize)> {
        match tensor.dims() {
            [rows @ .., last] if !rows.is_empty() && !rows.contains(&0) && *last > 0 => Ok((rows, *last)),
            dims => {
                let expected = "two or more dimensions, none of them zero";
                Err(self.wrong(part, tensor, expected, format!("{dims:?}")))
            }
        }
    }

    pub(super) fn check_dims(&self, part: &str, tensor: &StoredTensor, dims: &[usize]) -> Result<()> {
        if tensor.dims() == dims {
            return Ok(());
        }
        Err(self.wrong(part, tensor, format!("shape {dims:?}"), format!("{:?}", tensor.dims())))
    }

    /// An error about one of its tensors.
    pub(super) fn wrong(
        &self,
        part: &str,
        tensor: &StoredTensor,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Error {
        Error::tensor(tensor.path(), self.name(part), expected, found, REMEDY)
    }

    /// The weight whose codes and scales lie in this crate's order, codes stored as one of `code_dtypes`.
    pub(super) fn parts(
        &self,
        format: QuantFormat,
        names: &PartNames,
        code_dtypes: &[Dtype],
        scale_dtypes: &[Dtype],
    ) -> Result<Weight> {
        let codes = self.require(names.codes, names.codes, code_dtypes)?;
        let scales = self.require(names.scales, names.codes, scale_dtypes)?;
        let (rows, last) = self.rows(names.codes, codes)?;
        let k = last.saturating_mul(codes.dtype().bitsize()) / format.bits();
        let groups = format.groups_per_row(k).map_err(|_| {
            let expected = format!("rows of whole groups of {}", format.group_size());
            self.wrong(names.codes, codes, expected, format!("{k} codes in a row"))
        })?;
        let of_rows = |last: usize| [rows, &[last]].concat();
        self.check_dims(names.scales, scales, &of_rows(groups))?;
        let global_scale = match names.global_scale {
            None => None,
            Some((part, meaning)) => {
                let tensor = self.require(part, names.codes, &[Dtype::F32])?;
                let one_each = matches!(rows, [experts, _] if tensor.dims() == [*experts]);
                if !tensor.dims().is_empty() && tensor.dims() != [1] && !one_each {
                    let expected = "one value, or one for each expert";
                    return Err(self.wrong(part, tensor, expected, format!("shape {:?}", tensor.dims())));
                }
                Some(GlobalScale { name: part, tensor: tensor.clone(), meaning })
            }
        };
        let parts = Parts {
            module: self.path.to_owned(),
            format,
            dims: of_rows(k),
            codes: codes.clone(),
            scales: scales.clone(),
            biases: None,
            global_scale,
        };
        Ok(Weight::Packed(PackedWeight::new(self.path, format, of_rows(k), parts)))
    }
}

/// A weight of MXFP4 or MXFP8 in MLX's layout, under MLX's names.
pub(super) fn words(module: &Module, format: QuantFormat) -> Result<Weight> {
    let names = PartNames { codes: "weight", scales: "scales", global_scale: None };
    module.parts(format, &names, &[Dtype::U32], scale_dtypes(format.scale()))
}

/// Dtypes under which scales are stored.
pub(super) fn scale_dtypes(scale: Scale) -> &'static [Dtype] {
    match scale {
        Scale::Float => &[Dtype::F16, Dtype::BF16, Dtype::F32],
        Scale::E8m0 => &[Dtype::U8, Dtype::F8_E8M0],
        Scale::E4m3 => &[Dtype::F8_E4M3, Dtype::U8],
        // No file of Hugging Face has them.
        Scale::SuperBlock => &[],
    }
}
