//! Messages from a terminal, with editing and history, or lines from a pipe.

use anyhow::Result;
use rustyline::error::ReadlineError;
use rustyline::DefaultEditor;
use std::io::{self, BufRead, IsTerminal};

pub enum Input {
    Terminal(Box<DefaultEditor>),
    Pipe(io::Lines<io::StdinLock<'static>>),
}

/// What was read.
pub enum Read {
    Message(String),
    /// Ctrl-C: what was typed is dropped.
    Interrupted,
    End,
}

impl Input {
    pub fn new() -> Result<Self> {
        let stdin = io::stdin();
        Ok(match stdin.is_terminal() && io::stdout().is_terminal() {
            true => Self::Terminal(Box::new(DefaultEditor::new()?)),
            false => Self::Pipe(stdin.lock().lines()),
        })
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// A message: a line, and those after it as long as each ends with a backslash. Pasted lines are one.
    pub fn read(&mut self) -> Result<Read> {
        let mut message = String::new();
        let mut prompt = ">>> ";
        loop {
            let line = match self.line(prompt)? {
                Read::Message(line) => line,
                Read::End if !message.is_empty() => break,
                other => return Ok(other),
            };
            match line.strip_suffix('\\') {
                Some(begun) => {
                    message.push_str(begun);
                    message.push('\n');
                    prompt = "... ";
                }
                None => {
                    message.push_str(&line);
                    break;
                }
            }
        }
        let message = message.trim().to_owned();
        if let (Self::Terminal(editor), false) = (self, message.is_empty()) {
            editor.add_history_entry(message.as_str())?;
        }
        Ok(Read::Message(message))
    }

    fn line(&mut self, prompt: &str) -> Result<Read> {
        Ok(match self {
            Self::Pipe(lines) => lines.next().transpose()?.map_or(Read::End, Read::Message),
            Self::Terminal(editor) => match editor.readline(prompt) {
                Ok(line) => Read::Message(line),
                Err(ReadlineError::Interrupted) => Read::Interrupted,
                Err(ReadlineError::Eof) => Read::End,
                Err(error) => return Err(error.into()),
            },
        })
    }
}
