//! Tokens to text as they come, and what a checkpoint says about its tokens.

use super::tokenizer::stored_tokenizer;
use candle_quant::{Checkpoint, Error, Result};
use serde_json::Value;
use tokenizers::tokenizer::DecodeStream;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer,
};

/// The tokenizer of a checkpoint: the `tokenizer.json` beside it or, without one, that in the file itself.
///
/// # Errors
/// If there is neither, or it can't be read.
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
    // The tokenizers crate panics at some errors of syntax: they are found here.
    checkpoint.read_json("tokenizer.json")?;
    Tokenizer::from_file(&path).map_err(|error| Error::File {
        path,
        problem: format!("not a tokenizer: {error}"),
        remedy: "fetch the file again".to_string(),
    })
}

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
        let Some(piece) = self.decode.step(token).map_err(error)? else { return Ok(None) };
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
        let whole = self.tokenizer.decode(&self.tokens, true).map_err(error)?;
        let rest = whole.strip_prefix(&self.text).unwrap_or_default().to_string();
        Ok((self.text.split_off(self.prompt_len), rest))
    }
}

/// An error of the tokenizer.
pub(super) fn error(error: tokenizers::Error) -> Error {
    Error::mismatch("text", "what the tokenizer can work on", error.to_string())
}
