//! Columns of weights that are scaled, as in AWQ: models stay what they are, and lose less when they are packed.

use super::common::{bundled, convert, tensors};
use super::families_of::{folders, open};
use super::hugging_face::{dense, distance, keep, logits, reference};
use super::importance::{off, stories};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::module_of;
use candle_quant::Checkpoint;
use candle_quant_models::{Config, Given, Inside, Model, ScaledInput};
use candle_quant_tools::convert::{column_scales, ConvertOptions, ConvertPlan, Recipe};
use candle_quant_tools::importance::{CalibrationText, Collector, ColumnScales};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeSet;
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

/// Whatever is scaled, of every family, from every container to every kind that is written, models compute the same.
#[test]
fn scaled_models_compute_the_same() {
    let mut scaled = BTreeSet::new();
    let mut compared = 0;
    for (name, folder) in folders() {
        let source = open(&folder).unwrap_or_else(|error| panic!("{name}: {error}"));
        let config = Config::from_checkpoint(&source).unwrap();
        let scales = Arc::new(random(&config, &inputs(&source, &config)));
        let (tokens, _) = reference(&folder);
        let (mlx, mut gguf) = (ConvertOptions::mlx(keep()), ConvertOptions::gguf(keep()));
        gguf.dtype = Some(DType::F32);
        for (kind, mut options) in [("mlx", mlx), ("hf", dense(None)), ("gguf", gguf)] {
            (options.dequantize, options.dtype) = (true, Some(DType::F32));
            if ConvertPlan::new(&source, &options).is_err() {
                continue;
            }
            let plain = convert(&source, &options);
            options.scales = Some(scales.clone());
            let plan = ConvertPlan::new(&source, &options).unwrap();
            let refused = plan.notes().iter().filter(|note| note.contains("is not scaled: "));
            scaled.extend(refused.map(|note| format!("{name} {kind}: {note}")));
            let count = plan.tensors().filter(|tensor| tensor.to.ends_with(", scaled")).count();
            let out = convert(&source, &options);
            let [expected, found] = [&plain, &out].map(|out| {
                let path = out.path();
                let file = path.join("model.gguf");
                logits(&Checkpoint::open(if file.is_file() { file } else { path }).unwrap(), &tokens)
            });
            let far = distance(&found, &expected);
            println!("{name} {kind}: {count} scaled, {far:.1e}");
            assert!(far <= 5e-5, "{name} {kind}: {far}");
            compared += 1;
        }
    }
    println!("{compared}\n{scaled:#?}");
}
