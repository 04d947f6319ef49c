//! AutoAWQ's 4-bit layouts for single rows of activations, as `WQLinear_GEMV` and `WQLinear_GEMVFast` of autoawq 0.2.9 write
//! them. Both have room for more groups than there are.
//!
//! "gemv": `qweight` I32 `[N, K/8]`, `qzeros` I32 `[N, room/8]`, `scales` `[N, room]`, codes in the order of this crate.
//!
//! "gemv_fast": `qweight` I16 `[N/4, K]`, `qzeros` and `scales` F16 `[room, N]`, with `w = q * scale + zero`. Four rows lie
//! together: of each 64 columns the first row has 32 bytes, then the second. Half of these bytes are 32 codes, of which column
//! `8 a + 2 b + c` (a, b below 4, c below 2) is nibble `8 b + 4 c + a`.

use super::config::AwqConfig;
use super::groups::Groups;
use super::integers::{part, Integers, Order, ZeroOrder, Zeros};
use super::module::{scale_dtypes, Module};
use crate::checkpoint::file::{candle_dtype, StoredTensor};
use crate::checkpoint::weight::{Layout, MlxForm, PackedWeight, Slice, SliceInMemory, Weight};
use crate::format::Scale;
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype;
use std::sync::Arc;

/// Rows that lie together.
const ROWS: usize = 4;
/// Columns of which the codes of a row lie together.
const COLUMNS: usize = 64;

pub(super) fn gemv(module: &Module, config: &AwqConfig) -> Result<Weight> {
    module.refuse("g_idx", "an order of columns is not applied")?;
    let qweight = module.require("qweight", "qweight", &[Dtype::I32])?;
    let qzeros = module.require("qzeros", "qweight", &[Dtype::I32])?;
    let scales = module.require("scales", "qweight", scale_dtypes(Scale::Float))?;
    let ([n], words) = module.rows("qweight", qweight)? else {
        return Err(module.wrong("qweight", qweight, "a shape [N, K/8]", format!("{:?}", qweight.dims())));
    };
    let k = words.saturating_mul(8);
    let (groups, format, room) = groups(module, qweight, config, k)?;
    module.check_dims("scales", scales, &[*n, room])?;
    module.check_dims("qzeros", qzeros, &[*n, room / 8])?;
    let zeros = Zeros { stored: qzeros.clone(), order: ZeroOrder::Rows, first: 0, less_one: false };
    let layout = Integers {
        format,
        n: *n,
        k,
        groups,
        codes: qweight.clone(),
        order: Order::Rows,
        scales: scales.clone(),
        multiplier: None,
        zeros: Some(zeros),
        narrow_biases: false,
    };
    Ok(Weight::Packed(PackedWeight::new(module.path, format, vec![*n, k], layout)))
}

pub(super) fn gemv_fast(module: &Module, config: &AwqConfig) -> Result<Weight> {
    module.refuse("g_idx", "an order of columns is not applied")?;
    let qweight = module.require("qweight", "qweight", &[Dtype::I16])?;
    let qzeros = module.require("qzeros", "qweight", scale_dtypes(Scale::Float))?;
    let scales = module.require("scales", "qweight", scale_dtypes(Scale::Float))?;
    let ([quads], k) = module.rows("qweight", qweight)? else {
        return Err(module.wrong("qweight", qweight, "a shape [N/4, K]", format!("{:?}", qweight.dims())));
    };
    if k % COLUMNS != 0 {
        let expected = format!("K that is a multiple of {COLUMNS}");
        return Err(module.wrong("qweight", qweight, expected, format!("{:?}", qweight.dims())));
    }
    let n = quads.saturating_mul(ROWS);
    let (groups, format, room) = groups(module, qweight, config, k)?;
    module.check_dims("scales", scales, &[room, n])?;
    module.check_dims("qzeros", qzeros, &[room, n])?;
    let (codes, scales, biases) = (qweight.clone(), scales.clone(), qzeros.clone());
    let layout = Fast { format, quads: *quads, k, groups, codes, scales, biases };
    Ok(Weight::Packed(PackedWeight::new(module.path, format, vec![n, k], layout)))
}

/// The groups that the config names, the format, and for how many groups there is room: a multiple of eight, of 16 in groups
/// of 64, and of 32 in groups of 32.
fn groups(
    module: &Module,
    qweight: &StoredTensor,
    config: &AwqConfig,
    k: usize,
) -> Result<(Groups, QuantFormat, usize)> {
    let size = config.group_size.unwrap_or(k);
    let divided = k.checked_div(size).and_then(|count| Some((count, Groups::divide(k, count)?)));
    let Some((count, (groups, group_size))) = divided.filter(|(_, (groups, _))| groups.size == size) else {
        let expected = format!("rows of whole groups of {size}, a multiple of 32, as the config says");
        return Err(module.wrong("qweight", qweight, expected, format!("K = {k}")));
    };
    let unit = match size {
        32 => 32,
        64 => 16,
        _ => 8,
    };
    Ok((groups, QuantFormat::affine(4, group_size)?, count.div_ceil(unit).saturating_mul(unit)))
}

/// Codes of four rows beside each other, scales and biases with the groups of K in rows.
#[derive(Clone, Debug)]
struct Fast {
    format: QuantFormat,
    quads: usize,
    k: usize,
    groups: Groups,
    codes: StoredTensor,
    scales: StoredTensor,
    biases: StoredTensor,
}

impl Fast {
    /// Scales or biases of all groups of the format, `[N, groups]`.
    fn of_groups(&self, stored: &StoredTensor, device: &Device) -> Result<Tensor> {
        let n = self.quads * ROWS;
        let values = stored.load(&Device::Cpu)?;
        let room = values.elem_count() / n.max(1);
        let values = values.reshape((room, n))?.narrow(0, 0, self.groups.count(self.k))?.t()?;
        Ok(self.groups.spread(&values, self.format, self.k)?.to_device(device)?)
    }
}

impl Layout for Fast {
    /// Biases are stored, with the dtype of the scales.
    fn mlx_form(&self) -> Result<MlxForm> {
        let same = self.scales.dtype() == self.biases.dtype();
        let dtype = candle_dtype(self.scales.dtype()).filter(|_| same);
        Ok(dtype.map_or(MlxForm::ROUNDED, MlxForm::Rearranged))
    }

    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes() + self.biases.size_in_bytes()
    }

    /// Scales and biases are those of the format's groups: of a large group of the file there are several, and there are
    /// none for the room behind the last one.
    fn loaded_bytes(&self) -> u64 {
        let elements = (self.quads * ROWS * self.k) as u64;
        let of_number = |stored: &StoredTensor| (stored.dtype().bitsize() / 8) as u64;
        let of_group = of_number(&self.scales) + of_number(&self.biases);
        elements / 8 * self.format.bits() as u64 + elements / self.format.group_size() as u64 * of_group
    }

    fn group_values(&self) -> Result<(Tensor, Option<Tensor>)> {
        let of_groups = |stored| self.of_groups(stored, &Device::Cpu);
        Ok((of_groups(&self.scales)?, Some(of_groups(&self.biases)?)))
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let words = in_rows(&self.codes.read::<u8>()?, self.k);
        let codes = Tensor::from_vec(words, (self.quads * ROWS, self.format.words_per_row(self.k)?), device)?;
        let (scales, biases) = (self.of_groups(&self.scales, device)?, self.of_groups(&self.biases, device)?);
        QuantTensor::new(self.format, codes, scales, Some(biases), None)
    }

    fn granularity(&self) -> usize {
        self.format.group_size().max(COLUMNS)
    }

    /// Four rows lie together: parts of them are cut off in memory.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let (count, n) = (self.groups.count(self.k), self.quads * ROWS);
        let (quads, of_k, (of_groups, groups)) = match slice.along_k() {
            true => (0..self.quads, slice.range.clone(), self.groups.narrow(&slice.range)),
            false => {
                let quads = slice.range.start / ROWS..slice.range.end.div_ceil(ROWS);
                (quads, 0..self.k, (0..count, self.groups))
            }
        };
        let of_values = |stored: &StoredTensor| {
            let size = stored.dtype().bitsize() / 8;
            let room = stored.size_in_bytes() / (n * size).max(1);
            let rows = quads.start * ROWS * size..quads.end * ROWS * size;
            part(stored, [room, n * size], &of_groups, &rows)
        };
        let bytes = |columns: usize| columns * ROWS / 2;
        let of_bytes = bytes(of_k.start)..bytes(of_k.end);
        let whole = Arc::new(Self {
            quads: quads.len(),
            k: of_k.len(),
            groups,
            codes: part(&self.codes, [self.quads, bytes(self.k)], &quads, &of_bytes)?,
            scales: of_values(&self.scales)?,
            biases: of_values(&self.biases)?,
            ..self.clone()
        });
        if slice.along_k() {
            return Ok(whole);
        }
        let dims = vec![quads.len() * ROWS, self.k];
        Ok(SliceInMemory::of_rows(whole, dims, quads.start * ROWS, slice))
    }
}

/// The codes of "gemv_fast" in rows of this crate.
fn in_rows(bytes: &[u8], k: usize) -> Vec<u32> {
    /// Bytes of 32 codes.
    const HALF: usize = 16;
    let row_words = k / 8;
    let mut words = vec![0u32; bytes.len() / size_of::<u32>()];
    let quads = words.par_chunks_mut((ROWS * row_words).max(1)).zip(bytes.par_chunks((ROWS * k / 2).max(1)));
    quads.for_each(|(words, bytes)| {
        for (index, half) in bytes.as_chunks::<HALF>().0.iter().enumerate() {
            // Two halves of each of four rows, for one 64 columns after the other.
            let (columns, row) = (index / (2 * ROWS) * 2 + index % 2, index / 2 % ROWS);
            let nibbles = u128::from_le_bytes(*half);
            let code = |column: usize| {
                let nibble = column % 8 / 2 * 8 + column % 2 * 4 + column / 8;
                (nibbles >> (4 * nibble)) as u32 & 15
            };
            let output = words.iter_mut().skip(row * row_words + columns * 4).take(4);
            for (eight, word) in output.enumerate() {
                *word = (0..8).fold(0, |word, column| word | code(eight * 8 + column) << (4 * column));
            }
        }
    });
    words
}
