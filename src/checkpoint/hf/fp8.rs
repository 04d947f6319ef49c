//! 8-bit floats with scales for tiles: `weight` F8_E4M3 `[N, K]` and `weight_scale_inv`, one scale for each
//! `weight_block_size`, or one for all. Despite its name the scale multiplies.
//!
//! As `FP8Linear` and `Fp8Dequantize` have it (src/transformers/integrations/finegrained_fp8.py of
//! huggingface/transformers; quantizers/quantizer_finegrained_fp8.py for the other names and for exponents in
//! U8). What becomes of it says `weight/tiled.rs`.

use super::module::Module;
use crate::checkpoint::file::Warnings;
use crate::checkpoint::weight::{TiledFp8, Tiles, Weight};
use crate::Result;
use safetensors::Dtype;

/// The names that writers give to the scales.
pub(super) const SCALES: [&str; 4] = ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"];

/// What the config says of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) struct Blocks {
    /// Rows and columns that share a scale; `None`: all of them.
    pub size: Option<(usize, usize)>,
    /// Whether scales in U8 are exponents.
    pub exponents: bool,
}

pub(super) fn weight(module: &Module, blocks: Blocks, warnings: &Warnings) -> Result<Weight> {
    let codes = module.require("weight", "weight", &[Dtype::F8_E4M3])?;
    let ([n], k) = module.rows("weight", codes)? else {
        return Err(module.wrong("weight", codes, "a shape [N, K]", format!("{:?}", codes.dims())));
    };
    let part = SCALES.into_iter().find(|part| module.get(part).is_some()).unwrap_or(SCALES[0]);
    let floats = [Dtype::F32, Dtype::BF16, Dtype::F16];
    let dtypes = match blocks.exponents {
        true => [floats.as_slice(), &[Dtype::F8_E8M0, Dtype::U8]].concat(),
        false => [floats.as_slice(), &[Dtype::F8_E8M0]].concat(),
    };
    let scales = module.require(part, "weight", &dtypes)?;
    let single = scales.dims().is_empty() || scales.dims() == [1];
    let of_rows = scales.dims() == [*n, 1] || scales.dims() == [*n];
    let (rows, columns) = match (single, blocks.size) {
        (true, _) => (*n, k),
        (false, None) if of_rows => (1, k),
        (false, Some(size)) => size,
        (false, None) => {
            let expected = "one scale, or one for each row, as the config has no weight_block_size";
            return Err(module.wrong(part, scales, expected, format!("shape {:?}", scales.dims())));
        }
    };
    if let (false, Some(_)) = (single, blocks.size) {
        module.check_dims(part, scales, &[n.div_ceil(rows), k.div_ceil(columns)])?;
    }
    let tiles = Tiles::of(rows, columns, k);
    let tiled = TiledFp8 { n: *n, k, codes: codes.clone(), scales: scales.clone(), tiles };
    let weight = tiled.into_weight(module.path).ok_or_else(|| {
        let expected = "tiles whose columns fill a part of 32 below one exponent each";
        module.wrong("weight", codes, expected, format!("K = {k}, tiles of {rows} x {columns}"))
    })?;
    if let Weight::Dense(_) = weight {
        warnings.once(
            "fp8 of narrow tiles".into(),
            format!(
                "{}: fp8 with a scale for so few columns takes less memory as numbers: such weights (`{}`) are dequantized \
                 while loading",
                codes.path().display(),
                module.path
            ),
        );
    }
    Ok(weight)
}
