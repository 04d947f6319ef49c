//! What is reported while a conversion runs: a bar on a terminal, else a line every few seconds, or lines of JSON.

use crate::terminal;
use candle_quant::Untrusted;
use candle_quant_tools::convert::ConvertEvent;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time between two lines.
const EVERY: Duration = Duration::from_secs(5);
/// The time between two lines of JSON, which programs read.
const EVERY_JSON: Duration = Duration::from_secs(1);

pub struct Progress {
    way: Way,
    state: Mutex<State>,
    bytes: u64,
    tensors: usize,
}

enum Way {
    Quiet,
    Bar(ProgressBar),
    Lines,
    Json,
}

struct State {
    begun: Instant,
    reported: Instant,
    /// Bytes of the source that are done, in all and by this process.
    done: u64,
    done_now: u64,
    finished: usize,
}

impl Progress {
    /// Of so many tensors and bytes of the source.
    pub fn new((tensors, bytes): (usize, u64), quiet: bool, json: bool) -> Self {
        let way = match (quiet, json, terminal::is_attended()) {
            (true, ..) => Way::Quiet,
            (_, true, _) => Way::Json,
            (.., true) => {
                let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
                let template = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}  {msg}";
                Way::Bar(match ProgressStyle::with_template(template) {
                    Ok(style) => bar.with_style(style),
                    Err(_) => bar,
                })
            }
            _ => Way::Lines,
        };
        let now = Instant::now();
        let state = State { begun: now, reported: now, done: 0, done_now: 0, finished: 0 };
        Self { way, state: Mutex::new(state), bytes, tensors }
    }

    pub fn tell(&self, event: &ConvertEvent) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let name = match *event {
            ConvertEvent::Skipped { bytes, tensors } => {
                state.done += bytes;
                state.finished += tensors;
                ""
            }
            ConvertEvent::Advanced { tensor, bytes } => {
                state.done += bytes;
                state.done_now += bytes;
                tensor
            }
            ConvertEvent::Finished { tensor } => {
                state.finished += 1;
                tensor
            }
            _ => return,
        };
        match &self.way {
            Way::Quiet => {}
            Way::Bar(bar) => {
                bar.set_position(state.done);
                bar.set_message(format!("{}/{} {}", state.finished, self.tensors, Untrusted::new(name)));
            }
            Way::Lines if state.reported.elapsed() >= EVERY => self.line(&mut state, name),
            Way::Json if state.reported.elapsed() >= EVERY_JSON => self.line(&mut state, name),
            Way::Lines | Way::Json => {}
        }
    }

    /// The last line; nothing is reported of a conversion that took no time, except as JSON.
    pub fn finish(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &self.way {
            Way::Bar(bar) => bar.finish_and_clear(),
            Way::Json => self.line(&mut state, ""),
            Way::Lines if state.begun.elapsed() >= EVERY => self.line(&mut state, ""),
            Way::Quiet | Way::Lines => {}
        }
    }

    fn line(&self, state: &mut State, name: &str) {
        state.reported = Instant::now();
        let rate = state.done_now as f64 / state.begun.elapsed().as_secs_f64().max(1e-9);
        let left = self.bytes.saturating_sub(state.done);
        let eta = (rate > 0.).then(|| (left as f64 / rate).ceil());
        let line = match self.way {
            Way::Json => json!({
                "bytes": state.done,
                "total_bytes": self.bytes,
                "tensors": state.finished,
                "total_tensors": self.tensors,
                "tensor": name,
                "bytes_per_second": rate,
                "eta_seconds": eta,
            })
            .to_string(),
            _ => format!(
                "{:.1} of {:.1} MB, {} of {} tensors, {:.0} MB/s, {} s left  {name}",
                state.done as f64 / 1e6,
                self.bytes as f64 / 1e6,
                state.finished,
                self.tensors,
                rate / 1e6,
                eta.map_or("?".to_owned(), |seconds| format!("{seconds:.0}")),
            ),
        };
        // Whoever reads it may have gone; the conversion goes on.
        let json = matches!(self.way, Way::Json);
        let _ = writeln!(terminal::stderr(json), "{}", line.trim_end());
    }
}
