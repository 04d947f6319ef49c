//! Layers and `VarBuilder`: packed, dense, and what they say when something is wrong.

use crate::common::{distance, fixture, open};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use candle_quant::nn::{forward_add, forward_all, swiglu};
use candle_quant::{
    embedding, layer_norm, linear, linear_b, linear_no_bias, rms_norm, Checkpoint, Embedding, LayerWeight,
    Linear, Module, QuantFormat, QuantTensor, VarBuilder,
};

const CPU: Device = Device::Cpu;
const QWEN: &str = "qwen3-affine-b4-g64";
const BIASED: &str = "llama-untied-bias-b4-g64-f16";
const MIXED: &str = "llama-mixed-custom";

fn builder(fixture: &str) -> VarBuilder<'static> {
    VarBuilder::from_checkpoint(&open(fixture), DType::F32, &CPU)
}

fn input(dims: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., dims, &CPU).unwrap()
}

/// candle's own layer on the dequantized weight.
fn dense_twin(fixture: &str, path: &str, n: usize, k: usize, bias: bool) -> candle_nn::Linear {
    candle_nn::linear_b(k, n, bias, builder(fixture).dense().pp(path)).unwrap()
}

#[test]
fn packed_layers_agree_with_candles_on_decoded_weights() {
    for (fixture, path, n, k, bias) in [
        (QWEN, "model.layers.1.mlp.gate_proj", 256, 128, false),
        (QWEN, "model.layers.1.mlp.down_proj", 128, 256, false),
        (BIASED, "model.layers.0.self_attn.k_proj", 64, 128, true),
        (MIXED, "model.layers.1.mlp.up_proj", 256, 128, false),
        (MIXED, "lm_head", 256, 128, false),
    ] {
        let layer = linear_b(k, n, bias, builder(fixture).pp(path)).unwrap();
        assert!(layer.weight().quantized().is_some(), "{path}");
        assert_eq!(layer.weight().dims(), [n, k]);
        assert_eq!(layer.bias().is_some(), bias);
        let x = input(&[2, 3, k]);
        let y = layer.forward(&x).unwrap();
        assert_eq!(y.dims(), [2, 3, n]);
        let distance = distance(&y, &dense_twin(fixture, path, n, k, bias).forward(&x).unwrap());
        assert!(distance.max < 1e-5, "{path}: {distance:?}");
    }
}

#[test]
fn the_checkpoint_decides_what_is_packed() {
    let vb = builder(MIXED).pp("model.layers.0.self_attn");
    let packed = linear_no_bias(128, 128, vb.pp("q_proj")).unwrap();
    assert_eq!(packed.weight().format(), Some(QuantFormat::affine(8, 32).unwrap()));
    let dense = linear_no_bias(128, 128, vb.pp("o_proj")).unwrap();
    assert_eq!(dense.weight().dense().unwrap().dtype(), DType::F32);
    assert_eq!(dense.forward(&input(&[1, 128])).unwrap().dims(), [1, 128]);
}

#[test]
fn biases_of_a_format_are_not_the_bias_of_a_layer() {
    let vb = builder(QWEN).pp("model.layers.0.mlp.up_proj");
    // The parts of a packed weight have no names of their own.
    assert!(!vb.contains_tensor("biases") && !vb.contains_tensor("bias"));
    let error = linear(128, 256, vb).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.mlp.up_proj.bias"), "{error}");
}

#[test]
fn wrong_shapes_are_named() {
    let vb = builder(QWEN).pp("model.layers.0.mlp.up_proj");
    for (error, found) in [
        // N is wrong: the tensors say so. K is wrong: no format of the table fits.
        (linear_no_bias(128, 255, vb.clone()).unwrap_err().to_string(), "[256, 128]"),
        (linear_no_bias(192, 256, vb.clone()).unwrap_err().to_string(), "192"),
        (vb.get((255, 128), "weight").unwrap_err().to_string(), "[256, 128]"),
    ] {
        assert!(error.contains("model.layers.0.mlp.up_proj"), "{error}");
        assert!(error.contains(found), "{error}");
    }
    let norm = builder(QWEN).pp("model.norm");
    let error = rms_norm(127, 1e-6, norm).unwrap_err().to_string();
    assert!(
        error.contains("model.norm.weight") && error.contains("[127]") && error.contains("[128]"),
        "{error}"
    );
    let error = linear_no_bias(128, 128, builder(MIXED).pp("model.layers.0.self_attn.o_projection"));
    assert!(error.unwrap_err().to_string().contains("o_projection"));
}

#[test]
fn embeddings_gather_decoded_rows_and_lend_their_weight() {
    let vb = builder(QWEN).pp("model.embed_tokens");
    let table = embedding(256, 128, vb.clone()).unwrap();
    assert_eq!(table.hidden_size(), 128);
    let ids = Tensor::new(&[[3u32, 255, 0], [7, 7, 1]], &CPU).unwrap();
    let rows = table.forward(&ids).unwrap();
    assert_eq!(rows.dims(), [2, 3, 128]);
    let whole = vb.get((256, 128), "weight").unwrap();
    let expected = whole.index_select(&ids.flatten_all().unwrap(), 0).unwrap();
    assert_eq!(distance(&rows, &expected).max, 0.);

    // Both ways to a tied head, candle's own included, stay packed and share the data.
    let head = Linear::new(table.embeddings().clone(), None);
    for head in [head, table.as_linear()] {
        assert!(head.weight().quantized().is_some());
        let y = head.forward(&rows).unwrap();
        let distance = distance(&y, &rows.broadcast_matmul(&whole.t().unwrap()).unwrap());
        // A row times itself is many standard deviations large, and its rounding error as well.
        assert!(distance.max < 1e-4 && distance.rms < 2e-6, "{distance:?}");
    }
    let half = embedding(256, 128, vb.to_dtype(DType::BF16)).unwrap();
    assert_eq!(half.forward(&ids).unwrap().dtype(), DType::BF16);
    assert!(table.forward(&Tensor::new(&[256u32], &CPU).unwrap()).is_err());
}

#[test]
fn paths_dtypes_and_names_are_candles() {
    let vb = builder(QWEN);
    let (ours, candles) = (vb.pp("model").pp("layers").pp(1), vb.dense().pp("model").pp("layers").pp(1));
    assert_eq!(ours.prefix(), candles.prefix());
    assert_eq!(ours.prefix(), "model.layers.1");
    assert_eq!(ours.root().prefix(), "");
    assert_eq!(ours.set_prefix("lm_head").prefix(), "lm_head");
    assert!(ours.contains_tensor("input_layernorm.weight") && !ours.contains_tensor("input_layernorm"));
    assert_eq!(ours.to_dtype(DType::F16).pp("x").dtype(), DType::F16);
    assert_eq!(ours.clone().set_dtype(DType::BF16).dtype(), DType::BF16);
    assert!(ours.device().is_cpu());
    let norm = ours.to_dtype(DType::F16).get(128, "input_layernorm.weight").unwrap();
    assert_eq!(norm.dtype(), DType::F16);
    assert_eq!(vb.get_unchecked("model.norm.weight").unwrap().dims(), [128]);
    assert!(layer_norm(128, 1e-5, ours.pp("input_layernorm")).is_err()); // it has no bias
}

#[test]
fn dense_weights_can_be_quantized_while_loading() {
    let format = QuantFormat::MXFP8;
    let vb = builder(MIXED).quantize_to(format).pp("model.layers.0.self_attn");
    let dense = linear_no_bias(128, 128, vb.pp("o_proj")).unwrap();
    assert_eq!(dense.weight().format(), Some(format));
    let stored = builder(MIXED).get((128, 128), "model.layers.0.self_attn.o_proj.weight").unwrap();
    let expected = QuantTensor::quantize(&stored, format).unwrap().dequantize(DType::F32).unwrap();
    assert_eq!(distance(&dense.weight().to_dense(DType::F32).unwrap(), &expected).max, 0.);
    let packed = linear_no_bias(128, 128, vb.pp("q_proj")).unwrap();
    assert_eq!(packed.weight().format(), Some(QuantFormat::affine(8, 32).unwrap()));

    // A row that is no whole number of groups stays dense.
    let varmap = VarMap::new();
    let fresh = VarBuilder::from(candle_nn::VarBuilder::from_varmap(&varmap, DType::F32, &CPU));
    let vb = fresh.quantize_to(QuantFormat::affine(4, 64).unwrap());
    assert!(linear(96, 8, vb.pp("a")).unwrap().weight().dense().is_some());
    assert!(linear(128, 8, vb.pp("b")).unwrap().weight().quantized().is_some());
}

#[test]
fn candles_sources_serve_ported_models_too() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from(candle_nn::VarBuilder::from_varmap(&varmap, DType::F32, &CPU));
    let layer = linear(8, 4, vb.pp("layer")).unwrap();
    let same = candle_nn::linear(8, 4, vb.dense().pp("layer")).unwrap();
    let x = input(&[5, 8]);
    assert_eq!(distance(&layer.forward(&x).unwrap(), &same.forward(&x).unwrap()).max, 0.);
    assert!(varmap.data().lock().unwrap().contains_key("layer.bias"));
}

#[test]
fn layers_made_by_hand() {
    let weight = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &CPU).unwrap();
    let layer = Linear::new(weight.clone(), Some(Tensor::new(&[1f32, 0., -1.], &CPU).unwrap()));
    let y = layer.forward(&Tensor::new(&[[10f32, 100.]], &CPU).unwrap()).unwrap();
    assert_eq!(y.to_vec2::<f32>().unwrap(), [[211., 430., 649.]]);
    let table = Embedding::new(weight, 2);
    let rows = table.forward(&Tensor::new(&[2u32, 0], &CPU).unwrap()).unwrap();
    assert_eq!(rows.to_vec2::<f32>().unwrap(), [[5., 6.], [1., 2.]]);
    let packed = QuantTensor::quantize(&input(&[16, 64]), QuantFormat::NVFP4).unwrap();
    assert_eq!(LayerWeight::from(packed.clone()).size_in_bytes(), 16 * 64 * 9 / 16);
    assert_eq!(Embedding::from_quant(packed.clone(), DType::F16).unwrap().hidden_size(), 64);
    assert!(format!("{:?}", Linear::from_quant(packed, None)).contains("Quantized"));
}

#[test]
fn a_layer_may_stand_at_the_root() {
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("model.safetensors");
    let weight = QuantTensor::quantize(&input(&[8, 64]), QuantFormat::MXFP4).unwrap();
    let tensors = [("weight", weight.packed().clone()), ("scales", weight.scales().clone())];
    candle_core::safetensors::save(&tensors.into_iter().collect(), &file).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.modules(), [""]);
    let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &CPU);
    let layer = linear_no_bias(64, 8, vb.clone()).unwrap();
    assert_eq!(layer.weight().format(), Some(QuantFormat::MXFP4));
    let dequantized = weight.dequantize(DType::F32).unwrap();
    let through_candle = vb.dense().get((8, 64), "weight").unwrap();
    assert_eq!(through_candle.to_vec2::<f32>().unwrap(), dequantized.to_vec2::<f32>().unwrap());
    let error = linear_no_bias(64, 9, vb).unwrap_err().to_string();
    assert!(error.contains("`weight`: expected shape [9, 64], found shape [8, 64]"), "{error}");
}

/// Packed or dense, together or one by one.
#[test]
fn layers_that_share_their_input_give_what_they_give_alone() {
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let packed = |n| {
        let weight = QuantTensor::quantize(&input(&[n, 64]), QuantFormat::MXFP4).unwrap();
        Linear::from_quant(weight, Some(input(&[n])))
    };
    let dense = |n| Linear::new(input(&[n, 64]), None);
    let (x, residual) = (input(&[3, 64]), input(&[3, 20]));
    for (a, b) in [(packed(20), packed(20)), (packed(20), dense(20)), (dense(20), dense(20))] {
        let (alone_a, alone_b) = (a.forward(&x).unwrap(), b.forward(&x).unwrap());
        let [both_a, both_b] = forward_all([&a, &b], &x).unwrap();
        assert_eq!((values(&both_a), values(&both_b)), (values(&alone_a), values(&alone_b)));
        let gated = (alone_a.silu().unwrap() * &alone_b).unwrap();
        assert_eq!(values(&swiglu(&a, &b, &x).unwrap()), values(&gated));
        let sum = (&residual + &alone_b).unwrap();
        assert_eq!(values(&forward_add(&b, &x, &residual).unwrap()), values(&sum));
    }
    assert!(forward_all([&packed(20), &dense(7)], &input(&[3, 32])).is_err());
    assert!(swiglu(&packed(20), &packed(7), &x).is_err());
    assert!(forward_add(&packed(7), &x, &residual).is_err());
}

/// A dense tensor and a packed one, each asked for in a shape that is not its own.
#[test]
fn a_wrong_shape_names_the_file_that_holds_the_tensor() {
    let folder = fixture("qwen3-affine-b4-g64-sharded");
    let index = std::fs::read(folder.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let shard_of = |tensor: &str| folder.join(index["weight_map"][tensor].as_str().unwrap());
    let ours = builder("qwen3-affine-b4-g64-sharded");
    let candles = ours.dense();
    let mut shards = std::collections::BTreeSet::new();
    let up = "model.layers.1.mlp.up_proj.weight";
    for (name, shape, found) in [
        ("model.norm.weight", &[129][..], "[128]"),
        ("model.layers.0.input_layernorm.weight", &[129], "[128]"),
        (up, &[257, 128], "[256, 128]"),
    ] {
        let message = candles.get(shape, name).unwrap_err().to_string();
        let shard = shard_of(name);
        let expected = format!(
            "{}: `{name}`: expected shape {shape:?}, found shape {found}; \
             check that config.json belongs to these weights",
            shard.display()
        );
        assert!(message.contains(&expected), "{message}");
        shards.insert(shard);
    }
    assert!(shards.len() > 1, "{shards:?}");
    let module = ours.pp(up.strip_suffix(".weight").unwrap());
    let message = linear_no_bias(128, 257, module).unwrap_err().to_string();
    let expected = format!("{}: `{up}`: expected shape [257, 128]", shard_of(up).display());
    assert!(message.contains(&expected), "{message}");
}
