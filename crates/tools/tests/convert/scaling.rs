//! Columns of weights that are scaled, as in AWQ: models stay what they are, and lose less when they are packed.

use super::checkpoint::rejected;
use super::common::{bundled, convert};
use super::families_of::{folders, open};
use super::feedback::{logits_of, off};
use super::hugging_face::{dense, distance, keep, logits, reference};
use super::importance::stories;
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::module_of;
use candle_quant::Checkpoint;
use candle_quant_models::{Config, Given, Inside, ScaledInput};
use candle_quant_tools::convert::{
    column_scales, convert as run, ConvertOptions, ConvertPlan, Recipe, RunOptions,
};
use candle_quant_tools::importance::{CalibrationText, ColumnScales};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;

/// What modules of a checkpoint are given.
fn inputs(source: &Checkpoint, config: &Config) -> BTreeSet<ScaledInput> {
    let of_tensor = |name: &str| config.scaled_input(module_of(name).unwrap_or(name));
    source.tensor_names().filter_map(of_tensor).collect()
}

/// Scales from a quarter to four for all of them, the same for columns that have one.
fn random(config: &Config, inputs: &BTreeSet<ScaledInput>) -> ColumnScales {
    let mut rng = StdRng::seed_from_u64(26);
    let mut scales = ColumnScales::default();
    for input in inputs {
        let (matrices, k) = config.scales_of(*input).unwrap();
        let mut of_matrix = || {
            let mut of_columns = vec![1f32; k];
            let times = config.columns_of_row(*input, 0).count();
            for row in 0..k / times {
                let scale = rng.random_range(-2f32..2.).exp2();
                config.columns_of_row(*input, row).for_each(|column| of_columns[column] = scale);
            }
            of_columns
        };
        let all = (0..matrices).map(|_| of_matrix()).collect();
        scales.insert(*input, all).unwrap();
    }
    scales
}

/// What is not scaled, of all families.
const REFUSED: [&str; 22] = [
    "deepseek_v2: what heads see in layers 0 to 1 is not scaled: values are made of latents",
    "deepseek_v3: what heads see in layers 0 to 1 is not scaled: values are made of latents",
    "exaone4: what attention sees in layers 0 to 2 is not scaled: there is no norm before it",
    "exaone4: what the feed-forward block sees in layers 0 to 2 is not scaled: there is no norm before it",
    "gpt_oss: what the down projections of experts see in layers 0 to 1 is not scaled: what up projections make is cut",
    "gpt_oss: what the feed-forward block sees in layers 0 to 1 is not scaled: experts are stored with rows for columns",
    "llama4_text: what the down projections of experts see in layers 1, 3 is not scaled: experts are stored with rows for columns",
    "llama4_text: what the feed-forward block sees in layers 1, 3 is not scaled: experts are stored with rows for columns",
    "nemotron: what the down projection sees in layers 0 to 1 is not scaled: there is an activation between it and what makes it",
    "olmo2: what attention sees in layers 0 to 1 is not scaled: there is no norm before it",
    "olmo2: what the feed-forward block sees in layers 0 to 1 is not scaled: there is no norm before it",
    "olmo3: what attention sees in layers 0 to 2 is not scaled: there is no norm before it",
    "olmo3: what the feed-forward block sees in layers 0 to 2 is not scaled: there is no norm before it",
    "olmo: what attention sees in layers 0 to 1 is not scaled: the norm before it has no weight",
    "olmo: what heads see in layers 0 to 1 is not scaled: values are cut",
    "olmo: what the feed-forward block sees in layers 0 to 1 is not scaled: the norm before it has no weight",
    "olmo: what the head sees is not scaled: the norm before it has no weight",
    "phi: what the down projection sees in layers 0 to 1 is not scaled: there is an activation between it and what makes it",
    "qwen3_5_moe_text: what heads see in layer 0 is not scaled: heads share a norm",
    "qwen3_5_text: what heads see in layers 0 to 1 is not scaled: heads share a norm",
    "qwen3_next: what heads see in layer 0 is not scaled: heads share a norm",
    "starcoder2: what the down projection sees in layers 0 to 1 is not scaled: there is an activation between it and what makes it",
];

/// Whatever is scaled, of every family, from every container to every kind that is written, models compute the same.
#[test]
fn scaled_models_compute_the_same() {
    let (mut refused, mut compared) = (BTreeSet::new(), 0);
    for (name, folder) in folders() {
        let source = open(&folder).unwrap_or_else(|error| panic!("{name}: {error}"));
        let config = Config::from_checkpoint(&source).unwrap();
        let scales = Arc::new(random(&config, &inputs(&source, &config)));
        let (tokens, _) = reference(&folder);
        let (mlx, gguf) = (ConvertOptions::mlx(keep()), ConvertOptions::gguf(keep()));
        for (kind, mut options) in [("mlx", mlx), ("hf", dense(None)), ("gguf", gguf)] {
            (options.dequantize, options.dtype) = (true, Some(DType::F32));
            if ConvertPlan::new(&source, &options).is_err() {
                continue;
            }
            let plain = convert(&source, &options);
            options.scales = Some(scales.clone());
            let plan = ConvertPlan::new(&source, &options).unwrap();
            let notes = plan.notes().iter().filter(|note| note.contains("is not scaled: "));
            let (family, _) = name.split_once('/').unwrap();
            refused.extend(notes.map(|note| format!("{family}: {note}")));
            let count = plan.tensors().filter(|tensor| tensor.to.ends_with(", scaled")).count();
            let out = convert(&source, &options);
            let [expected, found] = [&plain, &out].map(|out| {
                let path = out.path();
                let file = path.join("model.gguf");
                logits(&Checkpoint::open(if file.is_file() { file } else { path }).unwrap(), &tokens)
            });
            let far = distance(&found, &expected);
            assert!(count > 3, "{name} {kind}: {count}");
            assert!(far <= 5e-5, "{name} {kind}: {far}");
            compared += 1;
        }
    }
    assert!(compared > 250, "{compared}");
    let refused: Vec<_> = refused.iter().map(String::as_str).collect();
    assert_eq!(refused, REFUSED, "{refused:#?}");
}

/// A model whose layers are given columns of very different sizes, which computes what the bundled one does.
fn uneven() -> (tempfile::TempDir, Checkpoint) {
    let source = bundled("tiny-bf16");
    let config = Config::from_checkpoint(&source).unwrap();
    let is_of_layer = |input: &ScaledInput| input.layer.is_some();
    let inputs = inputs(&source, &config).into_iter().filter(is_of_layer).collect();
    let mut options = dense(Some(DType::F32));
    options.scales = Some(Arc::new(random(&config, &inputs)));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("uneven");
    let plan = ConvertPlan::new(&source, &options).unwrap();
    run(&plan, &path, &RunOptions::default(), &|_| ()).unwrap();
    (folder, Checkpoint::open(path).unwrap())
}

/// Where columns are given very different numbers, it saves a lot, by itself and with the others.
#[test]
fn scaled_models_lose_less() {
    let (_folder, source) = uneven();
    let texts = CalibrationText::new(&source, &stories(20..24), 512).unwrap();
    let expected = logits_of(&source, &texts);
    let calibration = Arc::new(CalibrationText::new(&source, &stories(0..8), 512).unwrap());
    for (format, search, feedback, most) in [
        ("3", false, false, 0.5),
        ("3", true, false, 0.6),
        ("4", false, true, 0.9),
        ("mxfp4", false, false, 0.6),
    ] {
        let recipe = Recipe::named("uniform", format.parse().unwrap()).unwrap();
        let mut options = ConvertOptions::mlx(recipe);
        options.search = search;
        options.dtype = Some(DType::BF16);
        options.feedback = feedback.then(|| calibration.clone());
        let lost = |options: &ConvertOptions| {
            off(&Checkpoint::open(convert(&source, options).path()).unwrap(), &expected, &texts)
        };
        let plain = lost(&options);
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let scales = column_scales(&plan, &calibration, None, &|_, _| ()).unwrap();
        assert!(scales.inputs().count() > 3);
        options.scales = Some(Arc::new(scales));
        let scaled = lost(&options);
        println!("{format}, {search}, {feedback}: {:.3}", scaled / plain);
        assert!(scaled < most * plain, "{format}, {search}, {feedback}: {plain}, {scaled}");
    }
}

/// The same scales and bytes, however many threads there are; also of experts, which have their own.
#[test]
fn scales_do_not_depend_on_the_number_of_threads() {
    let (_, folder) = folders().into_iter().find(|(name, _)| name == "qwen3_moe/hf").unwrap();
    let source = open(&folder).unwrap();
    let refs =
        candle_core::safetensors::load(super::families_of::reference_of(&folder), &Device::Cpu).unwrap();
    let tokens: Vec<u32> =
        refs["tokens"].to_dtype(DType::U32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let text = CalibrationText::of_tokens(vec![tokens]).unwrap();
    let options = ConvertOptions::mlx(Recipe::named("uniform", "2:g32".parse().unwrap()).unwrap());
    let plan = ConvertPlan::new(&source, &options).unwrap();
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| column_scales(&plan, &text, None, &|_, _| ()).unwrap())
    };
    let scales = with(1);
    assert_eq!(with(3), scales);
    let experts = ScaledInput { layer: Some(1), given: Given::Inner(Inside::Experts) };
    let rows = scales.get(experts).unwrap();
    assert!(rows.len() == 4 && rows[0] != rows[1]);
    // Heads that share values share scales.
    let config = Config::from_checkpoint(&source).unwrap();
    let heads = ScaledInput { layer: Some(0), given: Given::Heads };
    if let Some([of_heads]) = scales.get(heads) {
        for row in 0..config.num_key_value_heads * config.head_dim {
            let own: Vec<_> = config.columns_of_row(heads, row).map(|column| of_heads[column]).collect();
            assert!(own.iter().all(|scale| *scale == own[0]));
        }
    }
}

/// Types that are made of whole matrices take no scales, and what makes their inputs is not divided either.
#[test]
fn matrices_that_are_quantized_as_a_whole_are_not_scaled() {
    let source = bundled("tiny-bf16");
    let config = Config::from_checkpoint(&source).unwrap();
    let scales = Arc::new(random(&config, &inputs(&source, &config)));
    let recipe = |format: &str| Recipe::named("uniform", format.parse().unwrap()).unwrap();
    for format in ["hqq4", "f8q8"] {
        let plain = ConvertOptions::uqff(recipe(format));
        let mut scaled = plain.clone();
        scaled.scales = Some(scales.clone());
        let outs = [&plain, &scaled].map(|options| convert(&source, options));
        for file in [&format!("{format}-0.uqff"), "residual.safetensors"] {
            let [plain, scaled] = [0, 1].map(|index| std::fs::read(outs[index].path().join(file)).unwrap());
            assert!(plain == scaled, "{format} {file}");
        }
        let plan = ConvertPlan::new(&source, &scaled).unwrap();
        let why = format!("{format} is made of whole matrices");
        assert!(plan.notes().iter().any(|note| note.contains(&why)), "{:?}", plan.notes());
    }
    // Norms are divided for all files that share them, or for none.
    let mut several = ConvertOptions::uqff_of_several(["4", "hqq4"].map(recipe)).unwrap();
    assert!(ConvertPlan::new(&source, &several).is_ok());
    several.scales = Some(scales);
    let error = ConvertPlan::new(&source, &several).map(drop).unwrap_err().to_string();
    assert!(error.contains("several formats") && error.contains("scaled"), "{error}");
}

/// Scales of another model are refused.
#[test]
fn scales_of_other_dimensions_are_refused() {
    let source = bundled("tiny-bf16");
    let mut scales = ColumnScales::default();
    let input = ScaledInput { layer: Some(0), given: Given::Attention };
    for wrong in [vec![], vec![vec![1., 0.]], vec![vec![f32::NAN]], vec![vec![f32::INFINITY]]] {
        assert!(scales.insert(input, wrong).is_err());
    }
    scales.insert(input, vec![vec![1.; 64]]).unwrap();
    let mut options = ConvertOptions::mlx(Recipe::named("uniform", "4".parse().unwrap()).unwrap());
    options.scales = Some(Arc::new(scales));
    let error = ConvertPlan::new(&source, &options).map(drop).unwrap_err().to_string();
    assert!(error.contains("scales of what attention sees") && error.contains("256"), "{error}");
}

/// What is in the file is taken from there, and the rest is what it was.
#[test]
fn an_interrupted_search_goes_on() {
    let source = bundled("tiny-bf16");
    let text = CalibrationText::new(&source, &stories(0..6), 64).unwrap();
    let plan = |format: &str| {
        let recipe = Recipe::named("uniform", format.parse().unwrap()).unwrap();
        ConvertPlan::new(&source, &ConvertOptions::mlx(recipe)).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("scales");
    let told = RefCell::new(Vec::new());
    let find = |format: &str, text: &CalibrationText| {
        told.borrow_mut().clear();
        column_scales(&plan(format), text, Some(&file), &|done, all| told.borrow_mut().push((done, all)))
    };
    let all = find("3:g64", &text).unwrap();
    let count = told.borrow().len() - 1;
    assert!(count > 4 && *told.borrow() == (0..=count).map(|done| (done, count)).collect::<Vec<_>>());
    let complete = fs::read(&file).unwrap();
    assert_eq!(find("3:g64", &text).unwrap(), all);
    assert_eq!(*told.borrow(), [(count, count)]);

    // Only the first ones were found, and one of them is another: it is not looked for again.
    let tensors = candle_core::safetensors::load_buffer(&complete, &Device::Cpu).unwrap();
    let is_scaled = |index: &usize| tensors[&index.to_string()].elem_count() > 0;
    let changed = (0..count).find(is_scaled).unwrap();
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&complete).unwrap();
    let metadata = metadata.metadata().clone();
    let begun = (0..=changed).map(|index| {
        let tensor = &tensors[&index.to_string()];
        (index.to_string(), if index == changed { (tensor * 2.).unwrap() } else { tensor.clone() })
    });
    fs::write(&file, safetensors::serialize(begun.collect::<Vec<_>>(), metadata.clone()).unwrap()).unwrap();
    let resumed = find("3:g64", &text).unwrap();
    assert_eq!(told.borrow().first(), Some(&(changed + 1, count)));
    let different = all.inputs().filter(|input| resumed.get(*input) != all.get(*input)).count();
    assert_eq!(different, 1);

    let remedy = "remove it, or give another file";
    let other = CalibrationText::new(&source, "Once upon a time.", 64).unwrap();
    for result in [find("4:g64", &text), find("3:g64", &other)] {
        rejected(result, &["scales of another source, text or conversion", remedy]);
    }
    let short = Tensor::new(&[1f32; 3], &Device::Cpu).unwrap();
    fs::write(&file, safetensors::serialize([("0", &short)], metadata).unwrap()).unwrap();
    rejected(find("3:g64", &text), &["`0`: expected [1, ", "found [3] of F32", remedy]);
    let (mut wrong, numbers) = (complete.clone(), complete.len() - 4);
    wrong[numbers..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, wrong).unwrap();
    rejected(find("3:g64", &text), &["no scales of columns", "finite numbers above zero, found NaN", remedy]);
    fs::write(&file, &complete[..complete.len() - 1]).unwrap();
    rejected(find("3:g64", &text), &["no scales of columns", remedy]);
    fs::write(&file, safetensors::serialize([("0", &tensors["0"])], None).unwrap()).unwrap();
    rejected(find("3:g64", &text), &["`candle_quant.column_scales`", remedy]);
}
