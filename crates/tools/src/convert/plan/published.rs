//! The tensors of a checkpoint as transformers has them, by the table of architectures.

use super::experts::TensorGroup;
use crate::convert::output::{SourcePart, SourceTensor, View};
use crate::source::Source;
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
use candle_quant::{Error, Result};
use candle_quant_models::{
    Arrangement, Entries, Piece, Published, PublishedForm, PublishedTensor, EXPERT_BLOCKS,
};
use std::collections::BTreeSet;

/// A model as transformers knows it, and what its checkpoint has beside.
#[derive(Clone, Debug)]
pub(super) struct PublishedPlan {
    source: Checkpoint,
    model: Published,
    /// Tensors of other parts, which keep their names.
    others: Vec<String>,
    pub notes: Vec<String>,
}

impl PublishedPlan {
    pub(super) fn new(source: &Checkpoint, form: PublishedForm) -> Result<Self> {
        let model = Published::of(source, form)?;
        let answering: BTreeSet<_> =
            model.sources().into_iter().flat_map(|name| source.answering(name)).collect();
        let is_other = |name: &&str| !answering.contains(*name) && !model.is_needless(name);
        let (further, others): (Vec<_>, Vec<_>) =
            source.tensor_names().filter(is_other).partition(|name| model.is_further(name));
        // The tools of Hugging Face keep published names; what others have renamed is not known.
        let keeps_names = matches!(source.kind(), CheckpointKind::HuggingFace(_) | CheckpointKind::Dense);
        let mut notes = Vec::new();
        let others = match (keeps_names, others.first(), further.first()) {
            (true, ..) => further.iter().chain(&others).map(|name| (*name).to_owned()).collect(),
            (false, Some(first), _) => {
                return Err(Error::Unsupported {
                    what: format!(
                        "{}: {} tensor(s) that the config's model of text does not use, `{first}` the first, of which no published \
                         names are known: writing them",
                        source.path().display(),
                        others.len()
                    ),
                    remedy: "dequantize it under the names that it has (--dequantize without --to)".into(),
                });
            }
            (false, None, Some(first)) => {
                notes.push(format!(
                    "{} tensors of layers that predict further tokens are left out, `{first}` among them",
                    further.len()
                ));
                Vec::new()
            }
            (false, None, None) => Vec::new(),
        };
        let model = if others.is_empty() { model } else { model.in_place() };
        Ok(Self { source: source.clone(), model, others, notes })
    }

    /// The class in the config.
    pub(super) fn class(&self) -> &str {
        &self.model.class
    }

    /// Whether all is the text, so that the config is that of a model of text alone.
    pub(super) fn is_text(&self) -> bool {
        self.others.is_empty()
    }

    pub(super) fn groups(&self) -> Result<Vec<TensorGroup>> {
        let source = Source::new(&self.source);
        let is_block = |tensor: &PublishedTensor| tensor.name.ends_with(EXPERT_BLOCKS);
        let has_blocks = self.model.tensors.iter().any(is_block);
        let one = |tensor: SourceTensor| {
            let obstacle = (has_blocks && !tensor.name.ends_with(EXPERT_BLOCKS)).then_some(BESIDE_BLOCKS);
            TensorGroup { packed: vec![tensor], plain: Vec::new(), obstacle }
        };
        let published = self.model.tensors.iter().map(|tensor| published(&source, tensor).map(one));
        let others = self.others.iter().map(|name| Ok(TensorGroup::one(name.clone(), source.tensor(name)?)));
        published.chain(others).collect()
    }
}

/// Why nothing but experts is packed beside those in MXFP4.
const BESIDE_BLOCKS: &str = "no experts, of which alone transformers has packed ones in this form";

/// Rows of both weights in turn: of packed ones as a whole, of others, which become numbers, expert by expert.
fn rows_in_turn(parts: &mut Vec<SourcePart>, weights: Vec<Weight>) -> Result<()> {
    if weights.iter().all(|weight| matches!(weight, Weight::Packed(_))) {
        parts.push(SourcePart::Viewed(weights, View::AlternatingRows));
        return Ok(());
    }
    let experts = weights.iter().filter_map(|weight| weight.dims().first()).min().copied().unwrap_or(0);
    for expert in 0..experts {
        let of_expert = weights.iter().map(|weight| weight.narrow(0, expert..expert + 1));
        parts.push(SourcePart::Viewed(of_expert.collect::<Result<_>>()?, View::AlternatingRows));
    }
    Ok(())
}

/// What a published tensor is made of.
fn published(source: &Source, tensor: &PublishedTensor) -> Result<SourceTensor> {
    let PublishedTensor { name, dims, pieces } = tensor;
    let elements = |dims: &[usize]| dims.iter().fold(1usize, |all, dim| all.saturating_mul(*dim));
    let (mut parts, mut found, mut shapes) = (Vec::new(), 0usize, Vec::new());
    let mut fits = true;
    for Piece { tensors, how } in pieces {
        let mut weights = Vec::new();
        for (name, entries) in tensors {
            let weight = source.tensor(name)?;
            let (weight, skipped) = match entries {
                Entries::All => (weight, 0),
                Entries::One(index) => (weight.narrow(0, *index..index.saturating_add(1))?, 1),
                Entries::Rows(rows) => (weight.narrow(0, rows.clone())?, 0),
            };
            found = found.saturating_add(elements(weight.dims()));
            shapes.push(weight.dims().get(skipped..).unwrap_or_default().to_vec());
            weights.push(weight);
        }
        let view = match how {
            Arrangement::AsIs => {
                fits &= weights.iter().all(|weight| weight.dims().last() == dims.last());
                parts.extend(weights.into_iter().map(SourcePart::of));
                continue;
            }
            Arrangement::Transposed => View::Transposed,
            Arrangement::AlternatingColumns => View::AlternatingColumns,
            Arrangement::OneRow => View::OneRow,
            Arrangement::AlternatingRows => {
                rows_in_turn(&mut parts, weights)?;
                continue;
            }
            Arrangement::LessOne => View::LessOne,
            Arrangement::OfTiles { keys, size } => View::OfTiles { keys: *keys, size: *size },
        };
        parts.push(SourcePart::Viewed(weights, view));
    }
    // Of a convolution one channel goes in, wherever that is written.
    let is_turned = name.ends_with("conv1d.weight") && matches!(parts.as_slice(), [SourcePart::Stored(_)]);
    fits |= is_turned;
    fits &= shapes.len() > 1 || is_turned || shapes.first() == Some(dims);
    if found != elements(dims) || !fits {
        let shown: Vec<_> = shapes.iter().take(3).map(|shape| format!("{shape:?}")).collect();
        return Err(Error::mismatch(
            format!("`{name}` of {}", source.checkpoint.path().display()),
            format!("{dims:?}, as the config says"),
            shown.join(", "),
        ));
    }
    Ok(SourceTensor { name: name.clone(), dims: dims.clone(), parts })
}
