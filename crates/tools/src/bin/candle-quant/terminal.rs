//! What the commands say. Names in it may come from a file, so nothing else here writes to stdout or stderr.
//!
//! Text goes out as [`Untrusted`] text, JSON escaped and in full length. The text that a model generates is
//! the user's: into a file or a pipe it goes as it is, on a terminal only what would drive the terminal is escaped.

use candle_quant::Untrusted;
use std::fmt;
use std::io::{self, IsTerminal, Write};

/// Stdout, for text or for JSON.
pub fn stdout(json: bool) -> Lines<io::Stdout> {
    Lines { out: io::stdout(), json }
}

/// Stderr, for text or for JSON.
pub fn stderr(json: bool) -> Lines<io::Stderr> {
    Lines { out: io::stderr(), json }
}

/// Whether somebody watches stderr.
pub fn is_attended() -> bool {
    io::stderr().is_terminal()
}

/// Says one line on stderr. Whoever reads it may have gone.
pub fn say(line: &str) {
    let _ = writeln!(stderr(false), "{}", line.trim_end());
}

/// Makes what is written fit to be shown. Of text, one `writeln!` is one line, whatever is in it.
pub struct Lines<W> {
    out: W,
    json: bool,
}

impl<W: Write> Lines<W> {
    fn show(&mut self, text: &str) -> io::Result<()> {
        let shown = match (self.json, text.strip_suffix('\n')) {
            // No string of JSON has a line break in it.
            (true, _) => {
                text.split('\n').map(|line| Untrusted::whole(line).to_string()).collect::<Vec<_>>().join("\n")
            }
            (false, Some(line)) => format!("{}\n", Untrusted::new(line)),
            (false, None) => Untrusted::new(text).to_string(),
        };
        self.out.write_all(shown.as_bytes())
    }
}

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.show(&String::from_utf8_lossy(bytes)).map(|()| bytes.len())
    }

    fn write_fmt(&mut self, text: fmt::Arguments<'_>) -> io::Result<()> {
        self.show(&text.to_string())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes a piece of generated text to stdout.
pub fn generated(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.is_terminal() {
        true => stdout.write_all(for_terminal(text).as_bytes())?,
        false => stdout.write_all(text.as_bytes())?,
    }
    stdout.flush()
}

/// Text without control characters but those that part lines and columns.
fn for_terminal(text: &str) -> String {
    let shown = |char: char| match char {
        '\n' | '\t' => char.to_string(),
        other if other.is_control() => Untrusted::whole(other.encode_utf8(&mut [0; 4])).to_string(),
        other => other.to_string(),
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(json: bool, texts: &[&str]) -> String {
        let mut lines = Lines { out: Vec::new(), json };
        for text in texts {
            writeln!(lines, "{text}").unwrap();
        }
        String::from_utf8(lines.out).unwrap()
    }

    #[test]
    fn one_line_is_one_line() {
        assert_eq!(written(false, &["a\u{1b}[2J\nb", "ä\u{202e}"]), "a\\u001b[2J\\nb\nä\\u202e\n");
        let long = "x".repeat(10_000);
        let shown = written(false, &[&long, "next"]);
        assert!(shown.len() < 2100 && shown.ends_with("\nnext\n"), "{shown}");
        assert_eq!(written(true, &["{\n\"a\u{9b}\"", &long]), format!("{{\n\"a\\u009b\"\n{long}\n"));
    }

    #[test]
    fn a_model_does_not_drive_the_terminal() {
        assert_eq!(for_terminal("a\tb\n\u{1b}[2J\r\u{9b}ü\u{200d}"), "a\tb\n\\u001b[2J\\r\\u009bü\u{200d}");
    }
}
