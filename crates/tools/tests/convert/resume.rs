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
fn what_another_plan_has_begun_is_replaced_unless_it_is_to_be_resumed() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let (_folder, out) = interrupted(&plan, 9);
    let other = plan_of(&bundled("tiny-bf16"), "5");
    let error = run(&other, &out, true).unwrap_err().to_string();
    assert!(error.contains("begun with other options") && error.contains("leave out --resume"), "{error}");
    run(&other, &out, false).unwrap();
    assert!(files(&out).into_iter().collect::<Vec<_>>() == complete(&other).0);
    assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1);
    // Nothing to resume is no obstacle.
    run(&plan, &out.with_file_name("new"), true).unwrap();
}

/// How many tensors a conversion takes over from an interrupted one.
fn taken_over(plan: &ConvertPlan, out: &Path) -> usize {
    let skipped = AtomicUsize::new(0);
    let count = |event: ConvertEvent| {
        if let ConvertEvent::Skipped { tensors, .. } = event {
            skipped.fetch_add(tensors, Ordering::Relaxed);
        }
    };
    convert::convert(plan, out, &RunOptions::default(), &count).unwrap();
    skipped.into_inner()
}

/// Every byte of the source counts, and neither its time nor its place does.
#[test]
fn what_was_made_of_other_bytes_is_made_again() {
    for kind in ["dense", "packed", "GGML"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(if kind == "GGML" { "model.gguf" } else { "model.safetensors" });
        let options = match kind {
            "dense" => {
                let bytes = fs::read(bundled_path("tiny-bf16").join("model.safetensors")).unwrap();
                fs::write(&path, bytes).unwrap();
                "4"
            }
            "packed" => {
                for (name, bytes) in files(bundled_path("tiny")) {
                    fs::write(folder.path().join(name), bytes).unwrap();
                }
                "keep"
            }
            _ => {
                write_gguf(&path);
                "bf16"
            }
        };
        let open = || {
            let opened =
                if kind == "packed" { Checkpoint::open(folder.path()) } else { Checkpoint::open(&path) };
            let mut options = ConvertOptions::mlx(Recipe::safe(options.parse().unwrap()));
            (options.max_shard_size, options.requantize) = (100_000, kind == "GGML");
            ConvertPlan::new(&opened.unwrap(), &options).unwrap()
        };
        let plan = open();
        let tensors = plan.tensors().count();
        let (_target, out) = interrupted(&plan, tensors);
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let mut bytes = fs::read(&path).unwrap();
        // Of the first tensor in the file, or of the second of four, and not of its last output.
        let data = match kind {
            "GGML" => bytes.len() - 3 * (256 * 256 / 32 * 34) + 100,
            _ => 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 5,
        };
        bytes[data] ^= 1;
        fs::write(&path, &bytes).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        let plan = open();
        let kept = taken_over(&plan, &out);
        assert!(kept > 0 && kept < tensors - 1, "{kind}: {kept} of {tensors}");
        assert!(files(&out).into_iter().collect::<Vec<_>>() == complete(&plan).0, "{kind}");
    }
}

/// A model of Q8_0 blocks in a GGUF file.
fn write_gguf(path: &Path) {
    use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
    use candle_core::{Device, Tensor};
    let weight = Tensor::ones((256, 256), DType::F32, &Device::Cpu).unwrap();
    let blocks = QTensor::quantize(&weight, GgmlDType::Q8_0).unwrap();
    let names: Vec<_> = (0..4).map(|layer| format!("blk.{layer}.ffn_down.weight")).collect();
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), &blocks)).collect();
    let architecture = gguf_file::Value::String("qwen3".into());
    let heads = gguf_file::Value::U32(4);
    let metadata = [("general.architecture", &architecture), ("qwen3.attention.head_count", &heads)];
    gguf_file::write(&mut fs::File::create(path).unwrap(), &metadata, &tensors).unwrap();
}

#[test]
fn a_source_that_was_copied_is_the_same_source() {
    let copy = || {
        let source = tempfile::tempdir().unwrap();
        for (name, bytes) in files(bundled_path("tiny-bf16")) {
            fs::write(source.path().join(name), bytes).unwrap();
        }
        source
    };
    let (first, second) = (copy(), copy());
    let (_folder, out) = interrupted(&plan_of(&Checkpoint::open(first.path()).unwrap(), "4"), 20);
    drop(first);
    assert!(taken_over(&plan_of(&Checkpoint::open(second.path()).unwrap(), "4"), &out) > 0);
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
#[cfg(unix)]
#[test]
fn an_output_that_is_there_already_only_needs_tidying() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let strict = RunOptions { max_relative_rms: Some(1e-6), ..RunOptions::default() };
    convert::convert(&plan, &out, &strict, &|_| ()).unwrap_err();
    fs::rename(folder.path().join("out.partial/model"), &out).unwrap();
    note_as_published(folder.path(), &out);
    let expected = complete(&plan);
    let list = expected.0.iter().find(|(name, _)| name == "candle-quant.json").expect("a list of the output");
    fs::write(out.join("candle-quant.json"), &list.1).unwrap();
    let report = run(&plan, &out, true).unwrap();
    assert!(files(&out).into_iter().collect::<Vec<_>>() == expected.0);
    assert_eq!(serde_json::to_string(&report).unwrap(), expected.1);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[cfg(unix)]
fn note_as_published(folder: &Path, out: &Path) {
    use std::os::unix::fs::MetadataExt;
    let (path, metadata) = (folder.join("out.partial/journal.json"), fs::metadata(out).unwrap());
    let mut journal = json_file(&path);
    journal["published"] = serde_json::json!([metadata.dev(), metadata.ino()]);
    fs::write(path, journal.to_string()).unwrap();
}

#[test]
fn two_conversions_to_one_output_exclude_each_other() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let refused = AtomicUsize::new(0);
    let progress = |_: ConvertEvent| {
        let error = run(&plan, &out, true).unwrap_err().to_string();
        let owner = format!("process {}, which began ", std::process::id());
        assert!(error.contains(&owner) && error.contains(" s ago, is writing here"), "{error}");
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
    let partial = out.with_file_name("out.partial");
    fs::write(partial.join("model/chat_template.jinja"), "stale").unwrap();
    let mut journal = json_file(partial.join("journal.json"));
    journal["files"].as_array_mut().unwrap().push("chat_template.jinja".into());
    fs::write(partial.join("journal.json"), journal.to_string()).unwrap();
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

/// Such as adapters, or a candle that is patched: their journals say what was to be written, and no more.
#[test]
fn what_another_command_has_begun_is_no_obstacle() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let folder = tempfile::tempdir().unwrap();
    let partial = folder.path().join("out.partial");
    fs::create_dir_all(partial.join("model")).unwrap();
    fs::write(partial.join("journal.json"), r#"{"files": ["adapters.safetensors"]}"#).unwrap();
    fs::write(partial.join("model/adapters.safetensors"), "begun").unwrap();
    run(&plan, &folder.path().join("out"), false).unwrap();
    assert!(!partial.exists());
    assert!(!folder.path().join("out/adapters.safetensors").exists());
}

#[test]
fn a_damaged_journal_is_not_that_of_another_command() {
    let plan = plan_of(&bundled("tiny-bf16"), "4");
    let folder = tempfile::tempdir().unwrap();
    let partial = folder.path().join("out.partial");
    fs::create_dir_all(partial.join("model")).unwrap();
    fs::write(partial.join("model/config.json"), "begun").unwrap();
    // Those that read `files` alone take no notice of the number.
    let damaged = r#"{"files": ["config.json"], "plan": "x", "finished": 1e999}"#;
    fs::write(partial.join("journal.json"), damaged).unwrap();
    let error = run(&plan, &folder.path().join("out"), false).unwrap_err().to_string();
    assert!(error.contains("journal.json"), "{error}");
    assert_eq!(fs::read_to_string(partial.join("model/config.json")).unwrap(), "begun");
}
