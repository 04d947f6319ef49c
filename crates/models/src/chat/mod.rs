//! Conversations as a model was trained to read them: its chat template makes one text of all messages.
//!
//! Templates are Jinja's, as transformers renders them. They come with checkpoints, from whomever: what a template may
//! compute and write is bounded.
//!
//! ```
//! use candle_quant_models::chat::{Message, Template, Variables};
//!
//! # fn main() -> candle_quant::Result<()> {
//! let template = Template::new(
//!     "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}\
//!      {% if add_generation_prompt %}<|assistant|>{% endif %}",
//! )?;
//! let messages = [Message::new("user", "Hello")];
//! let prompt = template.render(&messages, &Variables::generation_prompt())?;
//! assert_eq!(prompt, "<|user|>Hello\n<|assistant|>");
//! # Ok(())
//! # }
//! ```

mod conversation;
mod message;
mod namespaces;
mod python;
mod source;
mod template;

pub use conversation::Conversation;
pub use message::{Message, Variables};
pub use template::Template;
