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

mod composed;
mod expert_name;
mod source;

use super::container::Container;
use super::weight::{module_of, tensor_of, DenseTensor, Weight};
use crate::{Error, Result};
use composed::{Composed, How};
use serde_json::Value;
use source::{Finder, Part, Rows, Source};
use std::ops::Range;
use std::path::Path;

const REMEDY: &str = "check that config.json belongs to these weights";

/// The weights of a checkpoint under the names that it does not have.
pub(super) struct Views<'a> {
    pub container: &'a dyn Container,
    pub config: &'a Value,
    /// What was opened, for errors.
    pub path: &'a Path,
}

/// What is asked for.
struct Request<'a> {
    module: &'a str,
    part: Part,
    in_features: Option<usize>,
}

impl<'a> Views<'a> {
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
        // An error is one of reading it, too.
        split(name).is_some_and(|(module, part)| !matches!(self.find(module, part), Ok(None)))
    }

    /// The file that holds what answers for a full name, or a part of it.
    pub fn file_of(&self, name: &str) -> Option<&'a Path> {
        let (module, part) = split(name)?;
        self.file_of_source(&self.find(module, part).ok()??, part)
    }

    fn find(&self, module: &str, part: Part) -> Result<Option<Source>> {
        let is_tied = self.flag("tie_word_embeddings");
        Finder { container: self.container, path: self.path, part, is_tied }.find(module)
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
        let error = |expected: String, found: String, remedy: &str| {
            let file = self.file_of_source(source, request.part).unwrap_or(self.path);
            Error::tensor(file, request.part.of(request.module), expected, found, remedy)
        };
        match source {
            Source::Stored(module) => self.stored(module, request),
            Source::Parameter(name) => self.parameter(name, request),
            Source::Matrix(stack, index) => {
                let name = stack.to_string();
                let stack = self.build(stack, request)?;
                let rank = request.part.rank() + 1;
                match stack.dims() {
                    [experts, ..] if stack.dims().len() == rank && index < experts => {
                        let one = stack.narrow(0, *index..index + 1)?;
                        self.compose(How::Matrix(Box::new(one)), source, request)
                    }
                    [experts, ..] if stack.dims().len() == rank => Err(error(
                        format!("an expert below {experts}, as `{name}` has"),
                        index.to_string(),
                        REMEDY,
                    )),
                    dims => Err(error(
                        format!("`{name}` to be a stack of experts, of {rank} dimensions"),
                        format!("{dims:?}"),
                        REMEDY,
                    )),
                }
            }
            Source::Rows(fused, rows) => {
                let name = fused.to_string();
                let whole = self.build(fused, request)?;
                let dim = whole.dims().len().checked_sub(request.part.rank());
                let of_dim = dim.and_then(|dim| Some((dim, *whole.dims().get(dim)?)));
                let Some((dim, count)) = of_dim else {
                    let found = format!("{:?}", whole.dims());
                    return Err(error(format!("`{name}` to have rows"), found, REMEDY));
                };
                let range = self.rows(*rows, count, request.module).map_err(|problem| match problem {
                    Problem::Count { expected } => {
                        error(format!("`{name}` of {expected} rows"), count.to_string(), REMEDY)
                    }
                    Problem::Order { why } => error(
                        "rows in a known order".into(),
                        format!("`{name}` of {why}"),
                        "use a checkpoint that stores the parts",
                    ),
                })?;
                whole.narrow(dim, range)
            }
            Source::Joined(parts) => {
                if let Some(why) = self.unknown_order(request.module) {
                    let expected = "a checkpoint that has it, or rows in a known order";
                    return Err(error(expected.into(), why, "ask for the parts by their own names"));
                }
                let parts = self.alike(parts, source, request)?;
                let dim =
                    parts.first().map_or(0, |part| part.dims().len()).saturating_sub(request.part.rank());
                self.compose(How::Joined { parts, dim }, source, request)
            }
            Source::Stacked(parts) => {
                let parts = self.alike(parts, source, request)?;
                self.compose(How::Stacked(parts), source, request)
            }
        }
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
        let weight = match self.container.weight(name, request.in_features)? {
            Some(weight) => Some(weight),
            None => self.container.dense(name)?.map(Weight::Dense),
        };
        let hidden = self.size("hidden_size");
        let certain = match &weight {
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
                "a stack [E, N, K] of experts whose rows are certain by the `hidden_size` of the config",
                format!("{:?}", weight.as_ref().map_or(&[][..], Weight::dims)),
                "convert the model: this crate's `convert` and mlx-lm write `switch_mlp`",
            )),
        }
    }

    /// The parts of a weight, which have one format and, but for the rows of those that are joined, one shape.
    fn alike(&self, sources: &[Source], whole: &Source, request: &Request) -> Result<Vec<Weight>> {
        let parts = sources.iter().map(|source| self.build(source, request)).collect::<Result<Vec<_>>>()?;
        let rows = match whole {
            Source::Joined(_) => {
                parts.first().and_then(|part| part.dims().len().checked_sub(request.part.rank()))
            }
            _ => None,
        };
        let shape = |weight: &Weight| {
            let mut dims = weight.dims().to_vec();
            if let Some(rows) = rows.and_then(|dim| dims.get_mut(dim)) {
                *rows = 0;
            }
            dims
        };
        let named = |(source, part): (&Source, &Weight)| {
            format!("`{source}` of {} {:?}", part.format_name(), part.dims())
        };
        let mut all = sources.iter().zip(&parts);
        let Some((first_source, first)) = all.next() else { return Ok(parts) };
        let alike = |part: &Weight| part.format_name() == first.format_name() && shape(part) == shape(first);
        match all.find(|(_, part)| !alike(part)) {
            None => Ok(parts),
            Some(other) => Err(Error::tensor(
                self.file_of_source(other.0, request.part).unwrap_or(self.path),
                request.part.of(request.module),
                format!("parts of one format and shape, as {}", named((first_source, first))),
                named(other),
                "ask for the parts by their own names, or quantize them alike",
            )),
        }
    }

    fn compose(&self, how: How, source: &Source, request: &Request) -> Result<Weight> {
        let file = self.file_of_source(source, request.part).unwrap_or(self.path).into();
        Composed { how, name: request.part.of(request.module), file }.into_weight(request.module)
    }

    /// Which of `count` rows of a fused projection.
    fn rows(&self, rows: Rows, count: usize, module: &str) -> Result<Range<usize>, Problem> {
        if let Some(why) = self.unknown_order(module) {
            return Err(Problem::Order { why });
        }
        let half = count / 2;
        match rows {
            Rows::FirstHalf | Rows::SecondHalf if count % 2 != 0 || count == 0 => {
                Err(Problem::Count { expected: "an even number of".into() })
            }
            Rows::FirstHalf => Ok(0..half),
            Rows::SecondHalf => Ok(half..count),
            Rows::Queries | Rows::Keys | Rows::Values => {
                let unknown = || Problem::Count {
                    expected:
                        "as many as `num_attention_heads` and `head_dim` of the config make, which it lacks,"
                            .into(),
                };
                let (q, kv) = self.head_rows().ok_or_else(unknown)?;
                let expected = kv.checked_mul(2).and_then(|both| both.checked_add(q)).ok_or_else(unknown)?;
                if expected != count {
                    let expected = format!("{q} + {kv} + {kv}, which the heads of the config make,");
                    return Err(Problem::Count { expected });
                }
                Ok(match rows {
                    Rows::Keys => q..q + kv,
                    Rows::Values => q + kv..count,
                    _ => 0..q,
                })
            }
        }
    }

    /// Rows of the query projection, and those of the key and the value projection.
    fn head_rows(&self) -> Option<(usize, usize)> {
        let heads = self.size("num_attention_heads")?;
        let kv_heads = self.size("num_key_value_heads").unwrap_or(heads);
        let head_dim = match self.size("head_dim") {
            Some(head_dim) => head_dim,
            None => {
                let hidden = self.size("hidden_size")?;
                hidden.checked_div(heads).filter(|_| hidden.is_multiple_of(heads))?
            }
        };
        Some((heads.checked_mul(head_dim)?, kv_heads.checked_mul(head_dim)?))
    }

    /// Why the order of the rows of fused projections is not that of their parts, or not known.
    ///
    /// gpt-oss alternates rows of gate and up (mlx_lm/models/gpt_oss.py). Hunyuan has queries, keys and values of one
    /// key-value head after another (mlx_lm/models/hunyuan.py), CodeGen of one of four parts.
    fn unknown_order(&self, module: &str) -> Option<String> {
        let name = module.rsplit('.').next().unwrap_or(module);
        let attention = matches!(name, "q_proj" | "k_proj" | "v_proj" | "qkv_proj");
        let model = self.text().get("model_type").or(self.config.get("model_type"))?.as_str()?;
        let other = match attention {
            true => model.starts_with("hunyuan") || model == "codegen",
            false => model == "gpt_oss",
        };
        other.then(|| format!("{model}, whose rows alternate"))
    }

    fn text(&self) -> &Value {
        self.config.get("text_config").filter(|text| text.is_object()).unwrap_or(self.config)
    }

    fn size(&self, key: &str) -> Option<usize> {
        usize::try_from(self.text().get(key)?.as_u64()?).ok()
    }

    /// Multimodal configs have it beside the `text_config`, or in it.
    fn flag(&self, key: &str) -> bool {
        let stated = self.config.get(key).filter(|value| !value.is_null());
        stated.or_else(|| self.text().get(key)).and_then(Value::as_bool) == Some(true)
    }
}

/// Why rows can't be told apart.
enum Problem {
    Count { expected: String },
    Order { why: String },
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
