//! Outputs that replace others, and outputs that can't be.

use super::common::{bundled, bundled_path, files, json_file, Source};
use candle_quant::{Checkpoint, Error, Result};
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions};
use candle_quant_tools::staging::available_space;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const REPLACE: RunOptions =
    RunOptions { resume: false, overwrite: true, allow_nonfinite: false, max_relative_rms: None };

fn plan(source: &Checkpoint, format: &str) -> ConvertPlan {
    ConvertPlan::new(source, &ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()))).unwrap()
}

fn run(format: &str, out: &Path, options: &RunOptions) -> Result<()> {
    convert::convert(&plan(&bundled("tiny-bf16"), format), out, options, &|_| ()).map(drop)
}

/// An output of 4 bits.
fn old() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    run("4", &out, &RunOptions::default()).unwrap();
    (folder, out)
}

fn new() -> BTreeMap<String, Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    run("8", &folder.path().join("out"), &RunOptions::default()).unwrap();
    files(folder.path().join("out"))
}

#[test]
fn an_output_replaces_an_older_one_as_a_whole() {
    let (folder, out) = old();
    run("8", &out, &REPLACE).unwrap();
    assert!(new() == files(&out));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    // There need not be one, and it may be empty.
    let other = folder.path().join("other");
    run("8", &other, &REPLACE).unwrap();
    fs::remove_dir_all(&other).unwrap();
    fs::create_dir(&other).unwrap();
    run("8", &other, &REPLACE).unwrap();
    assert!(new() == files(&other));
}

/// What `--overwrite` removes is what a conversion wrote, as it wrote it.
#[test]
fn what_no_conversion_wrote_is_not_replaced() {
    let refused = |out: &Path, why: &str| {
        let before = files(out);
        let error = run("8", out, &REPLACE).unwrap_err().to_string();
        assert!(error.contains("not overwritten") && error.contains(why), "{error}");
        assert!(error.contains("give another output"), "{error}");
        assert!(files(out) == before, "{why}");
        assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "{why}");
    };
    // A file beside those of an output, and one of them that was changed, to as many bytes.
    let (_folder, out) = old();
    fs::write(out.join("thesis.txt"), "mine").unwrap();
    refused(&out, "thesis.txt");
    fs::remove_file(out.join("thesis.txt")).unwrap();
    let config = fs::read_to_string(out.join("config.json")).unwrap();
    fs::write(out.join("config.json"), config.replacen(' ', "\t", 1)).unwrap();
    refused(&out, "config.json was changed");
    fs::write(out.join("config.json"), config).unwrap();
    run("8", &out, &REPLACE).unwrap();

    // Folders that look like an output: with an index, or a whole checkpoint.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("d");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("model.safetensors.index.json"), "{}").unwrap();
    fs::write(out.join("thesis.txt"), "mine").unwrap();
    refused(&out, "no candle-quant.json");
    for file in fs::read_dir(bundled_path("tiny-bf16")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), out.join(file.file_name())).unwrap();
    }
    refused(&out, "no candle-quant.json");
    for damaged in ["{}", "[]", "\u{0}"] {
        fs::write(out.join("candle-quant.json"), damaged).unwrap();
        refused(&out, "its candle-quant.json is not one");
    }
}

/// The list of an output is not copied into one that is made of it, and says what is in it.
#[test]
fn an_output_of_an_output_has_its_own_list() {
    let (folder, first) = old();
    let second = folder.path().join("second");
    let source = Checkpoint::open(&first).unwrap();
    let options = ConvertOptions::mlx(Recipe::safe("bf16".parse().unwrap()));
    let plan = ConvertPlan::new(&source, &options).unwrap();
    convert::convert(&plan, &second, &RunOptions::default(), &|_| ()).unwrap();
    let listed = json_file(second.join("candle-quant.json"));
    let mut names: Vec<_> = listed["files"].as_object().unwrap().keys().cloned().collect();
    names.push("candle-quant.json".into());
    names.sort();
    assert_eq!(names, files(&second).into_keys().collect::<Vec<_>>());
    for (name, bytes) in files(&second) {
        if name != "candle-quant.json" {
            assert_eq!(listed["files"][&name]["bytes"], bytes.len(), "{name}");
        }
    }
    convert::convert(&plan, &second, &REPLACE, &|_| ()).unwrap();
}

#[test]
fn the_older_output_stays_until_the_new_one_is_complete() {
    let (folder, out) = old();
    let before = files(&out);
    run("8", &out, &RunOptions { max_relative_rms: Some(1e-9), ..REPLACE }).unwrap_err();
    assert!(files(&out) == before);
    // To replace is to be asked for.
    for resume in [false, true] {
        let error = run("8", &out, &RunOptions { resume, ..RunOptions::default() }).unwrap_err().to_string();
        assert!(error.contains("it exists already") && error.contains("--overwrite"), "{error}");
        assert!(files(&out) == before);
    }
    run("8", &out, &REPLACE).unwrap();
    assert!(new() == files(&out));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// A conversion that is complete but for its name.
#[cfg(unix)]
fn killed_at_its_end() -> (TempDir, PathBuf, PathBuf) {
    use std::os::unix::fs::MetadataExt;
    let (folder, out) = old();
    run("8", &out, &RunOptions { max_relative_rms: Some(1e-9), ..REPLACE }).unwrap_err();
    let partial = folder.path().join("out.partial");
    let metadata = fs::metadata(partial.join("model")).unwrap();
    fs::write(partial.join("model/candle-quant.json"), &new()["candle-quant.json"]).unwrap();
    let mut journal = json_file(partial.join("journal.json"));
    journal["published"] = json!([metadata.dev(), metadata.ino()]);
    fs::write(partial.join("journal.json"), journal.to_string()).unwrap();
    (folder, out, partial)
}

#[cfg(unix)]
#[test]
fn killed_when_the_folders_had_changed_places() {
    for more in [RunOptions::default(), REPLACE] {
        let (folder, out, partial) = killed_at_its_end();
        fs::rename(&out, partial.join("aside")).unwrap();
        fs::rename(partial.join("model"), &out).unwrap();
        fs::rename(partial.join("aside"), partial.join("model")).unwrap();
        run("8", &out, &more).unwrap();
        assert!(new() == files(&out));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

/// Where a system can't do it with one rename.
#[cfg(unix)]
#[test]
fn killed_between_two_renames() {
    for second in [false, true] {
        let (folder, out, partial) = killed_at_its_end();
        fs::rename(&out, partial.join("replaced")).unwrap();
        if second {
            fs::rename(partial.join("model"), &out).unwrap();
        }
        run("8", &out, &REPLACE).unwrap();
        assert!(new() == files(&out));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
    // With another plan the older one is what it was, and with none it is back.
    let (folder, out, partial) = killed_at_its_end();
    fs::rename(&out, partial.join("replaced")).unwrap();
    run("4", &out, &RunOptions::default()).unwrap_err();
    assert!(files(&out) == files(old().1));
    run("4", &out, &REPLACE).unwrap();
    assert!(files(&out) == files(old().1));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// What comes into the output while another one is built.
#[test]
fn what_came_meanwhile_is_not_replaced() {
    let (_folder, out) = old();
    let source = bundled("tiny-bf16");
    let plan = plan(&source, "8");
    let put = |event: convert::ConvertEvent| {
        if let convert::ConvertEvent::Measured { .. } = event {
            fs::write(out.join("thesis.txt"), "mine").unwrap();
        }
    };
    let error = convert::convert(&plan, &out, &REPLACE, &put).unwrap_err().to_string();
    assert!(error.contains("a file (thesis.txt)"), "{error}");
    fs::remove_file(out.join("thesis.txt")).unwrap();
    assert!(files(&out) == files(old().1));
    run("8", &out, &REPLACE).unwrap();
    assert!(new() == files(&out));
}

#[test]
fn only_outputs_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let refused = |part: &str| {
        let error = run("8", &out, &REPLACE).unwrap_err().to_string();
        assert!(error.contains("not overwritten") && error.contains(part), "{error}");
    };
    fs::write(&out, "a file").unwrap();
    refused("not a folder");
    assert_eq!(fs::read(&out).unwrap(), b"a file");
    fs::remove_file(&out).unwrap();
    fs::create_dir(&out).unwrap();
    fs::write(out.join("letter.txt"), "dear").unwrap();
    refused("letter.txt");
    #[cfg(unix)]
    {
        fs::rename(&out, folder.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", &out).unwrap();
        refused("not a folder");
    }
    assert!(!folder.path().join("out.partial").exists());
}

#[test]
fn a_source_is_not_replaced_by_its_output() {
    let (folder, out) = old();
    let before = files(&out);
    let refused = |source: &Path, out: &Path| {
        let error =
            convert::convert(&plan(&Checkpoint::open(source).unwrap(), "keep"), out, &REPLACE, &|_| ());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("model.safetensors of the source is in it"), "{error}");
        assert!(files(folder.path().join("out")) == before);
    };
    refused(&out, &out);
    refused(&out.join("model.safetensors"), &out);
    let winding = out.join("..").join("out");
    refused(&out, &winding);
    // The folder in which the output is built.
    let partial = folder.path().join("new.partial");
    fs::create_dir(&partial).unwrap();
    for (name, bytes) in files(bundled_path("tiny-bf16")) {
        fs::write(partial.join(name), bytes).unwrap();
    }
    refused(&partial, &folder.path().join("new"));
    assert!(files(&partial) == files(bundled_path("tiny-bf16")));
}

/// Inside of the source, that is, not in place of it.
#[test]
fn an_output_may_be_in_its_source() {
    let source = Source::new().random("w.up_proj.weight", &[64, 64]).finish();
    let out = source.folder.path().join("out");
    convert::convert(&plan(&source.open(), "4"), &out, &REPLACE, &|_| ()).unwrap();
    convert::convert(&plan(&source.open(), "8"), &out, &REPLACE, &|_| ()).unwrap();
    assert_eq!(Checkpoint::open(&out).unwrap().tensor_names().count(), 1);
    assert_eq!(source.open().tensor_names().count(), 1);
}

#[test]
fn what_the_disk_has_no_room_for_is_not_begun() {
    let source = tempfile::tempdir().unwrap();
    let available = available_space(source.path()).unwrap();
    // A hole that is larger than the disk.
    let size = (available + (1 << 30)).next_multiple_of(4096);
    let header =
        json!({"a.weight": {"dtype": "BF16", "shape": [size / 4096, 2048], "data_offsets": [0, size]}})
            .to_string();
    let path = source.path().join("model.safetensors");
    let mut file = fs::File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + size).unwrap();
    let plan = plan(&Checkpoint::open(source.path()).unwrap(), "keep");
    let out = source.path().join("out");
    let error = convert::convert(&plan, &out, &RunOptions::default(), &|_| panic!("begun")).unwrap_err();
    let needed = format!("{} bytes are still to be written here", plan.disk_bytes());
    assert!(error.to_string().contains(&needed), "{error}");
    assert!(matches!(&error, Error::Io { error, .. } if error.kind() == ErrorKind::StorageFull));
    assert_eq!(fs::read_dir(source.path()).unwrap().count(), 1);
}
