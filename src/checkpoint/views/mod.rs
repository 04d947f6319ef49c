//! Names that a checkpoint does not have, and what answers for them.
//!
//! The same weights have different names: writers stack experts or do not, fuse projections or do not, and leave out a
//! head that is the embedding. A model asks for the names that its author knew. If the checkpoint lacks one, the
//! weight comes from what it has:
//!
//! | asked for | stored | read |
//! |---|---|---|
//! | `B.experts.3.gate_proj`, `B.experts.3.w1` | `B.switch_mlp.gate_proj` or `B.experts.gate_proj` | one matrix of the stack |
//! | the same | `B.experts.gate_up_proj` | half of the rows of one matrix |
//! | `B.switch_mlp.gate_proj`, `B.experts.gate_proj` | either, `B.experts.gate_up_proj`, or `B.experts.0.gate_proj` and so on | all |
//! | `A.q_proj`, `A.k_proj`, `A.v_proj` | `A.qkv_proj` | the rows of its heads, as the config counts them |
//! | `A.gate_proj`, `A.up_proj` | `A.gate_up_proj` | half of the rows |
//! | `A.qkv_proj`, `A.gate_up_proj` | the parts | all, one after another |
//! | `lm_head` | `model.embed_tokens`, if the config ties them | all |
//!
//! So do up and down projections (`w3` and `w2` of Mixtral), and the biases of all but the head. Weights stay packed, and
//! nothing is read before a weight is loaded. A name that is stored is never answered for by another one.

mod arranged;
mod composed;
mod expert_name;
mod rows;
mod source;

use super::container::Container;
use super::weight::{module_of, tensor_of, DenseTensor, Weight};
use crate::{Error, Result};
use arranged::{Arranged, Order};
use composed::{Composed, How};
use rows::{ModelConfig, Problem};
use serde_json::Value;
use source::{Finder, Part, Rows, Source};
use std::path::Path;

const REMEDY: &str = "check that config.json belongs to these weights";

/// The weights of a checkpoint under the names that it does not have.
pub(super) struct Views<'a> {
    container: &'a dyn Container,
    config: ModelConfig<'a>,
    /// What was opened, for errors.
    path: &'a Path,
}

/// What is asked for.
struct Request<'a> {
    module: &'a str,
    part: Part,
    in_features: Option<usize>,
}

impl<'a> Views<'a> {
    /// Those of `container`, whose config is `config`; `path` is what was opened.
    pub fn new(container: &'a dyn Container, config: &'a Value, path: &'a Path) -> Self {
        Self { container, config: ModelConfig(config), path }
    }

    /// The weight of a module that has none of its own; `None` if nothing answers for it.
    pub fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Option<Weight>> {
        self.view(&Request { module, part: Part::Weight, in_features })
    }

    /// A tensor that is not quantized, by its full name; `None` if nothing answers for it.
    pub fn dense(&self, name: &str) -> Result<Option<DenseTensor>> {
        let Some((module, part)) = split(name) else { return Ok(None) };
        match self.view(&Request { module, part, in_features: None })? {
            None => Ok(None),
            Some(Weight::Dense(dense)) => Ok(Some(dense)),
            Some(weight) => Err(Error::tensor(
                self.file_of(name).unwrap_or(self.path),
                name,
                "a dense tensor",
                format!("a weight of {}", weight.format_name()),
                "load the module's weight instead",
            )),
        }
    }

    /// Whether something answers for a full name.
    pub fn contains(&self, name: &str) -> bool {
        // What fails here fails again, with its reason, when the tensor is asked for.
        split(name).is_some_and(|(module, part)| !matches!(self.find(module, part), Ok(None)))
    }

    /// The file that holds what answers for a full name, or a part of it.
    pub fn file_of(&self, name: &str) -> Option<&'a Path> {
        let (module, part) = split(name)?;
        self.file_of_source(&self.find(module, part).ok()??, part)
    }

    /// The full names of what answers for a full name.
    pub fn answering(&self, name: &str) -> Vec<String> {
        let Some((module, part)) = split(name) else { return Vec::new() };
        let Ok(Some(source)) = self.find(module, part) else { return Vec::new() };
        let full = |(name, is_parameter): (&str, bool)| {
            if is_parameter {
                name.to_owned()
            } else {
                part.of(name)
            }
        };
        source.all().into_iter().map(full).collect()
    }

    fn find(&self, module: &str, part: Part) -> Result<Option<Source>> {
        let (container, path, is_tied) = (self.container, self.path, self.config.is_tied());
        Finder { container, path, part, is_tied }.find(module)
    }

    fn file_of_source(&self, source: &Source, part: Part) -> Option<&'a Path> {
        let (module, is_parameter) = source.first()?;
        let name = if is_parameter { module.to_owned() } else { part.of(module) };
        self.container.file_of(&name)
    }

    fn view(&self, request: &Request) -> Result<Option<Weight>> {
        let source = self.find(request.module, request.part)?;
        source.map(|source| self.build(&source, request)).transpose()
    }

    fn build(&self, source: &Source, request: &Request) -> Result<Weight> {
        match source {
            Source::Stored(module) => self.stored(module, request),
            Source::Parameter(name) => self.parameter(name, request),
            Source::Matrix(stack, index) => self.matrix(stack, *index, request),
            Source::Rows(fused, rows) => self.rows(fused, *rows, request),
            Source::Joined(parts) => {
                if let Some(found) = self.config.other_order(request.module) {
                    let expected = "a model whose parts are one after another";
                    return Err(self.error(
                        source,
                        request,
                        expected,
                        found,
                        "ask for the parts by their own names",
                    ));
                }
                let (parts, dim) = self.alike(parts, true, request)?;
                self.compose(How::Joined { parts, dim }, source, request)
            }
            Source::Stacked(parts) => {
                let (parts, _) = self.alike(parts, false, request)?;
                self.compose(How::Stacked(parts), source, request)
            }
        }
    }

    fn error(
        &self,
        source: &Source,
        request: &Request,
        expected: impl Into<String>,
        found: impl Into<String>,
        remedy: &str,
    ) -> Error {
        let file = self.file_of_source(source, request.part).unwrap_or(self.path);
        Error::tensor(file, request.part.of(request.module), expected, found, remedy)
    }

    fn matrix(&self, source: &Source, index: usize, request: &Request) -> Result<Weight> {
        let stack = self.build(source, request)?;
        let rank = request.part.rank() + 1;
        let experts = stack.dims().first().copied().filter(|_| stack.dims().len() == rank);
        let Some(experts) = experts else {
            let expected = format!("`{source}` to be a stack of experts, of {rank} dimensions");
            return Err(self.error(source, request, expected, format!("{:?}", stack.dims()), REMEDY));
        };
        if index >= experts {
            let expected = format!("an expert below {experts}, as `{source}` has");
            return Err(self.error(source, request, expected, index.to_string(), REMEDY));
        }
        let one = stack.narrow(0, index..index + 1)?;
        self.compose(How::Matrix(Box::new(one)), source, request)
    }

    fn rows(&self, source: &Source, rows: Rows, request: &Request) -> Result<Weight> {
        let fused = self.build(source, request)?;
        let dim = fused.dims().len().checked_sub(request.part.rank());
        let Some((dim, count)) = dim.and_then(|dim| Some((dim, *fused.dims().get(dim)?))) else {
            let expected = format!("`{source}` to have rows");
            return Err(self.error(source, request, expected, format!("{:?}", fused.dims()), REMEDY));
        };
        if let (Weight::Dense(stored), true) = (&fused, self.alternates(source)) {
            let is_second = rows == Rows::SecondHalf;
            if dim == 1 && count.is_multiple_of(2) && (is_second || rows == Rows::FirstHalf) {
                let (stored, how) = (stored.clone(), Order::EverySecond { is_second });
                return Ok(Arranged { stored, how }.into_weight(&request.part.of(request.module)));
            }
        }
        let range = self.config.range(rows, count, request.module).map_err(|problem| match problem {
            Problem::Count { expected } => {
                let expected = format!("`{source}` of {expected} rows");
                self.error(source, request, expected, count.to_string(), REMEDY)
            }
            Problem::Order { found } => {
                let expected = "a model whose parts are one after another";
                let remedy = "use a checkpoint that stores the parts";
                self.error(source, request, expected, format!("`{source}` of {found}"), remedy)
            }
        })?;
        fused.narrow(dim, range)
    }

    /// Whether a fused stack has rows of both projections in turn, which is known of parameters as transformers has them.
    fn alternates(&self, source: &Source) -> bool {
        let Source::Parameter(name) = source else { return false };
        let Ok(Some(stored)) = self.container.dense(name) else { return false };
        let is_transposed = || stored.dims().get(1).copied() == self.config.size("hidden_size");
        self.config.has_alternating_stacks() && (name.ends_with("_bias") || is_transposed())
    }

    fn stored(&self, module: &str, request: &Request) -> Result<Weight> {
        let name = request.part.of(module);
        let found = match request.part {
            Part::Weight => self.container.weight(module, request.in_features)?,
            Part::Bias => self.container.dense(&name)?.map(Weight::Dense),
        };
        found.ok_or_else(|| Error::tensor(self.path, name, "a tensor of this name", "none", REMEDY))
    }

    /// A stack of experts that is a parameter of its own name. Dense ones of some models have rows for columns: what
    /// is not certain to be otherwise is refused.
    fn parameter(&self, name: &str, request: &Request) -> Result<Weight> {
        if request.part == Part::Bias {
            let found = self.container.dense(name)?.map(Weight::Dense);
            return found
                .ok_or_else(|| Error::tensor(self.path, name, "a tensor of this name", "none", REMEDY));
        }
        let weight = match self.container.weight(name, request.in_features)? {
            Some(weight) => Some(weight),
            None => self.container.dense(name)?.map(Weight::Dense),
        };
        let hidden = self.config.size("hidden_size");
        let weight = match weight {
            // With the K of gate and up projections, and the N of down projections.
            Some(Weight::Dense(dense)) if self.config.has_transposed_stacks() && dense.dtype().is_float() => {
                let k = if name.ends_with(".down_proj") { dense.dims().get(2) } else { dense.dims().get(1) };
                match k.copied() == hidden && hidden.is_some() && dense.dims().len() == 3 {
                    true => return Ok(Arranged { stored: dense, how: Order::Transposed }.into_weight(name)),
                    false => Some(Weight::Dense(dense)),
                }
            }
            weight => weight,
        };
        let certain = match &weight {
            Some(Weight::Dense(dense)) if !dense.dtype().is_float() => false,
            Some(Weight::Dense(dense)) => match (dense.dims(), name.ends_with(".down_proj")) {
                ([_, n, k], true) => hidden == Some(*n) && n != k,
                ([_, n, k], false) => hidden == Some(*k) && n != k,
                _ => false,
            },
            _ => true,
        };
        match weight {
            Some(weight) if certain => Ok(weight),
            weight => Err(Error::tensor(
                self.container.file_of(name).unwrap_or(self.path),
                name,
                "a stack [E, N, K] of floats whose rows are certain by the `hidden_size` of the config",
                weight.map_or_else(
                    || "none".into(),
                    |found| format!("{} {:?}", found.format_name(), found.dims()),
                ),
                "convert the model: this crate's `convert` and mlx-lm write `switch_mlp`",
            )),
        }
    }

    /// The parts of a weight, which have one format and, but for the rows of those that are joined, one shape; and the
    /// dimension of the rows.
    fn alike(&self, sources: &[Source], joined: bool, request: &Request) -> Result<(Vec<Weight>, usize)> {
        let parts = sources.iter().map(|source| self.build(source, request)).collect::<Result<Vec<_>>>()?;
        let mut all = sources.iter().zip(&parts);
        let Some((source, first)) = all.next() else { return Ok((parts, 0)) };
        let dim = first.dims().len().saturating_sub(request.part.rank());
        let shape = |weight: &Weight| {
            let mut dims = weight.dims().to_vec();
            if let Some(rows) = dims.get_mut(dim).filter(|_| joined) {
                *rows = 0;
            }
            dims
        };
        let alike = |part: &Weight| part.format_name() == first.format_name() && shape(part) == shape(first);
        let Some((other_source, other)) = all.find(|(_, part)| !alike(part)) else {
            return Ok((parts, dim));
        };
        let named = |source: &Source, part: &Weight| {
            format!("`{source}` of {} {:?}", part.format_name(), part.dims())
        };
        let expected = format!("parts of one format and shape, as {}", named(source, first));
        Err(self.error(other_source, request, expected, named(other_source, other), composed::REMEDY))
    }

    fn compose(&self, how: How, source: &Source, request: &Request) -> Result<Weight> {
        let file = self.file_of_source(source, request.part).unwrap_or(self.path).into();
        Composed { how, name: request.part.of(request.module), file }.into_weight(request.module)
    }
}

/// A full name as a module and one of its tensors.
fn split(name: &str) -> Option<(&str, Part)> {
    match name.strip_suffix(".bias") {
        Some(module) => Some((module, Part::Bias)),
        None => module_of(name).map(|module| (module, Part::Weight)),
    }
}

impl Part {
    /// The full name.
    fn of(self, module: &str) -> String {
        tensor_of(module, self.suffix())
    }
}
