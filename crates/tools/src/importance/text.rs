//! Texts as pieces of tokens.

use crate::sha256;
use candle_quant::{Checkpoint, Error, Result};
use candle_quant_models::generate::load_tokenizer;
use candle_quant_models::Config;
use std::fs;
use std::path::Path;

/// A text to run a model on, in pieces that it sees by themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationText {
    pieces: Vec<Vec<u32>>,
    digest: String,
}

impl CalibrationText {
    /// The usual size of a piece, in tokens; less if the model is made for less.
    pub const PIECE: usize = 512;

    /// Texts that blank lines separate, with the tokens that begin and end one, if the model of `source` has such. What is
    /// longer than `piece` tokens, or than the model's context, is split.
    ///
    /// # Errors
    /// If there are no tokens, or one is outside of the vocabulary; if the checkpoint has no model or no tokenizer.
    pub fn new(source: &Checkpoint, text: &str, piece: usize) -> Result<Self> {
        let config = Config::from_checkpoint(source)?;
        let tokenizer = load_tokenizer(source)?;
        let special = |name: &str| source.config().get(name)?.as_u64().and_then(|id| u32::try_from(id).ok());
        let (begin, end) = (special("bos_token_id"), special("eos_token_id"));
        let size = piece.clamp(1, config.context().max(1));
        let mut pieces = Vec::new();
        for text in text.split("\n\n").map(str::trim).filter(|text| !text.is_empty()) {
            let encoding = tokenizer.encode(text, false).map_err(|error| {
                let shown: String = text.chars().take(40).collect();
                Error::mismatch(
                    "calibration text",
                    "text that the tokenizer takes",
                    format!("{shown:?}: {error}"),
                )
            })?;
            let tokens: Vec<u32> =
                begin.into_iter().chain(encoding.get_ids().iter().copied()).chain(end).collect();
            if let Some(token) = tokens.iter().find(|token| **token as usize >= config.vocab_size) {
                let expected = format!("tokens below {}, the model's vocabulary", config.vocab_size);
                return Err(Error::mismatch("calibration text", expected, token.to_string()));
            }
            pieces.extend(tokens.chunks(size).map(<[u32]>::to_vec));
        }
        Self::of_tokens(pieces)
    }

    /// Pieces of tokens, each of which the model sees by itself.
    ///
    /// # Errors
    /// If there are none, or one is empty.
    pub fn of_tokens(pieces: Vec<Vec<u32>>) -> Result<Self> {
        if pieces.is_empty() || pieces.iter().any(Vec::is_empty) {
            return Err(Error::mismatch(
                "calibration text",
                "pieces of one token or more",
                "none, or an empty one",
            ));
        }
        let digest = sha256::of_bytes(format!("{pieces:?}"));
        Ok(Self { pieces, digest })
    }

    /// As [`new`](Self::new), of a file.
    ///
    /// # Errors
    /// As those of that; if the file can't be read, or is no UTF-8.
    pub fn read(source: &Checkpoint, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = fs::read(path).map_err(|error| Error::Io { path: path.to_owned(), error })?;
        let text = String::from_utf8(text)
            .map_err(|_| Error::file(path, "no text in UTF-8", "give a text file to calibrate with"))?;
        if text.trim().is_empty() {
            return Err(Error::file(path, "an empty text", "give one that is like what the model is for"));
        }
        Self::new(source, &text, Self::PIECE)
    }

    /// Its pieces, in order.
    pub fn pieces(&self) -> &[Vec<u32>] {
        &self.pieces
    }

    /// How many tokens it has.
    pub fn tokens(&self) -> usize {
        self.pieces.iter().map(Vec::len).sum()
    }

    /// The SHA-256 of its tokens, in hexadecimal.
    pub fn digest(&self) -> &str {
        &self.digest
    }
}
