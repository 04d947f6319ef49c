//! Who asks a packed layer for its tensor.

use candle_core::{DType, Device, Result, Tensor};
use candle_quant_nn::{dense_copies, embedding, linear_no_bias, Module, VarBuilder};
use log::{LevelFilter, Log, Metadata, Record};
use std::sync::Mutex;

/// Warnings of dense copies.
static WARNED: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Warnings;

impl Log for Warnings {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        WARNED.lock().unwrap().push(record.args().to_string());
    }

    fn flush(&self) {}
}

/// In this checkpoint layers have as many rows as the vocabulary: 256.
const FILE: &str =
    concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/mlx/qwen3-nvfp4/model.safetensors");

#[test]
fn only_the_embedding_waits_for_another_layer() -> Result<()> {
    log::set_logger(&Warnings).unwrap();
    log::set_max_level(LevelFilter::Warn);
    // SAFETY: fixtures do not change.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[FILE], DType::F32, &Device::Cpu) }?;
    let renamed = vb.clone().rename_f(str::to_owned);
    for (number, vb) in [vb, renamed].into_iter().enumerate() {
        let table = embedding(256, 128, vb.pp("model.embed_tokens"))?;
        let layer = linear_no_bias(128, 256, vb.pp("model.layers.0.mlp.up_proj"))?;
        assert!(table.embeddings().sqr().is_err());
        assert_eq!(
            layer.weight().to_vec2::<f32>()?,
            vb.get((256, 128), "model.layers.0.mlp.up_proj.weight")?.to_vec2::<f32>()?
        );
        assert_eq!(dense_copies(), 2 * number + 1);
        // Once its rows have been used, no head is made of a table any more.
        table.forward(&Tensor::new(&[3u32], &Device::Cpu)?)?;
        assert_eq!(table.embeddings().get(3)?.dims(), [128]);
        assert_eq!(dense_copies(), 2 * number + 2);
        // Each is warned of once, however often its tensor is asked for.
        assert_eq!((layer.weight().dims(), table.embeddings().dims()), (&[256, 128][..], &[256, 128][..]));
        let warned = WARNED.lock().unwrap();
        assert_eq!(warned.len(), dense_copies(), "{warned:?}");
        let expected = "is dequantized whole: the model asks its layer for the tensor";
        assert!(
            warned.iter().all(|warning| warning.contains(expected) && warning.contains("[256, 128]")),
            "{warned:?}"
        );
    }
    Ok(())
}
