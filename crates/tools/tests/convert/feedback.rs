//! What columns make up for, as GPTQ has them do.

use super::common::{bundled, convert, tensors};
use super::importance::{family, options, stories, texts};
use candle_core::{DType, Device, Tensor};
use candle_quant::Checkpoint;
use candle_quant_models::Model;
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan};
use candle_quant_tools::importance::CalibrationText;
use std::sync::Arc;

/// What a model computes otherwise than it is stored is packed without feedback, and the plan says so.
#[test]
fn feedback_is_promised_to_layers_alone() {
    for container in ["hf", "gguf", "mlx-affine4"] {
        let source = family("deepseek_v3", container);
        let mut options = options("affine:4:g32");
        (options.feedback, options.requantize) = (Some(Arc::new(texts("deepseek_v3"))), true);
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let of_latents = ["kv_b_proj.weight", "embed_q.weight", "unembed_out.weight"];
        let (mut with, mut without) = (0, 0);
        for tensor in plan.tensors().filter(|tensor| tensor.to.starts_with("affine")) {
            let is_of_latents = of_latents.iter().any(|end| tensor.name.ends_with(end));
            let is_fed = tensor.to.ends_with(", with feedback");
            assert_eq!(
                is_fed,
                !is_of_latents && !tensor.name.ends_with("embed_tokens.weight"),
                "{}",
                tensor.name
            );
            with += usize::from(is_fed);
            without += usize::from(is_of_latents);
        }
        assert!(with > 4 && without > 0, "{container}: {with}, {without}");
        let said = format!("{without} packed weights are quantized without feedback");
        assert!(plan.notes().iter().any(|note| note.contains(&said)), "{container}: {:?}", plan.notes());
        let report = convert::measure(&plan, &|_| ()).unwrap();
        for tensor in &report.tensors {
            let planned = plan.tensors().find(|planned| planned.name == tensor.name).unwrap();
            assert_eq!(tensor.to, planned.to);
        }
    }
}

/// The logits of each text.
pub fn logits_of(source: &Checkpoint, texts: &CalibrationText) -> Vec<Tensor> {
    let mut model = Model::load(source, DType::F32, &Device::Cpu).unwrap();
    let of_piece = |piece: &Vec<u32>| {
        model.clear_kv_cache();
        let ids = Tensor::new(piece.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        model.forward(&ids, 0).unwrap()
    };
    texts.pieces().iter().map(of_piece).collect()
}

/// The mean square of what a model's logits of these texts are off.
pub fn off(model: &Checkpoint, expected: &[Tensor], texts: &CalibrationText) -> f64 {
    let of_text = |(found, expected): (Tensor, &Tensor)| {
        let off = (found - expected).unwrap();
        f64::from(off.sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap())
    };
    logits_of(model, texts).into_iter().zip(expected).map(of_text).sum()
}

#[test]
fn columns_make_up_for_what_others_lose() {
    let source = bundled("tiny-bf16");
    let texts = CalibrationText::new(&source, &stories(20..26), 512).unwrap();
    let expected = logits_of(&source, &texts);
    let calibration = Arc::new(CalibrationText::new(&source, &stories(0..16), 512).unwrap());
    for (format, most) in [("3", 0.85), ("mxfp4", 0.9)] {
        let mut options = options(format);
        options.max_shard_size = 200_000;
        let plain = off(&Checkpoint::open(convert(&source, &options).path()).unwrap(), &expected, &texts);
        options.feedback = Some(calibration.clone());
        let plan = ConvertPlan::new(&source, &options).unwrap();
        assert!(plan.tensors().any(|tensor| tensor.to.ends_with(", with feedback")));
        let out = convert(&source, &options);
        let fed = off(&Checkpoint::open(out.path()).unwrap(), &expected, &texts);
        println!("{format}: {:.3}", fed / plain);
        assert!(fed < most * plain, "{format}: {plain}, {fed}");
        // The same bytes from one thread, and in one file.
        let again = tensors(out.path());
        options.max_shard_size = ConvertOptions::MAX_SHARD_SIZE;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert!(pool.install(|| tensors(convert(&source, &options).path())) == again, "{format}");
    }
}
