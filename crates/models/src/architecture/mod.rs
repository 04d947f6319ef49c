//! The families of models: what each makes of its `config.json`.
//!
//! A family of known parts is a function that fills in a [`Config`], and a line of the table. Absent fields mean what they
//! mean in transformers. A field that changes numbers in some family and that a family does not ask for is an error.

mod base;
mod cohere;
mod deepseek;
mod experts;
mod gemma;
mod glm;
mod llama;
mod olmo;
mod phi;
mod qwen;
mod qwen_linear;
mod routed;
mod unasked;

use super::fields::{Asked, Fields};
use super::Config;
use candle_quant::{Error, Result};
use serde_json::Value;

/// A family of models.
pub(super) struct Architecture {
    /// What its configs call it.
    pub model_type: &'static str,
    read: fn(Fields) -> Result<Config>,
}

const fn family(model_type: &'static str, read: fn(Fields) -> Result<Config>) -> Architecture {
    Architecture { model_type, read }
}

/// All families, by name.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    family("cohere", cohere::cohere),
    family("cohere2", cohere::cohere2),
    family("deepseek_v2", deepseek::deepseek_v2),
    family("deepseek_v3", deepseek::deepseek_v3),
    family("ernie4_5", llama::ernie4_5),
    family("ernie4_5_moe", experts::ernie4_5_moe),
    family("exaone4", llama::exaone4),
    family("gemma", gemma::gemma),
    family("gemma2", gemma::gemma2),
    family("gemma3_text", gemma::gemma3),
    family("glm", glm::glm),
    family("glm4", glm::glm4),
    family("glm4_moe", glm::glm4_moe),
    family("gpt_oss", experts::gpt_oss),
    family("granite", llama::granite),
    family("granitemoe", experts::granitemoe),
    family("helium", llama::helium),
    family("hunyuan_v1_dense", llama::hunyuan),
    family("internlm3", llama::internlm3),
    family("llama", llama::llama),
    family("ministral3", llama::ministral3),
    family("mistral", llama::mistral),
    family("mixtral", experts::mixtral),
    family("nemotron", phi::nemotron),
    family("olmo", olmo::olmo),
    family("olmo2", olmo::olmo2),
    family("olmo3", olmo::olmo3),
    family("olmoe", olmo::olmoe),
    family("phi", phi::phi),
    family("phi3", phi::phi3),
    family("qwen2", qwen::qwen2),
    family("qwen2_moe", qwen::qwen2_moe),
    family("qwen3", qwen::qwen3),
    family("qwen3_5_moe_text", qwen_linear::qwen3_5_moe),
    family("qwen3_5_text", qwen_linear::qwen3_5),
    family("qwen3_moe", qwen::qwen3_moe),
    family("qwen3_next", qwen_linear::qwen3_next),
    family("seed_oss", llama::seed_oss),
    family("smollm3", llama::smollm3),
    family("stablelm", phi::stablelm),
    family("starcoder2", phi::starcoder2),
];

fn find(model_type: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|family| family.model_type == model_type)
}

/// Reads a `config.json`; of a model with more parts than text, that of the text.
///
/// # Errors
/// If the family is not in the table, or a value is missing or senseless, or changes numbers and is not known. They don't
/// name the file.
pub(super) fn read(config: &Value) -> Result<Config> {
    let top = Fields::new(config);
    let stated = top.text("model_type")?;
    let text = top.object("text_config")?;
    let of_text = text.map(|text| text.text("model_type")).transpose()?.flatten();
    let (fields, found) = match (text, stated.and_then(find), of_text.and_then(find)) {
        (Some(text), None, Some(family)) => (text, family),
        (_, Some(family), _) => (top, family),
        (_, None, _) => {
            let model_type = stated.ok_or_else(|| Error::mismatch("`model_type`", "a string", "nothing"))?;
            let known: Vec<_> = ARCHITECTURES.iter().map(|family| family.model_type).collect();
            return Err(Error::Unsupported {
                what: format!("model type `{model_type}`"),
                remedy: format!("supported are {}", known.join(", ")),
            });
        }
    };
    let asked = Asked::default();
    let mut config = (found.read)(fields.noting(&asked))?;
    // Beside the text, or in it.
    if let Some(tied) = top.flag("tie_word_embeddings")? {
        config.tie_word_embeddings = Some(tied);
    }
    unasked::check(fields, &asked, found.model_type, config.moe.is_some())?;
    config.validate()?;
    Ok(config)
}
