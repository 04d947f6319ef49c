//! What each tensor of a published model is made of.

use super::{Arrangement, Entries, Piece, PublishedTensor, EXPERT_BLOCKS};
use crate::architecture::layout::{PublishedExperts, PublishedLayout};
use crate::{Config, LinearAttentionConfig, MoeConfig};
use candle_quant::checkpoint::{is_one_plus_norm, FusedExperts};
use std::collections::BTreeMap;

impl Piece {
    fn whole(name: impl Into<String>) -> Self {
        Self { tensors: vec![(name.into(), Entries::All)], how: Arrangement::AsIs }
    }

    fn matrix(name: &str, index: usize, how: Arrangement) -> Self {
        Self { tensors: vec![(name.to_owned(), Entries::One(index))], how }
    }
}

/// What the tensors of a model depend on.
pub(super) struct Builder<'a> {
    /// Whether a tensor of this name is stored.
    pub has: &'a dyn Fn(&str) -> bool,
    pub layout: PublishedLayout,
    pub experts: PublishedExperts,
    pub has_blocks: bool,
    pub fused: FusedExperts,
    /// Whether norms are stored as sums.
    pub less_one: bool,
    pub config: &'a Config,
}

impl Builder<'_> {
    /// The tensors that are those of an inventory.
    pub fn tensors(&self, inventory: &BTreeMap<String, Vec<usize>>) -> Vec<PublishedTensor> {
        inventory.iter().flat_map(|(name, dims)| self.of(name, dims, inventory)).collect()
    }

    /// What one of them becomes; that which is fused with others goes with the first of these.
    fn of(
        &self,
        name: &str,
        dims: &[usize],
        inventory: &BTreeMap<String, Vec<usize>>,
    ) -> Vec<PublishedTensor> {
        let split = name.rsplit_once('.').and_then(|(path, part)| Some((path.rsplit_once('.')?, part)));
        let Some(((parent, module), part)) = split else { return vec![self.one(name, dims)] };
        let fused = |fused: &str, others: &[&str]| {
            let sibling = |other: &str| format!("{parent}.{other}.{part}");
            let (own, parts) = (sibling(fused), others.iter().map(|other| sibling(other)));
            let rows = parts.clone().filter_map(|name| inventory.get(&name)?.first().copied());
            let rows = rows.fold(0usize, usize::saturating_add);
            let pieces = match (self.has)(&own) {
                true => vec![Piece::whole(&own)],
                false => parts.map(Piece::whole).collect(),
            };
            let dims = [&[rows], dims.get(1..).unwrap_or_default()].concat();
            vec![PublishedTensor { name: own, dims, pieces }]
        };
        let (names, layout) = (&self.config.names, self.layout);
        let is_expert = parent.ends_with(".experts");
        let in_mlp = parent.ends_with(&format!(".{}", names.mlp));
        match (module, &self.config.moe) {
            ("q_proj", _) if layout.qkv => fused("qkv_proj", &["q_proj", "k_proj", "v_proj"]),
            ("k_proj" | "v_proj", _) if layout.qkv => Vec::new(),
            ("gate_proj", _) if layout.gate_up && in_mlp => fused("gate_up_proj", &["gate_proj", "up_proj"]),
            ("up_proj", _) if layout.gate_up && in_mlp => Vec::new(),
            ("in_proj_qkvz" | "in_proj_ba", _) if !(self.has)(name) => {
                vec![self.of_single_projections(name, parent, module, dims)]
            }
            ("kv_b_proj", _) if !(self.has)(name) => vec![self.of_latents(name, parent, dims)],
            ("gate_proj" | "up_proj" | "down_proj", Some(moe)) if is_expert => {
                let block = parent.strip_suffix(".experts").unwrap_or(parent);
                self.experts(moe, block, module, part, dims)
            }
            _ if [names.q_norm, names.k_norm].contains(&module) && dims.len() == 2 => {
                self.norms_of_heads(name, &format!("{parent}.{module}"), dims)
            }
            _ => vec![self.one(name, dims)],
        }
    }

    /// A tensor that is stored under its own name.
    fn one(&self, name: &str, dims: &[usize]) -> PublishedTensor {
        let mut piece = Piece::whole(name);
        if self.less_one && is_one_plus_norm(name) {
            piece.how = Arrangement::LessOne;
        }
        if let (Some(linear), true) = (&self.config.linear, name.ends_with(".linear_attn.out_proj.weight")) {
            if linear.tiled_output {
                piece.how = Arrangement::OfTiles { keys: linear.key_heads, size: linear.value_dim };
            }
        }
        PublishedTensor { name: name.to_owned(), dims: dims.to_vec(), pieces: vec![piece] }
    }

    /// A grouped projection of linear attention, of which other layouts have the parts.
    fn of_single_projections(
        &self,
        name: &str,
        parent: &str,
        module: &str,
        dims: &[usize],
    ) -> PublishedTensor {
        let grouped = self.config.linear.iter().flat_map(LinearAttentionConfig::grouped_rows);
        let parts = grouped.filter(|(grouped, _)| *grouped == module).flat_map(|(_, parts)| parts);
        let piece = |(part, rows)| Piece {
            tensors: vec![(format!("{parent}.{part}.weight"), Entries::Rows(rows))],
            how: Arrangement::AsIs,
        };
        PublishedTensor { name: name.to_owned(), dims: dims.to_vec(), pieces: parts.map(piece).collect() }
    }

    /// Keys and values of heads, of which other layouts have two stacks, that of keys turned.
    fn of_latents(&self, name: &str, parent: &str, dims: &[usize]) -> PublishedTensor {
        let (keys, values) = (format!("{parent}.embed_q.weight"), format!("{parent}.unembed_out.weight"));
        let of_head = |head| {
            [
                Piece::matrix(&keys, head, Arrangement::Transposed),
                Piece::matrix(&values, head, Arrangement::AsIs),
            ]
        };
        let pieces = (0..self.config.num_attention_heads).flat_map(of_head).collect();
        PublishedTensor { name: name.to_owned(), dims: dims.to_vec(), pieces }
    }

    /// Norms with a weight for each head, as one matrix or a module each.
    fn norms_of_heads(&self, name: &str, module: &str, dims: &[usize]) -> Vec<PublishedTensor> {
        let &[heads, head_dim] = dims else { return Vec::new() };
        let of_head = |head: usize| format!("{module}.norms.{head}.weight");
        let are_apart = !(self.has)(name);
        let piece = |head: usize| match are_apart {
            true => Piece::whole(of_head(head)),
            false => Piece::matrix(name, head, Arrangement::AsIs),
        };
        match (self.layout.norms_of_heads, are_apart) {
            (true, _) => {
                let of = |head| PublishedTensor {
                    name: of_head(head),
                    dims: vec![head_dim],
                    pieces: vec![piece(head)],
                };
                (0..heads).map(of).collect()
            }
            (false, true) => {
                let pieces = (0..heads).map(piece).collect();
                vec![PublishedTensor { name: name.to_owned(), dims: dims.to_vec(), pieces }]
            }
            (false, false) => vec![self.one(name, dims)],
        }
    }

    /// The parameter in MXFP4 of the experts' down projections, or of their gate and up projections.
    fn blocks(&self, block: &str, is_down: bool, experts: usize, dims: &[usize]) -> PublishedTensor {
        let module = if is_down { "down_proj" } else { "gate_up_proj" };
        let stored = |name: &str| (format!("{block}.experts.{name}.weight"), Entries::All);
        let piece = match is_down {
            true => Piece { tensors: vec![stored("down_proj")], how: Arrangement::AsIs },
            false => Piece {
                tensors: vec![stored("gate_proj"), stored("up_proj")],
                how: Arrangement::AlternatingRows,
            },
        };
        let mut dims = [&[experts], dims].concat();
        if let (Some(rows), false) = (dims.get_mut(1), is_down) {
            *rows = rows.saturating_mul(2);
        }
        PublishedTensor {
            name: format!("{block}.experts.{module}{EXPERT_BLOCKS}"),
            dims,
            pieces: vec![piece],
        }
    }

    /// What a projection of all experts becomes, of which `dims` are those of a stack. What is fused goes with the gates.
    fn experts(
        &self,
        moe: &MoeConfig,
        block: &str,
        projection: &str,
        part: &str,
        dims: &[usize],
    ) -> Vec<PublishedTensor> {
        let Some((&experts, dims)) = dims.split_first() else { return Vec::new() };
        let of_expert = |expert: usize, name: &str| format!("{block}.experts.{expert}.{name}.{part}");
        // One of a stack that is stored, or what else answers for the expert.
        let asked = |expert: usize, ours: &str, name: String| {
            let stacks = ["switch_mlp", "experts"].map(|stack| format!("{block}.{stack}.{ours}.{part}"));
            match stacks.into_iter().find(|stack| (self.has)(stack)) {
                Some(stack) if !(self.has)(&name) => (stack, Entries::One(expert)),
                _ => (name, Entries::All),
            }
        };
        let is_down = projection == "down_proj";
        if self.has_blocks && part == "weight" {
            return match projection {
                "up_proj" => Vec::new(),
                _ => vec![self.blocks(block, is_down, experts, dims)],
            };
        }
        let name = match (self.experts, moe.stack_names) {
            (PublishedExperts::Each([gate, up, down]), None) => {
                let name = match projection {
                    "gate_proj" => gate,
                    "up_proj" => up,
                    _ => down,
                };
                let of = |expert: usize| {
                    let name = of_expert(expert, name);
                    let tensors = vec![asked(expert, projection, name.clone())];
                    let pieces = vec![Piece { tensors, how: Arrangement::AsIs }];
                    PublishedTensor { name, dims: dims.to_vec(), pieces }
                };
                return (0..experts).map(of).collect();
            }
            _ if projection == "up_proj" => return Vec::new(),
            (_, Some([gate_up, down])) => format!("{block}.{}.{part}", if is_down { down } else { gate_up }),
            (PublishedExperts::Parameters, None) => {
                let module = if is_down { "down_proj" } else { "gate_up_proj" };
                let suffix = if part == "weight" { String::new() } else { format!("_{part}") };
                format!("{block}.experts.{module}{suffix}")
            }
        };
        // Of biases it is their numbers that alternate.
        let is_bias = part != "weight";
        let how = match (self.fused, is_down, is_bias) {
            (FusedExperts::Rows, ..) | (_, true, true) | (FusedExperts::Columns, _, true) => {
                Arrangement::AsIs
            }
            (FusedExperts::Columns, ..) | (_, true, false) => Arrangement::Transposed,
            (FusedExperts::AlternatingColumns, false, true) => Arrangement::OneRow,
            (FusedExperts::AlternatingColumns, false, false) => Arrangement::AlternatingColumns,
        };
        let mut matrix = dims.to_vec();
        if let (Some(rows), false) = (matrix.first_mut(), is_down) {
            *rows = rows.saturating_mul(2);
        }
        if self.fused != FusedExperts::Rows {
            matrix.reverse();
        }
        let names = if is_down { &["down_proj"][..] } else { &["gate_proj", "up_proj"] };
        let piece = |expert: usize| {
            let tensors = names.iter().map(|name| asked(expert, name, of_expert(expert, name))).collect();
            Piece { tensors, how }
        };
        let pieces = match (self.has)(&name) {
            true => vec![Piece::whole(&name)],
            false => (0..experts).map(piece).collect(),
        };
        vec![PublishedTensor { name, dims: [&[experts], matrix.as_slice()].concat(), pieces }]
    }
}
