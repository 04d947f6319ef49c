//! Text that another process has sent.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The most bytes of such a text.
const LIMIT: usize = 4 << 10;

/// Text of another rank, as it may be printed: of limited length, on one line, and without what a terminal obeys.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "String")]
pub struct PeerText(String);

impl<T: AsRef<str>> From<T> for PeerText {
    fn from(text: T) -> Self {
        let mut readable = String::new();
        for letter in text.as_ref().chars() {
            let length = readable.len();
            match letter {
                // Escaped in source code, harmless in a terminal.
                '\'' | '"' | '\\' => readable.push(letter),
                _ => readable.extend(letter.escape_debug()),
            }
            if readable.len() > LIMIT {
                readable.truncate(length);
                readable.push('…');
                break;
            }
        }
        Self(readable)
    }
}

impl From<PeerText> for String {
    fn from(text: PeerText) -> Self {
        text.0
    }
}

impl fmt::Display for PeerText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_it_commands_a_terminal() {
        let sent = "a \u{1b}[2J\u{7}\r\nrank 3: \u{202e}gpj.exe\u{9b}31m\u{2028}\0 'ä' \"漢\" C:\\x";
        let expected = r#"a \u{1b}[2J\u{7}\r\nrank 3: \u{202e}gpj.exe\u{9b}31m\u{2028}\0 'ä' "漢" C:\x"#;
        assert_eq!(PeerText::from(sent).to_string(), expected);
        let received: PeerText = serde_json::from_str(&serde_json::to_string(sent).unwrap()).unwrap();
        assert_eq!(received.to_string(), expected);
    }

    #[test]
    fn it_is_short_and_stays_as_it_is_when_passed_on() {
        for sent in ["\u{1b}".repeat(50_000), "漢".repeat(50_000), "x".repeat(LIMIT), "\"".repeat(LIMIT + 1)]
        {
            let once = PeerText::from(&sent).to_string();
            assert!(once.len() <= LIMIT + '…'.len_utf8() && once.len() + 6 > LIMIT, "{}", once.len());
            assert_eq!(PeerText::from(&once).to_string(), once);
            assert_eq!(once.ends_with('…'), sent.len() > LIMIT);
        }
    }
}
