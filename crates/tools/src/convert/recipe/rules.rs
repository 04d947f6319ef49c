//! Which tensor becomes what: ordered rules, the first that matches decides.

use super::choice::Choice;
use super::mlx_mixed::MlxMixed;
use super::ollama_rules;
use super::role::Role;
use super::spec::Spec;
use super::tensor_info::TensorInfo;
use super::topology::Selector;
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::MlxWeight;
use globset::{Glob, GlobMatcher};
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// What the safe defaults are called in plans begins like this.
const DEFAULT: &str = "default: ";

/// Smaller matrices are kept: they save nothing.
const SMALL: usize = 1024;

/// Which tensor becomes what.
///
/// Rules are tried in order, the first that matches decides; what none matches gets the format of the recipe. They see
/// names as they are in the output, where experts are stacks. The
/// safe defaults come last: vision and audio parts, routers, norms and matrices of fewer than 1024 elements are
/// kept, the output head (also a tied embedding) gets the next wider format.
///
/// As TOML:
/// ```
/// use candle_quant_tools::convert::Recipe;
///
/// let recipe = Recipe::from_toml(
///     "mine.toml",
///     r#"
///     format = "4"            # for what no rule matches
///     fallback = "fit"        # a row that the groups do not divide: smaller groups, or else "keep"
///     defaults = true         # the safe defaults, after these rules
///
///     [[rule]]                # all conditions of a rule have to hold
///     role = "down"
///     layers = ["0-3", 28]
///     format = "6:g32"
///
///     [[rule]]
///     tensors = "*.self_attn.[kv]_proj"   # a glob on the module's path or the tensor's name
///     format = "8"
///
///     [[rule]]
///     regex = "mlp\\.gate$"
///     format = "bf16"
///     "#,
/// )?;
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Recipe {
    pub(in crate::convert) format: Spec,
    pub(in crate::convert) fallback: Fallback,
    pub(super) rules: Vec<Rule>,
    /// What is chosen instead of the formats that the rules leave open.
    pub(super) choice: Option<Choice>,
}

/// What becomes of a matrix whose rows are no whole number of groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::convert) enum Fallback {
    /// Smaller groups; kept if the smallest do not fit either.
    #[default]
    Fit,
    /// Kept, as mlx-lm does.
    Keep,
}

/// One rule.
#[derive(Clone, Debug)]
pub struct Rule {
    label: String,
    conditions: Vec<Condition>,
    decision: Decision,
}

#[derive(Clone, Debug)]
pub(super) enum Condition {
    Glob(GlobMatcher),
    Regex(Regex),
    Layers(Vec<RangeInclusive<usize>>),
    Role(Role),
    /// A matrix of fewer elements.
    Smaller(usize),
    /// What a key of a topology selects.
    Topology(Selector),
    /// A module of which mlx-lm makes this.
    MlxLm(MlxWeight),
}

#[derive(Clone, Debug)]
pub(super) enum Decision {
    To(Spec),
    /// One step up from the format of the recipe.
    StepUp,
    /// What mistral.rs makes of embeddings and the head.
    Promoted,
    MlxMixed(MlxMixed),
    /// What Ollama's importer makes of it.
    Ollama,
}

impl Rule {
    /// A rule for all tensors whose name, or module path, matches a glob.
    ///
    /// # Errors
    /// If the glob is malformed.
    pub fn tensors(glob: &str, spec: Spec) -> Result<Self> {
        let condition = Condition::glob(glob)?;
        Ok(Self::new(format!("tensors {glob}"), vec![condition], Decision::To(spec)))
    }

    /// A rule for all tensors of a role.
    pub fn role(role: Role, spec: Spec) -> Self {
        Self::new(format!("role {role}"), vec![Condition::Role(role)], Decision::To(spec))
    }

    pub(super) fn new(label: String, conditions: Vec<Condition>, decision: Decision) -> Self {
        Self { label, conditions, decision }
    }
}

impl Recipe {
    /// The names of the recipes of [`Recipe::named`].
    pub const NAMES: [&str; 9] = [
        "uniform",
        "mixed_2_6",
        "mixed_3_4",
        "mixed_3_6",
        "mixed_4_6",
        "safe",
        "mistralrs",
        "ollama",
        "llmcompressor",
    ];

    /// One format, with the safe defaults.
    pub fn safe(format: Spec) -> Self {
        Self { format, fallback: Fallback::Fit, rules: safe_defaults(), choice: None }
    }

    /// A recipe by name.
    ///
    /// * `safe` is [`Recipe::safe`].
    /// * `uniform` is what mlx-lm does without a recipe: it packs every matrix alike, head and routers too, but those of
    ///   which a family has its own idea ([`MlxLm`](candle_quant_models::MlxLm)): some get 8 bits in groups of 64, some are
    ///   kept.
    /// * `mixed_LOW_HIGH` are mlx-lm's: some value and down projections and the head get HIGH bits, all else LOW.
    /// * `mistralrs` is what mistral.rs does: embedding and head get 6 bits instead of 2 to 4, and 8 instead of 6; routers
    ///   and norms are kept.
    /// * `ollama` is what its importer does: the embedding is kept, the head gets 8 bits, and so do value, key and down
    ///   projections if all else gets 4, of experts in affine formats only.
    /// * `llmcompressor` is what recipes of llm-compressor usually do: linear layers are packed, but the head and routers.
    ///
    /// In all but the first, matrices whose rows are no whole number of groups are kept, and so are vision and audio.
    ///
    /// # Errors
    /// If there is no recipe of this name, or if a mixed one is asked for another format than an affine one, whose
    /// group size is all that is taken from it.
    pub fn named(name: &str, format: Spec) -> Result<Self> {
        let mut rules: Vec<_> = [Role::Vision, Role::Audio].map(keep_role).into();
        match name {
            "safe" => return Ok(Self::safe(format)),
            "ollama" => rules = vec![Rule::new(name.to_owned(), Vec::new(), Decision::Ollama)],
            "uniform" => {
                rules.extend([Role::Norm, Role::Conv].map(keep_role));
                rules.push(of_mlx_lm(MlxWeight::Dense, Spec::Keep));
                if let (Spec::Packed(_) | Spec::Type(_), Ok(wide)) = (format, QuantFormat::affine(8, 64)) {
                    rules.push(of_mlx_lm(MlxWeight::EightBits, Spec::Packed(wide)));
                }
            }
            "llmcompressor" => {
                let kept = [Role::Embed, Role::LmHead, Role::Router, Role::Norm, Role::Conv];
                rules.extend(kept.map(keep_role));
            }
            "mistralrs" => {
                rules.extend([Role::Router, Role::Norm, Role::Conv].map(keep_role));
                for role in [Role::Embed, Role::LmHead] {
                    let condition = Condition::Role(role);
                    rules.push(Rule::new(format!("{DEFAULT}{role}"), vec![condition], Decision::Promoted));
                }
            }
            _ => {
                rules.push(of_mlx_lm(MlxWeight::Dense, Spec::Keep));
                rules.push(Self::mixed(name, format)?);
            }
        }
        Ok(Self { format, fallback: Fallback::Keep, rules, choice: None })
    }

    fn mixed(name: &str, format: Spec) -> Result<Rule> {
        let affine = match format {
            Spec::Packed(format) if format.has_biases() => format,
            Spec::Packed(_) | Spec::Type(_) | Spec::Cast(_) | Spec::Keep => {
                return Err(Error::mismatch(
                    format!("format for {name}"),
                    "an affine one",
                    format.to_string(),
                ))
            }
        };
        let mixed = MlxMixed::named(name, affine).ok_or_else(|| {
            Error::mismatch("recipe", format!("one of {}", Self::NAMES.join(", ")), format!("`{name}`"))
        })?;
        Ok(Rule::new(name.to_owned(), Vec::new(), Decision::MlxMixed(mixed)))
    }

    /// The same recipe with a rule before all others.
    #[must_use]
    pub fn with_rules_first(mut self, rules: impl IntoIterator<Item = Rule>) -> Self {
        self.rules.splice(0..0, rules);
        self
    }

    /// The same recipe with a choice instead of its format.
    pub(in crate::convert) fn with_choice(mut self, format: Spec, choice: Choice) -> Self {
        (self.format, self.choice) = (format, Some(choice));
        self
    }

    /// What is to be said of the choice, if there is one.
    pub(in crate::convert) fn choice_note(&self) -> Option<String> {
        self.choice.as_ref()?.note()
    }

    /// The format that the whole checkpoint is called after if anything has it.
    pub(in crate::convert) fn asked(&self) -> Spec {
        if self.choice.is_some() {
            Spec::Keep
        } else {
            self.format
        }
    }

    /// The rules of the user, by what they are called in plans.
    pub(in crate::convert) fn labels(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|rule| rule.label.as_str()).filter(|label| !is_default(label))
    }

    /// What a tensor is to become, and the rule that says so.
    pub(in crate::convert) fn decide(&self, tensor: &TensorInfo) -> (Spec, &str) {
        let matches = |rule: &&Rule| rule.conditions.iter().all(|condition| condition.holds(tensor));
        let (spec, label, is_said) = match self.rules.iter().find(matches) {
            None => (self.format, "format", false),
            Some(rule) => {
                let spec = match &rule.decision {
                    Decision::To(spec) => *spec,
                    Decision::StepUp => self.format.step_up(tensor.has_format),
                    Decision::Ollama => ollama_rules::decide(tensor, self.format),
                    Decision::Promoted => self.format.promoted(),
                    Decision::MlxMixed(mixed) => mixed.decide(tensor.name, tensor.layers),
                };
                (spec, rule.label.as_str(), matches!(rule.decision, Decision::To(_)))
            }
        };
        let is_open = !is_said && matches!(spec, Spec::Packed(_) | Spec::Type(_));
        let chosen = self.choice.as_ref().and_then(|choice| choice.of(tensor.name, is_open));
        chosen.unwrap_or((spec, label))
    }
}

/// Whether a rule of this label is one of the safe defaults.
pub(in crate::convert) fn is_default(label: &str) -> bool {
    label.starts_with(DEFAULT)
}

pub(super) fn keep_role(role: Role) -> Rule {
    Rule::new(format!("{DEFAULT}{role}"), vec![Condition::Role(role)], Decision::To(Spec::Keep))
}

/// What mlx-lm does for the sake of a family.
fn of_mlx_lm(weight: MlxWeight, spec: Spec) -> Rule {
    Rule::new(format!("{DEFAULT}mlx-lm"), vec![Condition::MlxLm(weight)], Decision::To(spec))
}

pub(super) fn safe_defaults() -> Vec<Rule> {
    let mut rules: Vec<_> =
        [Role::Vision, Role::Audio, Role::Router, Role::Norm, Role::Conv].map(keep_role).into();
    let small = Condition::Smaller(SMALL);
    rules.push(Rule::new(format!("{DEFAULT}small"), vec![small], Decision::To(Spec::Keep)));
    let head = Condition::Role(Role::LmHead);
    rules.push(Rule::new(format!("{DEFAULT}lm-head"), vec![head], Decision::StepUp));
    rules
}

impl Condition {
    pub(super) fn glob(glob: &str) -> Result<Self> {
        let compiled = Glob::new(glob)
            .map_err(|error| Error::mismatch("tensors", "a glob", format!("`{glob}`: {}", error.kind())))?;
        Ok(Self::Glob(compiled.compile_matcher()))
    }

    fn holds(&self, tensor: &TensorInfo) -> bool {
        let module = tensor.name.strip_suffix(".weight").unwrap_or(tensor.name);
        match self {
            Self::Glob(glob) => glob.is_match(module) || glob.is_match(tensor.name),
            Self::Regex(regex) => regex.is_match(module),
            Self::Layers(ranges) => {
                layer_of(module).is_some_and(|layer| ranges.iter().any(|range| range.contains(&layer)))
            }
            Self::Role(role) => tensor.roles.contains(role),
            Self::Topology(selector) => selector.selects(tensor.name),
            Self::MlxLm(weight) => tensor.mlx_lm == *weight,
            Self::Smaller(elements) => {
                tensor.dims.len() > 1
                    && tensor.dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim)) < Some(*elements)
            }
        }
    }
}

/// The number of the layer that a path leads through: the first number in it.
fn layer_of(path: &str) -> Option<usize> {
    path.split('.').find_map(|segment| segment.parse().ok())
}
