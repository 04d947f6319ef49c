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
pub(super) mod layout;
mod llama;
mod llama4;
pub(super) mod mlx_lm;
mod olmo;
mod phi;
pub(super) mod published;
mod qwen;
mod qwen_linear;
mod routed;
#[cfg(test)]
mod tests;
mod unasked;

use super::fields::{Asked, Fields};
use super::Config;
use candle_quant::checkpoint::FusedExperts;
use candle_quant::{Checkpoint, Error, Result};
use layout::{
    PublishedLayout, FUSED, FUSED_MLP, MIXTRAL, NORMS_OF_HEADS, PARAMETERS_OR_BLOCKS, PARAMETERS_OR_EACH,
    USUAL,
};
use mlx_lm::MlxLm;
use serde_json::Value;

/// A family of models.
#[derive(Debug)]
pub struct Family {
    /// What its configs call it.
    pub model_type: &'static str,
    /// What transformers calls its class, before `ForCausalLM`.
    class: &'static str,
    /// Some of its models.
    pub models: &'static str,
    pub(crate) layout: PublishedLayout,
    read: fn(Fields) -> Result<Config>,
}

const fn family(
    model_type: &'static str,
    class: &'static str,
    models: &'static str,
    read: fn(Fields) -> Result<Config>,
) -> Family {
    Family { model_type, class, models, layout: USUAL, read }
}

impl Family {
    const fn laid_out(self, layout: PublishedLayout) -> Self {
        Self { layout, ..self }
    }

    /// What the `architectures` of a published config name.
    pub fn class(&self) -> String {
        format!("{}ForCausalLM", self.class)
    }

    /// That of a config, and of one of a model with more parts than text that of its text.
    pub(crate) fn of(config: &Value) -> Option<&'static Self> {
        let named = |config: &Value| find(config.get("model_type")?.as_str()?);
        named(config).or_else(|| named(config.get("text_config")?))
    }
}

/// All families, by name. The file `docs/models.md` says which files of them are tested.
///
/// ```
/// let names: Vec<_> = candle_quant_models::families().iter().map(|family| family.model_type).collect();
/// assert!(names.contains(&"gemma3_text") && names.is_sorted());
/// ```
pub fn families() -> &'static [Family] {
    FAMILIES
}

const FAMILIES: &[Family] = &[
    family("cohere", "Cohere", "Command R, R+", cohere::cohere),
    family("cohere2", "Cohere2", "Command R7B, Command A, Aya", cohere::cohere2),
    family("deepseek_v2", "DeepseekV2", "DeepSeek V2, V2.5, Coder V2", deepseek::deepseek_v2),
    family("deepseek_v3", "DeepseekV3", "DeepSeek V3, V3.1, R1", deepseek::deepseek_v3),
    family("ernie4_5", "Ernie4_5", "ERNIE 4.5", llama::ernie4_5),
    family("ernie4_5_moe", "Ernie4_5_Moe", "ERNIE 4.5 with experts", experts::ernie4_5_moe),
    family("exaone4", "Exaone4", "EXAONE 4", llama::exaone4),
    family("gemma", "Gemma", "Gemma", gemma::gemma),
    family("gemma2", "Gemma2", "Gemma 2", gemma::gemma2),
    family("gemma3_text", "Gemma3", "Gemma 3", gemma::gemma3),
    family("glm", "Glm", "GLM-4 of 2024, GLM-Edge", glm::glm).laid_out(FUSED_MLP),
    family("glm4", "Glm4", "GLM-4 of 2025 (0414), GLM-Z1", glm::glm4).laid_out(FUSED_MLP),
    family("glm4_moe", "Glm4Moe", "GLM-4.5 to 4.7", glm::glm4_moe),
    family("gpt_oss", "GptOss", "gpt-oss", experts::gpt_oss).laid_out(PARAMETERS_OR_BLOCKS),
    family("granite", "Granite", "Granite 3 and 4 (dense)", llama::granite),
    family("granitemoe", "GraniteMoe", "Granite with experts", experts::granitemoe),
    family("helium", "Helium", "Helium", llama::helium),
    family("hunyuan_v1_dense", "HunYuanDenseV1", "Hunyuan (dense)", llama::hunyuan),
    family("internlm3", "InternLM3", "InternLM 3", llama::internlm3),
    family(
        "llama",
        "Llama",
        "Llama 1 to 3, SmolLM 1 and 2, Yi, and what shares their architecture",
        llama::llama,
    ),
    family("llama4_text", "Llama4", "Llama 4 Scout and Maverick", llama4::llama4)
        .laid_out(PARAMETERS_OR_EACH),
    family("ministral3", "Ministral3", "Ministral 3", llama::ministral3),
    family("mistral", "Mistral", "Mistral", llama::mistral),
    family("mixtral", "Mixtral", "Mixtral", experts::mixtral).laid_out(MIXTRAL),
    family("nemotron", "Nemotron", "Nemotron 4, Minitron", phi::nemotron),
    family("olmo", "Olmo", "OLMo", olmo::olmo),
    family("olmo2", "Olmo2", "OLMo 2", olmo::olmo2),
    family("olmo3", "Olmo3", "OLMo 3", olmo::olmo3),
    family("olmoe", "Olmoe", "OLMoE", olmo::olmoe),
    family("phi", "Phi", "Phi 1, 1.5 and 2", phi::phi),
    family("phi3", "Phi3", "Phi 3 and 4", phi::phi3).laid_out(FUSED),
    family("qwen2", "Qwen2", "Qwen 1.5 to 2.5", qwen::qwen2),
    family("qwen2_moe", "Qwen2Moe", "Qwen 1.5 and 2 with experts", qwen::qwen2_moe),
    family("qwen3", "Qwen3", "Qwen 3", qwen::qwen3),
    family("qwen3_5_moe_text", "Qwen3_5Moe", "Qwen 3.5 with experts", qwen_linear::qwen3_5_moe)
        .laid_out(PARAMETERS_OR_EACH),
    family("qwen3_5_text", "Qwen3_5", "Qwen 3.5", qwen_linear::qwen3_5),
    family("qwen3_moe", "Qwen3Moe", "Qwen 3 with experts", qwen::qwen3_moe),
    family("qwen3_next", "Qwen3Next", "Qwen3-Next", qwen_linear::qwen3_next),
    family("seed_oss", "SeedOss", "Seed-OSS", llama::seed_oss),
    family("smollm3", "SmolLM3", "SmolLM 3", llama::smollm3),
    family("stablelm", "StableLm", "StableLM", phi::stablelm).laid_out(NORMS_OF_HEADS),
    family("starcoder2", "Starcoder2", "StarCoder 2", phi::starcoder2),
];

fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}

impl Config {
    /// Reads the config of a checkpoint.
    ///
    /// # Errors
    /// As those of [`from_json`](Config::from_json), with the path of the file.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let (config, path) = (checkpoint.config(), checkpoint.config_file());
        if config.is_null() {
            let problem = if path.is_file() { "no config in it" } else { "no such file" };
            return Err(Error::file(&path, problem, "put the model's beside the weights"));
        }
        let config = read(config).map_err(|error| match error {
            Error::Mismatch { what, expected, found } => Error::file(
                &path,
                format!("{what}: expected {expected}, found {found}"),
                "fetch it again, or correct it",
            ),
            Error::Unsupported { what, remedy } => {
                Error::Unsupported { what: format!("{what} ({})", path.display()), remedy }
            }
            other => other,
        })?;
        Ok(config.stored_in(checkpoint))
    }

    /// Reads a `config.json`. Of one that belongs to an open checkpoint, [`from_checkpoint`](Config::from_checkpoint)
    /// tells more if something is wrong.
    ///
    /// # Errors
    /// If the architecture is not one of this module's, or a value is missing or senseless.
    pub fn from_json(config: &Value) -> Result<Self> {
        if config.is_null() {
            return Err(Error::mismatch("config.json", "the model's, beside the weights", "no such file"));
        }
        read(config).map_err(|error| match error {
            Error::Mismatch { what, expected, found } => {
                Error::Mismatch { what: format!("config.json: {what}"), expected, found }
            }
            other => other,
        })
    }
}

/// Reads a `config.json`; of a model with more parts than text, that of the text.
///
/// # Errors
/// If the family is not in the table, or a value is missing or senseless, or changes numbers and is not known. They don't
/// name the file.
pub(super) fn read(json: &Value) -> Result<Config> {
    let top = Fields::new(json);
    let stated = top.text("model_type")?;
    let text = top.object("text_config")?;
    let of_text = text.map(|text| text.text("model_type")).transpose()?.flatten();
    let (fields, found) = match (text, stated.and_then(find), of_text.and_then(find)) {
        (Some(text), None, Some(family)) => (text, family),
        (_, Some(family), _) => (top, family),
        (_, None, _) => {
            let model_type = stated.ok_or_else(|| Error::mismatch("`model_type`", "a string", "nothing"))?;
            let known: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
            return Err(Error::Unsupported {
                what: format!("model type `{model_type}`"),
                remedy: format!("supported are {}", known.join(", ")),
            });
        }
    };
    let asked = Asked::default();
    let mut config = (found.read)(fields.noting(&asked))?;
    if let Some(moe) = &mut config.moe {
        moe.transposed_parameters = MlxLm::of(json).fused.is_some_and(FusedExperts::has_columns);
    }
    // Beside the text, or in it.
    if let Some(tied) = top.flag("tie_word_embeddings")? {
        config.tie_word_embeddings = Some(tied);
    }
    unasked::check(fields, &asked, found.model_type, config.moe.is_some())?;
    config.validate()?;
    Ok(config)
}
