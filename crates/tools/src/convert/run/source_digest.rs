//! The BLAKE3 digest of what is read of a source. What is resumed is compared with it: sizes and times of files may be the
//! same where bytes are not. SHA-256 would take as long as packing.

use blake3::Hasher;
use candle_core::{CpuStorage, Storage, Tensor};
use candle_quant::nn::LayerWeight;
use candle_quant::{Error, QuantTensor, Result};
use half::slice::HalfFloatSliceExt;

/// A digest of what is read; of nothing if nothing is to be resumed.
pub(super) struct SourceHasher(Option<Hasher>);

impl SourceHasher {
    pub(super) fn new(is_wanted: bool) -> Self {
        Self(is_wanted.then(Hasher::new))
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.0 {
            hasher.update(bytes);
        }
    }

    /// The numbers of a tensor in host memory.
    pub(super) fn tensor(&mut self, tensor: &Tensor) -> Result<()> {
        if self.0.is_none() {
            return Ok(());
        }
        let tensor = tensor.contiguous()?;
        let (storage, layout) = tensor.storage_and_layout();
        let bytes = match (&*storage, layout.contiguous_offsets()) {
            (Storage::Cpu(storage), Some((start, end))) => bytes_of(storage, start, end),
            _ => None,
        };
        let Some(bytes) = bytes else {
            return Err(Error::Unsupported {
                what: format!("a digest of {:?} on {:?}", tensor.dtype(), tensor.device().location()),
                remedy: "report this".into(),
            });
        };
        self.bytes(bytes);
        Ok(())
    }

    /// The parts of a packed weight.
    pub(super) fn packed(&mut self, weight: &QuantTensor) -> Result<()> {
        weight.parts().try_for_each(|part| self.tensor(part))
    }

    /// A weight as it was loaded.
    pub(super) fn weight(&mut self, weight: &LayerWeight) -> Result<()> {
        match weight {
            LayerWeight::Quantized(packed) => self.packed(packed),
            LayerWeight::Reordered(packed) => {
                packed.columns().iter().for_each(|column| self.bytes(&column.to_le_bytes()));
                self.packed(packed.weight())
            }
            LayerWeight::ColumnScaled(packed) => packed.parts().try_for_each(|part| self.tensor(part)),
            LayerWeight::Dense(tensor) => self.tensor(tensor),
            LayerWeight::Ggml(blocks) => {
                self.bytes(&blocks.data()?);
                Ok(())
            }
            other => Err(Error::Unsupported {
                what: format!("a digest of a weight in {}", other.format_name()),
                remedy: "update candle-quant-tools with candle-quant".into(),
            }),
        }
    }

    /// In hexadecimal.
    pub(super) fn finish(self) -> String {
        self.0.map(|hasher| hasher.finalize().to_hex().to_string()).unwrap_or_default()
    }
}

/// One digest of several.
pub(super) fn of_all<'a>(digests: impl IntoIterator<Item = &'a String>) -> String {
    let mut hasher = Hasher::new();
    for digest in digests {
        hasher.update(digest.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here reads")]
fn bytes_of(storage: &CpuStorage, start: usize, end: usize) -> Option<&[u8]> {
    use bytemuck::cast_slice;
    match storage {
        CpuStorage::U8(all) => all.get(start..end),
        CpuStorage::U32(all) => all.get(start..end).map(cast_slice),
        CpuStorage::I16(all) => all.get(start..end).map(cast_slice),
        CpuStorage::I32(all) => all.get(start..end).map(cast_slice),
        CpuStorage::I64(all) => all.get(start..end).map(cast_slice),
        CpuStorage::F16(all) => all.get(start..end).map(|part| cast_slice(part.reinterpret_cast())),
        CpuStorage::BF16(all) => all.get(start..end).map(|part| cast_slice(part.reinterpret_cast())),
        CpuStorage::F32(all) => all.get(start..end).map(cast_slice),
        CpuStorage::F64(all) => all.get(start..end).map(cast_slice),
        _ => None,
    }
}
