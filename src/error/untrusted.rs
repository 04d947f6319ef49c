//! Text that may come from anywhere, made fit to be shown.

use std::fmt::{self, Write};

/// Text that comes from a file or from another machine, in the form in which people may see it.
///
/// Characters that would drive a terminal, turn the direction of text or have no width are escaped as in JSON
/// (`\u001b`), so that a name can neither erase what stands before it nor pass for another one. Text that is too long
/// is cut in its middle, and says how many characters are left out. What was shown once is shown the same again.
///
/// An [`Error`](crate::Error) says all it says in this form, and so do the warnings of a
/// [`Checkpoint`](crate::Checkpoint). Names that a checkpoint returns are the names that are stored: show them in this
/// form.
///
/// ```
/// use candle_quant::Untrusted;
///
/// let name = "layers.0\u{1b}[2Jweight";
/// assert_eq!(Untrusted::new(name).to_string(), r"layers.0\u001b[2Jweight");
/// let long = "a".repeat(1_000_000);
/// let shown = Untrusted::new(&long).to_string();
/// assert!(shown.len() <= Untrusted::LONGEST && shown.contains("[998100 characters left out]"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Untrusted<'a> {
    text: &'a str,
    longest: usize,
}

/// What is left for text of which something is left out; the rest says how much.
const KEPT: usize = Untrusted::LONGEST - 100;

impl<'a> Untrusted<'a> {
    /// The most characters that are shown.
    pub const LONGEST: usize = 2000;

    /// Text to show; of a long one, its beginning and its end.
    pub fn new(text: &'a str) -> Self {
        Self { text, longest: Self::LONGEST }
    }

    /// Text to show in full length, for a reader that is a program.
    pub fn whole(text: &'a str) -> Self {
        Self { text, longest: usize::MAX }
    }
}

impl fmt::Display for Untrusted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Escapes are ASCII: text is never wider than six times its bytes.
        if self.text.len() <= self.longest / 6 || self.text.chars().map(width).sum::<usize>() <= self.longest
        {
            return write(self.text, f);
        }
        let (head, rest) = self.text.split_at(fitting(self.text.chars(), KEPT * 3 / 4));
        let (middle, tail) = rest.split_at(rest.len() - fitting(rest.chars().rev(), KEPT / 4));
        write(head, f)?;
        write!(f, " ..[{} characters left out].. ", middle.chars().count())?;
        write(tail, f)
    }
}

/// Bytes of the first characters that are no wider than this together.
fn fitting(chars: impl Iterator<Item = char>, most: usize) -> usize {
    let widths = chars.scan(0, |sum, char| {
        *sum += width(char);
        Some((*sum, char.len_utf8()))
    });
    widths.take_while(|(sum, _)| *sum <= most).map(|(_, bytes)| bytes).sum()
}

/// Characters that stand for this one.
fn width(char: char) -> usize {
    match (char, is_plain(char)) {
        (_, true) => 1,
        ('\n' | '\r' | '\t', _) => 2,
        _ => 6 * char.len_utf16(),
    }
}

fn write(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for char in text.chars() {
        match char {
            char if is_plain(char) => f.write_char(char)?,
            '\n' => f.write_str("\\n")?,
            '\r' => f.write_str("\\r")?,
            '\t' => f.write_str("\\t")?,
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    write!(f, "\\u{unit:04x}")?;
                }
            }
        }
    }
    Ok(())
}

/// Whether a character does nothing but stand there: it is none of Unicode's control and format characters, line and
/// paragraph separators, and letters without a shape.
fn is_plain(char: char) -> bool {
    match char {
        ' '..='~' => true,
        // Soft hyphen; marks of Arabic, Syriac and Kaithi that enclose what follows.
        '\u{ad}'
        | '\u{600}'..='\u{605}'
        | '\u{61c}'
        | '\u{6dd}'
        | '\u{70f}'
        | '\u{890}'
        | '\u{891}'
        | '\u{8e2}' => false,
        '\u{110bd}' | '\u{110cd}' => false,
        // Zero width, directions, separators, invisible operators.
        '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' => false,
        '\u{feff}' | '\u{fff9}'..='\u{fffb}' => false,
        // Fillers of Hangul and Braille, which are blank.
        '\u{115f}' | '\u{1160}' | '\u{3164}' | '\u{ffa0}' | '\u{2800}' => false,
        // Hieroglyphs, shorthand and music; tags.
        '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' => false,
        '\u{e0000}'..='\u{e0fff}' => false,
        other => !other.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        Untrusted::new(text).to_string()
    }

    #[test]
    fn what_drives_a_terminal_is_escaped() {
        for (text, expected) in [
            ("model.layers.0", "model.layers.0"),
            ("Schlüssel 鍵 🔑 e\u{301}", "Schlüssel 鍵 🔑 e\u{301}"),
            (r#"C:\model "a" 'b'"#, r#"C:\model "a" 'b'"#),
            ("\u{1b}]0;title\u{7}", r"\u001b]0;title\u0007"),
            ("a\nb\r\tc\0", r"a\nb\r\tc\u0000"),
            ("\u{7f}\u{80}\u{9b}2J\u{9f}\u{a0}", "\\u007f\\u0080\\u009b2J\\u009f\u{a0}"),
            ("a\u{202e}b\u{2066}c\u{2069}d\u{200b}e\u{feff}", r"a\u202eb\u2066c\u2069d\u200be\ufeff"),
            ("\u{2028}\u{2029}\u{ad}\u{3164}", r"\u2028\u2029\u00ad\u3164"),
            ("\u{e0041}", r"\udb40\udc41"),
        ] {
            assert_eq!(shown(text), expected);
            assert_eq!(Untrusted::whole(text).to_string(), expected);
        }
    }

    /// In JSON an escaped character is the character.
    #[test]
    fn escapes_are_those_of_json() {
        let all: String = (1..=char::MAX as u32).filter_map(char::from_u32).collect();
        let json = serde_json::to_string(&all).unwrap();
        let escaped = Untrusted::whole(&json).to_string();
        assert!(escaped.len() > json.len());
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), all);
    }

    #[test]
    fn long_text_is_cut_in_its_middle() {
        for unit in ["x", "ä", "\u{1b}", "\u{e0041}", "a\u{1b}"] {
            let long = format!("begin {} end", unit.repeat(100_000));
            let short = shown(&long);
            assert!(short.starts_with("begin ") && short.ends_with(" end"), "{short}");
            assert!(short.chars().count() <= Untrusted::LONGEST, "{}", short.chars().count());
            let (head, rest) = short.split_once(" ..[").unwrap();
            let (number, tail) = rest.split_once(" characters left out].. ").unwrap();
            let kept = head.chars().count() + tail.chars().count();
            assert!(kept > KEPT - 24, "{kept}");
            if unit == "x" {
                assert_eq!(number, (long.len() - kept).to_string());
            }
            assert_eq!(shown(&short), short);
        }
        let fits = "x".repeat(Untrusted::LONGEST);
        assert_eq!(shown(&fits), fits);
        assert!(shown(&format!("{fits}x")).contains("[101 characters left out]"));
        assert_eq!(Untrusted::whole(&fits.repeat(3)).to_string(), fits.repeat(3));
    }
}
