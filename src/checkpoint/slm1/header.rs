//! The fixed header of an SLM1 file.

use super::model::{Slm1Model, DECODER, TIED};
use super::source::Source;
use crate::{Error, Result};
use std::ops::Range;

pub(in crate::checkpoint) const MAGIC: &[u8; 4] = b"SLM1";

pub(super) const HEADER_BYTES: usize = 108;
pub(super) const ENTRY_BYTES: u64 = 64;

/// Where the checksum stands in the header.
pub(super) const CHECKSUM: Range<usize> = 100..108;

/// Payloads, and what else the writer aligns, begin at multiples of this.
pub(super) const ALIGNMENT: u64 = 64;

/// Byte tokenizers have 256 bytes and four special tokens; nothing has less.
const LEAST_VOCAB: u32 = 260;

/// What the header says, checked.
#[derive(Debug)]
pub(super) struct Header {
    /// Whether the tensors have names and shapes that are known.
    pub is_decoder: bool,
    pub model: Slm1Model,
    pub special_tokens: u32,
    pub length: u64,
    pub tokenizer: Range<u64>,
    pub directory: Range<u64>,
    pub tensor_count: u32,
    pub data_offset: u64,
    pub checksum: u64,
}

impl Header {
    /// Reads the header and checks it against the length of the file.
    pub fn read(source: &mut Source) -> Result<Self> {
        if source.len < HEADER_BYTES as u64 {
            let problem = format!("{} bytes are too few for an SLM1 file, whose header has 108", source.len);
            return Err(source.wrong(problem));
        }
        let bytes = source.read::<HEADER_BYTES>(0)?;
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..4] != *MAGIC {
            return Err(source.wrong(format!("the magic number is {:?}, expected SLM1", &bytes[..4])));
        }
        if u32_at(4) != 1 {
            return Err(Error::Unsupported {
                what: format!("{}: version {} of SLM1", source.path.display(), u32_at(4)),
                remedy: "only version 1 is read; other formats have the same magic number, too".into(),
            });
        }
        let length = u64::from(u32_at(8));
        if length < HEADER_BYTES as u64 || length > source.len {
            let problem =
                format!("the header claims {length} bytes, expected 108 to the {} of the file", source.len);
            return Err(source.wrong(problem));
        }
        let (model_type, flags) = (u32_at(12), u32_at(16));
        if model_type != DECODER {
            source.odd(format!(
                "model type {model_type} is not known (expected 1): its tensors have no names"
            ))?;
        }
        if flags & !TIED != 0 {
            source.odd(format!("flags {flags:#x} have bits that are not known, only bit 0 is"))?;
        }
        let section =
            |name: &str, offset: u64, len: u64| match offset.checked_add(len) {
                Some(end) if end <= source.len && offset >= length => Ok(offset..end),
                Some(end) if end <= source.len => Err(source
                    .wrong(format!("the {name} at {offset} begins inside the header of {length} bytes"))),
                _ => Err(source.wrong(format!(
                    "the {name} of {len} bytes at {offset} reaches beyond the {} bytes of the file",
                    source.len
                ))),
            };
        let tensor_count = u32_at(88);
        let header = Self {
            is_decoder: model_type == DECODER,
            special_tokens: u32_at(24),
            model: Slm1Model {
                is_tied: flags & TIED != 0,
                vocab_size: u32_at(20),
                hidden_size: u32_at(28),
                layer_count: u32_at(32),
                head_count: u32_at(36),
                kv_head_count: u32_at(40),
                head_dim: u32_at(44),
                ffn_size: u32_at(48),
                max_context: u32_at(52),
                rope_theta: f32::from_bits(u32_at(56)),
                rms_norm_epsilon: f32::from_bits(u32_at(60)),
            },
            length,
            tokenizer: section("tokenizer", u64_at(64), u64_at(72))?,
            directory: section("tensor directory", u64_at(80), u64::from(tensor_count) * ENTRY_BYTES)?,
            tensor_count,
            data_offset: section("tensor data", u64_at(92), 0)?.start,
            checksum: u64_at(CHECKSUM.start),
        };
        header.check(source)?;
        Ok(header)
    }

    fn check(&self, source: &Source) -> Result<()> {
        let model = &self.model;
        let sizes = [
            ("vocab_size", model.vocab_size),
            ("hidden_size", model.hidden_size),
            ("layer_count", model.layer_count),
            ("head_count", model.head_count),
            ("kv_head_count", model.kv_head_count),
            ("head_dim", model.head_dim),
            ("ffn_size", model.ffn_size),
            ("max_context", model.max_context),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(source.wrong(format!("{name} is 0")));
        }
        let (heads, kv_heads, head_dim) = (model.head_count, model.kv_head_count, model.head_dim);
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("kv_head_count is {kv_heads}, expected a divisor of the {heads} heads");
            return Err(source.wrong(problem));
        }
        let Some(width) = heads.checked_mul(head_dim) else {
            let problem = format!("{heads} heads of {head_dim} elements are more than 32 bits can count");
            return Err(source.wrong(problem));
        };
        if !head_dim.is_multiple_of(2) {
            let problem =
                format!("head_dim is {head_dim}, expected pairs of elements that are rotated together");
            return Err(source.wrong(problem));
        }
        for (name, number) in [("rope_theta", model.rope_theta), ("rms_norm_epsilon", model.rms_norm_epsilon)]
        {
            if !(number.is_finite() && number > 0.) {
                return Err(source.wrong(format!("{name} is {number}, expected a finite number above zero")));
            }
        }
        if !self.data_offset.is_multiple_of(ALIGNMENT) {
            let problem = format!("the tensor data at {} begins at no multiple of 64", self.data_offset);
            return Err(source.wrong(problem));
        }
        if u64::from(model.layer_count) * 9 + 2 > u64::from(self.tensor_count) {
            return Err(source.wrong(format!(
                "{} layers need {} tensors at least, and the directory has {}",
                model.layer_count,
                u64::from(model.layer_count) * 9 + 2,
                self.tensor_count
            )));
        }
        if source.strict && kv_heads != heads {
            return Err(
                source.wrong(format!("kv_head_count is {kv_heads}, expected the {heads} of head_count"))
            );
        }
        if source.strict && width != model.hidden_size {
            let problem =
                format!("{heads} heads of {head_dim} are not the hidden size {}", model.hidden_size);
            return Err(source.wrong(problem));
        }
        if model.vocab_size < LEAST_VOCAB {
            source.odd(format!("vocab_size is {}, expected at least {LEAST_VOCAB}", model.vocab_size))?;
        }
        if !self.directory.start.is_multiple_of(ALIGNMENT) {
            let start = self.directory.start;
            source.odd(format!("the tensor directory at {start} begins at no multiple of 64"))?;
        }
        Ok(())
    }
}
