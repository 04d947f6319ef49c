//! Which modules are given the same, and what experts are called: statistics are found whatever names a checkpoint has.

/// Projections of one block that are given the same.
const ALIKE: [&[&str]; 5] = [
    &["q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"],
    &["gate_proj", "up_proj", "gate_up_proj", "w1", "w3"],
    &["down_proj", "w2"],
    &["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
];

/// What blocks of experts are called.
const BLOCKS: [&str; 2] = ["experts", "switch_mlp"];

/// Stacks of Granite, and what they are for others.
const GRANITE: [(&str, &str); 2] = [("input_linear", "gate_proj"), ("output_linear", "down_proj")];

/// The name without what larger models have before it: from the layers on, or the last part.
pub(super) fn within_decoder(module: &str) -> &str {
    let layers = match module.starts_with("layers.") {
        true => Some(module),
        false => module.find(".layers.").and_then(|dot| module.get(dot + 1..)),
    };
    layers.unwrap_or_else(|| module.rsplit('.').next().unwrap_or(module))
}

/// The modules that are given what this one is, itself first, and which expert of theirs it is if it is one of a stack.
pub(super) fn given_the_same(module: &str) -> Vec<(String, Option<usize>)> {
    let mut found = vec![(module.to_owned(), None)];
    let Some((parent, name)) = module.rsplit_once('.') else { return found };
    let alike = |name: &str| match ALIKE.iter().find(|names| names.contains(&name)) {
        Some(names) => names.to_vec(),
        None => vec![],
    };
    let stacks = |block: &str, name: &str, expert: Option<usize>| {
        let names = alike(name);
        let of_block = BLOCKS
            .into_iter()
            .flat_map(move |stack| names.clone().into_iter().map(move |name| (stack, name)));
        let named = of_block.map(|(stack, name)| (format!("{block}.{stack}.{name}"), expert));
        named.collect::<Vec<_>>()
    };
    let (block, last) = parent.rsplit_once('.').unwrap_or(("", parent));
    let expert = last.parse::<usize>().ok().zip(block.rsplit_once('.'));
    if let Some((expert, (block, "experts"))) = expert {
        found.extend(stacks(block, name, Some(expert)));
    } else if BLOCKS.contains(&last) {
        found.extend(stacks(block, name, None));
    } else if let Some((_, usual)) = GRANITE.iter().find(|(theirs, _)| *theirs == name) {
        found.extend(stacks(parent, usual, None));
    } else {
        found.extend(alike(name).into_iter().map(|other| (format!("{parent}.{other}"), None)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_found_by_other_names() {
        let has =
            |module: &str, other: &str, expert| given_the_same(module).contains(&(other.to_owned(), expert));
        assert!(has("layers.0.self_attn.qkv_proj", "layers.0.self_attn.q_proj", None));
        assert!(has("layers.0.self_attn.k_proj", "layers.0.self_attn.qkv_proj", None));
        assert!(has("layers.0.mlp.gate_up_proj", "layers.0.mlp.gate_proj", None));
        assert!(has("layers.3.mlp.experts.17.up_proj", "layers.3.mlp.experts.gate_proj", Some(17)));
        assert!(has(
            "layers.3.block_sparse_moe.experts.1.w2",
            "layers.3.block_sparse_moe.experts.w2",
            Some(1)
        ));
        assert!(has("layers.3.mlp.switch_mlp.down_proj", "layers.3.mlp.experts.down_proj", None));
        assert!(has(
            "layers.3.block_sparse_moe.input_linear",
            "layers.3.block_sparse_moe.experts.gate_proj",
            None
        ));
        // Outputs of attention and of gates are others.
        assert!(!has("layers.0.self_attn.o_proj", "layers.0.self_attn.q_proj", None));
        assert!(!has("layers.0.mlp.down_proj", "layers.0.mlp.up_proj", None));
        assert_eq!(given_the_same("lm_head"), [("lm_head".to_owned(), None)]);
        for (name, found) in [
            ("language_model.model.layers.2.mlp.up_proj", "layers.2.mlp.up_proj"),
            ("model.layers.2.mlp.up_proj", "layers.2.mlp.up_proj"),
            ("model.embed_tokens", "embed_tokens"),
            ("lm_head", "lm_head"),
            ("layers.0.x", "layers.0.x"),
            ("players.0.x", "x"),
        ] {
            assert_eq!(within_decoder(name), found, "{name}");
        }
    }
}
