//! Which stored tensors answer for a name, by names alone.

use super::expert_name::{join, split_last, ExpertName};
use crate::checkpoint::container::Container;
use crate::checkpoint::weight::module_of;
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// Which tensor of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Weight,
    Bias,
}

impl Part {
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Bias => "bias",
        }
    }

    /// The dimensions of that of one layer.
    pub fn rank(self) -> usize {
        match self {
            Self::Weight => 2,
            Self::Bias => 1,
        }
    }
}

/// Where a weight comes from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source {
    /// A module that is stored.
    Stored(String),
    /// A stack of experts that is stored as a parameter, without `.weight`.
    Parameter(String),
    /// One matrix of a stack.
    Matrix(Box<Source>, usize),
    /// Some rows of a fused projection.
    Rows(Box<Source>, Rows),
    /// One after another along the rows.
    Joined(Vec<Source>),
    /// Each a matrix of a stack.
    Stacked(Vec<Source>),
}

/// Which rows of a fused projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    FirstHalf,
    SecondHalf,
    Queries,
    Keys,
    Values,
}

impl Source {
    /// The first of the stored tensors, and whether it is a parameter.
    pub fn first(&self) -> Option<(&str, bool)> {
        match self {
            Self::Stored(module) => Some((module, false)),
            Self::Parameter(name) => Some((name, true)),
            Self::Matrix(of, _) | Self::Rows(of, _) => of.first(),
            Self::Joined(parts) | Self::Stacked(parts) => parts.first()?.first(),
        }
    }
}

impl Source {
    /// All of the stored tensors, and whether each is a parameter.
    pub fn all(&self) -> Vec<(&str, bool)> {
        match self {
            Self::Stored(module) => vec![(module, false)],
            Self::Parameter(name) => vec![(name, true)],
            Self::Matrix(of, _) | Self::Rows(of, _) => of.all(),
            Self::Joined(parts) | Self::Stacked(parts) => parts.iter().flat_map(Self::all).collect(),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.first().map_or("", |(module, _)| module))
    }
}

/// Finds what answers for a name.
pub(super) struct Finder<'a> {
    pub container: &'a dyn Container,
    /// What was opened, for errors.
    pub path: &'a Path,
    pub part: Part,
    /// Whether the head is the embedding.
    pub is_tied: bool,
}

impl Finder<'_> {
    /// # Errors
    /// If some experts of a stack are missing.
    pub fn find(&self, module: &str) -> Result<Option<Source>> {
        if let Some(name) = ExpertName::parse(module) {
            return match name.expert {
                Some(expert) => Ok(self.expert(name, expert)),
                None => self.stack(name),
            };
        }
        let (parent, name) = split_last(module);
        if ["vision", "visual", "audio"].iter().any(|tower| module.contains(tower)) {
            // The config that is at hand is that of the text.
            return Ok(None);
        }
        let of_parts = fused(name, |name| self.module(join(parent, name)));
        Ok(of_parts.or_else(|| (name == "lm_head").then(|| self.tied_head(parent))?))
    }

    fn has(&self, module: &str) -> bool {
        self.container.contains(&self.part.of(module))
    }

    fn module(&self, module: String) -> Option<Source> {
        self.has(&module).then_some(Source::Stored(module))
    }

    fn expert(&self, name: ExpertName, expert: usize) -> Option<Source> {
        fused(name.projection, |projection| {
            let name = ExpertName { projection, ..name };
            let of_stack = || self.stored_stack(name).map(|stack| Source::Matrix(Box::new(stack), expert));
            self.stored_expert(name, expert).or_else(of_stack)
        })
    }

    fn stack(&self, name: ExpertName) -> Result<Option<Source>> {
        let of_stacks =
            fused(name.projection, |projection| self.stored_stack(ExpertName { projection, ..name }));
        if of_stacks.is_some() {
            return Ok(of_stacks);
        }
        let of_expert = |expert: usize| {
            fused(name.projection, |projection| self.stored_expert(ExpertName { projection, ..name }, expert))
        };
        let experts = self.experts_of(name);
        let mut all = Vec::new();
        // One is missing as well as many: numbers from a file are not trusted to be counts.
        for expert in 0..experts.len() {
            match of_expert(expert) {
                Some(source) => all.push(source),
                None => {
                    let tensor = name.of_expert(expert).next().map(|module| self.part.of(&module));
                    let expected =
                        format!("a tensor of this name, as of expert {:?}", experts.last().unwrap_or(&0));
                    let remedy = "fetch or convert the file again";
                    return Err(Error::tensor(
                        self.path,
                        tensor.unwrap_or_default(),
                        expected,
                        "none",
                        remedy,
                    ));
                }
            }
        }
        Ok((!all.is_empty()).then_some(Source::Stacked(all)))
    }

    fn stored_expert(&self, name: ExpertName, expert: usize) -> Option<Source> {
        name.of_expert(expert).find_map(|module| self.module(module))
    }

    fn stored_stack(&self, name: ExpertName) -> Option<Source> {
        let stored = |module: String| match self.part {
            Part::Weight if self.container.contains(&module) => Some(Source::Parameter(module)),
            Part::Bias if self.container.contains(&format!("{module}_bias")) => {
                Some(Source::Parameter(format!("{module}_bias")))
            }
            Part::Weight | Part::Bias => self.module(module),
        };
        name.of_stack().find_map(stored)
    }

    /// The experts of a block, by any of their projections.
    fn experts_of(&self, name: ExpertName) -> BTreeSet<usize> {
        let module = |tensor| match self.part {
            Part::Weight => module_of(tensor),
            Part::Bias => tensor.strip_suffix(".bias"),
        };
        let names = self.container.names().filter_map(module).filter_map(ExpertName::parse);
        names.filter(|found| found.block == name.block).filter_map(|found| found.expert).collect()
    }

    /// The embedding, where multimodal checkpoints have it beside the head, too: transformers calls it
    /// `model.language_model.embed_tokens` beside `lm_head`, and mlx-vlm, as older transformers, everything
    /// `language_model.` and then as a text model does.
    fn tied_head(&self, parent: &str) -> Option<Source> {
        let paths = ["model", "model.language_model", "language_model.model", ""].into_iter();
        let embeddings = paths.map(|path| join(path, "embed_tokens"));
        let mut embeddings = embeddings.map(|embedding| join(parent, &embedding));
        embeddings
            .find_map(|embedding| self.module(embedding))
            .filter(|_| self.is_tied && self.part == Part::Weight)
    }
}

/// A projection of one parent: stored, rows of the fused one, or the parts one after another. `get` returns what is
/// stored under the name of a projection.
fn fused(name: &str, get: impl Fn(&'static str) -> Option<Source>) -> Option<Source> {
    let rows = |fused: &'static str, rows| Some(Source::Rows(Box::new(get(fused)?), rows));
    let join = |parts: &[&'static str]| {
        Some(Source::Joined(parts.iter().map(|part| get(part)).collect::<Option<_>>()?))
    };
    match name {
        "gate_proj" => get("gate_proj").or_else(|| rows("gate_up_proj", Rows::FirstHalf)),
        "up_proj" => get("up_proj").or_else(|| rows("gate_up_proj", Rows::SecondHalf)),
        "gate_up_proj" => get("gate_up_proj").or_else(|| join(&["gate_proj", "up_proj"])),
        "down_proj" => get("down_proj"),
        "q_proj" => rows("qkv_proj", Rows::Queries),
        "k_proj" => rows("qkv_proj", Rows::Keys),
        "v_proj" => rows("qkv_proj", Rows::Values),
        "qkv_proj" => join(&["q_proj", "k_proj", "v_proj"]),
        _ => None,
    }
}
