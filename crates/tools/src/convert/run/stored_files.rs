//! What a GGUF file says of its text, in the files that other programs look for beside weights.

use crate::convert::plan::ConvertPlan;
use crate::convert::target::Target;
use candle_quant::checkpoint::{CheckpointKind, StoredChatTemplates};
use candle_quant::Result;
use candle_quant_models::generate::stored_sampling;
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;

/// Files that have a template of their own. With a second one beside them, programs would differ in which they take.
const TEMPLATES: [&str; 2] = ["chat_template.jinja", "chat_template.json"];

/// The template that is taken without a wish for another.
const DEFAULT: &str = "default";

/// The tokens that a text begins with, ends with, and is filled up with.
const IDS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// The names and texts of these files.
///
/// # Errors
/// If a template of the source is no text.
pub(super) fn stored_files(plan: &ConvertPlan) -> Result<Vec<(&'static str, String)>> {
    // From file to file the metadata stay, with all of this in them.
    if plan.source.kind() != CheckpointKind::Gguf || plan.target == Target::Gguf {
        return Ok(Vec::new());
    }
    let mut files = Vec::new();
    files.extend(tokenizer_config(plan)?.map(|config| ("tokenizer_config.json", config)));
    if plan.target.kind().has_config() {
        files.extend(generation_config(plan)?.map(|config| ("generation_config.json", config)));
    }
    Ok(files.into_iter().map(|(name, json)| (name, format!("{json:#}\n"))).collect())
}

/// Special tokens and chat templates; `None` if there are none.
fn tokenizer_config(plan: &ConvertPlan) -> Result<Option<Value>> {
    let (templates, mut tokens) = match plan.source.stored_chat_templates()? {
        Some(StoredChatTemplates { templates, special_tokens, .. }) => (templates, special_tokens),
        None => Default::default(),
    };
    if tokens.is_empty() {
        // Why a tokenizer can't be read is among the plan's notes.
        let tokenizer = plan.source.stored_tokenizer().ok().flatten();
        tokens = tokenizer.map(|tokenizer| tokenizer.special_tokens).unwrap_or_default();
    }
    let is_beside = TEMPLATES.iter().any(|name| plan.source.sidecar_files().path(name).is_some());
    let template = chat_template(&templates).filter(|_| !is_beside);
    if template.is_none() && tokens.is_empty() {
        return Ok(None);
    }
    // Without a class, transformers takes that of the `model_type`, which may be made of other files than tokenizer.json.
    let mut config = Map::from_iter([
        ("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast")),
        ("clean_up_tokenization_spaces".to_owned(), json!(false)),
    ]);
    config.extend(tokens.into_iter().map(|(name, token)| (name, token.into())));
    config.extend(template.map(|template| ("chat_template".to_owned(), template)));
    Ok(Some(config.into()))
}

/// One template as a text, several as a list; `None` if none is the usual one.
fn chat_template(templates: &BTreeMap<String, String>) -> Option<Value> {
    let usual = templates.get(DEFAULT)?;
    if templates.len() == 1 {
        return Some(json!(usual));
    }
    Some(templates.iter().map(|(name, template)| json!({"name": name, "template": template})).collect())
}

/// The tokens that begin and end a text, and how it is sampled; `None` if nothing is said of these.
fn generation_config(plan: &ConvertPlan) -> Result<Option<Value>> {
    let config = plan.source.config();
    let stated = IDS.iter().filter_map(|key| Some((key, config.get(key).filter(|id| !id.is_null())?)));
    let mut generation: Map<_, _> = stated.map(|(key, id)| ((*key).to_owned(), id.clone())).collect();
    let sampling = stored_sampling(&plan.source)?;
    if !sampling.is_empty() {
        // transformers takes the most likely token otherwise.
        generation.insert("do_sample".to_owned(), true.into());
        generation.extend(sampling);
    }
    Ok((!generation.is_empty()).then_some(generation.into()))
}
