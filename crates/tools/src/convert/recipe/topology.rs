//! Topology files of mistral.rs, read as recipes.

use super::role::Role;
use super::rules::{keep_role, Condition, Decision, Fallback, Recipe, Rule};
use super::spec::Spec;
use candle_quant::{Error, QuantFormat, Result};
use indexmap::IndexMap;
use regex::Regex;
use serde::Deserialize;
use std::cmp::Reverse;
use std::ops::Range;

/// Types that mistral.rs has and nothing here writes: on a CPU it reads none of its own files of them.
const OTHERS: [&str; 2] = ["q8_1", "q8k"];

/// Types that are called as here.
const SAME: [&str; 14] = [
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "hqq4", "hqq8", "fp8", "f8q8",
];

/// What may stand in `isq`.
const TYPES: &str = "afq2, afq3, afq4, afq6, afq8, mxfp4, q4_0, q4_1, q5_0, q5_1, q8_0, q2k to q6k, hqq4, hqq8, fp8, f8q8, or a number of bits: 2, 3, 4, 5, 6 or 8";

/// What a file has to be.
const EXPECTED: &str = "a topology of mistral.rs in YAML";

/// What a key says of the weights that it selects.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    isq: Option<String>,
    device: Option<String>,
}

/// Which weights a key selects.
#[derive(Clone, Debug)]
pub(super) enum Selector {
    /// Those in these layers of a decoder.
    Layers(Range<usize>),
    /// Those whose names match.
    Names(Regex),
}

impl Recipe {
    /// A recipe from the text of a topology file of mistral.rs; `file` is its name, for the plan.
    ///
    /// As mistral.rs (0.9.5) reads it without `--isq`: keys are layers (`12`), ranges of layers whose end is excluded
    /// (`0-8`), and regular expressions on names of weights (`/lm_head\..*/`). An expression is stronger than any range, and
    /// the later one of two; of ranges the one that ends last, and of those that end together the later one. What no key
    /// selects stays as it is, and so do routers and norms.
    ///
    /// `afqN` becomes affine with N bits in groups of 64, and so does N alone, for which mistral.rs takes what suits the
    /// device; `mxfp4` is what it is. Expressions see the names of experts in a stack as those of the first of them, as they are
    /// in a checkpoint that has them one by one, and without a number.
    ///
    /// # Errors
    /// If it is malformed, has a type that is not written here, or says on which device layers are: of that a recipe
    /// decides nothing.
    pub fn from_topology(file: &str, text: &str) -> Result<Self> {
        let wrong = |error: serde_saphyr::Error| {
            // Behind the first line it shows the text.
            let text = error.to_string();
            let problem = text.lines().next().unwrap_or_default();
            Error::mismatch(format!("topology {file}"), EXPECTED, problem.trim_start_matches("error: "))
        };
        let keys: IndexMap<String, Entry> = serde_saphyr::from_str(text).map_err(wrong)?;
        if keys.is_empty() {
            return Err(Error::mismatch(format!("topology {file}"), EXPECTED, "no keys"));
        }
        let (mut names, mut layers) = (Vec::new(), Vec::new());
        for (key, entry) in keys {
            let spec = entry.spec(file, &key)?;
            let label = format!("`{key}` of {file}");
            match (selector(file, &key)?, spec) {
                // It says nothing.
                (Selector::Names(_), None) => {}
                (selector @ Selector::Names(_), Some(spec)) => names.push(rule(label, selector, spec)),
                // What no type is said of is not what a weaker range says.
                (Selector::Layers(range), spec) => layers.push((range, label, spec.unwrap_or(Spec::Keep))),
            }
        }
        // Rules are tried in order.
        names.reverse();
        layers.reverse();
        layers.sort_by_key(|(range, ..)| Reverse(range.end));
        let layers =
            layers.into_iter().map(|(range, label, spec)| rule(label, Selector::Layers(range), spec));
        let never = [Role::Router, Role::Norm, Role::Conv].map(keep_role).into_iter();
        let encoders = [Role::Vision, Role::Audio].map(keep_role);
        let rules = never.chain(names).chain(encoders).chain(layers).collect();
        Ok(Self { format: Spec::Keep, fallback: Fallback::Keep, rules, choice: None })
    }
}

fn rule(label: String, selector: Selector, spec: Spec) -> Rule {
    Rule::new(label, vec![Condition::Topology(selector)], Decision::To(spec))
}

fn place(file: &str, key: &str) -> String {
    format!("topology {file}, key `{key}`")
}

fn selector(file: &str, key: &str) -> Result<Selector> {
    if let Some(pattern) = key.strip_prefix('/').and_then(|rest| rest.strip_suffix('/')) {
        let regex = Regex::new(pattern);
        return regex.map(Selector::Names).map_err(|error| {
            Error::mismatch(place(file, key), "a regular expression between slashes", error.to_string())
        });
    }
    let range = match key.split_once('-') {
        Some((start, end)) => start.parse().ok().zip(end.parse().ok()).map(|(start, end)| start..end),
        None => key.parse::<usize>().ok().and_then(|layer| Some(layer..layer.checked_add(1)?)),
    };
    range.filter(|range| !range.is_empty()).map(Selector::Layers).ok_or_else(|| {
        let expected = "a layer (12), a range whose end is excluded (0-8), or /a regular expression/";
        Error::mismatch(place(file, key), expected, format!("`{key}`"))
    })
}

impl Entry {
    /// What the weights become; `None` if that is not said.
    fn spec(&self, file: &str, key: &str) -> Result<Option<Spec>> {
        if let Some(device) = &self.device {
            let expected =
                "no device, for a recipe decides about formats and not where layers run (remove the line)";
            return Err(Error::mismatch(place(file, key), expected, format!("`device: {device}`")));
        }
        let Some(isq) = &self.isq else { return Ok(None) };
        let lower = isq.to_ascii_lowercase();
        if SAME.contains(&lower.as_str()) {
            return lower.parse().map(Some);
        }
        let bits = lower.strip_prefix("afq").unwrap_or(&lower);
        let format = match (lower.as_str(), bits) {
            ("mxfp4", _) => Some(QuantFormat::MXFP4),
            ("afq5", _) => None,
            (_, "2" | "3" | "4" | "5" | "6" | "8") => {
                bits.parse().ok().and_then(|bits| QuantFormat::affine(bits, 64).ok())
            }
            _ => None,
        };
        format.map(Spec::Packed).map(Some).ok_or_else(|| {
            let is_known = OTHERS.contains(&lower.as_str());
            let found = if is_known { ", which mistral.rs makes and candle-quant does not" } else { "" };
            Error::mismatch(format!("isq of {}", place(file, key)), TYPES, format!("`{isq}`{found}"))
        })
    }
}

impl Selector {
    /// Whether it selects the weight of this name.
    pub(super) fn selects(&self, name: &str) -> bool {
        match self {
            Self::Layers(range) => decoder_layer(name).is_some_and(|layer| range.contains(&layer)),
            Self::Names(regex) => {
                let experts = |inner: &str| {
                    let stacks = [".switch_mlp.", ".experts."];
                    stacks
                        .iter()
                        .any(|stack| name.contains(stack) && regex.is_match(&name.replacen(stack, inner, 1)))
                };
                regex.is_match(name) || experts(".experts.0.") || experts(".experts.")
            }
        }
    }
}

/// The number behind `layers` or `h` in a name.
fn decoder_layer(name: &str) -> Option<usize> {
    let mut segments = name.split('.').peekable();
    while let Some(segment) = segments.next() {
        let number = segments.peek().and_then(|next| next.parse().ok());
        if let ("layers" | "h", Some(number)) = (segment, number) {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::{roles, ModelLayers, TensorInfo};
    use super::*;

    /// What a matrix of this name becomes.
    fn becomes(topology: &str, name: &str) -> String {
        let recipe = Recipe::from_topology("t.yml", topology).unwrap();
        let dims = [64, 64];
        let info = TensorInfo {
            name,
            dims: &dims,
            roles: &roles(name, &dims, false),
            mlx_lm: candle_quant_models::MlxWeight::AsAsked,
            layers: &ModelLayers::default(),
            has_format: &|_| true,
        };
        recipe.decide(&info).0.to_string()
    }

    fn layer(topology: &str, layer: usize) -> String {
        becomes(topology, &format!("model.layers.{layer}.mlp.up_proj.weight"))
    }

    fn error(topology: &str) -> String {
        Recipe::from_topology("t.yml", topology).unwrap_err().to_string()
    }

    /// The rules that mistral.rs tests of its own reader: `highest_end_range_overrides_lower_end`,
    /// `later_range_with_same_end_wins`, `regex_overrides_respect_declaration_order`,
    /// `match_for_name_returns_none_when_unmatched`.
    #[test]
    fn stronger_keys_are_those_of_mistral_rs() {
        let ends_last = "0-4:\n  isq: AFQ4\n2-6:\n  isq: AFQ6\n";
        let found = [0, 1, 2, 5, 6].map(|at| layer(ends_last, at));
        assert_eq!(found, ["affine:4:g64", "affine:4:g64", "affine:6:g64", "affine:6:g64", "keep"]);
        let declared_first = "2-6:\n  isq: AFQ6\n0-4:\n  isq: AFQ4\n";
        assert_eq!(
            [0, 2, 5, 6].map(|at| layer(declared_first, at)),
            [0, 2, 5, 6].map(|at| layer(ends_last, at))
        );

        let same_end = "0-4:\n  isq: AFQ4\n2-4:\n  isq: AFQ3\n";
        assert_eq!([1, 2, 3].map(|at| layer(same_end, at)), ["affine:4:g64", "affine:3:g64", "affine:3:g64"]);

        let names = "'/ffn\\./':\n  isq: AFQ4\n'/ffn\\.weight$/':\n  isq: AFQ6\n";
        assert_eq!(becomes(names, "model.layers.2.ffn.weight"), "affine:6:g64");
        assert_eq!(becomes(names, "model.layers.2.ffn.up.weight"), "affine:4:g64");

        assert_eq!(becomes("0-2:\n  isq: AFQ4\n", "transformer.wte.weight"), "keep");
    }

    #[test]
    fn names_are_stronger_than_ranges_and_a_single_number_is_a_layer() {
        let topology = "/up_proj/: {isq: afq8}\n0-4: {isq: afq2}\n12: {isq: mxfp4}\n";
        assert_eq!(layer(topology, 1), "affine:8:g64");
        let down = |at| becomes(topology, &format!("model.layers.{at}.mlp.down_proj.weight"));
        assert_eq!([3, 4, 11, 12, 13].map(down), ["affine:2:g64", "keep", "keep", "mxfp4", "keep"]);
        // A range that ends later and says nothing hides another one; a name that says nothing hides none.
        let nothing = "0-4: {isq: afq4}\n3-5: {}\n/up_proj/: {}\n";
        let found = [2, 3].map(|at| layer(nothing, at));
        assert_eq!(found, ["affine:4:g64", "keep"]);
    }

    #[test]
    fn layers_are_those_of_decoders() {
        let topology = "0-9: {isq: afq4}\n/visual/: {isq: afq8}\n";
        for (name, expected) in [
            ("model.language_model.layers.3.mlp.up_proj.weight", "affine:4:g64"),
            ("transformer.h.3.attn.c_attn.weight", "affine:4:g64"),
            ("model.layers.3.mlp.switch_mlp.up_proj.weight", "affine:4:g64"),
            ("model.layers.9.mlp.up_proj.weight", "keep"),
            ("model.blocks.3.mlp.up_proj.weight", "keep"),
            ("lm_head.weight", "keep"),
            ("model.embed_tokens.weight", "keep"),
            // Neither a range nor an expression makes mistral.rs quantize these.
            ("model.layers.3.mlp.gate.weight", "keep"),
            ("vision_tower.encoder.layers.3.mlp.up_proj.weight", "keep"),
            ("model.visual.layers.3.mlp.up_proj.weight", "affine:8:g64"),
        ] {
            assert_eq!(becomes(topology, name), expected, "{name}");
        }
        assert_eq!(becomes("/.*/: {isq: afq4}", "model.layers.3.mlp.gate.weight"), "keep");
    }

    /// A checkpoint has experts one by one or in a stack, and the output has stacks.
    #[test]
    fn experts_in_a_stack_have_the_names_of_the_checkpoint() {
        for pattern in [r"\.experts\.\d+\.up_proj", r"\.experts\.up_proj\.weight$", r"layers\.3\.mlp\..*$"] {
            for stack in ["switch_mlp", "experts"] {
                let name = format!("model.layers.3.mlp.{stack}.up_proj.weight");
                assert_eq!(
                    becomes(&format!("'/{pattern}/': {{isq: afq4}}"), &name),
                    "affine:4:g64",
                    "{name}"
                );
            }
        }
        let shared = "model.layers.3.mlp.shared_expert.up_proj.weight";
        assert_eq!(becomes(r"'/\.experts\./': {isq: afq4}", shared), "keep");
    }

    #[test]
    fn types_are_those_that_are_written_here() {
        let of = |isq: &str| layer(&format!("0-9:\n  isq: {isq}\n"), 0);
        for bits in [2, 3, 4, 6, 8] {
            let expected = format!("affine:{bits}:g64");
            assert_eq!(
                [format!("afq{bits}"), format!("AFQ{bits}"), bits.to_string()].map(|isq| of(&isq)),
                [(); 3].map(|()| expected.clone())
            );
        }
        assert_eq!([of("5"), of("MXFP4")], ["affine:5:g64", "mxfp4"]);
        assert_eq!([of("Q4K"), of("F8Q8"), of("HQQ4")], ["q4_k", "f8q8", "hqq4"]);
        for isq in OTHERS {
            let error = error(&format!("0-8:\n  isq: {isq}\n"));
            assert!(error.contains("t.yml, key `0-8`") && error.contains(TYPES), "{error}");
            assert!(error.contains(&format!("`{isq}`, which mistral.rs makes")), "{error}");
        }
        for isq in ["afq5", "afq1", "7", "hqq3", "int4", "affine:4", "''"] {
            let error = error(&format!("0-8: {{isq: {isq}}}"));
            assert!(error.contains(TYPES) && !error.contains("mistral.rs makes"), "{error}");
        }
    }

    #[test]
    fn what_is_no_topology_is_refused() {
        for key in ["0-8-9", "8-8", "9-3", "-3", "a-b", "layers", "''", "/", "18446744073709551615", "0x3-9"]
        {
            let error = error(&format!("{key}: {{isq: afq4}}"));
            assert!(error.contains("t.yml, key `") && error.contains("whose end is excluded"), "{error}");
        }
        let regex = error("'/a(/': {isq: afq4}");
        assert!(regex.contains("key `/a(/`: expected a regular expression"), "{regex}");
        let device = error("0-8:\n  device: cuda[0]\n  isq: afq4\n");
        assert!(
            device.contains("key `0-8`: expected no device") && device.contains("device: cuda[0]"),
            "{device}"
        );
        for text in [
            "",
            "- a",
            "text",
            "0-8: afq4",
            "0-8:",
            "0-8: {isqq: afq4}",
            "0-8: {isq: [a]}",
            "{",
            "0-8: {isq: afq4}\n0-8: {isq: afq2}",
        ] {
            let error = error(text);
            assert!(error.contains("topology t.yml: expected a topology"), "{error}");
        }
    }
}
