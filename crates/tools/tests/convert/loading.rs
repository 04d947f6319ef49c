//! Weights that are quantized while they are loaded are those that a conversion writes.

use super::common::{bundled, convert};
use candle_core::{DType, Device, Tensor};
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::{Config, Model};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe};

pub fn logits(vb: VarBuilder, checkpoint: &Checkpoint) -> Vec<u32> {
    let mut model = Model::new(&Config::from_checkpoint(checkpoint).unwrap(), vb).unwrap();
    let ids = Tensor::new(&[[1u32, 5, 9, 2, 7]], &Device::Cpu).unwrap();
    let logits = model.forward(&ids, 0).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(logits.iter().any(|logit| *logit != 0.));
    logits.into_iter().map(f32::to_bits).collect()
}

pub fn builder(checkpoint: &Checkpoint) -> VarBuilder<'static> {
    VarBuilder::from_checkpoint(checkpoint, DType::F32, &Device::Cpu)
}

#[test]
fn logits_are_those_of_the_converted_model() {
    let mixed = "format = \"4\"\n[[rule]]\nlayers = \"1\"\nformat = \"mxfp8\"\n[[rule]]\nrole = \"down\"\nformat = \"keep\"\n";
    let experts =
        Checkpoint::open(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/convert/qwen3moe_s"))
            .unwrap();
    for source in [bundled("tiny-bf16"), experts] {
        let dense = logits(builder(&source), &source);
        let safe =
            ["4", "affine:3:g32", "mxfp4", "nvfp4", "mxfp8"].map(|spec| Recipe::safe(spec.parse().unwrap()));
        for recipe in safe.into_iter().chain([Recipe::from_toml("mixed", mixed).unwrap()]) {
            let options = ConvertOptions::mlx(recipe);
            let formats = ConvertPlan::new(&source, &options).unwrap().formats();
            let written = convert(&source, &options);
            let written = Checkpoint::open(written.path()).unwrap();
            let expected = logits(builder(&written), &written);
            assert!(expected != dense);
            let vb = builder(&source).quantize_with(move |module| formats.get(module).copied());
            assert!(logits(vb, &source) == expected, "{}: {options:?}", source.path().display());
        }
    }
}

/// What is packed stays so, and nothing dense is left of it.
#[test]
fn packed_weights_keep_their_formats() {
    let source = bundled("tiny");
    let plan = ConvertPlan::new(&source, &ConvertOptions::mlx(Recipe::safe("8".parse().unwrap()))).unwrap();
    assert!(plan.formats().is_empty());
}
