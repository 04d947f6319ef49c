//! NVIDIA ModelOpt's NVFP4: `weight` U8 `[N, K/2]`, `weight_scale` F8_E4M3 `[N, K/16]`, and `weight_scale_2`,
//! F32, which multiplies all scales; and its FP8: `weight` F8_E4M3 `[N, K]` and `weight_scale`, one number or one for each row.
//! `input_scale` is for quantized activations and is not used.
//!
//! As `NVFP4QTensor` and `to_quantized_weight` write them (modelopt/torch/quantization/qtensor/nvfp4_tensor.py and
//! modelopt/torch/export/quant_utils.py of NVIDIA/Model-Optimizer), with the names and settings of modelopt/torch/export.

use super::fp8::{self, Blocks};
use super::module::{scale_dtypes, Module, PartNames};
use crate::checkpoint::file::Warnings;
use crate::checkpoint::weight::{GlobalScaleMeaning, Weight};
use crate::{QuantFormat, Result};
use safetensors::Dtype;

pub(super) fn weight(module: &Module, warnings: &Warnings) -> Result<Weight> {
    module.refuse("pre_quant_scale", "a scale of the layer's input (AWQ) is not applied")?;
    if module.get("weight").is_some_and(|codes| codes.dtype() == Dtype::F8_E4M3) {
        return fp8::weight(module, Blocks { size: None, exponents: false }, warnings);
    }
    let global_scale = Some(("weight_scale_2", GlobalScaleMeaning::Multiplier));
    let names = PartNames { codes: "weight", scales: "weight_scale", global_scale };
    let format = QuantFormat::NVFP4;
    module.parts(format, &names, &[Dtype::U8], scale_dtypes(format.scale()))
}
