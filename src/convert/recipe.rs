//! Which tensor becomes what: ordered rules, of which the first that matches decides.

use super::choice::Choice;
use super::mixed::{Mixed, ModelLayers};
use super::{importer, Role, Spec, Target};
use crate::{Error, Result};
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
/// use candle_quant::convert::Recipe;
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
    pub(super) format: Spec,
    pub(super) fallback: Fallback,
    rules: Vec<Rule>,
    /// What is chosen instead of the formats that the rules leave open.
    choice: Option<Choice>,
}

/// What becomes of a matrix whose rows are no whole number of groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Fallback {
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
enum Condition {
    Glob(GlobMatcher),
    Regex(Regex),
    Layers(Vec<RangeInclusive<usize>>),
    Role(Role),
    /// A matrix of fewer elements.
    Smaller(usize),
}

#[derive(Clone, Debug)]
enum Decision {
    To(Spec),
    /// One step up from the format of the recipe.
    StepUp,
    /// What mistral.rs makes of embeddings and the head.
    Promoted,
    Mixed(Mixed),
    /// What Ollama's importer makes of it.
    Importer,
}

/// A tensor as rules see it.
pub(super) struct Subject<'a> {
    pub name: &'a str,
    pub dims: &'a [usize],
    pub roles: &'a [Role],
    pub layers: &'a ModelLayers,
    pub target: Target,
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

    fn new(label: String, conditions: Vec<Condition>, decision: Decision) -> Self {
        Self { label, conditions, decision }
    }
}

impl Recipe {
    /// The names of the recipes of [`Recipe::named`].
    pub const NAMES: [&str; 8] =
        ["uniform", "mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6", "safe", "mistralrs", "ollama"];

    /// What a format alone means for this kind of output: the safe defaults, or what the program does whose format it
    /// is.
    pub fn usual(target: Target, format: Spec) -> Self {
        Self::named(target.kind().recipe(), format).unwrap_or_else(|_| Self::safe(format))
    }

    /// One format, with the safe defaults.
    pub fn safe(format: Spec) -> Self {
        Self { format, fallback: Fallback::Fit, rules: safe_defaults(), choice: None }
    }

    /// A recipe by name.
    ///
    /// * `safe` is [`Recipe::safe`].
    /// * `uniform` packs every matrix alike, head and routers too, as mlx-lm does with models that have no rules of
    ///   their own.
    /// * `mixed_LOW_HIGH` are mlx-lm's: some value and down projections and the head get HIGH bits, all else LOW.
    /// * `mistralrs` is what mistral.rs does: embedding and head get 6 bits instead of 2 to 4, and 8 instead of 6; routers
    ///   and norms are kept.
    /// * `ollama` is what its importer does: the embedding is kept, the head gets 8 bits, and so do value, key and down
    ///   projections if all else gets 4, of experts in affine formats only.
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
            "ollama" => rules = vec![Rule::new(name.to_owned(), Vec::new(), Decision::Importer)],
            "uniform" => {}
            "mistralrs" => {
                rules.extend([Role::Router, Role::Norm, Role::Conv].map(keep_role));
                for role in [Role::Embed, Role::LmHead] {
                    let condition = Condition::Role(role);
                    rules.push(Rule::new(format!("{DEFAULT}{role}"), vec![condition], Decision::Promoted));
                }
            }
            _ => rules.push(Self::mixed(name, format)?),
        }
        Ok(Self { format, fallback: Fallback::Keep, rules, choice: None })
    }

    fn mixed(name: &str, format: Spec) -> Result<Rule> {
        let affine = match format {
            Spec::Packed(format) if format.has_biases() => format,
            other => {
                return Err(Error::mismatch(format!("format for {name}"), "an affine one", other.to_string()))
            }
        };
        let mixed = Mixed::named(name, affine).ok_or_else(|| {
            Error::mismatch("recipe", format!("one of {}", Self::NAMES.join(", ")), format!("`{name}`"))
        })?;
        Ok(Rule::new(name.to_owned(), Vec::new(), Decision::Mixed(mixed)))
    }

    /// A recipe from the text of a TOML file; `file` is its name, for the plan.
    ///
    /// # Errors
    /// If it is malformed, or has keys that recipes do not have.
    pub fn from_toml(file: &str, text: &str) -> Result<Self> {
        let wrong = |problem: String| Error::mismatch(format!("recipe {file}"), "a recipe in TOML", problem);
        let parsed: File = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let mut rules = Vec::with_capacity(parsed.rule.len());
        for (index, rule) in parsed.rule.into_iter().enumerate() {
            let number = index + 1;
            let rule = rule.build(format!("rule {number} of {file}"));
            rules.push(rule.map_err(|error| wrong(format!("rule {number}: {error}")))?);
        }
        if parsed.defaults {
            rules.extend(safe_defaults());
        }
        let format = parsed.format.parse().map_err(|error: Error| wrong(error.to_string()))?;
        Ok(Self { format, fallback: parsed.fallback, rules, choice: None })
    }

    /// The same recipe with a rule before all others.
    #[must_use]
    pub fn with_rules_first(mut self, rules: impl IntoIterator<Item = Rule>) -> Self {
        self.rules.splice(0..0, rules);
        self
    }

    /// The same recipe with a choice instead of its format.
    pub(super) fn with_choice(mut self, format: Spec, choice: Choice) -> Self {
        (self.format, self.choice) = (format, Some(choice));
        self
    }

    /// What is to be said of the choice, if there is one.
    pub(super) fn choice_note(&self) -> Option<String> {
        self.choice.as_ref()?.note()
    }

    /// The format that the whole checkpoint is called after if anything has it.
    pub(super) fn asked(&self) -> Spec {
        if self.choice.is_some() {
            Spec::Keep
        } else {
            self.format
        }
    }

    /// The rules of the user, by what they are called in plans.
    pub(super) fn labels(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|rule| rule.label.as_str()).filter(|label| !is_default(label))
    }

    /// What a tensor is to become, and the rule that says so.
    pub(super) fn decide(&self, subject: &Subject) -> (Spec, &str) {
        let matches = |rule: &&Rule| rule.conditions.iter().all(|condition| condition.holds(subject));
        let (spec, label, is_said) = match self.rules.iter().find(matches) {
            None => (self.format, "format", false),
            Some(rule) => {
                let spec = match &rule.decision {
                    Decision::To(spec) => *spec,
                    Decision::StepUp => self.format.step_up(subject.target),
                    Decision::Importer => importer::decide(subject, self.format),
                    Decision::Promoted => self.format.promoted(),
                    Decision::Mixed(mixed) => mixed.decide(subject.name, subject.layers),
                };
                (spec, rule.label.as_str(), matches!(rule.decision, Decision::To(_)))
            }
        };
        let is_open = !is_said && matches!(spec, Spec::Packed(_));
        let chosen = self.choice.as_ref().and_then(|choice| choice.of(subject.name, is_open));
        chosen.unwrap_or((spec, label))
    }
}

/// Whether a rule of this label is one of the safe defaults.
pub(super) fn is_default(label: &str) -> bool {
    label.starts_with(DEFAULT)
}

fn keep_role(role: Role) -> Rule {
    Rule::new(format!("{DEFAULT}{role}"), vec![Condition::Role(role)], Decision::To(Spec::Keep))
}

fn safe_defaults() -> Vec<Rule> {
    let mut rules: Vec<_> =
        [Role::Vision, Role::Audio, Role::Router, Role::Norm, Role::Conv].map(keep_role).into();
    let small = Condition::Smaller(SMALL);
    rules.push(Rule::new(format!("{DEFAULT}small"), vec![small], Decision::To(Spec::Keep)));
    let head = Condition::Role(Role::LmHead);
    rules.push(Rule::new(format!("{DEFAULT}lm-head"), vec![head], Decision::StepUp));
    rules
}

impl Condition {
    fn glob(glob: &str) -> Result<Self> {
        let compiled = Glob::new(glob)
            .map_err(|error| Error::mismatch("tensors", "a glob", format!("`{glob}`: {}", error.kind())))?;
        Ok(Self::Glob(compiled.compile_matcher()))
    }

    fn holds(&self, subject: &Subject) -> bool {
        let module = subject.name.strip_suffix(".weight").unwrap_or(subject.name);
        match self {
            Self::Glob(glob) => glob.is_match(module) || glob.is_match(subject.name),
            Self::Regex(regex) => regex.is_match(module),
            Self::Layers(ranges) => {
                layer_of(module).is_some_and(|layer| ranges.iter().any(|range| range.contains(&layer)))
            }
            Self::Role(role) => subject.roles.contains(role),
            Self::Smaller(elements) => {
                subject.dims.len() > 1
                    && subject.dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim))
                        < Some(*elements)
            }
        }
    }
}

/// The number of the layer that a path leads through: the first number in it.
fn layer_of(path: &str) -> Option<usize> {
    path.split('.').find_map(|segment| segment.parse().ok())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: String,
    #[serde(default)]
    fallback: Fallback,
    #[serde(default = "yes")]
    defaults: bool,
    #[serde(default)]
    rule: Vec<FileRule>,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRule {
    tensors: Option<String>,
    regex: Option<String>,
    layers: Option<Layers>,
    role: Option<String>,
    format: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Layers {
    One(usize),
    Range(String),
    Several(Vec<Layers>),
}

impl FileRule {
    fn build(self, label: String) -> Result<Rule> {
        let mut conditions = Vec::new();
        if let Some(glob) = &self.tensors {
            conditions.push(Condition::glob(glob)?);
        }
        if let Some(text) = &self.regex {
            let regex = Regex::new(text);
            conditions.push(Condition::Regex(regex.map_err(|error| {
                Error::mismatch("regex", "a regular expression", format!("`{text}`: {error}"))
            })?));
        }
        if let Some(layers) = &self.layers {
            conditions.push(Condition::Layers(layers.ranges()?));
        }
        if let Some(role) = &self.role {
            conditions.push(Condition::Role(role.parse()?));
        }
        Ok(Rule::new(label, conditions, Decision::To(self.format.parse()?)))
    }
}

impl Layers {
    fn ranges(&self) -> Result<Vec<RangeInclusive<usize>>> {
        let range = |layers: &Self| match layers {
            Self::One(layer) => Some(*layer..=*layer),
            Self::Range(text) => match text.split_once('-') {
                None => text.parse().ok().map(|layer| layer..=layer),
                Some((first, last)) => {
                    let range = first.trim().parse().ok()?..=last.trim().parse().ok()?;
                    (!range.is_empty()).then_some(range)
                }
            },
            Self::Several(_) => None,
        };
        let wrong = |layers: &Self| {
            let found = match layers {
                Self::Range(text) => format!("`{text}`"),
                _ => "something else".into(),
            };
            Error::mismatch("layers", "numbers and ranges, such as [\"0-8\", 31]", found)
        };
        match self {
            Self::Several(all) => {
                all.iter().map(|layers| range(layers).ok_or_else(|| wrong(layers))).collect()
            }
            one => Ok(vec![range(one).ok_or_else(|| wrong(one))?]),
        }
    }
}
