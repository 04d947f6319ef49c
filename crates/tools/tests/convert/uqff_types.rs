//! Types of GGML and of mistral.rs in UQFF files: what is written is read back, and what can't be is told.

use super::common::{convert, json_file, tensors_of, Source};
use super::uqff::{fixture, open, uqff};
use candle_core::{DType, Device};
use candle_quant::checkpoint::Checkpoint;
use candle_quant::format::{GgmlType, UqffType};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Spec, Target};
use candle_quant_tools::verify;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// Every layer of one type.
fn uniform(format: &str) -> ConvertOptions {
    ConvertOptions::uqff(Recipe::named("uniform", format.parse().unwrap()).unwrap())
}

fn with_search(mut options: ConvertOptions, search: bool) -> ConvertOptions {
    options.search = search;
    options
}

fn strict(mut options: ConvertOptions) -> ConvertOptions {
    options.strict = true;
    options
}

fn numbers(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let numbers = checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    numbers.flatten_all().unwrap().to_vec1().unwrap()
}

fn error(of: &ConvertOptions, source: &Checkpoint) -> String {
    ConvertPlan::new(source, of).map(drop).unwrap_err().to_string()
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

const NAMES: [&str; 3] = [
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.embed_tokens.weight",
];

/// What is such a type already is written byte for byte, and named as what it is.
#[test]
fn whole_weights_are_written_as_they_lie() {
    for (name, file) in [("hqq4", "hqq4-0.uqff"), ("f8q8", "f8q8-0.uqff"), ("fp8", "fp8-0.uqff")] {
        let source = open(&format!("uqff/{name}"));
        let out = convert(&source, &strict(uniform(name)));
        let files = |folder: &Path| {
            let mut all = BTreeMap::new();
            for file in std::fs::read_dir(folder).unwrap() {
                let path = file.unwrap().path();
                if path.extension().is_some_and(|end| end == "uqff") {
                    all.extend(tensors_of(&path));
                }
            }
            all
        };
        let (before, after) = (files(&fixture(&format!("uqff/{name}"))), files(&out.path()));
        let of_layers = |all: &BTreeMap<String, _>| {
            all.keys().filter(|entry| entry.contains(".weight")).cloned().collect::<Vec<_>>()
        };
        assert!(before.len() > 20 && of_layers(&before) == of_layers(&after), "{name}");
        for entry in of_layers(&before) {
            assert!(before[&entry] == after[&entry], "{name} {entry}");
        }
        let report = json_file(out.path().join("uqff_report.json"));
        let counts = report["outputs"][0]["actual_counts"].as_object().unwrap();
        assert!(counts.len() == 1 && counts[name].as_u64() > Some(3), "{name}: {counts:?}");
        assert!(
            out.path().join(file).is_file()
                && verify::verify(&Checkpoint::open(out.path()).unwrap()).passed(true)
        );

        // Anew is another matter.
        let mut anew = uniform("q8_0");
        anew.requantize = true;
        let anew = convert(&source, &anew);
        assert_eq!(json_file(anew.path().join("uqff_report.json"))["outputs"][0]["quant"], "q8_0");
    }
}

/// What the reader makes of a file is what the quantizer says that it has written, bit for bit.
#[test]
fn every_type_is_read_back() {
    let source = open("convert/qwen3_s");
    let of_ggml = GgmlType::ALL.into_iter().filter(|kind| !matches!(kind, GgmlType::Mxfp4 | GgmlType::Nvfp4));
    let mut types = 0;
    for kind in of_ggml {
        let name = kind.name().to_lowercase();
        for search in [false, true] {
            let out = convert(&source, &with_search(uniform(&name), search));
            let written = Checkpoint::open(out.path()).unwrap();
            assert!(verify::verify(&written).passed(true), "{name}");
            for tensor in NAMES {
                let weights = numbers(&source, tensor);
                let (mut blocks, mut values) = (Vec::new(), vec![0.; weights.len()]);
                kind.quantize(&weights, search, &mut blocks, &mut values).unwrap();
                assert!(numbers(&written, tensor) == values, "{name} {tensor}");
                let file = out.path().join(format!("{}-0.uqff", name.replace("_k", "k")));
                assert!(tensors_of(&file)[tensor].2 == blocks, "{name} {tensor}");
            }
        }
        types += 1;
    }
    for kind in UqffType::ALL {
        for search in [false, true] {
            let out = convert(&source, &with_search(uniform(kind.name()), search));
            let written = Checkpoint::open(out.path()).unwrap();
            assert!(verify::verify(&written).passed(true), "{}", kind.name());
            for tensor in NAMES {
                let values = kind.quantize(&numbers(&source, tensor), search).unwrap().values;
                assert!(numbers(&written, tensor) == values, "{} {tensor}", kind.name());
            }
        }
        types += 1;
    }
    assert_eq!(types, 14);
}

/// A search leaves a smaller squared error than what mistral.rs writes.
#[test]
fn searches_lose_less() {
    let weights = numbers(&open("convert/qwen3_s"), NAMES[0]);
    for (kind, share) in
        [(UqffType::Hqq4, 0.98), (UqffType::Hqq8, 0.99), (UqffType::Fp8, 1.), (UqffType::F8q8, 0.2)]
    {
        let of = |search| squared_error(&weights, &kind.quantize(&weights, search).unwrap().values);
        let (plain, searched) = (of(false), of(true));
        println!("{kind:?}: {plain:.3e}, searched {:.3} of it", searched / plain);
        assert!(searched <= share * plain, "{kind:?} {plain} {searched}");
    }
}

/// Codes and scales of super-blocks are searched for.
#[test]
fn q4_k_is_laid_out_as_by_mistralrs_and_loses_less() {
    let source = open("convert/qwen3_s");
    let out = convert(&source, &uqff("q4k"));
    let expected = fixture("uqff/q4k");
    let entries = |folder: &Path| {
        let entries = tensors_of(&folder.join("q4k-0.uqff")).into_iter();
        entries.map(|(name, (dtype, dims, bytes))| (name, dtype, dims, bytes.len())).collect::<Vec<_>>()
    };
    assert_eq!(entries(&out.path()), entries(&expected));
    let reported = |folder: &Path| json_file(folder.join("uqff_report.json"))["outputs"].clone();
    assert_eq!(reported(&out.path()), reported(&expected));
    for name in NAMES {
        let exact = numbers(&source, name);
        let of = |folder: &Path| squared_error(&exact, &numbers(&Checkpoint::open(folder).unwrap(), name));
        assert!(of(&out.path()) < 0.97 * of(&expected), "{name}");
    }
}

/// Blocks of GGML's types stay what they are, from UQFF to GGUF and back.
#[test]
fn blocks_go_to_gguf_and_back() {
    for (name, shard) in [("q8_0", "q8_0-0.uqff"), ("q4k", "q4k-0.uqff")] {
        let file = convert(&open(&format!("uqff/{name}")), &ConvertOptions::gguf(Recipe::safe(Spec::Keep)));
        let back = convert(&Checkpoint::open(file.path()).unwrap(), &uqff("keep"));
        let (found, expected) = (back.path().join(shard), fixture("uqff").join(name).join(shard));
        assert!(tensors_of(&found) == tensors_of(&expected), "{name}");
    }
}

/// Rows that are no super-blocks become what mistral.rs makes of them, and other rows stay.
#[test]
fn rows_of_no_whole_blocks() {
    let source =
        Source::new().random("l.0.mlp.up_proj.weight", &[4, 96]).random("l.0.mlp.down_proj.weight", &[4, 40]);
    let source = source.finish();
    for (asked, becomes) in [
        ("q2_k", "q4_0"),
        ("q3_k", "q4_0"),
        ("q4_k", "q4_1"),
        ("q5_k", "q5_0"),
        ("q6_k", "q5_1"),
        ("q4_1", "q4_1"),
        ("hqq4", "hqq4"),
        ("f8q8", "f8q8"),
    ] {
        let plan = ConvertPlan::new(&source.open(), &uqff(asked)).unwrap();
        let of = |name: &str| plan.tensors().find(|tensor| tensor.name.contains(name)).unwrap();
        assert_eq!((of("up").to.as_str(), of("up").fallback.is_some()), (becomes, asked != becomes));
        let (down, is_whole) = (of("down"), matches!(asked, "f8q8"));
        assert_eq!(down.to == asked, is_whole, "{asked}: {down:?}");
        let out = convert(&source.open(), &uqff(asked));
        let written = Checkpoint::open(out.path()).unwrap();
        assert!(verify::verify(&written).passed(false), "{asked}");
        // Blocks of F8Q8 go on in the next row.
        let weights = numbers(&source.open(), "l.0.mlp.down_proj.weight");
        let expected = match is_whole {
            true => UqffType::F8q8.quantize(&weights, false).unwrap().values,
            false => weights,
        };
        assert!(numbers(&written, "l.0.mlp.down_proj.weight") == expected, "{asked}");
    }
    let options = strict(uqff("q4_1"));
    let told = error(&options, &source.open());
    assert!(told.contains("rows of 40 are no whole number of groups of 32"), "{told}");
}

/// mistral.rs has biases beside blocks and HQQ in F32.
#[test]
fn biases_are_wide_where_those_of_mistralrs_are() {
    let source = Source::new()
        .random("l.0.mlp.up_proj.weight", &[4, 64])
        .random("l.0.mlp.up_proj.bias", &[4])
        .random("l.0.input_layernorm.weight", &[64])
        .finish();
    for (format, dtype) in [("q4_0", "F32"), ("hqq8", "F32"), ("f8q8", "F32"), ("fp8", "BF16"), ("4", "BF16")]
    {
        let mut options = uqff(format);
        options.dtype = Some(DType::BF16);
        let out = convert(&source.open(), &options);
        let name = "l.0.mlp.up_proj.bias";
        let stored = if format == "4" { "afq4" } else { format };
        let shard = tensors_of(&out.path().join(format!("{stored}-0.uqff")));
        assert_eq!(shard[name].0.to_string(), dtype, "{format}");
        let expected = numbers(&source.open(), name);
        let found = numbers(&Checkpoint::open(out.path()).unwrap(), name);
        assert!(expected.iter().zip(found).all(|(a, b)| (a - b).abs() <= a.abs() / 256.), "{format}");
    }
}

/// Experts have none of the types that are made of matrices.
#[test]
fn stacks_of_experts_stay_where_there_is_no_type() {
    let source = open("convert/qwen3moe_s");
    for format in ["hqq4", "fp8", "f8q8"] {
        let plan = ConvertPlan::new(&source, &uqff(format)).unwrap();
        let experts: Vec<_> = plan.tensors().filter(|tensor| tensor.name.contains(".experts.")).collect();
        assert!(!experts.is_empty());
        for tensor in experts {
            let reason = tensor.fallback.as_deref().unwrap();
            assert!(tensor.to == "BF16" && reason.contains("experts, of which"), "{format}: {tensor:?}");
        }
        let told = error(&strict(uqff(format)), &source);
        assert!(told.contains("experts, of which mistral.rs reads none"), "{told}");
    }
    // Blocks of GGML's types have.
    let out = convert(&source, &uqff("q4_0"));
    let written = Checkpoint::open(out.path()).unwrap();
    assert!(verify::verify(&written).passed(true));
    let experts = written.weight("model.layers.0.mlp.experts.up_proj", None).unwrap();
    assert!(experts.format_name().contains("Q4_0"), "{}", experts.format_name());
}

/// Each type has its files, which are those of a model of this type alone, but for the residual, which all share.
#[test]
fn several_types_share_what_is_in_no_shard() {
    let source = open("convert/qwen3_s");
    let recipe = |format: &str| Target::Uqff.usual_recipe(format.parse().unwrap());
    let formats = [("4", "afq4"), ("q8_0", "q8_0"), ("hqq4", "hqq4")];
    let out = convert(
        &source,
        &ConvertOptions::uqff_of_several(formats.map(|(format, _)| recipe(format))).unwrap(),
    );
    let report = json_file(out.path().join("uqff_report.json"));
    assert_eq!(report["outputs"].as_array().unwrap().len(), 3);
    for (index, (format, name)) in formats.into_iter().enumerate() {
        let shard = format!("{name}-0.uqff");
        let alone = convert(&source, &uqff(format));
        for file in [&shard, "residual.safetensors", "config.json"] {
            let read = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
            assert!(read(&out.path()) == read(&alone.path()), "{file}");
        }
        let expected = json_file(alone.path().join("uqff_report.json"))["outputs"][0].clone();
        assert_eq!(report["outputs"][index], expected);
        assert_eq!(report["outputs"][index]["shards"], json!([shard]));
        let written = Checkpoint::open(out.path().join(&shard)).unwrap();
        assert!(verify::verify(&written).passed(false), "{name}");
        let one = Checkpoint::open(alone.path()).unwrap();
        assert!(written.tensor_names().eq(one.tensor_names()));
        assert!(numbers(&written, NAMES[0]) == numbers(&one, NAMES[0]));
    }
    // A folder of several is none of them.
    let told = Checkpoint::open(out.path()).map(drop).unwrap_err().to_string();
    assert!(told.contains("3 UQFF models"), "{told}");
}

#[test]
fn several_types_that_are_none_are_refused() {
    let source = open("convert/qwen3_s");
    let recipe = |format: &str| Target::Uqff.usual_recipe(format.parse().unwrap());
    let twice = ConvertOptions::uqff_of_several([recipe("4"), recipe("4:g32")]).unwrap();
    let told = error(&twice, &source);
    assert!(told.contains("`afq4-0.uqff` twice"), "{told}");
    assert!(ConvertOptions::uqff_of_several([]).is_err());
    let mut gguf = ConvertOptions::gguf(recipe("q4_0"));
    gguf.also = vec![recipe("q8_0")];
    let told = error(&gguf, &source);
    assert!(
        told.contains("several forms of a model in a GGUF file") && told.contains("one format"),
        "{told}"
    );
    let plan = ConvertOptions::uqff_of_several([recipe("4"), recipe("q8_0")]).unwrap();
    let told = ConvertPlan::new(&source, &plan).unwrap().recipe_toml().unwrap_err().to_string();
    assert!(told.contains("of each format alone"), "{told}");
}

#[test]
fn types_of_other_files_are_refused_with_a_way_on() {
    let source = open("convert/qwen3_s");
    for (format, remedy) in [("q4_1", "write --to gguf or uqff"), ("hqq4", "write --to uqff")] {
        let recipe = || Recipe::safe(format.parse().unwrap());
        for options in [ConvertOptions::mlx(recipe()), ConvertOptions::hugging_face(recipe())] {
            let told = error(&options, &source);
            assert!(told.contains(&format!("as {format} (")) && told.contains(remedy), "{told}");
        }
    }
    let told = error(&ConvertOptions::gguf(Recipe::safe("fp8".parse().unwrap())), &source);
    assert!(told.contains("as fp8 (") && told.contains("a GGUF file"), "{told}");
    for unknown in ["q8_1", "q8k", "hqq3", "q4_2", "fp16"] {
        let told = unknown.parse::<Spec>().unwrap_err().to_string();
        assert!(told.contains("q4_0, q4_1") && told.contains("hqq4, hqq8, fp8, f8q8"), "{told}");
    }
}
