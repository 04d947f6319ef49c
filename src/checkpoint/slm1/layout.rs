//! Where everything lies in an SLM1 file that is written: header, tokenizer, directory, weights.

use super::contract::hash;
use super::directory::{F32, Q4_0, Q8_0};
use super::header::{ALIGNMENT, ENTRY_BYTES, HEADER_BYTES, MAGIC};
use super::model::{Slm1Model, Slm1Tokenizer, DECODER, TIED};
use crate::format::Slm1Type;
use crate::{Error, Result};

/// What stands for the checksum, whose algorithm is not published: no file has 0.
const PLACEHOLDER: u64 = u64::from_le_bytes(*b"unknown!");

/// A tensor that is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slm1Entry {
    /// Its name in the format.
    pub name: String,
    /// Its shape, of one to four dimensions.
    pub dims: Vec<usize>,
    /// The type and the elements that share a scale; `None` for F32 numbers.
    pub signed: Option<(Slm1Type, usize)>,
}

/// Where a tensor lies, from the beginning of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slm1Place {
    /// The first byte of the numbers or codes.
    pub payload: u64,
    /// The first byte of the scales; 0 if there are none.
    pub scales: u64,
}

/// Where everything lies in a file.
///
/// The checksum in front of it is a placeholder, since its algorithm is not published: the program whose format it is refuses such a
/// file, as this crate's reader does with [`ChecksumPolicy::Verify`](super::ChecksumPolicy::Verify).
#[derive(Clone, Debug)]
pub struct Slm1Layout {
    /// Header, tokenizer and directory, up to the first weight.
    pub front: Vec<u8>,
    /// A place for each tensor.
    pub places: Vec<Slm1Place>,
    /// Bytes of the file.
    pub size: u64,
}

impl Slm1Layout {
    /// Lays out a file of these tensors in this order.
    ///
    /// # Errors
    /// If a number does not fit its field, or rows are no whole blocks.
    pub fn new(model: &Slm1Model, tokenizer: &Slm1Tokenizer, tensors: &[Slm1Entry]) -> Result<Self> {
        let Slm1Tokenizer { section: tokenizer, special_tokens } = tokenizer;
        let tokenizer_end = (HEADER_BYTES + tokenizer.len()) as u64;
        let directory = tokenizer_end.next_multiple_of(ALIGNMENT);
        let data = (directory + tensors.len() as u64 * ENTRY_BYTES).next_multiple_of(ALIGNMENT);
        let (mut end, mut places, mut entries) = (data, Vec::with_capacity(tensors.len()), Vec::new());
        for tensor in tensors {
            let Sizes { dtype, dims, payload, scales: size, block } = tensor.sizes()?;
            let mut place = |bytes: u64| {
                let at = end;
                end = at
                    .checked_add(bytes)
                    .and_then(|end| end.checked_next_multiple_of(ALIGNMENT))
                    .ok_or_else(|| tensor.wrong("a file that fits 64 bits"))?;
                Ok::<_, Error>(at)
            };
            let at = place(payload)?;
            let scales = if size == 0 { 0 } else { place(size)? };
            entries.extend(hash(&tensor.name).to_le_bytes());
            entries.extend(le(&[dtype, tensor.dims.len() as u32]));
            entries.extend(le(&dims));
            for number in [at, payload, scales] {
                entries.extend(number.to_le_bytes());
            }
            entries.extend(le(&[block, 0]));
            places.push(Slm1Place { payload: at, scales });
        }
        let mut front = MAGIC.to_vec();
        front.extend(le(&[1, HEADER_BYTES as u32, DECODER, if model.is_tied { TIED } else { 0 }]));
        front.extend(le(&[model.vocab_size, *special_tokens, model.hidden_size, model.layer_count]));
        front.extend(le(&[model.head_count, model.kv_head_count, model.head_dim, model.ffn_size]));
        front.extend(le(&[model.max_context]));
        front.extend(model.rope_theta.to_le_bytes());
        front.extend(model.rms_norm_epsilon.to_le_bytes());
        for number in [HEADER_BYTES as u64, tokenizer.len() as u64, directory] {
            front.extend(number.to_le_bytes());
        }
        front.extend(le(&[narrow("tensors", tensors.len())?]));
        for number in [data, PLACEHOLDER] {
            front.extend(number.to_le_bytes());
        }
        front.extend(tokenizer);
        front.resize(to_usize(directory)?, 0);
        front.extend(entries);
        front.resize(to_usize(data)?, 0);
        Ok(Self { front, places, size: end })
    }
}

/// What an entry says, and how many bytes its parts have.
struct Sizes {
    dtype: u32,
    dims: [u32; 4],
    payload: u64,
    scales: u64,
    block: u32,
}

impl Slm1Entry {
    fn wrong(&self, expected: &str) -> Error {
        Error::mismatch(format!("`{}`", self.name), expected, format!("{:?}, {:?}", self.dims, self.signed))
    }

    fn sizes(&self) -> Result<Sizes> {
        let mut dims = [0; 4];
        let k = self.dims.last().copied().unwrap_or(0);
        if self.dims.is_empty() || self.dims.len() > dims.len() || self.dims.contains(&0) {
            return Err(self.wrong("one to four dimensions, none of them zero"));
        }
        let is_whole = |(kind, block): (Slm1Type, usize)| match kind {
            Slm1Type::Q8_0 => block == k,
            Slm1Type::Q4_0 => block > 0 && block.is_multiple_of(2) && k.is_multiple_of(block),
        };
        if self.signed.is_some_and(|signed| !is_whole(signed)) {
            return Err(self.wrong("rows of whole blocks, an even number of elements in q4_0, a row in q8_0"));
        }
        for (field, dim) in dims.iter_mut().zip(&self.dims) {
            *field = narrow(&self.name, *dim)?;
        }
        let elements = self.dims.iter().try_fold(1u64, |all, dim| all.checked_mul(*dim as u64));
        let bytes = elements.and_then(|elements| elements.checked_mul(4)).zip(elements);
        let Some((as_f32, elements)) = bytes else { return Err(self.wrong("a tensor that fits 64 bits")) };
        let scales = |block: usize| elements / (block.max(1) as u64) * 4;
        Ok(match self.signed {
            None => Sizes { dtype: F32, dims, payload: as_f32, scales: 0, block: 0 },
            Some((kind, block)) => Sizes {
                dtype: match kind {
                    Slm1Type::Q8_0 => Q8_0,
                    Slm1Type::Q4_0 => Q4_0,
                },
                dims,
                payload: elements / (8 / kind.bits() as u64),
                scales: scales(block),
                block: narrow(&self.name, block)?,
            },
        })
    }
}

fn narrow(name: &str, number: usize) -> Result<u32> {
    u32::try_from(number)
        .map_err(|_| Error::mismatch(format!("`{name}`"), "sizes of 32 bits", number.to_string()))
}

fn to_usize(number: u64) -> Result<usize> {
    super::source::to_usize(number).ok_or_else(|| {
        Error::mismatch("an SLM1 file", "a front that fits the address space", number.to_string())
    })
}

fn le(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}
