//! What opening costs grows with headers and configs, whoever wrote them: memory up to three times a header.

use candle_quant::checkpoint::{Budget, Checkpoint, OpenOptions};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Instant;

#[path = "common/allocations.rs"]
mod allocations;
#[path = "common/checkpoint.rs"]
mod checkpoint;
#[path = "gguf/writer.rs"]
#[allow(dead_code)] // more than is needed here
mod writer;

use allocations::{alone, peak_of, Counting};
use checkpoint::{folder_of, raw_file, rejected, warned};

#[global_allocator]
static COUNTING: Counting = Counting;

/// Sizes of headers, in bytes; `CANDLE_QUANT_HEADER_BYTES` sets another, to be measured with a release build.
fn header_bytes() -> usize {
    let set = std::env::var("CANDLE_QUANT_HEADER_BYTES").ok();
    set.map_or(4 << 20, |size| size.parse().expect("a number of bytes"))
}

/// A header of about so many bytes, of tensors of these names, one byte each or none.
fn header(bytes: usize, byte_each: bool, name: impl Fn(usize) -> String) -> (String, usize) {
    let (mut header, mut count) = (String::from("{"), 0);
    while header.len() < bytes {
        let comma = if count > 0 { "," } else { "" };
        let (shape, start, end) = if byte_each { (1, count, count + 1) } else { (0, 0, 0) };
        write!(
            header,
            r#"{comma}"{}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[{start},{end}]}}"#,
            name(count)
        )
        .unwrap();
        count += 1;
    }
    header.push('}');
    (header, if byte_each { count } else { 0 })
}

fn short(number: usize) -> String {
    let digits = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
    let digit = |shift: usize| char::from(digits[number >> shift & 63]);
    [18, 12, 6, 0].map(digit).iter().collect()
}

fn usual(number: usize) -> String {
    let parts = ["gate_proj", "up_proj", "down_proj"];
    let (part, expert, layer) = (parts[number % 3], number / 3 % 512, number / 1536);
    format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight")
}

/// What it takes to open a path: three times the text, and 32 MB at most of what any opening takes.
fn measured(what: &str, path: &Path, text: usize) -> candle_quant::Result<Checkpoint> {
    let start = Instant::now();
    let (opened, peak) = peak_of(|| Checkpoint::open(path));
    println!(
        "{what}: {:.1} MB of text, peak {:.1} MB ({:.2} times), {:.2} s",
        text as f64 / 1e6,
        peak as f64 / 1e6,
        peak as f64 / text as f64,
        start.elapsed().as_secs_f64()
    );
    assert!(peak <= 3 * text + (text / 4).min(32 << 20), "{what}: {peak} bytes for {text}");
    opened
}

#[test]
fn a_header_takes_three_times_its_size() {
    let _alone = alone();
    for (what, (header, data)) in [
        ("the most tensors", header(header_bytes(), false, short)),
        ("usual names", header(header_bytes(), true, usual)),
        ("many dimensions", {
            let dims = "1,".repeat(7);
            let entry = format!(r#"{{"dtype":"U8","shape":[{dims}0],"data_offsets":[0,0]}}"#);
            let count = header_bytes() / (entry.len() + 8);
            let entries: Vec<_> = (0..count).map(|index| format!(r#""{}":{entry}"#, short(index))).collect();
            (format!("{{{}}}", entries.join(",")), 0)
        }),
        ("one long name", header(100, true, |_| "n".repeat(header_bytes()))),
        ("a long text", (format!(r#"{{"__metadata__":{{"a":"{}"}}}}"#, "t".repeat(header_bytes())), 0)),
        ("many texts", {
            let count = header_bytes() / 10;
            let texts: Vec<_> = (0..count).map(|index| format!(r#""{}":"""#, short(index))).collect();
            (format!(r#"{{"__metadata__":{{{}}}}}"#, texts.join(",")), 0)
        }),
    ] {
        let file = raw_file(&header, &vec![0; data]);
        let dir = folder_of(&[("model.safetensors", &file)]);
        drop(file);
        let opened = measured(what, dir.path(), header.len()).unwrap();
        assert_eq!(opened.tensor_names().count() == 0, what.contains("text"));
        if what == "usual names" {
            // As another reader of safetensors has it, which keeps an index of its own.
            let config = r#"{"quantization_config": {"quant_method": "fp8"}}"#;
            fs::write(dir.path().join("config.json"), config).unwrap();
            measured("usual names, beside fp8", dir.path(), header.len()).unwrap();
        }
    }
}

#[test]
fn shapes_without_end_are_refused() {
    let _alone = alone();
    let dims = "1,".repeat(header_bytes() / 2);
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{dims}1],"data_offsets":[0,1]}}}}"#);
    let dir = folder_of(&[("model.safetensors", &raw_file(&header, &[0]))]);
    rejected(measured("a long shape", dir.path(), header.len()), &["`a`", "more than 8 dimensions"]);
}

#[test]
fn an_index_takes_three_times_its_size() {
    let _alone = alone();
    let (header, data) = header(header_bytes() / 4, true, usual);
    let entries: Vec<_> =
        (0..data).map(|index| format!(r#""{}":"model-1.safetensors""#, usual(index))).collect();
    let index = format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{{{}}}}}"#, entries.join(","));
    let dir = folder_of(&[
        ("model-1.safetensors", &raw_file(&header, &vec![0; data])),
        ("model.safetensors.index.json", index.as_bytes()),
    ]);
    let opened = measured("an index and its shard", dir.path(), header.len() + index.len()).unwrap();
    assert_eq!(opened.tensor_names().count(), data);
}

#[test]
fn names_that_mean_nothing_are_one_warning() {
    let _alone = alone();
    let (header, data) = header(1000, true, usual);
    let entries: Vec<_> =
        (0..100_000).map(|index| format!(r#""unknown.{index}":{{"bits":4,"group_size":64}}"#)).collect();
    let config = format!(r#"{{"quantization":{{"bits":4,"group_size":64,{}}}}}"#, entries.join(","));
    let dir = folder_of(&[
        ("model.safetensors", &raw_file(&header, &vec![0; data])),
        ("config.json", config.as_bytes()),
    ]);
    let start = Instant::now();
    let (opened, peak) = peak_of(|| Checkpoint::open(dir.path()));
    println!(
        "100,000 unknown modules: peak {:.1} MB, {:.2} s",
        peak as f64 / 1e6,
        start.elapsed().as_secs_f64()
    );
    warned(&opened.unwrap(), &["`quantization.unknown.0` matches no module", "with 99999 more"]);
    assert!(peak < 100_000_000, "{peak}");
}

/// An array of GGUF, of so many ones.
fn ones(kind: u32, count: usize) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(count as u64).to_le_bytes(), &vec![1; count]].concat()
}

#[test]
fn gguf_files_take_three_times_their_headers() {
    let _alone = alone();
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let texts = |count: usize, each: &str| {
        let head = [&writer::TEXT.to_le_bytes()[..], &(count as u64).to_le_bytes()].concat();
        [head, text(each).repeat(count)].concat()
    };
    let size = header_bytes();
    for (what, key, kind, value) in [
        ("a long text", "a.text", writer::TEXT, text(&"t".repeat(size))),
        ("many tokens", "tokenizer.ggml.tokens", writer::ARRAY, texts(size / 10, "ab")),
        ("empty tokens", "tokenizer.ggml.tokens", writer::ARRAY, texts(size / 8, "")),
        ("a size for each layer", "llama.attention.head_count_kv", writer::ARRAY, ones(0, size)),
    ] {
        let mut file = writer::File::llama();
        file.values.retain(|(name, ..)| name != key.as_bytes());
        let file = file.value(key, kind, value).bytes();
        let dir = folder_of(&[("model.gguf", &file)]);
        measured(what, dir.path(), file.len()).unwrap();
    }
    let several = ones(0, size);
    let file = writer::File::llama().value("tokenizer.ggml.eos_token_ids", writer::ARRAY, several).bytes();
    let dir = folder_of(&[("model.gguf", &file)]);
    rejected(measured("ends of text", dir.path(), file.len()), &["eos_token_ids", "expected a few ids"]);
}

#[test]
fn what_exceeds_the_budget_is_refused() {
    let _alone = alone();
    let (header, data) = header(10_000, true, usual);
    let config = br#"{"model_type": "a", "list": [1, 2, 3, 4, 5, 6, 7, 8, 9]}"#;
    let file = raw_file(&header, &vec![0; data]);
    let dir = folder_of(&[("model.safetensors", &file), ("config.json", config)]);
    let open = |bytes: usize, entries: usize| {
        let budget = Budget { bytes: bytes as u64, entries: entries as u64 };
        Checkpoint::open_with(dir.path(), OpenOptions { budget, ..Default::default() })
    };
    let (bytes, entries) = (header.len() + config.len(), data + 4 * 11);
    assert!(open(bytes, entries).is_ok());
    let how = "Checkpoint::open_with";
    rejected(open(bytes - 1, entries), &["config.json", "bytes of headers and configs", how]);
    rejected(open(header.len() - 1, entries), &["model.safetensors", "bytes of headers", how]);
    rejected(open(bytes, entries - 1), &["config.json", "entries in headers and configs", how]);
    rejected(open(bytes, data - 1), &["model.safetensors", "entries in headers", how]);
    // Of an index and of its shards.
    let entries: Vec<_> =
        (0..data).map(|index| format!(r#""{}":"model.safetensors""#, usual(index))).collect();
    let index = dir.path().join("model.safetensors.index.json");
    fs::write(&index, format!(r#"{{"weight_map":{{{}}}}}"#, entries.join(","))).unwrap();
    rejected(open(1 << 20, data - 1), &["index.json", "entries in headers", how]);
    rejected(open(1 << 20, 2 * data - 1), &["model.safetensors", "entries in headers", how]);
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(open(1 << 20, 2 * data).is_ok());
}

#[test]
fn gguf_files_have_the_same_budget() {
    let _alone = alone();
    let dir = folder_of(&[("model.gguf", &writer::File::llama().bytes())]);
    let open = |bytes, entries| {
        let budget = Budget { bytes, entries };
        Checkpoint::open_with(dir.path(), OpenOptions { budget, ..Default::default() })
    };
    assert!(open(1 << 20, 1 << 20).is_ok());
    rejected(open(100, 1 << 20), &["model.gguf", "bytes of headers"]);
    rejected(open(1 << 20, 7 * 32 - 1), &["model.gguf", "entries in headers"]);

    // No more is read than may be.
    let tokens = ones(0, 4 << 20);
    let file = writer::File::llama().value("tokenizer.ggml.token_type", writer::ARRAY, tokens).bytes();
    fs::write(dir.path().join("model.gguf"), &file).unwrap();
    drop(file);
    let (opened, peak) = peak_of(|| open(1 << 16, 1 << 20));
    rejected(opened, &["model.gguf", "bytes of headers"]);
    assert!(peak < 1 << 19, "{peak}");
}

#[test]
fn slm1_files_have_the_same_budget() {
    let _alone = alone();
    let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/slm1/q4_0.slm");
    let open = |bytes, entries| {
        let budget = Budget { bytes, entries };
        Checkpoint::open_with(path, OpenOptions { budget, ..Default::default() })
    };
    let tensors = Checkpoint::open(path).unwrap().tensor_names().count() as u64;
    assert!(open(1 << 20, tensors).is_ok());
    rejected(open(1 << 20, tensors - 1), &["q4_0.slm", "entries in headers"]);
    rejected(open(108 + 64 * tensors - 1, tensors), &["q4_0.slm", "bytes of headers"]);
}

/// What lies beside the weights may cost as much as opening might.
#[test]
fn companions_have_the_budget_of_the_checkpoint() {
    let _alone = alone();
    let (header, data) = header(100, true, usual);
    let file = raw_file(&header, &vec![0; data]);
    let list = format!("[{}0]", "0,".repeat(1000));
    let dir = folder_of(&[("model.safetensors", &file), ("list.json", list.as_bytes())]);
    let open = |entries| {
        let budget = Budget { entries, ..Default::default() };
        Checkpoint::open_with(dir.path(), OpenOptions { budget, ..Default::default() }).unwrap()
    };
    assert!(open(1 << 20).read_json("list.json").unwrap().is_some());
    let error = open(1000).read_json("list.json").unwrap_err().to_string();
    assert!(error.contains("list.json") && error.contains("entries in headers and configs"), "{error}");
}
