//! The scaling of the rotary embedding: keys, and factors in tensors of their own.

use candle_quant::checkpoint::GgufValue;
use candle_quant_models::{Config, RopeScaling};
use std::collections::BTreeMap;
use std::f64::consts::TAU;

/// The context of Llama 3, which files do not say.
const USUAL_CONTEXT: usize = 8192;

/// Says how frequencies are stretched.
pub(super) fn describe(
    config: &Config,
    architecture: &str,
    values: &mut BTreeMap<String, GgufValue>,
    factors: &mut BTreeMap<&'static str, Vec<f32>>,
) {
    let mut set = |key: &str, value| values.insert(format!("{architecture}.rope.scaling.{key}"), value);
    let number = |number: f64| GgufValue::F32(number as f32);
    let context = |context: usize| GgufValue::U32(u32::try_from(context).unwrap_or(u32::MAX));
    const CONTEXT: &str = "original_context_length";
    let rounded = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect::<Vec<_>>();
    match &config.rope.scaling {
        RopeScaling::None | RopeScaling::Dynamic => {}
        RopeScaling::Linear { factor } => {
            set("type", GgufValue::Text("linear".into()));
            set("factor", number(*factor));
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings,
            attention_factor,
            ..
        } => {
            set("type", GgufValue::Text("yarn".into()));
            set("factor", number(*factor));
            set("yarn_beta_fast", number(*beta_fast));
            set("yarn_beta_slow", number(*beta_slow));
            set(CONTEXT, context(*original_max_position_embeddings));
            // What a factor gives by itself is not said.
            let usual = 0.1 * factor.ln() + 1.;
            if (attention_factor / usual - 1.).abs() > 1e-6 {
                set("yarn_attn_factor", number(*attention_factor));
            }
        }
        RopeScaling::Long { short, long, original_max_position_embeddings, attention_factor } => {
            set(CONTEXT, context(*original_max_position_embeddings));
            set("attn_factor", number(*attention_factor));
            factors.insert("rope_factors_long.weight", rounded(long));
            factors.insert("rope_factors_short.weight", rounded(short));
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            if *original_max_position_embeddings != USUAL_CONTEXT {
                set(CONTEXT, context(*original_max_position_embeddings));
            }
            let pairs = config.rope.rotary_dim / 2;
            let divisor = |pair: usize| {
                let frequency = config.rope.theta.powf(-(pair as f64) / pairs as f64);
                let turns = *original_max_position_embeddings as f64 * frequency / TAU;
                let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0., 1.);
                (1. / (keep + (1. - keep) / factor)) as f32
            };
            factors.insert("rope_freqs.weight", (0..pairs).map(divisor).collect());
        }
        // The reader of what is written tells that it is missing.
        _ => {}
    }
}
