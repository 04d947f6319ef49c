//! What the modules of a model are called, and what each of them does.

use super::Config;
use crate::norm::NormKind;

/// What modules are called within their layer or, the last norm, within the decoder. The layers of attention are in
/// `self_attn`, those of linear attention in `linear_attn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The norm before the head.
    pub final_norm: &'static str,
    /// Of what attention sees.
    pub attention_norm: Option<&'static str>,
    /// Of what attention makes, before it is added.
    pub attention_out_norm: Option<&'static str>,
    /// Of what the feed-forward block sees.
    pub mlp_norm: Option<&'static str>,
    /// Of what the feed-forward block makes, before it is added.
    pub mlp_out_norm: Option<&'static str>,
    /// The output projection of attention.
    pub o_proj: &'static str,
    /// The norm of queries.
    pub q_norm: &'static str,
    /// The norm of keys.
    pub k_norm: &'static str,
    /// The dense feed-forward block.
    pub mlp: &'static str,
    /// Its gate: without one it is `down(act(up(x)))`.
    pub gate_proj: Option<&'static str>,
    /// Its first projection.
    pub up_proj: &'static str,
    /// Its last projection.
    pub down_proj: &'static str,
}

impl Default for Names {
    fn default() -> Self {
        Self::USUAL
    }
}

impl Names {
    /// Those of Llama.
    pub const USUAL: Self = Self {
        final_norm: "norm",
        attention_norm: Some("input_layernorm"),
        attention_out_norm: None,
        mlp_norm: Some("post_attention_layernorm"),
        mlp_out_norm: None,
        o_proj: "o_proj",
        q_norm: "q_norm",
        k_norm: "k_norm",
        mlp: "mlp",
        gate_proj: Some("gate_proj"),
        up_proj: "up_proj",
        down_proj: "down_proj",
    };

    /// Norms behind the blocks, and none before them.
    pub(crate) const NORMS_BEHIND: Self = Self {
        attention_norm: None,
        attention_out_norm: Some("post_attention_layernorm"),
        mlp_norm: None,
        mlp_out_norm: Some("post_feedforward_layernorm"),
        ..Self::USUAL
    };

    /// The norms of a layer that there are.
    pub(crate) fn norms(&self) -> impl Iterator<Item = &'static str> {
        let all = [self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm];
        all.into_iter().flatten()
    }
}

/// How queries and keys are normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkNorm {
    /// What the norm does.
    pub kind: NormKind,
    /// What is normalized together.
    pub over: QkNormOver,
    /// Whether they have turned by their positions before; those of layers in which they do not turn are as they are then.
    pub after_rotation: bool,
}

/// What a norm of queries or keys is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormOver {
    /// Each head, with one weight for all, `[head_dim]`.
    Head,
    /// Each head, with a weight for each, `[heads, head_dim]`.
    HeadOfItsOwn,
    /// All heads together, `[heads * head_dim]`.
    All,
}

/// What a module with a weight of two or more dimensions does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The embedding.
    Embedding,
    /// The output head.
    Head,
    /// Queries of attention.
    Query,
    /// Keys or values of attention.
    KeyValue,
    /// The vectors that queries, or keys and values are made of.
    Latent,
    /// Keys and values of heads, of such a vector.
    OfLatent,
    /// The same of keys or values alone, a matrix for each head.
    OfLatentByHeads,
    /// The output of attention.
    Output,
    /// Queries, keys, values, gates and the like of linear attention.
    LinearInput,
    /// The convolution of linear attention.
    Convolution,
    /// The output of linear attention.
    LinearOutput,
    /// Gate or up projection, or both one after another.
    Inner(Inside),
    /// The projection that comes after them.
    Down(Inside),
    /// What chooses among experts.
    Router,
    /// By how much shared experts count.
    SharedGate,
}

/// What a feed-forward projection belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Inside {
    /// The block itself.
    Dense,
    /// One of the experts, or all of them.
    Experts,
    /// The expert that all tokens use.
    Shared,
}

impl Config {
    /// What the module at a path does, `model.layers.0.mlp.down_proj` for example; `None` if the model has no such module
    /// with a matrix.
    pub fn role(&self, module: &str) -> Option<Role> {
        let (parent, name) = module.rsplit_once('.').unwrap_or(("", module));
        let inside = |segment: &str| parent.split('.').any(|part| part == segment);
        let of_block = match &self.moe {
            Some(moe) if moe.shared.is_some_and(|shared| inside(shared.block_name)) => Some(Inside::Shared),
            Some(_) if ["experts", "switch_mlp", "shared_experts"].into_iter().any(inside) => {
                Some(Inside::Experts)
            }
            Some(moe)
                if inside(moe.block_name) && moe.stack_names.is_some_and(|[a, b]| [a, b].contains(&name)) =>
            {
                Some(Inside::Experts)
            }
            _ if parent.is_empty() || parent.rsplit('.').next() == Some(self.names.mlp) => {
                Some(Inside::Dense)
            }
            // Of other blocks nothing is known.
            _ => None,
        };
        let names = &self.names;
        let is_linear = self.linear.is_some() && inside("linear_attn");
        Some(match name {
            "in_proj_qkvz" | "in_proj_ba" | "in_proj_qkv" | "in_proj_z" | "in_proj_b" | "in_proj_a"
                if is_linear =>
            {
                Role::LinearInput
            }
            "conv1d" if is_linear => Role::Convolution,
            "out_proj" if is_linear => Role::LinearOutput,
            "embed_tokens" => Role::Embedding,
            "lm_head" => Role::Head,
            "q_proj" | "qkv_proj" => Role::Query,
            "k_proj" | "v_proj" => Role::KeyValue,
            "q_b_proj" if self.latents.is_some() => Role::Query,
            "q_a_proj" | "kv_a_proj_with_mqa" if self.latents.is_some() => Role::Latent,
            "kv_b_proj" if self.latents.is_some() => Role::OfLatent,
            "embed_q" | "unembed_out" if self.latents.is_some() => Role::OfLatentByHeads,
            _ if name == names.o_proj => Role::Output,
            _ if self.moe.as_ref().is_some_and(|moe| moe.is_router(parent, name)) => Role::Router,
            _ if self.moe.as_ref().and_then(|moe| moe.shared?.gate_name) == Some(name) => Role::SharedGate,
            "w1" | "w3" | "gate_up_proj" | "input_linear" => Role::Inner(of_block?),
            "w2" | "output_linear" => Role::Down(of_block?),
            _ if Some(name) == names.gate_proj || name == names.up_proj => Role::Inner(of_block?),
            _ if name == names.down_proj => Role::Down(of_block?),
            // Experts are called alike in all models.
            "gate_proj" | "up_proj" if of_block != Some(Inside::Dense) => Role::Inner(of_block?),
            "down_proj" if of_block != Some(Inside::Dense) => Role::Down(of_block?),
            _ => return None,
        })
    }

    /// The K of a linear or embedding module by its path; `None` if the model has no such module. Tells formats apart where
    /// shapes alone don't.
    pub fn in_features(&self, module: &str) -> Option<usize> {
        Some(match self.role(module)? {
            Role::Output => self.num_attention_heads.checked_mul(self.value_dim())?,
            Role::LinearOutput => {
                let linear = self.linear.as_ref()?;
                linear.elements(linear.key_heads).1
            }
            Role::Convolution => {
                let linear = self.linear.as_ref()?;
                let [.., k] = linear.kernel_dims(linear.channels());
                k
            }
            Role::OfLatent => self.latents?.latent,
            Role::OfLatentByHeads if module.ends_with("embed_q") => self.latents?.key_dim,
            Role::OfLatentByHeads => self.latents?.latent,
            Role::Query if module.ends_with("q_b_proj") => self.latents?.query_latent?,
            Role::Down(inside) => self.inner_size(inside)?,
            Role::Embedding
            | Role::Head
            | Role::Query
            | Role::LinearInput
            | Role::Latent
            | Role::KeyValue
            | Role::Inner(_)
            | Role::Router
            | Role::SharedGate => self.hidden_size,
        })
    }

    /// Elements inside a feed-forward block.
    pub(crate) fn inner_size(&self, inside: Inside) -> Option<usize> {
        match inside {
            Inside::Dense => Some(self.intermediate_size),
            Inside::Experts => Some(self.moe.as_ref()?.intermediate_size),
            Inside::Shared => Some(self.moe.as_ref()?.shared?.intermediate_size),
        }
    }
}
