//! `convert` writes what `mlx_lm.convert` writes, byte for byte.

use super::common::{bundled, convert, digests, tensors};
use candle_core::DType;
use candle_quant_tools::convert::{ConvertOptions, Recipe};
use std::collections::BTreeMap;

/// The digests of `tests/peers/convert_mlx.py`.
const EXPECTED: &str =
    include_str!(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/convert/mlx_lm.json"));

#[test]
fn the_output_is_that_of_mlx_lm() {
    let expected: BTreeMap<String, Vec<String>> = serde_json::from_str(EXPECTED).unwrap();
    assert_eq!(expected.len(), 18 + 3 + 2 + 4);
    let source = bundled("tiny-bf16");
    for (case, expected) in expected {
        let words: Vec<&str> = case.split('-').collect();
        let (recipe, dtype) = match words[..] {
            ["affine", bits, group] => {
                (Recipe::named("uniform", format!("{bits}:{group}").parse().unwrap()), None)
            }
            ["affine", bits, group, dtype] => {
                let dtype = if dtype == "float16" { DType::F16 } else { DType::F32 };
                (Recipe::named("uniform", format!("{bits}:{group}").parse().unwrap()), Some(dtype))
            }
            [mode] if mode.starts_with("mixed") => (Recipe::named(mode, "4".parse().unwrap()), None),
            [mode] => (Recipe::named("uniform", mode.parse().unwrap()), None),
            _ => panic!("{case}"),
        };
        let mut options = ConvertOptions::mlx(recipe.unwrap());
        options.dtype = dtype;
        let out = convert(&source, &options);
        let found = tensors(out.path());
        let wrong: Vec<_> = found
            .keys()
            .zip(digests(&found))
            .zip(&expected)
            .filter(|((_, a), b)| a != *b)
            .map(|(a, _)| a.0)
            .collect();
        assert_eq!((found.len(), wrong), (expected.len(), vec![]), "{case}");
    }
}
