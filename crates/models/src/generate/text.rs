//! Tokens to text as they come, and what a checkpoint says about its tokens.

use super::caught::{caught, used};
use super::tokenizer::stored_tokenizer;
use super::tokenizer_json;
use candle_quant::{Checkpoint, Error, Result};
use serde_json::Value;
use std::path::Path;
use tokenizers::tokenizer::DecodeStream;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer,
};

/// The tokenizer of a checkpoint: the `tokenizer.json` beside it or, without one, that in the file itself.
///
/// What the file asks for in padding and truncation is left out.
///
/// # Errors
/// If there is neither, if it can't be read or used, or would take more than 1 GiB of memory.
pub fn load_tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    let Some(path) = checkpoint.tokenizer_file() else {
        if let Some(tokenizer) = stored_tokenizer(checkpoint)? {
            return Ok(tokenizer);
        }
        return Err(Error::File {
            path: checkpoint.path().to_path_buf(),
            problem: "there is no tokenizer.json".to_string(),
            remedy: "copy the one of the original model beside the weights".to_string(),
        });
    };
    let text = checkpoint.read_text("tokenizer.json", tokenizer_json::MAX_BYTES)?.unwrap_or_default();
    from_json(&path, text)
}

/// A tokenizer, of which padding and truncation are left out: a prompt is as long as it is.
fn from_json(path: &Path, text: String) -> Result<Tokenizer> {
    let wrong = |problem: String| Error::file(path, problem, "fetch the file again");
    let checked = tokenizer_json::checked(&text).map_err(wrong)?;
    drop(text);
    let built = caught(|| Tokenizer::from_bytes(checked));
    let built = built.map_err(|panic| wrong(format!("not a tokenizer: {panic}")))?;
    let tokenizer = built.map_err(|error| wrong(format!("not a tokenizer: {error}")))?;
    try_out(&tokenizer).map_err(|panic| wrong(format!("a tokenizer that gives up: {panic}")))?;
    Ok(tokenizer)
}

/// Uses a tokenizer once: some panic at the first text only. That a text has no tokens is nothing wrong.
pub(super) fn try_out(tokenizer: &Tokenizer) -> Result<(), String> {
    const TEXT: &str =
        "Once upon a time, 3.14 \u{e4}\u{df}\u{ff21}\u{4e2d}\u{6587} \u{1f600}e\u{301}\r\n\tThe\u{a0}end.";
    caught(|| {
        let Ok(encoding) = tokenizer.encode(TEXT, true) else { return };
        // Neither is it that they are no text.
        let _ = tokenizer.decode(encoding.get_ids(), true);
    })
}

/// No text has more ends than this.
const MAX_STOP_TOKENS: usize = 1024;

/// The tokens that end a text: every `eos_token_id` of `config.json` and `generation_config.json`.
///
/// # Errors
/// If `generation_config.json` can't be read, or an id is no number.
pub fn stop_tokens(checkpoint: &Checkpoint) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    let generation = checkpoint.read_json("generation_config.json")?.unwrap_or_default();
    for (file, config) in [("config.json", checkpoint.config()), ("generation_config.json", &generation)] {
        let ids = match config.get("eos_token_id") {
            None | Some(Value::Null) => continue,
            Some(Value::Array(ids)) => ids.as_slice(),
            Some(id) => std::slice::from_ref(id),
        };
        if ids.len() > MAX_STOP_TOKENS {
            let expected = format!("{MAX_STOP_TOKENS} ids at most");
            return Err(Error::mismatch(format!("{file}: `eos_token_id`"), expected, ids.len().to_string()));
        }
        for id in ids {
            let token = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                Error::mismatch(format!("{file}: `eos_token_id`"), "token ids", id.to_string())
            })?;
            if !tokens.contains(&token) {
                tokens.push(token);
            }
        }
    }
    Ok(tokens)
}

type Decode<'t> = DecodeStream<
    't,
    ModelWrapper,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// Turns tokens into text piece by piece; a character that spans tokens comes out whole.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    decode: Decode<'t>,
    tokens: Vec<u32>,
    /// The prompt's text and all pieces so far.
    text: String,
    prompt_len: usize,
}

impl<'t> TextStream<'t> {
    /// A stream that continues the tokens of `prompt`: many decoders treat the first token of a text
    /// in another way than the following ones.
    ///
    /// # Errors
    /// If the tokenizer can't decode the prompt.
    pub fn new(tokenizer: &'t Tokenizer, prompt: &[u32]) -> Result<Self> {
        let mut stream = Self {
            tokenizer,
            decode: tokenizer.decode_stream(true),
            tokens: Vec::new(),
            text: String::new(),
            prompt_len: 0,
        };
        for &token in prompt {
            stream.push(token)?;
        }
        stream.prompt_len = stream.text.len();
        Ok(stream)
    }

    /// Takes one token; returns the text it completes, if any.
    ///
    /// # Errors
    /// If the tokenizer can't decode the token.
    pub fn push(&mut self, token: u32) -> Result<Option<&str>> {
        self.tokens.push(token);
        let Some(piece) = used(|| self.decode.step(token))? else { return Ok(None) };
        let start = self.text.len();
        self.text.push_str(&piece);
        Ok(self.text.get(start..))
    }

    /// Ends the stream: all text since the prompt, and what was held back because it is no whole
    /// character.
    ///
    /// # Errors
    /// If the tokenizer can't decode the tokens.
    pub fn finish(mut self) -> Result<(String, String)> {
        let whole = used(|| self.tokenizer.decode(&self.tokens, true))?;
        let rest = whole.strip_prefix(&self.text).unwrap_or_default().to_string();
        Ok((self.text.split_off(self.prompt_len), rest))
    }
}
