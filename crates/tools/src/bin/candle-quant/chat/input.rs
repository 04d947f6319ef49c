//! Messages from a terminal, with editing and history, or lines from a pipe.

use crate::terminal;
use anyhow::Result;
use rustyline::error::ReadlineError;
use rustyline::DefaultEditor;
use std::io::{self, BufRead, IsTerminal};

pub enum Input {
    Terminal { editor: Box<DefaultEditor>, _silent: NoEcho },
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
        Ok(match stdin.is_terminal() && terminal::is_watched() {
            true => Self::Terminal { editor: Box::new(DefaultEditor::new()?), _silent: NoEcho::new()? },
            false => Self::Pipe(stdin.lock().lines()),
        })
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
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
        if let (Self::Terminal { editor, .. }, false) = (self, message.is_empty()) {
            editor.add_history_entry(message.as_str())?;
        }
        Ok(Read::Message(message))
    }

    fn line(&mut self, prompt: &str) -> Result<Read> {
        Ok(match self {
            Self::Pipe(lines) => lines.next().transpose()?.map_or(Read::End, Read::Message),
            Self::Terminal { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Read::Message(line),
                Err(ReadlineError::Interrupted) => Read::Interrupted,
                Err(ReadlineError::Eof) => Read::End,
                Err(error) => return Err(error.into()),
            },
        })
    }
}

/// As long as it lives, the terminal itself shows nothing that is typed: it would stand in the middle of an answer. The editor
/// shows it after the answer.
#[cfg(unix)]
pub struct NoEcho(rustix::termios::Termios);

#[cfg(unix)]
impl NoEcho {
    fn new() -> Result<Self> {
        use rustix::termios::{tcgetattr, tcsetattr, LocalModes, OptionalActions};
        let before = tcgetattr(io::stdin())?;
        let mut silent = before.clone();
        silent.local_modes.remove(LocalModes::ECHO);
        tcsetattr(io::stdin(), OptionalActions::Now, &silent)?;
        Ok(Self(before))
    }
}

#[cfg(unix)]
impl Drop for NoEcho {
    fn drop(&mut self) {
        // Nobody could do anything about a terminal that has gone.
        let _ = rustix::termios::tcsetattr(io::stdin(), rustix::termios::OptionalActions::Now, &self.0);
    }
}

/// Elsewhere what is typed is shown when it is typed.
#[cfg(not(unix))]
pub struct NoEcho;

#[cfg(not(unix))]
impl NoEcho {
    fn new() -> Result<Self> {
        Ok(Self)
    }
}
