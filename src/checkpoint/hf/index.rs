//! Which logical tensors the stored ones make up.

use super::bitsandbytes;
use super::config::Method;
use super::fp8;
use super::gpt_oss::{self, Half};
use super::hqq;
use super::module::REMEDY;
use crate::checkpoint::file::{Tensors, Warnings};
use crate::checkpoint::weight::tensor_of;
use crate::{Error, Result};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};

/// All tensors by the names that models use.
pub(super) type Index = BTreeMap<String, IndexEntry>;

/// Where a tensor comes from.
#[derive(Debug)]
pub(super) enum IndexEntry {
    /// The stored tensor of the same name.
    Same,
    /// A stored tensor of another name, or half of it.
    Stored { stored: String, half: Option<Half> },
    /// Several stored tensors, of which `lead` holds the codes.
    Quantized { lead: String, packing: Packing },
}

/// How a module's weight is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// gpt-oss: `_blocks` and `_scales`; two weights share them if there is a half.
    Blocks(Option<Half>),
    /// MLX's own: `weight` and `scales`.
    Words,
    Awq,
    Gptq,
    BitsAndBytes,
    CompressedTensors,
    Hqq,
    ModelOpt,
    Float8,
}

impl Packing {
    /// The stored name of a module in front of the names of its tensors, and what stands between them.
    pub(super) fn module_of(self, lead: &str) -> (&str, &'static str) {
        match self {
            Self::Blocks(_) => (lead.strip_suffix(gpt_oss::BLOCKS).unwrap_or(lead), ""),
            Self::Words
            | Self::Awq
            | Self::Gptq
            | Self::BitsAndBytes
            | Self::CompressedTensors
            | Self::Hqq
            | Self::ModelOpt
            | Self::Float8 => lead.rsplit_once('.').map_or(("", ""), |(module, _)| (module, ".")),
        }
    }

    /// The names of the tensors beside the lead that belong to the weight.
    fn parts(self) -> &'static [&'static str] {
        match self {
            Self::Blocks(_) => &[gpt_oss::SCALES],
            Self::Words => &["scales"],
            Self::BitsAndBytes => &[
                bitsandbytes::TYPES[0].state,
                bitsandbytes::TYPES[1].state,
                bitsandbytes::ROW_SCALES,
                "weight.absmax",
                "weight.quant_map",
                "weight.nested_absmax",
                "weight.nested_quant_map",
                "weight_format",
            ],
            Self::Hqq => &hqq::PARTS,
            Self::Awq | Self::Gptq => &["qzeros", "scales", "g_idx"],
            Self::CompressedTensors => &[
                "weight_scale",
                "weight_global_scale",
                "weight_zero_point",
                "weight_shape",
                "weight_g_idx",
                "input_scale",
                "input_zero_point",
                "input_global_scale",
                "output_scale",
                "output_zero_point",
            ],
            Self::ModelOpt => &["weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"],
            Self::Float8 => &[
                fp8::SCALES[0],
                fp8::SCALES[1],
                fp8::SCALES[2],
                fp8::SCALES[3],
                "activation_scale",
                "input_scale",
                "qscale_act",
            ],
        }
    }
}

/// What tools keep in an attention for rounded queries, keys and values, which are not rounded here; keys and values shared
/// `kv_scale` in the first FP8 checkpoints.
const OF_CACHE: [&str; 7] =
    ["q_scale", "k_scale", "v_scale", "kv_scale", "q_zero_point", "k_zero_point", "v_zero_point"];
/// What AutoFP8 and compressed-tensors called the same before: the outputs of these projections.
const OUTPUTS: [&str; 2] = ["output_scale", "output_zero_point"];
const OF_QUERIES_KEYS_VALUES: [&str; 4] = ["q_proj", "k_proj", "v_proj", "qkv_proj"];

/// Whether a tensor is about rounded queries, keys and values.
fn is_of_cache(name: &str) -> bool {
    let (module, last) = name.rsplit_once('.').unwrap_or(("", name));
    let of_output = || {
        let projection = module.rsplit('.').next().unwrap_or_default();
        OUTPUTS.contains(&last) && OF_QUERIES_KEYS_VALUES.contains(&projection)
    };
    OF_CACHE.contains(&last) || of_output()
}

/// The logical tensors of a checkpoint.
///
/// # Errors
/// If two of them have the same name.
pub(super) fn of(tensors: &Tensors, method: &Method, warnings: &Warnings) -> Result<Index> {
    let mut index = Index::new();
    // Stored tensors that are not known by their own names.
    let mut hidden = BTreeSet::new();
    let mut insert = |stored: &str, name: String, entry: IndexEntry| {
        let twice = index.contains_key(&name) || (name != stored && tensors.contains_key(&name));
        if let Some(tensor) = tensors.get(stored).filter(|_| twice) {
            let (expected, found) = ("each weight in one form", format!("`{name}` as well"));
            return Err(Error::tensor(tensor.path(), stored, expected, found, REMEDY));
        }
        index.insert(name, entry);
        Ok(())
    };
    for lead in tensors.keys() {
        let Some(packing) = packing_of(tensors, method, lead) else { continue };
        let (module, separator) = packing.module_of(lead);
        hidden.insert(lead.to_owned());
        hidden.extend(packing.parts().iter().map(|part| format!("{module}{separator}{part}")));
        if packing != Packing::Blocks(None) {
            insert(
                lead,
                tensor_of(module, "weight"),
                IndexEntry::Quantized { lead: lead.to_owned(), packing },
            )?;
            continue;
        }
        let bias = format!("{module}{}", gpt_oss::BIAS);
        for (path, half) in gpt_oss::weights_of(module) {
            let packing = Packing::Blocks(half);
            insert(
                lead,
                tensor_of(&path, "weight"),
                IndexEntry::Quantized { lead: lead.to_owned(), packing },
            )?;
            if tensors.contains_key(&bias) {
                insert(&bias, tensor_of(&path, "bias"), IndexEntry::Stored { stored: bias.clone(), half })?;
            }
        }
        hidden.insert(bias);
    }
    // Whatever rounds the weights: the cache is rounded by other tools, afterwards.
    for (name, tensor) in tensors.iter().filter(|(name, _)| is_of_cache(name)) {
        warnings.once(
            "scales of rounded keys and values".into(),
            format!(
                "{}: scales of rounded keys and values (`{name}`) are not used: neither is rounded here",
                tensor.path().display()
            ),
        );
        hidden.insert(name.to_owned());
    }
    for name in tensors.keys().filter(|name| !hidden.contains(*name)) {
        index.insert(name.to_owned(), IndexEntry::Same);
    }
    Ok(index)
}

/// How the weight is packed whose codes this tensor has; `None` if it has no codes.
fn packing_of(tensors: &Tensors, method: &Method, name: &str) -> Option<Packing> {
    let (module, last) = name.rsplit_once('.').unwrap_or(("", name));
    let has = |part: &str| tensors.contains_key(&tensor_of(module, part));
    let is_float8 = || tensors.get(name).is_some_and(|tensor| tensor.dtype() == Dtype::F8_E4M3);
    let is_int8 = || tensors.get(name).is_some_and(|tensor| tensor.dtype() == Dtype::I8);
    match method {
        Method::Mxfp4 if last.ends_with(gpt_oss::BLOCKS) => Some(Packing::Blocks(None)),
        Method::Mxfp4 | Method::Mxfp8(_) if last == "weight" && has("scales") => Some(Packing::Words),
        Method::Mxfp8(_) | Method::Fp8(_) if last == "weight" && (is_float8() || has(fp8::SCALES[0])) => {
            Some(Packing::Float8)
        }
        Method::ModelOpt if last == "weight" && has("weight_scale") => Some(Packing::ModelOpt),
        Method::CompressedTensors(_)
            if last == "weight_packed"
                || last == "weight" && (is_int8() || is_float8()) && has("weight_scale") =>
        {
            Some(Packing::CompressedTensors)
        }
        Method::Awq(_) if last == "qweight" => Some(Packing::Awq),
        Method::Gptq(_) if last == "qweight" => Some(Packing::Gptq),
        Method::Hqq if last == hqq::CODES => Some(Packing::Hqq),
        Method::BitsAndBytes
            if last == "weight"
                && (bitsandbytes::TYPES.iter().any(|kind| has(kind.state))
                    || is_int8() && has(bitsandbytes::ROW_SCALES)) =>
        {
            Some(Packing::BitsAndBytes)
        }
        Method::Mxfp4
        | Method::Mxfp8(_)
        | Method::Fp8(_)
        | Method::ModelOpt
        | Method::CompressedTensors(_)
        | Method::Awq(_)
        | Method::Gptq(_)
        | Method::BitsAndBytes
        | Method::Hqq => None,
    }
}
