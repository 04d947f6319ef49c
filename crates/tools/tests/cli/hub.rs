//! `pull`, `list`, and commands with names of the Hugging Face hub. How it is fetched is tested beside the library.

use crate::command;
use crate::hub_server::Server;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Output;

fn run(args: &[&str], cache: &Path, endpoint: &str, offline: bool) -> Output {
    let mut command = command(args);
    command.env("HF_HUB_CACHE", cache).env("HF_ENDPOINT", endpoint).env("HF_TOKEN", "hf_secret");
    command.env("OLLAMA_MODELS", cache.join("none"));
    if !offline {
        command.env_remove("HF_HUB_OFFLINE");
    }
    command.output().unwrap()
}

fn bundled() -> Server {
    let dir = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("assets/tiny");
    let names = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    let files = names.map(|name| (name, fs::read(dir.join(name)).unwrap()));
    Server::new(&files.each_ref().map(|(name, bytes)| (*name, &bytes[..])))
}

#[test]
fn commands_take_names() {
    let (server, dir) = (bundled(), tempfile::tempdir().unwrap());
    let cache = dir.path();
    // Nothing is there, and nothing may be fetched.
    let refused = run(&["inspect", "org/model"], cache, &server.url, true);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(1) && text.contains("HF_HUB_OFFLINE"), "{text}");
    assert_eq!(text.lines().count(), 1);
    // The first command fetches it, those after it find it.
    let inspected = run(&["inspect", "org/model", "--json"], cache, &server.url, false);
    assert!(inspected.status.success(), "{}", String::from_utf8_lossy(&inspected.stderr));
    let requests = server.requests();
    assert!(requests.iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_secret")));
    let out = dir.path().join("out");
    for args in [
        &["verify", "hf.co/org/model"][..],
        &["diff", "org/model", concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny")],
        &["plan", "org/model", "--ranks", "2"],
        &["generate", "org/model", "-n", "2", "--cpu"],
        &["logits", "org/model", "--tokens", "1,2", "--out", out.to_str().unwrap()],
        &["convert", "org/model", "--format", "mxfp4", "--requantize", "--dry-run"],
    ] {
        let output = run(args, cache, &server.url, true);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(server.requests().len(), requests.len());

    let listed = run(&["list", "--json"], cache, &server.url, true);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let (model, inspected): (_, Value) = (&listed[0], serde_json::from_slice(&inspected.stdout).unwrap());
    assert_eq!(
        (&model["name"], &model["kind"], &model["source"]),
        (&"org/model".into(), &"MLX".into(), &"hub".into())
    );
    assert_eq!(model["bits_per_weight"], inspected["bits_per_weight"]);
    assert_eq!(
        model["bytes"],
        fs::metadata(Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("assets/tiny/model.safetensors"))
            .unwrap()
            .len()
    );
    let listed = String::from_utf8(run(&["list"], cache, &server.url, true).stdout).unwrap();
    assert!(
        listed.starts_with("org/model") && listed.contains("1.1 MB") && listed.contains("MLX (hub)"),
        "{listed}"
    );

    let pulled = String::from_utf8(run(&["pull", "org/model"], cache, &server.url, false).stdout).unwrap();
    assert!(Path::new(pulled.trim()).join("config.json").is_file(), "{pulled}");
    assert_eq!(server.requests().len(), requests.len() + 1);
}

/// A limit of what a process may write stands for a disk that is full.
#[cfg(unix)]
#[test]
fn a_full_disk_is_told_and_what_came_is_kept() {
    let (server, dir) = (bundled(), tempfile::tempdir().unwrap());
    let program = command(&[]);
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$0\" pull org/model"]);
    limited.arg(program.get_program()).env("HF_HUB_CACHE", dir.path()).env("HF_ENDPOINT", &server.url);
    let output = limited.env_remove("HF_HUB_OFFLINE").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && text.lines().count() == 1, "{text}");
    for part in ["org/model", "`model.safetensors` has no room in ", "HF_HUB_CACHE"] {
        assert!(text.contains(part), "{text}");
    }
    let before = server.hub.lock().unwrap().sent;
    let output = run(&["pull", "org/model"], dir.path(), &server.url, false);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let size = server.hub.lock().unwrap().files["model.safetensors"].len();
    assert!(server.hub.lock().unwrap().sent - before < size, "it is fetched from the start");
}

#[test]
fn processes_fetch_a_file_once() {
    let (server, dir) = (bundled(), tempfile::tempdir().unwrap());
    let start = || {
        let mut command = command(&["pull", "org/model"]);
        command.env("HF_HUB_CACHE", dir.path()).env("HF_ENDPOINT", &server.url).env_remove("HF_HUB_OFFLINE");
        command.stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    let processes: Vec<_> = (0..4).map(|_| start()).collect();
    for mut process in processes {
        assert!(process.wait().unwrap().success());
    }
    let hub = server.hub.lock().unwrap();
    assert_eq!(hub.sent, hub.files.values().map(Vec::len).sum::<usize>());
}

#[test]
fn one_gguf_model_is_included() {
    let (server, dir) =
        (Server::new(&[("a-Q4_0.gguf", b"x"), ("a-Q8_0.gguf", b"y")]), tempfile::tempdir().unwrap());
    for (args, problem) in [
        (&["pull", "org/model"][..], "2 models; it has :Q4_0, :Q8_0"),
        (&["pull", "org/model:Q4_0", "--include", "Q8_0"], "two choices"),
        (&["pull", "model"], "no org/model; write org/model"),
    ] {
        let output = run(args, dir.path(), &server.url, false);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && text.contains(problem), "{args:?}: {text}");
    }
    let output = run(&["pull", "org/model", "--include", "q8_0"], dir.path(), &server.url, false);
    assert!(String::from_utf8(output.stdout).unwrap().trim().ends_with("a-Q8_0.gguf"));
    // It is no GGUF file: that is told of it, and the others are listed.
    let listed = String::from_utf8(run(&["list"], dir.path(), &server.url, true).stdout).unwrap();
    assert!(listed.starts_with("org/model:Q8_0  ") && listed.lines().count() == 1, "{listed}");
}
