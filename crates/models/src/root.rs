//! Where the decoder stands in a checkpoint: that of a model with more parts than text is not at the root.

use candle_quant::nn::VarBuilder;

/// The paths of the decoder and of its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Root {
    /// Of the embedding, the layers and the last norm.
    pub decoder: &'static str,
    pub head: &'static str,
}

/// The layer that a tensor belongs to.
pub fn layer_of(name: &str) -> Option<usize> {
    let below = |root: &Root| name.strip_prefix(root.decoder)?.strip_prefix(".layers.");
    ROOTS.iter().find_map(below)?.split('.').next()?.parse().ok()
}

/// Whether a module is the norm of this name behind all layers.
pub(super) fn is_final_norm(module: &str, name: &str) -> bool {
    let is_there =
        |root: &Root| module.strip_prefix(root.decoder).and_then(|rest| rest.strip_prefix('.')) == Some(name);
    ROOTS.iter().any(is_there)
}

/// As a model of text alone, as mlx-lm and older versions of transformers write models of more, as newer ones do.
const ROOTS: [Root; 3] = [
    Root { decoder: "model", head: "lm_head" },
    Root { decoder: "language_model.model", head: "language_model.lm_head" },
    Root { decoder: "model.language_model", head: "lm_head" },
];

/// What mlx-lm calls a tensor in its models of more parts than text, `None` if that is its name already or not known.
///
/// ```
/// use candle_quant_models::name_in_mlx_lm;
///
/// for name in ["model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"] {
///     let found = name_in_mlx_lm(name).unwrap();
///     assert_eq!(found, "language_model.model.layers.0.mlp.up_proj.weight");
///     assert_eq!(name_in_mlx_lm(&found), None);
/// }
/// ```
pub fn name_in_mlx_lm(name: &str) -> Option<String> {
    if name.starts_with("lm_head.") {
        return Some(format!("language_model.{name}"));
    }
    let (part, rest) = name.strip_prefix("model.")?.split_once('.')?;
    match part {
        "embed_tokens" | "layers" | "norm" => Some(format!("language_model.{name}")),
        "language_model" => Some(format!("language_model.model.{rest}")),
        // Newer versions of transformers write these below `model`, as none of mlx-lm's models has them.
        "vision_tower" | "multi_modal_projector" => Some(format!("{part}.{rest}")),
        _ => None,
    }
}

impl Root {
    /// The first at which there is an embedding.
    pub fn find(has: impl Fn(&str) -> bool) -> Self {
        let [usual, ..] = ROOTS;
        let is_there = |root: &Self| has(&format!("{}.embed_tokens.weight", root.decoder));
        ROOTS.into_iter().find(is_there).unwrap_or(usual)
    }

    pub fn decoder<'a>(self, vb: &VarBuilder<'a>) -> VarBuilder<'a> {
        below(vb, self.decoder)
    }

    pub fn head<'a>(self, vb: &VarBuilder<'a>) -> VarBuilder<'a> {
        below(vb, self.head)
    }
}

fn below<'a>(vb: &VarBuilder<'a>, path: &str) -> VarBuilder<'a> {
    path.split('.').fold(vb.clone(), |vb, name| vb.pp(name))
}
