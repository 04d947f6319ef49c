//! Embeddings and output heads of which every rank has the rows of some tokens.

use crate::distributed::partition::split;
use crate::distributed::Rank;
use crate::nn::{embedding, linear_b, Embedding, LayerWeight, Linear, VarBuilder};
use candle_core::{bail, DType, Result, Tensor};
use candle_nn::Module;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

/// An embedding table of which every rank has the rows of some tokens; the whole table if there is one rank, or
/// fewer tokens than ranks.
#[derive(Clone, Debug)]
pub struct VocabParallelEmbedding {
    rows: Embedding,
    vocabulary: usize,
    dtype: DType,
    share: Option<VocabularyShare>,
}

/// Of a vocabulary, the tokens whose rows a rank has: one part of as many as there are ranks.
#[derive(Clone, Debug)]
pub struct VocabularyShare {
    rank: Rank,
    /// Those of each rank, in order.
    tokens: Arc<[Range<usize>]>,
}

impl VocabularyShare {
    /// None if all ranks have all.
    fn new(vocabulary: usize, vb: &VarBuilder) -> Option<Self> {
        let rank = vb.rank()?.clone();
        let tokens = split(vocabulary, 1, rank.world_size())?.into();
        Some(Self { rank, tokens })
    }

    /// This rank.
    pub fn rank(&self) -> &Rank {
        &self.rank
    }

    /// This rank's tokens.
    pub fn own(&self) -> Range<usize> {
        self.tokens.get(self.rank.index()).cloned().unwrap_or_default()
    }

    /// How many tokens each rank has.
    pub fn counts(&self) -> impl Iterator<Item = usize> + '_ {
        self.tokens.iter().map(Range::len)
    }
}

/// This rank's part of an embedding table, from the tensor `weight` at the builder's path; rows have the
/// builder's dtype.
///
/// # Errors
/// If the weight is missing, damaged, or not of shape `[vocabulary, hidden_size]`.
pub fn vocab_parallel_embedding(
    vocabulary: usize,
    hidden_size: usize,
    vb: VarBuilder,
) -> Result<VocabParallelEmbedding> {
    let share = VocabularyShare::new(vocabulary, &vb);
    let rows = match &share {
        None => embedding(vocabulary, hidden_size, vb.clone())?,
        Some(share) => {
            let weight = vb.part((vocabulary, hidden_size), &[share.own(), 0..hidden_size])?;
            Embedding::from_weight(weight, hidden_size, vb.dtype())
        }
    };
    Ok(VocabParallelEmbedding { rows, vocabulary, dtype: vb.dtype(), share })
}

impl VocabParallelEmbedding {
    /// This rank's rows.
    pub fn embeddings(&self) -> &LayerWeight {
        self.rows.embeddings()
    }

    /// The table; or this rank's rows, and which these are.
    pub fn part(&self) -> (&Embedding, Option<&VocabularyShare>) {
        (&self.rows, self.share.as_ref())
    }

    /// The tied output head, on the same data.
    pub fn as_head(&self) -> VocabParallelHead {
        VocabParallelHead { rows: self.rows.as_linear(), share: self.share.clone() }
    }

    /// As [`as_head`](Self::as_head), with adapters of its own, which are those of the builder's module.
    pub fn as_head_of(&self, vb: &VarBuilder) -> VocabParallelHead {
        let tokens = self.share.as_ref().map_or(0..self.vocabulary, VocabularyShare::own);
        let hidden_size = self.rows.hidden_size();
        let VocabParallelHead { rows, share } = self.as_head();
        let part = [tokens, 0..hidden_size];
        VocabParallelHead { rows: rows.of_module(vb, [self.vocabulary, hidden_size], &part, None), share }
    }
}

impl Module for VocabParallelEmbedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let Some(share) = &self.share else {
            return self.rows.forward(ids);
        };
        let tokens = share.own();
        let global = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        // Refused on all ranks: else the one that has the last rows would be the only one.
        let token = |id| usize::try_from(id).ok().filter(|id| *id < self.vocabulary);
        let Some(global) = global.into_iter().map(token).collect::<Option<Vec<_>>>() else {
            bail!("ids: each below {}, the size of the vocabulary, expected", self.vocabulary);
        };
        let mut dims = ids.dims().to_vec();
        let is_own = |id: &usize| tokens.contains(id);
        let shape = [dims.as_slice(), &[self.rows.hidden_size()]].concat();
        let zeros = Tensor::zeros(shape.as_slice(), self.dtype, ids.device())?;
        let rows = if global.iter().any(is_own) {
            let local = |id: &usize| if is_own(id) { (id - tokens.start) as u32 } else { 0 };
            let local = Tensor::from_iter(global.iter().map(local), ids.device())?;
            let rows = self.rows.forward(&local.reshape(dims.as_slice())?)?;
            dims.push(1);
            let own = Tensor::from_iter(global.iter().map(|id| u8::from(is_own(id))), ids.device())?;
            own.reshape(dims)?.broadcast_as(shape.as_slice())?.where_cond(&rows, &zeros)?
        } else {
            zeros
        };
        Ok(share.rank.all_reduce_sum(&rows)?)
    }
}

/// An output head of which every rank computes the logits of some tokens; all have all of them in the end.
#[derive(Clone, Debug)]
pub struct VocabParallelHead {
    rows: Linear,
    share: Option<VocabularyShare>,
}

/// This rank's part of an output head, from the tensors `weight` and, if there is one, `bias` at the builder's path.
///
/// # Errors
/// If the weight is missing, damaged, or not of shape `[vocabulary, hidden_size]`.
pub fn vocab_parallel_head(
    hidden_size: usize,
    vocabulary: usize,
    bias: bool,
    vb: VarBuilder,
) -> Result<VocabParallelHead> {
    Ok(match VocabularyShare::new(vocabulary, &vb) {
        None => {
            let rows = linear_b(hidden_size, vocabulary, bias, vb)?;
            VocabParallelHead { rows, share: None }
        }
        Some(share) => {
            let tokens = share.own();
            let own = slice::from_ref(&tokens);
            let bias = bias.then(|| vb.tensor_part(&[vocabulary], "bias", own)).transpose()?;
            let part = [tokens, 0..hidden_size];
            let rows = Linear::new(vb.part((vocabulary, hidden_size), &part)?, bias);
            let rows = rows.of_module(&vb, [vocabulary, hidden_size], &part, None);
            VocabParallelHead { rows, share: Some(share) }
        }
    })
}

impl VocabParallelHead {
    /// This rank's rows.
    pub fn weight(&self) -> &LayerWeight {
        self.rows.weight()
    }

    /// The layer; or this rank's rows, and which these are.
    pub fn part(&self) -> (&Linear, Option<&VocabularyShare>) {
        (&self.rows, self.share.as_ref())
    }
}

impl Module for VocabParallelHead {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let logits = self.rows.forward(x)?;
        match &self.share {
            None => Ok(logits),
            Some(VocabularyShare { rank, .. }) => {
                Ok(rank.all_gather(&logits, logits.rank().saturating_sub(1))?)
            }
        }
    }
}
