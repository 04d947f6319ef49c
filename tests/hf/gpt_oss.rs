//! gpt-oss as it was published and as mlx-lm converts it: one model under the same names.

use crate::hf::{read_json, sha256_of, values};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, QuantMethod, Weight};
use candle_quant::{QuantFormat, QuantTensor, VarBuilder};
use candle_quant_models::{Config, Model, RopeScaling};
use half::bf16;
use serde_json::json;

fn open(layout: &str) -> Checkpoint {
    Checkpoint::open(crate::common::fixture(&format!("gptoss-mxfp4-{layout}"))).unwrap()
}

/// The elements of a tensor, whatever they are, as bytes.
fn bytes(tensor: &Tensor) -> Vec<u8> {
    match tensor.dtype() {
        DType::U8 => tensor.flatten_all().unwrap().to_vec1().unwrap(),
        DType::U32 => tensor
            .flatten_all()
            .unwrap()
            .to_vec1::<u32>()
            .unwrap()
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect(),
        DType::BF16 => tensor
            .flatten_all()
            .unwrap()
            .to_vec1::<bf16>()
            .unwrap()
            .into_iter()
            .flat_map(bf16::to_le_bytes)
            .collect(),
        other => panic!("{other:?}"),
    }
}

/// The packed experts of a module, 4 times 128 x 128.
fn load(checkpoint: &Checkpoint, module: &str) -> QuantTensor {
    match checkpoint.weight(module, Some(128)).unwrap() {
        Weight::Packed(packed) => {
            assert_eq!((packed.format(), packed.dims()), (QuantFormat::MXFP4, [4, 128, 128].as_slice()));
            assert_eq!(packed.size_in_bytes(), 4 * 128 * (64 + 4));
            packed.load(&Device::Cpu).unwrap()
        }
        other => panic!("{module}: {other:?}"),
    }
}

/// What mlx-lm makes of the published layout is what models see: names, words, scales, biases, bit for bit.
#[test]
fn the_published_layout_is_what_mlx_lm_makes_of_it() {
    let checkpoint = open("hf");
    assert_eq!(checkpoint.kind(), CheckpointKind::HuggingFace(QuantMethod::Mxfp4));
    let sanitized = read_json(checkpoint.path().join("sanitized.json"));
    let sanitized = sanitized.as_object().unwrap();
    let (scales, names): (Vec<_>, Vec<_>) = sanitized.keys().partition(|name| name.ends_with(".scales"));
    assert!(checkpoint.tensor_names().eq(names.iter().map(|name| name.as_str())));
    assert_eq!(scales.len(), 6);
    let check = |name: &str, tensor: &Tensor| {
        let expected = &sanitized[name];
        assert_eq!(json!(tensor.dims()), expected["shape"], "{name}");
        assert_eq!(sha256_of(&bytes(tensor)), expected["sha256"].as_str().unwrap(), "{name}");
    };
    for name in names {
        match name.strip_suffix(".weight") {
            Some(module) if scales.contains(&&format!("{module}.scales")) => {
                let packed = load(&checkpoint, module);
                check(name, packed.packed());
                check(&format!("{module}.scales"), packed.scales());
            }
            _ => {
                let dense = checkpoint.dense(name).unwrap();
                assert_eq!(dense.dtype(), DType::BF16);
                let loaded = dense.load(DType::BF16, &Device::Cpu).unwrap();
                assert_eq!((loaded.dims(), bytes(&loaded).len()), (dense.dims(), dense.size_in_bytes()));
                check(name, &loaded);
            }
        }
    }
}

/// Another model of the same shape, converted by mlx-lm.
#[test]
fn both_layouts_have_the_same_names() {
    let (published, mlx) = (open("hf"), open("mlxlm"));
    assert_eq!(mlx.kind(), CheckpointKind::Mlx);
    assert!(published.tensor_names().eq(mlx.tensor_names()));
    assert_eq!(published.modules(), mlx.modules());
    for name in published.tensor_names() {
        assert!(published.contains(name) && published.tensor(name, None).is_ok(), "{name}");
    }
    for stored in ["gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias", "down_proj_bias"] {
        assert!(!published.contains(&format!("model.layers.0.mlp.experts.{stored}")));
    }
    for layout in [&published, &mlx] {
        for module in ["gate_proj", "up_proj", "down_proj"] {
            load(layout, &format!("model.layers.1.mlp.experts.{module}"));
        }
    }
}

#[test]
fn modules_are_what_mlx_lm_says() {
    for (layout, count) in [("hf", 6), ("mlxlm", 18)] {
        let checkpoint = open(layout);
        let expected = read_json(checkpoint.path().join("expect.json"));
        let expected = expected["modules"].as_object().unwrap();
        assert_eq!(expected.len(), count);
        for module in checkpoint.modules() {
            match (checkpoint.weight(&module, None).unwrap(), expected.get(&module)) {
                (Weight::Dense(_), None) => {}
                (Weight::Packed(packed), Some(expected)) => {
                    assert_eq!(packed.format().mode(), expected["mode"], "{module}");
                    assert_eq!(json!(packed.dims().last()), expected["in_dims"], "{module}");
                    assert_eq!(
                        checkpoint.contains(&format!("{module}.bias")),
                        expected["has_bias"],
                        "{module}"
                    );
                }
                (weight, expected) => panic!("{module}: {weight:?}, {expected:?}"),
            }
        }
    }
}

/// The embedding rows of the reference, which mlx-lm took from the same file.
#[test]
fn the_embedding_is_that_of_mlx_lm() {
    for layout in ["hf", "mlxlm"] {
        let checkpoint = open(layout);
        let refs =
            candle_core::safetensors::load(checkpoint.path().join("refs.safetensors"), &Device::Cpu).unwrap();
        let tokens = refs["tokens"].to_dtype(DType::U32).unwrap();
        let table = checkpoint.weight("model.embed_tokens", Some(128)).unwrap();
        let table = table.to_dense(DType::F32, &Device::Cpu).unwrap();
        let rows = table.index_select(&tokens, 0).unwrap();
        assert!(values(&rows) == values(&refs["hidden_embed_f32"]), "{layout}");
    }
}

#[test]
fn the_published_model_computes_what_transformers_and_mlx_lm_compute() {
    let checkpoint = open("hf");
    let mut config = Config::from_json(checkpoint.config()).unwrap();
    for file in ["transformers.safetensors", "refs.safetensors"] {
        let (tokens, expected) = crate::common::reference_in(&checkpoint.path().join(file));
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        let logits = Model::new(&config, vb).unwrap().forward(&tokens, 0).unwrap();
        let distance = crate::common::distance(&logits, &expected);
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{file}: {distance:?}");
        // mlx-lm 0.32.2 does not read this key and rounds.
        let RopeScaling::Yarn { truncate, .. } = &mut config.rope.scaling else { panic!("YaRN") };
        *truncate = true;
    }
}

/// Rows 0, 2, .. are the gate's, rows 1, 3, .. those of the other projection.
#[test]
fn rows_alternate() {
    let case = crate::hf::case_of("gpt-oss");
    let checkpoint = crate::hf::open(&case.quantization, &case.entries).unwrap();
    let whole = &case.entries;
    for (module, first) in [("e.gate_proj", 0), ("e.up_proj", 1)] {
        let Weight::Packed(packed) = checkpoint.weight(module, Some(64)).unwrap() else { panic!("{module}") };
        assert_eq!(packed.dims(), [2, 4, 64]);
        let loaded = packed.load(&Device::Cpu).unwrap();
        let expected: Vec<u8> = whole[0].3.chunks(32).skip(first).step_by(2).flatten().copied().collect();
        assert_eq!(bytes(loaded.packed()), expected);
        let bias =
            checkpoint.dense(&format!("{module}.bias")).unwrap().load(DType::F32, &Device::Cpu).unwrap();
        assert_eq!(bias.dims(), [2, 4]);
        let expected: Vec<f32> = whole[2]
            .3
            .chunks(2)
            .skip(first)
            .step_by(2)
            .map(|pair| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16))
            .collect();
        assert_eq!(values(&bias), expected);
    }
}
