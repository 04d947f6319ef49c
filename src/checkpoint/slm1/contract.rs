//! The tensors that a model of this format has: names, which files hold as hashes only, and shapes.

use super::header::Header;
use std::collections::BTreeMap;

/// A tensor of the model.
pub(super) struct Known {
    /// The name in the format.
    pub name: String,
    /// The name that models ask for.
    pub model_name: String,
    pub dims: Vec<usize>,
    /// Heads whose rows are in the order of adjacent pairs.
    pub heads: Option<usize>,
    pub required: bool,
}

/// FNV-1a, 64 bits.
pub(super) fn hash(name: &str) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    name.bytes().fold(BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

/// All tensors that `header` calls for, by the hashes of their names.
pub(super) fn tensors(header: &Header) -> BTreeMap<u64, Known> {
    let mut known = BTreeMap::new();
    if !header.is_decoder {
        return known;
    }
    let size = |number: u32| number as usize;
    let (hidden, ffn, vocab) = (size(header.hidden_size), size(header.ffn_size), size(header.vocab_size));
    // `head_count` times `head_dim` fits 32 bits.
    let q = size(header.head_count) * size(header.head_dim);
    let kv = size(header.kv_head_count) * size(header.head_dim);
    let mut add = |name: String, model_name: String, dims: &[usize], heads: Option<u32>, required: bool| {
        let heads = heads.map(size);
        known.insert(hash(&name), Known { name, model_name, dims: dims.to_vec(), heads, required });
    };
    let embedding = [vocab, hidden];
    add("tok_embeddings.weight".into(), "model.embed_tokens.weight".into(), &embedding, None, true);
    add("norm.weight".into(), "model.norm.weight".into(), &[hidden], None, true);
    add("output.weight".into(), "lm_head.weight".into(), &embedding, None, !header.tied);
    for layer in 0..header.layer_count {
        for (name, model_name, dims, heads) in [
            ("attn_norm", "input_layernorm", &[hidden][..], None),
            ("ffn_norm", "post_attention_layernorm", &[hidden], None),
            ("wq", "self_attn.q_proj", &[q, hidden], Some(header.head_count)),
            ("wk", "self_attn.k_proj", &[kv, hidden], Some(header.kv_head_count)),
            ("wv", "self_attn.v_proj", &[kv, hidden], None),
            ("wo", "self_attn.o_proj", &[hidden, q], None),
            // Which of w1 and w3 is the gate is not published; it is w1 in all models that use these names.
            ("w1", "mlp.gate_proj", &[ffn, hidden], None),
            ("w3", "mlp.up_proj", &[ffn, hidden], None),
            ("w2", "mlp.down_proj", &[hidden, ffn], None),
        ] {
            let name = format!("layers.{layer}.{name}.weight");
            add(name, format!("model.layers.{layer}.{model_name}.weight"), dims, heads, true);
        }
    }
    known
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
