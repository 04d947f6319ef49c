//! Interrupted conversions.

use super::common::{bundled, bundled_path, files, json_file, Source};
use candle_core::DType;
use candle_quant::{Checkpoint, Result};
use candle_quant_tools::convert::{
    self, ConvertEvent, ConvertOptions, ConvertPlan, ConvertReport, Recipe, RunOptions,
};
use std::fs;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

/// Shards of about 100 kB, so that there are many.
fn plan_of(source: &Checkpoint, format: &str) -> ConvertPlan {
    let mut options = ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()));
    options.max_shard_size = 100_000;
    ConvertPlan::new(source, &options).unwrap()
}

fn run(plan: &ConvertPlan, out: &Path, resume: bool) -> Result<ConvertReport> {
    convert::convert(plan, out, &RunOptions { resume, ..RunOptions::default() }, &|_| ())
}

/// A conversion that dies in its `tensors`-th tensor.
fn interrupted(plan: &ConvertPlan, tensors: usize) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let finished = AtomicUsize::new(0);
    let progress = |event: ConvertEvent| {
        if matches!(event, ConvertEvent::Finished { .. })
            && finished.fetch_add(1, Ordering::Relaxed) + 1 == tensors
        {
            panic!("interrupted");
        }
    };
    let result =
        catch_unwind(AssertUnwindSafe(|| convert::convert(plan, &out, &RunOptions::default(), &progress)));
    assert!(result.is_err() && !out.exists());
    (folder, out)
}

fn complete(plan: &ConvertPlan) -> (Vec<(String, Vec<u8>)>, String) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let report = run(plan, &out, false).unwrap();
    (files(&out).into_iter().collect(), serde_json::to_string(&report).unwrap())
}

#[test]
fn what_is_resumed_is_equal_and_nothing_is_done_twice() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let expected = complete(&plan);
    let all = plan.tensors().count();
    for tensors in [1, 9, 20, all] {
        let (_folder, out) = interrupted(&plan, tensors);
        let journal = json_file(out.with_file_name("out.partial").join("journal.json"));
        let done = journal["finished"].as_array().unwrap().len();
        let (skipped, written) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let count = |event: ConvertEvent| match event {
            ConvertEvent::Skipped { tensors, .. } => drop(skipped.fetch_add(tensors, Ordering::Relaxed)),
            ConvertEvent::Finished { .. } => drop(written.fetch_add(1, Ordering::Relaxed)),
            _ => {}
        };
        let options = RunOptions { resume: true, ..RunOptions::default() };
        let report = convert::convert(&plan, &out, &options, &count).unwrap();
        let (skipped, written) = (skipped.into_inner(), written.into_inner());
        assert_eq!(skipped + written, all);
        assert!(skipped >= done && (done > 0) == (skipped > 0), "{tensors}: {done} files, {skipped} tensors");
        let found = (files(&out).into_iter().collect(), serde_json::to_string(&report).unwrap());
        assert!(found == expected, "{tensors}");
        assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1);
    }
}

#[test]
fn an_interrupted_conversion_is_taken_up_only_when_asked_to() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let (_folder, out) = interrupted(&plan, 9);
    let error = run(&plan, &out, false).unwrap_err().to_string();
    for part in ["out.partial", "left by a conversion that was interrupted", "--resume"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    let other = plan_of(&bundled("tiny-bf16"), "5");
    let error = run(&other, &out, true).unwrap_err().to_string();
    assert!(error.contains("begun with other options"), "{error}");
    // Nothing to resume is no obstacle.
    run(&plan, &out.with_file_name("new"), true).unwrap();
}

#[test]
fn a_source_that_changed_is_noticed() {
    let source = tempfile::tempdir().unwrap();
    for (name, bytes) in files(bundled_path("tiny-bf16")) {
        fs::write(source.path().join(name), bytes).unwrap();
    }
    let plan = plan_of(&Checkpoint::open(source.path()).unwrap(), "4");
    let (_folder, out) = interrupted(&plan, 9);
    let weights = source.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::remove_file(&weights).unwrap();
    fs::write(&weights, bytes).unwrap();
    let plan = plan_of(&Checkpoint::open(source.path()).unwrap(), "4");
    let error = run(&plan, &out, true).unwrap_err().to_string();
    assert!(error.contains("model.safetensors was another file") && error.contains("begin anew"), "{error}");
}

#[test]
fn finished_files_that_were_changed_are_written_again() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let (_folder, out) = interrupted(&plan, 20);
    let partial = out.with_file_name("out.partial");
    let journal = json_file(partial.join("journal.json"));
    let finished = journal["finished"].as_array().unwrap();
    assert!(finished.len() > 1);
    let damaged = partial.join("model").join(finished[0]["file"].as_str().unwrap());
    let mut bytes = fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&damaged, bytes).unwrap();
    fs::remove_file(partial.join("model").join(finished[1]["file"].as_str().unwrap())).unwrap();
    run(&plan, &out, true).unwrap();
    assert!(files(&out).into_iter().collect::<Vec<_>>() == complete(&plan).0);
}

#[test]
fn a_damaged_journal_is_named() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let (_folder, out) = interrupted(&plan, 9);
    let journal = out.with_file_name("out.partial").join("journal.json");
    fs::write(&journal, "{").unwrap();
    let error = run(&plan, &out, true).unwrap_err().to_string();
    assert!(error.contains("journal.json") && error.contains("remove the folder"), "{error}");
}

/// Killed between the rename and the removal of the journal.
#[test]
fn an_output_that_is_there_already_only_needs_tidying() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let strict = RunOptions { max_relative_rms: Some(1e-6), ..RunOptions::default() };
    convert::convert(&plan, &out, &strict, &|_| ()).unwrap_err();
    fs::rename(folder.path().join("out.partial/model"), &out).unwrap();
    let expected = complete(&plan);
    let list = expected.0.iter().find(|(name, _)| name == "candle-quant.json").expect("a list of the output");
    fs::write(out.join("candle-quant.json"), &list.1).unwrap();
    let report = run(&plan, &out, true).unwrap();
    assert!(files(&out).into_iter().collect::<Vec<_>>() == expected.0);
    assert_eq!(serde_json::to_string(&report).unwrap(), expected.1);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn two_conversions_to_one_output_exclude_each_other() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let refused = AtomicUsize::new(0);
    let progress = |_: ConvertEvent| {
        let error = run(&plan, &out, true).unwrap_err().to_string();
        assert!(error.contains("another conversion is writing here"), "{error}");
        refused.fetch_add(1, Ordering::Relaxed);
    };
    convert::convert(&plan, &out, &RunOptions::default(), &progress).unwrap();
    assert!(refused.into_inner() > 0);
}

/// MXFP4's scales are bytes: the header of the file is the same whatever the numbers were rounded to.
#[test]
fn another_dtype_is_another_plan() {
    let source = Source::new().random("w.up_proj.weight", &[64, 64]).finish();
    let plan = |dtype| {
        let mut options = ConvertOptions::mlx(Recipe::safe("mxfp4".parse().unwrap()));
        options.dtype = dtype;
        ConvertPlan::new(&source.open(), &options).unwrap()
    };
    let (_folder, out) = interrupted(&plan(None), 1);
    let error = run(&plan(Some(DType::BF16)), &out, true).unwrap_err().to_string();
    assert!(error.contains("begun with other options"), "{error}");
}

/// What an interrupted run copied may have gone from the source since.
#[test]
fn only_finished_files_are_kept() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let (_folder, out) = interrupted(&plan, 20);
    let model = out.with_file_name("out.partial").join("model");
    fs::write(model.join("chat_template.jinja"), "stale").unwrap();
    run(&plan, &out, true).unwrap();
    assert!(files(&out).into_iter().collect::<Vec<_>>() == complete(&plan).0);
}

#[cfg(target_os = "linux")]
#[test]
fn paths_need_not_be_unicode() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join(OsStr::from_bytes(b"source\xFF"));
    fs::create_dir(&source).unwrap();
    for (name, bytes) in files(bundled_path("tiny-bf16")) {
        fs::write(source.join(name), bytes).unwrap();
    }
    let plan = plan_of(&Checkpoint::open(&source).unwrap(), "4");
    let out = folder.path().join(OsStr::from_bytes(b"out\xFE"));
    run(&plan, &out, false).unwrap();
    assert!(files(&out).into_iter().collect::<Vec<_>>() == complete(&plan).0);
}
