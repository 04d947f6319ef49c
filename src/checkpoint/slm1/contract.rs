//! The tensors that a model of this format has: names, which files hold as hashes only, and shapes.

use super::model::Slm1Model;
use std::collections::BTreeMap;

/// A tensor of a model in SLM1 files.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slm1Tensor {
    /// The name in the format, which files hold as a hash.
    pub name: String,
    /// The name that models ask for.
    pub model_name: String,
    /// The shape.
    pub dims: Vec<usize>,
    /// Heads whose rows are in the order of adjacent pairs.
    pub heads: Option<usize>,
    /// Whether there is no model without it.
    pub required: bool,
}

/// FNV-1a, 64 bits.
pub(super) fn hash(name: &str) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    name.bytes().fold(BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

/// All tensors of a model, by the hashes of their names.
pub(super) fn tensors(model: &Slm1Model) -> BTreeMap<u64, Slm1Tensor> {
    model.tensors().into_iter().map(|known| (hash(&known.name), known)).collect()
}

impl Slm1Model {
    /// The tensors that files of this model have, in the order in which they are published.
    pub fn tensors(&self) -> Vec<Slm1Tensor> {
        let size = |number: u32| number as usize;
        let (hidden, ffn, vocab) = (size(self.hidden_size), size(self.ffn_size), size(self.vocab_size));
        let q = size(self.head_count).saturating_mul(size(self.head_dim));
        let kv = size(self.kv_head_count).saturating_mul(size(self.head_dim));
        let tensor =
            |name: String, model_name: String, dims: &[usize], heads: Option<u32>, required: bool| {
                Slm1Tensor { name, model_name, dims: dims.to_vec(), heads: heads.map(size), required }
            };
        let of_all = |name: &str, model_name: &str, dims: &[usize], required: bool| {
            tensor(format!("{name}.weight"), format!("{model_name}.weight"), dims, None, required)
        };
        let mut tensors = vec![
            of_all("tok_embeddings", "model.embed_tokens", &[vocab, hidden], true),
            of_all("norm", "model.norm", &[hidden], true),
            of_all("output", "lm_head", &[vocab, hidden], !self.is_tied),
        ];
        for layer in 0..self.layer_count {
            for (name, model_name, dims, heads) in [
                ("attn_norm", "input_layernorm", &[hidden][..], None),
                ("ffn_norm", "post_attention_layernorm", &[hidden], None),
                ("wq", "self_attn.q_proj", &[q, hidden], Some(self.head_count)),
                ("wk", "self_attn.k_proj", &[kv, hidden], Some(self.kv_head_count)),
                ("wv", "self_attn.v_proj", &[kv, hidden], None),
                ("wo", "self_attn.o_proj", &[hidden, q], None),
                // Which of w1 and w3 is the gate is not published; it is w1 in all models that use these names.
                ("w1", "mlp.gate_proj", &[ffn, hidden], None),
                ("w2", "mlp.down_proj", &[hidden, ffn], None),
                ("w3", "mlp.up_proj", &[ffn, hidden], None),
            ] {
                let name = format!("layers.{layer}.{name}.weight");
                let model_name = format!("model.layers.{layer}.{model_name}.weight");
                tensors.push(tensor(name, model_name, dims, heads, true));
            }
        }
        tensors
    }
}

#[cfg(test)]
mod tests {
    use super::hash;

    #[test]
    fn hashes_are_those_of_the_format() {
        for (name, expected) in [
            ("tok_embeddings.weight", 0x771e_f68a_9b91_c762),
            ("norm.weight", 0xe45e_8831_76c5_ce0f),
            ("output.weight", 0x6d1c_f81e_f83b_28c6),
            ("layers.0.attn_norm.weight", 0x8718_0b38_fdf5_1ea9),
            ("layers.0.ffn_norm.weight", 0x8dd7_7731_acab_2a2e),
            ("layers.0.wq.weight", 0x2e19_20bd_b770_12a5),
            ("layers.0.wk.weight", 0x0676_c9ce_2a3e_3de7),
            ("layers.0.wv.weight", 0x681d_deee_603b_9472),
            ("layers.0.wo.weight", 0x4ac1_2880_a578_fd4b),
            ("layers.0.w1.weight", 0x25f1_de6b_52bf_4d65),
            ("layers.0.w2.weight", 0xeed7_499a_a27f_226e),
            ("layers.0.w3.weight", 0x8aa8_14d1_3dce_f57f),
        ] {
            assert_eq!(hash(name), expected, "{name}");
        }
    }
}
