//! SLM1 files, version 1: one file with header, tokenizer, hashed names, and tensors of F32 or of signed codes
//! with F32 scales.
//!
//! [`Checkpoint::open`] opens them leniently; [`open`] with [`Slm1Options`], and with what there is to learn besides
//! weights.
//!
//! ```no_run
//! use candle_quant::checkpoint::slm1::{self, Slm1Options};
//!
//! let options = Slm1Options { nibbles: slm1::NibbleOrder::HalfBlock, ..Slm1Options::default() };
//! let file = slm1::open("model.slm", &options)?;
//! let names: Vec<&str> = file.checkpoint().tensor_names().collect();
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! The format is published in part. Its checksum is not, so that a file counts as unverified, with a warning,
//! unless the caller brings a function for it.

mod contract;
mod directory;
mod header;
mod layout;
mod model;
mod options;
mod signed;
mod source;
mod tokenizer;
mod verify;

pub(super) use header::MAGIC;
pub use layout::{Slm1Entry, Slm1Layout, Slm1Place};
pub use model::{Slm1Model, Slm1Tokenizer};
pub use options::{ChecksumPolicy, NibbleOrder, Slm1Options, TokenizerKind, Verification};

use super::container::{check_in_features, Container, Opened};
use super::file::{DataFile, Opening, StoredTensor, TensorInfo, Warnings};
use super::kind::CheckpointKind;
use super::opened::Checkpoint;
use super::sidecar::SidecarFiles;
use super::weight::{halves_of_pairs, tensor_of, DenseTensor, PackedWeight, Weight};
use crate::{Error, QuantFormat, Result};
use candle_core::DType;
pub use contract::Slm1Tensor;
use directory::{DirectoryEntry, Encoding};
use header::{Header, HEADER_BYTES};
use safetensors::Dtype;
use serde_json::Value;
use signed::{Bits, SignedBlocks};
use source::{to_usize, Source, REMEDY};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// An open SLM1 file.
#[derive(Clone, Debug)]
pub struct Slm1 {
    checkpoint: Checkpoint,
    tokenizer: Vec<u8>,
    verification: Verification,
}

impl Slm1 {
    /// The weights, and the config that the header stands for.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The tokenizer section as it stands in the file; empty if there is none.
    pub fn tokenizer_bytes(&self) -> &[u8] {
        &self.tokenizer
    }

    /// The kind of the tokenizer section; `None` if there is none.
    pub fn tokenizer_kind(&self) -> Option<TokenizerKind> {
        tokenizer::kind(&self.tokenizer)
    }

    /// Whether the content was compared with a checksum.
    pub fn verification(&self) -> Verification {
        self.verification
    }
}

/// Opens an SLM1 file. No weight is read but its scales, which are checked: it takes time for each of them.
///
/// # Errors
/// If the file is damaged, contradicts itself, is not what a checksum says, or is not as published and
/// `options` are strict.
pub fn open(path: impl AsRef<Path>, options: &Slm1Options) -> Result<Slm1> {
    let (path, opening) = (path.as_ref(), Opening::default());
    let (opened, tokenizer, verification) = open_parts(path, options, &opening)?;
    Ok(Slm1 { checkpoint: Checkpoint::new(path, opened, opening), tokenizer, verification })
}

/// Opens a file as [`Checkpoint::open`] does.
pub(super) fn open_default(path: &Path, opening: &Opening) -> Result<Opened> {
    let options = Slm1Options { reads: opening.reads, ..Slm1Options::default() };
    open_parts(path, &options, opening).map(|(opened, ..)| opened)
}

fn open_parts(
    path: &Path,
    options: &Slm1Options,
    opening: &Opening,
) -> Result<(Opened, Vec<u8>, Verification)> {
    let warnings = &opening.warnings;
    let mut source = Source::open(path, options.strict, warnings)?;
    let header = Header::read(&mut source)?;
    for bytes in [0..HEADER_BYTES as u64, header.tokenizer.clone(), header.directory.clone()] {
        opening.spend_bytes(path, bytes.end.saturating_sub(bytes.start))?;
    }
    opening.spend_entries(path, header.tensor_count.into(), 1)?;
    let known = if header.is_decoder { contract::tensors(&header.model) } else { BTreeMap::new() };
    let name_of = |hash: u64| match known.get(&hash) {
        Some(known) => known.name.clone(),
        None => format!("hash {hash:#018x}"),
    };
    let entries = directory::read(&mut source, &header, name_of)?;
    let expected = known.values().filter(|known| known.required).count();
    if entries.len() < expected {
        let problem = format!("{} tensors, expected {expected} for this model", entries.len());
        return Err(source.wrong(problem));
    }
    for (hash, entry) in &entries {
        check_numbers(&mut source, &name_of(*hash), entry)?;
        check_shape(&source, known.get(hash), *hash, entry)?;
    }
    if let Some((_, missing)) =
        known.iter().find(|(hash, known)| known.required && !entries.contains_key(hash))
    {
        let expected = match header.model.is_tied {
            false if missing.name == "output.weight" => {
                "this tensor, as the flag of a tied output is not set"
            }
            _ => "this tensor",
        };
        return Err(Error::tensor(path, &missing.name, expected, "none", REMEDY));
    }
    let section = source.read_range(header.tokenizer.clone())?;
    let front = tokenizer::front(&section);
    if let Some(front) = front.as_ref().filter(|front| front.vocab_size != header.model.vocab_size) {
        let problem =
            format!("the tokenizer has {} tokens, the model {}", front.vocab_size, header.model.vocab_size);
        return Err(source.wrong(problem));
    }
    let verification = verify::verify(&mut source, &header, options)?;
    if verification == Verification::Unverified {
        warnings.add(format!(
            "{}: nothing was compared with the content: the algorithm of the checksum is not published",
            path.display()
        ));
    }
    let file = DataFile::new(path, source.file, options.reads)?;
    let mut tensors = BTreeMap::new();
    for (hash, entry) in entries {
        let known = known.get(&hash);
        let name = known.map_or_else(|| format!("slm1.{hash:016x}"), |known| known.model_name.clone());
        let heads = known.and_then(|known| known.heads);
        let order = heads.map(|heads| halves_of_pairs(heads, header.model.head_dim as usize));
        let tensor = Stored::new(&file, &name, entry, order, options.nibbles, warnings)?;
        tensors.insert(name, tensor);
    }
    let sidecars = SidecarFiles::Directory(path.parent().unwrap_or(Path::new("")).to_owned());
    let config = match (header.is_decoder, front) {
        (false, _) => Value::Null,
        (true, None) => header.model.config(None),
        (true, Some(front)) => header.model.config(Some((front.bos, front.eos))),
    };
    let tokenizer = Slm1Tokenizer { section: section.clone(), special_tokens: header.special_tokens };
    let container = Slm1Checkpoint { tensors, tokenizer };
    let opened = Opened::new(CheckpointKind::Slm1, config, sidecars, container);
    Ok((opened, section, verification))
}

/// Scales are finite and positive; F32 values are finite if the file is read strictly.
fn check_numbers(source: &mut Source, name: &str, entry: &DirectoryEntry) -> Result<()> {
    let (range, what, is_valid): (_, _, fn(f32) -> bool) = match entry.encoding {
        Encoding::F32 if !source.strict => return Ok(()),
        Encoding::F32 => (entry.payload.clone(), "finite values", f32::is_finite),
        Encoding::Q8 | Encoding::Q4 { .. } => {
            (entry.scales.clone(), "finite scales above zero", |scale| scale.is_finite() && scale > 0.)
        }
    };
    let mut wrong = None;
    source.for_each_piece(range, |piece| {
        let mut values = piece.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        wrong = wrong.or_else(|| values.find(|value| !is_valid(*value)));
    })?;
    match wrong {
        None => Ok(()),
        Some(value) => Err(Error::tensor(source.path, name, what, value.to_string(), REMEDY)),
    }
}

fn check_shape(source: &Source, known: Option<&Slm1Tensor>, hash: u64, entry: &DirectoryEntry) -> Result<()> {
    match known {
        None => source.odd(format!("the tensor of hash {hash:#018x} is not one of the model's")),
        Some(known) if known.dims == entry.dims => Ok(()),
        Some(known) => {
            let (expected, found) = (format!("shape {:?}", known.dims), format!("{:?}", entry.dims));
            Err(Error::tensor(source.path, &known.name, expected, found, REMEDY))
        }
    }
}

struct Slm1Checkpoint {
    tensors: BTreeMap<String, Stored>,
    tokenizer: Slm1Tokenizer,
}

/// A tensor, and what it becomes.
enum Stored {
    Plain(StoredTensor),
    Packed(QuantFormat, SignedBlocks),
    Dequantized(SignedBlocks),
}

impl Stored {
    fn new(
        file: &Arc<DataFile>,
        name: &str,
        entry: DirectoryEntry,
        order: Option<Arc<[usize]>>,
        nibbles: NibbleOrder,
        warnings: &Warnings,
    ) -> Result<Self> {
        let DirectoryEntry { encoding, dims, payload, scales } = entry;
        let tensor =
            |dtype, dims: Vec<usize>, range: Range<u64>| match (to_usize(range.start), to_usize(range.end)) {
                (Some(start), Some(end)) => {
                    StoredTensor::new(file, name, TensorInfo { dtype, dims: dims.into(), range: start..end })
                }
                _ => Err(Error::mismatch(name, "offsets within the address space", format!("{range:?}"))),
            };
        let in_order = |tensor: StoredTensor| match &order {
            None => Ok(tensor),
            Some(order) => tensor.reordered(order),
        };
        let cols = dims.last().copied().unwrap_or(0);
        let (bits, block) = match encoding {
            Encoding::F32 => return Ok(Self::Plain(in_order(tensor(Dtype::F32, dims, payload)?)?)),
            Encoding::Q8 => (Bits::Eight, cols),
            Encoding::Q4 { block } => (Bits::Four(nibbles), block),
        };
        let codes = in_order(tensor(Dtype::U8, vec![], payload)?)?;
        let scales = in_order(tensor(Dtype::F32, vec![], scales)?)?;
        let blocks = SignedBlocks::new(bits, dims, codes, scales, block);
        if let Some(format) = blocks.format {
            return Ok(Self::Packed(format, blocks));
        }
        if blocks.dims.len() > 1 {
            warnings.once(
                format!("dequantized, blocks of {block}"),
                format!(
                    "{}: `{name}` and others alike are dequantized when they are loaded: one scale for {block} elements \
                     is no whole number of groups of 32",
                    blocks.codes.path().display()
                ),
            );
        }
        Ok(Self::Dequantized(blocks))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Plain(tensor) => tensor.path(),
            Self::Packed(_, blocks) | Self::Dequantized(blocks) => blocks.codes.path(),
        }
    }

    fn dims(&self) -> &[usize] {
        match self {
            Self::Plain(tensor) => tensor.dims(),
            Self::Packed(_, blocks) | Self::Dequantized(blocks) => &blocks.dims,
        }
    }
}

impl Container for Slm1Checkpoint {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors.keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Option<Weight>> {
        let name = tensor_of(module, "weight");
        // Tensors that are not the model's have no suffix.
        let name = if self.tensors.contains_key(&name) { &name } else { module };
        let Some(stored) = self.tensors.get(name) else {
            return Ok(None);
        };
        check_in_features(stored.path(), name, stored.dims(), in_features)?;
        match stored {
            Stored::Packed(format, blocks) => {
                let packed = PackedWeight::new(module, *format, blocks.dims.clone(), blocks.clone());
                Ok(Some(Weight::Packed(packed)))
            }
            Stored::Plain(_) | Stored::Dequantized(_) => Ok(self.dense(name)?.map(Weight::Dense)),
        }
    }

    fn dense(&self, name: &str) -> Result<Option<DenseTensor>> {
        match self.tensors.get(name) {
            None => Ok(None),
            Some(Stored::Plain(tensor)) => DenseTensor::new(name, tensor).map(Some),
            Some(Stored::Dequantized(blocks)) => {
                Ok(Some(DenseTensor::dequantized(name, DType::F32, blocks.dims.clone(), blocks.clone())))
            }
            Some(Stored::Packed(_, blocks)) => Err(Error::tensor(
                blocks.codes.path(),
                name,
                "a dense tensor",
                "a packed weight",
                "load the module's weight instead",
            )),
        }
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.tensors.get(name).map(Stored::path)
    }

    fn slm1_tokenizer(&self) -> Option<&Slm1Tokenizer> {
        Some(&self.tokenizer)
    }
}
