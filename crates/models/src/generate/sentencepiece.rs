//! Tokenizers of sentencepiece as GGUF files have them: tokens with scores, of which the pair with the highest is joined first.
//!
//! They become the byte-pair encoding of a tokenizer.json with the same result: every way to cut a token into two others is a merge,
//! in the order of scores. Space is `▁`, and a character without a token is its bytes, `<0x0A>`.

use candle_core::quantized::gguf_file::Value;
use std::collections::HashMap;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{Vocab, BPE};
use tokenizers::normalizers::{Prepend, Replace};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, Tokenizer};

/// The type of a token, and those of tokens that are found in a text before it is cut.
pub(super) const NORMAL: u32 = 1;
const UNKNOWN: u32 = 2;
const CONTROL: u32 = 3;
pub(super) const USER_DEFINED: u32 = 4;

/// Longer tokens are none that are joined of others, and no file has so many ways to cut them. The longest of Gemma has 93 bytes, and
/// its 262144 tokens are cut in 514906 ways.
const MAX_TOKEN_BYTES: usize = 256;
const MAX_MERGES: usize = 1 << 22;

const SPACE: &str = "\u{2581}";

/// The tokenizer that `metadata` describes: checked, the keys of a GGUF file.
pub(super) fn build(metadata: &HashMap<String, Value>) -> tokenizers::Result<Tokenizer> {
    let stored = Stored { metadata };
    let tokens = stored.tokens()?;
    let types = stored.array("token_type", tokens.len(), |value| value.to_u32())?;
    let scores = stored.array("scores", tokens.len(), |value| value.to_f32())?;
    // Where two tokens are the same text, the last one counts.
    let ids: HashMap<&str, u32> = tokens.iter().copied().zip(0..).collect();
    let model = BPE::builder()
        .vocab_and_merges(
            ids.iter().map(|(token, id)| ((*token).to_owned(), *id)).collect::<Vocab>(),
            merges(&tokens, &types, &scores, &ids)?,
        )
        .byte_fallback(true)
        .fuse_unk(true);
    let unknown = tokens.get(stored.id("unknown_token_id", 0)? as usize);
    let model = unknown.into_iter().fold(model, |model, token| model.unk_token((*token).to_owned()));
    let mut tokenizer = Tokenizer::new(model.build()?);

    let has_prefix = stored.flag("add_space_prefix")?;
    let prefix = has_prefix.then(|| NormalizerWrapper::from(Prepend::new(SPACE.into())));
    let spaces = Replace::new(" ", SPACE)?;
    let normalizers = prefix.into_iter().chain([spaces.into()]).collect();
    tokenizer.with_normalizer(Some(tokenizers::normalizers::Sequence::new(normalizers)))?;
    let first = has_prefix.then(|| DecoderWrapper::from(Strip::new(' ', 1, 0)));
    let steps = [Replace::new(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    let decoders = steps.into_iter().chain(first).collect();
    tokenizer.with_decoder(Some(tokenizers::decoders::sequence::Sequence::new(decoders)));

    // Phi-3's take the spaces behind them, which no key of a file says; llama.cpp knows it by the name, too.
    let is_phi3 = stored.name().is_some_and(|name| name.contains("phi-3") || name.contains("phi3"));
    let strips = |token: &str| is_phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&token);
    let found = |kinds: &[u32], is_special| {
        let of_kind = tokens.iter().zip(&types).filter(|(_, kind)| kinds.contains(kind));
        let added = of_kind
            .map(|(token, _)| AddedToken::from(*token, is_special).normalized(false).rstrip(strips(token)));
        added.collect::<Vec<_>>()
    };
    tokenizer.add_special_tokens(found(&[UNKNOWN, CONTROL], true))?;
    tokenizer.add_tokens(found(&[USER_DEFINED], false))?;

    let end = |key, id, usual| -> tokenizers::Result<Option<(String, u32)>> {
        let id = if stored.flag(key)? { stored.id(id, usual)? } else { return Ok(None) };
        let token = tokens.get(id as usize).ok_or_else(|| format!("`{key}`, but no token {id}"))?;
        Ok(Some(((*token).to_owned(), id)))
    };
    let (first, last) = (end("add_bos_token", "bos_token_id", 1)?, end("add_eos_token", "eos_token_id", 2)?);
    if first.is_some() || last.is_some() {
        let text = ["$A".to_owned()];
        let pieces = first.iter().map(|(token, _)| token.clone()).chain(text);
        let pieces: Vec<_> = pieces.chain(last.iter().map(|(token, _)| token.clone())).collect();
        let special: Vec<_> = first.into_iter().chain(last).collect();
        let template = TemplateProcessing::builder().try_single(pieces)?.special_tokens(special).build()?;
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

/// Every way to cut a token into two others, those first that are joined first.
fn merges(
    tokens: &[&str],
    types: &[u32],
    scores: &[f32],
    ids: &HashMap<&str, u32>,
) -> tokenizers::Result<Vec<(String, String)>> {
    let mut merges = Vec::new();
    for (id, ((token, kind), score)) in tokens.iter().zip(types).zip(scores).enumerate() {
        if [UNKNOWN, CONTROL, USER_DEFINED].contains(kind) || token.len() > MAX_TOKEN_BYTES {
            continue;
        }
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let known = cuts.filter(|(left, right)| ids.contains_key(left) && ids.contains_key(right));
        merges.extend(known.map(|(left, right)| (*score, id, left, right)));
        if merges.len() > MAX_MERGES {
            return Err(format!("its tokens can be cut in more than {MAX_MERGES} ways").into());
        }
    }
    // Stable: of one token, a short left part comes first.
    merges.sort_by(|(a, id_a, ..), (b, id_b, ..)| b.total_cmp(a).then(id_a.cmp(id_b)));
    Ok(merges.into_iter().map(|(_, _, left, right)| (left.to_owned(), right.to_owned())).collect())
}

/// The keys of a file.
struct Stored<'m> {
    metadata: &'m HashMap<String, Value>,
}

impl<'m> Stored<'m> {
    fn get(&self, key: &str) -> Option<&'m Value> {
        self.metadata.get(&format!("tokenizer.ggml.{key}"))
    }

    fn name(&self) -> Option<String> {
        Some(self.metadata.get("general.name")?.to_string().ok()?.to_lowercase())
    }

    fn flag(&self, key: &str) -> tokenizers::Result<bool> {
        Ok(self.get(key).map(Value::to_bool).transpose()?.unwrap_or(false))
    }

    fn id(&self, key: &str, usual: u32) -> tokenizers::Result<u32> {
        Ok(self.get(key).map(Value::to_u32).transpose()?.unwrap_or(usual))
    }

    fn elements(&self, key: &str) -> tokenizers::Result<&'m [Value]> {
        let value = self.get(key).ok_or_else(|| format!("`tokenizer.ggml.{key}` is missing"))?;
        Ok(value.to_vec()?)
    }

    fn tokens(&self) -> tokenizers::Result<Vec<&'m str>> {
        let tokens = self.elements("tokens")?.iter().map(|token| Ok(token.to_string()?.as_str()));
        tokens.collect()
    }

    fn array<T>(
        &self,
        key: &str,
        len: usize,
        element: impl Fn(&Value) -> candle_core::Result<T>,
    ) -> tokenizers::Result<Vec<T>> {
        let elements = self.elements(key)?;
        if elements.len() != len {
            return Err(
                format!("`tokenizer.ggml.{key}` has {} elements for {len} tokens", elements.len()).into()
            );
        }
        Ok(elements.iter().map(element).collect::<candle_core::Result<_>>()?)
    }
}
