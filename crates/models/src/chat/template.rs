//! A chat template: compiled once, rendered with bounds.

use super::python::{self, Raised};
use super::{namespaces, Message, Variables};
use candle_quant::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, ErrorKind};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

/// The largest template; those of `tests/fixtures/chat` have 17 kB at most.
pub(super) const MAX_SOURCE: usize = 1 << 16;

/// Steps of a template, and units of 64 bytes that it works on: for each conversation, for each of its messages, and for
/// each byte in units of 8.
const FUEL: (u64, u64) = (100_000, 1_000);
const MAX_FUEL: u64 = 1_000_000;

/// A step nests a value once more, and nested values are printed and dropped by recursion: so much stack for each.
const STACK_OF_STEP: usize = 512;
const MIN_STACK: usize = 4 << 20;

/// The longest text.
const MAX_OUTPUT: usize = 32 << 20;

/// The name of the template that is for everything, and of that for conversations with tools.
pub(super) const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// The template that makes one text of a conversation, or several of them by name.
///
/// It sees what transformers shows it: `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens of
/// the tokenizer (`bos_token` and others), and the variables of the call. It has Jinja's loop controls and `generation`
/// blocks, `raise_exception`, `strftime_now`, a `tojson` that escapes no HTML, and the methods of Python's strings.
#[derive(Clone, Debug)]
pub struct Template {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    /// The file that it is from.
    path: PathBuf,
}

impl Template {
    /// A template in Jinja.
    ///
    /// # Errors
    /// If it is not Jinja, or too long.
    pub fn new(source: &str) -> Result<Self> {
        let templates = BTreeMap::from([(DEFAULT.to_owned(), source.to_owned())]);
        Self::named(PathBuf::from("chat template"), templates)
    }

    /// Templates by name, from this file.
    pub(super) fn named(path: PathBuf, templates: BTreeMap<String, String>) -> Result<Self> {
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        let syntax = syntax.build().map_err(|error| invalid(&path, &error))?;
        environment.set_syntax(syntax.clone());
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(python::method);
        environment.add_filter("tojson", python::tojson);
        environment.set_formatter(python::write);
        environment.add_filter("string", python::string);
        environment.add_test("iterable", python::is_iterable);
        environment.add_test("sequence", python::is_sequence);
        environment.add_function("raise_exception", python::raise_exception);
        environment.add_function("strftime_now", python::strftime_now);
        for (name, source) in templates {
            if source.len() > MAX_SOURCE {
                let problem = format!("a chat template of {} bytes, more than {MAX_SOURCE}", source.len());
                return Err(Error::file(&path, problem, "use another template"));
            }
            let source = without_generation(&source.replace("\r\n", "\n")).into_owned();
            namespaces::check(&source, &syntax).map_err(|problem| {
                Error::file(
                    &path,
                    format!("a chat template that is refused: {problem}"),
                    "use another template",
                )
            })?;
            environment.add_template_owned(name, source).map_err(|error| invalid(&path, &error))?;
        }
        Ok(Self { environment, special_tokens: BTreeMap::new(), path })
    }

    /// The same template with these special tokens.
    pub(super) fn with_special_tokens(mut self, tokens: BTreeMap<String, String>) -> Self {
        self.special_tokens = tokens;
        self
    }

    /// One of the special tokens that the template sees, such as `bos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name).map(String::as_str)
    }

    /// The text of a conversation. The tokenizer has to add no special tokens to it: the template has written them.
    ///
    /// # Errors
    /// If the template refuses the conversation, fails, or computes or writes more than any real one does.
    pub fn render(&self, messages: &[Message], variables: &Variables) -> Result<String> {
        let mut context: BTreeMap<&str, Value> = BTreeMap::from([
            ("tools", ().into()),
            ("documents", ().into()),
            ("add_generation_prompt", false.into()),
        ]);
        let tokens = self.special_tokens.iter().map(|(name, token)| (name.as_str(), token.as_str().into()));
        context.extend(tokens);
        context.extend(variables.0.iter().map(|(name, value)| (name.as_str(), value.clone())));
        let has_tools = context.get("tools").is_some_and(Value::is_true);
        context.insert("messages", messages.iter().map(Message::value).collect());
        let name = match self.environment.get_template(TOOL_USE) {
            Ok(_) if has_tools => TOOL_USE,
            _ => DEFAULT,
        };
        let size = context.values().map(|value| value.to_string().len() as u64).sum::<u64>();
        let fuel = FUEL.0 + FUEL.1 * messages.len() as u64 + size / 8;
        let text = self.run(name, Value::from_pairs(context), fuel.min(MAX_FUEL))?;
        String::from_utf8(text).map_err(|error| {
            Error::file(&self.path, format!("the chat template writes {error}"), "use another template")
        })
    }

    /// What the template called `name` writes, on a thread whose stack is as large as its fuel demands.
    fn run(&self, name: &str, context: Value, fuel: u64) -> Result<Vec<u8>> {
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let render = move || -> Result<Vec<u8>, minijinja::Error> {
            let mut text = Bounded(Vec::new());
            let template = environment.get_template(name)?;
            template.render_captured_to(context, &mut text)?;
            Ok(text.0)
        };
        let stack = MIN_STACK + STACK_OF_STEP * fuel as usize;
        let rendered = thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(stack).spawn_scoped(scope, render);
            thread.map(thread::ScopedJoinHandle::join)
        });
        match rendered {
            Ok(Ok(rendered)) => rendered.map_err(|error| self.failure(&error)),
            Ok(Err(_)) => Err(Error::file(&self.path, "the chat template panics", "use another template")),
            Err(error) => Err(Error::Io { path: self.path.clone(), error }),
        }
    }

    fn failure(&self, error: &minijinja::Error) -> Error {
        let (problem, remedy) = match error.kind() {
            ErrorKind::OutOfFuel => {
                ("the chat template runs for too long".to_owned(), "use another template")
            }
            ErrorKind::WriteFailure => {
                (format!("the chat template writes more than {MAX_OUTPUT} bytes"), "use another template")
            }
            _ if is_raised(error) => (
                format!("the chat template refuses the conversation: {}", error.detail().unwrap_or_default()),
                "change the messages",
            ),
            _ => {
                (format!("the chat template fails: {error}"), "change the messages, or use another template")
            }
        };
        Error::file(&self.path, problem, remedy)
    }
}

fn invalid(path: &Path, error: &minijinja::Error) -> Error {
    Error::file(path, format!("the chat template can't be read: {error}"), "use another template")
}

fn is_raised(error: &minijinja::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.is::<Raised>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Takes so many bytes and no more.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len().saturating_add(bytes.len()) > MAX_OUTPUT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The same template with blocks without meaning where it has transformers' `generation`: they mark what a model is
/// trained on, and write what is in them.
fn without_generation(source: &str) -> Cow<'_, str> {
    let mut written = String::new();
    let mut rest = source;
    while let Some((before, tag, after)) = next_tag(rest) {
        let name = tag.trim_matches(['-', '+']).trim();
        written.push_str(before);
        let replaced = match name {
            "generation" => tag.replace(name, "with"),
            "endgeneration" => tag.replace(name, "endwith"),
            _ => tag.to_owned(),
        };
        written.extend(["{%", &replaced, "%}"]);
        rest = after;
    }
    match written.is_empty() {
        true => source.into(),
        false => (written + rest).into(),
    }
}

/// What is before the next tag, in it, and behind it.
fn next_tag(source: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = source.split_once("{%")?;
    let (tag, after) = rest.split_once("%}")?;
    Some((before, tag, after))
}
