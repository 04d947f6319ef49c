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
        let reads_all =
            |(part, bytes): (&Weight, &u64)| part.dims() != weight.dims() && *bytes == stored_bytes;
        if replicated.is_none() && is_matrix && parts.iter().zip(&rank_bytes).any(reads_all) {
            replicated = Some("its format has no parts: every rank reads all of it".into());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::reads;
    use crate::models::Model;
    use crate::VarBuilder;
    use candle_core::{DType, Device};
    use std::path::Path;

    fn open(name: &str) -> Checkpoint {
        Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
    }

    /// What a rank of a model reads is what the plan says, once, and no rank reads more than its share and what
    /// is replicated.
    #[test]
    fn a_rank_reads_what_the_plan_says() {
        for name in [
            "assets/tiny",
            "assets/tiny-bf16",
            "tests/fixtures/mlx/llama-mixed-custom",
            "tests/fixtures/mlx/llama-untied-bias-b4-g64-f16",
            "tests/fixtures/mlx/qwen3-affine-b3-g64",
            "tests/fixtures/mlx/qwen3-affine-b5-g128",
            "tests/fixtures/mlx/qwen3-nvfp4",
            "tests/fixtures/hf/awq-g64",
            "tests/fixtures/uqff/hqq4",
            "tests/fixtures/uqff/q4k",
        ] {
            let checkpoint = open(name);
            for ranks in [1, 2, 3, 4, 8] {
                let plan = Plan::new(&checkpoint, ranks).unwrap();
                let opened = checkpoint.clone();
                let devices = vec![Device::Cpu; ranks];
                let read = crate::parallel::run(&devices, move |rank| {
                    reads::take();
                    let config = Config::from_json(opened.config())?;
                    Model::new(&config, VarBuilder::sharded(&opened, &rank, DType::F32))?;
                    Ok(reads::take().iter().map(|(_, range)| range.len() as u64).sum::<u64>())
                });
                assert_eq!(read.unwrap(), plan.rank_bytes(), "{name} over {ranks}");
                let matrices = plan.tensors().iter().filter(|tensor| tensor.name.ends_with(".weight"));
                for tensor in matrices.filter(|tensor| tensor.split != Split::Whole) {
                    // A global scale serves every part.
                    let extra = tensor.rank_bytes.iter().sum::<u64>() - tensor.stored_bytes;
                    assert!(tensor.replicated.is_some() || extra <= 4 * ranks as u64, "{name}: {tensor:?}");
                }
            }
        }
    }

    fn split_of<'p>(plan: &'p Plan, name: &str) -> &'p PlannedTensor {
        plan.tensors().iter().find(|tensor| tensor.name == name).unwrap()
    }

    #[test]
    fn what_is_split_and_what_is_not() {
        // 4 query heads on 2 key heads of 32 elements, 256 inner elements, groups of 64.
        let checkpoint = open("tests/fixtures/mlx/qwen3-affine-b4-g64");
        let plan = Plan::new(&checkpoint, 2).unwrap();
        plan.require_split().unwrap();
        let norms = plan.tensors().iter().filter(|tensor| tensor.split == Split::Whole);
        assert_eq!(plan.replicated_bytes(), norms.map(|norm| norm.stored_bytes).sum::<u64>());
        assert_eq!(plan.communication().elements(), 5 * 128 + 256);
        assert_eq!(
            split_of(&plan, "model.layers.0.self_attn.k_proj.weight").split,
            Split::Rows(vec![0..32, 32..64])
        );
        let down = split_of(&plan, "model.layers.0.mlp.down_proj.weight");
        assert_eq!(down.split, Split::Columns(vec![0..128, 128..256]));
        assert_eq!(down.rank_bytes, [down.stored_bytes / 2; 2]);

        let plan = Plan::new(&checkpoint, 4).unwrap();
        let output = split_of(&plan, "model.layers.1.self_attn.o_proj.weight");
        assert_eq!(output.split, Split::Columns(vec![0..64, 0..64, 64..128, 64..128]));
        assert_eq!(output.replicated.as_deref(), Some("groups of 64 in the inputs of two ranks are on both"));
        let keys = split_of(&plan, "model.layers.1.self_attn.v_proj.weight");
        assert_eq!(keys.split, Split::Rows(vec![0..32, 0..32, 32..64, 32..64]));
        assert_eq!(keys.replicated.as_deref(), Some("2 key heads are fewer than the 4 ranks"));
        let error = plan.require_split().unwrap_err().to_string();
        assert!(error.contains("plan for 4 ranks") && error.contains("self_attn.k_proj.weight"), "{error}");
        assert!(error.contains("and 5 more") && error.contains("2 key heads are fewer"), "{error}");

        let plan = Plan::new(&checkpoint, 8).unwrap();
        let query = split_of(&plan, "model.layers.0.self_attn.q_proj.weight");
        assert_eq!(query.split, Split::Whole);
        let why = "4 query heads on 2 key heads are too few for 8 ranks";
        assert_eq!(query.replicated.as_deref(), Some(why));
        assert_eq!(plan.communication().all_reduces, 2 + 1);

        let plan = Plan::new(&checkpoint, 3).unwrap();
        let up = split_of(&plan, "model.layers.0.mlp.up_proj.weight");
        assert_eq!(up.split, Split::Rows(vec![0..128, 128..192, 192..256]));
        assert_eq!(
            split_of(&plan, "model.embed_tokens.weight").split,
            Split::Rows(vec![0..86, 86..171, 171..256])
        );

        let hqq = Plan::new(&open("tests/fixtures/uqff/hqq4"), 2).unwrap();
        let whole = hqq.tensors().iter().find(|tensor| tensor.replicated.is_some()).unwrap();
        assert!(whole.replicated.as_ref().unwrap().contains("its format has no parts"), "{whole:?}");
    }

    #[test]
    fn what_can_not_be_planned() {
        let checkpoint = open("tests/fixtures/mlx/qwen3moe-affine-b4-g64");
        let error = Plan::new(&checkpoint, 2).unwrap_err().to_string();
        assert!(error.contains("a model with experts over 2 ranks is not supported"), "{error}");
        assert!(Plan::new(&checkpoint, 0).unwrap_err().to_string().contains("at least one"));
        Plan::new(&checkpoint, 1).unwrap().require_split().unwrap();
    }
}
