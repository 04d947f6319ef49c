//! What the config says of fused projections: which rows are whose.

use super::source::Rows;
use crate::checkpoint::family_layouts::{with_heads_in_turn, FusedExperts};
use serde_json::Value;
use std::ops::Range;

/// The config of a model, perhaps of one with more parts than text.
#[derive(Clone, Copy)]
pub(super) struct ModelConfig<'a>(pub &'a Value);

/// Why rows can't be told apart.
pub(super) enum Problem {
    /// There should be another number of them.
    Count { expected: String },
    /// They have another order than parts one after another.
    Order { found: String },
}

impl ModelConfig<'_> {
    /// Which of `count` rows of a fused projection belong to the projection `module`.
    pub fn range(self, rows: Rows, count: usize, module: &str) -> Result<Range<usize>, Problem> {
        if let Some(found) = self.other_order(module) {
            return Err(Problem::Order { found });
        }
        let half = count / 2;
        let halves = || match count.is_multiple_of(2) && half > 0 {
            true => Ok(()),
            false => Err(Problem::Count { expected: "an even number of".into() }),
        };
        match rows {
            Rows::FirstHalf => halves().map(|()| 0..half),
            Rows::SecondHalf => halves().map(|()| half..count),
            Rows::Queries => self.heads(count).map(|[q, _]| 0..q),
            Rows::Keys => self.heads(count).map(|[q, kv]| q..q + kv),
            Rows::Values => self.heads(count).map(|[q, kv]| q + kv..count),
        }
    }

    /// Rows of the query projection, and those of the key or the value projection, which make `count`.
    fn heads(self, count: usize) -> Result<[usize; 2], Problem> {
        let unknown = || {
            let keys = "`num_attention_heads` and `head_dim`";
            Problem::Count { expected: format!("as many as {keys} of the config make, which it lacks,") }
        };
        let [q, kv] = self.head_rows().ok_or_else(unknown)?;
        let sum = kv.checked_mul(2).and_then(|both| both.checked_add(q)).ok_or_else(unknown)?;
        match sum == count {
            true => Ok([q, kv]),
            false => {
                let expected = format!("{q} + {kv} + {kv}, which the heads of the config make,");
                Err(Problem::Count { expected })
            }
        }
    }

    fn head_rows(self) -> Option<[usize; 2]> {
        let heads = self.size("num_attention_heads")?;
        let kv_heads = self.size("num_key_value_heads").unwrap_or(heads);
        let head_dim = match self.size("head_dim") {
            Some(head_dim) => head_dim,
            None => {
                let hidden = self.size("hidden_size")?;
                hidden.checked_div(heads).filter(|_| hidden.is_multiple_of(heads))?
            }
        };
        Some([heads.checked_mul(head_dim)?, kv_heads.checked_mul(head_dim)?])
    }

    /// The model, if the rows of its fused projections are not those of one part after another.
    pub fn other_order(self, module: &str) -> Option<String> {
        let name = module.rsplit('.').next().unwrap_or(module);
        let model = match name {
            "q_proj" | "k_proj" | "v_proj" | "qkv_proj" => with_heads_in_turn(self.0)?,
            _ if self.has_alternating_stacks() => self.model_type()?,
            _ => return None,
        };
        Some(format!("{model}, whose rows alternate"))
    }

    /// Whether dense stacks of experts that are parameters have rows for columns.
    pub fn has_transposed_stacks(self) -> bool {
        FusedExperts::of(self.0).is_some_and(FusedExperts::has_columns)
    }

    /// Whether rows of gate and up projections are stored in turn.
    pub fn has_alternating_stacks(self) -> bool {
        FusedExperts::of(self.0).is_some_and(FusedExperts::alternates)
    }

    fn model_type(&self) -> Option<&str> {
        self.text().get("model_type").or(self.0.get("model_type"))?.as_str()
    }

    pub fn size(self, key: &str) -> Option<usize> {
        usize::try_from(self.text().get(key)?.as_u64()?).ok()
    }

    /// Whether the head is the embedding. Multimodal configs say it beside the `text_config`, or in it; without a word
    /// of it models differ.
    pub fn is_tied(self) -> bool {
        const KEY: &str = "tie_word_embeddings";
        let stated = self.0.get(KEY).filter(|value| !value.is_null());
        stated.or_else(|| self.text().get(KEY)).and_then(Value::as_bool) == Some(true)
    }

    fn text(&self) -> &Value {
        self.0.get("text_config").filter(|text| text.is_object()).unwrap_or(self.0)
    }
}
