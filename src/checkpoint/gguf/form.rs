//! What files call the parts of a model, for whoever writes one: the tables of the reader, the other way round.

use super::architectures::{self, Architecture, KeyKind};
use super::config::{self, Source};
use super::metadata::Metadata;
use super::names::{self, Name};
use super::rope::Divisors;
use super::value::GgufValue;
use crate::checkpoint::family_layouts::is_one_plus_norm;
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// How GGUF files have the models of a type.
#[derive(Clone, Copy)]
pub struct GgufForm(&'static Architecture);

impl std::fmt::Debug for GgufForm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GgufForm({})", self.0.name)
    }
}

/// A value of the metadata that is a field of the config.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct GgufKey {
    /// The key, without the architecture's name before it.
    pub key: &'static str,
    /// The field.
    pub field: &'static str,
    /// Whether it is a whole number, a number, or neither.
    pub kind: GgufKind,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufKind {
    /// A whole number.
    Size,
    /// A number.
    Number,
    /// Yes or no.
    Flag,
}

/// Which heads the rows of a projection belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeadRows {
    /// Those of queries.
    Queries,
    /// Those of keys.
    Keys,
}

impl GgufForm {
    /// That of a model type of configs; `None` if no file has such models.
    pub fn of_type(model_type: &str) -> Option<Self> {
        architectures::all().find(|architecture| architecture.model_type == model_type).map(Self)
    }

    /// What files call it, and before the keys that belong to the model.
    pub fn architecture(self) -> &'static str {
        self.0.name
    }

    /// Whether everything that the reader undoes is what a writer here does: not the heads of linear attention, nor latents.
    pub fn is_writable(self) -> bool {
        self.0.linear.is_none() && !self.0.has_latents
    }

    /// What a tensor is called in a file; `None` if no file has it.
    pub fn name_of(self, tensor: &str) -> Option<String> {
        names::written(tensor, self.0)
    }

    /// Whether a file has one more than each number of a tensor.
    pub fn is_sum(self, tensor: &str) -> bool {
        self.0.norms_are_sums && is_one_plus_norm(tensor)
    }

    /// Whose rows a tensor has in the order of adjacent pairs, if it has: element `2i` of a head in a file is element `i`, and
    /// `2i + 1` the one half a head behind it.
    pub fn paired_rows(self, tensor: &str) -> Option<HeadRows> {
        let (module, _) = tensor.rsplit_once('.')?;
        let rows = [("q_proj", HeadRows::Queries), ("k_proj", HeadRows::Keys)];
        let found = rows.into_iter().find(|(part, _)| module.ends_with(&format!(".self_attn.{part}")));
        found.map(|(_, rows)| rows).filter(|_| self.0.is_paired)
    }

    /// The values of its own metadata that are fields of the config.
    pub fn keys(self) -> impl Iterator<Item = GgufKey> {
        self.0.keys.iter().map(|key| GgufKey {
            key: key.key,
            field: key.field,
            kind: match key.kind {
                KeyKind::Size | KeyKind::Index => GgufKind::Size,
                KeyKind::Number => GgufKind::Number,
                KeyKind::Flag => GgufKind::Flag,
            },
        })
    }

    /// How files number what makes scores of a router's logits, if they say it.
    pub fn scores(self) -> Option<u32> {
        self.0.scores
    }

    /// The config that a reader makes of a file with this metadata, these tensors (by the names that models have), and these
    /// factors of the rotary embedding (by the names of their tensors).
    ///
    /// # Errors
    /// If the reader would refuse it.
    pub fn config_of(
        path: &Path,
        values: &BTreeMap<String, GgufValue>,
        tensors: &BTreeMap<String, Vec<usize>>,
        factors: &BTreeMap<&'static str, Vec<f32>>,
    ) -> Result<Value> {
        let read = values.iter().map(|(key, value)| (key.clone(), value.read())).collect();
        let metadata = Metadata { path: path.into(), values: read };
        let Some(architecture) = architectures::of(&metadata)? else {
            return Err(Error::file(path, "metadata of no known architecture", "report this"));
        };
        let mut divisors = Divisors::default();
        for (name, factors) in factors {
            if let Some(place) = divisors.of_name(name) {
                *place = Some(factors.clone());
            }
        }
        let wrong = tensors.keys().find(|name| {
            let written = names::written(name, architecture);
            written.is_none_or(|written| {
                names::translate(&written, architecture) != Name::Tensor((*name).clone())
            })
        });
        if let Some(name) = wrong {
            return Err(Error::Unsupported {
                what: format!(
                    "{}: `{name}` in a GGUF file of the architecture `{}`",
                    path.display(),
                    architecture.name
                ),
                remedy: "no such file has it; convert to another kind".into(),
            });
        }
        config::config(&Source {
            metadata: &metadata,
            architecture,
            vocab_size: tensors.get("model.embed_tokens.weight").and_then(|dims| dims.first().copied()),
            has_tensor: &|name: &str| tensors.contains_key(name),
            divisors: &divisors,
            has_tiled_outputs: false,
        })
    }
}
