//! AutoAWQ's "marlin" layout: `qweight` I32 `[K/16, 2 N]`, `scales` `[K/g, N]`, with `w = (q - 8) * scale`, without zeros.
//!
//! As `WQLinear_Marlin` writes it (awq/modules/linear/marlin.py of casper-hansen/AutoAWQ), for kernels that read the operands of a
//! tensor core's instructions as they lie. A row of `qweight` has tiles of 16 of K by 64 of N, 128 words each: word `4 i + j` has of column
//! `16 j + i / 4` and of the one eight behind it four codes each, of K `2 (i % 4)`, the next one, and those eight behind both.
//! Scales are in an order of their own: 64 of them are the columns `0, 8, 16 ...`, then `1, 9 ...`; where all of K is one group, 32 of
//! them are the columns `0, 1, 8, 9, 16, 17, 24, 25`, then `2, 3, 10 ...`.

use super::config::AwqConfig;
use super::groups::Groups;
use super::module::Module;
use crate::checkpoint::file::{candle_dtype, StoredTensor};
use crate::checkpoint::weight::{Layout, MlxForm, PackedWeight, Slice, SliceInMemory, Weight};
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype;
use std::sync::Arc;

/// A tile: of K, of N, and the words that it takes.
const TILE_K: usize = 16;
const TILE_N: usize = 64;
const WORDS: usize = 128;
/// Words of `qweight` for each column of a row of it.
const WORDS_OF_COLUMN: usize = 2;
/// Which of the eight codes that two columns have in a word comes first, from its lowest bits on.
const CODES: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

pub(super) fn weight(module: &Module, config: &AwqConfig) -> Result<Weight> {
    for part in ["qzeros", "g_idx"] {
        module.refuse(part, "AutoAWQ's \"marlin\" has none")?;
    }
    let qweight = module.require("qweight", "qweight", &[Dtype::I32])?;
    let scales = module.require("scales", "qweight", &[Dtype::F16, Dtype::BF16, Dtype::F32])?;
    let ([tiles], words) = module.rows("qweight", qweight)? else {
        return Err(module.wrong("qweight", qweight, "a shape [K/16, 2 N]", format!("{:?}", qweight.dims())));
    };
    if !words.is_multiple_of(WORDS) {
        let expected = format!("rows of a multiple of {WORDS} words, for each {TILE_N} of N");
        return Err(module.wrong("qweight", qweight, expected, format!("{:?}", qweight.dims())));
    }
    let (n, k) = (words / WORDS_OF_COLUMN, tiles.saturating_mul(TILE_K));
    let count = scales.dims().first().copied().unwrap_or(0);
    let stated = |(groups, _): &(Groups, usize)| config.group_size.is_none_or(|size| size == groups.size);
    let Some((groups, group_size)) = Groups::divide(k, count).filter(stated) else {
        let size = config.group_size.map_or("32".into(), |stated| format!("{stated}, as the config says,"));
        let expected = format!("one row for each {size} of K = {k}");
        return Err(module.wrong("scales", scales, expected, format!("shape {:?}", scales.dims())));
    };
    module.check_dims("scales", scales, &[count, n])?;
    let format = QuantFormat::symmetric(4, group_size)?;
    let (qweight, scales, is_one_group) = (qweight.clone(), scales.clone(), count == 1);
    let layout = Marlin { format, n, k, groups, is_one_group, qweight, scales };
    Ok(Weight::Packed(PackedWeight::new(module.path, format, vec![n, k], layout)))
}

#[derive(Debug)]
struct Marlin {
    format: QuantFormat,
    n: usize,
    k: usize,
    groups: Groups,
    /// Whether all of K is one group in the file.
    is_one_group: bool,
    qweight: StoredTensor,
    scales: StoredTensor,
}

impl Layout for Marlin {
    fn mlx_form(&self) -> Result<MlxForm> {
        match self.format.element().uint() {
            Some(bits) => MlxForm::of_symmetric(&self.scales, bits),
            None => Ok(MlxForm::ROUNDED),
        }
    }

    fn size_in_bytes(&self) -> usize {
        self.qweight.size_in_bytes() + self.scales.size_in_bytes()
    }

    /// Beside 16-bit scales biases are written out.
    fn loaded_bytes(&self) -> u64 {
        let dtype = candle_dtype(self.scales.dtype()).unwrap_or(DType::F32);
        let format = if dtype == DType::F32 { self.format } else { self.format.with_biases() };
        format.size_in_bytes((self.n * self.k) as u64, dtype)
    }

    fn group_values(&self) -> Result<(Tensor, Option<Tensor>)> {
        let count = self.groups.count(self.k);
        let order = order_of_scales(self.n, self.is_one_group);
        let order = Tensor::from_vec(order, self.n, &Device::Cpu)?;
        let scales = self.scales.load(&Device::Cpu)?.reshape((count, self.n))?.index_select(&order, 1)?;
        Ok((self.groups.spread(&scales.t()?, self.format, self.k)?, None))
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let words_per_row = self.format.words_per_row(self.k)?;
        let codes = codes(&self.qweight.read::<u32>()?, self.n, words_per_row);
        let codes = Tensor::from_vec(codes, (self.n, words_per_row), device)?;
        let (scales, biases) = self.group_values()?;
        QuantTensor::new(self.format, codes, scales.to_device(device)?, biases, None)
    }

    fn granularity(&self) -> usize {
        self.format.group_size()
    }

    /// Rows of the weight are columns here, 64 of which lie together: parts of these are cut off in memory.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let count = self.groups.count(self.k);
        let scale = self.scales.dtype().bitsize() / 8;
        let word = WORDS_OF_COLUMN * size_of::<u32>();
        if slice.along_k() {
            let (of_groups, groups) = self.groups.narrow(&slice.range);
            let tiles = slice.range.start / TILE_K..slice.range.end / TILE_K;
            return Ok(Arc::new(Self {
                k: slice.range.len(),
                groups,
                qweight: self.qweight.narrow(&[self.k / TILE_K, self.n * word], 0, &tiles)?,
                scales: self.scales.narrow(&[count, self.n * scale], 0, &of_groups)?,
                ..*self
            }));
        }
        let whole = slice.range.start / TILE_N..slice.range.end.div_ceil(TILE_N);
        let of = |bytes: usize| whole.start * TILE_N * bytes..whole.end * TILE_N * bytes;
        let n = whole.len() * TILE_N;
        let part = Arc::new(Self {
            n,
            qweight: self.qweight.narrow(&[self.k / TILE_K, self.n * word], 1, &of(word))?,
            scales: self.scales.narrow(&[count, self.n * scale], 1, &of(scale))?,
            ..*self
        });
        Ok(SliceInMemory::of_rows(part, vec![n, self.k], whole.start * TILE_N, slice))
    }
}

/// For each column of N where its scale lies.
fn order_of_scales(n: usize, is_one_group: bool) -> Vec<u32> {
    let place = |column: usize| match is_one_group {
        false => column / 64 * 64 + column % 8 * 8 + column / 8 % 8,
        // Pairs, of which each four that are eight apart lie together.
        true => column / 32 * 32 + column % 8 / 2 * 8 + column / 8 % 4 * 2 + column % 2,
    };
    (0..n).map(|column| u32::try_from(place(column)).unwrap_or(u32::MAX)).collect()
}

/// The codes of tiles in rows along K, of `row_words` each.
fn codes(words: &[u32], n: usize, row_words: usize) -> Vec<u32> {
    let mut codes = vec![0; n.saturating_mul(row_words)];
    let of_columns = codes.par_chunks_mut((TILE_N * row_words).max(1)).enumerate();
    of_columns.for_each(|(block, codes)| {
        for (tile, row) in words.chunks_exact((n * WORDS_OF_COLUMN).max(1)).enumerate() {
            let words = row.iter().skip(block * WORDS).take(WORDS);
            for (index, word) in words.enumerate() {
                let (i, j) = (index / 4, index % 4);
                for (nibble, code) in CODES.into_iter().enumerate() {
                    let column = 16 * j + i / 4 + code / 4 * 8;
                    let k = tile * TILE_K + 2 * (i % 4) + code % 2 + code % 4 / 2 * 8;
                    if let Some(packed) = codes.get_mut(column * row_words + k / 8) {
                        *packed |= (word >> (4 * nibble) & 15) << (k % 8 * 4);
                    }
                }
            }
        }
    });
    codes
}
