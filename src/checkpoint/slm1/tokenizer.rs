//! The tokenizer section: kept as it is, but for the numbers in front.

use super::options::TokenizerKind;

const BTOK_BYTES: usize = 28;
const BPE1_HEADER_BYTES: usize = 36;

/// What the front of a section says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Front {
    pub vocab_size: u32,
    pub bos: u32,
    pub eos: u32,
}

/// The kind of a section; `None` if there is none.
pub(super) fn kind(section: &[u8]) -> Option<TokenizerKind> {
    section.first_chunk::<4>().map(|magic| match magic {
        b"BTOK" => TokenizerKind::Btok,
        b"BPE1" => TokenizerKind::Bpe1,
        other => TokenizerKind::Unknown(*other),
    })
}

/// The front of a section of a known kind and version; `None` if it is another one.
pub(super) fn front(section: &[u8]) -> Option<Front> {
    let known_size = match kind(section)? {
        TokenizerKind::Btok => section.len() == BTOK_BYTES,
        TokenizerKind::Bpe1 => section.len() >= BPE1_HEADER_BYTES,
        TokenizerKind::Unknown(_) => false,
    };
    let (_, numbers) = section.split_first_chunk::<4>()?;
    let [version, vocab_size, bos, eos, ..] = numbers.as_chunks::<4>().0 else {
        return None;
    };
    (known_size && u32::from_le_bytes(*version) == 1).then(|| Front {
        vocab_size: u32::from_le_bytes(*vocab_size),
        bos: u32::from_le_bytes(*bos),
        eos: u32::from_le_bytes(*eos),
    })
}
