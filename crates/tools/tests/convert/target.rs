//! A number of bits per weight: what is chosen, how it is kept, and what is refused.

use super::common::{bundled, bundled_path, convert, files, Source};
use candle_core::DType;
use candle_quant::{Checkpoint, Result};
use candle_quant_tools::convert::{
    self, BitAllocation, ConvertEvent, ConvertOptions, ConvertPlan, Recipe, Rule, RunOptions, Sensitivities,
    Spec, Target,
};
use std::fs;
use std::panic::{catch_unwind, AssertUnwindSafe};

fn specs(texts: &[&str]) -> Vec<Spec> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn safe() -> ConvertOptions {
    ConvertOptions::mlx(Recipe::safe(Spec::Keep))
}

fn with(mut options: ConvertOptions, edit: impl FnOnce(&mut ConvertOptions)) -> ConvertOptions {
    edit(&mut options);
    options
}

fn measured(source: &Checkpoint, options: &ConvertOptions, candidates: &[Spec]) -> Sensitivities {
    BitAllocation::new(source, options, candidates).unwrap().measure(&|_| ()).unwrap()
}

/// The plan with chosen formats.
fn target(
    source: &Checkpoint,
    mut options: ConvertOptions,
    candidates: &[&str],
    bits: f64,
) -> Result<ConvertPlan> {
    let chooser = options.clone();
    let alternatives = BitAllocation::new(source, &chooser, &specs(candidates))?;
    options.recipe = alternatives.recipe(&alternatives.measure(&|_| ())?, bits)?;
    ConvertPlan::new(source, &options)
}

#[test]
fn a_number_of_bits_is_nearly_reached_and_never_exceeded() {
    let source = bundled("tiny-bf16");
    let options = safe();
    let candidates = BitAllocation::candidates(Target::Mlx);
    assert_eq!(candidates, specs(&["3", "4", "5", "6", "8"]));
    let alternatives = BitAllocation::new(&source, &options, &candidates).unwrap();
    assert_eq!(alternatives.work().0, 5 * 22);
    let sensitivities = alternatives.measure(&|_| ()).unwrap();
    let mut errors = Vec::new();
    for bits in [3.5, 3.6, 4., 4.5, 4.75, 5.3, 6., 6.5, 7.9, 8.5] {
        let recipe = alternatives.recipe(&sensitivities, bits).unwrap();
        let plan = ConvertPlan::new(&source, &with(safe(), |options| options.recipe = recipe)).unwrap();
        let found = plan.bits_per_weight();
        assert!(found <= bits && bits - found < 0.05, "{bits}: {found}");
        let report = convert::measure(&plan, &|_| ()).unwrap();
        assert_eq!(report.bits_per_weight, found);
        errors.push(error(&report));
        let rules: Vec<_> = plan.tensors().filter(|tensor| tensor.shape.len() > 1).collect();
        let rule = format!("for {bits} bits per weight");
        assert!(rules.iter().all(|tensor| tensor.rule == rule));
        let note = format!("22 formats are chosen {rule}, by errors that were measured");
        assert_eq!(plan.notes(), [note]);
    }
    assert!(errors.is_sorted_by(|more, less| more > less), "{errors:?}");
    // No recipe of as many bits loses less.
    for (name, format) in
        [("uniform", "3"), ("uniform", "4"), ("safe", "4"), ("safe", "5"), ("mixed_3_6", "4")]
    {
        let recipe = Recipe::named(name, specs(&[format])[0]).unwrap();
        let plan = ConvertPlan::new(&source, &ConvertOptions::mlx(recipe)).unwrap();
        let bits = plan.bits_per_weight();
        let recipe = alternatives.recipe(&sensitivities, bits).unwrap();
        let chosen = ConvertPlan::new(&source, &with(safe(), |options| options.recipe = recipe)).unwrap();
        assert!(chosen.bits_per_weight() <= bits);
        let loss = |plan| error(&convert::measure(plan, &|_| ()).unwrap());
        let (chosen, given) = (loss(&chosen), loss(&plan));
        println!("{name} {format}, {bits:.3} bits: {given}, {chosen}");
        assert!(chosen <= given, "{name} {format}: {given}, {chosen}");
    }
}

/// The squared error, relative to the RMS of each weight.
fn error(report: &convert::ConvertReport) -> f64 {
    report.tensors.iter().map(|tensor| tensor.relative_rms.powi(2) * tensor.elements as f64).sum()
}

#[test]
fn sensitivities_are_those_of_what_would_be_written() {
    let source = bundled("tiny-bf16");
    let options = safe();
    let found = measured(&source, &options, &specs(&["3", "nvfp4"]));
    for format in specs(&["3", "nvfp4"]) {
        let uniform = ConvertOptions::mlx(Recipe::named("uniform", format).unwrap());
        let report = convert::measure(&ConvertPlan::new(&source, &uniform).unwrap(), &|_| ()).unwrap();
        assert_eq!(report.tensors.len(), 22);
        for tensor in report.tensors {
            assert_eq!(found.relative_rms(&tensor.name, format), Some(tensor.relative_rms));
        }
    }
    assert_eq!(found.relative_rms("model.embed_tokens.weight", Spec::Keep), None);
}

#[test]
fn a_format_that_cannot_hold_a_weight_is_the_last_to_be_chosen() {
    let wide: Vec<_> = (0..2048).map(|i| [6e4, -6e4, 1.][i % 3]).collect();
    let source = Source::new().with("a.weight", &[32, 64], &wide).random("b.weight", &[32, 64]).finish();
    let options = with(safe(), |options| options.dtype = Some(DType::F16));
    // With one bit the scale is the width of the range, which F16 does not hold.
    let found = measured(&source.open(), &options, &specs(&["1", "4"]));
    assert_eq!(found.relative_rms("a.weight", specs(&["1"])[0]), Some(f64::MAX));
    let plan = target(&source.open(), options, &["1", "4"], 3.).unwrap();
    let formats: Vec<_> = plan.tensors().map(|tensor| tensor.to.as_str()).collect();
    assert_eq!(formats, ["affine 4-bit g64", "affine 1-bit g64"]);
}

/// Tensors that are kept, said, or of awkward rows, beside some that are left open.
fn zoo() -> Source {
    Source::new()
        .with_config(r#"{"num_hidden_layers": 1, "tie_word_embeddings": false}"#)
        .random("lm_head.weight", &[32, 128])
        .random("model.embed_tokens.weight", &[64, 128])
        .random("model.layers.0.mlp.gate.weight", &[32, 128])
        .random("model.layers.0.mlp.experts.0.up_proj.weight", &[32, 64])
        .random("model.layers.0.mlp.experts.1.up_proj.weight", &[32, 64])
        .random("model.layers.0.mlp.odd.weight", &[32, 96])
        .random("model.layers.0.mlp.odder.weight", &[32, 80])
        .random("model.layers.0.self_attn.q_proj.weight", &[64, 128])
        .random("model.layers.0.self_attn.v_proj.weight", &[32, 128])
        .random("model.norm.weight", &[128])
        .finish()
}

#[test]
fn what_is_kept_or_said_stays_so() {
    let zoo = zoo();
    let source = zoo.open();
    let rule = Rule::tensors("*.v_proj", specs(&["mxfp8"])[0]).unwrap();
    let options = ConvertOptions::mlx(Recipe::safe(Spec::Keep).with_rules_first([rule]));
    let plan = target(&source, options, &["3", "8"], 10.5).unwrap();
    let of = |name: &str| {
        let tensor = plan.tensors().find(|tensor| tensor.name.ends_with(name)).unwrap();
        (tensor.to.as_str(), tensor.rule.as_str(), tensor.fallback.is_some())
    };
    assert_eq!(of("mlp.gate.weight"), ("F32", "default: router", false));
    assert_eq!(of("v_proj.weight"), ("mxfp8", "tensors *.v_proj", false));
    assert_eq!(of("norm.weight"), ("F32", "not a matrix", false));
    // No candidate fits: as with a format alone.
    assert_eq!(of("odder.weight"), ("F32", "format", true));
    for name in ["lm_head.weight", "embed_tokens.weight", "switch_mlp.up_proj.weight", "q_proj.weight"] {
        let (to, rule, is_fallback) = of(name);
        assert!(["affine 3-bit g64", "affine 8-bit g64"].contains(&to), "{name}: {to}");
        assert_eq!((rule, is_fallback), ("for 10.5 bits per weight", false));
    }
    // Smaller groups, of the candidates that do not fit as they are.
    let (to, rule, is_fallback) = of("odd.weight");
    assert!(to.ends_with("g32") && rule == "for 10.5 bits per weight" && is_fallback, "{to}");
    let strict = with(safe(), |options| options.strict = true);
    let error = target(&source, strict, &["3", "8"], 10.5).unwrap_err().to_string();
    assert!(error.contains("no whole number of groups of 64"), "{error}");
    // One that fits comes before them, and strictness then has nothing against it.
    let plan = target(&source, safe(), &["3", "mxfp4", "8:g32"], 10.).unwrap();
    let odd = plan.tensors().find(|tensor| tensor.name.ends_with("odd.weight")).unwrap();
    assert!(odd.fallback.is_none() && ["mxfp4", "affine 8-bit g32"].contains(&odd.to.as_str()), "{}", odd.to);
}

#[test]
fn what_is_out_of_reach_is_refused() {
    let source = bundled("tiny-bf16");
    let refused =
        |candidates: &[&str], bits: f64| target(&source, safe(), candidates, bits).unwrap_err().to_string();
    for bits in [3.499, 8.501, 16.] {
        let error = refused(&["3", "4", "8"], bits);
        let part = format!("bits per weight: expected 3.5 to 8.5, which these candidates reach with all that is kept, found {bits}; give other candidates");
        assert_eq!(error, part);
    }
    // Best is 6 bits here: more bytes are of no use.
    assert!(refused(&["6", "mxfp8"], 6.6).contains("expected 6.5 to 6.5"));
    assert!(refused(&[], 4.).contains("candidates: expected quantized formats, such as 3,4,6,8, found none"));
    for none in ["bf16", "keep"] {
        let error = refused(&["4", none], 4.5);
        assert!(error.contains("expected quantized formats") && error.contains(none), "{error}");
    }
    let kept = ConvertOptions::mlx(
        Recipe::from_toml("mine", "format = \"keep\"\n[[rule]]\ntensors = \"*\"\nformat = \"keep\"").unwrap(),
    );
    let error = target(&source, kept, &["4"], 4.5).unwrap_err().to_string();
    assert!(error.contains("tiny-bf16") && error.contains("there is nothing to choose"), "{error}");
    let error = target(&source, ConvertOptions::dense(), &["4"], 4.5).unwrap_err().to_string();
    assert!(error.contains("there is nothing to choose"), "{error}");
}

#[test]
fn other_outputs_have_their_own_formats() {
    let source = bundled("tiny-bf16");
    let uqff = || ConvertOptions::uqff(Recipe::named("mistralrs", specs(&["4"])[0]).unwrap());
    assert_eq!(BitAllocation::candidates(Target::Uqff), specs(&["3", "4", "6", "8"]));
    let plan = target(&source, uqff(), &["3", "4", "6", "mxfp4"], 4.6).unwrap();
    assert!(4.5 < plan.bits_per_weight() && plan.bits_per_weight() <= 4.6);
    let error = target(&source, uqff(), &["4", "5"], 4.6).unwrap_err().to_string();
    assert!(
        error.contains("affine 5-bit g64 (left open) in UQFF") && error.contains("2, 3, 4, 6 and 8 bits"),
        "{error}"
    );
    let ollama = ConvertOptions::ollama(Recipe::named("ollama", specs(&["4"])[0]).unwrap(), "tiny").unwrap();
    assert_eq!(BitAllocation::candidates(Target::Ollama), specs(&["4", "8"]));
    let plan = target(&source, ollama, &["4", "8"], 9.).unwrap();
    // The importer keeps embeddings.
    let embedding = plan.tensors().find(|tensor| tensor.name.contains("embed")).unwrap();
    assert_eq!(embedding.to, "BF16");
    assert!(plan.tensors().any(|tensor| tensor.to == "affine 8-bit g64"));
    assert!(plan.bits_per_weight() <= 9.);
}

#[test]
fn a_saved_recipe_makes_the_same_output() {
    let zoo = zoo();
    let down = Rule::tensors("*norm*", specs(&["bf16"])[0]).unwrap();
    let with_rule = |recipe: Recipe| recipe.with_rules_first([down.clone()]);
    let chosen = |candidates: &[&str], bits| {
        let mut options = ConvertOptions::mlx(with_rule(Recipe::safe(Spec::Keep)));
        let chooser = options.clone();
        let source = zoo.open();
        let alternatives = BitAllocation::new(&source, &chooser, &specs(candidates)).unwrap();
        options.recipe = alternatives.recipe(&alternatives.measure(&|_| ()).unwrap(), bits).unwrap();
        options
    };
    let four = specs(&["4"])[0];
    for options in [
        chosen(&["3", "5", "mxfp8"], 10.5),
        chosen(&["3:g32", "nvfp4", "8:g32"], 10.5),
        ConvertOptions::mlx(with_rule(Recipe::named("mixed_3_6", four).unwrap())),
        ConvertOptions::mlx(with_rule(Recipe::safe(Spec::Keep))),
        ConvertOptions::uqff(with_rule(Recipe::named("mistralrs", four).unwrap())),
    ] {
        let source = zoo.open();
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let text = plan.recipe_toml().unwrap();
        let recipe = Recipe::from_toml("saved.toml", &text).unwrap();
        let again = with(options.clone(), |options| options.recipe = recipe);
        let (first, second) = (convert(&source, &options), convert(&source, &again));
        assert!(files(first.path()) == files(second.path()), "{text}");
        let kept = plan.tensors().filter(|tensor| tensor.name.ends_with("gate.weight") && tensor.to == "F32");
        assert_eq!(text.contains("mlp.gate"), kept.count() == 0, "{text}");
    }
    // Names are taken literally.
    let odd = Source::new().random("a[b]*{c}.weight", &[32, 64]).random("axb.weight", &[32, 64]).finish();
    let options = ConvertOptions::mlx(Recipe::safe(Spec::Keep).with_rules_first([
        Rule::tensors("axb", four).unwrap(),
        Rule::tensors("a*", specs(&["8"])[0]).unwrap(),
    ]));
    let text = ConvertPlan::new(&odd.open(), &options).unwrap().recipe_toml().unwrap();
    let again = ConvertOptions::mlx(Recipe::from_toml("saved.toml", &text).unwrap());
    let formats: Vec<_> =
        ConvertPlan::new(&odd.open(), &again).unwrap().tensors().map(|t| t.to.clone()).collect();
    assert_eq!(formats, ["affine 8-bit g64", "affine 4-bit g64"]);
}

#[test]
fn sensitivities_are_kept_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sensitivities.json");
    assert!(Sensitivities::read(&path).unwrap().is_none());
    for (name, bytes) in files(bundled_path("tiny-bf16")) {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let open = || Checkpoint::open(folder.path()).unwrap();
    let (source, options) = (open(), safe());
    let found = measured(&source, &options, &specs(&["3", "4", "8"]));
    found.write(&path).unwrap();
    let read = Sensitivities::read(&path).unwrap().unwrap();
    assert_eq!(read, found);
    // For some of the formats, too.
    let recipe = |source: &Checkpoint, options: &ConvertOptions, candidates: &[&str]| {
        let alternatives = BitAllocation::new(source, options, &specs(candidates)).unwrap();
        alternatives
            .recipe(&read, 5.)
            .map(|recipe| ConvertPlan::new(source, &with(safe(), |options| options.recipe = recipe)).unwrap())
    };
    let plan = recipe(&source, &options, &["4", "8"]).unwrap();
    let direct = target(&source, safe(), &["4", "8"], 5.).unwrap();
    assert_eq!(plan.recipe_toml().unwrap(), direct.recipe_toml().unwrap());
    let refused = |options: &ConvertOptions, candidates: &[&str]| {
        recipe(&open(), options, candidates).unwrap_err().to_string()
    };
    let error = refused(&options, &["4", "6"]);
    assert!(
        error.contains("loses as affine:6:g64, found affine:3:g64, affine:4:g64, affine:8:g64; measure anew"),
        "{error}"
    );
    let searching = with(safe(), |options| options.search = true);
    let error = refused(&searching, &["4", "8"]);
    assert!(
        error.contains("expected mlx, dtype none, search true, found mlx, dtype none, search false"),
        "{error}"
    );
    let error = refused(&with(safe(), |options| options.dtype = Some(DType::F16)), &["4", "8"]);
    assert!(error.contains("dtype f16"), "{error}");
    let weights = folder.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::remove_file(&weights).unwrap();
    fs::write(&weights, bytes).unwrap();
    let error = refused(&options, &["4", "8"]);
    assert!(error.contains("found those of another source; measure anew"), "{error}");
    let text = fs::read_to_string(&path).unwrap();
    for (damaged, part) in [
        ("{".to_owned(), "EOF"),
        ("[]".to_owned(), "no sensitivities"),
        (text.replacen("relative_rms", "rms", 1), "unknown field `rms`"),
        (text.replacen("0.", "-0.", 1), "an error of -0."),
    ] {
        fs::write(&path, damaged).unwrap();
        let error = Sensitivities::read(&path).unwrap_err().to_string();
        assert!(error.contains("sensitivities.json") && error.contains(part), "{part} in {error}");
    }
    assert!(Sensitivities::read(folder.path()).is_err());
    assert!(found.write(folder.path().join("no/such/file")).unwrap_err().to_string().contains("no/such"));
}

#[test]
fn a_choice_does_not_depend_on_the_threads() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut options = safe();
            options.search = true;
            let plan = target(&bundled("tiny-bf16"), options.clone(), &["3", "mxfp4"], 3.9).unwrap();
            let text = plan.recipe_toml().unwrap();
            options.recipe = Recipe::from_toml("saved.toml", &text).unwrap();
            (text, files(convert(&bundled("tiny-bf16"), &options).path()))
        })
    };
    assert!(run(1) == run(3));
}

#[test]
fn a_resumed_conversion_chooses_as_before() {
    let source = bundled("tiny-bf16");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let plan = |bits: f64| {
        target(&source, with(safe(), |options| options.max_shard_size = 100_000), &["3", "4", "8"], bits)
            .unwrap()
    };
    let die = |event: ConvertEvent| {
        if matches!(event, ConvertEvent::Finished { tensor } if tensor.contains("layers.1")) {
            panic!("interrupted");
        }
    };
    let died =
        catch_unwind(AssertUnwindSafe(|| convert::convert(&plan(4.5), &out, &RunOptions::default(), &die)));
    assert!(died.is_err() && !out.exists());
    let resume = RunOptions { resume: true, ..RunOptions::default() };
    let error = convert::convert(&plan(4.6), &out, &resume, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("begun with other options"), "{error}");
    convert::convert(&plan(4.5), &out, &resume, &|_| ()).unwrap();
    let other = folder.path().join("other");
    convert::convert(&plan(4.5), &other, &RunOptions::default(), &|_| ()).unwrap();
    assert!(files(out) == files(other));
}
