//! What an architecture says about the names, rows and numbers of a file.

use super::architectures::{self, Architecture, LinearOrder};
use super::computed::Computed;
use super::header::TensorEntry;
use super::metadata::Metadata;
use super::names::{self, Name};
use super::{config, GgufTensor, REMEDY};
use crate::checkpoint::family_layouts::is_one_plus_norm;
use crate::checkpoint::file::{DataFile, StoredTensor, TensorInfo, Warnings};
use crate::checkpoint::weight::{halves_of_pairs, BlockType, Kind};
use crate::{Error, Result};
use safetensors::Dtype;
use std::sync::Arc;

/// What output projections of linear attention are called.
const OUTPUT: &str = ".linear_attn.out_proj.weight";

/// How tensors of a file become those of a model.
pub(super) struct Rules {
    pub architecture: Option<&'static Architecture>,
    /// Query and key heads, if the rows of their projections were put in the order of adjacent pairs.
    paired: Option<(usize, usize)>,
    linear: Option<LinearHeads>,
}

/// Heads of linear attention.
struct LinearHeads {
    order: LinearOrder,
    keys: usize,
    /// Heads of values for each one of keys.
    shared: usize,
    key_dim: usize,
    value_dim: usize,
    /// Whether a head is whole blocks of each output projection, so that their columns can be put in the order of the heads.
    moves_columns: bool,
}

impl Rules {
    /// Those of a file, or of a model in parts, with these tensors.
    pub fn of<'a>(
        metadata: &Metadata,
        mut tensors: impl Iterator<Item = &'a TensorEntry>,
        warnings: &Warnings,
    ) -> Result<Self> {
        let architecture = architectures::of(metadata)?;
        let name = config::name_of(metadata);
        let Some(architecture) = architecture else {
            warnings.add(format!(
                "{}: the architecture `{name}` is not known; tensors keep the names that the file gives them",
                metadata.path.display()
            ));
            return Ok(Self { architecture: None, paired: None, linear: None });
        };
        let size =
            |key: &str| -> Result<usize> { Ok(metadata.required_size(&format!("{name}.{key}"))? as usize) };
        let paired = match architecture.is_paired {
            true => {
                let heads = size("attention.head_count")?;
                let kv_heads = metadata.size(&format!("{name}.attention.head_count_kv"))?;
                Some((heads, kv_heads.map_or(heads, |heads| heads as usize)))
            }
            false => None,
        };
        let mut linear = match architecture.linear {
            Some(order) => Some(LinearHeads::new(order, |key| match size(key)? {
                0 => Err(metadata.wrong(&format!("{name}.{key}"), "a whole number above zero")),
                size => Ok(size),
            })?),
            None => None,
        };
        if let Some(heads) = &mut linear {
            heads.moves_columns = tensors.all(|tensor| heads.can_move_columns(tensor, architecture));
        }
        Ok(Self { architecture: Some(architecture), paired, linear })
    }

    /// Whether columns of output projections of linear attention are heads in tiles.
    pub fn has_tiled_outputs(&self) -> bool {
        self.linear.as_ref().is_some_and(|heads| heads.order == LinearOrder::Tiled && !heads.moves_columns)
    }

    /// The tensors of a model that one of the file is: more than one only of a fused projection.
    pub fn entries(&self, entry: TensorEntry, file: &Arc<DataFile>) -> Result<Vec<(Name, GgufTensor)>> {
        let TensorEntry { name: gguf_name, dims, type_id, block, range } = entry;
        let name = match self.architecture {
            Some(architecture) => names::translate(&gguf_name, architecture),
            None => Name::Tensor(gguf_name.clone()),
        };
        let dims = names::dims_of(&name, dims);
        let info = match block.map(|block| block.kind) {
            Some(Kind::Dense(dtype)) => TensorInfo { dtype, dims: dims.as_slice().into(), range },
            _ => TensorInfo { dtype: Dtype::U8, dims: [range.len()].into(), range },
        };
        let stored = StoredTensor::new(file, &gguf_name, info)?;
        let kind = block.map(|block| (block.kind, block.name));
        let part = |name: Name| {
            let computed = self.computed(&name);
            // Of types that are not known, neither are sizes: such rows may be more than there is memory.
            let rows = dims.first().copied().filter(|_| kind.is_some());
            let order = rows.map_or(Ok(None), |rows| self.order(&name, rows)).map_err(|expected| {
                Error::tensor(stored.path(), gguf_name.as_str(), expected, format!("{dims:?}"), REMEDY)
            })?;
            let (dims, stored) = match order {
                None => (dims.clone(), self.with_columns(&name, &dims, block, &stored)?),
                Some(order) => in_order(&dims, &stored, &order)?,
            };
            Ok((name, GgufTensor { type_id, kind, dims, stored, computed }))
        };
        let is_fused = self.linear.as_ref().is_some_and(|linear| linear.order == LinearOrder::ByKeys);
        let names = if is_fused { names::unfused(name) } else { vec![name] };
        names.into_iter().map(part).collect()
    }

    /// A tensor with its columns in the order of the heads, if they are in another one.
    fn with_columns(
        &self,
        name: &Name,
        dims: &[usize],
        block: Option<BlockType>,
        stored: &StoredTensor,
    ) -> Result<StoredTensor> {
        let heads =
            self.linear.as_ref().filter(|heads| heads.order == LinearOrder::Tiled && heads.moves_columns);
        let (Some(heads), Name::Tensor(name), Some(block)) = (heads, name, block) else {
            return Ok(stored.clone());
        };
        if !name.ends_with(OUTPUT) {
            return Ok(stored.clone());
        }
        let &LinearHeads { keys, shared, value_dim, .. } = heads;
        let columns = keys.saturating_mul(shared).saturating_mul(value_dim);
        match dims {
            &[rows, k] if k == columns => {
                let order = (0..keys).flat_map(|key| (0..shared).map(move |value| value * keys + key));
                let row = stored.size_in_bytes().checked_div(rows).unwrap_or(0);
                stored.columns(&[rows, row], &order.collect(), value_dim / block.elements * block.bytes)
            }
            _ => {
                let expected = format!("{columns} columns, as the heads of linear attention have");
                Err(Error::tensor(stored.path(), name.as_str(), expected, format!("{dims:?}"), REMEDY))
            }
        }
    }

    /// What the converter has made of the numbers of a tensor.
    fn computed(&self, name: &Name) -> Option<Computed> {
        let (Name::Tensor(name), Some(architecture)) = (name, self.architecture) else { return None };
        match name.ends_with(".linear_attn.A_log") {
            true => Some(Computed::Rate),
            false => (architecture.norms_are_sums && is_one_plus_norm(name)).then_some(Computed::Sum),
        }
    }

    /// Which of so many rows of the file each row of a tensor is; the error is what was expected.
    fn order(&self, name: &Name, rows: usize) -> std::result::Result<Option<Arc<[usize]>>, String> {
        let Name::Tensor(name) = name else { return Ok(None) };
        if let (Some(linear), Some((_, tensor))) = (&self.linear, name.split_once(".linear_attn.")) {
            return linear.rows(tensor, rows);
        }
        let heads = match (self.paired, name.rsplit_once('.')) {
            (Some((heads, _)), Some((module, _))) if module.ends_with(".self_attn.q_proj") => heads,
            (Some((_, heads)), Some((module, _))) if module.ends_with(".self_attn.k_proj") => heads,
            _ => return Ok(None),
        };
        match rows.checked_div(heads) {
            Some(head_dim) if head_dim % 2 == 0 && head_dim * heads == rows => {
                Ok(Some(halves_of_pairs(heads, head_dim)))
            }
            _ => Err(format!("rows that make {heads} heads of an even number each")),
        }
    }
}

impl LinearHeads {
    fn new(order: LinearOrder, size: impl Fn(&str) -> Result<usize>) -> Result<Self> {
        let (keys, values) = (size("ssm.group_count")?, size("ssm.time_step_rank")?);
        // Numbers that do not fit together are no rows of any tensor.
        Ok(Self {
            order,
            keys,
            shared: values / keys,
            key_dim: size("ssm.state_size")?,
            value_dim: size("ssm.inner_size")? / values,
            moves_columns: false,
        })
    }

    /// Whether a tensor is no output projection, or one of which a head is whole blocks.
    fn can_move_columns(&self, tensor: &TensorEntry, architecture: &Architecture) -> bool {
        let name = names::translate(&tensor.name, architecture);
        let is_output = matches!(name, Name::Tensor(name) if name.ends_with(OUTPUT));
        !is_output || tensor.block.is_some_and(|block| self.value_dim.is_multiple_of(block.elements))
    }

    fn rows(&self, tensor: &str, rows: usize) -> std::result::Result<Option<Arc<[usize]>>, String> {
        let &Self { order, keys, shared, key_dim, value_dim, .. } = self;
        let of_keys = || keys.saturating_mul(key_dim).saturating_mul(2);
        // Rows before those of heads of values, and how many each of these has.
        let (before, size) = match (order, tensor) {
            (LinearOrder::ByKeys, "in_proj_b.weight" | "in_proj_a.weight") => (0, 2),
            (LinearOrder::Tiled, "in_proj_qkv.weight" | "conv1d.weight") => (of_keys(), value_dim),
            (LinearOrder::Tiled, "in_proj_z.weight") => (0, value_dim),
            (LinearOrder::Tiled, "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias") => (0, 1),
            _ => return Ok(None),
        };
        let of_values = keys.saturating_mul(shared).saturating_mul(size);
        if before.saturating_add(of_values) != rows {
            return Err(format!("{before} and {of_values} rows, as the heads of linear attention have"));
        }
        let heads = (0..keys).flat_map(|key| (0..shared).map(move |value| (key, value)));
        Ok(Some(match order {
            LinearOrder::ByKeys => {
                let first = if tensor.starts_with("in_proj_b") { 0 } else { shared };
                heads.map(|(key, value)| 2 * key * shared + first + value).collect()
            }
            LinearOrder::Tiled => {
                let of_head = |(key, value)| {
                    let start = before + (value * keys + key) * size;
                    start..start + size
                };
                (0..before).chain(heads.flat_map(of_head)).collect()
            }
        }))
    }
}

/// The shape and the bytes of some rows.
fn in_order(
    dims: &[usize],
    stored: &StoredTensor,
    order: &Arc<[usize]>,
) -> Result<(Vec<usize>, StoredTensor)> {
    let rows = dims.split_last().filter(|(_, outer)| !outer.is_empty()).map_or(dims, |(_, outer)| outer);
    let row = stored.size_in_bytes().checked_div(rows.iter().product()).unwrap_or(0);
    let picked = stored.rows(&[rows, &[row]].concat(), order)?;
    let dims: Vec<_> = std::iter::once(order.len()).chain(dims.iter().skip(1).copied()).collect();
    // Blocks have no shape.
    let shape = if stored.dtype() == Dtype::U8 { vec![picked.size_in_bytes()] } else { dims.clone() };
    let picked = picked.as_numbers(stored.dtype(), &shape);
    let picked = picked.ok_or_else(|| Error::mismatch("rows", format!("{dims:?}"), "others"))?;
    Ok((dims, picked))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two heads of keys, each with three of values.
    #[test]
    fn heads_of_values_come_back_to_their_keys() {
        let heads =
            |order| LinearHeads { order, keys: 2, shared: 3, key_dim: 1, value_dim: 2, moves_columns: false };
        let tiled = |tensor, rows| heads(LinearOrder::Tiled).rows(tensor, rows).unwrap().unwrap().to_vec();
        for tensor in ["A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"] {
            assert_eq!(tiled(tensor, 6), [0, 2, 4, 1, 3, 5]);
        }
        assert_eq!(tiled("in_proj_z.weight", 12), [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]);
        for tensor in ["in_proj_qkv.weight", "conv1d.weight"] {
            assert_eq!(tiled(tensor, 16), [0, 1, 2, 3, 4, 5, 8, 9, 12, 13, 6, 7, 10, 11, 14, 15]);
        }
        let by_keys =
            |tensor| heads(LinearOrder::ByKeys).rows(tensor, 12).unwrap().map(|order| order.to_vec());
        assert_eq!(by_keys("in_proj_b.weight"), Some(vec![0, 1, 2, 6, 7, 8]));
        assert_eq!(by_keys("in_proj_a.weight"), Some(vec![3, 4, 5, 9, 10, 11]));
        assert_eq!(by_keys("in_proj_z.weight"), None);
        assert!(heads(LinearOrder::Tiled).rows("A_log", 5).is_err());
        let endless = LinearHeads { keys: usize::MAX, ..heads(LinearOrder::Tiled) };
        assert!(endless.rows("conv1d.weight", 16).is_err());
    }
}
