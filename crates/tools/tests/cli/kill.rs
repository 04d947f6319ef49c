//! Conversions that are killed at random moments, of every kind of output, and begun again: the output is there as a whole
//! or not at all, what it replaces is there until then, and nothing else in the folder is touched.
//!
//! `CANDLE_QUANT_KILLS=100` kills each kind 100 times instead of a few; `CANDLE_QUANT_SEED` chooses the moments.

use crate::conversion::{numbers, Source};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// All files below a folder, by path, but for what is being built.
type Tree = BTreeMap<PathBuf, Vec<u8>>;

/// How often each kind of output is killed.
fn kills() -> usize {
    match std::env::var("CANDLE_QUANT_KILLS") {
        Ok(text) => text.parse().expect("CANDLE_QUANT_KILLS: a number"),
        Err(_) => 4,
    }
}

fn seed() -> u64 {
    match std::env::var("CANDLE_QUANT_SEED") {
        Ok(text) => text.parse().expect("CANDLE_QUANT_SEED: a number"),
        Err(_) => std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    }
}

/// One kind of output: its options, and where in the folder it comes to be.
struct Kind {
    options: &'static [&'static str],
    /// What the older output that is replaced was made with.
    older: &'static [&'static str],
    out: &'static str,
}

const MLX: Kind = Kind { options: &["--bits", "4"], older: &["--bits", "8"], out: "out" };
const DENSE: Kind = Kind { options: &["--dequantize"], older: &["--bits", "4"], out: "out" };
const UQFF: Kind =
    Kind { options: &["--bits", "4", "--to", "uqff"], older: &["--bits", "8", "--to", "uqff"], out: "out" };
const OLLAMA: Kind = Kind {
    options: &["--format", "int4", "--to", "ollama", "--name", "m"],
    older: &["--format", "int8", "--to", "ollama", "--name", "m"],
    out: "store",
};

/// Several files for each kind, so that there is something to resume.
fn source() -> Source {
    let mut source = Source::new().with_config(r#"{"a": 1}"#);
    for index in 0..6 {
        source =
            source.with(&format!("layers.{index}.up_proj.weight"), &[64, 1024], &numbers(index, 64 * 1024));
    }
    fs::write(source.folder.path().join("tokenizer_config.json"), "{}").unwrap();
    source.finish()
}

fn command(source: &Path, options: &[&str], out: &Path) -> std::process::Command {
    let mut command = crate::command(&["convert"]);
    command.arg(source).args(options).args(["--max-shard-size", "70KB", "-q", "--cpu", "-o"]).arg(out);
    command.stdout(Stdio::null());
    command
}

#[track_caller]
fn complete(source: &Path, options: &[&str], out: &Path) {
    let output = command(source, options, out).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// All that is in a folder but for `*.partial`.
fn tree(folder: &Path) -> Tree {
    let mut found = Tree::new();
    add(folder, folder, &mut found);
    found
}

fn add(root: &Path, folder: &Path, found: &mut Tree) {
    for entry in fs::read_dir(folder).unwrap() {
        // What is being built comes and goes.
        let Ok(path) = entry.map(|entry| entry.path()) else { continue };
        if path.extension().is_some_and(|extension| extension == "partial") {
            continue;
        }
        match path.is_dir() {
            true => add(root, &path, found),
            false => {
                drop(found.insert(path.strip_prefix(root).unwrap().to_owned(), fs::read(&path).unwrap()))
            }
        }
    }
}

/// What of a folder matters: in a store, blobs that no manifest names are nothing to anybody.
fn relevant(tree: &Tree, final_tree: &Tree) -> Tree {
    let is_blob = |path: &Path| path.components().any(|part| part.as_os_str() == "blobs");
    let kept = |(path, _): &(&PathBuf, &Vec<u8>)| !is_blob(path) || final_tree.contains_key(*path);
    tree.iter().filter(kept).map(|(path, bytes)| (path.clone(), bytes.clone())).collect()
}

/// Kills conversions again and again; `replaces` an older output.
fn killed(kind: &Kind, replaces: bool) {
    let (source, seed) = (source(), seed());
    println!("CANDLE_QUANT_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let source = source.folder.path();
    let options: Vec<_> = match replaces {
        true => kind.options.iter().copied().chain(["--overwrite"]).collect(),
        false => kind.options.to_vec(),
    };
    // A folder with other things in it, before and after.
    let folder = |begin: &dyn Fn(&Path)| {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("thesis.txt"), "mine").unwrap();
        fs::create_dir(folder.path().join("out.d")).unwrap();
        fs::write(folder.path().join("out.d/model.safetensors"), "mine, too").unwrap();
        begin(folder.path());
        folder
    };
    let begin = |path: &Path| {
        if replaces {
            complete(source, kind.older, &path.join(kind.out));
        }
        if kind.out == "store" {
            complete(
                source,
                &["--format", "mxfp4", "--to", "ollama", "--name", "other"],
                &path.join(kind.out),
            );
        }
    };
    let (expected, mut target) = (folder(&begin), folder(&begin));
    let before = tree(expected.path());
    let start = Instant::now();
    complete(source, &options, &expected.path().join(kind.out));
    let one_run = start.elapsed();
    let after = tree(expected.path());
    assert_ne!(before, after);

    let (mut kills_left, mut completed) = (kills(), 0);
    while kills_left > 0 {
        let out = target.path().join(kind.out);
        let mut child = command(source, &options, &out).stderr(Stdio::null()).spawn().unwrap();
        // Every third at once, so that one is killed several times in a run.
        let part = if random.random_range(0..3) == 0 { 0.5 } else { 1.1 };
        std::thread::sleep(one_run.mul_f64(random.random_range(0. ..part)));
        child.kill().unwrap();
        let was_killed = !child.wait().unwrap().success();
        kills_left -= usize::from(was_killed);
        let found = tree(target.path());
        let is_before = relevant(&found, &before) == before;
        let is_after = relevant(&found, &after) == after;
        assert!(is_before || is_after, "seed {seed}: {:?}", found.keys());
        if is_after || !was_killed {
            finish(source, &options, &target, kind, &after, seed);
            completed += 1;
            target = folder(&begin);
        }
    }
    finish(source, &options, &target, kind, &after, seed);
    println!("{} kills, {} complete, one run {one_run:?}", kills(), completed + 1);
}

/// The same command once more, if anything is left to be done: the output of one that was never killed, and nothing
/// beside it.
fn finish(source: &Path, options: &[&str], target: &TempDir, kind: &Kind, after: &Tree, seed: u64) {
    let out = target.path().join(kind.out);
    let left = || -> Vec<_> {
        let entries =
            [target.path(), &out].into_iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|it| it == "partial")).collect()
    };
    let is_after = || relevant(&tree(target.path()), after) == *after;
    if !left().is_empty() || !is_after() {
        // Killed at its very end, it has not left anything that tells whose output that is.
        let was_after = is_after();
        let output = command(source, options, &out).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() || was_after && error.contains("it exists already"), "{error}");
    }
    assert!(is_after(), "seed {seed}: {:?}", tree(target.path()).keys());
    assert!(left().is_empty(), "seed {seed}: {:?}", left());
}

#[test]
fn mlx() {
    killed(&MLX, false);
}

#[test]
fn mlx_in_place_of_another() {
    killed(&MLX, true);
}

#[test]
fn dense() {
    killed(&DENSE, false);
}

#[test]
fn uqff_in_place_of_another() {
    killed(&UQFF, true);
}

#[test]
fn ollama() {
    killed(&OLLAMA, false);
}

#[test]
fn ollama_in_place_of_another() {
    killed(&OLLAMA, true);
}

/// Waits for a moment of a conversion.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
