//! Topologies of mistral.rs, its own examples among them.

use super::common::{convert, Source};
use candle_quant::checkpoint::Weight;
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe};
use std::collections::BTreeMap;

/// `topologies/isq_regex.yml` of mistral.rs 0.9.5.
const ISQ_REGEX: &str = r"'/model\.language_model\.layers\.(\d+)\.self_attn\..*$/':
  isq: afq3
'/model\.language_model\.layers\.(\d+)\.mlp\..*$/':
  isq: afq4
";

/// `topologies/isq.yml`.
const ISQ: &str = "0-8:
  isq: Q3K
8-16:
  isq: Q4K
16-24:
  isq: Q6K
# Skip 24-28
28-32:
  isq: Q8_0";

/// The examples of its guide.
const DEVICES: &str = "0-16:
  device: cuda[0]
  isq: q4k
16-32:
  device: cuda[1]
  isq: q4k
32-40:
  device: cpu
  isq: q8_0
";
const NAMES: &str = r"/model\.layers\.\d+\.self_attn\..*/:
  isq: q8_0
/lm_head\..*/:
  device: cpu
";

/// A decoder of so many layers, with names that begin like this.
fn decoder(prefix: &str, layers: usize) -> Source {
    let mut source = Source::new()
        .with_config(&format!(r#"{{"num_hidden_layers": {layers}, "tie_word_embeddings": false}}"#))
        .random(&format!("{prefix}.embed_tokens.weight"), &[32, 64])
        .random("lm_head.weight", &[32, 64])
        .random(&format!("{prefix}.norm.weight"), &[64]);
    for layer in 0..layers {
        for module in ["self_attn.q_proj", "mlp.up_proj", "mlp.gate"] {
            source = source.random(&format!("{prefix}.layers.{layer}.{module}.weight"), &[32, 64]);
        }
    }
    source.finish()
}

/// The formats of the matrices that are written, by their modules; `dense` of those that are not packed.
fn written(source: &Source, topology: &str) -> BTreeMap<String, String> {
    let recipe = Recipe::from_text("topology.YML", topology).unwrap();
    let out = convert(&source.open(), &ConvertOptions::mlx(recipe));
    let out = Checkpoint::open(out.path()).unwrap();
    let format = |module: &String| match out.weight(module, None).unwrap() {
        Weight::Packed(packed) => format!("{:#}", packed.format()),
        _ => "dense".to_owned(),
    };
    out.modules().iter().map(|module| (module.clone(), format(module))).collect()
}

#[test]
fn the_example_of_names_packs_what_it_names() {
    let formats = written(&decoder("model.language_model", 2), ISQ_REGEX);
    for layer in 0..2 {
        let of = |module: &str| formats[&format!("model.language_model.layers.{layer}.{module}")].as_str();
        assert_eq!(
            [of("self_attn.q_proj"), of("mlp.up_proj"), of("mlp.gate")],
            ["affine:3:g64", "affine:4:g64", "dense"]
        );
    }
    assert_eq!(formats["lm_head"], "dense");
    assert_eq!(formats["model.language_model.embed_tokens"], "dense");
}

/// As the example of ranges, which skips layers 24 to 27, with types that are written here.
#[test]
fn ranges_end_before_their_last_layer() {
    let types = [("Q3K", "AFQ3"), ("Q4K", "AFQ4"), ("Q6K", "AFQ6"), ("Q8_0", "MXFP4")];
    let topology = types.iter().fold(ISQ.to_owned(), |text, (theirs, ours)| text.replace(theirs, ours));
    let formats = written(&decoder("model", 32), &topology);
    for layer in 0..32 {
        let expected = match layer {
            0..8 => "affine:3:g64",
            8..16 => "affine:4:g64",
            16..24 => "affine:6:g64",
            24..28 => "dense",
            _ => "mxfp4",
        };
        for module in ["self_attn.q_proj", "mlp.up_proj"] {
            assert_eq!(formats[&format!("model.layers.{layer}.{module}")], expected, "{layer}");
        }
    }
}

/// The example of ranges as it is, whose types of GGML are those of UQFF and GGUF files. Rows of 64 are no super-blocks.
#[test]
fn types_of_ggml_are_written() {
    let recipe = Recipe::from_text("topology.yml", ISQ).unwrap();
    let plan = ConvertPlan::new(&decoder("model", 32).open(), &ConvertOptions::uqff(recipe)).unwrap();
    for (layer, becomes) in [(0, "q4_0"), (8, "q4_1"), (16, "q5_1"), (24, "F32"), (31, "q8_0")] {
        let name = format!("model.layers.{layer}.mlp.up_proj.weight");
        let tensor = plan.tensors().find(|tensor| tensor.name == name).unwrap();
        assert_eq!(tensor.to, becomes, "{layer}");
    }
    let recipe = Recipe::from_text("topology.yml", "0-1: {isq: HQQ4}\n1-2: {isq: fp8}").unwrap();
    let plan = ConvertPlan::new(&decoder("model", 2).open(), &ConvertOptions::uqff(recipe)).unwrap();
    let formats: Vec<_> = plan.tensors().map(|tensor| tensor.to.as_str()).collect();
    assert!(formats.contains(&"hqq4") && formats.contains(&"fp8"), "{formats:?}");
}

#[test]
fn examples_with_other_types_or_devices_are_refused() {
    let q8k = ISQ.replace("Q3K", "Q8K");
    for (text, parts) in [
        (
            q8k.as_str(),
            ["key `0-8`", "`Q8K`, which mistral.rs makes and candle-quant does not", "afq2, afq3, afq4"],
        ),
        (DEVICES, ["key `0-16`", "`device: cuda[0]`", "remove the line"]),
        (NAMES, [r"key `/lm_head\..*/`", "`device: cpu`", "remove the line"]),
    ] {
        let error = Recipe::from_text("dir/topology.yaml", text).unwrap_err().to_string();
        assert!(error.contains("dir/topology.yaml"), "{error}");
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn what_a_file_is_called_says_what_it_is() {
    assert!(Recipe::from_text("t.yml", "0-8: {isq: afq4}").is_ok());
    let error = Recipe::from_text("t.toml", "0-8: {isq: afq4}").unwrap_err().to_string();
    assert!(error.contains("a recipe in TOML"), "{error}");
    assert!(Recipe::from_text("yml", "format = \"4\"").is_ok());
}

/// A key that selects nothing is told, as a rule of any recipe.
#[test]
fn a_key_that_selects_nothing_is_told() {
    let recipe = Recipe::from_text("t.yml", "0-1: {isq: afq4}\n7-9: {isq: afq4}").unwrap();
    let plan = ConvertPlan::new(&decoder("model", 2).open(), &ConvertOptions::mlx(recipe)).unwrap();
    let notes: Vec<_> = plan.notes().iter().filter(|note| note.contains("decides about no tensor")).collect();
    assert_eq!(notes, ["`7-9` of t.yml decides about no tensor"]);
}
