//! Calls into the tokenizers crate, which panics at some of what a file may say.

use candle_quant::{Error, Result};
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// The result of `work`; what it panics with, if it does. Nothing is printed then.
pub(super) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static ONCE: Once = Once::new();
    // Panics elsewhere are reported as before.
    ONCE.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !IS_CAUGHT.get() {
                others(panic);
            }
        }));
    });
    let before = IS_CAUGHT.replace(true);
    // A tokenizer keeps nothing but caches, and is of no use after a panic.
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    IS_CAUGHT.set(before);
    result.map_err(|panic| match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        (None, None) => "a panic without a message".to_owned(),
    })
}

/// What the tokenizer makes of a text or of tokens.
pub(super) fn used<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let wrong = |problem: String| Error::mismatch("text", "what the tokenizer can work on", problem);
    match caught(work) {
        Ok(result) => result.map_err(|error| wrong(error.to_string())),
        Err(panic) => Err(wrong(format!("the tokenizer gives up: {panic}"))),
    }
}
