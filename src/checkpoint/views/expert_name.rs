//! What tensors of experts are called.

/// A projection of one expert, or of all experts of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ExpertName<'a> {
    /// The path of the block; empty at the root.
    pub block: &'a str,
    /// `gate_proj`, `up_proj`, `down_proj` or `gate_up_proj`.
    pub projection: &'static str,
    /// Which expert; `None` of a stack.
    pub expert: Option<usize>,
}

impl<'a> ExpertName<'a> {
    /// `B.experts.3.gate_proj`, `B.experts.3.w1`, `B.experts.gate_proj` or `B.switch_mlp.gate_proj`.
    pub fn parse(module: &'a str) -> Option<Self> {
        let (path, name) = module.rsplit_once('.')?;
        let (parent, group) = split_last(path);
        if let "experts" | "switch_mlp" = group {
            return Some(Self { block: parent, projection: projection(name)?, expert: None });
        }
        let expert = group.parse().ok().filter(|expert: &usize| expert.to_string() == group)?;
        let (block, "experts") = split_last(parent) else { return None };
        let projection = projection(name).or_else(|| {
            let of_mixtral = |(ours, theirs): (&'static str, &str)| (theirs == name).then_some(ours);
            MIXTRAL.into_iter().find_map(of_mixtral)
        })?;
        Some(Self { block, projection, expert: Some(expert) })
    }

    /// What the module may be called, if it is that of one expert.
    pub fn of_expert(self, expert: usize) -> impl Iterator<Item = String> + 'a {
        let theirs = MIXTRAL.into_iter().find(|(ours, _)| *ours == self.projection);
        let names = std::iter::once(self.projection).chain(theirs.map(|(_, theirs)| theirs));
        names.map(move |name| join(self.block, &format!("experts.{expert}.{name}")))
    }

    /// What the module may be called, if it is a stack.
    pub fn of_stack(self) -> impl Iterator<Item = String> + 'a {
        let groups = ["switch_mlp", "experts"].into_iter();
        let usual = groups.map(move |group| join(self.block, &format!("{group}.{}", self.projection)));
        let of_granite = GRANITE.into_iter().find(|(ours, _)| *ours == self.projection);
        usual.chain(of_granite.map(|(_, theirs)| join(self.block, theirs)))
    }
}

/// Our names of stacks and those of Granite, which has them in the block itself.
const GRANITE: [(&str, &str); 2] = [("gate_up_proj", "input_linear"), ("down_proj", "output_linear")];

/// Our names and those of Mixtral.
const MIXTRAL: [(&str, &str); 3] = [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")];

fn projection(name: &str) -> Option<&'static str> {
    ["gate_proj", "up_proj", "down_proj", "gate_up_proj"].into_iter().find(|known| *known == name)
}

/// A path without its last segment, and that segment.
pub(super) fn split_last(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

/// A path below another one, which may be the root.
pub(super) fn join(parent: &str, name: &str) -> String {
    crate::checkpoint::weight::tensor_of(parent, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_experts() {
        let name = |block, projection, expert| Some(ExpertName { block, projection, expert });
        for (module, expected) in [
            ("m.0.mlp.experts.12.gate_proj", name("m.0.mlp", "gate_proj", Some(12))),
            ("m.moe.experts.0.w2", name("m.moe", "down_proj", Some(0))),
            ("experts.1.w3", name("", "up_proj", Some(1))),
            ("m.switch_mlp.up_proj", name("m", "up_proj", None)),
            ("switch_mlp.down_proj", name("", "down_proj", None)),
            ("m.experts.gate_up_proj", name("m", "gate_up_proj", None)),
            ("m.experts.3.gate_up_proj", name("m", "gate_up_proj", Some(3))),
            ("m.experts.w1", None),
            ("m.experts.03.w1", None),
            ("m.experts.+3.w1", None),
            ("m.experts.3.w4", None),
            ("m.switch_mlp.3.gate_proj", None),
            ("m.layers.3.gate_proj", None),
            ("m.mlp.gate_proj", None),
            ("gate_proj", None),
            ("", None),
        ] {
            assert_eq!(ExpertName::parse(module), expected, "{module}");
        }
    }
}
