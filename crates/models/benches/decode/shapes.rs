//! Shapes of models, and the names of their weights in both kinds of files.

/// The sizes of a Qwen3 model with a tied head.
#[derive(Clone, Debug)]
pub struct Shape {
    pub name: &'static str,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub inner: usize,
    pub vocabulary: usize,
    pub context: usize,
}

/// The published sizes.
pub const QWEN3: [Shape; 2] = [
    Shape {
        name: "0.6b",
        hidden: 1024,
        layers: 28,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        inner: 3072,
        vocabulary: 151_936,
        context: 40_960,
    },
    Shape {
        name: "1.7b",
        hidden: 2048,
        layers: 28,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        inner: 6144,
        vocabulary: 151_936,
        context: 40_960,
    },
];

/// For tests. Blocks of K-quants need multiples of 256.
pub const TINY: Shape = Shape {
    name: "tiny",
    hidden: 256,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    inner: 512,
    vocabulary: 512,
    context: 128,
};

/// A weight: its module in MLX's layout, its name in GGUF, its rows and columns. A norm has no columns.
pub struct Weight {
    pub module: String,
    pub gguf: String,
    pub n: usize,
    pub k: Option<usize>,
}

impl Shape {
    /// All weights, in the order in which files have them.
    pub fn weights(&self) -> Vec<Weight> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let of = |module: String, gguf: String, n, k| Weight { module, gguf: gguf + ".weight", n, k };
        let mut weights =
            vec![of("model.embed_tokens".into(), "token_embd".into(), self.vocabulary, Some(self.hidden))];
        for layer in 0..self.layers {
            let block = [
                ("input_layernorm", "attn_norm", self.hidden, None),
                ("self_attn.q_proj", "attn_q", q, Some(self.hidden)),
                ("self_attn.k_proj", "attn_k", kv, Some(self.hidden)),
                ("self_attn.v_proj", "attn_v", kv, Some(self.hidden)),
                ("self_attn.q_norm", "attn_q_norm", self.head_dim, None),
                ("self_attn.k_norm", "attn_k_norm", self.head_dim, None),
                ("self_attn.o_proj", "attn_output", self.hidden, Some(q)),
                ("post_attention_layernorm", "ffn_norm", self.hidden, None),
                ("mlp.gate_proj", "ffn_gate", self.inner, Some(self.hidden)),
                ("mlp.up_proj", "ffn_up", self.inner, Some(self.hidden)),
                ("mlp.down_proj", "ffn_down", self.hidden, Some(self.inner)),
            ];
            weights.extend(block.map(|(module, gguf, n, k)| {
                of(format!("model.layers.{layer}.{module}"), format!("blk.{layer}.{gguf}"), n, k)
            }));
        }
        weights.push(of("model.norm".into(), "output_norm".into(), self.hidden, None));
        weights
    }

    /// Bytes of keys and values of so many tokens, in elements of 16 bits.
    pub fn cache_bytes(&self, tokens: usize) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * tokens * 2
    }
}
