//! `bench`: what is measured, and what is said of it. No times are asserted.

use crate::common::{bundled, fixture};
use crate::{command, run};
use candle_core::{DType, Device, Result, Tensor};
use candle_quant_models::generate::CausalLm;
use candle_quant_models::Model;
use candle_quant_tools::bench::{bench, time_texts, BenchEvent, BenchOptions, Text};
use serde_json::Value;

/// Tokens and reads that are few enough for a test.
const SMALL: [&str; 11] =
    ["--cpu", "-p", "5,3", "-d", "0,20", "-n", "4", "-r", "2", "--bandwidth-buffer", "1MiB"];

const TINY: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");

fn succeed(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// One line on stderr and nothing on stdout.
fn fail(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    assert!(output.stdout.is_empty(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[cfg(unix)]
#[test]
fn a_terminal_shows_what_is_being_measured() {
    let terminal = crate::pty::Pty::new(30);
    let bench = terminal.spawn(command(&["bench", TINY]).args(SMALL));
    let shown = terminal.end(bench, |_| ());
    assert!(shown.contains("loading") && !shown.contains("0/0"), "{shown:?}");
}

/// A model that computes nothing, and writes down what it is asked for.
struct Counting {
    /// The offset and the number of tokens of each call; none where it was cleared.
    calls: Vec<Option<(usize, usize)>>,
    cached: usize,
    truncates: bool,
    context: Option<usize>,
}

impl Counting {
    fn new(truncates: bool, context: Option<usize>) -> Self {
        Self { calls: Vec::new(), cached: 0, truncates, context }
    }

    /// Calls with these numbers of tokens.
    fn calls_with(&self, tokens: usize) -> usize {
        self.calls.iter().flatten().filter(|(_, count)| *count == tokens).count()
    }

    fn tokens(&self) -> usize {
        self.calls.iter().flatten().map(|(_, count)| count).sum()
    }
}

impl CausalLm for Counting {
    fn forward_last(&mut self, ids: &Tensor, offset: usize) -> Result<Tensor> {
        assert_eq!(offset, self.cached);
        let ids = ids.to_vec2::<u32>()?;
        assert!(ids.len() == 1 && ids[0].iter().all(|id| *id < 7), "{ids:?}");
        self.calls.push(Some((offset, ids[0].len())));
        self.cached += ids[0].len();
        Tensor::zeros((1, 7), DType::F32, &Device::Cpu)
    }

    fn clear_kv_cache(&mut self) {
        self.calls.push(None);
        self.cached = 0;
    }

    fn truncate_kv_cache(&mut self, len: usize) -> usize {
        if self.truncates {
            self.cached = self.cached.min(len);
        } else {
            self.clear_kv_cache();
        }
        self.cached
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn context(&self) -> Option<usize> {
        self.context
    }
}

fn options() -> BenchOptions {
    BenchOptions {
        prompts: vec![10],
        depths: vec![30, 0, 12, 30],
        decode_tokens: 5,
        repetitions: 3,
        prefill_chunk: 8,
        ..BenchOptions::default()
    }
}

#[test]
fn exactly_the_promised_tokens_are_computed() {
    let mut model = Counting::new(true, None);
    let mut events = Vec::new();
    let found = time_texts(&mut model, 7, &options(), &mut |event| events.push(event)).unwrap();
    let texts: Vec<_> = found.timings.iter().map(|timing| (timing.text, timing.seconds.len())).collect();
    let decode = |depth| Text::Decode { depth, tokens: 5 };
    assert_eq!(texts, [(Text::Prefill { tokens: 10 }, 3), (decode(0), 3), (decode(12), 3), (decode(30), 3)]);
    // Four times each: a prompt in chunks of 8 and 2, steps at three depths. Each depth is reached once, from the tokens
    // that are there: 12 by 7 behind 5, 30 by 8 and 5 behind 17.
    assert_eq!(model.tokens(), 4 * 10 + 3 * 4 * 5 + 7 + 13);
    assert_eq!((model.calls_with(1), model.calls_with(8)), (3 * 4 * 5, 4 + 1));
    assert_eq!([2, 7, 5].map(|tokens| model.calls_with(tokens)), [4, 1, 1]);
    let steps: Vec<_> = model.calls.iter().flatten().filter(|(_, count)| *count == 1).collect();
    let offsets: Vec<_> = steps.iter().map(|(offset, _)| *offset).collect();
    let expected =
        [0, 12, 30].iter().flat_map(|depth| (0..4).flat_map(move |_| (0..5).map(move |at| depth + at)));
    assert_eq!(offsets, expected.collect::<Vec<_>>());
    let repetitions: Vec<_> = events
        .iter()
        .map(|event| match event {
            BenchEvent::Text { repetition, .. } => *repetition,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(repetitions, [0, 1, 2, 3].repeat(4));
    // Nothing is left for whoever uses the model next.
    assert_eq!(model.calls.last(), Some(&None));
}

#[test]
fn a_cache_that_forgets_all_is_filled_anew() {
    let mut model = Counting::new(false, None);
    time_texts(&mut model, 7, &options(), &mut |_| ()).unwrap();
    // As above the first time, and from the start for each repetition.
    assert_eq!(model.tokens(), 4 * 10 + 3 * 4 * 5 + (7 + 3 * 12) + (13 + 3 * 30));
}

#[test]
fn what_is_longer_than_the_context_is_left_out() {
    let mut model = Counting::new(true, Some(34));
    let found = time_texts(&mut model, 7, &options(), &mut |_| ()).unwrap();
    assert_eq!(found.left_out, [Text::Decode { depth: 30, tokens: 5 }]);
    assert_eq!(found.timings.len(), 3);
    let mut model = Counting::new(true, Some(4));
    let error = time_texts(&mut model, 7, &options(), &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains('4') && model.tokens() == 0, "{error}");
}

#[test]
fn what_can_not_be_measured_is_refused() {
    let bad = |change: fn(&mut BenchOptions), what: &str| {
        let mut options = options();
        change(&mut options);
        let mut model = Counting::new(true, None);
        let error = time_texts(&mut model, 7, &options, &mut |_| ()).unwrap_err().to_string();
        assert!(error.contains(what) && model.calls.is_empty(), "{what}: {error}");
    };
    bad(|options| options.repetitions = 0, "repetitions");
    bad(|options| options.prompts.push(0), "prompts");
    bad(|options| options.decode_tokens = 0, "decoded tokens");
    bad(|options| options.prefill_chunk = 0, "chunk");
    bad(|options| options.matmul_rows = vec![1, 0], "rows of x");
    bad(|options| (options.prompts, options.depths) = Default::default(), "none of them");
    assert!(time_texts(&mut Counting::new(true, None), 0, &options(), &mut |_| ()).is_err());
}

/// Fails if a value has other keys than these.
fn check_keys(value: &Value, keys: &[&str]) {
    let mut expected: Vec<_> = keys.to_vec();
    expected.sort_unstable();
    let mut found: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
    found.sort_unstable();
    assert_eq!(found, expected);
}

const KEYS: [&str; 13] = [
    "schema",
    "version",
    "model",
    "machine",
    "settings",
    "load_seconds",
    "peak_memory_bytes",
    "read_bandwidth",
    "prefill",
    "decode",
    "matmuls",
    "left_out",
    "notes",
];

#[test]
fn memory_that_is_not_there_is_not_measured() {
    let options = "--cpu -p 0 -d 0 -n 1 -r 1 --bandwidth-buffer 900000GiB".split(' ');
    let args: Vec<_> = ["bench", TINY].into_iter().chain(options).collect();
    let text = succeed(&args);
    let note = "note: the bandwidth of memory was not measured: there are no 966367641600000 bytes for it";
    assert!(text.contains(note) && !text.contains("\nmemory: "), "{text}");
}

#[test]
fn the_json_has_all_that_help_lists() {
    let args =
        [&["bench", TINY, "--json", "-t", "1", "--kv-cache", "f16,8bit", "--activations", "16"], &SMALL[..]];
    let report: Value = serde_json::from_str(&succeed(&args.concat())).unwrap();
    check_keys(&report, &KEYS);
    check_keys(
        &report["model"],
        &["path", "kind", "model_type", "formats", "bits_per_weight", "weight_bytes"],
    );
    check_keys(&report["machine"], &["cpu", "threads", "instruction_set", "device"]);
    check_keys(
        &report["settings"],
        &[
            "dtype",
            "activations",
            "kv_cache_keys",
            "kv_cache_values",
            "context",
            "prefill_chunk",
            "repetitions",
        ],
    );
    check_keys(&report["read_bandwidth"], &["bytes_per_second", "rounds", "buffer_bytes"]);
    check_keys(&report["prefill"][0], &["tokens", "tokens_per_second", "first_token_seconds", "seconds"]);
    check_keys(&report["prefill"][0]["tokens_per_second"], &["mean", "deviation"]);
    check_keys(
        &report["decode"][0],
        &[
            "depth",
            "tokens",
            "tokens_per_second",
            "seconds",
            "weight_bytes_per_step",
            "cache_bytes_per_step",
            "bytes_per_second",
            "share_of_bandwidth",
        ],
    );
    assert_eq!(
        (report["schema"].as_u64(), report["version"].as_str()),
        (Some(1), Some(env!("CARGO_PKG_VERSION")))
    );
    assert_eq!((&report["model"]["kind"], &report["model"]["model_type"]), (&"MLX".into(), &"qwen3".into()));
    assert_eq!((&report["machine"]["threads"], &report["machine"]["device"]), (&1.into(), &"cpu".into()));
    let settings = &report["settings"];
    assert_eq!([&settings["dtype"], &settings["activations"]], ["f32", "16"]);
    assert_eq!([&settings["kv_cache_keys"], &settings["kv_cache_values"]], ["f16", "8bit"]);
    assert_eq!(settings["repetitions"], 2);
    let list = |test: &str, key: &str| -> Vec<u64> {
        report[test].as_array().unwrap().iter().map(|figure| figure[key].as_u64().unwrap()).collect()
    };
    assert_eq!(list("prefill", "tokens"), [5, 3]);
    assert_eq!((list("decode", "depth"), list("decode", "tokens")), (vec![0, 20], vec![4, 4]));
    for figure in report["prefill"].as_array().unwrap().iter().chain(report["decode"].as_array().unwrap()) {
        assert_eq!(figure["seconds"].as_array().unwrap().len(), 2);
        assert!(figure["tokens_per_second"]["mean"].as_f64().unwrap() > 0.);
    }
    // All weights of a model whose head is its embedding; one block of keys in f16 and of values in 8 bits.
    let weights = &report["model"]["weight_bytes"];
    assert_eq!(
        [&report["decode"][0]["weight_bytes_per_step"], &report["decode"][1]["weight_bytes_per_step"]],
        [weights, weights]
    );
    let names = ["left_out", "matmuls", "notes"];
    assert!(names.iter().all(|name| report[name].as_array().unwrap().is_empty()), "{report:#}");
}

#[test]
fn help_lists_every_key() {
    let help = succeed(&["bench", "--help"]);
    let words: Vec<_> = help.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    for key in KEYS.iter().chain(&[
        "share_of_bandwidth",
        "cache_bytes_per_step",
        "flops_per_second",
        "kv_cache_keys",
    ]) {
        assert!(words.contains(key), "{key} in {help}");
    }
}

#[test]
fn the_table_fits_a_terminal_and_names_what_is_left_out() {
    let args = [&["bench", TINY, "--context", "22"], &SMALL[..]].concat();
    let text = succeed(&args);
    let rows: Vec<_> =
        text.lines().filter(|line| !line.starts_with("model: ") && !line.starts_with("CPU: ")).collect();
    assert!(rows.iter().all(|line| line.chars().count() <= 80), "{text}");
    for start in ["prefill 5 ", "prefill 3 ", "decode 4 "] {
        assert_eq!(rows.iter().filter(|line| line.starts_with(start)).count(), 1, "{start} in {text}");
    }
    assert!(rows.contains(&"left out: decode 4 @ 20, beyond the context of 22 tokens (--context)"), "{text}");
    assert!(text.contains("bits per weight") && text.contains("% ") | text.contains(" %"), "{text}");
}

#[test]
fn matmuls_are_those_of_the_model() {
    let args = ["bench", TINY, "--cpu", "--ops", "-r", "1", "--bandwidth-buffer", "1MiB"];
    let report: Value = serde_json::from_str(&succeed(&[&args[..], &["--json"]].concat())).unwrap();
    let figures = report["matmuls"].as_array().unwrap();
    check_keys(
        &figures[0],
        &["n", "k", "format", "count", "m", "seconds", "bytes", "bytes_per_second", "flops_per_second"],
    );
    // Every shape and format of the model's weights once, with 1, 8 and 512 rows.
    let model = Model::load(&bundled("tiny"), DType::F32, &Device::Cpu).unwrap();
    let mut kinds = std::collections::BTreeMap::new();
    for weight in model.matmul_weights() {
        *kinds.entry((weight.dims(), weight.format_name())).or_insert(0u64) += 1;
    }
    assert_eq!(figures.len(), 3 * kinds.len());
    for figure in figures {
        let size = |key: &str| figure[key].as_u64().unwrap();
        let dims = vec![size("n") as usize, size("k") as usize];
        let count = kinds[&(dims, figure["format"].as_str().unwrap().to_owned())];
        assert!(size("count") == count && [1, 8, 512].contains(&size("m")) && size("bytes") > 0, "{figure}");
    }
    assert!(report["decode"].as_array().unwrap().is_empty());
    let table = succeed(&args);
    assert!(table.contains("GFLOP/s") && !table.contains("tokens/s"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80 || line.starts_with("model: ")), "{table}");
}

#[test]
fn experts_count_as_matrices_and_as_what_a_token_reads() {
    let checkpoint = crate::common::open("qwen3moe-affine-b4-g64");
    let load = || Model::load(&checkpoint, DType::F32, &Device::Cpu);
    let options = BenchOptions { repetitions: 1, bandwidth_bytes: 0, matmul_rows: vec![1], ..options() };
    let report = bench(&checkpoint, load, &options, &mut |_| ()).unwrap();
    assert_eq!(report.read_bandwidth, None);
    assert!(report.decode.iter().all(|figure| figure.share_of_bandwidth.is_none()));
    let config = candle_quant_models::Config::from_checkpoint(&checkpoint).unwrap();
    let moe = config.moe.unwrap();
    let model = load().unwrap();
    let stacks: u64 = model
        .matmul_weights()
        .filter(|weight| weight.dims().len() == 3)
        .map(|weight| weight.size_in_bytes() as u64)
        .sum();
    let unused = stacks - stacks * moe.top_k as u64 / moe.experts as u64;
    let all: u64 = model.matmul_weights().map(|weight| weight.size_in_bytes() as u64).sum();
    let step = report.decode[0].weight_bytes_per_step;
    // An untied embedding gives one row.
    assert!(step >= all - unused && step < all - unused + 4096, "{step} {all} {unused}");
    let experts = report.matmuls.iter().map(|figure| figure.count).max().unwrap();
    assert!(experts >= moe.experts, "{experts}");
}

#[test]
fn wrong_input_is_one_clear_line() {
    for (args, told) in [
        (&["-r", "0"][..], "repetitions of a bench: expected at least 1, found 0"),
        (&["-p", "0", "-n", "0"], "prompts, depths or rows of x to measure"),
        (&["--prefill-chunk", "0"], "chunk of prompts"),
        (&["-p", "30", "-n", "0", "--context", "20"], "20"),
    ] {
        let line = fail(&[&["bench", TINY, "--cpu"], args].concat());
        assert!(line.trim_end().lines().count() == 1 && line.contains(told), "{args:?}: {line}");
    }
    for args in
        [&["-p", ""][..], &["-d", "5,x"], &["-t", "0"], &["--ops", "-p", "5"], &["--bandwidth-buffer", "5XB"]]
    {
        let line = fail(&[&["bench", TINY, "--cpu"], args].concat());
        assert!(line.starts_with("error: "), "{args:?}: {line}");
    }
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().unwrap();
    let line = fail(&["bench", empty, "--cpu"]);
    assert!(line.contains(empty), "{line}");
    // A config and no weights.
    std::fs::copy(fixture("qwen3-mxfp8").join("config.json"), folder.path().join("config.json")).unwrap();
    let none = safetensors::serialize(std::iter::empty::<(String, Tensor)>(), None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), none).unwrap();
    let line = fail(&["bench", empty, "--cpu"]);
    assert!(line.trim_end().lines().count() == 1 && line.contains("model.embed_tokens.weight"), "{line}");
}

#[test]
fn threads_are_those_that_are_asked_for() {
    let args = [&["bench", TINY, "--json", "--threads", "3"], &SMALL[..]].concat();
    let report: Value = serde_json::from_str(&succeed(&args)).unwrap();
    assert_eq!(report["machine"]["threads"], 3);
    let output =
        command(&[&["bench", TINY, "--json"], &SMALL[..]].concat()).env("RAYON_NUM_THREADS", "2").output();
    let report: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    assert_eq!(report["machine"]["threads"], 2);
}
