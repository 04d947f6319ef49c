//! What the libraries warn of while a model is loaded and runs, on stderr.

use super::terminal;
use log::{Level, LevelFilter, Log, Metadata, Record};

struct Warnings;

impl Log for Warnings {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= Level::Warn && metadata.target().starts_with("candle_quant")
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            terminal::say(&format!("warning: {}", record.args()));
        }
    }

    fn flush(&self) {}
}

/// Shows them from now on. Commands that tell warnings of checkpoints themselves do without it.
pub fn show() {
    // An error says that somebody shows them already.
    if log::set_logger(&Warnings).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
