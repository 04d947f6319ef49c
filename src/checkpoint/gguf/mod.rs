//! GGUF files, as llama.cpp and Ollama write them: one file (or its parts) with metadata and tensors.
//!
//! | type | becomes |
//! |---|---|
//! | F32, F16, BF16 | dense |
//! | Q4_0 .. Q8_1, Q2_K .. Q8_K | blocks, for kernels of this crate or of candle ([`GgmlWeight`](super::GgmlWeight)) |
//! | IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, Q1_0 | packed weights of this crate, codes and scales unchanged |
//! | IQ1, IQ2 and IQ3 types | packed weights of this crate, places in grids as codes of elements |
//! | MXFP4, NVFP4 | packed weights of this crate, codes and scales unchanged |
//! | others | an error when the tensor is asked for |

mod architectures;
mod blocks;
mod chat;
mod computed;
mod config;
mod form;
mod header;
mod metadata;
mod names;
mod pre_tokenizer;
mod rope;
mod rules;
mod split;
mod tokenizer;
mod value;

pub use form::{GgufForm, GgufKey, GgufKind, HeadRows};
pub use pre_tokenizer::gguf_pre_tokenizer;
pub use value::GgufValue;

pub(super) use header::MAGIC;
pub use names::module_of_gguf;
pub(super) use split::is_model;

use super::chat::StoredChatTemplates;
use super::container::{check_in_features, Container, Opened};
use super::file::{Opening, StoredTensor};
use super::kind::CheckpointKind;
use super::sidecar::SidecarFiles;
use super::tokenizer::StoredTokenizer;
use super::weight::{
    ggml_blocks, module_of, tensor_of, DenseTensor, GlobalScale, GlobalScaleMeaning, Kind, PackedWeight,
    Weight, EARLY_MXFP4,
};
use crate::{Error, Result};
use blocks::{Fp4, Fp4Blocks};
use computed::Computed;
use config::Source;
use header::Header;
use metadata::Metadata;
use names::Name;
use rules::Rules;
use safetensors::Dtype;
use split::SplitFile;
use std::collections::BTreeMap;
use std::path::Path;

const REMEDY: &str = "fetch or convert the model again";

struct GgufCheckpoint {
    tensors: BTreeMap<String, GgufTensor>,
    global_scales: BTreeMap<String, StoredTensor>,
    metadata: Metadata,
}

/// One tensor and where it lies.
struct GgufTensor {
    type_id: u32,
    kind: Option<(Kind, &'static str)>,
    dims: Vec<usize>,
    /// Its numbers, or its blocks as bytes.
    stored: StoredTensor,
    /// What the converter has made of the numbers.
    computed: Option<Computed>,
}

impl GgufTensor {
    /// Its numbers, as models have them.
    fn dense(&self, name: &str) -> Result<DenseTensor> {
        let stored = DenseTensor::new(name, &self.stored)?;
        Ok(match self.computed {
            None => stored,
            Some(computed) => computed.inverse(name, stored),
        })
    }
}

/// Opens the model whose file, or one of whose parts, is at `path`.
pub(super) fn open(path: &Path, opening: &Opening) -> Result<Opened> {
    let warnings = &opening.warnings;
    let (first, others) = split::open(path, opening)?;
    let SplitFile { header: Header { metadata, tensors: of_first }, file, divisors } = first;
    let divisors = others.iter().fold(divisors, |divisors, part| divisors.or(&part.divisors));
    let of_parts = others.iter().flat_map(|part| &part.header.tensors);
    let rules = Rules::of(&metadata, of_first.iter().chain(of_parts), warnings)?;
    let mut tensors = BTreeMap::new();
    let mut global_scales = BTreeMap::new();
    let of_others = others.into_iter().map(|part| (part.header.tensors, part.file));
    for (of_part, file) in std::iter::once((of_first, file)).chain(of_others) {
        for tensor in of_part {
            let gguf_name = tensor.name.clone();
            for (name, entry) in rules.entries(tensor, &file)? {
                let clash = match name {
                    Name::Unused => None,
                    Name::GlobalScale(of) => global_scales.insert(of.clone(), entry.stored).map(|_| of),
                    Name::Tensor(name) => tensors.insert(name.clone(), entry).map(|_| name),
                };
                if let Some(name) = clash {
                    let expected = format!("one tensor for `{name}`");
                    return Err(Error::tensor(path, gguf_name, expected, "several", REMEDY));
                }
            }
        }
    }
    let early = |entry: &&GgufTensor| entry.type_id == EARLY_MXFP4 && entry.kind.is_some();
    if let Some((name, _)) = tensors.iter().find(|(_, entry)| early(entry)) {
        warnings.add(format!(
            "{}: `{name}` and others are of type 4, taken for MXFP4 as early files of gpt-oss have it",
            path.display()
        ));
    }
    let config = match rules.architecture {
        None => serde_json::json!({"model_type": config::name_of(&metadata)}),
        Some(architecture) => {
            let embedding = tensors.get("model.embed_tokens.weight");
            config::config(&Source {
                metadata: &metadata,
                architecture,
                vocab_size: embedding.and_then(|entry| entry.dims.first().copied()),
                has_tensor: &|name: &str| tensors.contains_key(name),
                divisors: &divisors,
                has_tiled_outputs: rules.has_tiled_outputs(),
            })?
        }
    };
    let sidecars = SidecarFiles::Directory(path.parent().unwrap_or(Path::new("")).to_owned());
    let container = GgufCheckpoint { tensors, global_scales, metadata };
    Ok(Opened::new(CheckpointKind::Gguf, config, sidecars, container))
}

impl GgufCheckpoint {
    /// The global scale of a module of these dimensions.
    fn global_scale(&self, module: &str, dims: &[usize]) -> Result<Option<GlobalScale>> {
        let Some(stored) = self.global_scales.get(module) else {
            return Ok(None);
        };
        let one_each = matches!(dims, [experts, _, _] if stored.dims() == [*experts]);
        if stored.dtype() != Dtype::F32 || !(stored.dims() == [1] || one_each) {
            return Err(Error::tensor(
                stored.path(),
                tensor_of(module, "scale"),
                "F32, one value or one for each expert",
                format!("{:?} {:?}", stored.dtype(), stored.dims()),
                REMEDY,
            ));
        }
        Ok(Some(GlobalScale {
            tensor: stored.clone(),
            name: "scale",
            meaning: GlobalScaleMeaning::Multiplier,
        }))
    }

    fn fp4(&self, module: &str, entry: &GgufTensor, kind: Fp4) -> Result<Weight> {
        let blocks = Fp4Blocks {
            module: module.to_owned(),
            kind,
            dims: entry.dims.clone(),
            blocks: entry.stored.clone(),
            global_scale: self.global_scale(module, &entry.dims)?,
        };
        Ok(Weight::Packed(PackedWeight::new(module, kind.format(), entry.dims.clone(), blocks)))
    }

    fn unsupported(name: &str, entry: &GgufTensor) -> Error {
        let kind = entry.kind.map_or_else(|| format!("type {}", entry.type_id), |(_, kind)| kind.to_owned());
        Error::Unsupported {
            what: format!("{}: `{name}` of {kind}", entry.stored.path().display()),
            remedy: "use a file of Q1_0, Q4_0 to Q8_1, Q2_K to Q8_K, IQ1 to IQ4, TQ1_0, TQ2_0, MXFP4, NVFP4 or plain floats"
                .into(),
        }
    }
}

impl Container for GgufCheckpoint {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors.keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Option<Weight>> {
        let name = tensor_of(module, "weight");
        let Some(entry) = self.tensors.get(&name) else {
            return Ok(None);
        };
        check_in_features(entry.stored.path(), &name, &entry.dims, in_features)?;
        let Some((kind, _)) = entry.kind else {
            return Err(Self::unsupported(&name, entry));
        };
        // Of numbers that the converter computed, codes say nothing.
        if entry.computed.is_some() && !matches!(kind, Kind::Dense(_)) {
            return Err(Self::unsupported(&name, entry));
        }
        let weight = match kind {
            Kind::Mxfp4(nibbles) => return self.fp4(module, entry, Fp4::Mxfp4(nibbles)).map(Some),
            Kind::Nvfp4 => return self.fp4(module, entry, Fp4::Nvfp4).map(Some),
            Kind::Packed(codes) => {
                Weight::Packed(codes.weight(module, entry.dims.clone(), entry.stored.clone()))
            }
            Kind::Dense(_) => Weight::Dense(entry.dense(&name)?),
            Kind::Ggml(dtype) => {
                let weight = ggml_blocks::weight(module, &name, dtype, entry.dims.clone(), &entry.stored)?;
                weight.ok_or_else(|| Self::unsupported(&name, entry))?
            }
        };
        if self.global_scales.contains_key(module) {
            return Err(Error::Unsupported {
                what: format!("{}: `{name}` with a global scale", entry.stored.path().display()),
                remedy: "global scales are read beside MXFP4 and NVFP4; convert the model again".into(),
            });
        }
        Ok(Some(weight))
    }

    fn dense(&self, name: &str) -> Result<Option<DenseTensor>> {
        let Some(entry) = self.tensors.get(name) else {
            return Ok(None);
        };
        match entry.kind {
            Some((Kind::Dense(_), _)) => entry.dense(name).map(Some),
            None => Err(Self::unsupported(name, entry)),
            Some((_, kind)) => {
                let remedy = match module_of(name) {
                    Some(_) => "load the module's weight instead",
                    None => REMEDY,
                };
                Err(Error::tensor(entry.stored.path(), name, "a dense tensor", kind, remedy))
            }
        }
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.tensors.get(name).map(|entry| entry.stored.path())
    }

    fn tokenizer(&self) -> Result<Option<StoredTokenizer>> {
        tokenizer::read(&self.metadata)
    }

    fn metadata(&self) -> Option<BTreeMap<String, String>> {
        Some(self.metadata.texts())
    }

    fn gguf_values(&self) -> Option<BTreeMap<String, GgufValue>> {
        let values = self.metadata.values.iter();
        Some(values.map(|(key, value)| (key.clone(), GgufValue::of_read(value))).collect())
    }

    fn chat_templates(&self) -> Result<Option<StoredChatTemplates>> {
        chat::read(&self.metadata)
    }
}
