//! The paths that a source file names: its `use` trees, and what begins with `crate`, `super` or `self` elsewhere.

/// One path of a source file.
#[derive(Debug, PartialEq)]
pub struct Named {
    pub line: usize,
    /// The modules inside the file that the path is in, from the outside.
    pub within: Vec<String>,
    pub path: Vec<String>,
    /// What a `use` line calls it.
    pub as_name: Option<String>,
}

/// A file's paths and the modules that it writes out itself.
#[derive(Debug, Default, PartialEq)]
pub struct Scanned {
    pub named: Vec<Named>,
    pub modules: Vec<Vec<String>>,
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    PathSeparator,
    Mark(char),
}

pub fn scan(source: &str) -> Scanned {
    let tokens = tokens(source);
    let mut scanner = Scanner { tokens: &tokens, next: 0, open: Vec::new(), scanned: Scanned::default() };
    scanner.run();
    scanner.scanned
}

/// The tokens with their lines, without comments, strings, characters and lifetimes.
fn tokens(source: &str) -> Vec<(usize, Token)> {
    let text: Vec<char> = source.chars().collect();
    let at = |index: usize| text.get(index).copied().unwrap_or('\0');
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut tokens = Vec::new();
    let (mut index, mut line) = (0, 1);
    while index < text.len() {
        let start = index;
        let mut token = None;
        match (at(index), at(index + 1)) {
            ('/', '/') => index += text[index..].iter().take_while(|c| **c != '\n').count(),
            ('/', '*') => {
                let mut depth = 0;
                loop {
                    match (at(index), at(index + 1)) {
                        ('/', '*') => (depth, index) = (depth + 1, index + 2),
                        ('*', '/') => (depth, index) = (depth - 1, index + 2),
                        _ => index += 1,
                    }
                    if depth == 0 || index >= text.len() {
                        break;
                    }
                }
            }
            ('"', _) => index = after_string(&text, index),
            ('\'', '\\') => {
                index += 3;
                index += text[index.min(text.len())..].iter().take_while(|c| **c != '\'').count() + 1;
            }
            ('\'', _) if at(index + 2) == '\'' => index += 3,
            (c, _) if is_word(c) => {
                index += text[index..].iter().take_while(|c| is_word(**c)).count();
                let word: String = text[start..index].iter().collect();
                let hashes = text[index..].iter().take_while(|c| **c == '#').count();
                if matches!(word.as_str(), "r" | "br" | "cr") && at(index + hashes) == '"' {
                    let end: String = std::iter::once('"').chain("#".repeat(hashes).chars()).collect();
                    let rest: String = text[index + hashes + 1..].iter().collect();
                    let len = rest.split(&end).next().map_or(0, |inner| inner.chars().count());
                    index += hashes + 1 + len + end.len();
                } else {
                    token = Some(Token::Word(word));
                }
            }
            (':', ':') => {
                index += 2;
                token = Some(Token::PathSeparator);
            }
            (c, _) => {
                index += 1;
                token = (!c.is_whitespace() && c != '\'').then_some(Token::Mark(c));
            }
        }
        tokens.extend(token.map(|token| (line, token)));
        line += text[start..index.min(text.len())].iter().filter(|c| **c == '\n').count();
    }
    tokens
}

/// The index behind the string that begins at `start`.
fn after_string(text: &[char], start: usize) -> usize {
    let mut index = start + 1;
    while index < text.len() && text[index] != '"' {
        index += if text[index] == '\\' { 2 } else { 1 };
    }
    index + 1
}

struct Scanner<'t> {
    tokens: &'t [(usize, Token)],
    next: usize,
    /// What each open brace belongs to, if to a module.
    open: Vec<Option<String>>,
    scanned: Scanned,
}

impl Scanner<'_> {
    fn token(&self, ahead: usize) -> Option<&Token> {
        self.tokens.get(self.next + ahead).map(|(_, token)| token)
    }

    fn word(&self, ahead: usize) -> Option<&str> {
        match self.token(ahead) {
            Some(Token::Word(word)) => Some(word),
            _ => None,
        }
    }

    fn is(&self, ahead: usize, mark: char) -> bool {
        self.token(ahead) == Some(&Token::Mark(mark))
    }

    fn within(&self) -> Vec<String> {
        self.open.iter().flatten().cloned().collect()
    }

    fn name(&mut self, line: usize, path: &[String], as_name: Option<String>) {
        let within = self.within();
        self.scanned.named.push(Named { line, within, path: path.to_vec(), as_name });
    }

    fn run(&mut self) {
        while let Some((line, token)) = self.tokens.get(self.next) {
            match token {
                Token::Mark('{') => self.open.push(None),
                Token::Mark('}') => drop(self.open.pop()),
                Token::Word(word) if word == "mod" && self.is(2, '{') => {
                    self.open.push(self.word(1).map(str::to_owned));
                    self.scanned.modules.push(self.within());
                    self.next += 2;
                }
                // `impl Trait + use<'a>` is no import.
                Token::Word(word) if word == "use" && !self.is(1, '<') => {
                    self.next += 1;
                    self.tree(&[]);
                    continue;
                }
                Token::Word(word) if matches!(word.as_str(), "crate" | "super" | "self") => {
                    let mut path = vec![word.clone()];
                    while self.token(1) == Some(&Token::PathSeparator) && self.word(2).is_some() {
                        path.extend(self.word(2).map(str::to_owned));
                        self.next += 2;
                    }
                    if path.len() > 1 {
                        self.name(*line, &path, None);
                    }
                }
                _ => {}
            }
            self.next += 1;
        }
    }

    /// One tree of a `use` line: everything up to a comma, a brace or the semicolon.
    fn tree(&mut self, before: &[String]) {
        let mut path = before.to_vec();
        while let Some((line, token)) = self.tokens.get(self.next) {
            match token {
                Token::Word(word) if word == "as" => {
                    let alias = self.word(1).map(str::to_owned);
                    self.next += 2;
                    return self.name(*line, &path, alias);
                }
                Token::Word(word) if word == "self" && !before.is_empty() => self.next += 1,
                Token::Word(word) => {
                    path.push(word.clone());
                    self.next += 1;
                }
                Token::PathSeparator => self.next += 1,
                Token::Mark('*') => {
                    self.next += 1;
                    return self.name(*line, &path, None);
                }
                Token::Mark('{') => {
                    while !self.is(0, '}') && self.next < self.tokens.len() {
                        self.next += 1;
                        if !self.is(0, '}') {
                            self.tree(&path);
                        }
                    }
                    self.next += 1;
                    return;
                }
                Token::Mark(_) => {
                    let last = path.last().cloned();
                    return self.name(*line, &path, last);
                }
            }
        }
    }
}

#[test]
fn trees_and_paths_are_found_with_their_lines() {
    let source = r##"
use std::fmt;
pub(crate) use crate::{nn::{self, Linear as Layer}, Error,
    tensor::*,};
const TEXT: &str = "use crate::no; \" crate::no::a"; // use crate::no;
/* use crate::no; /* crate::no::a */ use crate::no; */
const RAW: &str = r#"use crate::no; " crate::no::a"#;
fn f<'a>(c: char) -> impl Sized + use<'a> { c == '"' || c == '\'' || c == '{' }
mod tests {
    use super::*;
    fn g() { super::super::nn::linear::<f32>() }
}
fn h() { crate::x::y() }
"##;
    let Scanned { named, modules } = scan(source);
    let found: Vec<_> = named
        .iter()
        .map(|named| (named.line, named.path.join("::"), named.as_name.as_deref(), named.within.join("::")))
        .map(|(line, path, name, within)| format!("{line} {path} {} {within}", name.unwrap_or("-")))
        .collect();
    assert_eq!(
        found,
        [
            "2 std::fmt fmt ",
            "3 crate::nn nn ",
            "3 crate::nn::Linear Layer ",
            "3 crate::Error Error ",
            "4 crate::tensor - ",
            "10 super - tests",
            "11 super::super::nn::linear - tests",
            "13 crate::x::y - ",
        ]
    );
    assert_eq!(modules, [["tests"]]);
}
