//! The `config.json` that a GGUF file's metadata stands for.

use super::architectures::{Architecture, Constant, Key, KeyKind};
use super::metadata::{Metadata, Value as Stored};
use super::rope::{self, Divisors};
use crate::{Error, Result};
use serde_json::{json, Value};
use std::path::Path;

pub(super) type Map = serde_json::Map<String, Value>;

/// What a file says: its metadata, by keys without the architecture's name before them, and its tensors.
pub(super) struct Source<'a> {
    pub metadata: &'a Metadata,
    pub architecture: &'a Architecture,
    /// Rows of the embedding.
    pub vocab_size: Option<usize>,
    /// Whether there is a tensor of this name, as models call it.
    pub has_tensor: &'a dyn Fn(&str) -> bool,
    pub divisors: &'a Divisors,
    /// Whether columns of output projections of linear attention are heads in tiles.
    pub has_tiled_outputs: bool,
}

/// More layers than any model has.
const MAX_LAYERS: u32 = 4096;

impl Source<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    pub fn path(&self) -> &Path {
        &self.metadata.path
    }

    pub fn size(&self, key: &str) -> Result<Option<u32>> {
        self.metadata.size(&self.key(key))
    }

    /// A size above zero.
    pub fn required_size(&self, key: &str) -> Result<u32> {
        self.size(key)?.filter(|size| *size > 0).ok_or_else(|| self.wrong(key, "a whole number above zero"))
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.number(&self.key(key))
    }

    pub fn has_key(&self, key: &str) -> bool {
        self.metadata.get(&self.key(key)).is_some()
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.metadata.text(&self.key(key))
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.metadata.flag(&self.key(key))
    }

    pub fn heads(&self) -> Result<u32> {
        self.metadata.required_size(&self.key("attention.head_count"))
    }

    /// The base of the rotary embedding, which is 10000 without a word of it.
    pub fn theta(&self) -> Result<f64> {
        Ok(self.number("rope.freq_base")?.unwrap_or(1e4))
    }

    /// Whether the first layer has a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.has_in(0, name)
    }

    /// Whether layer `layer` has a tensor.
    pub fn has_in(&self, layer: u32, name: &str) -> bool {
        (self.has_tensor)(&format!("model.layers.{layer}.{name}"))
    }

    /// Layers without those that guess further tokens, which stand behind the others.
    fn layers(&self) -> Result<Option<u32>> {
        const FURTHER: &str = "nextn_predict_layers";
        let (all, further) = (self.size("block_count")?, self.size(FURTHER)?.unwrap_or(0));
        match all {
            Some(all) if further > 0 => match all.checked_sub(further).filter(|layers| *layers > 0) {
                Some(layers) => Ok(Some(layers)),
                None => Err(self.wrong(FURTHER, &format!("less than the {all} of `block_count`"))),
            },
            all => Ok(all),
        }
    }

    /// The `layer_types` of a model whose layers are all alike.
    pub fn layer_types(&self, slides: bool) -> Result<Value> {
        let layers = self.layers()?.filter(|layers| *layers <= MAX_LAYERS);
        let layers =
            layers.ok_or_else(|| self.wrong("block_count", &format!("up to {MAX_LAYERS} layers")))?;
        Ok((0..layers).map(|_| layer_type(slides)).collect())
    }

    pub fn wrong(&self, key: &str, expected: &str) -> Error {
        self.metadata.wrong(&self.key(key), expected)
    }

    pub fn problem(&self, problem: String) -> Error {
        Error::file(self.path(), problem, "convert the model again")
    }

    /// The file does not say what models of the type differ in.
    pub fn missing(&self, key: &str, why: &str) -> Error {
        let problem = format!("`{}` is missing {why}, where models differ", self.key(key));
        let remedy =
            "convert the model again with a newer converter, or add it with gguf's `gguf-new-metadata`";
        Error::file(self.path(), problem, remedy)
    }

    /// Refuses keys of Ollama's own converter, whose files call otherwise, or leave out, what llama.cpp's say.
    pub fn refuse_keys(&self, keys: &[&str]) -> Result<()> {
        match keys.iter().find(|key| self.has_key(key)) {
            None => Ok(()),
            Some(key) => Err(Error::Unsupported {
                what: format!("{}: `{}`, a key of Ollama's converter,", self.path().display(), self.key(key)),
                remedy: "use a file that llama.cpp's converter wrote".into(),
            }),
        }
    }

    pub fn unsupported(&self, key: &str, what: &str) -> Error {
        Error::Unsupported {
            what: format!("{}: `{}` is {what}", self.path().display(), self.key(key)),
            remedy: "use another model of this architecture".into(),
        }
    }
}

/// The config of a model of the source's architecture.
pub(super) fn config(source: &Source) -> Result<Value> {
    let Source { metadata, architecture, .. } = source;
    check(source)?;
    let (heads, hidden) = (source.heads()?, source.size("embedding_length")?);
    let mut config = Map::new();
    let mut set = |field: &str, value: Value| config.insert(field.to_owned(), value);
    set("model_type", architecture.model_type.into());
    set("vocab_size", json!(source.vocab_size));
    set("hidden_size", json!(hidden));
    set("intermediate_size", json!(source.size("feed_forward_length")?));
    set("num_hidden_layers", json!(source.layers()?));
    set("num_attention_heads", heads.into());
    // Of latents each head has keys of its own, whatever llama.cpp caches.
    let kv_heads = source.size("attention.head_count_kv")?.filter(|_| !architecture.has_latents);
    set("num_key_value_heads", kv_heads.unwrap_or(heads).into());
    set("max_position_embeddings", json!(source.size("context_length")?));
    set("tie_word_embeddings", json!(!(source.has_tensor)("lm_head.weight")));
    set("rope_theta", json!(source.theta()?));
    set("sliding_window", json!(source.size("attention.sliding_window")?.filter(|window| *window > 0)));
    set("bos_token_id", json!(metadata.size("tokenizer.ggml.bos_token_id")?));
    set("eos_token_id", stop_tokens(metadata)?);
    set("pad_token_id", json!(metadata.size("tokenizer.ggml.padding_token_id")?));
    let mut rotated = source.size("rope.dimension_count")?;
    if !architecture.has_latents {
        let head_dim = head_dim(source, heads, hidden)?;
        rotated = rotated.or(head_dim);
        set("head_dim", json!(head_dim));
        if let (Some(rotated), Some(head_dim)) = (rotated, head_dim.filter(|head_dim| *head_dim > 0)) {
            set("partial_rotary_factor", json!(share(rotated, head_dim)));
        }
    }
    let scaling = rope::scaling(source, rotated)?;
    // Models that have been published with LongRoPE say it beside.
    const ORIGINAL: &str = "original_max_position_embeddings";
    if let (Some("longrope"), Some(original)) = (scaling["rope_type"].as_str(), scaling.get(ORIGINAL)) {
        set(ORIGINAL, original.clone());
    }
    set("rope_scaling", scaling);
    if let Some((field, pattern)) = sliding_layers(source)? {
        set(field, pattern);
    }
    for &(field, constant) in architecture.common {
        set(
            field,
            match constant {
                Constant::Text(text) => text.into(),
                Constant::Bool(is) => is.into(),
                Constant::Size(size) => size.into(),
            },
        );
    }
    for &(field, _) in architecture.flags {
        let has = |flag: &&(&str, &str)| flag.0 == field && source.has(flag.1);
        set(field, architecture.flags.iter().any(|flag| has(&flag)).into());
    }
    for key in architecture.keys {
        if let Some(value) = value(source, key)? {
            set(key.field, value);
        }
    }
    (architecture.others)(source, &mut config)?;
    Ok(Value::Object(config))
}

/// Refuses what some files of an architecture have, and models here do not.
fn check(source: &Source) -> Result<()> {
    const EXPERTS: &str = "expert_count";
    let Architecture { keys, parts, .. } = source.architecture;
    let has_experts =
        keys.iter().any(|key| key.key == EXPERTS) || parts.iter().any(|(name, _)| name.ends_with("_exps"));
    // Some files of dense models count one.
    let experts = source.size(EXPERTS)?.filter(|experts| *experts > 1);
    if let Some(experts) = experts.filter(|_| !has_experts) {
        return Err(source.unsupported(EXPERTS, &format!("{experts}, where models have no experts")));
    }
    const SCORES: &str = "expert_gating_func";
    if let (Some(expected), Some(found @ 1..)) = (source.architecture.scores, source.size(SCORES)?) {
        if found != expected {
            return Err(source.unsupported(SCORES, &format!("{found}, expected {expected}")));
        }
    }
    const SECTIONS: &str = "rope.dimension_sections";
    match source.metadata.get(&source.key(SECTIONS)) {
        None => Ok(()),
        Some(Stored::Array(sections))
            if sections.integers().is_some_and(|mut all| all.all(|size| size == 0)) =>
        {
            Ok(())
        }
        // Of text they are all the same.
        Some(_) if source.architecture.linear.is_some() => Ok(()),
        Some(_) => Err(source.unsupported(SECTIONS, "given, for positions of images")),
    }
}

fn head_dim(source: &Source, heads: u32, hidden: Option<u32>) -> Result<Option<u32>> {
    let head_dim = match (source.size("attention.key_length")?, hidden) {
        (Some(head_dim), _) => Some(head_dim),
        (None, Some(hidden)) => hidden.checked_div(heads),
        (None, None) => None,
    };
    if let (Some(keys), Some(values)) = (head_dim, source.size("attention.value_length")?) {
        if keys != values {
            return Err(Error::Unsupported {
                what: format!("{}: keys of {keys} and values of {values} elements", source.path().display()),
                remedy: "use a model whose keys and values are of one length".into(),
            });
        }
    }
    Ok(head_dim)
}

/// The share of a head that turns. Who multiplies with it rounds down.
fn share(rotated: u32, head_dim: u32) -> f64 {
    let share = f64::from(rotated) / f64::from(head_dim);
    match share * f64::from(head_dim) < f64::from(rotated) {
        true => share.next_up(),
        false => share,
    }
}

/// Which layers slide, if the file says it: all but each last one of so many, or a list.
fn sliding_layers(source: &Source) -> Result<Option<(&'static str, Value)>> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let Some(Stored::Array(layers)) = source.metadata.get(&source.key(PATTERN)) else {
        let pattern = source.size(PATTERN)?.filter(|pattern| *pattern > 0);
        return Ok(pattern.map(|pattern| ("sliding_window_pattern", pattern.into())));
    };
    let count = source.size("block_count")?.filter(|layers| *layers <= MAX_LAYERS);
    let flags = layers.flags().filter(|_| count.is_some_and(|count| layers.len as u64 == u64::from(count)));
    let expected = || format!("one yes or no for each of up to {MAX_LAYERS} layers");
    let flags = flags.ok_or_else(|| source.wrong(PATTERN, &expected()))?;
    // Layers that guess further tokens have theirs, too.
    let layers = source.layers()?.and_then(|layers| usize::try_from(layers).ok()).unwrap_or(0);
    Ok(Some(("layer_types", flags.take(layers).map(layer_type).collect())))
}

fn layer_type(slides: bool) -> Value {
    (if slides { "sliding_attention" } else { "full_attention" }).into()
}

fn value(source: &Source, key: &Key) -> Result<Option<Value>> {
    let &Key { key, kind, is_required, .. } = key;
    let (value, expected) = match kind {
        KeyKind::Size => {
            let size = source.size(key)?.filter(|size| *size > 0);
            (size.map(Value::from), "a whole number above zero")
        }
        KeyKind::Index => (source.size(key)?.map(Value::from), "a whole number"),
        KeyKind::Number => (source.number(key)?.map(Value::from), "a number"),
        KeyKind::Flag => (Some(source.flag(key)?.unwrap_or(false).into()), "yes or no"),
    };
    match value {
        None if is_required => Err(source.wrong(key, expected)),
        value => Ok(value),
    }
}

/// What the file calls its architecture; nothing if it does not say it.
pub(super) fn name_of(metadata: &Metadata) -> &str {
    match metadata.get("general.architecture") {
        Some(Stored::Text(architecture)) => architecture,
        _ => "",
    }
}

/// More tokens than this do not end a text.
const MAX_STOP_TOKENS: usize = 1024;

/// Tokens that end a text or a turn.
fn stop_tokens(metadata: &Metadata) -> Result<Value> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ids.extend(metadata.size(&format!("tokenizer.ggml.{key}"))?.map(i128::from));
    }
    const SEVERAL: &str = "tokenizer.ggml.eos_token_ids";
    if let Some(Stored::Array(array)) = metadata.get(SEVERAL) {
        if array.len > MAX_STOP_TOKENS {
            return Err(metadata.wrong(SEVERAL, "a few ids"));
        }
        ids.extend(array.integers().into_iter().flatten());
    }
    let mut unique: Vec<u32> = Vec::new();
    for id in ids.into_iter().filter_map(|id| u32::try_from(id).ok()) {
        if !unique.contains(&id) {
            unique.push(id);
        }
    }
    Ok(match unique.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        several => json!(several),
    })
}
