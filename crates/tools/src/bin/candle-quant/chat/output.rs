//! An answer as it comes, its thoughts dimmed.

use crate::terminal::Pieces;
use std::io;

/// Around the thoughts of a model.
pub const BEGIN: &str = "<think>";
const END: &str = "</think>";

/// Writes the pieces of one answer.
pub struct Answer<P> {
    out: P,
    is_thinking: bool,
    /// What may be the beginning of a tag.
    held: String,
    ends_line: bool,
}

impl<P: Pieces> Answer<P> {
    pub fn new(out: P, is_thinking: bool) -> Self {
        Self { out, is_thinking, held: String::new(), ends_line: true }
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
        self.put(&text)
    }

    /// Writes what was held back, and ends the line.
    pub fn end(mut self) -> io::Result<()> {
        let held = std::mem::take(&mut self.held);
        self.put(&held)?;
        if self.ends_line {
            return Ok(());
        }
        self.out.write("\n", false)
    }

    fn put(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.ends_line = text.ends_with('\n');
        self.out.write(text, self.is_thinking)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was written, and `{}` around what was aside.
    #[derive(Default)]
    struct Marked(String);

    impl Pieces for &mut Marked {
        fn write(&mut self, text: &str, aside: bool) -> io::Result<()> {
            self.0 += &if aside { format!("{{{text}}}") } else { text.to_owned() };
            Ok(())
        }
    }

    fn written(pieces: &[&str], is_thinking: bool) -> String {
        let mut out = Marked::default();
        let mut answer = Answer::new(&mut out, is_thinking);
        pieces.iter().for_each(|piece| answer.write(piece).unwrap());
        answer.end().unwrap();
        out.0
    }

    #[test]
    fn thoughts_are_aside_and_answers_are_not() {
        let grey = "{<think>}{\nhm}{</think>}\n\n4\n";
        assert_eq!(written(&["<think>\nhm</think>\n\n4"], false), grey);
        assert_eq!(written(&["<th", "ink>", "\nhm</thi", "nk>\n", "\n4"], false), grey);
        assert_eq!(written(&["hm</think>4"], true), "{hm}{</think>}4\n");
        assert_eq!(written(&["a < b", " and <th"], false), "a < b and <th\n");
        assert_eq!(written(&["done\n"], false), "done\n");
        assert_eq!(written(&[], true), "");
    }
}
