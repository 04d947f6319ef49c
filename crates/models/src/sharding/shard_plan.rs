//! What each rank loads of a checkpoint, before anything is loaded.

use crate::Config;
use candle_core::DType;
use candle_quant::parallel::ExpertSplit;
use candle_quant::{Error, Result};
use std::ops::Range;

/// How a checkpoint's model is split over a number of ranks.
///
/// ```
/// use candle_quant::Checkpoint;
/// use candle_quant_models::sharding::ShardPlan;
///
/// let plan = ShardPlan::new(&Checkpoint::open("assets/tiny")?, 2)?;
/// assert_eq!(plan.rank_bytes().len(), 2);
/// assert!(plan.rank_bytes()[0] < plan.stored_bytes());
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ShardPlan {
    pub(super) ranks: usize,
    pub(super) experts: ExpertSplit,
    pub(super) tensors: Vec<ShardedTensor>,
    pub(super) communication: Communication,
    pub(super) config: Config,
}

/// One tensor of a [`ShardPlan`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ShardedTensor {
    /// The full name.
    pub name: String,
    /// The name of its format.
    pub format: String,
    /// Its whole shape: `[.., N, K]` if it is a matrix.
    pub dims: Vec<usize>,
    /// The dtype of its elements, if it is dense.
    pub dense: Option<DType>,
    /// Whether it is dense once it is loaded, whatever it is in the file: a model multiplies by it in a way that packed weights
    /// are not made for.
    pub is_decoded: bool,
    /// How it is split.
    pub split: Split,
    /// Bytes in the file.
    pub stored_bytes: u64,
    /// Bytes that each rank reads.
    pub rank_bytes: Vec<u64>,
    /// Bytes that these take when they are loaded, on a CPU, if they are not dense.
    pub rank_loaded: Vec<u64>,
    /// Elements that each rank loads.
    pub rank_elements: Vec<u64>,
    /// Why more than one rank has some of its bytes, if it is a matrix and they do.
    pub replicated: Option<String>,
}

/// Which part of a tensor a rank has, for each rank.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Split {
    /// Rows: outputs of a projection, tokens of an embedding or head, elements of a bias.
    Rows(Vec<Range<usize>>),
    /// Columns: inputs of a projection, in whole groups.
    Columns(Vec<Range<usize>>),
    /// Rows in several runs: those of gate and up projections in one tensor, or of queries, keys and values.
    Segments(Vec<Vec<Range<usize>>>),
    /// Experts of a stack.
    Experts(Vec<Range<usize>>),
    /// All of it on one rank, nothing on the others: an expert, or a bias that is added once.
    One(usize),
    /// All of it on every rank.
    Whole,
}

/// What ranks send each other for a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Communication {
    /// Sums over all ranks, each of `hidden_size` elements.
    pub all_reduces: usize,
    /// Elements of a token's hidden state.
    pub hidden_size: usize,
    /// Logits that are gathered from all ranks; 0 if every rank has the whole head.
    pub gathered_logits: usize,
}

impl Communication {
    /// Elements of all operations together.
    pub fn elements(&self) -> u64 {
        let reduced = (self.all_reduces as u64).saturating_mul(self.hidden_size as u64);
        reduced.saturating_add(self.gathered_logits as u64)
    }
}

impl ShardPlan {
    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// How experts are split, if the model has any.
    pub fn experts(&self) -> ExpertSplit {
        self.experts
    }

    /// The model's tensors, sorted by name.
    pub fn tensors(&self) -> &[ShardedTensor] {
        &self.tensors
    }

    /// Bytes of the model's tensors in the file.
    pub fn stored_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.stored_bytes).sum()
    }

    /// Bytes that each rank loads.
    pub fn rank_bytes(&self) -> Vec<u64> {
        let of_rank = |rank| self.tensors.iter().filter_map(|tensor| tensor.rank_bytes.get(rank)).sum();
        (0..self.ranks).map(of_rank).collect()
    }

    /// Bytes that are loaded by all ranks together beyond those in the file.
    pub fn replicated_bytes(&self) -> u64 {
        self.rank_bytes().iter().sum::<u64>().saturating_sub(self.stored_bytes())
    }

    /// What ranks send each other for a token.
    pub fn communication(&self) -> Communication {
        self.communication
    }

    /// The largest tensor on any rank.
    pub fn largest(&self) -> Option<&ShardedTensor> {
        self.tensors.iter().max_by_key(|tensor| tensor.rank_bytes.iter().max())
    }

    /// Refuses a plan in which some matrix, or a part of one, is on more than one rank.
    ///
    /// # Errors
    /// If there is one; it names the first and tells why.
    pub fn require_split(&self) -> Result<()> {
        let mut replicated =
            self.tensors.iter().filter_map(|tensor| Some((tensor, tensor.replicated.as_ref()?)));
        match (replicated.next(), replicated.count()) {
            (None, _) => Ok(()),
            (Some((tensor, why)), more) => Err(Error::mismatch(
                format!("plan for {} ranks", self.ranks),
                "every matrix split",
                format!("`{}` and {more} more that are not: {why}", tensor.name),
            )),
        }
    }
}
