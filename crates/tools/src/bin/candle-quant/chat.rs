//! `candle-quant chat`: a conversation on the terminal, or from a pipe.

mod input;
mod output;

use crate::model::LoadOptions;
use crate::sampling::SamplingOptions;
use crate::terminal;
use anyhow::{Context, Result};
use candle_quant::Error;
use candle_quant_models::chat::{Conversation, Template};
use candle_quant_models::generate::{self, Event, Finish, Generated, Params, Sampler};
use candle_quant_models::Model;
use input::{Input, Read};
use output::Answer;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

const HELP: &str = "\
/reset        begin anew, with the same system prompt
/system TEXT  make this the system prompt; without a text there is none
/save FILE    write the messages to a file, in JSON
/help         show this
/exit         end, as Ctrl-D does
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer.";

// (A doc comment here would replace that of the command.)
#[derive(clap::Args, Debug)]
pub struct Options {
    /// The checkpoint's directory or file, or the name of a model of the Hugging Face hub or of Ollama.
    path: PathBuf,
    /// The system prompt.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// The most tokens of an answer.
    #[arg(short = 'n', long, default_value_t = 4096)]
    sample_len: usize,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    load: LoadOptions,
    /// The most tokens of the conversation [default: as many as memory allows].
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<usize>,
}

/// Set by Ctrl-C, which stops the answer.
static STOPPED: AtomicBool = AtomicBool::new(false);

pub fn run(options: &Options) -> Result<()> {
    let checkpoint = options.load.open(&options.path)?;
    let template = Template::from_checkpoint(&checkpoint)?.with_context(|| {
        format!("{} has no chat template; `generate` continues a text", options.path.display())
    })?;
    let params = options.sampling.apply(Params::from_checkpoint(&checkpoint)?);
    let params = Params { sample_len: options.sample_len, ..params };
    // Refused before anything is loaded.
    let seed = Sampler::new(params.sampling, params.seed)?.seed();
    let mut conversation = Conversation::new(template, generate::load_tokenizer(&checkpoint)?);
    conversation.set_system(options.system.as_deref().unwrap_or_default());
    let device = options.load.device();
    let mut loader = options.load.loader(checkpoint, device.is_cpu())?;
    loader.options.cache.max_tokens = options.max_tokens;
    let mut chat = Chat { model: loader.load(&device)?, conversation, params, seed, saved: None };
    let mut input = Input::new()?;
    if input.is_terminal() {
        // Where lines come from a pipe, Ctrl-C ends the program, as it ends any other.
        ctrlc::set_handler(|| STOPPED.store(true, Ordering::Relaxed))?;
        terminal::say(&format!("{}; /help lists commands, Ctrl-D ends", options.path.display()));
    }
    loop {
        let message = match input.read()? {
            Read::Message(message) => message,
            Read::Interrupted => continue,
            Read::End => return Ok(()),
        };
        match chat.take(&message) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => return Ok(()),
            // Whoever read the answers has gone.
            Err(error) if crate::is_broken_pipe(&error) => return Ok(()),
            // Another message may do. From a pipe nobody would choose it.
            Err(error) if input.is_terminal() => terminal::say(&in_chat(&error)),
            Err(error) => return Err(error),
        }
    }
}

/// An error with what to do about it in a conversation.
fn in_chat(error: &anyhow::Error) -> String {
    let is_full = error.chain().any(|cause| {
        matches!(cause.downcast_ref(), Some(Error::OutOfContext { .. } | Error::OutOfCache { .. }))
    });
    format!("{error:#}{}", if is_full { "; /reset begins anew" } else { "" })
}

struct Chat {
    model: Model,
    conversation: Conversation,
    params: Params,
    /// That of the next answer.
    seed: u64,
    /// The file that was saved last, which may be written again.
    saved: Option<PathBuf>,
}

impl Chat {
    /// A message or a command; breaks off at the end.
    fn take(&mut self, message: &str) -> Result<ControlFlow<()>> {
        let (command, text) = message.split_once(char::is_whitespace).unwrap_or((message, ""));
        let text = text.trim();
        match command {
            "" => {}
            "/exit" | "/quit" => return Ok(ControlFlow::Break(())),
            "/help" => HELP.lines().for_each(terminal::say),
            "/reset" => self.conversation.reset(),
            "/system" => self.conversation.set_system(text),
            "/save" if text.is_empty() => terminal::say("/save: expected the name of a file"),
            "/save" => match self.save(PathBuf::from(text)) {
                Ok(()) => {
                    terminal::say(&format!("{} messages in {text}", self.conversation.messages().len()));
                }
                Err(error) => terminal::say(&format!("/save {text}: {error}")),
            },
            command if command.starts_with('/') => {
                terminal::say(&format!("{command}: no such command; /help lists them"));
            }
            _ => self.answer(message)?,
        }
        Ok(ControlFlow::Continue(()))
    }

    fn answer(&mut self, message: &str) -> Result<()> {
        STOPPED.store(false, Ordering::Relaxed);
        let params = Params { seed: Some(self.seed), ..self.params.clone() };
        self.seed = self.seed.wrapping_add(1);
        // Some templates begin the thoughts themselves.
        let is_thinking = self.conversation.prompt(message)?.trim_end().ends_with(output::BEGIN);
        let mut answer = Answer::new(terminal::Answers::new(), is_thinking);
        let mut written = Ok(());
        let generated = self.conversation.answer(&mut self.model, message, &params, |event| {
            if let Event::Text(text) = event {
                written = answer.write(text);
            }
            match written.is_err() || STOPPED.load(Ordering::Relaxed) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        let ended = written.and_then(|()| answer.end());
        let generated = generated?;
        ended?;
        report(&generated);
        Ok(())
    }

    /// Writes the messages to a file that does not exist yet, or that was written before.
    fn save(&mut self, path: PathBuf) -> io::Result<()> {
        let json = serde_json::to_string_pretty(self.conversation.messages())? + "\n";
        match self.saved.as_ref() == Some(&path) {
            true => fs::write(&path, json)?,
            false => File::create_new(&path)?.write_all(json.as_bytes())?,
        }
        self.saved = Some(path);
        Ok(())
    }
}

fn report(generated: &Generated) {
    let new = generated.prompt_tokens - generated.cached_tokens;
    let (prompt_rate, rate) = (generated.prompt_rate(), generated.decode_rate());
    let stopped = match generated.finish {
        Finish::Length => "; longest answer reached",
        Finish::Cancelled => "; stopped",
        _ => "",
    };
    terminal::say_dimmed(&format!(
        "prompt: {new} new tokens of {}, {prompt_rate:.1} tokens/s; answer: {} tokens, {rate:.1} tokens/s{stopped}",
        generated.prompt_tokens,
        generated.tokens.len(),
    ));
}
