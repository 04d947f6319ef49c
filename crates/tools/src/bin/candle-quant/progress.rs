//! What is reported while a conversion or a download runs: a bar on a terminal, else a line every few seconds, or lines of
//! JSON.

use crate::terminal;
use candle_quant::Untrusted;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time between two lines.
const EVERY: Duration = Duration::from_secs(5);
/// The time between two lines of JSON, which programs read.
const EVERY_JSON: Duration = Duration::from_secs(1);

pub struct Progress {
    way: Way,
    /// What is counted: tensors, or files.
    what: &'static str,
    state: Mutex<State>,
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
    /// What there is to do.
    bytes: u64,
    count: usize,
    /// Bytes that are done, in all and by this process.
    done: u64,
    done_now: u64,
    finished: usize,
}

impl Progress {
    /// Of tensors or files, of which [`plan`](Progress::plan) says how many.
    pub fn new(what: &'static str, quiet: bool, json: bool) -> Self {
        let way = match (quiet, json, terminal::is_attended()) {
            (true, ..) => Way::Quiet,
            (_, true, _) => Way::Json,
            (.., true) => {
                let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
                let template = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}  {msg}";
                Way::Bar(match ProgressStyle::with_template(template) {
                    Ok(style) => bar.with_style(style),
                    Err(_) => bar,
                })
            }
            _ => Way::Lines,
        };
        let now = Instant::now();
        let state =
            State { begun: now, reported: now, bytes: 0, count: 0, done: 0, done_now: 0, finished: 0 };
        Self { way, what, state: Mutex::new(state) }
    }

    /// So many more are to be done.
    pub fn plan(&self, count: usize, bytes: u64) {
        let mut state = self.lock();
        state.count += count;
        state.bytes += bytes;
        if let Way::Bar(bar) = &self.way {
            // Where nothing is to be done, nothing is drawn.
            if bar.is_hidden() {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            bar.set_length(state.bytes);
        }
    }

    /// So many have been done before.
    pub fn skip(&self, count: usize, bytes: u64) {
        let mut state = self.lock();
        state.done += bytes;
        state.finished += count;
        self.tell(&mut state, "");
    }

    pub fn advance(&self, name: &str, bytes: u64) {
        let mut state = self.lock();
        state.done += bytes;
        state.done_now += bytes;
        self.tell(&mut state, name);
    }

    pub fn finish_one(&self, name: &str) {
        let mut state = self.lock();
        state.finished += 1;
        self.tell(&mut state, name);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, state: &mut State, name: &str) {
        match &self.way {
            Way::Quiet => {}
            Way::Bar(bar) => {
                bar.set_position(state.done);
                bar.set_message(format!("{}/{} {}", state.finished, state.count, Untrusted::new(name)));
            }
            Way::Lines if state.reported.elapsed() >= EVERY => self.line(state, name),
            Way::Json if state.reported.elapsed() >= EVERY_JSON => self.line(state, name),
            Way::Lines | Way::Json => {}
        }
    }

    /// The last line; nothing is reported of what took no time, except as JSON.
    pub fn finish(&self) {
        let mut state = self.lock();
        match &self.way {
            Way::Bar(bar) => bar.finish_and_clear(),
            Way::Json => self.line(&mut state, ""),
            Way::Lines if state.count > 0 && state.begun.elapsed() >= EVERY => self.line(&mut state, ""),
            Way::Quiet | Way::Lines => {}
        }
    }

    fn line(&self, state: &mut State, name: &str) {
        state.reported = Instant::now();
        let rate = state.done_now as f64 / state.begun.elapsed().as_secs_f64().max(1e-9);
        let left = state.bytes.saturating_sub(state.done);
        let eta = (rate > 0.).then(|| (left as f64 / rate).ceil());
        let line = match self.way {
            Way::Json => json!({
                "bytes": state.done,
                "total_bytes": state.bytes,
                self.what: state.finished,
                format!("total_{}", self.what): state.count,
                self.what.trim_end_matches('s'): name,
                "bytes_per_second": rate,
                "eta_seconds": eta,
            })
            .to_string(),
            _ => format!(
                "{:.1} of {:.1} MB, {} of {} {}, {:.0} MB/s, {} s left  {name}",
                state.done as f64 / 1e6,
                state.bytes as f64 / 1e6,
                state.finished,
                state.count,
                self.what,
                rate / 1e6,
                eta.map_or("?".to_owned(), |seconds| format!("{seconds:.0}")),
            ),
        };
        // Whoever reads it may have gone; the work goes on.
        let json = matches!(self.way, Way::Json);
        let _ = writeln!(terminal::stderr(json), "{}", line.trim_end());
    }
}
