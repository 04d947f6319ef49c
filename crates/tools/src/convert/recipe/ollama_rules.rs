//! Ollama's rules: what its importer makes of each tensor of a dense model, as its version of August 2026 does. The exceptions
//! that it has for single architectures are not followed.

use super::spec::Spec;
use super::tensor_info::TensorInfo;
use candle_quant::format::Bits;
use candle_quant::QuantFormat;

/// Smaller tensors are kept.
const SMALL: usize = 1024;

/// What a tensor becomes if the model is to become `asked`.
pub(super) fn decide(tensor: &TensorInfo, asked: Spec) -> Spec {
    let Spec::Packed(format) = asked else {
        return asked;
    };
    let (name, is_expert) = (tensor.name, is_expert(tensor.name));
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let ends = |parts: &[&str]| parts.iter().any(|part| name.ends_with(part));
    let fits = |format: QuantFormat| {
        tensor.dims.last().is_some_and(|k| *k > 0 && k.is_multiple_of(format.group_size()))
    };
    let elements = tensor.dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
    let is_matrix = match tensor.dims {
        [_, _] => true,
        [_, _, _] => is_expert,
        _ => false,
    };
    let is_kept = !is_expert && (!ends(&[".weight"]) || has(&["audio_tower", "embed", "norm", "ln_"]))
        || !is_matrix
        || elements.is_some_and(|elements| elements < SMALL)
        || ends(&[
            ".mlp.gate.weight",
            ".mixer.gate.weight",
            ".shared_expert_gate.weight",
            ".router.proj.weight",
        ]);
    if is_kept {
        return Spec::Keep;
    }
    let (wide, widens_experts) = match format.element().uint() {
        Some(_) => (format.with_bits(Bits::Eight), true),
        None => (QuantFormat::MXFP8, false),
    };
    let decided = if ends(&["lm_head.weight"]) {
        wide
    } else if has(&["vision", "visual"]) || !fits(format) {
        return Spec::Keep;
    } else if format.bits() == 4 && (widens_experts || !is_expert) && is_sensitive(name) && fits(wide) {
        wide
    } else {
        format
    };
    if fits(decided) {
        Spec::Packed(decided)
    } else {
        Spec::Keep
    }
}

/// Whether a tensor is the weight of experts, shared ones included.
pub(in crate::convert) fn is_expert(name: &str) -> bool {
    let modules = [".experts.", ".mlp.switch_mlp.", ".mlp.shared_experts.", ".mixer.shared_experts."];
    modules.iter().any(|module| name.contains(module))
        && !name.ends_with(".bias")
        && !name.ends_with(".scale")
}

fn is_sensitive(name: &str) -> bool {
    [".v_proj", ".k_proj", "down_proj"].iter().any(|projection| name.contains(projection))
}
