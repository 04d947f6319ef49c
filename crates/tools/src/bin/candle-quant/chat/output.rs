//! An answer as it comes, its thoughts dimmed.

use std::io::{self, Write};

/// Around the thoughts of a model.
pub const BEGIN: &str = "<think>";
const END: &str = "</think>";

/// A text in grey, if there may be colours.
pub fn dimmed(text: &str, color: bool) -> String {
    match color {
        true => format!("\x1b[2m{text}\x1b[0m"),
        false => text.to_owned(),
    }
}

/// Writes the pieces of one answer.
pub struct Answer<W> {
    out: W,
    color: bool,
    is_thinking: bool,
    /// What may be the beginning of a tag.
    held: String,
    ends_line: bool,
}

impl<W: Write> Answer<W> {
    pub fn new(out: W, color: bool, is_thinking: bool) -> Self {
        Self { out, color, is_thinking, held: String::new(), ends_line: true }
    }

    pub fn write(&mut self, piece: &str) -> io::Result<()> {
        self.held.push_str(piece);
        loop {
            let tag = if self.is_thinking { END } else { BEGIN };
            let Some(start) = self.held.find(tag) else { break };
            let rest = self.held.split_off(start);
            let before =
                std::mem::replace(&mut self.held, rest.get(tag.len()..).unwrap_or_default().to_owned());
            self.put(&before)?;
            self.is_thinking = true;
            self.put(tag)?;
            self.is_thinking = tag == BEGIN;
        }
        let tag = if self.is_thinking { END } else { BEGIN };
        let may_begin = |at: &usize| self.held.get(*at..).is_some_and(|rest| tag.starts_with(rest));
        let begin = (0..self.held.len()).find(may_begin).unwrap_or(self.held.len());
        let rest = self.held.split_off(begin);
        let text = std::mem::replace(&mut self.held, rest);
        self.put(&text)?;
        self.out.flush()
    }

    /// Writes what was held back, and ends the line.
    pub fn end(mut self) -> io::Result<()> {
        let held = std::mem::take(&mut self.held);
        self.put(&held)?;
        if !self.ends_line {
            writeln!(self.out)?;
        }
        self.out.flush()
    }

    fn put(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.ends_line = text.ends_with('\n');
        self.out.write_all(dimmed(text, self.color && self.is_thinking).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(pieces: &[&str], color: bool, is_thinking: bool) -> String {
        let mut out = Vec::new();
        let mut answer = Answer::new(&mut out, color, is_thinking);
        pieces.iter().for_each(|piece| answer.write(piece).unwrap());
        answer.end().unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn thoughts_are_dimmed_and_answers_are_not() {
        let whole = ["<think>\nhm</think>\n\n4"];
        let pieces = ["<th", "ink>", "\nhm</thi", "nk>\n", "\n4"];
        let plain = "<think>\nhm</think>\n\n4\n";
        let grey = "\x1b[2m<think>\x1b[0m\x1b[2m\nhm\x1b[0m\x1b[2m</think>\x1b[0m\n\n4\n";
        assert_eq!(written(&whole, false, false), plain);
        assert_eq!(written(&pieces, false, false), plain);
        assert_eq!(written(&whole, true, false), grey);
        assert_eq!(written(&pieces, true, false), grey);
        assert_eq!(written(&["hm</think>4"], true, true), "\x1b[2mhm\x1b[0m\x1b[2m</think>\x1b[0m4\n");
        assert_eq!(written(&["a < b", " and <th"], true, false), "a < b and <th\n");
        assert_eq!(written(&["done\n"], true, false), "done\n");
        assert_eq!(written(&[], true, true), "");
    }
}
