//! What a config says of the rotary position embedding.

use super::{Rope, RopeScaling};
use crate::fields::Fields;
use candle_quant::{Error, Result};
use serde_json::Value;

/// What a config means that does not say it.
pub(crate) struct RopeDefaults {
    /// `max_position_embeddings`.
    pub context: usize,
    /// The context of pre-training, beside what is said of the scaling.
    pub original: Option<usize>,
    pub theta: f64,
    /// The share of a head that turns.
    pub partial: f64,
    /// Whether the config may say so.
    pub may_be_partial: bool,
    pub interleaved: bool,
    /// Elements of a head.
    pub head_dim: usize,
}

impl Rope {
    /// That of a config without a word of it.
    pub(crate) fn unscaled(defaults: &RopeDefaults) -> Self {
        let &RopeDefaults { theta, partial, interleaved, head_dim, .. } = defaults;
        // Rounded down, as transformers does.
        let rotary_dim = (head_dim as f64 * partial) as usize;
        Self { theta, rotary_dim, interleaved, scaling: RopeScaling::None }
    }

    /// Reads `rope_theta`, `partial_rotary_factor` and `rope_scaling`, or the `rope_parameters` that newer configs put all of
    /// them in, for each type of layers where there are several.
    pub(crate) fn from_fields(
        top: Fields,
        layer_type: Option<&'static str>,
        defaults: &RopeDefaults,
    ) -> Result<Self> {
        check_both(top)?;
        let (parameters, is_nested) = match (top.object("rope_parameters")?, layer_type) {
            (Some(all), Some(layer_type)) if all.has(layer_type) => (all.object(layer_type)?, true),
            (all, _) => (all, false),
        };
        let inner = match parameters {
            Some(parameters) => Some(parameters),
            None => top.object("rope_scaling")?,
        };
        let number = |key: &str| -> Result<Option<f64>> {
            let beside = top.positive(key)?;
            Ok(inner.map(|fields| fields.positive(key)).transpose()?.flatten().or(beside))
        };
        let mut theta = number("rope_theta")?.unwrap_or(defaults.theta);
        let partial = number(PARTIAL)?.unwrap_or(defaults.partial);
        if partial != defaults.partial && !defaults.may_be_partial {
            let model_type = top.text("model_type")?.unwrap_or_default();
            return Err(Error::Unsupported {
                what: format!("`{PARTIAL}`: {partial} in a model of type `{model_type}`"),
                remedy: "all of its heads turns in transformers, whatever the config says".into(),
            });
        }
        let Self { rotary_dim, interleaved, .. } = Self::unscaled(&RopeDefaults { partial, ..*defaults });
        let mut scaling = match inner {
            None => RopeScaling::None,
            Some(fields) => {
                let context = top.size("max_position_embeddings")?.unwrap_or(defaults.context);
                // What stands beside the scaling counts before what stands in it.
                let beside = top.size(ORIGINAL)?.or(defaults.original).filter(|_| !is_nested);
                let original = beside.or(fields.size(ORIGINAL)?).unwrap_or(context);
                RopeScaling::from_fields(fields, Contexts { original, context })?
            }
        };
        // Hunyuan calls a base that is stretched once and for all dynamic.
        let alpha = inner.map(|fields| fields.positive("alpha")).transpose()?.flatten();
        if let (RopeScaling::Dynamic, Some(alpha)) = (&scaling, alpha) {
            let dim = rotary_dim as f64;
            (theta, scaling) = (theta * alpha.powf(dim / (dim - 2.)), RopeScaling::None);
        }
        Ok(Self { theta, rotary_dim, interleaved, scaling })
    }
}

const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";

/// Refuses a `rope_scaling` that says anything else than the `rope_parameters` beside it, of which transformers takes the first.
fn check_both(top: Fields) -> Result<()> {
    let (Some(parameters), Some(scaling)) = (top.object("rope_parameters")?, top.get("rope_scaling")) else {
        return Ok(());
    };
    // Where layers differ, a scaling is that of those without a window.
    let parameters = parameters.object("full_attention")?.unwrap_or(parameters);
    let kind =
        |of: &dyn Fn(&str) -> Option<Value>| of("rope_type").or(of("type")).unwrap_or("default".into());
    let same = |a: &Value, b: &Value| a == b || a.as_f64().is_some_and(|number| b.as_f64() == Some(number));
    let is_said = |(key, value): (&String, &Value)| {
        ["rope_type", "type"].contains(&key.as_str())
            || parameters.get(key).is_some_and(|stated| same(stated, value))
    };
    let kinds = [kind(&|key| scaling.get(key).cloned()), kind(&|key| parameters.get(key).cloned())];
    match scaling.as_object().is_none_or(|fields| fields.iter().all(is_said)) && kinds[0] == kinds[1] {
        true => Ok(()),
        false => Err(top.error(
            "rope_scaling",
            "nothing else than `rope_parameters` say, or only one of them",
            scaling,
        )),
    }
}

/// For how many tokens a model was trained at first, and for how many it is made.
#[derive(Clone, Copy)]
struct Contexts {
    original: usize,
    context: usize,
}

impl RopeScaling {
    /// `fields` are those of the scaling.
    fn from_fields(fields: Fields, contexts: Contexts) -> Result<Self> {
        let kind = match fields.text("rope_type")? {
            Some(kind) => kind,
            None => fields.text("type")?.unwrap_or("default"),
        };
        match kind {
            // Phi 3's first configs call it so.
            "yarn" if fields.get("short_factor").is_some() => Self::long(fields, contexts),
            "default" => Ok(Self::None),
            "dynamic" => Ok(Self::Dynamic),
            "longrope" | "su" => Self::long(fields, contexts),
            "linear" => Ok(Self::Linear { factor: fields.required_positive("factor")? }),
            "llama3" => Ok(Self::Llama3 {
                factor: fields.required_positive("factor")?,
                low_freq_factor: fields.positive("low_freq_factor")?.unwrap_or(1.),
                high_freq_factor: fields.positive("high_freq_factor")?.unwrap_or(4.),
                original_max_position_embeddings: contexts.original,
            }),
            "yarn" => {
                let factor = fields.required_positive("factor")?;
                let stretch = |scale: f64| if factor > 1. { 0.1 * scale * factor.ln() + 1. } else { 1. };
                let attention_factor = match (
                    fields.positive("attention_factor")?,
                    fields.positive("mscale")?,
                    fields.positive("mscale_all_dim")?,
                ) {
                    (Some(attention_factor), _, _) => attention_factor,
                    (None, Some(scale), Some(of_all)) => stretch(scale) / stretch(of_all),
                    _ => stretch(1.),
                };
                Ok(Self::Yarn {
                    factor,
                    beta_fast: fields.positive("beta_fast")?.unwrap_or(32.),
                    beta_slow: fields.positive("beta_slow")?.unwrap_or(1.),
                    original_max_position_embeddings: contexts.original,
                    truncate: fields.flag("truncate")?.unwrap_or(true),
                    attention_factor,
                })
            }
            other => Err(unsupported(format!("rope scaling `{other}`"))),
        }
    }

    fn long(fields: Fields, Contexts { original, context }: Contexts) -> Result<Self> {
        let factors = |key: &str| match fields.numbers(key)? {
            Some(factors) => Ok(factors),
            None => Err(Error::mismatch(format!("rope scaling `{key}`"), "a list of numbers", "nothing")),
        };
        let factor = match fields.positive("factor")? {
            Some(factor) => factor,
            None => context as f64 / original as f64,
        };
        let attention_factor = match fields.positive("attention_factor")? {
            Some(attention_factor) => attention_factor,
            None if factor <= 1. => 1.,
            None => (1. + factor.ln() / (original as f64).ln()).sqrt(),
        };
        Ok(Self::Long {
            short: factors("short_factor")?,
            long: factors("long_factor")?,
            original_max_position_embeddings: original,
            attention_factor,
        })
    }
}

fn unsupported(what: String) -> Error {
    Error::Unsupported {
        what,
        remedy: "use a model with default, linear, dynamic, llama3, longrope or yarn scaling".to_string(),
    }
}
