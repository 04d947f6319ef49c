//! The tokenizer, as llama.cpp has it: tokens, their types, merges or scores, special tokens, chat template.

use super::Shapes;
use candle_quant::checkpoint::{gguf_pre_tokenizer, Checkpoint, GgufValue};
use candle_quant::{Error, Result};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

/// What becomes of it.
pub(super) struct Tokenizer {
    pub values: BTreeMap<String, GgufValue>,
    /// What is left out, and why.
    pub note: Option<String>,
}

/// Longer files are none.
const MAX_BYTES: usize = 48 << 20;

/// The types of tokens.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// How contractions are written shortly, and in full.
const CONTRACTIONS: [&str; 2] =
    ["(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"];

/// What cuts off one digit after the other, and what GPT-2 cuts by, which tokenizer.json has names for.
const DIGIT: &str = r"\p{N}";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// That of a checkpoint whose embedding has so many rows as its shape says.
///
/// # Errors
/// If a file of it can't be read.
pub(super) fn of(source: &Checkpoint, tensors: &Shapes) -> Result<Tokenizer> {
    let mut values = BTreeMap::new();
    let none = |note: String| Tokenizer {
        values: BTreeMap::from([("tokenizer.ggml.model".to_owned(), GgufValue::Text("none".into()))]),
        note: Some(format!("the GGUF file has no tokenizer: {note}")),
    };
    let Some(text) = source.read_text("tokenizer.json", MAX_BYTES)? else {
        return Ok(none("there is no tokenizer.json beside the weights".into()));
    };
    let malformed = |error: serde_json::Error| {
        let path = source.tokenizer_file().unwrap_or_default();
        Error::file(&path, format!("malformed JSON: {error}"), "correct it or fetch it again")
    };
    let json: Value = serde_json::from_str(&text).map_err(malformed)?;
    let rows = tensors.get("model.embed_tokens.weight").and_then(|dims| dims.first()).copied();
    let Some(vocabulary) = Vocabulary::of(&json, rows.unwrap_or(0)) else {
        return Ok(none(
            "its vocabulary has no ids one after another, or more than the embedding has".into(),
        ));
    };
    let mut set = |key: &str, value| values.insert(format!("tokenizer.ggml.{key}"), value);
    let model = &json["model"];
    match (model["type"].as_str(), model["byte_fallback"].as_bool() == Some(true), cut(&json)) {
        (Some("BPE") | None, false, Some(pre)) => {
            set("model", GgufValue::Text("gpt2".into()));
            set("pre", GgufValue::Text(pre.into()));
            set("merges", GgufValue::texts(merges(model).iter().map(|[a, b]| format!("{a} {b}"))));
            set("ignore_merges", GgufValue::Bool(ignores_merges(model)));
        }
        (Some("BPE"), true, _) => {
            set("model", GgufValue::Text("llama".into()));
            set("pre", GgufValue::Text("default".into()));
            set("scores", GgufValue::numbers(&vocabulary.scores(&merges(model))));
            set("add_space_prefix", GgufValue::Bool(has_prefix(&json)));
        }
        _ => return Ok(none("it cuts text as none that is written here; tokenizer.json is copied".into())),
    }
    set("tokens", GgufValue::texts(&vocabulary.tokens));
    set("token_type", GgufValue::integers(&vocabulary.types));
    let beside = source.read_json("tokenizer_config.json")?.unwrap_or_default();
    let id = |token: &Value| {
        let token = token.as_str().or_else(|| token.get("content")?.as_str())?;
        vocabulary.ids.get(token).copied()
    };
    for (name, key) in
        [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
    {
        if let Some(id) = beside.get(name).and_then(id) {
            set(&format!("{key}_token_id"), GgufValue::U32(id));
        }
    }
    let generation = source.read_json("generation_config.json")?.unwrap_or_default();
    let of_config = |key: &str| [generation.get(key), source.config().get(key)].into_iter().flatten().next();
    let ids = |value: &Value| {
        let numbers = value.as_array().map_or(vec![value], |list| list.iter().collect());
        let id = |number: &Value| number.as_u64().and_then(|id| u32::try_from(id).ok());
        numbers.into_iter().filter_map(id).collect::<Vec<_>>()
    };
    for (field, key) in [("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")] {
        if let Some(id) = of_config(field).map(ids).and_then(|ids| ids.first().copied()) {
            set(key, GgufValue::U32(id));
        }
    }
    let ends = of_config("eos_token_id").map(ids).unwrap_or_default();
    if let Some(first) = ends.first() {
        set("eos_token_id", GgufValue::U32(*first));
    }
    if ends.len() > 1 {
        let ends: Vec<_> = ends.iter().filter_map(|id| i32::try_from(*id).ok()).collect();
        set("eos_token_ids", GgufValue::integers(&ends));
    }
    for (key, place) in [("add_bos_token", 0), ("add_eos_token", usize::MAX)] {
        let stated = beside.get(key).and_then(Value::as_bool);
        set(key, GgufValue::Bool(stated.unwrap_or_else(|| adds(&json["post_processor"], place))));
    }
    if let Some(template) = template(source, &beside)? {
        values.insert("tokenizer.chat_template".into(), GgufValue::Text(template));
    }
    Ok(Tokenizer { values, note: None })
}

struct Vocabulary {
    tokens: Vec<String>,
    types: Vec<i32>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// All tokens, and as many unused ones that there are `rows`; `None` if ids are missing.
    fn of(json: &Value, rows: usize) -> Option<Self> {
        let model = &json["model"];
        let number = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
        let mut ids = HashMap::new();
        for (token, id) in model["vocab"].as_object()? {
            ids.insert(token.clone(), number(id)?);
        }
        let is_byte = |token: &str| {
            let code = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
            code.is_some_and(|code| code.len() == 2 && code.bytes().all(|byte| byte.is_ascii_hexdigit()))
        };
        let falls_back = model["byte_fallback"].as_bool() == Some(true);
        let mut kinds: HashMap<u32, i32> = HashMap::new();
        if falls_back {
            kinds.extend(ids.iter().filter(|(token, _)| is_byte(token)).map(|(_, id)| (*id, BYTE)));
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let (token, id) = (added["content"].as_str()?, number(&added["id"])?);
            let is_special = added["special"].as_bool() == Some(true);
            kinds.insert(id, if is_special { CONTROL } else { USER_DEFINED });
            ids.insert(token.to_owned(), id);
        }
        if let (Some(unknown), true) = (model["unk_token"].as_str(), falls_back) {
            kinds.extend(ids.get(unknown).map(|id| (*id, UNKNOWN)));
        }
        let mut tokens = vec![String::new(); ids.len().max(rows)];
        let mut types = vec![UNUSED; tokens.len()];
        for (token, id) in &ids {
            let index = usize::try_from(*id).ok()?;
            token.clone_into(tokens.get_mut(index)?);
            *types.get_mut(index)? = kinds.get(id).copied().unwrap_or(NORMAL);
        }
        for (index, (token, kind)) in tokens.iter_mut().zip(&types).enumerate() {
            if *kind == UNUSED {
                *token = format!("[PAD{index}]");
            }
        }
        (rows == 0 || tokens.len() == rows).then_some(Self { tokens, types, ids })
    }

    /// Numbers by which the pairs are merged first that are among the first merges, as sentencepiece has them.
    fn scores(&self, merges: &[[&str; 2]]) -> Vec<f32> {
        let mut scores = vec![0.; self.tokens.len()];
        // The first merge of a token is what decides.
        for (rank, [a, b]) in merges.iter().enumerate().rev() {
            let place = self.ids.get(&format!("{a}{b}")).and_then(|id| scores.get_mut(*id as usize));
            place.into_iter().for_each(|score| *score = -(rank as f32));
        }
        scores
    }
}

fn merges(model: &Value) -> Vec<[&str; 2]> {
    fn merge(merge: &Value) -> Option<[&str; 2]> {
        match (merge.as_str(), merge.as_array().map(Vec::as_slice)) {
            (Some(text), _) => text.split_once(' ').map(|(a, b)| [a, b]),
            (None, Some([a, b])) => Some([a.as_str()?, b.as_str()?]),
            (None, _) => None,
        }
    }
    model["merges"].as_array().into_iter().flatten().filter_map(merge).collect()
}

fn ignores_merges(model: &Value) -> bool {
    model["ignore_merges"].as_bool() == Some(true)
}

/// llama.cpp's name of how text is cut into words of bytes; `None` if it has none that is known here.
fn cut(json: &Value) -> Option<&'static str> {
    let list = |value: &Value, of: &str| match value["type"].as_str() {
        None => Vec::new(),
        Some("Sequence") => value[of].as_array().into_iter().flatten().cloned().collect(),
        Some(_) => vec![value.clone()],
    };
    let composes = match list(&json["normalizer"], "normalizers").as_slice() {
        [] => false,
        [only] if only["type"].as_str() == Some("NFC") => true,
        _ => return None,
    };
    let steps = list(&json["pre_tokenizer"], "pretokenizers");
    let (bytes, splits) = steps.split_last()?;
    if bytes["type"].as_str() != Some("ByteLevel") || bytes["add_prefix_space"].as_bool() == Some(true) {
        return None;
    }
    let mut patterns = splits.iter().map(pattern).collect::<Option<Vec<_>>>()?;
    if bytes["use_regex"].as_bool() != Some(false) {
        patterns.push(GPT2.to_owned());
    }
    gguf_pre_tokenizer(&patterns, composes, ignores_merges(&json["model"]))
}

/// What a step cuts by, so that each match is a piece.
fn pattern(step: &Value) -> Option<String> {
    match step["type"].as_str()? {
        "Digits" if step["individual_digits"].as_bool() == Some(true) => Some(DIGIT.to_owned()),
        "Split"
            if step["behavior"].as_str() == Some("Isolated") && step["invert"].as_bool() != Some(true) =>
        {
            let pattern = step["pattern"]["Regex"].as_str()?;
            let [short, long] = CONTRACTIONS;
            Some(pattern.replace(long, short))
        }
        _ => None,
    }
}

/// Whether a space is put before the text.
fn has_prefix(json: &Value) -> bool {
    let text = json["normalizer"].to_string();
    let scheme = json["pre_tokenizer"]["prepend_scheme"].as_str();
    text.contains(r#""type":"Prepend""#) || matches!(scheme, Some("first" | "always"))
}

/// Whether a template has a special token at this place, its end if there are not so many.
fn adds(processor: &Value, place: usize) -> bool {
    let templates = match processor["processors"].as_array() {
        Some(processors) => processors.iter().collect(),
        None => vec![processor],
    };
    let single = templates.iter().find_map(|processor| processor["single"].as_array());
    let piece = single.and_then(|pieces| pieces.get(place.min(pieces.len().saturating_sub(1))));
    piece.is_some_and(|piece| piece.get("SpecialToken").is_some())
}

fn template(source: &Checkpoint, beside: &Value) -> Result<Option<String>> {
    const MOST: usize = 1 << 20;
    if let Some(template) = source.read_text("chat_template.jinja", MOST)? {
        return Ok(Some(template));
    }
    let other = source.read_json("chat_template.json")?.unwrap_or_default();
    let of = |json: &Value| {
        let stated = json.get("chat_template")?;
        let usual = || stated.as_array()?.iter().find(|entry| entry["name"].as_str() == Some("default"));
        stated.as_str().or_else(|| usual()?["template"].as_str()).map(str::to_owned)
    };
    Ok(of(beside).or_else(|| of(&other)))
}
