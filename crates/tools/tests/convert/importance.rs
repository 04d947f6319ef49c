//! Statistics of what layers are given: those of transformers, of llama.cpp's files, and what searches make of them.

use super::common::{bundled, bundled_path, convert, tensors};
use candle_core::{DType, Device};
use candle_quant::format::GgmlType;
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{
    self, BitAllocation, ConvertOptions, ConvertPlan, ConvertReport, Recipe, Sensitivities,
};
use candle_quant_tools::importance::{read_imatrix, CalibrationText, Collector, Statistics};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn fixtures(path: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path)
}

pub fn family(name: &str, container: &str) -> Checkpoint {
    let folder = fixtures("families").join(name).join(container);
    let gguf = folder.join("model.gguf");
    Checkpoint::open(if gguf.is_file() { gguf } else { folder }).unwrap()
}

/// What `tests/peers/importance.py` has seen with transformers: for each module counts and sums of squares.
fn expected(family: &str) -> BTreeMap<String, (Vec<f64>, Vec<f64>)> {
    let path = fixtures("importance").join(format!("{family}.safetensors"));
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let numbers = |name: String| -> Vec<f64> {
        tensors[&name].to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    let modules = tensors.keys().filter_map(|name| name.strip_suffix(".counts"));
    let of = |module: &str| (numbers(format!("{module}.counts")), numbers(format!("{module}.in_sum2")));
    modules.map(|module| (module.to_owned(), of(module))).collect()
}

/// The two texts of that script.
pub fn texts(family: &str) -> CalibrationText {
    let path = fixtures("families").join(family).join("hf/refs.safetensors");
    let tokens = &candle_core::safetensors::load(path, &Device::Cpu).unwrap()["tokens"];
    let tokens: Vec<u32> = tokens.to_dtype(DType::U32).unwrap().to_vec1().unwrap();
    CalibrationText::of_tokens(tokens.chunks(tokens.len() / 2).map(<[u32]>::to_vec).collect()).unwrap()
}

fn collect(source: &Checkpoint, text: &CalibrationText) -> Statistics {
    let mut collector = Collector::new(source, text).unwrap();
    while collector.advance().unwrap() {}
    collector.statistics()
}

/// Mean squares, of which those of old files are rounded to f32.
#[track_caller]
fn assert_means(found: &Statistics, expected: &BTreeMap<String, (Vec<f64>, Vec<f64>)>, most: f64) {
    let modules: Vec<_> = found.modules().map(|(module, _)| module).collect();
    assert_eq!(modules, expected.keys().collect::<Vec<_>>());
    for (module, sums) in found.modules() {
        let (counts, squares) = &expected[module];
        assert_eq!(sums.counts().len(), counts.len(), "{module}");
        let k = sums.columns();
        for (expert, count) in counts.iter().enumerate() {
            let row = expert * k..(expert + 1) * k;
            let mean = |sum: &f64, count: f64| sum / count.max(1.);
            let own = sums.counts()[expert] as f64;
            let expected: Vec<_> = squares[row.clone()].iter().map(|sum| mean(sum, *count)).collect();
            let largest = expected.iter().fold(0f64, |a, b| a.max(*b));
            for (found, expected) in sums.squares()[row].iter().zip(expected) {
                let found = mean(found, own);
                assert!(
                    (found - expected).abs() <= most * largest,
                    "{module}, {expert}: {found}, {expected}"
                );
            }
        }
    }
}

#[test]
fn sums_are_those_of_transformers() {
    for name in ["qwen3", "qwen3_moe"] {
        let (expected, text) = (expected(name), texts(name));
        // Its GGUF file is of another model, without a dense layer.
        let containers: &[&str] = if name == "qwen3" { &["hf", "gguf"] } else { &["hf"] };
        for container in containers {
            let statistics = collect(&family(name, container), &text);
            assert_means(&statistics, &expected, 1e-5);
            for (module, sums) in statistics.modules() {
                let counts: Vec<_> = sums.counts().iter().map(|count| *count as f64).collect();
                assert_eq!(counts, expected[module].0, "{name}, {module}");
            }
        }
    }
}

#[test]
fn imatrix_files_of_either_kind_say_the_same() {
    for name in ["qwen3", "qwen3_moe"] {
        let source = family(name, "hf");
        for file in ["dat", "gguf"] {
            let statistics = read_imatrix(&source, fixtures("importance").join(format!("{name}.{file}")));
            assert_means(&statistics.unwrap(), &expected(name), 1e-6);
        }
    }
}

#[test]
fn damaged_imatrix_files_are_refused_with_their_names() {
    let source = family("qwen3_moe", "hf");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("imatrix");
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = read_imatrix(&source, &path).unwrap_err().to_string();
        assert!(error.contains("imatrix"), "{error}");
        error
    };
    let old = fs::read(fixtures("importance/qwen3_moe.dat")).unwrap();
    // Behind the entries there are only the number of calls and the name of the text.
    for len in 0..old.len() - 17 {
        refused(&old[..len]);
    }
    let gguf = fs::read(fixtures("importance/qwen3_moe.gguf")).unwrap();
    // The last of it is one number and what fills it up.
    for len in (0..gguf.len() - 32).step_by(7) {
        refused(&gguf[..len]);
    }
    let entry = |name: &str, calls: i32, values: &[f32]| {
        let (len, count) = (name.len() as i32, values.len() as i32);
        let values = values.iter().flat_map(|value| value.to_le_bytes());
        let bytes =
            [&len.to_le_bytes()[..], name.as_bytes(), &calls.to_le_bytes(), &count.to_le_bytes()].concat();
        bytes.into_iter().chain(values).collect::<Vec<u8>>()
    };
    let file = |entries: &[Vec<u8>]| [&(entries.len() as i32).to_le_bytes()[..], &entries.concat()].concat();
    let q = "blk.0.attn_q.weight";
    for (entries, expected) in [
        (vec![entry(q, 1, &[f32::NAN; 64])], "finite"),
        (vec![entry(q, 1, &[-1.; 64])], "below zero"),
        (vec![entry(q, 0, &[1.; 64])], "`blk.0.attn_q.weight` (entry 0 of 1)"),
        (vec![entry(q, -1, &[1.; 64])], "below zero"),
        (vec![entry(q, 1, &[])], "calls and values"),
        (vec![entry(q, 1, &[1.; 64]), entry(q, 1, &[1.; 64])], "each name once"),
        (vec![entry("other", 1, &[1.; 64])], "without an entry for a weight of the model"),
        (vec![], "without an entry"),
    ] {
        let error = refused(&file(&entries));
        assert!(error.contains(expected), "{error}");
    }
    // Files are not trusted to be small.
    refused(&[&1i32.to_le_bytes()[..], &i32::MAX.to_le_bytes()].concat());
    let model = fixtures("families/qwen3_moe/gguf/model.gguf");
    let error = read_imatrix(&source, model).unwrap_err().to_string();
    assert!(error.contains("`general.type` \"imatrix\""), "{error}");
}

const MUTATIONS: usize = 20_000;

/// Whatever the bytes are, there is an error or a file that says something, and no panic.
#[test]
fn mutations_are_errors_or_read() {
    let source = family("qwen3_moe", "hf");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mutated");
    let text = texts("qwen3_moe");
    let mut collector = Collector::new(&source, &text).unwrap();
    collector.write(&path).unwrap();
    assert!(Statistics::read(&source, &path).is_err());
    while collector.advance().unwrap() {}
    collector.write(&path).unwrap();
    let kept = fs::read(&path).unwrap();
    let mut rng = StdRng::seed_from_u64(26);
    let mut mutated = |original: &[u8], read: &dyn Fn() -> bool| {
        (0..MUTATIONS)
            .filter(|_| {
                let mut bytes = original.to_vec();
                for _ in 0..rng.random_range(1..4) {
                    // Headers are shorter than what follows them.
                    let end = if rng.random_bool(0.5) { 400 } else { bytes.len() };
                    let at = rng.random_range(0..end);
                    bytes[at] = rng.random();
                }
                fs::write(&path, bytes).unwrap();
                read()
            })
            .count()
    };
    for file in ["dat", "gguf"] {
        let bytes = fs::read(fixtures("importance").join(format!("qwen3_moe.{file}"))).unwrap();
        let read = mutated(&bytes, &|| read_imatrix(&source, &path).is_ok());
        assert!((1..MUTATIONS).contains(&read), "{file}: {read}");
    }
    let read = mutated(&kept, &|| Statistics::read(&source, &path).is_ok());
    assert!((1..MUTATIONS).contains(&read), "{read}");
}

/// Some of the held-out stories.
pub fn stories(range: std::ops::Range<usize>) -> String {
    let text = fs::read_to_string(bundled_path("heldout.txt")).unwrap();
    let stories: Vec<_> = text.split("\n\n").collect();
    stories[range].join("\n\n")
}

#[test]
fn an_interrupted_collection_comes_to_the_same_bytes() {
    let source = bundled("tiny-bf16");
    let text = CalibrationText::new(&source, &stories(0..6), 64).unwrap();
    assert!(text.pieces().iter().all(|piece| piece.len() <= 64) && text.pieces().len() > 6);
    let folder = tempfile::tempdir().unwrap();
    let [whole, parts, other] = ["whole", "parts", "other"].map(|name| folder.path().join(name));
    let mut collector = Collector::new(&source, &text).unwrap();
    assert!(!collector.take_up(&whole).unwrap());
    while collector.advance().unwrap() {}
    collector.write(&whole).unwrap();
    let mut runs = 0;
    loop {
        let mut collector = Collector::new(&source, &text).unwrap();
        let is_done = collector.take_up(&parts).unwrap();
        assert_eq!(collector.done(), ((3 * runs).min(text.pieces().len()), text.pieces().len()));
        if is_done {
            break;
        }
        for _ in 0..3 {
            collector.advance().unwrap();
        }
        collector.write(&parts).unwrap();
        runs += 1;
        if runs == 1 {
            let error = Statistics::read(&source, &parts).unwrap_err().to_string();
            assert!(error.contains("statistics of 3 pieces of"), "{error}");
        }
    }
    assert!(runs > 2);
    assert_eq!(fs::read(&whole).unwrap(), fs::read(&parts).unwrap());
    assert_eq!(Statistics::read(&source, &whole).unwrap().digest(), collector.statistics().digest());

    let another = CalibrationText::new(&source, &stories(6..7), 64).unwrap();
    let error = Collector::new(&source, &another).unwrap().take_up(&whole).unwrap_err().to_string();
    assert!(error.contains("statistics of another text"), "{error}");
    let error = Collector::new(&bundled("tiny"), &text).unwrap().take_up(&whole).unwrap_err().to_string();
    assert!(error.contains("statistics of another source"), "{error}");
    let bytes = fs::read(&whole).unwrap();
    for len in (0..bytes.len()).step_by(997) {
        fs::write(&other, &bytes[..len]).unwrap();
        let error = Statistics::read(&source, &other).unwrap_err().to_string();
        assert!(error.contains("no statistics"), "{error}");
    }
}

#[test]
fn texts_without_anything_are_refused() {
    let source = bundled("tiny-bf16");
    assert!(CalibrationText::new(&source, " \n\n ", 64).is_err());
    assert!(CalibrationText::of_tokens(vec![vec![]]).is_err());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    for (bytes, expected) in [(&b"\n"[..], "an empty text"), (b"\xff\xfe", "no text in UTF-8")] {
        fs::write(&path, bytes).unwrap();
        let error = CalibrationText::read(&source, &path).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("text"), "{error}");
    }
    let beyond = CalibrationText::of_tokens(vec![vec![640]]).unwrap();
    assert!(Collector::new(&source, &beyond).unwrap().advance().is_err());
}

#[test]
fn sums_do_not_depend_on_the_number_of_threads() {
    let source = family("qwen3_moe", "hf");
    let text = texts("qwen3_moe");
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| collect(&source, &text).digest())
    };
    assert_eq!(with(1), with(3));
}

pub fn options(format: &str) -> ConvertOptions {
    ConvertOptions::mlx(Recipe::named("uniform", format.parse().unwrap()).unwrap())
}

fn measured(source: &Checkpoint, options: &ConvertOptions) -> ConvertReport {
    convert::measure(&ConvertPlan::new(source, options).unwrap(), &|_| ()).unwrap()
}

/// The sum of squared errors, relative to their weights, as columns count.
fn weighted(report: &ConvertReport) -> f64 {
    report.tensors.iter().map(|tensor| tensor.weighted_rms.unwrap().powi(2)).sum()
}

#[test]
fn a_search_by_statistics_saves_what_they_weigh() {
    let source = bundled("tiny-bf16");
    let statistics = Arc::new(collect(&source, &CalibrationText::new(&source, &stories(0..8), 512).unwrap()));
    for (format, saved) in [("2", 0.02), ("4", 0.01), ("mxfp4", 0.001), ("nvfp4", 0.001)] {
        let mut options = options(format);
        assert!(measured(&source, &options).tensors.iter().all(|tensor| tensor.weighted_rms.is_none()));
        options.search = true;
        options.statistics = Some(statistics.clone());
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let packed = plan.tensors().filter(|tensor| tensor.shape.len() > 1);
        assert!(packed.into_iter().all(|tensor| tensor.to.ends_with(", searched by statistics")));
        let by_statistics = measured(&source, &options);
        // The search alone, measured by them.
        options.search = false;
        let plain = measured(&source, &options);
        assert!(weighted(&by_statistics) < weighted(&plain));
        options.search = true;
        options.statistics = None;
        let searched = convert(&source, &options);
        let searched = weighted_by_hand(&source, searched.path(), &statistics);
        let found = 1. - weighted(&by_statistics) / searched;
        println!("{format}: {:.1} %", found * 100.);
        assert!(found >= saved, "{format}: {found}");
        options.statistics = Some(statistics.clone());
        let out = convert(&source, &options);
        let by_hand = weighted_by_hand(&source, out.path(), &statistics);
        assert!((weighted(&by_statistics) / by_hand - 1.).abs() < 1e-4, "{by_hand}");
    }
}

/// As [`weighted`], of the stored numbers.
fn weighted_by_hand(source: &Checkpoint, out: PathBuf, statistics: &Statistics) -> f64 {
    let out = Checkpoint::open(out).unwrap();
    let numbers = |checkpoint: &Checkpoint, module: &str| -> Vec<f64> {
        let dense = checkpoint.weight(module, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
        dense.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect()
    };
    let of_module = |module: &str| {
        let stored = if module == "lm_head" { "model.embed_tokens" } else { module };
        let sums = statistics.module(module).unwrap();
        let (before, after) = (numbers(source, stored), numbers(&out, stored));
        let columns = sums.squares().iter().cycle();
        let (error, all) =
            before.iter().zip(after).zip(columns).fold((0., 0.), |(error, all), ((a, b), column)| {
                (error + (a - b).powi(2) * column, all + a.powi(2) * column)
            });
        error / all
    };
    statistics.modules().map(|(module, _)| of_module(module)).sum()
}

#[test]
fn statistics_of_another_model_are_refused() {
    let mut options = options("4");
    options.search = true;
    for (name, expected) in
        [("qwen3", "statistics of a weight"), ("qwen3_moe", "they are those of another model")]
    {
        options.statistics = Some(Arc::new(collect(&family(name, "hf"), &texts(name))));
        let error = ConvertPlan::new(&bundled("tiny-bf16"), &options).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("`model."), "{error}");
    }
}

/// Experts count by what each of them is given, whatever layout they get.
#[test]
fn experts_have_columns_of_their_own() {
    let source = family("qwen3_moe", "hf");
    let statistics = Arc::new(collect(&source, &texts("qwen3_moe")));
    let mut options = options("affine:2:g32");
    options.search = true;
    let without = tensors(convert(&source, &options).path());
    options.statistics = Some(statistics);
    let plan = ConvertPlan::new(&source, &options).unwrap();
    assert!(
        plan.notes().iter().any(|note| note.contains("no statistics of 1 packed weights")),
        "{:?}",
        plan.notes()
    );
    let with = tensors(convert(&source, &options).path());
    let name = "model.layers.1.mlp.switch_mlp.gate_proj.scales";
    let [a, b] = [&with[name], &without[name]];
    assert_eq!((&a.1, a.1[0]), (&b.1, 4));
    let of_expert = a.2.len() / 4;
    assert!(a.2.chunks(of_expert).zip(b.2.chunks(of_expert)).all(|(a, b)| a != b));
}

#[test]
fn bits_go_where_outputs_lose_most() {
    let source = bundled("tiny-bf16");
    let mut options = options("4");
    let candidates = ["2".parse().unwrap(), "4".parse().unwrap(), "8".parse().unwrap()];
    let plain = BitAllocation::new(&source, &options, &candidates).unwrap();
    let plain =
        (plain.measure(&|_| ()).unwrap(), plain.recipe(&plain.measure(&|_| ()).unwrap(), 4.).unwrap());
    options.statistics =
        Some(Arc::new(collect(&source, &CalibrationText::new(&source, &stories(0..4), 512).unwrap())));
    let weighted = BitAllocation::new(&source, &options, &candidates).unwrap();
    let error = weighted.recipe(&plain.0, 4.).map(drop).unwrap_err().to_string();
    assert!(error.contains("statistics"), "{error}");
    let sensitivities = weighted.measure(&|_| ()).unwrap();
    let name = "model.layers.1.mlp.down_proj.weight";
    let of = |sensitivities: &Sensitivities| sensitivities.relative_rms(name, candidates[0]).unwrap();
    assert_ne!(of(&sensitivities), of(&plain.0));
    let mut uniform = options.clone();
    uniform.recipe = Recipe::named("uniform", candidates[0]).unwrap();
    let expected = measured(&source, &uniform);
    let expected = expected.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    assert_eq!(of(&sensitivities), expected.weighted_rms.unwrap());
    weighted.recipe(&sensitivities, 4.).unwrap();
}

/// Blocks of GGUF files, too, of every type.
#[test]
fn blocks_are_searched_for_by_statistics() {
    let source = bundled("tiny-bf16");
    let statistics = Arc::new(collect(&source, &CalibrationText::new(&source, &stories(0..4), 512).unwrap()));
    for kind in GgmlType::ALL {
        let format = kind.name().to_lowercase();
        let mut options = ConvertOptions::gguf(Recipe::named("uniform", format.parse().unwrap()).unwrap());
        options.search = true;
        let lost = |options: &ConvertOptions| {
            let out = convert(&source, options);
            weighted_by_hand(&source, out.path().join("model.gguf"), &statistics)
        };
        let searched = lost(&options);
        options.statistics = Some(statistics.clone());
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let packed = plan.tensors().filter(|tensor| tensor.shape.len() > 1);
        assert!(packed.into_iter().all(|tensor| tensor.to.ends_with(", searched by statistics")));
        let by_statistics = lost(&options);
        println!("{format}: {:.1} %", (1. - by_statistics / searched) * 100.);
        assert!(by_statistics < searched, "{format}: {by_statistics}, {searched}");
        let report = measured(&source, &options);
        // Norms become F32, and are not packed.
        let packed = report.tensors.iter().filter_map(|tensor| tensor.weighted_rms);
        let measured: f64 = packed.map(|rms| rms.powi(2)).sum();
        assert!((measured / by_statistics - 1.).abs() < 1e-4, "{format}: {measured}, {by_statistics}");
        options.feedback = Some(Arc::new(CalibrationText::new(&source, &stories(0..1), 512).unwrap()));
        let error = ConvertPlan::new(&source, &options).map(drop).unwrap_err().to_string();
        assert!(error.contains("feedback for `") && error.contains("--feedback"), "{error}");
    }
}
