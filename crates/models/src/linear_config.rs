//! Layers of linear attention.

use super::Config;
use crate::norm::NormKind;
use candle_quant::{Checkpoint, DeltaNetConfig, Error, Result};
use std::ops::Range;

/// No head in any model's config is larger: a sequence has the product of a head of keys and one of values, which no weight
/// in the file bounds.
const MOST_ELEMENTS: usize = 4096;

/// Rows of a projection of a layer of linear attention, by its name.
pub type SomeRows = (&'static str, Range<usize>);

/// The layers whose tokens are mixed by the gated delta rule ([`ops::gated_delta`](candle_quant::ops::gated_delta)), behind a
/// short causal convolution of queries, keys and values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearAttentionConfig {
    /// For each layer, whether it is one of these; the others attend to keys.
    pub layers: Vec<bool>,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of those of keys.
    pub value_heads: usize,
    /// Elements of a head of queries or keys.
    pub key_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// Tokens that the convolution sees, at least 2.
    pub kernel: usize,
    /// Whether one projection makes queries, keys, values and gates of one key head after another, and a second one the rest;
    /// else there is one of queries, keys and values, and one each of the others.
    pub is_grouped: bool,
    /// Whether the convolution's weight is `[channels, kernel, 1]`, not `[channels, 1, kernel]`.
    pub channels_last: bool,
    /// Whether inputs of the output projection are the first head of values of each head of keys, then the second of each,
    /// and so on, as GGUF files have them; else one head of keys after another.
    pub tiled_output: bool,
}

impl LinearAttentionConfig {
    pub(super) fn validate(&self, layers: usize) -> Result<()> {
        let of_heads = [self.key_dim, self.value_dim];
        if self.key_heads == 0 || self.value_heads == 0 || !self.value_heads.is_multiple_of(self.key_heads) {
            return Err(Error::mismatch(
                "heads of linear attention",
                "some of keys, and of values a multiple of them",
                format!("{} and {}", self.key_heads, self.value_heads),
            ));
        }
        if of_heads.iter().any(|size| !(1..=MOST_ELEMENTS).contains(size)) {
            let expected = format!("1 to {MOST_ELEMENTS} elements");
            return Err(Error::mismatch("heads of linear attention", expected, format!("{of_heads:?}")));
        }
        // Of one token, the two layouts of the weight could not be told apart.
        if !(2..=MOST_ELEMENTS).contains(&self.kernel) {
            let expected = format!("2 to {MOST_ELEMENTS} tokens");
            return Err(Error::mismatch("`linear_conv_kernel_dim`", expected, self.kernel.to_string()));
        }
        if self.layers.len() != layers {
            let expected = format!("one entry for each of {layers} layers");
            return Err(Error::mismatch(
                "layers of linear attention",
                expected,
                self.layers.len().to_string(),
            ));
        }
        Ok(())
    }

    /// Whether layer `index` is one of these.
    pub(crate) fn is_linear(&self, index: usize) -> bool {
        self.layers.get(index).copied().unwrap_or(false)
    }

    /// How many layers are of this kind.
    pub(crate) fn count(&self) -> usize {
        self.layers.iter().filter(|is_linear| **is_linear).count()
    }

    /// Heads of values for each one of keys.
    pub(crate) fn shared(&self) -> usize {
        self.value_heads.checked_div(self.key_heads).unwrap_or(1)
    }

    /// Elements of so many heads of keys, and of the heads of values that go with them.
    pub(crate) fn elements(&self, key_heads: usize) -> (usize, usize) {
        let values = self.shared().saturating_mul(self.value_dim);
        (key_heads.saturating_mul(self.key_dim), key_heads.saturating_mul(values))
    }

    /// The numbers of all heads that the convolution is of: queries, keys and values.
    pub fn channels(&self) -> usize {
        self.of_heads(self.key_heads).channels()
    }

    /// Those of some heads of keys.
    pub(crate) fn channels_of(&self, own: &Range<usize>) -> [Range<usize>; 3] {
        let all = self.elements(self.key_heads).0;
        let ((start, values_start), (end, values_end)) = (self.elements(own.start), self.elements(own.end));
        let values = all.saturating_mul(2);
        [
            start..end,
            all.saturating_add(start)..all.saturating_add(end),
            values.saturating_add(values_start)..values.saturating_add(values_end),
        ]
    }

    /// Rows that the grouped projections have for a head of keys.
    pub(crate) fn rows_of_group(&self) -> [usize; 2] {
        let (keys, values) = self.elements(1);
        [keys.saturating_add(values).saturating_mul(2), self.shared().saturating_mul(2)]
    }

    /// The two grouped projections, and of which rows of single ones each consists, one after another.
    pub fn grouped_rows(&self) -> [(&'static str, Vec<SomeRows>); 2] {
        let keys = self.elements(self.key_heads).0;
        let of_head = |key: usize| {
            let [(start, values), (end, values_end)] = [key, key + 1].map(|key| self.elements(key));
            let after = |all: usize| all.saturating_add(start)..all.saturating_add(end);
            let of_values = keys.saturating_mul(2);
            [
                ("in_proj_qkv", after(0)),
                ("in_proj_qkv", after(keys)),
                ("in_proj_qkv", of_values.saturating_add(values)..of_values.saturating_add(values_end)),
                ("in_proj_z", values..values_end),
            ]
        };
        let others = |key: usize| {
            let heads = key.saturating_mul(self.shared())..(key + 1).saturating_mul(self.shared());
            [("in_proj_b", heads.clone()), ("in_proj_a", heads)]
        };
        [
            ("in_proj_qkvz", (0..self.key_heads).flat_map(of_head).collect()),
            ("in_proj_ba", (0..self.key_heads).flat_map(others).collect()),
        ]
    }

    /// The shape of the convolution's weight.
    pub(crate) fn kernel_dims(&self, channels: usize) -> [usize; 3] {
        match self.channels_last {
            true => [channels, self.kernel, 1],
            false => [channels, 1, self.kernel],
        }
    }

    /// Sizes of a layer with so many of the heads of keys.
    pub(crate) fn of_heads(&self, key_heads: usize) -> DeltaNetConfig {
        let &Self { key_dim, value_dim, kernel, .. } = self;
        let value_heads = key_heads.saturating_mul(self.shared());
        DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, kernel }
    }

    /// Bytes that a layer with so many heads of keys has for a text, of any length.
    pub(crate) fn state_bytes(&self, key_heads: usize) -> u64 {
        self.of_heads(key_heads).size_in_bytes()
    }
}

impl Config {
    /// The same, of weights as this checkpoint has them.
    ///
    /// Hugging Face's files of models with linear attention have norms of which one more than the weight counts. mlx-lm writes
    /// the sums, and nothing in its config says so; but it also turns the weight of the convolution, whose shape tells.
    pub(crate) fn stored_in(&self, checkpoint: &Checkpoint) -> Self {
        let mut config = self.clone();
        let Some(linear) = &mut config.linear else { return config };
        // GGUF files have the parts of the fused projections.
        if checkpoint.tensor_names().any(|name| name.ends_with(".linear_attn.in_proj_qkv.weight")) {
            linear.is_grouped = false;
        }
        let mut names = checkpoint.tensor_names();
        let Some(name) = names.find(|name| name.ends_with(".linear_attn.conv1d.weight")) else {
            return config;
        };
        let dims = checkpoint.dense(name).map(|weight| weight.dims().to_vec()).unwrap_or_default();
        if matches!(*dims, [_, kernel, 1] if kernel == linear.kernel) {
            linear.channels_last = true;
            let sums = |kind: &mut NormKind| {
                if *kind == NormKind::RmsOnePlus {
                    *kind = NormKind::Rms;
                }
            };
            sums(&mut config.norm);
            config.qk_norm.iter_mut().for_each(|norm| sums(&mut norm.kind));
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_out_all_channels() {
        let linear = LinearAttentionConfig {
            layers: vec![true],
            key_heads: 5,
            value_heads: 15,
            key_dim: 2,
            value_dim: 4,
            kernel: 4,
            is_grouped: false,
            channels_last: false,
            tiled_output: false,
        };
        let parts = [0..2, 2..4, 4..5].map(|own| linear.channels_of(&own));
        assert_eq!(parts[1], [4..8, 14..18, 20 + 24..20 + 48]);
        let sections = (0..3).flat_map(|section| parts.iter().map(move |part| part[section].clone()));
        let end = sections.fold(0, |next, run| {
            assert_eq!(run.start, next);
            run.end
        });
        assert_eq!(end, linear.channels());
    }

    /// As `fix_query_key_value_ordering` of transformers (modeling_qwen3_next.py) reads them.
    #[test]
    fn grouped_rows_are_those_of_one_head_of_keys_after_another() {
        let linear = LinearAttentionConfig {
            layers: vec![true],
            key_heads: 2,
            value_heads: 4,
            key_dim: 3,
            value_dim: 5,
            kernel: 4,
            is_grouped: true,
            channels_last: false,
            tiled_output: false,
        };
        let [(_, qkvz), (_, ba)] = linear.grouped_rows();
        let (qkv, z) = ("in_proj_qkv", "in_proj_z");
        let expected = [(qkv, 0..3), (qkv, 6..9), (qkv, 12..22), (z, 0..10)];
        let second = [(qkv, 3..6), (qkv, 9..12), (qkv, 22..32), (z, 10..20)];
        assert_eq!(qkvz, [expected, second].concat());
        let (b, a) = ("in_proj_b", "in_proj_a");
        assert_eq!(ba, [(b, 0..2), (a, 0..2), (b, 2..4), (a, 2..4)]);
        let rows = |parts: &[SomeRows]| parts.iter().map(|(_, rows)| rows.len()).sum::<usize>();
        assert_eq!([rows(&qkvz), rows(&ba)], linear.rows_of_group().map(|rows| rows * 2));
    }
}
