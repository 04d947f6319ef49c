//! The architectures of GGUF files: what each calls its tensors and keys, as llama.cpp's converter writes them, and what
//! models call them.

mod dense;
mod experts;
mod gemma;
mod latents;
mod linear;

use super::config::{Map, Source};
use super::metadata::Metadata;
use crate::Result;

/// How llama.cpp numbers what makes scores of a router's logits.
pub(super) const SOFTMAX: u32 = 1;
pub(super) const SIGMOID: u32 = 2;

/// An architecture, or one of the model types that files call alike.
pub(super) struct Architecture {
    /// What files call it, and before the keys that belong to the model.
    pub name: &'static str,
    pub model_type: &'static str,
    /// Whether a file of this name is of this model type; the first of which that is so is taken.
    pub is_this: fn(&Metadata) -> Result<bool>,
    /// What tensors of a layer are called: those that differ from what most architectures have.
    pub parts: &'static [(&'static str, &'static str)],
    pub final_norm: &'static str,
    /// Whether rows of queries and keys were put in the order of adjacent pairs.
    pub is_paired: bool,
    /// Whether the converter adds one to the weights of norms.
    pub norms_are_sums: bool,
    /// Whether early files have MXFP4 under the number of a type that was given up.
    pub has_early_mxfp4: bool,
    /// In which order heads of linear attention are.
    pub linear: Option<LinearOrder>,
    /// Values of the file that are fields of the config.
    pub keys: &'static [Key],
    /// Fields that say whether the first layer has a tensor.
    pub flags: &'static [(&'static str, &'static str)],
    /// Fields that the file does not say, and all models of the type have in common.
    pub common: &'static [(&'static str, Constant)],
    /// What makes scores of a router's logits; `None` if files say something else than models do.
    pub scores: Option<u32>,
    /// Whether keys and values are made of latents, of which the sizes of heads say something else.
    pub has_latents: bool,
    /// What takes more than a table.
    pub others: fn(&Source, &mut Map) -> Result<()>,
}

/// In which order the converter puts heads of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinearOrder {
    /// Those of values by heads of keys, and so are the rows of one projection to what makes `beta` and `decay`.
    ByKeys,
    /// The first head of values of each head of keys, then the second of each, and so on.
    Tiled,
}

/// A value of the file, without the architecture's name before its key, and what it is in a config.
pub(super) struct Key {
    pub key: &'static str,
    pub field: &'static str,
    pub kind: KeyKind,
    pub is_required: bool,
}

#[derive(Clone, Copy)]
pub(super) enum KeyKind {
    /// A whole number above zero; zero is as good as absent.
    Size,
    /// A whole number.
    Index,
    /// A number.
    Number,
    /// Yes or no; absent is no.
    Flag,
}

/// A value of a config.
#[derive(Clone, Copy)]
pub(super) enum Constant {
    Text(&'static str),
    Bool(bool),
    Size(u32),
}

const fn key(key: &'static str, field: &'static str, kind: KeyKind) -> Key {
    Key { key, field, kind, is_required: false }
}

const fn size(name: &'static str, field: &'static str) -> Key {
    key(name, field, KeyKind::Size)
}

const fn index(name: &'static str, field: &'static str) -> Key {
    key(name, field, KeyKind::Index)
}

const fn number(name: &'static str, field: &'static str) -> Key {
    key(name, field, KeyKind::Number)
}

const fn flag(name: &'static str, field: &'static str) -> Key {
    key(name, field, KeyKind::Flag)
}

const fn required(key: Key) -> Key {
    Key { is_required: true, ..key }
}

const EXPERTS: &str = "expert_count";
const LAYER_NORM_EPS: &str = "attention.layer_norm_epsilon";
const RMS_NORM_EPS: Key = number("attention.layer_norm_rms_epsilon", "rms_norm_eps");
const RMS_NORM: &[Key] = &[required(RMS_NORM_EPS)];
const SILU: (&str, Constant) = ("hidden_act", Constant::Text("silu"));
const QKV_BIAS: (&str, &str) = ("attention_bias", "self_attn.q_proj.bias");

/// What most architectures have in common.
const LLAMA: Architecture = Architecture {
    name: "llama",
    model_type: "llama",
    is_this: |_| Ok(true),
    parts: &[],
    final_norm: "model.norm",
    is_paired: false,
    norms_are_sums: false,
    has_early_mxfp4: false,
    linear: None,
    keys: &[RMS_NORM_EPS],
    flags: &[QKV_BIAS, ("mlp_bias", "mlp.gate_proj.bias")],
    common: &[SILU],
    scores: Some(SOFTMAX),
    has_latents: false,
    others: |_, _| Ok(()),
};

/// All of them. Of those with one name, the first of which [`is_this`](Architecture::is_this) is so is a file's.
const ARCHITECTURES: [&[Architecture]; 5] = [
    experts::ARCHITECTURES,
    latents::ARCHITECTURES,
    linear::ARCHITECTURES,
    dense::ARCHITECTURES,
    gemma::ARCHITECTURES,
];

/// All of them, one after another.
pub(super) fn all() -> impl Iterator<Item = &'static Architecture> {
    ARCHITECTURES.into_iter().flatten()
}

/// That of a file; `None` if it is not known here.
pub(super) fn of(metadata: &Metadata) -> Result<Option<&'static Architecture>> {
    let Some(name) = metadata.text("general.architecture")? else { return Ok(None) };
    for architecture in all().filter(|architecture| architecture.name == name) {
        if (architecture.is_this)(metadata)? {
            return Ok(Some(architecture));
        }
    }
    Ok(None)
}

/// Whether the file has a size above zero at this key.
fn has(metadata: &Metadata, key: &str) -> Result<bool> {
    Ok(metadata.size(key)?.unwrap_or(0) > 0)
}

/// That of a model type; `None` if it is not known here.
pub(super) fn of_type(model_type: &str) -> Option<&'static Architecture> {
    all().find(|architecture| architecture.model_type == model_type)
}
