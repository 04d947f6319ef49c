//! A JSON object with names of tensors as keys, read entry by entry.

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

/// What stands under a key.
pub(super) trait Entries<'de>: Sized {
    fn value<A: MapAccess<'de>>(name: &str, map: &mut A) -> Result<Self, A::Error>;
}

/// Hands all entries of an object to `take`, in order, until that is false. Errors name the entry.
pub(super) fn read<'de, V: Entries<'de>>(
    json: &'de [u8],
    take: impl FnMut(&str, V) -> bool,
) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    seed(take).deserialize(&mut deserializer)?;
    deserializer.end()
}

/// As [`read`], of an object inside of another one.
pub(super) fn seed<'de, V: Entries<'de>>(
    take: impl FnMut(&str, V) -> bool,
) -> impl DeserializeSeed<'de, Value = ()> {
    Object { take, value: PhantomData }
}

struct Object<F, V> {
    take: F,
    value: PhantomData<V>,
}

impl<'de, V: Entries<'de>, F: FnMut(&str, V) -> bool> DeserializeSeed<'de> for Object<F, V> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, V: Entries<'de>, F: FnMut(&str, V) -> bool> Visitor<'de> for Object<F, V> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object with tensor names as keys")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Text(name)) = map.next_key()? {
            let value = V::value(&name, &mut map);
            let value = value.map_err(|error| A::Error::custom(format_args!("`{name}`: {error}")))?;
            if !(self.take)(&name, value) {
                return Err(A::Error::custom("too many entries"));
            }
        }
        Ok(())
    }
}

/// Text of the file itself where nothing in it is escaped.
pub(super) struct Text<'de>(pub Cow<'de, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Borrowed;

        impl<'de> Visitor<'de> for Borrowed {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(text.into()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(text.to_owned().into()))
            }
        }

        deserializer.deserialize_str(Borrowed)
    }
}
