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

/// As a model of text alone, as mlx-lm and older versions of transformers write models of more, as newer ones do.
const ROOTS: [Root; 3] = [
    Root { decoder: "model", head: "lm_head" },
    Root { decoder: "language_model.model", head: "language_model.lm_head" },
    Root { decoder: "model.language_model", head: "lm_head" },
];

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
