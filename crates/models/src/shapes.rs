//! The tensors a model has, by name and shape.

use super::config::{Latents, Names, QkNorm, QkNormOver};
use super::root::{layer_of, Root};
use super::{Config, LinearAttentionConfig, MoeConfig};
use candle_quant::Checkpoint;
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

/// Buffers that old checkpoints have and nobody reads.
pub(super) const BUFFERS: [&str; 2] = [".rotary_emb.inv_freq", ".masked_bias"];

impl Config {
    /// The stored tensors that the model does not read, those of a second or of a further model in the same files.
    pub fn unused(&self, checkpoint: &Checkpoint) -> Vec<String> {
        let (expected, _) = self.inventory(checkpoint.tensor_names());
        let used: BTreeSet<String> = expected.keys().flat_map(|name| checkpoint.answering(name)).collect();
        let is_unused =
            |name: &&str| !used.contains(*name) && !BUFFERS.iter().any(|buffer| name.ends_with(buffer));
        checkpoint.tensor_names().filter(is_unused).map(str::to_owned).collect()
    }

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
        let Root { decoder, head } = Root::find(|name| names.contains(name));
        let mut shapes = Shapes::new();
        shapes.insert(format!("{decoder}.embed_tokens.weight"), vec![vocab, hidden]);
        self.add_norm(&format!("{decoder}.{}", self.names.final_norm), &mut shapes);
        for &layer in &layers {
            self.add_layer(layer, &format!("{decoder}.layers.{layer}"), &names, &mut shapes);
        }
        let required = |(name, dims)| (name, Expected { dims, required: true });
        let mut expected: BTreeMap<_, _> = shapes.into_iter().map(required).collect();
        let mut of_head = |part: &str, dims| {
            let required = self.tie_word_embeddings == Some(false);
            expected.insert(format!("{head}.{part}"), Expected { dims, required });
        };
        // One beside an embedding that is the head has no effect.
        if self.tie_word_embeddings != Some(true) {
            of_head("weight", vec![vocab, hidden]);
        }
        if self.head_bias {
            of_head("bias", vec![vocab]);
        }
        let first = (0..self.num_hidden_layers).find(|layer| !layers.contains(layer));
        (expected, first.map(|first| (self.num_hidden_layers - layers.len(), first)))
    }

    fn add_norm(&self, path: &str, shapes: &mut Shapes) {
        for part in self.norm.tensors() {
            shapes.insert(format!("{path}.{part}"), vec![self.hidden_size]);
        }
    }

    fn add_layer(&self, layer: usize, path: &str, names: &BTreeSet<&str>, shapes: &mut Shapes) {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        for norm in self.names.norms() {
            self.add_norm(&format!("{path}.{norm}"), shapes);
        }
        match self.linear.as_ref().filter(|linear| linear.is_linear(layer)) {
            Some(linear) => linear.add(hidden, &format!("{path}.linear_attn"), shapes),
            None => self.add_attention(path, names, shapes),
        }
        let mut linear = |module: &str, n: usize, k: usize, bias: bool| {
            shapes.insert(format!("{path}.{module}.weight"), vec![n, k]);
            if bias {
                shapes.insert(format!("{path}.{module}.bias"), vec![n]);
            }
        };
        match self.moe.as_ref().filter(|moe| moe.is_sparse(layer)) {
            Some(moe) => {
                let block = moe.block_name;
                linear(&format!("{block}.{}", moe.router_name), moe.experts, hidden, moe.bias);
                if let Some(shared) = moe.shared {
                    let (module, inner) =
                        (format!("{block}.{}", shared.block_name), shared.intermediate_size);
                    linear(&format!("{module}.gate_proj"), inner, hidden, self.mlp_bias);
                    linear(&format!("{module}.up_proj"), inner, hidden, self.mlp_bias);
                    linear(&format!("{module}.down_proj"), hidden, inner, self.mlp_bias);
                    if let Some(gate) = shared.gate_name {
                        linear(&format!("{block}.{gate}"), 1, hidden, false);
                    }
                }
                if let Some(correction) = moe.routing.correction {
                    let name = format!("{path}.{block}.{}", correction.path);
                    if !correction.is_optional || names.contains(name.as_str()) {
                        shapes.insert(name, correction.dims(moe.experts));
                    }
                }
                moe.add_experts(&format!("{path}.{block}"), hidden, names, shapes);
            }
            None => {
                let Names { mlp, gate_proj, up_proj, down_proj, .. } = self.names;
                for name in gate_proj.into_iter().chain([up_proj]) {
                    linear(&format!("{mlp}.{name}"), inner, hidden, self.mlp_bias);
                }
                linear(&format!("{mlp}.{down_proj}"), hidden, inner, self.mlp_bias);
            }
        }
    }
}

impl Config {
    fn add_attention(&self, path: &str, names: &BTreeSet<&str>, shapes: &mut Shapes) {
        let hidden = self.hidden_size;
        let q = self.num_attention_heads.saturating_mul(self.query_rows());
        let kv = self.num_key_value_heads.saturating_mul(self.head_dim);
        if let Some(QkNorm { kind, over, .. }) = self.qk_norm {
            for (name, heads) in
                [(self.names.q_norm, self.num_attention_heads), (self.names.k_norm, self.num_key_value_heads)]
            {
                let norm = format!("{path}.self_attn.{name}");
                let (modules, dims) = match over {
                    QkNormOver::Head => (vec![norm], vec![self.head_dim]),
                    QkNormOver::All => (vec![norm], vec![heads.saturating_mul(self.head_dim)]),
                    QkNormOver::HeadOfItsOwn
                        if !names.contains(format!("{norm}.norms.0.weight").as_str()) =>
                    {
                        (vec![norm], vec![heads, self.head_dim])
                    }
                    QkNormOver::HeadOfItsOwn => {
                        // The config is not trusted to count heads.
                        let there = names.iter().filter(|name| name.starts_with(&norm)).count();
                        let each = (0..heads.min(there + 1)).map(|head| format!("{norm}.norms.{head}"));
                        (each.collect(), vec![self.head_dim])
                    }
                };
                for (module, part) in
                    modules.iter().flat_map(|module| kind.tensors().iter().map(move |part| (module, part)))
                {
                    shapes.insert(format!("{module}.{part}"), dims.clone());
                }
            }
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
        let outputs = self.num_attention_heads.saturating_mul(self.value_dim());
        linear(&format!("self_attn.{}", self.names.o_proj), hidden, outputs, self.output_bias);
        match self.latents {
            None => {
                linear("self_attn.q_proj", q, hidden, self.qkv_bias);
                linear("self_attn.k_proj", kv, hidden, self.qkv_bias);
                linear("self_attn.v_proj", kv, hidden, self.qkv_bias);
            }
            Some(latents) => self.add_latents(latents, &format!("{path}.self_attn"), names, shapes),
        }
    }

    /// The inputs of latent attention.
    fn add_latents(&self, latents: Latents, path: &str, names: &BTreeSet<&str>, shapes: &mut Shapes) {
        let Latents { query_latent, latent, key_dim, value_dim, .. } = latents;
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        let queries = heads.saturating_mul(self.head_dim);
        let mut add = |name: &str, dims: Vec<usize>| drop(shapes.insert(format!("{path}.{name}"), dims));
        match query_latent {
            None => add("q_proj.weight", vec![queries, hidden]),
            Some(size) => {
                add("q_a_proj.weight", vec![size, hidden]);
                add("q_a_layernorm.weight", vec![size]);
                add("q_b_proj.weight", vec![queries, size]);
            }
        }
        add("kv_a_proj_with_mqa.weight", vec![latents.cached(), hidden]);
        add("kv_a_layernorm.weight", vec![latent]);
        if self.qkv_bias {
            add("kv_a_proj_with_mqa.bias", vec![latents.cached()]);
            if let Some(size) = query_latent {
                add("q_a_proj.bias", vec![size]);
            }
        }
        if names.contains(format!("{path}.embed_q.weight").as_str()) {
            add("embed_q.weight", vec![heads, latent, key_dim]);
            add("unembed_out.weight", vec![heads, value_dim, latent]);
        } else {
            add("kv_b_proj.weight", vec![heads.saturating_mul(key_dim.saturating_add(value_dim)), latent]);
        }
    }
}

impl LinearAttentionConfig {
    fn add(&self, hidden: usize, path: &str, shapes: &mut Shapes) {
        let (channels, heads) = (self.channels(), self.value_heads);
        let values = heads.saturating_mul(self.value_dim);
        let mut add =
            |name: &str, dims: &[usize]| drop(shapes.insert(format!("{path}.{name}"), dims.to_vec()));
        if self.is_grouped {
            let [qkvz, ba] = self.rows_of_group().map(|rows| self.key_heads.saturating_mul(rows));
            add("in_proj_qkvz.weight", &[qkvz, hidden]);
            add("in_proj_ba.weight", &[ba, hidden]);
        } else {
            add("in_proj_qkv.weight", &[channels, hidden]);
            add("in_proj_z.weight", &[values, hidden]);
            add("in_proj_b.weight", &[heads, hidden]);
            add("in_proj_a.weight", &[heads, hidden]);
        }
        add("conv1d.weight", &self.kernel_dims(channels));
        add("A_log", &[heads]);
        add("dt_bias", &[heads]);
        add("norm.weight", &[self.value_dim]);
        add("out_proj.weight", &[hidden, values]);
    }
}

impl MoeConfig {
    /// The experts of the block at `path`, in whichever layout of [`experts`](candle_quant::nn::experts()) is there.
    fn add_experts(&self, path: &str, hidden: usize, names: &BTreeSet<&str>, shapes: &mut Shapes) {
        let (count, inner) = (self.experts, self.intermediate_size);
        let has = |name: &str| names.contains(format!("{path}.{name}").as_str());
        let mut add = |module: &str, stack: &[usize], n: usize, k: usize| {
            // Stacks of some writers are parameters, not modules.
            let is_parameter = has(module);
            let name = if is_parameter { module.to_owned() } else { format!("{module}.weight") };
            let matrix = if is_parameter && self.transposed_parameters { [k, n] } else { [n, k] };
            shapes.insert(format!("{path}.{name}"), [stack, &matrix].concat());
            if self.bias {
                let is_parameter = has(&format!("{module}_bias"));
                let suffix = if is_parameter { "_bias" } else { ".bias" };
                shapes.insert(format!("{path}.{module}{suffix}"), [stack, &[n]].concat());
            }
        };
        let of_each = |name: &str| has(&format!("experts.0.{name}.weight"));
        if let Some([gate_up, down]) = self.stack_names.filter(|[name, _]| has(&format!("{name}.weight"))) {
            add(gate_up, &[count], inner.saturating_mul(2), hidden);
            add(down, &[count], hidden, inner);
        } else if has("experts.gate_up_proj") || has("experts.gate_up_proj.weight") {
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
