//! `candle-quant convert`: what it prints, its exit codes, and that it can be killed.

use crate::conversion::{bundled_path, files, json_file, Source};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn command(source: &Path, args: &[&str]) -> Command {
    let mut command = crate::command(&["convert"]);
    command.arg(source).args(args);
    command
}

pub fn run(source: &Path, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command(source, args).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Asserts this exit code, one line on stderr and none on stdout; returns the line.
#[track_caller]
fn fail(code: i32, source: &Path, args: &[&str]) -> String {
    let (found, stdout, stderr) = run(source, args);
    assert_eq!((found, stdout.as_str()), (code, ""), "{args:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr
}

pub fn tiny() -> PathBuf {
    bundled_path("tiny-bf16")
}

struct Target(TempDir);

impl Target {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn out(&self) -> PathBuf {
        self.0.path().join("out")
    }

    fn arg(&self) -> String {
        self.out().to_str().unwrap().to_owned()
    }

    fn is_empty(&self) -> bool {
        fs::read_dir(self.0.path()).unwrap().count() == 0
    }
}

#[test]
fn a_conversion_says_what_was_lost() {
    let target = Target::new();
    let report = target.0.path().join("report.json");
    let args = ["--bits", "4", "-o", &target.arg(), "--report", report.to_str().unwrap()];
    let (code, stdout, stderr) = run(&tiny(), &args);
    assert_eq!((code, stderr.as_str()), (0, ""));
    // A heading, ten tensors, two lines of sums, the folder.
    assert_eq!(stdout.lines().count(), 1 + 10 + 2 + 1, "{stdout}");
    for part in ["35 tensors, 3.87 MB -> 1.11 MB", "bits per weight", "(affine 4-bit g64)", &target.arg()] {
        assert!(stdout.contains(part), "{part} in {stdout}");
    }
    let report = json_file(report);
    assert_eq!(report["tensors"].as_array().unwrap().len(), 22);
    assert!(report["files"][0]["sha256"].as_str().unwrap().len() == 64);
    // The same as JSON on stdout.
    let (other, quiet) = (Target::new(), Target::new());
    let (_, stdout, _) = run(&tiny(), &["--format", "afq4", "-o", &other.arg(), "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap(), report);
    let nothing = (0, String::new(), String::new());
    let args = ["--bits", "4", "--group-size", "64", "-o", &quiet.arg(), "-q", "--cpu"];
    assert_eq!(run(&tiny(), &args), nothing);
    assert!(files(quiet.out()) == files(other.out()));
}

#[test]
fn a_dry_run_prints_the_plan_and_writes_nothing() {
    let target = Target::new();
    let args = ["--recipe", "mixed_3_6", "--dry-run", "-o", &target.arg()];
    let (code, stdout, stderr) = run(&tiny(), &args);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(target.is_empty());
    let line = "model.layers.2.mlp.down_proj.weight  [256, 512]  down  BF16 -> affine 6-bit g64  106496 bytes  (mixed_3_6)";
    assert!(stdout.lines().any(|found| found == line), "{stdout}");
    assert!(stdout.contains("peak memory: about"), "{stdout}");
    let available = stdout.lines().find_map(|line| line.strip_prefix("available there: ")).unwrap();
    assert!(available.strip_suffix(" MB").unwrap().parse::<f64>().unwrap() > 0.);
    let (code, stdout, _) = run(&tiny(), &["--format", "5:g128", "--dry-run", "--json"]);
    let plan: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, plan["tensors"].as_array().unwrap().len()), (0, 35));
    let tensor = plan["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .find(|t| t["name"] == "model.embed_tokens.weight")
        .unwrap();
    assert_eq!(tensor["to"], "affine 6-bit g128");
    assert_eq!(tensor["role"], "embed");
    assert_eq!(tensor["rule"], "default: lm-head");
    assert_eq!(tensor["file"], "model.safetensors");
    assert_eq!(plan["fallbacks"], 0);
    let bytes: u64 = plan["tensors"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["bytes"], bytes);
}

#[test]
fn formats_are_compared_by_what_they_would_write() {
    let (code, stdout, stderr) = run(&tiny(), &["--compare", "3,affine:4:g32,mxfp4", "--json"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let compared: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(compared.as_array().unwrap().len(), 3);
    for (entry, format) in compared.as_array().unwrap().iter().zip(["affine:3:g64", "affine:4:g32", "mxfp4"])
    {
        assert_eq!(entry["format"], format);
        let target = Target::new();
        let (_, stdout, _) = run(&tiny(), &["--format", format, "-o", &target.arg(), "--json"]);
        let mut written: Value = serde_json::from_str(&stdout).unwrap();
        written["files"] = Value::Array(Vec::new());
        assert_eq!(entry["report"], written, "{format}");
    }
    let (_, stdout, _) = run(&tiny(), &["--compare", "3,8", "--role", "lm-head=keep"]);
    assert_eq!(stdout.lines().count(), 3, "{stdout}");
    assert!(!stdout.contains("embed_tokens"), "{stdout}");
    let (code, ..) = run(&tiny(), &["--compare", "3", "-o", "x"]);
    assert_eq!((code, Path::new("x").exists()), (1, false));
}

#[test]
fn names_do_not_steer_the_terminal() {
    let name = "a\n\u{1b}[31m\u{e9} \"/../\u{0}.weight";
    let source = Source::new().random(name, &[32, 64]).finish();
    let target = Target::new();
    let convert = |more: &str| run(source.folder.path(), &["--bits", "4", "-o", &target.arg(), more]);
    let shown = "a\\n\\u001b[31m\u{e9} \"/../\\u0000.weight";
    for (code, stdout, stderr) in [convert("--dry-run"), convert("--strict")] {
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(stdout.contains(shown) && !stdout.contains('\u{1b}'), "{stdout}");
    }
    // In files they are what they are.
    let module = name.strip_suffix(".weight").unwrap();
    assert!(crate::conversion::tensors(target.out()).contains_key(&format!("{module}.scales")));
    let index = json_file(target.out().join("model.safetensors.index.json"));
    assert_eq!(index["weight_map"][name], "model.safetensors");
}

#[test]
fn rules_on_the_command_line_and_in_files() {
    let target = Target::new();
    let recipe = target.0.path().join("mine.toml");
    fs::write(&recipe, "format = \"3\"\n[[rule]]\nlayers = 0\nformat = \"8\"\n").unwrap();
    let rules = ["--role", "v=nvfp4", "--tensors", "*.1.mlp.*=keep", "--recipe", recipe.to_str().unwrap()];
    let (code, stdout, stderr) = run(&tiny(), &[&rules[..], &["--dry-run"]].concat());
    assert_eq!(code, 0, "{stderr}");
    for line in [
        "layers.0.self_attn.v_proj.weight  [128, 256]  v  BF16 -> nvfp4  18432 bytes  (role v)",
        "layers.1.mlp.up_proj.weight  [512, 256]  mlp  BF16 -> BF16  262144 bytes  (tensors *.1.mlp.*)",
        "layers.2.mlp.up_proj.weight  [512, 256]  mlp  BF16 -> affine 3-bit g64",
    ] {
        assert!(stdout.contains(line), "{line} in {stdout}");
    }
    let rule = format!("(rule 1 of {})", recipe.display());
    assert!(stdout.contains(&rule), "{stdout}");
}

#[test]
fn wrong_usage_is_1() {
    let target = Target::new();
    let out = target.arg();
    for (args, part) in [
        (&["--bits", "4"][..], "--out"),
        (&["-o", &out], "Give --format, --bits, --target-bpw, --fit, --recipe or --dequantize"),
        (&["-o", &out, "--bits", "7"], "affine:BITS[:gGROUP]"),
        (&["-o", &out, "--format", "q9"], "affine:BITS[:gGROUP]"),
        (&["-o", &out, "--format", "4", "--bits", "4"], "cannot be used with"),
        (&["-o", &out, "--format", "4,8"], "several formats at once are for --to uqff"),
        (&["-o", &out, "--to", "gguf", "--format", "q4_0,q8_0"], "several formats at once are for --to uqff"),
        (&["-o", &out, "--to", "uqff", "--format", "4,hqq9"], "hqq4, hqq8, fp8, f8q8"),
        (
            &["-o", &out, "--to", "uqff", "--format", "4,8", "--save-recipe", "x"],
            "--save-recipe is for one format",
        ),
        (&["-o", &out, "--recipe", "uniform"], "needs a --format"),
        (&["-o", &out, "--recipe", "mixed_3_6", "--format", "nvfp4"], "expected an affine one"),
        (&["-o", &out, "--recipe", "mixed_3_6", "--bits", "4"], "leave out --bits"),
        (&["-o", &out, "--recipe", "uniform", "--group-size", "32"], "--group-size is for --bits"),
        (&["-o", &out, "--to", "uqff", "--dequantize"], "--dequantize is for --to hf"),
        (&["-o", &out, "--to", "hf", "--dequantize", "--bits", "4"], "cannot be used with"),
        (&["-o", &out, "--to", "hf", "--dequantize", "--name", "m"], "--name is for --to ollama"),
        (&["-o", &out, "--to", "ollama", "--bits", "4"], "needs the --name"),
        (&["-o", &out, "--to", "ollama", "--bits", "4", "--name", "../m"], "name of a model"),
        (&["-o", &out, "--to", "uqff", "--bits", "4", "--name", "m"], "--name is for --to ollama"),
        (&["-o", &out, "--recipe", "nothing-here"], "neither one of uniform, mixed_2_6"),
        (&["-o", &out, "--bits", "4", "--role", "heads=4"], "expected one of embed"),
        (&["-o", &out, "--bits", "4", "--role", "v"], "expected an equals sign"),
        (&["-o", &out, "--bits", "4", "--max-shard-size", "5XB"], "expected bytes, KB, MB or GB"),
        (&["-o", &out, "--bits", "4", "--max-rrmse=-1"], "expected a finite number"),
        (&["-o", &out, "--dequantize", "--bits", "4"], "cannot be used with"),
        (&["-o", &out, "--dequantize", "--search"], "cannot be used with"),
        (&["-o", &out, "--bits", "4", "--target-bpw", "4"], "cannot be used with"),
        (&["-o", &out, "--target-bpw", "0"], "expected a number above zero"),
        (&["-o", &out, "--target-bpw", "NaN"], "expected a number above zero"),
        (&["-o", &out, "--target-bpw", "4", "--group-size", "32"], "--group-size is for --bits"),
        (&["-o", &out, "--target-bpw", "4", "--candidates", "3,9"], "affine:BITS[:gGROUP]"),
        (&["-o", &out, "--target-bpw", "4", "--recipe", "mixed_3_6"], "leave out --target-bpw"),
        (&["-o", &out, "--bits", "4", "--candidates", "3"], "--candidates is for --target-bpw and --fit"),
        (&["-o", &out, "--bits", "4", "--sensitivities", "x"], "--sensitivities is for --target-bpw"),
        (&["--compare", "4", "--sensitivities", "x"], "--sensitivities is for --target-bpw"),
        (&["--compare", "4", "--save-recipe", "x"], "cannot be used with"),
    ] {
        let (code, stdout, stderr) = run(&tiny(), args);
        assert_eq!((code, stdout.as_str()), (1, ""), "{args:?}: {stderr}");
        assert!(stderr.contains(part), "{part} in {stderr}");
        assert!(target.is_empty());
    }
    fs::create_dir(target.out()).unwrap();
    assert!(fail(1, &tiny(), &["--bits", "4", "-o", &out]).contains("it exists already"));
}

#[test]
fn models_of_mistralrs_and_of_ollama() {
    let target = Target::new();
    let (code, stdout, stderr) = run(&tiny(), &["--to", "uqff", "--bits", "4", "-o", &target.arg()]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout.contains("(affine 4-bit g64)") && !stdout.contains("decides about no tensor"), "{stdout}");
    assert!(target.out().join("afq4-0.uqff").is_file() && target.out().join("tokenizer.json").is_file());
    let line = fail(2, &tiny(), &["--to", "uqff", "--format", "nvfp4", "-o", &target.arg(), "--overwrite"]);
    assert!(line.contains("nvfp4 (") && line.contains("affine formats of 2, 3, 4, 6 and 8 bits"), "{line}");
    let store = target.0.path().join("store");
    let args = ["--to", "ollama", "--name", "tiny:4", "--format", "int4", "-o", store.to_str().unwrap()];
    assert_eq!(run(&tiny(), &args).0, 0);
    let line = fail(1, &tiny(), &args);
    assert!(line.contains("library/tiny/4") && line.contains("--overwrite"), "{line}");
    assert_eq!(run(&tiny(), &[&args[..], &["--overwrite", "-q"]].concat()).0, 0);
    // Without a name only where nothing is written.
    assert_eq!(run(&tiny(), &["--to", "ollama", "--bits", "4", "--dry-run"]).0, 0);
}

#[test]
fn bad_input_is_2() {
    let target = Target::new();
    let convert = |source: &Path, more: &[&str]| {
        fail(2, source, &[&["--bits", "4", "-o", &target.arg()], more].concat())
    };
    assert!(convert(Path::new("/nothing/here"), &[]).contains("/nothing/here"));
    let source = Source::new().random("a.weight", &[32, 80]).finish();
    assert!(convert(source.folder.path(), &["--strict"]).contains("`a.weight`"));
    let path = source.folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 7]).unwrap();
    assert!(convert(source.folder.path(), &[]).contains("model.safetensors"));
    assert!(target.is_empty());
    let source = Source::new().with("a.weight", &[32, 64], &[f32::NAN; 2048]).finish();
    assert!(convert(source.folder.path(), &[]).contains("2048 NaN of 2048 numbers"));
    assert!(!target.out().exists());
    let (code, stdout, _) =
        run(source.folder.path(), &["--bits", "4", "-o", &target.arg(), "--resume", "--allow-nonfinite"]);
    assert_eq!(code, 0);
    assert!(stdout.contains("2048 NaN, 0 infinite"), "{stdout}");
}

#[test]
fn too_much_loss_is_3_and_a_file_that_cannot_be_written_4() {
    let target = Target::new();
    let line = fail(3, &tiny(), &["--bits", "4", "-o", &target.arg(), "--max-rrmse", "0.05"]);
    assert!(
        line.contains("relative RMS error 0.09") && line.contains("above the limit 0.05; give them wider"),
        "{line}"
    );
    assert!(!target.out().exists());
    let (code, ..) = run(&tiny(), &["--bits", "4", "-o", &target.arg(), "--max-rrmse", "0.1", "--resume"]);
    assert_eq!(code, 0);
    let nowhere = target.0.path().join("no/such/folder");
    let line = fail(4, &tiny(), &["--bits", "4", "-o", nowhere.to_str().unwrap()]);
    assert!(line.contains("no/such"), "{line}");
    let file = target.0.path().join("file");
    fs::write(&file, "").unwrap();
    fail(4, &tiny(), &["--bits", "4", "-o", file.join("out").to_str().unwrap()]);
    // Before the work, not after it.
    let report = target.0.path().join("no/such/report.json");
    let other = target.0.path().join("other");
    let args = ["--bits", "4", "-o", other.to_str().unwrap(), "--report", report.to_str().unwrap()];
    let line = fail(4, &tiny(), &args);
    assert!(line.contains("report.json: can't be written"), "{line}");
    assert!(!other.exists() && !target.0.path().join("other.partial").exists());
    // It is written of an output that is not made, too.
    let report = target.0.path().join("report.json");
    let args = ["--bits", "4", "-o", other.to_str().unwrap(), "--report", report.to_str().unwrap()];
    let strict = ["--max-rrmse", "0.05"];
    fail(3, &tiny(), &[&args[..], &strict].concat());
    let written = json_file(&report);
    assert!(written["tensors"][0]["relative_rms"].as_f64().unwrap() > 0.05);
    let resumed = [&args[..], &strict, &["--resume", "--json"]].concat();
    let (code, stdout, _) = run(&tiny(), &resumed);
    assert_eq!((code, serde_json::from_str::<Value>(&stdout).unwrap()), (3, written.clone()));
    assert!(!other.exists());
    // One that is there stays if nothing was measured.
    fs::write(&report, "mine").unwrap();
    fail(2, Path::new("/nothing/here"), &[&args[..], &["--resume"]].concat());
    assert_eq!(fs::read(&report).unwrap(), b"mine");
    assert_eq!(run(&tiny(), &[&args[..], &["--resume"]].concat()).0, 0);
    assert_eq!(json_file(&report), written);
}

#[test]
fn progress_as_json() {
    let target = Target::new();
    let (code, _, stderr) = run(&tiny(), &["--bits", "4", "-o", &target.arg(), "--json-progress"]);
    let last: Value = serde_json::from_str(stderr.lines().last().unwrap()).unwrap();
    assert_eq!(code, 0);
    assert_eq!((&last["tensors"], &last["total_tensors"]), (&35.into(), &35.into()));
    assert_eq!(last["bytes"], last["total_bytes"]);
    assert!(last["bytes_per_second"].as_f64().unwrap() > 0. && last["eta_seconds"] == 0.);
}

#[test]
fn formats_are_chosen_for_a_number_of_bits() {
    let target = Target::new();
    let file = |name: &str| target.0.path().join(name).to_str().unwrap().to_owned();
    let (sensitivities, recipe) = (file("s.json"), file("chosen.toml"));
    let choice = ["--target-bpw", "4.4", "--candidates", "3,4,6", "--sensitivities", &sensitivities];
    let dry = [&choice[..], &["--dry-run", "--json", "--strict", "--save-recipe", &recipe]].concat();
    let (code, stdout, stderr) = run(&tiny(), &dry);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let plan: Value = serde_json::from_str(&stdout).unwrap();
    let bits = plan["bits_per_weight"].as_f64().unwrap();
    assert!(4.35 < bits && bits <= 4.4, "{bits}");
    assert_eq!(
        plan["notes"][0],
        "22 formats are chosen for 4.4 bits per weight, by errors that were measured"
    );
    assert!(!target.out().exists());
    // From the file, and from the recipe: the same bytes.
    let measured = fs::read(&sensitivities).unwrap();
    let (code, stdout, stderr) = run(&tiny(), &[&choice[..], &["-o", &target.arg()]].concat());
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout.contains(&format!("{bits:.3} bits per weight")), "{stdout}");
    assert_eq!(fs::read(&sensitivities).unwrap(), measured);
    let again = Target::new();
    assert_eq!(run(&tiny(), &["--recipe", &recipe, "-o", &again.arg(), "-q"]).0, 0);
    assert!(files(target.out()) == files(again.out()));
    // What is left open by a recipe is chosen, whatever its own format.
    let mine = file("mine.toml");
    fs::write(&mine, "format = \"8\"\n[[rule]]\nrole = \"v\"\nformat = \"mxfp8\"\n").unwrap();
    let (code, stdout, _) = run(&tiny(), &["--target-bpw", "5", "--recipe", &mine, "--dry-run"]);
    assert_eq!(code, 0);
    assert!(stdout.contains(&format!("v  BF16 -> mxfp8  33792 bytes  (rule 1 of {mine})")), "{stdout}");
    assert!(stdout.contains("(for 5 bits per weight)"), "{stdout}");

    let line = fail(2, &tiny(), &["--target-bpw", "3", "--dry-run"]);
    assert!(line.contains("bits per weight: expected 3.5 to 8.5") && line.contains("found 3"), "{line}");
    let more =
        [&choice[..2], &["--dry-run", "--candidates", "3,5", "--sensitivities", &sensitivities]].concat();
    let line = fail(2, &tiny(), &more);
    assert!(line.contains("affine:5:g64") && line.contains("measure anew"), "{line}");
    fs::write(&sensitivities, "{}").unwrap();
    let line = fail(2, &tiny(), &[&choice[..], &["--dry-run"]].concat());
    assert!(line.contains("s.json: no sensitivities") && line.contains("remove it"), "{line}");
    let (nowhere, dry) = (file("no/such/file"), ["--dry-run", "--target-bpw", "4"]);
    for option in ["--sensitivities", "--save-recipe"] {
        let line = fail(4, &tiny(), &[&dry[..], &[option, &nowhere]].concat());
        assert!(line.contains("no/such/file: can't be written"), "{line}");
    }
    let progress = [&dry[..], &["--json-progress", "--candidates", "3,8"]].concat();
    let (_, _, stderr) = run(&tiny(), &progress);
    let last: Value = serde_json::from_str(stderr.lines().last().unwrap()).unwrap();
    assert_eq!((&last["tensors"], &last["total_tensors"]), (&44.into(), &44.into()));
    assert_eq!(last["bytes"], last["total_bytes"]);
}

#[test]
fn a_search_is_told_of() {
    let (plain, searched) = (Target::new(), Target::new());
    let report = |target: &Target, more: &[&str]| -> Value {
        let out = target.arg();
        let args = [&["--bits", "3", "--json", "-o", &out], more].concat();
        let (code, stdout, stderr) = run(&tiny(), &args);
        assert_eq!((code, stderr.as_str()), (0, ""));
        serde_json::from_str(&stdout).unwrap()
    };
    let (before, after) = (report(&plain, &[]), report(&searched, &["--search"]));
    assert_eq!(before["tensors"][0]["to"], "affine 3-bit g64");
    assert_eq!(after["tensors"][0]["to"], "affine 3-bit g64, searched");
    let worst = |report: &Value| report["tensors"][0]["relative_rms"].as_f64().unwrap();
    assert!(worst(&after) < worst(&before));
    let (_, stdout, _) = run(&tiny(), &["--bits", "3", "--search", "--dry-run"]);
    assert!(stdout.contains("-> affine 3-bit g64, searched"), "{stdout}");
}

/// A file that may not grow is to a program what a full disk is.
#[cfg(unix)]
#[test]
fn a_disk_that_becomes_full_is_4_and_no_obstacle_later() {
    let target = Target::new();
    let script = "trap '' XFSZ; ulimit -f 1000; exec \"$0\" \"$@\"";
    let convert =
        [env!("CARGO_BIN_EXE_candle-quant"), "convert", tiny().to_str().unwrap()].map(str::to_owned);
    let options = ["--bits", "4", "-o", &target.arg()].map(str::to_owned);
    let mut command = Command::new("sh");
    command.args(["-c", script]).args(convert).args(options);
    let Output { status, stdout, stderr } = command.output().unwrap();
    let line = String::from_utf8(stderr).unwrap();
    assert_eq!((status.code(), stdout.len(), line.lines().count()), (Some(4), 0, 1), "{line}");
    assert!(line.contains("out.partial/model/model.safetensors"), "{line}");
    assert!(!target.out().exists());
    let (code, _, stderr) = run(&tiny(), &["--bits", "4", "-o", &target.arg(), "--resume"]);
    assert_eq!(code, 0, "{stderr}");
}

/// Even root creates nothing in the kernel's own folders.
#[cfg(target_os = "linux")]
#[test]
fn a_target_that_is_read_only_is_4() {
    let line = fail(4, &tiny(), &["--bits", "4", "-o", "/sys/candle-quant-out"]);
    assert!(line.contains("/sys/candle-quant-out.partial"), "{line}");
}

#[test]
fn an_output_is_replaced_when_asked_to() {
    let target = Target::new();
    let convert = |args: &[&str]| run(&tiny(), &[args, &["-q", "-o", &target.arg()]].concat());
    assert_eq!(convert(&["--bits", "4"]).0, 0);
    let before = files(target.out());
    let line = fail(1, &tiny(), &["--bits", "8", "-o", &target.arg()]);
    assert!(line.contains("--overwrite"), "{line}");
    assert!(files(target.out()) == before);
    assert_eq!(convert(&["--bits", "8", "--overwrite"]).0, 0);
    assert!(files(target.out()) != before);
    assert_eq!(convert(&["--bits", "4", "--overwrite"]).0, 0);
    assert!(files(target.out()) == before);
    // What is no output is not replaced, which is wrong usage.
    fs::create_dir(target.out().join("photos")).unwrap();
    assert!(
        fail(1, &tiny(), &["--bits", "8", "-o", &target.arg(), "--overwrite"]).contains("a folder (photos)")
    );
    assert!(target.out().join("photos").exists());
    assert_eq!(fs::read_dir(target.0.path()).unwrap().count(), 1);
}

/// Packed weights come into another layout without a format of which nothing would be made.
#[test]
fn what_is_packed_is_repacked_without_a_format() {
    let fixture = |name: &str| Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(name);
    let target = Target::new();
    let (code, stdout, stderr) = run(&fixture("hf/awq-g64"), &["-o", &target.arg()]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    assert_eq!(json_file(target.out().join("config.json"))["quantization"]["bits"], 4);
    let error = fail(1, &tiny(), &["-o", &Target::new().arg()]);
    assert!(error.contains("none is packed? Give --format"), "{error}");
    // Names and layout may be all that changes.
    let target = Target::new();
    let mixtral = fixture("families/mixtral");
    let (code, _, stderr) = run(&mixtral.join("hf"), &["--to", "hf", "-o", &target.arg()]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let error = fail(2, &mixtral.join("mlx-affine4"), &["--to", "hf", "-o", &Target::new().arg()]);
    assert!(error.contains("requantize or dequantize it"), "{error}");
    let target = Target::new();
    let (code, stdout, stderr) =
        run(&mixtral.join("mlx-affine4"), &["--to", "hf", "--dequantize", "-o", &target.arg()]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    assert!(json_file(target.out().join("config.json")).get("quantization").is_none());
}

#[test]
fn the_share_of_dense_weights_is_said() {
    let source = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families/granitemoe/hf");
    let (code, stdout, _) = run(&source, &["--bits", "4", "--dry-run", "--strict"]);
    // The router.
    assert!(code == 0 && stdout.contains(", 0.38 % of the weights are dense\n"), "{stdout}");
    let (_, stdout, _) = run(&source, &["--format", "keep", "--dry-run"]);
    assert!(stdout.contains(", 100.00 % of the weights are dense\n"), "{stdout}");
    let packed = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/mlx/qwen3-affine-b4-g64");
    let (_, stdout, _) = run(&packed, &["--dry-run"]);
    assert!(stdout.contains(", 0.00 % of the weights are dense\n"), "{stdout}");
}
