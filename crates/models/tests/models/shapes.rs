//! The tensors that a config says a model has, against those of checkpoints.

use candle_quant::Checkpoint;
use candle_quant_models::Config;
use std::path::Path;

/// What the crate's own loader asks for is what is listed here: the bundled models have nothing else.
#[test]
fn the_list_is_that_of_the_loader() {
    for name in [
        "assets/tiny",
        "assets/tiny-bf16",
        "tests/fixtures/mlx/llama-untied-bias-b4-g64-f16",
        "tests/fixtures/mlx/qwen3moe-affine-b4-g64",
        "tests/fixtures/mlx/gptoss-mxfp4-mlxlm",
        "tests/fixtures/mlx/gptoss-mxfp4-hf",
        "tests/fixtures/uqff/moe_afq4",
    ] {
        let checkpoint = Checkpoint::open(Path::new(env!("CANDLE_QUANT_REPOSITORY")).join(name)).unwrap();
        let config = Config::from_json(checkpoint.config()).unwrap();
        let (expected, absent_layers) = config.inventory(checkpoint.tensor_names());
        assert_eq!(absent_layers, None, "{name}");
        let required: Vec<_> = expected.iter().filter(|(_, tensor)| tensor.required).collect();
        assert!(required.iter().all(|(tensor, _)| checkpoint.contains(tensor)), "{name}");
        for tensor in checkpoint.tensor_names() {
            let k = config.in_features(tensor.strip_suffix(".weight").unwrap_or(tensor));
            let found = checkpoint.tensor(tensor, k).unwrap();
            let expected = expected.get(tensor).unwrap_or_else(|| panic!("{name}: {tensor}"));
            assert_eq!(found.dims(), expected.dims, "{name}: {tensor}");
        }
    }
}
