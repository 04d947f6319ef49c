//! How text is cut before it is encoded, by the names that converters use.
//!
//! The patterns are those of the published models' tokenizer.json, which llama.cpp's `llama-vocab.cpp` cites where its own are
//! rewritten for the engine that it has; transformers 5.23 has those of Qwen and Cohere, and composes characters there (NFC).

/// What a name means.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreTokenizer {
    /// What candle calls one with this normalizer and decoder.
    pub(super) pipeline: &'static str,
    /// The patterns that text is cut by, one after the other; each match is a piece, and so is what lies between.
    pub(super) patterns: &'static [&'static str],
    /// The flags that llama.cpp assumes of this kind where the file says nothing.
    pub(super) assumed: &'static [&'static str],
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

impl PreTokenizer {
    /// `None` for a name that is not known: candle would take it for GPT-2's, which gives other tokens without a word.
    pub(super) fn of(name: &str) -> Option<Self> {
        /// What candle calls one that composes characters (NFC), and one that does not.
        const COMPOSING: &str = "qwen2";
        const PLAIN: &str = "gpt2";
        let (pipeline, patterns, assumed): (_, &[&str], &[&str]) = match name {
            "gpt-2" | "gpt2" => (PLAIN, &[GPT2], &[]),
            "smollm" | "starcoder" | "refact" => (PLAIN, &[DIGIT, GPT2], &[]),
            "command-r" => (COMPOSING, &[DIGIT, GPT2], &[]),
            "qwen2" | "deepseek-r1-qwen" => (COMPOSING, &[QWEN2], &[]),
            "qwen35" => (COMPOSING, &[QWEN35], &[]),
            "llama-bpe" | "llama3" | "llama-v3" => (PLAIN, &[LLAMA3], &["ignore_merges", "add_bos_token"]),
            "chatglm-bpe" => (PLAIN, &[LLAMA3], &[]),
            "glm4" => (PLAIN, &[LLAMA3], &["ignore_merges"]),
            "gpt-4o" | "llama4" => (PLAIN, &[GPT4O], &[]),
            "tekken" => (PLAIN, &[TEKKEN], &["ignore_merges", "add_bos_token"]),
            "deepseek-v3" => (PLAIN, &DEEPSEEK_V3, &[]),
            _ => return None,
        };
        Some(Self { pipeline, patterns, assumed })
    }
}
