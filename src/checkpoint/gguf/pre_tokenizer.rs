//! How text is cut before it is encoded, by the names that converters use.
//!
//! The patterns are those of the published models' tokenizer.json, which llama.cpp's `llama-vocab.cpp` cites where its own are
//! rewritten for the engine that it has; transformers 5.23 has those of Qwen and Cohere, and composes characters there (NFC).

/// What a name means.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreTokenizer {
    /// Whether characters are composed before (NFC).
    composes: bool,
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
const DEEPSEEK_LLM: [&str; 6] = [
    "[\r\n]",
    // Letters of scripts with two cases: Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee, Glagolitic, Deseret ...
    LETTERS_WITH_CASE,
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    CJK,
    r"\p{N}+",
];
const DEEPSEEK_CODER: [&str; 5] = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT];
const CJK: &str = "[一-龥ࠀ-一가-\u{d7ff}]+";
const LETTERS_WITH_CASE: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽ",
    r"ᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴ",
    r"ῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ",
    r"Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
);

const IGNORES_MERGES: &str = "ignore_merges";

/// What names mean; the first of them is written.
const KINDS: [(&[&str], PreTokenizer); 13] = [
    (&["gpt-2", "gpt2"], PreTokenizer::plain(&[GPT2], &[])),
    (&["smollm", "starcoder", "refact"], PreTokenizer::plain(&[DIGIT, GPT2], &[])),
    (&["command-r"], PreTokenizer::composing(&[DIGIT, GPT2])),
    (&["qwen2", "deepseek-r1-qwen"], PreTokenizer::composing(&[QWEN2])),
    (&["qwen35"], PreTokenizer::composing(&[QWEN35])),
    (
        &["llama-bpe", "llama3", "llama-v3"],
        PreTokenizer::plain(&[LLAMA3], &[IGNORES_MERGES, "add_bos_token"]),
    ),
    (&["chatglm-bpe"], PreTokenizer::plain(&[LLAMA3], &[])),
    (&["glm4"], PreTokenizer::plain(&[LLAMA3], &[IGNORES_MERGES])),
    (&["gpt-4o", "llama4"], PreTokenizer::plain(&[GPT4O], &[])),
    (&["tekken"], PreTokenizer::plain(&[TEKKEN], &[IGNORES_MERGES, "add_bos_token"])),
    (&["deepseek-llm"], PreTokenizer::plain(&DEEPSEEK_LLM, &[])),
    (&["deepseek-coder"], PreTokenizer::plain(&DEEPSEEK_CODER, &[])),
    (&["deepseek-v3"], PreTokenizer::plain(&DEEPSEEK_V3, &[])),
];

/// llama.cpp's name of what cuts text by these regular expressions, one after the other: `None` if it has none that is known here.
///
/// `composes` says whether characters are composed before (NFC), which llama.cpp leaves out; `ignores_merges`, whether a piece that
/// is a token stays one, of which the name tells llama.cpp. A name that says otherwise is taken where there is no better one.
#[must_use]
pub fn gguf_pre_tokenizer(
    patterns: &[impl AsRef<str>],
    composes: bool,
    ignores_merges: bool,
) -> Option<&'static str> {
    let same = |kind: &PreTokenizer| {
        let known = kind.patterns.iter().copied();
        known.eq(patterns.iter().map(AsRef::as_ref)) && (kind.composes || !composes)
    };
    let fitting = KINDS.iter().filter(|(_, kind)| same(kind));
    let best = fitting.min_by_key(|(_, kind)| {
        (kind.composes != composes, kind.assumed.contains(&IGNORES_MERGES) != ignores_merges)
    });
    best.and_then(|(names, _)| names.first().copied())
}

impl PreTokenizer {
    /// Tokenizers of sentencepiece cut nothing.
    pub(super) const SENTENCEPIECE: Self = Self::plain(&[], &["add_bos_token", "add_space_prefix"]);

    const fn plain(patterns: &'static [&'static str], assumed: &'static [&'static str]) -> Self {
        Self { composes: false, patterns, assumed }
    }

    const fn composing(patterns: &'static [&'static str]) -> Self {
        Self { composes: true, patterns, assumed: &[] }
    }

    /// `None` for a name that is not known: candle would take it for GPT-2's, which gives other tokens without a word.
    pub(super) fn of(name: &str) -> Option<Self> {
        KINDS.iter().find(|(names, _)| names.contains(&name)).map(|(_, kind)| *kind)
    }

    /// What candle calls one with this normalizer and decoder.
    pub(super) fn pipeline(self) -> &'static str {
        if self.composes {
            "qwen2"
        } else {
            "gpt2"
        }
    }
}
