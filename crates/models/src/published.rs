//! The tensors of a model as transformers writes them, and what each is made of in a checkpoint of another layout.

mod builder;

use super::architecture::mlx_lm::MlxLm;
use super::architecture::Family;
use super::root::Root;
use super::shapes::BUFFERS;
use super::Config;
use builder::Builder;
use candle_quant::checkpoint::FusedExperts;
use candle_quant::{Checkpoint, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Names that other layouts have: an inventory of the usual ones leaves them out.
const LAYOUTS: [&str; 5] = [".experts.", ".switch_mlp.", ".embed_q.", ".unembed_out.", ".norms."];

/// The most experts of a block, or heads, that get names.
const MOST_PARTS: usize = 1 << 16;

/// What of a model is packed: transformers has other experts for it in some families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishedForm {
    /// Nothing.
    Dense,
    /// Linear layers, in any format.
    Packed,
    /// Experts in MXFP4, as parameters `_blocks` and `_scales`, of a family that is published so; else as `Packed`.
    Blocks,
}

/// What the parameters of experts in MXFP4 end with.
pub const EXPERT_BLOCKS: &str = "_blocks";

/// A model as transformers knows it.
#[derive(Clone, Debug)]
pub struct Published {
    /// The class of its `architectures`.
    pub class: String,
    /// Its tensors, under the names of a model of text alone.
    pub tensors: Vec<PublishedTensor>,
    root: Root,
    mlx_lm: MlxLm,
    layers: usize,
    is_tied: bool,
}

/// A tensor as transformers writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub dims: Vec<usize>,
    /// What lies in it one after another.
    pub pieces: Vec<Piece>,
}

/// A part of a published tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The names for which the checkpoint is to be asked, as one matrix, the rows of all one after another.
    pub tensors: Vec<(String, Entries)>,
    /// What becomes of this matrix.
    pub how: Arrangement,
}

/// Which entries of dimension 0 of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entries {
    /// All of them.
    All,
    /// Only this one, which has a dimension less.
    One(usize),
    /// Some of them.
    Rows(Range<usize>),
}

/// What becomes of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Nothing.
    AsIs,
    /// Rows become columns.
    Transposed,
    /// Rows become columns, those of the first half and of the second in turn.
    AlternatingColumns,
    /// Rows of the first half and of the second in turn.
    AlternatingRows,
    /// The numbers of all rows in turn make one row.
    OneRow,
    /// One is subtracted from each number.
    LessOne,
    /// Columns in runs of `size`, the first of each of `keys` groups, then the second of each and so on, get the order of one group
    /// after another.
    OfTiles {
        /// How many groups.
        keys: usize,
        /// Columns of a run.
        size: usize,
    },
}

impl Published {
    /// The model of a checkpoint.
    ///
    /// # Errors
    /// As those of [`Config::from_checkpoint`]; if layers are missing.
    pub fn of(checkpoint: &Checkpoint, form: PublishedForm) -> Result<Self> {
        let stored = Config::from_checkpoint(checkpoint)?;
        let config = checkpoint.config();
        let (published, Some(family)) = (Config::from_json(config)?, Family::of(config)) else {
            return Err(Error::mismatch("config.json", "a family that is known", "none"));
        };
        // The config is not trusted to count what gets a name each.
        let experts = published.moe.as_ref().map_or(0, |moe| moe.experts);
        let keys = published.linear.as_ref().map_or(0, |linear| linear.key_heads);
        let heads = published.num_attention_heads;
        for (field, count) in [("experts", experts), ("attention heads", heads), ("heads of keys", keys)] {
            if count > MOST_PARTS {
                let expected = format!("at most {MOST_PARTS}");
                return Err(Error::mismatch(format!("config.json: {field}"), expected, count.to_string()));
            }
        }
        let root = Root::find(|name| checkpoint.contains(name));
        let names: BTreeSet<_> = checkpoint.tensor_names().filter_map(|name| root.usual(name)).collect();
        let is_usual = |name: &&str| !LAYOUTS.iter().any(|layout| name.contains(layout));
        let (inventory, absent) = published.inventory(names.iter().map(String::as_str).filter(is_usual));
        if let Some((count, first)) = absent {
            let found = format!("{count} of {} missing, {first} the first", published.num_hidden_layers);
            return Err(Error::file(checkpoint.path(), format!("layers: {found}"), "fetch the whole model"));
        }
        let has = |name: &str| names.contains(name);
        let is_there = |name: &str| !checkpoint.answering(&root.stored(name)).is_empty();
        let tied = published.tie_word_embeddings == Some(true);
        let inventory: BTreeMap<_, _> = inventory
            .into_iter()
            .filter(|(name, tensor)| {
                tensor.required || is_there(name) && !(tied && name.starts_with("lm_head"))
            })
            .map(|(name, tensor)| (name, tensor.dims))
            .collect();
        let mlx_lm = MlxLm::of(config);
        let fused = mlx_lm.fused.unwrap_or(FusedExperts::Rows);
        let builder = Builder {
            has: &has,
            experts: match form {
                PublishedForm::Dense => family.layout.experts,
                PublishedForm::Packed | PublishedForm::Blocks => family.layout.packed_experts,
            },
            has_blocks: form == PublishedForm::Blocks && family.layout.mxfp4_blocks,
            layout: family.layout,
            fused,
            less_one: stored.norm != published.norm,
            config: &published,
        };
        let mut tensors = builder.tensors(&inventory);
        for (name, _) in
            tensors.iter_mut().flat_map(|tensor| &mut tensor.pieces).flat_map(|piece| &mut piece.tensors)
        {
            *name = root.stored(name);
        }
        let (class, layers) = (family.class(), published.num_hidden_layers);
        Ok(Self { class, tensors, root, mlx_lm, layers, is_tied: tied })
    }

    /// The same with the tensors where the checkpoint has them, which may be a model with more parts than text.
    pub fn in_place(mut self) -> Self {
        for tensor in &mut self.tensors {
            tensor.name = self.root.stored(&tensor.name);
        }
        self
    }

    /// Whether a tensor of the checkpoint is of layers that predict further tokens.
    pub fn is_further(&self, name: &str) -> bool {
        self.mlx_lm.leaves_out(name, self.layers)
    }

    /// Whether it is one that nobody reads: a buffer of old checkpoints, or a head that is the embedding.
    pub fn is_needless(&self, name: &str) -> bool {
        let is_head = name.strip_prefix(self.root.head).is_some_and(|rest| rest.starts_with('.'));
        BUFFERS.iter().any(|buffer| name.ends_with(buffer)) || is_head && self.is_tied
    }

    /// The names for which the checkpoint is asked.
    pub fn sources(&self) -> BTreeSet<&str> {
        let pieces = self.tensors.iter().flat_map(|tensor| &tensor.pieces);
        pieces.flat_map(|piece| &piece.tensors).map(|(name, _)| name.as_str()).collect()
    }
}

impl Root {
    /// The name in the checkpoint of a tensor that a model of text alone calls so.
    fn stored(self, name: &str) -> String {
        match (name.strip_prefix("model."), name.strip_prefix("lm_head.")) {
            (Some(rest), _) => format!("{}.{rest}", self.decoder),
            (None, Some(rest)) => format!("{}.{rest}", self.head),
            (None, None) => name.to_owned(),
        }
    }

    /// What a model of text alone calls a tensor of the checkpoint.
    fn usual(self, name: &str) -> Option<String> {
        let below = |path: &str, usual: &str| {
            Some(format!("{usual}.{}", name.strip_prefix(path)?.strip_prefix('.')?))
        };
        below(self.decoder, "model").or_else(|| below(self.head, "lm_head"))
    }
}
