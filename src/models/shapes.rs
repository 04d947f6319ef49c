//! The tensors a model has, by name and shape.

use super::Config;
use std::collections::{BTreeMap, BTreeSet};

/// One tensor of a model.
pub(crate) struct Expected {
    pub dims: Vec<usize>,
    /// Whether the model can't do without it.
    pub required: bool,
}

impl Config {
    /// The tensors of the model by name, without those of layers that have none among `names`; and how many
    /// such layers there are, with the first of them. (The config is not trusted to count layers.)
    pub(crate) fn inventory<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
    ) -> (BTreeMap<String, Expected>, Option<(usize, usize)>) {
        let layers: BTreeSet<usize> =
            names.filter_map(layer_of).filter(|&layer| layer < self.num_hidden_layers).collect();
        let (vocab, hidden) = (self.vocab_size, self.hidden_size);
        let mut expected = BTreeMap::new();
        let mut add = |name: String, dims: &[usize], required: bool| {
            expected.insert(name, Expected { dims: dims.to_vec(), required });
        };
        add("model.embed_tokens.weight".into(), &[vocab, hidden], true);
        add("model.norm.weight".into(), &[hidden], true);
        add("lm_head.weight".into(), &[vocab, hidden], self.tie_word_embeddings == Some(false));
        let parts = self.layer_tensors();
        for layer in &layers {
            for (part, dims) in &parts {
                add(format!("model.layers.{layer}.{part}"), dims, true);
            }
        }
        let first = (0..self.num_hidden_layers).find(|layer| !layers.contains(layer));
        (expected, first.map(|first| (self.num_hidden_layers - layers.len(), first)))
    }

    /// The tensors of one layer, by their names in it.
    fn layer_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let q = self.num_attention_heads.saturating_mul(self.head_dim);
        let kv = self.num_key_value_heads.saturating_mul(self.head_dim);
        let mut tensors = Vec::new();
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            tensors.push((format!("{norm}.weight"), vec![hidden]));
        }
        if self.qk_norm {
            for norm in ["self_attn.q_norm", "self_attn.k_norm"] {
                tensors.push((format!("{norm}.weight"), vec![self.head_dim]));
            }
        }
        for (module, n, k, bias) in [
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.output_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ] {
            tensors.push((format!("{module}.weight"), vec![n, k]));
            if bias {
                tensors.push((format!("{module}.bias"), vec![n]));
            }
        }
        tensors
    }
}

/// The layer that a tensor belongs to.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;
    use std::path::Path;

    /// What the crate's own loader asks for is what is listed here: the bundled models have nothing else.
    #[test]
    fn the_list_is_that_of_the_loader() {
        for name in ["assets/tiny", "assets/tiny-bf16", "tests/fixtures/mlx/llama-untied-bias-b4-g64-f16"] {
            let checkpoint = Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap();
            let config = Config::from_json(checkpoint.config()).unwrap();
            let (expected, absent_layers) = config.inventory(checkpoint.tensor_names());
            assert_eq!(absent_layers, None, "{name}");
            let required: Vec<_> = expected.iter().filter(|(_, tensor)| tensor.required).collect();
            assert!(required.iter().all(|(tensor, _)| checkpoint.contains(tensor)), "{name}");
            for tensor in checkpoint.tensor_names() {
                let k = config.in_features(tensor.strip_suffix(".weight").unwrap_or(tensor));
                let found = checkpoint.tensor(tensor, k).unwrap();
                assert_eq!(found.dims(), expected[tensor].dims, "{name}: {tensor}");
            }
        }
    }

    #[test]
    fn layers_without_tensors_are_counted_not_listed() {
        let config = Config::from_json(&serde_json::json!({"model_type": "llama", "vocab_size": 8,
            "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 16_000_000,
            "num_attention_heads": 2}))
        .unwrap();
        let names = ["model.layers.0.mlp.up_proj.weight", "model.layers.2.x", "model.layers.99999999.x", "y"];
        let (expected, absent_layers) = config.inventory(names.into_iter());
        assert_eq!(absent_layers, Some((16_000_000 - 2, 1)));
        assert_eq!(expected.len(), 3 + 2 * 9);
    }
}
