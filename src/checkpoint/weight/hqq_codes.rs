//! Codes as HQQ packs them: as many parts of the flattened weight share a byte as it has room for, the first in the highest bits.
//! Of 3 bits ten share a word, and rows of the matrix of groups are filled up to whole words.
//!
//! As `core/bitpack.py` of hqq 0.2.8, and `hqq/mod.rs` and `hqq/hqq_op.rs` of mistral.rs, which cite it.

use crate::checkpoint::file::StoredTensor;
use crate::Result;

/// Codes of 3 bits in a word.
const IN_WORD: usize = 10;

/// Bytes of so many rows of the matrix of groups, for each of its columns; `None` if they are not whole.
pub(in crate::checkpoint) fn bytes_of_rows(rows: usize, bits: usize) -> Option<usize> {
    match bits {
        3 => rows.div_ceil(IN_WORD).checked_mul(size_of::<u32>()),
        _ => rows.checked_mul(bits).filter(|bits| bits.is_multiple_of(8)).map(|bits| bits / 8),
    }
}

/// The codes of all elements, in their order.
pub(in crate::checkpoint) fn codes(stored: &StoredTensor, bits: usize, elements: usize) -> Result<Vec<u8>> {
    let mut codes = Vec::with_capacity(elements);
    if bits == 3 {
        let words = stored.read::<u32>()?;
        for part in (0..IN_WORD).rev() {
            codes.extend(words.iter().map(|word| (word >> (3 * part)) as u8 & 7));
        }
    } else {
        let bytes = stored.read::<u8>()?;
        let mask = u8::MAX >> (8 - bits.min(8));
        for part in (0..8 / bits.max(1)).rev() {
            codes.extend(bytes.iter().map(|byte| byte >> (bits * part) & mask));
        }
    }
    // Without what words are filled up with.
    codes.truncate(elements);
    Ok(codes)
}
