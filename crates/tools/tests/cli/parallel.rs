//! `candle-quant plan`, and `generate` with several ranks.

use crate::common::fixture;
use crate::{command, run};
use serde_json::Value;
use std::io::Read;
use std::process::{Output, Stdio};

const TINY: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_plan_adds_up() {
    let output = run(&["plan", TINY, "--ranks", "2", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let sum = |values: &Value| values.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).sum::<u64>();
    let tensors = plan["tensors"].as_array().unwrap();
    let stored: u64 = tensors.iter().map(|tensor| tensor["stored_bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["stored_bytes"], stored);
    assert_eq!(sum(&plan["rank_bytes"]), stored + plan["replicated_bytes"].as_u64().unwrap());
    for tensor in tensors {
        let (bytes, stored) = (sum(&tensor["rank_bytes"]), tensor["stored_bytes"].as_u64().unwrap());
        match tensor["split"].as_str().unwrap() {
            "rows" | "columns" => {
                assert_eq!(bytes, stored, "{tensor}");
                let ranges = tensor["ranges"].as_array().unwrap();
                assert_eq!((&ranges[0][0], &ranges[0][1]), (&Value::from(0), &ranges[1][0]), "{tensor}");
            }
            _ => {
                assert!(bytes == 2 * stored && tensor["name"].as_str().unwrap().contains("norm"), "{tensor}")
            }
        }
    }
    // Two sums in each layer and one of the embedding.
    let config: Value =
        serde_json::from_slice(&std::fs::read(format!("{TINY}/config.json")).unwrap()).unwrap();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    assert_eq!(plan["communication"]["all_reduces"], 2 * layers + 1);
    assert_eq!(plan["communication"]["gathered_logits"], config["vocab_size"]);
}

#[test]
fn what_is_replicated_is_told_and_refused_if_strict() {
    let path = fixture("qwen3-affine-b4-g64");
    let path = path.to_str().unwrap();
    let output = run(&["plan", path, "--ranks", "4"]);
    assert!(output.status.success());
    let text = stdout(&output);
    let expected = "replicated: model.layers.0.self_attn.o_proj.weight, 0.009 MB: \
        groups of 64 in the inputs of two ranks are on both";
    assert!(text.contains(expected), "{text}");
    assert_eq!(text.matches("\nrank ").count(), 4, "{text}");
    assert!(
        text.contains("for each token: 5 sums of 128 elements, 256 logits gathered; 3.584 kB in f32"),
        "{text}"
    );

    let output = run(&["plan", path, "--ranks", "4", "--strict"]);
    assert_eq!(output.status.code(), Some(1));
    let error = stderr(&output);
    assert!(error.contains("every matrix split") && error.contains("k_proj.weight"), "{error}");
    assert!(run(&["plan", path, "--ranks", "2", "--strict"]).status.success());
}

/// Of HQQ, the bytes of a matrix lie together; converted, every matrix is split.
#[test]
fn hqq_is_split_after_conversion() {
    let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/uqff/hqq4");
    let output = run(&["plan", path, "--ranks", "2", "--strict"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains(": every rank needs all of its bytes"), "{}", stdout(&output));
    let dir = tempfile::tempdir().unwrap();
    let converted = dir.path().join("converted");
    let converted = converted.to_str().unwrap();
    let output = run(&["convert", path, "-o", converted, "--bits", "4", "--requantize"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let output = run(&["plan", converted, "--ranks", "2", "--strict"]);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn plans_that_can_not_be_made() {
    for (args, expected) in [
        (["plan", TINY, "--ranks", "0"], "ranks: expected 1 to 65536, found 0"),
        // Of so many, not even their number of bytes is computed.
        (
            ["plan", TINY, "--ranks", "18446744073709551615"],
            "ranks: expected 1 to 65536, found 18446744073709551615",
        ),
        (["plan", "/nowhere/at/all", "--ranks", "2"], "/nowhere/at/all"),
    ] {
        let output = run(&args);
        assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
}

#[test]
fn experts_are_split_as_asked() {
    let path = fixture("qwen3moe-affine-b4-g64");
    let path = path.to_str().unwrap();
    let plan = |args: &[&str]| run(&[&["plan", path, "--strict"], args].concat());
    for (split, of_down) in [("inside", "columns"), ("across", "experts")] {
        let output = plan(&["--ranks", "2", "--json", "--experts", split]);
        assert!(output.status.success(), "{}", stderr(&output));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(plan["experts"], split);
        let down = |tensor: &&Value| tensor["name"] == "model.layers.0.mlp.switch_mlp.down_proj.weight";
        let down = plan["tensors"].as_array().unwrap().iter().find(down).unwrap();
        assert_eq!(down["split"], of_down);
    }
    let output = plan(&["--ranks", "9", "--experts", "across"]);
    assert_eq!(output.status.code(), Some(1));
    let replicated = "replicated: model.layers.1.mlp.switch_mlp.up_proj.weight, ";
    let text = stdout(&output);
    assert!(text.contains(replicated) && text.contains(": fewer experts than the 9 ranks"), "{text}");
    let output = plan(&["--ranks", "2", "--experts", "aside"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("expected `inside` or `across`, found `aside`"), "{}", stderr(&output));
}

#[test]
fn ranks_write_the_text_of_one() {
    let generate = |ranks: &str| {
        let output = run(&["generate", TINY, "--cpu", "--seed", "5", "-n", "60", "--ranks", ranks]);
        assert!(output.status.success(), "{}", stderr(&output));
        (stdout(&output), stderr(&output))
    };
    let (alone, report) = generate("1");
    assert!(alone.starts_with("Once upon a time") && alone.len() > 60, "{alone}");
    assert!(report.contains("\nweights: "), "{report}");
    for ranks in ["2", "3", "4"] {
        let (text, report) = generate(ranks);
        assert_eq!(text, alone, "{ranks} ranks");
        assert!(report.contains(&format!("weights of the first of {ranks} ranks")), "{report}");
    }
}

/// As threads of one process, each with a model: 3000 took 4.4 GB.
#[test]
fn more_ranks_than_a_machine_has_devices_are_a_mistake() {
    for ranks in ["0", "257", "3000", "18446744073709551615"] {
        let output = run(&["generate", TINY, "--cpu", "--ranks", ranks]);
        assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()));
        let expected = format!("--ranks: expected 1 to 256, found {ranks}");
        assert!(stderr(&output).contains(&expected), "{}", stderr(&output));
    }
}

#[test]
fn the_heartbeat_timeout_is_one_of_processes_and_not_zero() {
    for (args, expected) in [
        (&["--heartbeat-timeout", "9"][..], "--distributed"),
        (&["--distributed", "--heartbeat-timeout", "0"], "0 is not in 1.."),
    ] {
        let output = run(&[&["generate", TINY], args].concat());
        assert!(!output.status.success() && stderr(&output).contains(expected), "{}", stderr(&output));
    }
    assert!(stdout(&run(&["generate", "--help"])).contains("[default: 20]"));
}

#[test]
fn a_reader_that_leaves_ends_all_ranks() {
    let args = ["generate", TINY, "--cpu", "--ranks", "2", "-n", "100000", "--temperature", "0.9"];
    let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 20];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
}

#[test]
#[cfg(not(feature = "nccl"))]
fn a_build_without_nccl_is_no_rank_of_others() {
    let output = run(&["generate", TINY, "--distributed"]);
    assert_eq!(output.status.code(), Some(1));
    let expected = "--distributed: this program was built without NCCL; build it with `--features cli,nccl`";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
}

#[test]
fn the_launcher_and_not_the_command_says_how_many_ranks_there_are() {
    let output = run(&["generate", TINY, "--distributed", "--ranks", "2"]);
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("'--distributed' cannot be used with '--ranks <RANKS>'"),
        "{}",
        stderr(&output)
    );
}

/// What is wrong with options is said before a model is looked for.
#[test]
fn wrong_ranks_are_refused_before_anything_is_opened() {
    for ranks in ["0", "257"] {
        let output = run(&["generate", "no/such", "--ranks", ranks]);
        let said = stderr(&output);
        assert!(
            !output.status.success() && said.contains(&format!("expected 1 to 256, found {ranks}")),
            "{said}"
        );
    }
}
