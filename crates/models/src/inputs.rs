//! What the modules of a model are given, and what makes it: which modules are given the same, and where what they are given
//! can be scaled so that the model computes the same.

use super::config::{Inside, Names, Role};
use super::root::{is_final_norm, layer_of};
use super::Config;
use candle_quant::nn::Gating;
use std::fmt;
use std::ops::Range;

/// What a module is given. Modules of which it is equal are given the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModuleInput {
    /// Of which layer, if it is one's.
    pub layer: Option<usize>,
    /// What it is there.
    pub given: Given,
    /// Which expert, if the module is one expert's alone.
    pub expert: Option<usize>,
}

/// What a module of a layer, or the head, is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Given {
    /// What attention, or linear attention, sees.
    Attention,
    /// The vector that queries are made of.
    QueryLatent,
    /// What the heads of attention see.
    Heads,
    /// What the heads of linear attention see.
    LinearHeads,
    /// What the router sees.
    Router,
    /// What the gate of a shared expert sees.
    SharedGate,
    /// What gate and up projections see; of experts each sees what it was chosen for.
    FeedForward(Inside),
    /// What they make, which down projections see.
    Inner(Inside),
    /// What the head sees.
    Head,
}

/// What modules are given that can only be scaled for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ScaledInput {
    /// Of which layer, if it is one's.
    pub layer: Option<usize>,
    /// What it is there: [`Given::FeedForward`] of a dense block stands for all modules of the block, and [`Given::Attention`]
    /// for them, too, where both see the same.
    pub given: Given,
}

/// What makes an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Maker {
    /// A norm, which multiplies by its weight, or by one more than that.
    Norm {
        /// Whether by one more.
        one_plus: bool,
    },
    /// These rows of a projection, of each matrix of a stack.
    Rows(Range<usize>),
}

impl fmt::Display for ScaledInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.given {
            Given::Attention => "what attention sees",
            Given::QueryLatent => "what queries are made of",
            Given::Heads | Given::LinearHeads => "what heads see",
            Given::Router | Given::SharedGate | Given::FeedForward(_) => "what the feed-forward block sees",
            Given::Inner(Inside::Dense) => "what the down projection sees",
            Given::Inner(Inside::Experts) => "what the down projections of experts see",
            Given::Inner(Inside::Shared) => "what the down projection of the shared expert sees",
            Given::Head => "what the head sees",
        })
    }
}

impl Config {
    /// What the module at a path is given; `None` if the model has no such module, or computes what it is for otherwise: the
    /// two matrices of latents, the convolution of linear attention, the embedding.
    pub fn input_of(&self, module: &str) -> Option<ModuleInput> {
        let given = match self.role(module)? {
            Role::Head => Given::Head,
            Role::Query if module.ends_with("q_b_proj") => Given::QueryLatent,
            Role::Query | Role::KeyValue | Role::Latent | Role::LinearInput => Given::Attention,
            Role::Output => Given::Heads,
            Role::LinearOutput => Given::LinearHeads,
            Role::Inner(inside) => Given::FeedForward(inside),
            Role::Down(inside) => Given::Inner(inside),
            Role::Router => Given::Router,
            Role::SharedGate => Given::SharedGate,
            Role::Embedding | Role::OfLatent | Role::OfLatentByHeads | Role::Convolution => return None,
        };
        let layer = layer_of(module);
        let is_there = match layer {
            None => given == Given::Head,
            Some(layer) => given != Given::Head && layer < self.num_hidden_layers,
        };
        let parent = module.rsplit_once('.').map_or("", |(parent, _)| parent);
        let expert = parent
            .rsplit_once('.')
            .and_then(|(block, index)| block.ends_with(".experts").then(|| index.parse().ok()).flatten());
        is_there.then_some(ModuleInput { layer, given, expert })
    }

    /// With which others the module at a path is given what can be scaled for all of them.
    pub fn scaled_input(&self, module: &str) -> Option<ScaledInput> {
        let ModuleInput { layer, given, .. } = self.input_of(module)?;
        let given = match given {
            Given::Router | Given::SharedGate | Given::FeedForward(_) => self.block_input(),
            other => other,
        };
        Some(ScaledInput { layer, given })
    }

    /// What feed-forward blocks see.
    fn block_input(&self) -> Given {
        if self.parallel_blocks {
            Given::Attention
        } else {
            Given::FeedForward(Inside::Dense)
        }
    }

    /// Which input the module at a path makes, and by what of it. `rows` are those of its weight, of one matrix.
    pub fn makes(&self, module: &str, rows: usize) -> Option<(ScaledInput, Maker)> {
        if let Some(input) = self.normalizes(module) {
            let one_plus = self.norm.is_one_plus() && input.given != Given::QueryLatent;
            return Some((input, Maker::Norm { one_plus }));
        }
        let layer = layer_of(module).filter(|layer| *layer < self.num_hidden_layers)?;
        let name = module.rsplit_once('.').map_or(module, |(_, name)| name);
        let (given, rows) = match self.role(module)? {
            Role::KeyValue if name == "v_proj" => (Given::Heads, 0..rows),
            // Queries, keys, values.
            Role::Query if name == "qkv_proj" => {
                let values = self.num_key_value_heads.checked_mul(self.head_dim)?;
                (Given::Heads, rows.checked_sub(values)?..rows)
            }
            Role::Inner(inside) => match name {
                // Gates, then ups.
                "gate_up_proj" | "input_linear" => (Given::Inner(inside), rows / 2..rows),
                "w3" | "up_proj" => (Given::Inner(inside), 0..rows),
                _ if name == self.names.up_proj => (Given::Inner(inside), 0..rows),
                _ => return None,
            },
            _ => return None,
        };
        Some((ScaledInput { layer: Some(layer), given }, Maker::Rows(rows)))
    }

    /// What a norm makes.
    fn normalizes(&self, module: &str) -> Option<ScaledInput> {
        let Names { attention_norm, mlp_norm, final_norm, .. } = self.names;
        if is_final_norm(module, final_norm) {
            return Some(ScaledInput { layer: None, given: Given::Head });
        }
        let layer = layer_of(module).filter(|layer| *layer < self.num_hidden_layers)?;
        let within = module.split_once(&format!(".layers.{layer}.")).map(|(_, within)| within)?;
        let given = match within {
            _ if Some(within) == attention_norm => Given::Attention,
            _ if Some(within) == mlp_norm && !self.parallel_blocks => Given::FeedForward(Inside::Dense),
            "self_attn.q_a_layernorm" if self.latents.is_some() => Given::QueryLatent,
            _ => return None,
        };
        Some(ScaledInput { layer: Some(layer), given })
    }

    /// Why an input can't be scaled, if so.
    pub fn unscalable(&self, input: ScaledInput) -> Option<&'static str> {
        let by_norm = |name: Option<&str>| match name {
            None => Some("there is no norm before it"),
            Some(_) if self.norm.tensors().is_empty() => Some("the norm before it has no weight"),
            Some(_) => None,
        };
        match input.given {
            Given::Attention => by_norm(self.names.attention_norm),
            Given::Router | Given::SharedGate | Given::FeedForward(_) => by_norm(self.names.mlp_norm),
            Given::Head => by_norm(Some(self.names.final_norm)),
            Given::QueryLatent => None,
            Given::Heads if self.latents.is_some() => Some("values are made of latents"),
            Given::Heads => self.qkv_clip.map(|_| "values are cut"),
            Given::LinearHeads => Some("heads share a norm"),
            Given::Inner(Inside::Experts) => match self.moe.as_ref().map(|moe| moe.gating) {
                Some(Gating::Plain(_)) => None,
                _ => Some("what up projections make is cut"),
            },
            Given::Inner(Inside::Shared) => None,
            Given::Inner(Inside::Dense) => match self.names.gate_proj {
                Some(_) => None,
                None => Some("there is an activation between it and what makes it"),
            },
        }
    }

    /// How many matrices have scales of their own for an input, and for how many columns.
    pub fn scales_of(&self, input: ScaledInput) -> Option<(usize, usize)> {
        Some(match input.given {
            Given::Attention | Given::Router | Given::SharedGate | Given::FeedForward(_) | Given::Head => {
                (1, self.hidden_size)
            }
            Given::QueryLatent => (1, self.latents?.query_latent?),
            Given::Heads => (1, self.num_attention_heads.checked_mul(self.value_dim())?),
            Given::LinearHeads => {
                let linear = self.linear.as_ref()?;
                (1, linear.elements(linear.key_heads).1)
            }
            Given::Inner(inside @ Inside::Experts) => (self.moe.as_ref()?.experts, self.inner_size(inside)?),
            Given::Inner(inside @ (Inside::Dense | Inside::Shared)) => (1, self.inner_size(inside)?),
        })
    }

    /// Of the columns of an input the one that a row makes that many rows behind the first, and how often more, how many columns
    /// apart: query heads share the values of one head.
    pub fn columns_of_row(&self, input: ScaledInput, row: usize) -> impl Iterator<Item = usize> {
        let (head, times) = match input.given {
            Given::Heads => {
                (self.head_dim.max(1), self.num_attention_heads / self.num_key_value_heads.max(1))
            }
            _ => (1, 1),
        };
        let first = (row / head).saturating_mul(times.max(1)).saturating_mul(head).saturating_add(row % head);
        (0..times.max(1)).map(move |time| first.saturating_add(time * head))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};

    fn config(of_family: Value) -> Config {
        let mut config = json!({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
            "tie_word_embeddings": false});
        config.as_object_mut().unwrap().extend(of_family.as_object().unwrap().clone());
        Config::from_json(&config).unwrap()
    }

    #[test]
    fn modules_are_given_the_same_whatever_they_are_called() {
        let llama = config(json!({"model_type": "llama"}));
        let same = |config: &Config, a: &str, b: &str| {
            let [a, b] = [a, b].map(|name| config.input_of(&format!("model.layers.1.{name}")).unwrap());
            a == b
        };
        assert!(same(&llama, "self_attn.qkv_proj", "self_attn.v_proj"));
        assert!(same(&llama, "mlp.gate_up_proj", "mlp.up_proj"));
        assert!(
            !same(&llama, "self_attn.o_proj", "self_attn.q_proj")
                && !same(&llama, "mlp.down_proj", "mlp.up_proj")
        );
        let nested = llama.input_of("language_model.model.layers.1.mlp.up_proj");
        assert_eq!(nested, llama.input_of("model.layers.1.mlp.gate_proj"));
        for none in
            ["model.embed_tokens", "model.layers.2.mlp.up_proj", "players.0.mlp.up_proj", "model.norm", "x"]
        {
            assert_eq!(llama.input_of(none), None, "{none}");
        }
        assert_eq!(llama.input_of("lm_head").unwrap().given, Given::Head);

        let mixtral = config(json!({"model_type": "mixtral", "num_local_experts": 4}));
        let block = "block_sparse_moe";
        assert!(same(&mixtral, &format!("{block}.experts.3.w1"), &format!("{block}.experts.3.w3")));
        assert!(!same(&mixtral, &format!("{block}.experts.3.w1"), &format!("{block}.experts.2.w1")));
        assert!(same(
            &mixtral,
            &format!("{block}.switch_mlp.up_proj"),
            &format!("{block}.experts.gate_proj")
        ));
        // Routers see all that there is.
        assert!(!same(&mixtral, &format!("{block}.gate"), &format!("{block}.experts.gate_proj")));
        let of = |name: &str| mixtral.scaled_input(&format!("model.layers.0.{block}.{name}")).unwrap();
        assert_eq!(of("gate"), of("experts.0.w3"));
        assert_ne!(of("gate"), of("experts.0.w2"));
        let granite = config(json!({"model_type": "granitemoe", "num_local_experts": 4}));
        assert!(same(&granite, &format!("{block}.input_linear"), &format!("{block}.experts.gate_proj")));
    }

    #[test]
    fn what_makes_an_input_is_known() {
        let phi3 = config(json!({"model_type": "phi3", "pad_token_id": 0}));
        let made = |config: &Config, name: &str, rows: usize| {
            config
                .makes(&format!("model.{name}"), rows)
                .map(|(input, maker)| (input.layer, input.given, maker))
        };
        let rows = |given, rows| Some((Some(0), given, Maker::Rows(rows)));
        assert_eq!(made(&phi3, "layers.0.self_attn.qkv_proj", 64), rows(Given::Heads, 48..64));
        assert_eq!(made(&phi3, "layers.0.self_attn.qkv_proj", 8), None);
        assert_eq!(made(&phi3, "layers.0.mlp.gate_up_proj", 96), rows(Given::Inner(Inside::Dense), 48..96));
        assert_eq!(made(&phi3, "layers.0.mlp.gate_proj", 48), None);
        let norm = |layer, given, one_plus| Some((layer, given, Maker::Norm { one_plus }));
        assert_eq!(made(&phi3, "layers.1.input_layernorm", 32), norm(Some(1), Given::Attention, false));
        assert_eq!(made(&phi3, "norm", 32), norm(None, Given::Head, false));
        assert_eq!(made(&phi3, "layers.2.input_layernorm", 32), None);
        let gemma = config(json!({"model_type": "gemma2", "query_pre_attn_scalar": 8}));
        let input = Given::FeedForward(Inside::Dense);
        assert_eq!(made(&gemma, "layers.0.pre_feedforward_layernorm", 32), norm(Some(0), input, true));
        assert_eq!(made(&gemma, "layers.0.post_attention_layernorm", 32), None);
        // One norm for both.
        let cohere = config(json!({"model_type": "cohere"}));
        assert_eq!(
            cohere.scaled_input("model.layers.0.mlp.up_proj"),
            cohere.scaled_input("model.layers.0.self_attn.q_proj")
        );
        // Query heads share the values of one head.
        let heads = ScaledInput { layer: Some(0), given: Given::Heads };
        let columns = |row| phi3.columns_of_row(heads, row).collect::<Vec<_>>();
        assert_eq!([columns(0), columns(7), columns(8)], [[0, 8], [7, 15], [16, 24]]);
        assert_eq!(phi3.scales_of(heads), Some((1, 32)));
    }

    #[test]
    fn what_can_not_be_scaled_says_why() {
        let reason = |config: &Config, given| config.unscalable(ScaledInput { layer: Some(0), given });
        let inner = Given::Inner(Inside::Dense);
        let olmo = config(json!({"model_type": "olmo", "clip_qkv": 8.0}));
        assert_eq!(reason(&olmo, Given::Attention), Some("the norm before it has no weight"));
        assert_eq!((reason(&olmo, Given::Heads), reason(&olmo, inner)), (Some("values are cut"), None));
        let olmo2 = config(json!({"model_type": "olmo2"}));
        assert_eq!(reason(&olmo2, Given::Attention), Some("there is no norm before it"));
        assert!(reason(&config(json!({"model_type": "starcoder2"})), inner).unwrap().contains("activation"));
        let llama = config(json!({"model_type": "llama"}));
        for given in [Given::Attention, Given::Heads, Given::FeedForward(Inside::Dense), inner, Given::Head] {
            assert_eq!(reason(&llama, given), None);
        }
    }
}
