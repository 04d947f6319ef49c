//! Loading, in processes of their own: what is measured before has left no warm threads, no memory and no page tables.

use crate::contenders::Contender;
use crate::files::Files;
use crate::machine::peak_resident;
use crate::options::{Library, Options};
use crate::report::{Case, Report};
use anyhow::{bail, Context, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// What a process has to tell of one model.
#[derive(Serialize, Deserialize)]
struct Loading {
    load_s: f64,
    /// From the start of loading to the logits of the prompt's last token.
    first_token_s: f64,
    peak_bytes: u64,
}

/// In the child: loads `path`, computes a prompt and prints what it took.
pub fn run(path: &Path, options: &Options) -> Result<()> {
    let library = if path.is_dir() { Library::CandleQuant } else { Library::Candle };
    let start = Instant::now();
    let mut contender = Contender::load(library, path, options.chunk)?;
    let load_s = start.elapsed().as_secs_f64();
    for &prompt in &options.prompts {
        contender.prefill(prompt)?;
    }
    let first_token_s = start.elapsed().as_secs_f64();
    let loading = Loading { load_s, first_token_s, peak_bytes: peak_resident().unwrap_or(0) };
    println!("{}", serde_json::to_string(&loading)?);
    Ok(())
}

fn spawn(path: &Path, prompt: usize, options: &Options) -> Result<Loading> {
    let output = Command::new(std::env::current_exe()?)
        .arg("--child")
        .arg(path)
        .args(["--prompts", &prompt.to_string(), "--chunk", &options.chunk.to_string()])
        .output()?;
    if !output.status.success() {
        bail!("{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).with_context(|| path.display().to_string())
}

/// Times of loading and of the first token behind 16, and the peak of memory.
pub fn load(options: &Options, files: &Files, report: &mut Report) -> Result<()> {
    const PROMPT: usize = 16;
    // Into the page cache.
    for library in libraries(options) {
        spawn(files.path(library), PROMPT, options)?;
    }
    let mut loadings: Vec<Vec<Loading>> = libraries(options).map(|_| Vec::new()).collect();
    for _ in 0..options.rounds {
        for (library, loadings) in libraries(options).zip(&mut loadings) {
            loadings.push(spawn(files.path(library), PROMPT, options)?);
        }
    }
    for (library, loadings) in libraries(options).zip(&loadings) {
        let mut write = |kind, unit, value: fn(&Loading) -> f64| {
            let values: Vec<f64> = loadings.iter().map(value).collect();
            report.write(Case::new(kind, files, PROMPT).figure(library.name(), unit, &values))
        };
        write("load", "s", |loading| loading.load_s)?;
        write("first token", "s", |loading| loading.first_token_s)?;
        write("peak memory", "MB", megabytes)?;
    }
    Ok(())
}

/// The peak of memory with a long prompt.
pub fn memory(options: &Options, files: &Files, report: &mut Report) -> Result<()> {
    let prompt = options.prompts.iter().copied().max().unwrap_or(1);
    for library in libraries(options) {
        let loading = spawn(files.path(library), prompt, options)?;
        let case = Case::new("peak memory", files, prompt);
        report.write(case.figure(library.name(), "MB", &[megabytes(&loading)]))?;
    }
    Ok(())
}

fn megabytes(loading: &Loading) -> f64 {
    loading.peak_bytes as f64 / 1e6
}

fn libraries(options: &Options) -> impl Iterator<Item = Library> + '_ {
    [Library::CandleQuant, Library::Candle].into_iter().filter(|library| options.library(*library))
}
