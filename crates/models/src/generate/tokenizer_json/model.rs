//! The vocabulary and the merges, counted while they are read.

use super::Weight;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// What of a model decides how much memory it takes.
#[derive(serde::Deserialize)]
pub(super) struct Model<'a> {
    #[serde(borrow, default)]
    continuing_subword_prefix: Option<Cow<'a, str>>,
    #[serde(default)]
    vocab: Vocabulary,
    #[serde(borrow, default)]
    merges: Option<&'a RawValue>,
}

impl Model<'_> {
    pub(super) fn check(raw: &str, weight: &mut Weight) -> Result<(), String> {
        let wrong = |error: serde_json::Error| error.to_string();
        let model: Model = serde_json::from_str(raw).map_err(wrong)?;
        weight.add(model.vocab.tokens, Weight::OF_ENTRY)?;
        if model.vocab.is_list {
            // Tokens in a list have scores: they are those of a model that keeps them in a trie.
            weight.add(model.vocab.bytes, Weight::OF_NODE)?;
        }
        let Some(merges) = model.merges else { return Ok(()) };
        let prefix = model.continuing_subword_prefix.as_deref().unwrap_or_default();
        let merges = Merges { prefix }.deserialize(&mut serde_json::Deserializer::from_str(merges.get()));
        let Counted { count, without_prefix } = merges.map_err(wrong)?;
        weight.add(count, 2 * Weight::OF_ENTRY)?;
        // The crate cuts the prefix off unseen, be it in the middle of a character.
        match without_prefix {
            0 => Ok(()),
            some => Err(format!("{some} merges whose second part does not begin with the prefix `{prefix}`")),
        }
    }
}

/// How many tokens there are, and their bytes.
#[derive(Default)]
struct Vocabulary {
    tokens: usize,
    bytes: usize,
    is_list: bool,
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tokens;

        impl<'de> Visitor<'de> for Tokens {
            type Value = Vocabulary;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tokens and ids, or a list of tokens and scores")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocabulary, A::Error> {
                let mut vocabulary = Vocabulary::default();
                while let Some((Length(bytes), _)) = map.next_entry::<_, IgnoredAny>()? {
                    vocabulary.tokens += 1;
                    vocabulary.bytes += bytes;
                }
                Ok(vocabulary)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vocabulary, A::Error> {
                let mut vocabulary = Vocabulary { is_list: true, ..Vocabulary::default() };
                while let Some((Length(bytes), _)) = list.next_element::<(_, IgnoredAny)>()? {
                    vocabulary.tokens += 1;
                    vocabulary.bytes += bytes;
                }
                Ok(vocabulary)
            }

            fn visit_unit<E>(self) -> Result<Vocabulary, E> {
                Ok(Vocabulary::default())
            }
        }

        deserializer.deserialize_any(Tokens)
    }
}

/// The bytes of a text, which is not kept.
struct Length(usize);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Length;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a token")
            }

            fn visit_str<E>(self, text: &str) -> Result<Length, E> {
                Ok(Length(text.len()))
            }
        }

        deserializer.deserialize_str(Text)
    }
}

/// Reads merges, `"a b"` or `["a", "b"]` each.
struct Merges<'p> {
    prefix: &'p str,
}

#[derive(Default)]
struct Counted {
    count: usize,
    without_prefix: usize,
}

impl<'de> DeserializeSeed<'de> for Merges<'_> {
    type Value = Counted;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Counted, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Merges<'_> {
    type Value = Counted;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Counted, A::Error> {
        let mut counted = Counted::default();
        while let Some(merge) = list.next_element::<&RawValue>()? {
            counted.count += 1;
            let begins = |second: &str| second.starts_with(self.prefix);
            let raw = merge.get();
            let has_prefix = self.prefix.is_empty()
                || match raw.starts_with('[') {
                    true => {
                        serde_json::from_str::<(IgnoredAny, Cow<str>)>(raw).is_ok_and(|(_, b)| begins(&b))
                    }
                    false => serde_json::from_str::<Cow<str>>(raw)
                        .is_ok_and(|merge| merge.split_once(' ').is_some_and(|(_, b)| begins(b))),
                };
            counted.without_prefix += usize::from(!has_prefix);
        }
        Ok(counted)
    }

    fn visit_unit<E>(self) -> Result<Counted, E> {
        Ok(Counted::default())
    }
}
