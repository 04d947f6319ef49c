//! One quantized checkpoint, two models: candle-transformers' Qwen3, unmodified, on decoded weights, and
//! this crate's on the packed ones. `cargo run --release --example drop_in [DIR]`
use anyhow::Result;
use candle_core::{DType, Device, Tensor, D};
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::Model;
use candle_transformers::models::qwen3;

fn main() -> Result<()> {
    let bundled = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny").to_string();
    let checkpoint = Checkpoint::open(std::env::args().nth(1).unwrap_or(bundled))?;
    let (dtype, device) = (DType::F32, Device::Cpu);

    let vb = VarBuilder::from_checkpoint(&checkpoint, dtype, &device);
    let config: qwen3::Config = serde_json::from_value(checkpoint.config().clone())?;
    let mut theirs = qwen3::ModelForCausalLM::new(&config, vb.dense())?; // candle_nn's own VarBuilder
    let mut ours = Model::load(&checkpoint, dtype, &device)?;

    let mut pairs = Vec::new();
    for offset in 0..64 {
        let token = Tensor::new(&[[(offset as u32 * 37 + 11) % config.vocab_size as u32]], &device)?;
        pairs.push((theirs.forward(&token, offset)?, ours.forward(&token, offset)?));
    }
    let (theirs, ours): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let (theirs, ours) = (Tensor::cat(&theirs, 1)?.squeeze(0)?, Tensor::cat(&ours, 1)?.squeeze(0)?);

    let std = theirs.flatten_all()?.var(0)?.to_scalar::<f32>()?.sqrt();
    let max = (&theirs - &ours)?.abs()?.max_all()?.to_scalar::<f32>()?;
    let same = theirs.argmax(D::Minus1)?.eq(&ours.argmax(D::Minus1)?)?.to_dtype(DType::F32)?;
    println!("largest difference of logits: {:.1e} of their standard deviation", max / std);
    println!("same most likely token: {:.0} %", 100. * same.mean_all()?.to_scalar::<f32>()?);
    Ok(())
}
