//! Text that another process has sent.

use crate::Untrusted;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Text of another rank, in the form of [`Untrusted`] text from the moment it arrives.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "String")]
pub struct PeerText(String);

impl<T: AsRef<str>> From<T> for PeerText {
    fn from(text: T) -> Self {
        Self(Untrusted::new(text.as_ref()).to_string())
    }
}

impl fmt::Display for PeerText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<PeerText> for String {
    fn from(text: PeerText) -> Self {
        text.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arrives_is_short_and_commands_no_terminal() {
        let sent = "a \u{1b}[2J\r\nrank 3: \u{202e}gpj.exe ".to_owned() + &"x".repeat(50_000);
        let received: PeerText = serde_json::from_str(&serde_json::to_string(&sent).unwrap()).unwrap();
        let shown = received.to_string();
        assert!(shown.starts_with(r"a \u001b[2J\r\nrank 3: \u202egpj.exe xxx"), "{shown}");
        assert!(shown.len() <= Untrusted::LONGEST, "{}", shown.len());
        // Passed on, it stays as it is.
        assert_eq!(PeerText::from(&shown).to_string(), shown);
    }
}
