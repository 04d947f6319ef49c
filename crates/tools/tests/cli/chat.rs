//! `candle-quant chat`, and `generate` with a chat template.

#[cfg(unix)]
use crate::pty::Pty;
use crate::{command, run};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};
use tempfile::TempDir;

const TEMPLATE: &str =
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant:{% endif %}";

/// A copy of the bundled model with these files beside it.
fn model(files: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    let assets = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("assets/tiny");
    for entry in fs::read_dir(assets).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn with_template() -> TempDir {
    model(&[("chat_template.jinja", TEMPLATE)])
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// `chat` with these lines on its input.
fn chat(model: &TempDir, args: &[&str], lines: &str) -> Output {
    let path = model.path().to_str().unwrap();
    let mut child = command(&[&["chat", path, "--cpu"], args].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that fails at once may not read it.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    child.wait_with_output().unwrap()
}

/// The tokens of prompts that were computed, and all of them, as the reports say.
fn prompts(output: &Output) -> Vec<(usize, usize)> {
    let reports = text(&output.stderr).lines().filter_map(|line| line.strip_prefix("prompt: "));
    let numbers = |line: &str| {
        let (new, rest) = line.split_once(" new tokens of ").unwrap();
        (new.parse().unwrap(), rest.split_once(',').unwrap().0.parse().unwrap())
    };
    reports.map(numbers).collect()
}

#[test]
fn a_conversation_from_a_pipe_computes_only_what_is_new() {
    let model = with_template();
    let args = ["-n", "12", "--temperature", "0"];
    let output = chat(&model, &args, "Once upon a time there was a little girl\nAnd what then?\nThe end\n");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let answers = text(&output.stdout);
    assert!(!answers.contains(['\x1b', '>']) && answers.ends_with('\n') && answers.len() > 60, "{answers:?}");
    let found = prompts(&output);
    let [first, second, third] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(first.0, first.1);
    for (turn, before) in [(second, first), (third, second)] {
        // The message, what is around it, and the last token of the answer, which may be written otherwise.
        assert!(turn.1 > before.1 + 12 && turn.0 < turn.1 - before.1 + 3, "{found:?}");
    }
    // The same conversation from its beginning.
    let again = chat(&model, &args, "Once upon a time there was a little girl\nAnd what then?\nThe end\n");
    assert_eq!(again.stdout, output.stdout);
}

#[cfg(unix)]
#[test]
fn what_is_typed_during_an_answer_is_shown_and_read_after_it() {
    let model = with_template();
    let path = model.path().to_str().unwrap();
    let mut terminal = Pty::new(80);
    let chat = terminal.spawn(&mut command(&["chat", path, "--cpu", "-n", "50", "--seed", "1"]));
    terminal.wait_for(">>> ");
    terminal.press("Once upon a time\r/nothing\r/none\r/exit\r");
    // Only when all is over the terminal may show again by itself what is typed.
    const ECHOES: &str = "<echoes>";
    let shown = terminal.end(chat, |terminal| {
        if terminal.echoes() {
            terminal.mark(ECHOES);
        }
    });
    for part in ["answer: 50 tokens", "/nothing: no such command", "/none: no such command"] {
        assert!(shown.split(ECHOES).next().unwrap().contains(part), "{part} in {shown}");
    }
}

#[test]
fn commands_change_the_conversation_and_save_it() {
    let model = with_template();
    let file = model.path().join("saved.json");
    let save = format!("/save {}", file.to_str().unwrap());
    let lines = format!(
        "/system Be  brief.\nOnce upon\\\na time\n{save}\n{save}\n/reset\nHello\n{save}\n/system\n/nothing\n\n/help\n/exit\nno answer\n"
    );
    let output = chat(&model, &["-n", "5", "--seed", "1"], &lines);
    let report = text(&output.stderr);
    assert!(output.status.success(), "{report}");
    assert!(report.contains("3 messages in ") && report.contains("/nothing: no such command"), "{report}");
    assert!(report.contains("/reset        begin anew"), "{report}");
    assert_eq!(prompts(&output).len(), 2);
    let saved: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let saved = saved.as_array().unwrap();
    assert_eq!(saved.len(), 3);
    assert_eq!(saved[0], serde_json::json!({"role": "system", "content": "Be  brief."}));
    assert_eq!(saved[1], serde_json::json!({"role": "user", "content": "Hello"}));
    assert_eq!(saved[2]["role"], "assistant");

    // Another program's file stays as it is.
    fs::write(&file, "mine").unwrap();
    let output = chat(&model, &["-n", "5"], &format!("Once upon\\\na time\n{save}\n/save\n"));
    let report = text(&output.stderr);
    assert!(report.contains(&format!("/save {}: ", file.to_str().unwrap())), "{report}");
    assert!(report.contains("/save: expected the name of a file"), "{report}");
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

#[test]
fn lines_that_go_on_are_one_message() {
    let model = with_template();
    let file = model.path().join("saved.json");
    let lines = format!("one\\\n two\\\nthree\n/save {}\nlast\\", file.to_str().unwrap());
    let output = chat(&model, &["-n", "2"], &lines);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(prompts(&output).len(), 2);
    let saved: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(saved[0]["content"], "one\n two\nthree");
}

#[test]
fn a_chat_that_can_not_be_says_why() {
    let bare = model(&[]);
    let output = chat(&bare, &[], "Hello\n");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("has no chat template; `generate` continues a text"));
    let refusing = model(&[("chat_template.jinja", "{{ raise_exception('not today') }}")]);
    let output = chat(&refusing, &[], "Hello\n");
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("the chat template refuses the conversation: not today"), "{error}");
    let output = chat(&with_template(), &["--top-k", "0"], "Hello\n");
    assert!(text(&output.stderr).contains("top-k: expected at least 1, found 0"));
    let output =
        chat(&with_template(), &["--max-tokens", "10"], "Once upon a time there was a little girl\n");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("the KV cache holds at most 10"), "{}", text(&output.stderr));
}

fn generate(model: &TempDir, args: &[&str]) -> (String, String) {
    let path = model.path().to_str().unwrap();
    let output = run(&[&["generate", path, "--cpu", "-n", "20", "--temperature", "0"], args].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    (text(&output.stdout).to_owned(), text(&output.stderr).to_owned())
}

/// A dense model runs as the one that `convert` would make of it, alone and over ranks.
#[test]
fn generate_quantizes_while_it_loads() {
    let folder = tempfile::tempdir().unwrap();
    let dense = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny-bf16");
    let packed = folder.path().join("packed");
    let packed = packed.to_str().unwrap();
    assert!(run(&["convert", dense, "--bits", "2", "-o", packed, "--cpu"]).status.success());
    let generate = |model: &str, args: &[&str]| {
        let output = run(&[&["generate", model, "--cpu", "-n", "40", "--temperature", "0"], args].concat());
        (text(&output.stdout).to_owned(), text(&output.stderr).to_owned())
    };
    let (expected, report) = generate(packed, &[]);
    assert!(generate(dense, &[]).0 != expected);
    for args in [&["--quantize", "2"][..], &["--quantize", "affine:2:g64", "--ranks", "2"]] {
        let (found, said) = generate(dense, args);
        assert_eq!(found, expected, "{said}");
    }
    let (_, said) = generate(dense, &["--quantize", "2"]);
    let weights = |report: &str| report.lines().find(|line| line.contains("weights")).unwrap().to_owned();
    assert_eq!(weights(&said), weights(&report));
    // What is packed stays as it is, and wrong ones say what may stand there.
    let (found, said) = generate(packed, &["--quantize", "8"]);
    assert!(found == expected && said.contains("--quantize changes nothing"), "{said}");
    let (_, said) = generate(dense, &["--quantize", "no-format"]);
    assert!(said.contains("--quantize: no-format: no file; as a format:"), "{said}");
}

#[test]
fn guesses_change_no_text() {
    let tiny = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
    let generate = |args: &[&str]| {
        let story = "Once upon a time there was a little dog. The little dog was happy. The little dog";
        let output =
            run(&[&["generate", tiny, "--cpu", "-n", "60", "--seed", "3", "--prompt", story], args].concat());
        (output.status.code(), text(&output.stdout).to_owned(), text(&output.stderr).to_owned())
    };
    let (_, expected, said) = generate(&[]);
    assert!(!said.contains("guesses"), "{said}");
    for args in [&["--lookup", "4"][..], &["--lookup", "4", "--ranks", "2"]] {
        let (code, found, said) = generate(args);
        assert!((code, &found) == (Some(0), &expected), "{args:?}: {said}");
        assert!(said.contains(" guesses were right\n"), "{said}");
    }
    for wrong in ["x", "-1", "1.5"] {
        let (code, _, said) = generate(&[&format!("--lookup={wrong}")]);
        assert!(code == Some(1) && said.contains("--lookup <TOKENS>"), "{said}");
    }
}

#[test]
fn generate_applies_the_template() {
    let (model, bare) = (with_template(), model(&[]));
    let (answer, report) = generate(&model, &["--prompt", "Hello"]);
    assert!(report.contains(" tokens by the chat template, "), "{report}");
    // As if the template's text had been given; but only the answer is written.
    let prompt = "user: Hello\nassistant:";
    let (expected, report) = generate(&bare, &["--prompt", prompt]);
    assert!(!report.contains("template"), "{report}");
    assert_eq!(format!("{prompt}{answer}"), expected);
    let with_system = generate(&model, &["--prompt", "Hello", "--system", "Tell a story."]).0;
    let prompt = "system: Tell a story.\nuser: Hello\nassistant:";
    assert_eq!(format!("{prompt}{with_system}"), generate(&bare, &["--prompt", prompt]).0);
    assert_eq!(
        generate(&model, &["--prompt", "Hello", "--raw"]).0,
        generate(&bare, &["--prompt", "Hello"]).0
    );
    assert_eq!(generate(&model, &["--prompt", "Hello", "--ranks", "2"]).0, answer);

    let fail = |model: &TempDir, args: &[&str]| {
        let path = model.path().to_str().unwrap();
        let output = run(&[&["generate", path, "--cpu"], args].concat());
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), ""));
        text(&output.stderr).to_owned()
    };
    assert!(fail(&bare, &["--system", "x"]).contains("has no chat template"));
    assert!(fail(&model, &["--system", "x", "--raw"]).contains("cannot be used with"));
    let broken = self::model(&[("chat_template.jinja", "{% if %}")]);
    let error = fail(&broken, &[]);
    assert!(
        error.contains("--raw continues the prompt as it is: ") && error.contains("can't be read"),
        "{error}"
    );
    generate(&broken, &["--raw"]);
}

#[test]
fn generation_config_gives_the_defaults_and_options_win() {
    let greedy = model(&[("generation_config.json", r#"{"do_sample": false, "eos_token_id": [0]}"#)]);
    let run_with = |model: &TempDir, args: &[&str]| {
        let path = model.path().to_str().unwrap();
        let output = run(&[&["generate", path, "--cpu", "-n", "30", "--seed", "3"], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).to_owned()
    };
    let most_likely = run_with(&greedy, &["--temperature", "0"]);
    assert_eq!(run_with(&greedy, &[]), most_likely);
    assert_ne!(run_with(&greedy, &["--temperature", "1.5"]), most_likely);
    let penalized =
        model(&[("generation_config.json", r#"{"do_sample": false, "repetition_penalty": 1.8}"#)]);
    let without = run_with(&penalized, &["--repetition-penalty", "1"]);
    assert_eq!(without, most_likely);
    assert_ne!(run_with(&penalized, &[]), most_likely);
    assert_eq!(run_with(&penalized, &[]), run_with(&greedy, &["--repetition-penalty", "1.8"]));
    for options in [["--presence-penalty", "2"], ["--frequency-penalty", "2"], ["--min-p", "1"]] {
        let text = run_with(&greedy, &options);
        assert_eq!(text == most_likely, options[0] == "--min-p", "{options:?}");
    }
    let (whole, stop) = (run_with(&greedy, &[]), " a ");
    let at = whole["Once upon a time".len()..].find(stop).unwrap() + "Once upon a time".len();
    assert_eq!(run_with(&greedy, &["--stop", "never", "--stop", stop]), format!("{}\n", &whole[..at]));
    let wrong = model(&[("generation_config.json", r#"{"temperature": "hot"}"#)]);
    let output = run(&["generate", wrong.path().to_str().unwrap(), "--cpu"]);
    assert!(text(&output.stderr).contains("generation_config.json: `temperature`: expected a number"));
}

#[cfg(unix)]
#[test]
fn a_full_context_is_said_with_what_to_do() {
    let model = with_template();
    let mut pty = Pty::new(80);
    let path = model.path().to_str().unwrap();
    let child = pty.spawn(&mut command(&["chat", path, "--cpu", "--context", "40", "-n", "20"]));
    pty.wait_for("Ctrl-D ends");
    for _ in 0..3 {
        pty.press("Tell me about a cat\r");
    }
    pty.wait_for("; /reset begins anew");
    pty.press("/reset\r/exit\r");
    pty.end(child, |_| {});
}
