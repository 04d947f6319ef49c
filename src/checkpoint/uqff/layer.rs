//! The entries of one layer, found and checked.

use super::entries::{Entries, LayerEntry, REMEDY};
use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::{module_of, tensor_of, DenseTensor, Weight};
use crate::{Error, Result};
use safetensors::Dtype;
use std::path::Path;

/// What follows `<key>.weight.` in the entries of all families.
const SUFFIXES: [&str; 16] = [
    "axis",
    "biases",
    "bits",
    "channel_wise",
    "dequant_w_scale",
    "dequant_x_scale",
    "dtype",
    "format",
    "group_size",
    "num_blocks",
    "optimization_steps",
    "quant_scale",
    "round_zeros",
    "scales",
    "shape",
    "zeros",
];

/// The key of the layer that an entry belongs to. Biases have none: they belong to a layer if there is one.
pub(super) fn key_of(name: &str) -> Option<&str> {
    module_of(name).or_else(|| {
        let (weight, suffix) = name.rsplit_once('.')?;
        SUFFIXES.contains(&suffix).then(|| module_of(weight))?
    })
}

/// The families, by the number in `weight.format`.
pub(super) const FAMILIES: [&str; 7] = ["GGML", "Unquant", "HQQ", "FP8", "AFQ", "F8Q8", "MXFP4"];

/// One layer.
pub(super) struct Layer<'a> {
    pub key: &'a str,
    entries: &'a Entries,
    /// The number of its family.
    pub format: Option<u8>,
}

/// A weight, and, if it is dequantized when it is loaded, why.
pub(super) type WeightAndWhy = (Weight, Option<&'static str>);

impl<'a> Layer<'a> {
    /// The layer of this key, of which there is at least one entry.
    pub(super) fn find(entries: &'a Entries, key: &'a str) -> Result<Self> {
        let layer = Self { key, entries, format: None };
        if !layer.has("weight.format") {
            return Err(layer.wrong("weight.format", "the format of the layer", "no such entry"));
        }
        let format = Some(layer.u8("weight.format")?);
        Ok(Self { format, ..layer })
    }

    pub(super) fn weight_name(&self) -> String {
        tensor_of(self.key, "weight")
    }

    /// The entry called `suffix`, of one of these dtypes.
    pub(super) fn part(&self, suffix: &str, dtypes: &[Dtype]) -> Result<&'a StoredTensor> {
        let tensor = &self.required(suffix)?.tensor;
        if dtypes.contains(&tensor.dtype()) {
            return Ok(tensor);
        }
        let expected: Vec<_> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
        Err(self.wrong(suffix, format!("dtype {}", expected.join(" or ")), format!("{:?}", tensor.dtype())))
    }

    /// A number that is an entry.
    pub(super) fn u8(&self, suffix: &str) -> Result<u8> {
        self.scalar(suffix, Dtype::U8).map(|[byte]| byte)
    }

    /// As [`u8`](Layer::u8).
    pub(super) fn u32(&self, suffix: &str) -> Result<u32> {
        self.scalar(suffix, Dtype::U32).map(u32::from_le_bytes)
    }

    /// As [`u8`](Layer::u8).
    pub(super) fn f32(&self, suffix: &str) -> Result<f32> {
        self.scalar(suffix, Dtype::F32).map(f32::from_le_bytes)
    }

    fn scalar<const N: usize>(&self, suffix: &str, dtype: Dtype) -> Result<[u8; N]> {
        let LayerEntry { tensor, value } = self.required(suffix)?;
        match value.as_slice().try_into() {
            Ok(bytes) if tensor.dtype() == dtype && tensor.dims().is_empty() => Ok(bytes),
            _ => Err(self.wrong(
                suffix,
                format!("one number, {dtype:?} of shape []"),
                format!("{:?} {:?}", tensor.dtype(), tensor.dims()),
            )),
        }
    }

    /// The logical shape where it is an entry of its own: `[N, K]`, or with `stack` perhaps `[E, N, K]`.
    pub(super) fn shape(&self, stack: bool) -> Result<Vec<usize>> {
        let suffix = "weight.shape";
        let LayerEntry { tensor, value } = self.required(suffix)?;
        let (Dtype::U32, &[rank]) = (tensor.dtype(), tensor.dims()) else {
            let found = format!("{:?} {:?}", tensor.dtype(), tensor.dims());
            return Err(self.wrong(suffix, "the shape, U32 of shape [2] or [3]", found));
        };
        let (numbers, _) = value.as_chunks::<4>();
        let dims: Vec<_> =
            numbers.iter().filter_map(|bytes| usize::try_from(u32::from_le_bytes(*bytes)).ok()).collect();
        if dims.len() != rank {
            return Err(self.wrong(suffix, "two or three dimensions", format!("{rank}")));
        }
        self.check_rank(suffix, &dims, stack)?;
        Ok(dims)
    }

    /// Checks the rank of a weight's shape, and that nothing is empty.
    pub(super) fn check_rank(&self, suffix: &str, dims: &[usize], stack: bool) -> Result<()> {
        let expected = match (dims.len(), stack) {
            (2, _) | (3, true) if !dims.contains(&0) => return Ok(()),
            (2, _) | (3, true) => "no dimension of zero",
            (3, false) => "a matrix: this family has no stacks of experts",
            (_, true) => "a shape of two or three dimensions",
            (_, false) => "a shape of two dimensions",
        };
        Err(self.wrong(suffix, expected, format!("{dims:?}")))
    }

    fn required(&self, suffix: &str) -> Result<&'a LayerEntry> {
        self.entry(suffix).ok_or_else(|| self.wrong(suffix, "this entry", "none"))
    }

    pub(super) fn has(&self, suffix: &str) -> bool {
        self.entry(suffix).is_some()
    }

    pub(super) fn entry(&self, suffix: &str) -> Option<&'a LayerEntry> {
        self.entries.get(&tensor_of(self.key, suffix))
    }

    /// All entries but the bias, by name.
    pub(super) fn stored(&self) -> Result<Vec<DenseTensor>> {
        let names = std::iter::once("weight".to_owned());
        let names = names.chain(SUFFIXES.iter().map(|suffix| format!("weight.{suffix}")));
        let stored = |part: String| {
            let tensor = &self.entry(&part)?.tensor;
            // Nothing is computed with them.
            let bytes =
                tensor.as_numbers(Dtype::U8, tensor.dims()).filter(|_| tensor.dtype() == Dtype::F8_E4M3);
            Some(DenseTensor::new(&tensor_of(self.key, &part), bytes.as_ref().unwrap_or(tensor)))
        };
        names.filter_map(stored).collect()
    }

    /// The file of an entry; if there is none, that of another one of the layer.
    pub(super) fn file_of(&self, suffix: &str) -> &'a Path {
        let mut others = SUFFIXES.iter().filter_map(|other| self.entry(&format!("weight.{other}")));
        let entry = self.entry(suffix).or_else(|| self.entry("weight")).or_else(|| others.next());
        entry.map_or(Path::new(""), |entry| entry.tensor.path())
    }

    /// The error that an entry is not what its family demands.
    pub(super) fn wrong(&self, suffix: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        let family = self.format.and_then(|format| FAMILIES.get(usize::from(format)));
        let expected = match family {
            Some(family) => format!("{}, as the layer is {family}", expected.into()),
            None => expected.into(),
        };
        Error::tensor(self.file_of(suffix), tensor_of(self.key, suffix), expected, found, REMEDY)
    }
}
