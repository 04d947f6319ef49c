//! The mixed recipes of mlx-lm: more bits for some value and down projections and for the head.

use super::spec::Spec;
use candle_quant::format::Bits;
use candle_quant::QuantFormat;

/// One of mlx-lm's recipes.
#[derive(Clone, Copy, Debug)]
pub(super) struct MlxMixed {
    low: QuantFormat,
    high: QuantFormat,
}

/// Where layer numbers stand in the paths of a model, and how many layers there are.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::convert) struct ModelLayers {
    pub count: usize,
    /// Which segment of a path is the number of the layer.
    pub segment: usize,
}

impl ModelLayers {
    /// `stated` is the number of layers in the config.
    pub(in crate::convert) fn new<'a, I: Iterator<Item = &'a str>>(
        names: impl Fn() -> I,
        stated: Option<usize>,
    ) -> Self {
        // The first number in the path of a down projection.
        let number = |name: &str| name.split('.').position(is_number);
        let segment = names().filter(|name| name.contains("down_proj")).find_map(number).unwrap_or(2);
        let layer = |name: &str| name.split('.').nth(segment)?.parse::<usize>().ok();
        let listed = || names().filter_map(layer).max().map_or(0, |last| last.saturating_add(1));
        Self { count: stated.unwrap_or_else(listed), segment }
    }
}

fn is_number(segment: &str) -> bool {
    !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_digit())
}

impl MlxMixed {
    /// The recipe of this name, with the group size of an affine format.
    pub(super) fn named(name: &str, format: QuantFormat) -> Option<Self> {
        let (low, high) = match name {
            "mixed_2_6" => (Bits::Two, Bits::Six),
            "mixed_3_4" => (Bits::Three, Bits::Four),
            "mixed_3_6" => (Bits::Three, Bits::Six),
            "mixed_4_6" => (Bits::Four, Bits::Six),
            _ => return None,
        };
        Some(Self { low: format.with_bits(low), high: format.with_bits(high) })
    }

    pub(super) fn decide(self, name: &str, layers: &ModelLayers) -> Spec {
        let path = name.strip_suffix(".weight").unwrap_or(name);
        let index = path.split('.').nth(layers.segment).and_then(|segment| segment.parse().ok()).unwrap_or(0);
        let any = |words: &[&str]| words.iter().any(|word| path.contains(word));
        let sensitive = any(&["v_proj", "v_a_proj", "v_b_proj", "down_proj"]);
        Spec::Packed(match (sensitive && more_bits(index, layers.count)) || any(&["lm_head"]) {
            true => self.high,
            false => self.low,
        })
    }
}

/// The first and the last eighth of the layers, and every third one between them.
fn more_bits(index: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    // What is below the first eighth is answered by the first condition.
    index < eighth || index >= layers.saturating_mul(7) / 8 || index.saturating_sub(eighth) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by mlx-lm's `mixed_quant_predicate_builder` for models of so many layers.
    #[test]
    fn layers_are_those_of_mlx_lm() {
        let chosen = |layers| (0..layers).filter(|index| more_bits(*index, layers)).collect::<Vec<_>>();
        assert_eq!(chosen(2), [1]);
        assert_eq!(chosen(16), [0, 1, 4, 7, 10, 13, 14, 15]);
        assert_eq!(chosen(28), [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]);
    }

    #[test]
    fn layers_are_counted_in_names_unless_the_config_states_them() {
        let names = ["a.b.c.7.mlp.down_proj.weight", "a.b.c.9.mlp.up_proj.weight", "lm_head.weight"];
        let layers = ModelLayers::new(|| names.into_iter(), None);
        assert_eq!((layers.count, layers.segment), (10, 3));
        assert_eq!(ModelLayers::new(|| names.into_iter(), Some(12)).count, 12);
    }
}
