//! Turn by turn: messages, template, and a cache that is kept.

use super::{Message, Template, Variables};
use crate::generate::{self, CausalLm, Event, Finish, Generated, Params, Session};
use candle_quant::Result;
use std::ops::ControlFlow;
use tokenizers::Tokenizer;

/// A conversation with a model. Only what is new since the last answer is computed: of the text that the template makes of
/// all messages, what the model has read already is in its cache.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_quant::Checkpoint;
/// use candle_quant_models::chat::{Conversation, Template};
/// use candle_quant_models::generate::{self, Params};
/// use candle_quant_models::Model;
/// use std::ops::ControlFlow;
///
/// # fn main() -> candle_quant::Result<()> {
/// let checkpoint = Checkpoint::open("assets/tiny")?;
/// // This model was not trained to chat. Of one that was, `Template::from_checkpoint` reads the template.
/// let template = Template::new("{% for message in messages %}{{ message.content }}\n{% endfor %}")?;
/// let mut conversation = Conversation::new(template, generate::load_tokenizer(&checkpoint)?);
/// let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu)?;
/// let params = Params { sample_len: 10, ..Params::from_checkpoint(&checkpoint)? };
/// for message in ["Once upon a time", "What then?"] {
///     let answer = conversation.answer(&mut model, message, &params, |_| ControlFlow::Continue(()))?;
///     println!("{}", answer.text);
/// }
/// assert_eq!(conversation.messages().len(), 4);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Conversation {
    template: Template,
    tokenizer: Tokenizer,
    messages: Vec<Message>,
    session: Session,
}

impl Conversation {
    /// A conversation without messages.
    pub fn new(template: Template, tokenizer: Tokenizer) -> Self {
        Self { template, tokenizer, messages: Vec::new(), session: Session::default() }
    }

    /// All messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Makes this the system prompt, of what was said before as well; an empty text removes it.
    pub fn set_system(&mut self, text: &str) {
        self.messages.retain(|message| !is_system(message));
        if !text.is_empty() {
            self.messages.insert(0, Message::new("system", text));
        }
    }

    /// Forgets all messages but the system prompt.
    pub fn reset(&mut self) {
        self.messages.retain(is_system);
    }

    /// The text that the model would read if this were the next message.
    ///
    /// # Errors
    /// As those of [`Template::render`].
    pub fn prompt(&self, text: &str) -> Result<String> {
        let messages = [self.messages.as_slice(), &[Message::new("user", text)]].concat();
        self.template.render(&messages, &Variables::generation_prompt())
    }

    /// Takes a message and generates the answer to it. Both belong to the conversation then, also if the answer is broken
    /// off, unless nothing has come of it yet.
    ///
    /// # Errors
    /// As those of [`Template::render`] and [`Session::generate`]; the conversation is as before then.
    pub fn answer<M: CausalLm + ?Sized>(
        &mut self,
        model: &mut M,
        text: &str,
        params: &Params,
        on_event: impl FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let prompt = generate::encode(&self.tokenizer, &self.prompt(text)?, false)?;
        let answer = self.session.generate(model, &self.tokenizer, &prompt, params, on_event)?;
        if answer.finish != Finish::Cancelled || !answer.text.is_empty() {
            self.messages.push(Message::new("user", text));
            self.messages.push(Message::new("assistant", &answer.text));
        }
        Ok(answer)
    }
}

fn is_system(message: &Message) -> bool {
    message.get("role") == Some("system")
}
