//! What is written where: nothing is lost that candle-quant has not written, and nothing blocks the next run.

use crate::conversion::{bundled_path, files, json_file, numbers, Source};
#[cfg(unix)]
use crate::kill::wait_until;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;

/// Exit code, stdout and stderr of `convert`.
fn convert(source: &Path, args: &[&str]) -> (i32, String, String) {
    let output = crate::command(&["convert"]).arg(source).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn tiny() -> PathBuf {
    bundled_path("tiny-bf16")
}

/// The line of a conversion of the bundled model that has to fail with 1.
#[track_caller]
fn refused(out: &Path, more: &[&str]) -> String {
    let args = [&["--bits", "4", "-o", out.to_str().unwrap()], more].concat();
    let (code, stdout, stderr) = convert(&tiny(), &args);
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (1, "", 1), "{stderr}");
    stderr
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_thesis_beside_an_index_stays() {
    let folder = TempDir::new().unwrap();
    let d = folder.path().join("d");
    fs::create_dir(&d).unwrap();
    fs::write(d.join("model.safetensors.index.json"), "{}\n").unwrap();
    fs::write(d.join("thesis.txt"), "x\n").unwrap();
    let line = refused(&d, &["--overwrite"]);
    for part in
        ["no candle-quant.json", "thesis.txt", "move away what you want to keep", "give another output"]
    {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert_eq!(fs::read(d.join("thesis.txt")).unwrap(), b"x\n");
    assert_eq!(fs::read(d.join("model.safetensors.index.json")).unwrap(), b"{}\n");
    assert_eq!(names(folder.path()), ["d"]);
}

#[test]
fn an_original_checkpoint_stays() {
    let folder = TempDir::new().unwrap();
    for (name, bytes) in files(tiny()) {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    fs::write(folder.path().join("model.safetensors.index.json"), "{}").unwrap();
    let before = files(folder.path());
    let line = refused(folder.path(), &["--overwrite"]);
    assert!(line.contains("no candle-quant.json") && line.contains("more"), "{line}");
    assert!(files(folder.path()) == before);
}

#[test]
fn a_manifest_lists_what_was_written() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    let (code, _, stderr) = convert(&tiny(), &["--bits", "4", "-q", "-o", out.to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");
    let manifest = json_file(out.join("candle-quant.json"));
    assert_eq!(manifest["written_by"], format!("candle-quant {}", env!("CARGO_PKG_VERSION")));
    assert_eq!(manifest["source"], "tiny-bf16");
    let mut listed = manifest["files"].as_object().unwrap().clone();
    for (name, bytes) in files(&out).into_iter().filter(|(name, _)| name != "candle-quant.json") {
        let written = listed.remove(&name).unwrap();
        assert_eq!(written["bytes"], bytes.len());
        let digest: String = sha256(&bytes);
        assert_eq!(written["sha256"], digest, "{name}");
    }
    assert!(listed.is_empty(), "{listed:?}");
    // A folder and a link in it, and a listed file that became a link, are not replaced either.
    let before = files(&out);
    let extra = out.join("extra");
    fs::create_dir(&extra).unwrap();
    assert!(refused(&out, &["--overwrite"]).contains("a folder (extra)"));
    fs::remove_dir(&extra).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("/etc", &extra).unwrap();
        assert!(refused(&out, &["--overwrite"]).contains("a link (extra)"));
        fs::remove_file(&extra).unwrap();
        let (config, elsewhere) = (out.join("config.json"), folder.path().join("config.json"));
        fs::rename(&config, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &config).unwrap();
        assert!(refused(&out, &["--overwrite"]).contains("a link (config.json)"));
        fs::remove_file(&config).unwrap();
        fs::rename(&elsewhere, &config).unwrap();
    }
    assert!(files(&out) == before);
    assert_eq!(names(folder.path()), ["out"]);
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn what_failed_does_not_block_the_next_run() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    let run = |args: &[&str]| convert(&tiny(), &[args, &["-q", "-o", out.to_str().unwrap()]].concat());
    let fails = |args: &[&str]| assert_eq!(run(&[args, &["--max-rrmse", "0.0001"]].concat()).0, 3);
    fails(&["--bits", "4"]);
    assert_eq!(names(folder.path()), ["out.partial"]);
    assert_eq!(run(&["--bits", "4"]), (0, String::new(), String::new()));
    assert_eq!(names(folder.path()), ["out"]);
    let expected = files(&out);
    // Another plan, and one that replaces.
    fails(&["--bits", "8", "--overwrite"]);
    assert_eq!(names(folder.path()), ["out", "out.partial"]);
    assert!(files(&out) == expected);
    let (code, _, stderr) = run(&["--bits", "4", "--overwrite", "--resume"]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("begun with other options") && stderr.contains("leave out --resume"), "{stderr}");
    assert_eq!(run(&["--bits", "4", "--overwrite"]), (0, String::new(), String::new()));
    assert_eq!(names(folder.path()), ["out"]);
    assert!(files(&out) == expected);
}

/// A source that takes a while.
fn large() -> Source {
    let mut source = Source::new().with_config("{}");
    for index in 0..8 {
        let numbers = numbers(index, 128 * 2048);
        source = source.with(&format!("layers.{index}.up_proj.weight"), &[128, 2048], &numbers);
    }
    source.finish()
}

#[cfg(unix)]
fn signal(name: &str, pid: u32) {
    let sent = std::process::Command::new("kill").args([name, &pid.to_string()]).status();
    assert!(sent.unwrap().success());
}

/// Read through a mapping, it would end the process with SIGBUS.
#[cfg(unix)]
#[test]
fn a_source_that_shrinks_is_bad_input() {
    let (source, folder) = (large(), TempDir::new().unwrap());
    let out = folder.path().join("out");
    let args = ["--bits", "4", "--search", "-q", "-o", out.to_str().unwrap()];
    let mut convert = crate::command(&["convert"]);
    let child = convert.arg(source.folder.path()).args(args).stderr(Stdio::piped()).spawn().unwrap();
    let lock = folder.path().join("out.partial/lock");
    wait_until("a lock", || fs::read(&lock).is_ok_and(|text| text.ends_with(b"}")));
    signal("-STOP", child.id());
    let weights = source.folder.path().join("model.safetensors");
    fs::File::options().write(true).open(&weights).unwrap().set_len(4096).unwrap();
    signal("-CONT", child.id());
    let output = child.wait_with_output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{line}");
    for part in ["model.safetensors: `layers.", "expected all its bytes", "4096 of"] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert!(!out.exists());
}

/// Stopped with its lock, then killed.
#[cfg(unix)]
#[test]
fn a_second_conversion_waits_for_the_first_and_takes_over_from_a_dead_one() {
    let (source, folder) = (large(), TempDir::new().unwrap());
    let (source, out) = (source.folder.path(), folder.path().join("out"));
    let args = ["--bits", "4", "--search", "-q", "-o", out.to_str().unwrap()];
    let mut first =
        crate::command(&["convert"]).arg(source).args(args).stderr(Stdio::null()).spawn().unwrap();
    let lock = folder.path().join("out.partial/lock");
    wait_until("a lock", || fs::read(&lock).is_ok_and(|text| text.ends_with(b"}")));
    signal("-STOP", first.id());
    let owner: Value = json_file(&lock);
    assert_eq!(owner["pid"], first.id());
    for more in [&[][..], &["--resume"], &["--overwrite"]] {
        let (code, _, line) = convert(source, &[&args[..], more].concat());
        assert_eq!(code, 1, "{line}");
        let who = format!("process {}, which began ", first.id());
        assert!(
            line.contains(&who) && line.contains("is writing here; wait until it has finished"),
            "{line}"
        );
        assert!(!line.contains("remove"), "{line}");
    }
    assert!(lock.exists() && !out.exists());
    signal("-KILL", first.id());
    first.wait().unwrap();
    let (code, _, stderr) = convert(source, &args);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(names(folder.path()), ["out"]);
}

/// Somebody else's folder of that name.
#[test]
fn what_is_in_the_partial_folder_and_not_of_a_conversion_stays() {
    let folder = TempDir::new().unwrap();
    let (out, partial) = (folder.path().join("out"), folder.path().join("out.partial"));
    let check = |part: &str| {
        let before = names(&partial);
        let line = refused(&out, &[]);
        assert!(line.contains("out.partial") && line.contains(part), "{line}");
        assert!(line.contains("move it away, or give another output"), "{line}");
        assert_eq!(names(&partial), before);
        assert_eq!(names(folder.path()), ["out.partial"]);
    };
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("thesis.txt"), "x").unwrap();
    check("a file (thesis.txt)");
    fs::remove_file(partial.join("thesis.txt")).unwrap();
    fs::create_dir(partial.join("model")).unwrap();
    fs::write(partial.join("model/config.json"), "x").unwrap();
    check("a file (config.json)");
    // An output of its own.
    fs::remove_dir_all(&partial).unwrap();
    fs::create_dir(&partial).unwrap();
    let (code, ..) = convert(&tiny(), &["--bits", "4", "-q", "-o", partial.join("model").to_str().unwrap()]);
    assert_eq!(code, 0);
    check("in it is not of candle-quant");
    fs::remove_dir_all(&partial).unwrap();
    // In one of a conversion that failed.
    let args = ["--bits", "4", "-q", "-o", out.to_str().unwrap(), "--max-rrmse", "0.0001"];
    assert_eq!(convert(&tiny(), &args).0, 3);
    fs::write(partial.join("model/thesis.txt"), "x").unwrap();
    check("a file (thesis.txt)");
    fs::remove_file(partial.join("model/thesis.txt")).unwrap();
    fs::remove_file(partial.join("lock")).unwrap();
    fs::write(partial.join("lock"), "my notes").unwrap();
    check("no lock of candle-quant");
    #[cfg(unix)]
    for name in ["lock", "model/config.json", "model"] {
        let path = partial.join(name);
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
        std::os::unix::fs::symlink(folder.path(), &path).unwrap();
        check("a link");
        fs::remove_file(&path).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn links_pipes_and_devices_are_neither_replaced_nor_written_to() {
    use std::os::unix::fs::symlink;
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("elsewhere")).unwrap();
    fs::write(at("target"), "mine").unwrap();
    symlink("elsewhere", at("link-to-folder")).unwrap();
    symlink("target", at("link")).unwrap();
    symlink("nothing", at("dangling")).unwrap();
    let pipe = std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap();
    assert!(pipe.success());
    let before = names(folder.path());
    let link = |name: &str| fs::read_link(at(name)).unwrap();
    let check = || {
        assert_eq!(names(folder.path()), before);
        assert_eq!(names(&at("elsewhere")), Vec::<String>::new());
        assert_eq!(fs::read(at("target")).unwrap(), b"mine");
        assert_eq!((link("link"), link("dangling")), ("target".into(), "nothing".into()));
    };
    for out in ["link-to-folder", "link-to-folder/", "link-to-folder/.", "link", "dangling", "pipe", "target"]
    {
        for more in [&[][..], &["--overwrite"]] {
            let line = refused(&at(out), more);
            assert!(line.contains("not a folder, but a"), "{out}: {line}");
            assert!(!line.contains("remove"), "{out}: {line}");
            check();
        }
    }
    assert!(refused(Path::new("/dev/null"), &["--overwrite"]).contains("a device"));
    // Every file that commands write.
    let tiny = tiny();
    let recipe = |out: &str| {
        let args = ["--bits", "4", "--dry-run", "--save-recipe", out];
        crate::command(&["convert"]).arg(&tiny).args(args).output().unwrap()
    };
    let report = |out: &str| {
        let other = at("other");
        let args = ["--bits", "4", "-o", other.to_str().unwrap(), "--report", out];
        crate::command(&["convert"]).arg(&tiny).args(args).output().unwrap()
    };
    let sensitivities = |out: &str| {
        let args = ["--target-bpw", "4", "--candidates", "3,8", "--dry-run", "--sensitivities", out];
        crate::command(&["convert"]).arg(&tiny).args(args).output().unwrap()
    };
    let logits =
        |out: &str| crate::command(&["logits", "--tokens", "1", "--out", out]).arg(&tiny).output().unwrap();
    let commands: [&dyn Fn(&str) -> std::process::Output; 4] = [&recipe, &report, &logits, &sensitivities];
    for (index, command) in commands.into_iter().enumerate() {
        // Sensitivities are read first, of what can be read.
        let outs = match index {
            3 => vec![at("dangling")],
            _ => vec![at("link"), at("elsewhere"), "/dev/null".into(), at("pipe")],
        };
        for out in outs {
            let output = command(out.to_str().unwrap());
            let line = String::from_utf8(output.stderr).unwrap();
            assert!(!output.status.success() && line.contains("no regular file, but a"), "{out:?}: {line}");
            check();
        }
    }
}

#[test]
fn a_model_without_weights_is_no_success() {
    let folder = TempDir::new().unwrap();
    let empty = safetensors::serialize(std::iter::empty::<(String, candle_core::Tensor)>(), None).unwrap();
    let dense = folder.path().join("dense");
    fs::create_dir(&dense).unwrap();
    fs::write(dense.join("model.safetensors"), empty).unwrap();
    fs::write(dense.join("config.json"), "{}").unwrap();
    // In a store: one that runs elsewhere, and one of which nothing is there but texts.
    let store = |config: &str| {
        let store = TempDir::new_in(folder.path()).unwrap();
        let manifest = store.path().join("manifests/registry.ollama.ai/library/m/latest");
        fs::create_dir_all(manifest.parent().unwrap()).unwrap();
        fs::create_dir(store.path().join("blobs")).unwrap();
        let digest = sha256(config.as_bytes());
        fs::write(store.path().join("blobs").join(format!("sha256-{digest}")), config).unwrap();
        let layer = |kind: &str| serde_json::json!({"mediaType": kind, "digest": format!("sha256:{digest}"), "size": config.len()});
        let manifest_json = serde_json::json!({
            "schemaVersion": 2,
            "config": layer("application/vnd.docker.container.image.v1+json"),
            "layers": [layer("application/vnd.ollama.image.template")],
        });
        fs::write(&manifest, manifest_json.to_string()).unwrap();
        store
    };
    let remote = store(r#"{"remote_host":"https://ollama.com:443","remote_model":"m"}"#);
    let texts = store("{}");
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    for source in [dense.as_path(), remote.path(), texts.path()] {
        for args in [
            &["--bits", "4", "-o", out][..],
            &["--bits", "4", "--to", "ollama", "--name", "m", "-o", out],
            &["--dequantize", "-o", out],
            &["--bits", "4", "--dry-run"],
            &["--compare", "4"],
            &["--target-bpw", "4", "-o", out],
        ] {
            let (code, stdout, stderr) = convert(source, args);
            assert_eq!(
                (code, stdout.as_str(), stderr.lines().count()),
                (2, "", 1),
                "{source:?} {args:?}: {stderr}"
            );
        }
        // Named, as `ollama` names it.
        if source != dense {
            let mut named = crate::command(&["convert", "m", "--bits", "4", "-o", out]);
            let output = named.env("OLLAMA_MODELS", source).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{output:?}");
        }
    }
    assert!(!Path::new(out).exists());
}

/// It is the folder that is missing, not what is to be made in it.
#[test]
fn a_folder_that_is_missing_is_named() {
    let folder = TempDir::new().unwrap();
    let missing = folder.path().join("missing");
    let out = missing.join("out").to_str().unwrap().to_owned();
    let tiny = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny-bf16");
    for (args, code) in [
        (&["convert", tiny, "--bits", "4", "-o", &out][..], 4),
        (&["logits", tiny, "--tokens", "1", "--out", &out], 1),
    ] {
        let output = crate::run(args);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}");
        let named = missing.to_str().unwrap();
        assert!(line.contains(&format!("{named}: ")) && !line.contains("partial"), "{line}");
    }
}
