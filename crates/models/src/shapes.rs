//! The tensors a model has, by name and shape.

use super::{Config, MoeConfig};
use std::collections::{BTreeMap, BTreeSet};

/// One tensor of a model.
pub struct Expected {
    /// Its shape.
    pub dims: Vec<usize>,
    /// Whether the model can't do without it.
    pub required: bool,
}

/// Tensors that a model needs.
type Shapes = BTreeMap<String, Vec<usize>>;

impl Config {
    /// The tensors of the model by name, without those of layers that have none among `names`; and how many
    /// such layers there are, with the first of them. (The config is not trusted to count layers.)
    pub fn inventory<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
    ) -> (BTreeMap<String, Expected>, Option<(usize, usize)>) {
        let names: BTreeSet<&str> = names.collect();
        let layers = names.iter().filter_map(|name| layer_of(name));
        let layers: BTreeSet<usize> = layers.filter(|&layer| layer < self.num_hidden_layers).collect();
        let (vocab, hidden) = (self.vocab_size, self.hidden_size);
        let mut shapes = Shapes::new();
        shapes.insert("model.embed_tokens.weight".into(), vec![vocab, hidden]);
        shapes.insert("model.norm.weight".into(), vec![hidden]);
        for &layer in &layers {
            self.add_layer(layer, &names, &mut shapes);
        }
        let required = |(name, dims)| (name, Expected { dims, required: true });
        let mut expected: BTreeMap<_, _> = shapes.into_iter().map(required).collect();
        let head = Expected { dims: vec![vocab, hidden], required: self.tie_word_embeddings == Some(false) };
        expected.insert("lm_head.weight".into(), head);
        let first = (0..self.num_hidden_layers).find(|layer| !layers.contains(layer));
        (expected, first.map(|first| (self.num_hidden_layers - layers.len(), first)))
    }

    fn add_layer(&self, layer: usize, names: &BTreeSet<&str>, shapes: &mut Shapes) {
        let path = format!("model.layers.{layer}");
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let q = self.num_attention_heads.saturating_mul(self.head_dim);
        let kv = self.num_key_value_heads.saturating_mul(self.head_dim);
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            shapes.insert(format!("{path}.{norm}.weight"), vec![hidden]);
        }
        for norm in ["q_norm", "k_norm"].into_iter().filter(|_| self.qk_norm) {
            shapes.insert(format!("{path}.self_attn.{norm}.weight"), vec![self.head_dim]);
        }
        if self.attention_sinks {
            shapes.insert(format!("{path}.self_attn.sinks"), vec![self.num_attention_heads]);
        }
        let mut linear = |module: &str, n: usize, k: usize, bias: bool| {
            shapes.insert(format!("{path}.{module}.weight"), vec![n, k]);
            if bias {
                shapes.insert(format!("{path}.{module}.bias"), vec![n]);
            }
        };
        linear("self_attn.q_proj", q, hidden, self.qkv_bias);
        linear("self_attn.k_proj", kv, hidden, self.qkv_bias);
        linear("self_attn.v_proj", kv, hidden, self.qkv_bias);
        linear("self_attn.o_proj", hidden, q, self.output_bias);
        match self.moe.as_ref().filter(|moe| moe.is_sparse(layer)) {
            Some(moe) => {
                let block = moe.block_name;
                linear(&format!("{block}.{}", moe.router_name), moe.experts, hidden, moe.bias);
                moe.add_experts(&format!("{path}.{block}"), hidden, names, shapes);
            }
            None => {
                linear("mlp.gate_proj", inner, hidden, self.mlp_bias);
                linear("mlp.up_proj", inner, hidden, self.mlp_bias);
                linear("mlp.down_proj", hidden, inner, self.mlp_bias);
            }
        }
    }
}

impl MoeConfig {
    /// The experts of the block at `path`, in whichever layout of [`experts`](candle_quant::nn::experts()) is there.
    fn add_experts(&self, path: &str, hidden: usize, names: &BTreeSet<&str>, shapes: &mut Shapes) {
        let (count, inner) = (self.experts, self.intermediate_size);
        let has = |name: &str| names.contains(format!("{path}.{name}").as_str());
        let mut add = |module: &str, stack: &[usize], n: usize, k: usize| {
            // Stacks of some writers are parameters, not modules.
            let name = if has(module) { module.to_owned() } else { format!("{module}.weight") };
            shapes.insert(format!("{path}.{name}"), [stack, &[n, k]].concat());
            if self.bias {
                shapes.insert(format!("{path}.{module}.bias"), [stack, &[n]].concat());
            }
        };
        let of_each = |name: &str| has(&format!("experts.0.{name}.weight"));
        if has("experts.gate_up_proj") || has("experts.gate_up_proj.weight") {
            add("experts.gate_up_proj", &[count], inner.saturating_mul(2), hidden);
            add("experts.down_proj", &[count], hidden, inner);
        } else if of_each("w1") || of_each("gate_proj") {
            let [gate, up, down] =
                if of_each("w1") { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
            // The config is not trusted to count experts: one is missing as well as many.
            let prefix = format!("{path}.experts.");
            let there = names.range(prefix.as_str()..).take_while(|name| name.starts_with(&prefix)).count();
            for expert in 0..count.min(there) {
                add(&format!("experts.{expert}.{gate}"), &[], inner, hidden);
                add(&format!("experts.{expert}.{up}"), &[], inner, hidden);
                add(&format!("experts.{expert}.{down}"), &[], hidden, inner);
            }
        } else {
            let stack = if has("switch_mlp.gate_proj.weight") { "switch_mlp" } else { "experts" };
            add(&format!("{stack}.gate_proj"), &[count], inner, hidden);
            add(&format!("{stack}.up_proj"), &[count], inner, hidden);
            add(&format!("{stack}.down_proj"), &[count], hidden, inner);
        }
    }
}

/// The layer that a tensor belongs to.
pub fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_does_not_say_how_much_is_listed() {
        let config = Config::from_json(&serde_json::json!({"model_type": "mixtral", "vocab_size": 8,
            "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_local_experts": 16_000_000, "num_experts_per_tok": 2}))
        .unwrap();
        let experts = "model.layers.0.block_sparse_moe.experts";
        let names = ["w1", "w2", "w3"].map(|name| format!("{experts}.0.{name}.weight"));
        let (expected, _) = config.inventory(names.iter().map(String::as_str));
        assert_eq!(expected[&format!("{experts}.2.w2.weight")].dims, [4, 8]);
        assert_eq!(expected.len(), 3 + 2 + 4 + 1 + 3 * 3);
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
