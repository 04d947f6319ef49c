//! The rotary embedding, as a GGUF file's metadata and tensors describe it.

use super::config::{Map, Source};
use super::names::{ROPE_FREQS, ROPE_LONG, ROPE_SHORT};
use crate::{Error, Result};
use serde_json::{json, Value};

/// What the file divides the frequencies of the rotary embedding by, where it does: a number for each pair of elements.
#[derive(Clone, Default)]
pub(super) struct Divisors {
    /// In all texts.
    pub always: Option<Vec<f32>>,
    /// In texts that are longer than those of pre-training.
    pub long: Option<Vec<f32>>,
    /// In others.
    pub short: Option<Vec<f32>>,
}

impl Divisors {
    /// Those of a tensor of this name.
    pub fn of_name(&mut self, name: &str) -> Option<&mut Option<Vec<f32>>> {
        match name {
            ROPE_FREQS => Some(&mut self.always),
            ROPE_LONG => Some(&mut self.long),
            ROPE_SHORT => Some(&mut self.short),
            _ => None,
        }
    }

    /// These, and of those that are missing the others'.
    pub fn or(self, others: &Self) -> Self {
        Self {
            always: self.always.or_else(|| others.always.clone()),
            long: self.long.or_else(|| others.long.clone()),
            short: self.short.or_else(|| others.short.clone()),
        }
    }
}

/// The `rope_scaling` of a model whose heads have so many elements that turn.
pub(super) fn scaling(source: &Source, rotated: Option<u32>) -> Result<Value> {
    let Divisors { always, long, short } = source.divisors;
    let original = source.size("rope.scaling.original_context_length")?;
    let factor = match source.number("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => source.number("rope.scale_linear")?,
    };
    let kind = source.text("rope.scaling.type")?;
    let kind = kind.unwrap_or(if factor.is_some_and(|factor| factor != 1.) { "linear" } else { "none" });
    let kind = if long.is_some() || short.is_some() { "longrope" } else { kind };
    const ATTENTION: &str = "rope.scaling.attn_factor";
    let attention = source.number(ATTENTION)?;
    match kind {
        "longrope" => {}
        _ if attention.is_some_and(|factor| factor != 1.) => {
            return Err(source.unsupported(ATTENTION, &format!("given, with rope scaling `{kind}`")));
        }
        _ => {}
    }
    match (always, kind) {
        (Some(divisors), "none") => {
            llama3(source, divisors, source.theta()?, original.unwrap_or(8192), rotated)
        }
        (None, "none") => Ok(Value::Null),
        (None, "linear") => Ok(json!({"rope_type": "linear", "factor": factor})),
        (None, "longrope") => {
            let (Some(short), Some(long)) = (short, long) else {
                let which = if short.is_none() { ROPE_SHORT } else { ROPE_LONG };
                return Err(source.problem(format!("`{which}` is missing, which LongRoPE has")));
            };
            let mut scaling = json!({"rope_type": "longrope", "short_factor": short, "long_factor": long});
            insert(&mut scaling, "original_max_position_embeddings", original.map(Value::from));
            insert(&mut scaling, "attention_factor", attention.map(Value::from));
            Ok(scaling)
        }
        (None, other) => {
            let mut scaling = json!({
                "rope_type": other, "factor": factor, "original_max_position_embeddings": original,
            });
            for (key, field) in [
                ("rope.scaling.yarn_beta_fast", "beta_fast"),
                ("rope.scaling.yarn_beta_slow", "beta_slow"),
                ("rope.scaling.yarn_attn_factor", "attention_factor"),
            ] {
                insert(&mut scaling, field, source.number(key)?.map(Value::from));
            }
            Ok(scaling)
        }
        (Some(_), other) => Err(unsupported(source, &format!("beside rope scaling `{other}`"))),
    }
}

fn insert(object: &mut Value, field: &str, value: Option<Value>) {
    if let Some(value) = value {
        object[field] = value;
    }
}

/// The llama 3 scaling that has these divisors. The file has the divisors only; the parameters behind them are
/// the same in all models but for the factor, which is the largest divisor.
fn llama3(
    source: &Source,
    divisors: &[f32],
    theta: f64,
    original: u32,
    rotated: Option<u32>,
) -> Result<Value> {
    const LOW: f64 = 1.;
    const HIGH: f64 = 4.;
    let factor = f64::from(divisors.iter().copied().fold(1f32, f32::max));
    let pairs = rotated.map(|rotated| rotated / 2);
    let expected = |pair: usize| {
        let frequency = theta.powf(-(pair as f64) / divisors.len() as f64);
        let turns = f64::from(original) * frequency / std::f64::consts::TAU;
        let keep = ((turns - LOW) / (HIGH - LOW)).clamp(0., 1.);
        1. / (keep + (1. - keep) / factor)
    };
    let close = |(pair, &divisor): (usize, &f32)| (f64::from(divisor) / expected(pair) - 1.).abs() < 1e-4;
    if u32::try_from(divisors.len()).ok() != pairs || !divisors.iter().enumerate().all(close) {
        return Err(unsupported(source, "that are not those of llama 3's scaling"));
    }
    if divisors.iter().all(|divisor| *divisor == 1.) {
        return Ok(Value::Null);
    }
    Ok(json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }))
}

fn unsupported(source: &Source, what: &str) -> Error {
    Error::Unsupported {
        what: format!("{}: `{ROPE_FREQS}` with divisors {what}", source.path().display()),
        remedy: "use a model with default, linear or llama3 scaling".into(),
    }
}

/// Ministral 3: YaRN's growth of queries and keys is made up for by the second of two factors, of which the first is 1 in
/// all models; and how queries grow with their positions.
pub(super) fn of_ministral(source: &Source, config: &mut Map) -> Result<()> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let mut parameters = match config.remove("rope_scaling") {
        Some(scaling) if scaling.is_object() => scaling,
        _ => json!({"rope_type": "default"}),
    };
    parameters["rope_theta"] = json!(source.theta()?);
    if let Some(of_all) = source.number("rope.scaling.yarn_log_multiplier")?.filter(|factor| *factor != 0.) {
        parameters["mscale"] = json!(1.);
        parameters["mscale_all_dim"] = json!(of_all);
    }
    if let Some(beta) = source.number("attention.temperature_scale")?.filter(|beta| *beta != 0.) {
        parameters["llama_4_scaling_beta"] = json!(beta);
        // llama.cpp takes the context where the file does not say it.
        parameters[ORIGINAL] = match source.size("rope.scaling.original_context_length")? {
            Some(original) => json!(original),
            None => json!(source.required_size("context_length")?),
        };
    }
    config.insert("rope_parameters".into(), parameters);
    Ok(())
}

/// DeepSeek 2 and 3: YaRN's two factors are the same in all models. The converter writes a tenth of them.
pub(super) fn of_latents(source: &Source, config: &mut Map) -> Result<()> {
    const FACTOR: &str = "rope.scaling.yarn_log_multiplier";
    let Some(scaling) = config.get_mut("rope_scaling").filter(|scaling| scaling["rope_type"] == "yarn")
    else {
        return Ok(());
    };
    let Some(factor) = source.number(FACTOR)? else {
        return Err(source.missing(FACTOR, "beside YaRN"));
    };
    if factor != 0. {
        scaling["mscale"] = json!(factor * 10.);
        scaling["mscale_all_dim"] = json!(factor * 10.);
    }
    Ok(())
}

/// OLMo 3: layers with a window turn without scaling.
pub(super) fn of_layer_types(source: &Source, config: &mut Map) -> Result<()> {
    let theta = source.theta()?;
    let mut full = match config.remove("rope_scaling") {
        Some(scaling) if scaling.is_object() => scaling,
        _ => json!({"rope_type": "default"}),
    };
    full["rope_theta"] = json!(theta);
    let local = source.number("rope.freq_base_swa")?.unwrap_or(theta);
    config.insert(
        "rope_parameters".into(),
        json!({
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }),
    );
    Ok(())
}
