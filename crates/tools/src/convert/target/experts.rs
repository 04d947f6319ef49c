//! What becomes of experts.

use crate::convert::recipe::ollama_rules;

/// How the experts of a projection lie in an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::convert) enum ExpertLayout {
    /// One stack for each projection, in a module of this name. Gate and up projections are split.
    Stacks(&'static str),
    /// Single ones become stacks under their names, as Ollama has them; stacks stay what they are.
    OfSource,
    /// What they are; stacks are in a module of this name.
    Renamed(&'static str),
}

impl ExpertLayout {
    /// The path of the stack of a projection; `None` if nothing is known of its block.
    pub(in crate::convert) fn stack(self, block: &str, projection: &str) -> Option<String> {
        match self {
            Self::Stacks(module) | Self::Renamed(module) => Some(format!("{block}.{module}.{projection}")),
            Self::OfSource => {
                let known = [".mlp", ".moe", ".mixer"].iter().any(|end| block.ends_with(end));
                known.then(|| format!("{block}.experts.{projection}"))
            }
        }
    }

    /// Whether a weight of this name may be a stack of experts.
    pub(in crate::convert) fn is_stack(self, name: &str) -> bool {
        match self {
            Self::Stacks(module) => name.contains(&format!(".{module}.")),
            Self::OfSource => ollama_rules::is_expert(name),
            Self::Renamed(_) => false,
        }
    }

    /// Whether a parameter of this name is packed as if it were the weight of a module.
    pub(in crate::convert) fn is_module(self, name: &str) -> bool {
        name.ends_with("weight") || self == Self::OfSource && self.is_stack(name)
    }
}
