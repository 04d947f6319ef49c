//! Fuzzing without libFuzzer: random changes of the seeds, for a while.
//!
//! Reports executions, how many of them were accepted, the slowest, and the peak of the resident set. An
//! input that panics, or takes longer than ten seconds, is written to `artifacts/TARGET/`, and the exit code
//! is 1.

use candle_quant_fuzz::{mutate, Bundle, Target, TARGETS};
use clap::builder::PossibleValuesParser;
use clap::Parser;
use std::fs;
use std::io;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Panics of one target after which the next one follows.
const MAX_FAILURES: usize = 10;

const TOO_LONG: Duration = Duration::from_secs(10);

/// Changes files at random and reads them, for a while.
#[derive(Parser)]
struct Options {
    /// How long, for all targets together
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Of the random changes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the seeds to corpus/, for cargo-fuzz, and run nothing
    #[arg(long)]
    corpus: bool,
    /// Which ones; all if none is named
    #[arg(value_parser = PossibleValuesParser::new(TARGETS.map(|target| target.name)))]
    targets: Vec<String>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let is_wanted = |target: &Target| {
        options.targets.is_empty() || options.targets.iter().any(|name| name == target.name)
    };
    let wanted: Vec<&Target> = TARGETS.iter().filter(|target| is_wanted(target)).collect();
    let time = Duration::from_secs(options.seconds) / wanted.len().max(1) as u32;
    let mut failures = 0;
    for target in wanted {
        let (seeds, name) = (target.seeds(), target.name);
        if seeds.is_empty() {
            eprintln!("{name}: no seeds");
            failures += 1;
        } else if options.corpus {
            for (seed, bundle) in &seeds {
                save(&format!("corpus/{name}"), seed, bundle).expect("a file in corpus");
            }
        } else {
            let seeds: Vec<Bundle> = seeds.into_iter().map(|(_, bundle)| bundle).collect();
            failures += soak(target, &seeds, options.seed, time);
        }
    }
    if failures == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs one target; returns how many inputs failed.
fn soak(target: &Target, seeds: &[Bundle], seed: u64, time: Duration) -> usize {
    let (start, mut seed) = (Instant::now(), seed.wrapping_mul(1 << 40));
    let (mut executions, mut accepted, mut failures, mut slowest) = (0usize, 0usize, 0usize, Duration::ZERO);
    while start.elapsed() < time && failures < MAX_FAILURES {
        seed = seed.wrapping_add(1);
        let mut bundle = seeds[executions % seeds.len()].clone();
        mutate(&mut bundle, seed);
        // What ends the process is there afterwards.
        let last = save(&format!("artifacts/{}", target.name), "last", &bundle).expect("a file in artifacts");
        let began = Instant::now();
        let result = panic::catch_unwind(|| target.run(&bundle));
        let took = began.elapsed();
        fs::remove_file(last).expect("it was written");
        executions += 1;
        slowest = slowest.max(took);
        accepted += usize::from(matches!(result, Ok(true)));
        if result.is_err() || took > TOO_LONG {
            failures += 1;
            let why = if result.is_err() { "panic" } else { "slow" };
            let name = format!("{why}-{seed}");
            save(&format!("artifacts/{}", target.name), &name, &bundle).expect("a file in artifacts");
            eprintln!("{}: {name} ({took:?})", target.name);
        }
    }
    println!(
        "{}: {executions} executions of {} seeds in {:.0} s, {accepted} accepted, {failures} failures, \
         slowest {} ms, peak {}",
        target.name,
        seeds.len(),
        start.elapsed().as_secs_f64(),
        slowest.as_millis(),
        peak()
    );
    failures
}

fn save(directory: &str, name: &str, bundle: &Bundle) -> io::Result<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    fs::create_dir_all(&directory)?;
    let path = directory.join(name);
    fs::write(&path, bundle.encode())?;
    Ok(path)
}

/// The most memory the process has had so far.
fn peak() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or_else(|| "unknown".to_owned(), |peak| peak.trim().to_owned())
}
