//! What each rank loads of a checkpoint, before anything is loaded.

use super::shard::{whole_units, Heads, Sharding};
use crate::checkpoint::{Checkpoint, Weight};
use crate::models::Config;
use crate::{Error, Result};
use std::ops::Range;

/// How a checkpoint's model is split over a number of ranks.
///
/// ```
/// use candle_quant::{parallel::Plan, Checkpoint};
///
/// let plan = Plan::new(&Checkpoint::open("assets/tiny")?, 2)?;
/// assert_eq!(plan.rank_bytes().len(), 2);
/// assert!(plan.rank_bytes()[0] < plan.stored_bytes());
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    ranks: usize,
    tensors: Vec<PlannedTensor>,
    communication: Communication,
}

/// One tensor of a [`Plan`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PlannedTensor {
    /// The full name.
    pub name: String,
    /// The name of its format.
    pub format: String,
    /// How it is split.
    pub split: Split,
    /// Bytes in the file.
    pub stored_bytes: u64,
    /// Bytes that each rank loads.
    pub rank_bytes: Vec<u64>,
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

impl Plan {
    /// The plan that [`VarBuilder::sharded`](crate::VarBuilder::sharded) follows. Nothing is read.
    ///
    /// # Errors
    /// If there are no ranks, the model is not supported, has experts, or its tensors are missing or damaged.
    pub fn new(checkpoint: &Checkpoint, ranks: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::mismatch("ranks", "at least one", "0"));
        }
        let config = Config::from_json(checkpoint.config())?;
        if config.moe.is_some() && ranks > 1 {
            return Err(Error::Unsupported {
                what: format!("a model with experts over {ranks} ranks"),
                remedy: "run it as one rank".into(),
            });
        }
        let sharding = Sharding::new(&config, ranks);
        let planner = Planner { checkpoint, config: &config, ranks, sharding };
        let (expected, _) = config.inventory(checkpoint.tensor_names());
        let tied = config.tie_word_embeddings.unwrap_or(!checkpoint.contains("lm_head.weight"));
        let mut tensors = Vec::new();
        for (name, tensor) in &expected {
            if tensor.required || (name == "lm_head.weight" && !tied) {
                tensors.push(planner.tensor(name, tensor.dims.last().copied())?);
            }
        }
        let communication = planner.communication();
        Ok(Self { ranks, tensors, communication })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The model's tensors, sorted by name.
    pub fn tensors(&self) -> &[PlannedTensor] {
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
    pub fn largest(&self) -> Option<&PlannedTensor> {
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

/// Why ranks that share out a tensor read more than its bytes, if they do.
pub(super) fn shared_bytes(stored: u64, rank_bytes: &[u64]) -> Option<&'static str> {
    // A global scale is 4 bytes, for all ranks.
    let once = stored.saturating_add(4 * rank_bytes.len() as u64);
    if rank_bytes.len() > 1 && rank_bytes.iter().all(|bytes| *bytes == stored) {
        return Some("every rank needs all of its bytes");
    }
    (rank_bytes.iter().sum::<u64>() > once)
        .then_some("bytes that several ranks need are read by each of them")
}

struct Planner<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a Config,
    ranks: usize,
    sharding: Sharding,
}

impl Planner<'_> {
    fn tensor(&self, name: &str, k: Option<usize>) -> Result<PlannedTensor> {
        let weight = self.checkpoint.tensor(name, k)?;
        let (split, mut replicated) = self.split(name, &weight)?;
        let parts: Vec<Weight> = match &split {
            Split::Whole => vec![weight.clone(); self.ranks],
            Split::Rows(rows) => {
                rows.iter().map(|rows| weight.narrow(0, rows.clone())).collect::<Result<_>>()?
            }
            Split::Columns(columns) => {
                columns.iter().map(|columns| weight.narrow(1, columns.clone())).collect::<Result<_>>()?
            }
        };
        let rank_bytes: Vec<_> = parts.iter().map(|part| part.size_in_bytes() as u64).collect();
        let stored_bytes = weight.size_in_bytes() as u64;
        let is_matrix = weight.dims().len() > 1;
        if replicated.is_none() && split != Split::Whole {
            replicated = shared_bytes(stored_bytes, &rank_bytes).map(str::to_owned);
        }
        Ok(PlannedTensor {
            name: name.to_owned(),
            format: weight.format_name(),
            split,
            stored_bytes,
            rank_bytes,
            replicated: replicated.filter(|_| is_matrix && self.ranks > 1),
        })
    }

    /// How a tensor is split, and why parts of it are on several ranks.
    fn split(&self, name: &str, weight: &Weight) -> Result<(Split, Option<String>)> {
        let Some((module, part)) = name.rsplit_once('.').filter(|_| self.ranks > 1) else {
            return Ok((Split::Whole, None));
        };
        let (layer, projection) = module.rsplit_once('.').unwrap_or(("", module));
        let ranks = self.ranks;
        Ok(match projection {
            "embed_tokens" | "lm_head" => match self.sharding.vocabulary() {
                Some(rows) => (Split::Rows(rows), None),
                None => (Split::Whole, Some(format!("fewer tokens than the {ranks} ranks"))),
            },
            "q_proj" | "k_proj" | "v_proj" | "o_proj" => match &self.sharding.heads {
                Some(heads) => self.by_heads(projection, part, heads, weight),
                None => {
                    let (queries, keys) = (self.config.num_attention_heads, self.config.num_key_value_heads);
                    let why =
                        format!("{queries} query heads on {keys} key heads are too few for {ranks} ranks");
                    (Split::Whole, Some(why))
                }
            },
            "gate_proj" | "up_proj" | "down_proj" => match self.sharding.inner(self.unit_of_down(layer)?) {
                None => (Split::Whole, Some(format!("fewer inner elements than the {ranks} ranks"))),
                Some(inner) if projection == "down_proj" => self.columns(part, inner, weight),
                Some(inner) => (Split::Rows(inner), None),
            },
            _ => (Split::Whole, None),
        })
    }

    fn by_heads(
        &self,
        projection: &str,
        part: &str,
        heads: &[Heads],
        weight: &Weight,
    ) -> (Split, Option<String>) {
        let size = self.config.head_dim;
        let elements = |heads: &Range<usize>| heads.start * size..heads.end * size;
        let queries = heads.iter().map(|heads| elements(&heads.query)).collect();
        match projection {
            "q_proj" => (Split::Rows(queries), None),
            "o_proj" => self.columns(part, queries, weight),
            _ => {
                let keys = self.config.num_key_value_heads;
                let why = format!("{keys} key heads are fewer than the {} ranks", self.ranks);
                let rows = heads.iter().map(|heads| elements(&heads.key)).collect();
                (Split::Rows(rows), (keys < self.ranks).then_some(why))
            }
        }
    }

    /// Columns of a weight, in whole groups; its bias is whole.
    fn columns(&self, part: &str, own: Vec<Range<usize>>, weight: &Weight) -> (Split, Option<String>) {
        let (unit, k) = (weight.unit(), weight.dims().last().copied().unwrap_or(0));
        if part == "bias" {
            return (Split::Whole, None);
        }
        let columns: Vec<_> = own.iter().map(|own| whole_units(own, unit, k)).collect();
        let why =
            (columns != own).then(|| format!("groups of {unit} in the inputs of two ranks are on both"));
        (Split::Columns(columns), why)
    }

    /// Elements that lie together along the inputs of a layer's down projection.
    fn unit_of_down(&self, mlp: &str) -> Result<usize> {
        let down =
            self.checkpoint.weight(&format!("{mlp}.down_proj"), Some(self.config.intermediate_size))?;
        Ok(down.unit())
    }

    fn communication(&self) -> Communication {
        if self.ranks == 1 {
            return Communication { hidden_size: self.config.hidden_size, ..Communication::default() };
        }
        let vocabulary = self.sharding.vocabulary().is_some();
        let of_layer =
            usize::from(self.sharding.heads.is_some()) + usize::from(self.sharding.inner(1).is_some());
        Communication {
            all_reduces: of_layer.saturating_mul(self.config.num_hidden_layers) + usize::from(vocabulary),
            hidden_size: self.config.hidden_size,
            gathered_logits: if vocabulary { self.config.vocab_size } else { 0 },
        }
    }
}
