//! What a file has of a weight where files of another kind can have the same: codes and scales as they lie.
//!
//! Layouts of this crate put codes and scales where kernels look for them; what is written again as it was is copied instead.

use super::dense::DenseTensor;
use super::ggml_packed::BlockSource;
use super::names::tensor_of;
use crate::checkpoint::file::StoredTensor;
use crate::{QuantFormat, Result};
use safetensors::Dtype;
use std::sync::Arc;

/// What a file has of a weight, where files of another kind can have the same.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoredForm {
    /// Blocks of a type of GGML.
    Blocks(StoredBlocks),
    /// E4M3 codes and float scales.
    Fp8(StoredFp8),
    /// Integers whose groups run across rows, as HQQ packs them along axis 0.
    Hqq(StoredHqq),
    /// NF4 or FP4 of bitsandbytes.
    FourBits(StoredFourBits),
}

/// Blocks of a type of GGML, of a whole weight or of a part.
#[derive(Clone, Debug)]
pub struct StoredBlocks {
    pub(super) name: &'static str,
    pub(super) id: u32,
    /// Bytes of a block.
    pub(super) bytes: usize,
    pub(super) format: Option<QuantFormat>,
    pub(super) blocks: Arc<dyn BlockSource>,
}

impl StoredBlocks {
    /// The name of the type.
    pub fn type_name(&self) -> &'static str {
        self.name
    }

    /// The number of the type in GGUF files.
    pub fn type_id(&self) -> u32 {
        self.id
    }

    /// The format of this crate that means the same, if there is one.
    pub fn format(&self) -> Option<QuantFormat> {
        self.format
    }

    /// Bytes of all blocks.
    pub fn size_in_bytes(&self) -> usize {
        self.blocks.size_in_bytes()
    }

    /// Hands the blocks to `take`, row by row and in pieces of whole blocks.
    ///
    /// # Errors
    /// If they can't be read.
    pub fn for_each_chunk(&self, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.blocks.for_each_blocks(self.bytes, take)
    }
}

/// E4M3 codes and scales that multiply them.
#[derive(Clone, Debug)]
pub struct StoredFp8 {
    /// The codes as U8 `[N, K]`.
    pub codes: DenseTensor,
    /// A float for each tile, `[N / rows, K / columns]`, rounded up.
    pub scales: DenseTensor,
    /// Rows and columns of a tile; N and K or more if there is one scale.
    pub tile: [usize; 2],
}

/// Integers with a scale and a zero for each group, `(code - zero) * scale`. Element `i` of the flattened weight belongs to group
/// `i mod G` of `G` groups.
#[derive(Clone, Debug)]
pub struct StoredHqq {
    /// Bits of a code.
    pub bits: usize,
    /// Elements of a group.
    pub group_size: usize,
    /// U8 `[group_size * bits / 8, G]`; of 3 bits I32 `[group_size / 10, G]`, rounded up. As many parts of the flattened weight
    /// share a byte or a word as it has room for, the first in the highest bits.
    pub codes: DenseTensor,
    /// Floats `[1, G]`.
    pub scales: DenseTensor,
    /// Floats `[1, G]`, counted from the least code on.
    pub zeros: DenseTensor,
}

/// A 4-bit weight of bitsandbytes: all that its file says of it.
#[derive(Clone, Debug)]
pub struct StoredFourBits {
    /// What it is here.
    pub format: QuantFormat,
    /// The tensors by their names in a module, with the dtypes and shapes of the file; the codes are the first.
    pub parts: Vec<(&'static str, DenseTensor)>,
}

impl StoredFourBits {
    /// The form of these parts; `None` if they are parts of tensors, or no numbers that are handed on.
    pub(in crate::checkpoint) fn form(
        module: &str,
        format: QuantFormat,
        parts: &[(&'static str, StoredTensor)],
    ) -> Option<StoredForm> {
        let part = |(name, stored): &(&'static str, StoredTensor)| {
            let stored = whole(module, name, stored, stored.dtype(), stored.dims())?;
            Some((*name, stored))
        };
        let parts = parts.iter().map(part).collect::<Option<Vec<_>>>()?;
        Some(StoredForm::FourBits(Self { format, parts }))
    }
}

impl StoredFp8 {
    /// The form of these parts; `None` if they are parts of tensors.
    pub(in crate::checkpoint) fn form(
        module: &str,
        [n, k]: [usize; 2],
        codes: &StoredTensor,
        scales: &StoredTensor,
        tile: [usize; 2],
    ) -> Option<StoredForm> {
        let [rows, columns] = tile;
        let grid = [n.div_ceil(rows.max(1)), k.div_ceil(columns.max(1))];
        Some(StoredForm::Fp8(Self {
            codes: whole(module, "weight", codes, Dtype::U8, &[n, k])?,
            scales: whole(module, "weight_scale", scales, scales.dtype(), &grid)?,
            tile,
        }))
    }
}

impl StoredHqq {
    /// The form of these parts; `None` if they are parts of tensors.
    pub(in crate::checkpoint) fn form(
        module: &str,
        (bits, group_size): (usize, usize),
        codes: &StoredTensor,
        [scales, zeros]: [&StoredTensor; 2],
    ) -> Option<StoredForm> {
        let groups = scales.size_in_bytes() / (scales.dtype().bitsize() / 8).max(1);
        let dtype = if bits == 3 { Dtype::I32 } else { Dtype::U8 };
        let of_group = codes.size_in_bytes().checked_div(groups.saturating_mul(dtype.bitsize() / 8))?;
        let of_groups = |name, part: &StoredTensor| whole(module, name, part, part.dtype(), &[1, groups]);
        Some(StoredForm::Hqq(Self {
            bits,
            group_size,
            codes: whole(module, "weight", codes, dtype, &[of_group, groups])?,
            scales: of_groups("scale", scales)?,
            zeros: of_groups("zero", zeros)?,
        }))
    }
}

/// The tensor as numbers of this dtype and shape, which the file has one after the other.
fn whole(
    module: &str,
    name: &str,
    stored: &StoredTensor,
    dtype: Dtype,
    dims: &[usize],
) -> Option<DenseTensor> {
    let numbers = stored.as_numbers(dtype, dims).filter(StoredTensor::is_whole)?;
    DenseTensor::new(&tensor_of(module, name), &numbers).ok()
}
