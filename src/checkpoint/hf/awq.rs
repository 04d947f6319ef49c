//! AutoAWQ's 4-bit "gemm" layout: `qweight` I32 `[K, N/8]`, `qzeros` I32 `[K/g, N/8]`, `scales` `[K/g, N]`,
//! with `w = (q - zero) * scale`.
//!
//! As `WQLinear_GEMM` writes it and awq/utils/packing_utils.py reads it (casper-hansen/AutoAWQ): the nibbles
//! of a word, lowest first, are the columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight. Biases are `-(zero * scale)` in F32, which is exact
//! (mlx-lm's import rounds them to the dtype of the scales). Groups may be larger than those here, up to all of K: their scales
//! and biases are repeated.

use super::awq_gemv;
use super::awq_marlin;
use super::config::{AwqConfig, AwqVersion};
use super::groups::Groups;
use super::module::Module;
use crate::checkpoint::file::{candle_dtype, StoredTensor};
use crate::checkpoint::weight::{Layout, MlxForm, PackedWeight, Slice, SliceInMemory, Weight};
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype;
use std::sync::Arc;

/// Columns of a word.
const COLUMNS: usize = 8;
/// Where the columns of a word are, in bits.
const SHIFTS: [u32; COLUMNS] = [0, 16, 4, 20, 8, 24, 12, 28];
/// Words of a row that are transposed at once: a cache line.
const TILE: usize = 16;

pub(super) fn weight(module: &Module, config: &AwqConfig) -> Result<Weight> {
    match config.version {
        AwqVersion::Gemm => gemm(module, config),
        AwqVersion::Gemv => awq_gemv::gemv(module, config),
        AwqVersion::GemvFast => awq_gemv::gemv_fast(module, config),
        AwqVersion::Marlin => awq_marlin::weight(module, config),
    }
}

fn gemm(module: &Module, config: &AwqConfig) -> Result<Weight> {
    module.refuse("g_idx", "an order of columns is not applied")?;
    let qweight = module.require("qweight", "qweight", &[Dtype::I32])?;
    let scales = module.require("scales", "qweight", &[Dtype::F16, Dtype::BF16, Dtype::F32])?;
    let ([k], packed) = module.rows("qweight", qweight)? else {
        return Err(module.wrong("qweight", qweight, "a shape [K, N/8]", format!("{:?}", qweight.dims())));
    };
    let n = packed.saturating_mul(COLUMNS);
    let groups = scales.dims().first().copied().unwrap_or(0);
    let stated = |(of_file, _): &(Groups, usize)| config.group_size.is_none_or(|size| size == of_file.size);
    let Some((of_file, group_size)) = Groups::divide(*k, groups).filter(stated) else {
        let expected = match config.group_size {
            Some(stated) => format!("one row for each {stated} of K = {k}, as the config says"),
            None => format!("one row for each 32 of K = {k}, or for each multiple of 32"),
        };
        return Err(module.wrong("scales", scales, expected, format!("shape {:?}", scales.dims())));
    };
    let has_zeros = config.zero_point || module.get("qzeros").is_some();
    let format = match has_zeros {
        true => QuantFormat::affine(4, group_size)?,
        false => QuantFormat::symmetric(4, group_size)?,
    };
    module.check_dims("scales", scales, &[groups, n])?;
    let qzeros = has_zeros.then(|| module.require("qzeros", "qweight", &[Dtype::I32])).transpose()?;
    if let Some(qzeros) = qzeros {
        module.check_dims("qzeros", qzeros, &[groups, packed])?;
    }
    let layout = AwqGemm {
        format,
        k: *k,
        groups: of_file,
        packed,
        qweight: qweight.clone(),
        qzeros: qzeros.cloned(),
        scales: scales.clone(),
    };
    Ok(Weight::Packed(PackedWeight::new(module.path, format, vec![n, *k], layout)))
}

/// Codes, zeros and scales with K along the rows.
#[derive(Debug)]
struct AwqGemm {
    format: QuantFormat,
    k: usize,
    groups: Groups,
    /// Words of a row of `qweight`, N/8.
    packed: usize,
    qweight: StoredTensor,
    qzeros: Option<StoredTensor>,
    scales: StoredTensor,
}

impl Layout for AwqGemm {
    fn mlx_form(&self) -> Result<MlxForm> {
        match (&self.qzeros, self.format.element().uint()) {
            (None, Some(bits)) => MlxForm::of_symmetric(&self.scales, bits),
            _ => Ok(MlxForm::of_zeros(&self.scales)),
        }
    }

    fn size_in_bytes(&self) -> usize {
        let zeros = self.qzeros.as_ref().map_or(0, StoredTensor::size_in_bytes);
        self.qweight.size_in_bytes() + zeros + self.scales.size_in_bytes()
    }

    /// Biases take F32; beside 16-bit scales those of symmetric codes are written out.
    fn loaded_bytes(&self) -> u64 {
        let dtype = candle_dtype(self.scales.dtype()).unwrap_or(DType::F32);
        let format = if dtype == DType::F32 { self.format } else { self.format.with_biases() };
        let elements = (self.packed * COLUMNS * self.k) as u64;
        let wider = match self.qzeros {
            Some(_) => elements / self.format.group_size() as u64 * (4 - dtype.size_in_bytes() as u64),
            None => 0,
        };
        format.size_in_bytes(elements, dtype) + wider
    }

    fn group_values(&self) -> Result<(Tensor, Option<Tensor>)> {
        let (n, groups) = (self.packed * COLUMNS, self.groups.count(self.k));
        let spread = |values: &Tensor| self.groups.spread(values, self.format, self.k);
        let scales = self.scales.load(&Device::Cpu)?.t()?;
        let biases = match &self.qzeros {
            None => None,
            Some(zeros) => {
                let zeros = Tensor::from_vec(columns(&zeros.read::<u32>()?), (groups, n), &Device::Cpu)?;
                Some(spread(&(zeros.t()? * scales.to_dtype(DType::F32)?)?.neg()?)?)
            }
        };
        Ok((spread(&scales)?, biases))
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let words_per_row = self.format.words_per_row(self.k)?;
        let codes = transpose(&self.qweight.read::<u32>()?, self.packed, words_per_row);
        let codes = Tensor::from_vec(codes, (self.packed * COLUMNS, words_per_row), device)?;
        let (scales, biases) = self.group_values()?;
        let biases = biases.map(|biases| biases.to_device(device)).transpose()?;
        QuantTensor::new(self.format, codes, scales.to_device(device)?, biases, None)
    }

    fn granularity(&self) -> usize {
        self.format.group_size()
    }

    /// Rows of the weight are columns here, eight of which are a word: parts of words are cut off in memory.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let count = self.groups.count(self.k);
        let scale = self.scales.dtype().bitsize() / 8;
        let (words, n) = (self.packed * size_of::<u32>(), self.packed * COLUMNS * scale);
        if slice.along_k() {
            let (of_groups, groups) = self.groups.narrow(&slice.range);
            let zeros = |zeros: &StoredTensor| zeros.narrow(&[count, words], 0, &of_groups);
            return Ok(Arc::new(Self {
                format: self.format,
                k: slice.range.len(),
                groups,
                packed: self.packed,
                qweight: self.qweight.narrow(&[self.k, words], 0, &slice.range)?,
                qzeros: self.qzeros.as_ref().map(zeros).transpose()?,
                scales: self.scales.narrow(&[count, n], 0, &of_groups)?,
            }));
        }
        let whole = slice.range.start / COLUMNS..slice.range.end.div_ceil(COLUMNS);
        let of_words = whole.start * size_of::<u32>()..whole.end * size_of::<u32>();
        let of_columns = whole.start * COLUMNS * scale..whole.end * COLUMNS * scale;
        let zeros = |zeros: &StoredTensor| zeros.narrow(&[count, words], 1, &of_words);
        let part = Arc::new(Self {
            format: self.format,
            k: self.k,
            groups: self.groups,
            packed: whole.len(),
            qweight: self.qweight.narrow(&[self.k, words], 1, &of_words)?,
            qzeros: self.qzeros.as_ref().map(zeros).transpose()?,
            scales: self.scales.narrow(&[count, n], 1, &of_columns)?,
        });
        let dims = vec![whole.len() * COLUMNS, self.k];
        Ok(SliceInMemory::of_rows(part, dims, whole.start * COLUMNS, slice))
    }
}

/// The codes of words, in the order of columns.
fn columns(words: &[u32]) -> Vec<f32> {
    let code = |word: u32, shift| f32::from((word >> shift & 15) as u8);
    words.iter().flat_map(|word| SHIFTS.map(|shift| code(*word, shift))).collect()
}

/// Turns codes in rows along N, of `packed` words each, into codes in rows along K, of `row_words`.
fn transpose(words: &[u32], packed: usize, row_words: usize) -> Vec<u32> {
    let mut codes = vec![0; words.len()];
    let tiles = codes.par_chunks_mut((TILE * COLUMNS * row_words).max(1)).enumerate();
    tiles.for_each(|(tile, codes)| {
        for (k, row) in words.chunks_exact(packed.max(1)).enumerate() {
            let outputs = codes.chunks_exact_mut((COLUMNS * row_words).max(1));
            for (word, output) in row.iter().skip(tile * TILE).zip(outputs) {
                for (shift, row) in SHIFTS.into_iter().zip(output.chunks_exact_mut(row_words.max(1))) {
                    if let Some(code) = row.get_mut(k / 8) {
                        *code |= (word >> shift & 15) << (k % 8 * 4);
                    }
                }
            }
        }
    });
    codes
}
