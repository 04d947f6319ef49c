//! Gate and up projections of all experts in one tensor, which become two stacks.

use super::arranged::Arranged;
use super::experts::TensorGroup;
use crate::convert::output::{SourcePart, SourceTensor, View};
use crate::convert::target::ExpertLayout;
use candle_quant::checkpoint::{FusedExperts, Weight};
use candle_quant::{Error, Result};

/// Why such a tensor is not packed.
const UNCERTAIN: &str = "experts whose rows may be columns, or alternate";

/// Which projections a tensor has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Projections {
    GateUp,
    Down,
}

use Projections::{Down, GateUp};

/// What tensors are called within their block.
const NAMES: [(&str, Projections); 4] = [
    (".experts.gate_up_proj", GateUp),
    (".experts.down_proj", Down),
    // Granite's.
    (".input_linear", GateUp),
    (".output_linear", Down),
];

/// What becomes of a tensor, if it is one of these.
pub(super) fn group(name: &str, weight: &Weight, arranged: &Arranged) -> Result<Option<TensorGroup>> {
    if !matches!(arranged.experts, ExpertLayout::Stacks(_)) || !arranged.takes(weight) {
        return Ok(None);
    }
    let (module, is_bias) = match (name.strip_suffix("_bias"), name.strip_suffix(".bias")) {
        (Some(module), _) | (None, Some(module)) => (module, true),
        (None, None) => (name.strip_suffix(".weight").unwrap_or(name), false),
    };
    let found = NAMES.iter().find_map(|(end, which)| Some((module.strip_suffix(end)?, *which)));
    // As parameters they are columns; as the weights of modules mlx-lm has stored them, in rows.
    let is_parameter = module == name || name.ends_with("_bias");
    let has_columns = arranged.family.fused.is_some_and(FusedExperts::has_columns);
    if has_columns && !is_parameter && found.is_some_and(|(_, which)| which == Down) {
        return Ok(None);
    }
    let plain = || vec![SourceTensor::whole(name.to_owned(), weight.clone())];
    // Modules of stacks are none that mlx-lm stacks while it loads them: they get its names, packed or not.
    let is_stack = !is_parameter && name.contains(".experts.");
    let kept = || if is_stack { arranged.unless_packed(plain()) } else { arranged.plain(plain()) };
    match found {
        Some((block, which)) if !is_bias && weight.dims().len() == 3 => {
            let forms = of_weights(name, weight, block, which, arranged)?;
            Ok(Some(match forms {
                Some(packed) => TensorGroup { packed, plain: kept(), obstacle: None },
                None => TensorGroup { packed: plain(), plain: Vec::new(), obstacle: Some(UNCERTAIN) },
            }))
        }
        // Those of gpt-oss; others have none.
        Some((block, which)) if is_bias && weight.dims().len() == 2 && arranged.always => {
            let packed = of_biases(weight, block, which, arranged);
            Ok(packed.map(|packed| TensorGroup { packed, plain: arranged.plain(plain()), obstacle: None }))
        }
        _ => Ok(None),
    }
}

/// How the matrices lie; `None` if that is not certain.
fn layout(dims: [usize; 3], which: Projections, arranged: &Arranged) -> Option<FusedExperts> {
    let [_, n, k] = dims;
    let hidden = arranged.hidden?;
    let of_rows = match which {
        GateUp => hidden == k && n.is_multiple_of(2),
        Down => hidden == n,
    };
    let of_columns = match which {
        GateUp => hidden == n && k.is_multiple_of(2),
        Down => hidden == k,
    };
    match arranged.family.fused {
        Some(FusedExperts::Rows) => of_rows.then_some(FusedExperts::Rows),
        Some(columns @ (FusedExperts::Columns | FusedExperts::AlternatingColumns)) => {
            of_columns.then_some(columns)
        }
        // Of a family that nothing is known of.
        None => (of_rows && n != k).then_some(FusedExperts::Rows),
    }
}

/// The stacks; `None` if they are not certain.
fn of_weights(
    name: &str,
    weight: &Weight,
    block: &str,
    which: Projections,
    arranged: &Arranged,
) -> Result<Option<Vec<SourceTensor>>> {
    let &[experts, n, k] = weight.dims() else { return Ok(None) };
    let Some(layout) = layout([experts, n, k], which, arranged).filter(|_| ![experts, n, k].contains(&0))
    else {
        return Ok(None);
    };
    let stack = |projection: &str, dims: [usize; 2], part: &dyn Fn(usize) -> Result<SourcePart>| {
        let parts = (0..experts).map(part).collect::<Result<_>>()?;
        let module = arranged.experts.stack(block, projection);
        let name = module.map_or_else(|| name.to_owned(), |module| format!("{module}.weight"));
        Ok::<_, Error>(SourceTensor { name, dims: [&[experts], &dims[..]].concat(), parts })
    };
    let rows = |first: usize, rows: usize| move |expert: usize| rows_of(weight, expert * n + first, rows);
    let seen = |view: View| {
        move |expert: usize| Ok(SourcePart::Viewed(vec![weight.narrow(0, expert..expert + 1)?], view))
    };
    let columns = |first: usize| {
        move |expert: usize| {
            let half = weight.narrow(0, expert..expert + 1)?.narrow(2, first..first + k / 2)?;
            Ok(SourcePart::Viewed(vec![half], View::Transposed))
        }
    };
    Ok(Some(match (layout, which) {
        (FusedExperts::Rows, GateUp) => vec![
            stack("gate_proj", [n / 2, k], &rows(0, n / 2))?,
            stack("up_proj", [n / 2, k], &rows(n / 2, n / 2))?,
        ],
        (FusedExperts::Rows, Down) => vec![stack("down_proj", [n, k], &rows(0, n))?],
        (_, Down) => vec![stack("down_proj", [k, n], &seen(View::Transposed))?],
        (FusedExperts::Columns, GateUp) => {
            vec![stack("gate_proj", [k / 2, n], &columns(0))?, stack("up_proj", [k / 2, n], &columns(k / 2))?]
        }
        (FusedExperts::AlternatingColumns, GateUp) => vec![
            stack("gate_proj", [k / 2, n], &seen(View::EverySecondTransposed(0)))?,
            stack("up_proj", [k / 2, n], &seen(View::EverySecondTransposed(1)))?,
        ],
    }))
}

/// The biases of the stacks.
fn of_biases(
    weight: &Weight,
    block: &str,
    which: Projections,
    arranged: &Arranged,
) -> Option<Vec<SourceTensor>> {
    let &[experts, n] = weight.dims() else { return None };
    let bias = |projection: &str, n: usize, part: SourcePart| {
        let module = arranged.experts.stack(block, projection)?;
        Some(SourceTensor { name: format!("{module}.bias"), dims: vec![experts, n], parts: vec![part] })
    };
    let seen = |first: usize| SourcePart::Viewed(vec![weight.clone()], View::EverySecond(first));
    match (arranged.family.fused?, which) {
        (_, Down) => Some(vec![bias("down_proj", n, SourcePart::of(weight.clone()))?]),
        (FusedExperts::AlternatingColumns, GateUp) if n.is_multiple_of(2) && n > 0 && experts > 0 => {
            Some(vec![bias("gate_proj", n / 2, seen(0))?, bias("up_proj", n / 2, seen(1))?])
        }
        _ => None,
    }
}

/// Rows of a matrix `[.., K]` of a stack, which begin at this one of all.
pub(super) fn rows_of(weight: &Weight, first: usize, rows: usize) -> Result<SourcePart> {
    match weight {
        Weight::Dense(dense) if dense.is_stored() => {
            let k = weight.dims().last().copied().unwrap_or(0);
            let start = first.saturating_mul(k);
            Ok(SourcePart::Stored(dense.elements(start..start.saturating_add(rows.saturating_mul(k)))?))
        }
        Weight::Packed(_) | Weight::Ggml(_) | Weight::Dense(_) | _ => {
            let [stack @ .., n, _] = weight.dims() else { return Ok(SourcePart::of(weight.clone())) };
            let n = (*n).max(1);
            let matrix = match stack.is_empty() {
                true => weight.clone(),
                false => weight.narrow(0, first / n..first / n + 1)?,
            };
            let dim = stack.len();
            Ok(SourcePart::of(matrix.narrow(dim, first % n..first % n + rows)?))
        }
    }
}
