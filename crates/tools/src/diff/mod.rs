//! Compares two checkpoints, number by number.
//!
//! Both sides may be of any kind: an original and its quantized form, two conversions of one model, a
//! checkpoint and a safetensors file of dense tensors. Packed weights are dequantized to f32, as they are for
//! products; differences are computed in f64.
//!
//! ```
//! use candle_quant::Checkpoint;
//! use candle_quant_tools::diff;
//!
//! let original = Checkpoint::open("assets/tiny")?;
//! # use candle_quant_tools::convert::{convert, ConvertOptions, ConvertPlan, Recipe, RunOptions};
//! # let folder = tempfile::tempdir().unwrap();
//! # let out = folder.path().join("tiny-3bit");
//! # let mut options = ConvertOptions::mlx(Recipe::safe("3".parse()?));
//! # options.requantize = true;
//! # convert(&ConvertPlan::new(&original, &options)?, &out, &RunOptions::default(), &|_event| ())?;
//! let packed = Checkpoint::open(&out)?;
//! let diff = diff::diff(&original, &packed, &diff::DiffOptions::default());
//! assert!(!diff.equal());
//! // Worst first: a 3-bit weight.
//! let diff::Outcome::Values { relative_rms, .. } = diff.tensors[0].outcome else { unreachable!() };
//! assert!(relative_rms > 0.05 && relative_rms < 0.3);
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! # Numbers that are not finite
//! Two NaN are equal, and so are two infinities of one sign. Any other pair with a NaN or an infinity in it is
//! unequal, whatever the tolerance; such pairs are counted, and left out of the two distances.

mod layouts;
mod report;
mod values;

pub use report::{Comparison, Diff, Outcome};

use crate::convert::count_elements;
use crate::source::Source;
use candle_quant::checkpoint::{is_one_plus_norm, natural_order, Checkpoint, Weight};
use candle_quant::Result;
use std::collections::BTreeSet;

/// What counts as different.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiffOptions {
    /// The relative RMS up to which the numbers of a tensor count as equal; 0 for equal numbers only.
    pub tolerance: f64,
    /// Whether tensors that one side has and the other has not are left out.
    pub common: bool,
}

/// Compares all tensors of two checkpoints.
///
/// Tensors that only one side has are compared in the layout of mlx-lm, if the other side has them in another one: experts one by
/// one, in stacks, or with gate and up projections together; and so are all tensors of linear attention and the norms beside it.
///
/// Where a format has more than one reading, K is that of the config's model (of either side), else that of
/// the same tensor on the other side.
pub fn diff(a: &Checkpoint, b: &Checkpoint, options: &DiffOptions) -> Diff {
    let (a, b) = (Source::new(a), Source::new(b));
    let names =
        |source: &Source| source.checkpoint.tensor_names().map(str::to_owned).collect::<BTreeSet<_>>();
    let (names_of_a, names_of_b) = (names(&a), names(&b));
    // The same names may be other numbers: sums for weights of norms, heads in another order.
    let is_linear = a.has_linear_attention() || b.has_linear_attention();
    let has_layouts = |name: &str| is_linear && (name.contains(".linear_attn.") || is_one_plus_norm(name));
    let same = names_of_a.intersection(&names_of_b).filter(|name| !has_layouts(name));
    let mut found: Vec<_> = same.map(|name| (name.clone(), compare(&a, &b, name))).collect();
    let only = |names: &BTreeSet<String>, others: &BTreeSet<String>| {
        names.iter().filter(|name| has_layouts(name) || !others.contains(*name)).cloned().collect()
    };
    let (only_a, only_b) = (only(&names_of_a, &names_of_b), only(&names_of_b, &names_of_a));
    found.extend(layouts::compare(&a, only_a, &b, only_b));
    // Of each side, of tensors that can be read.
    let (mut elements, mut compared) = (0u64, 0u64);
    let mut tensors = Vec::with_capacity(found.len());
    for (name, (outcome, of_both)) in found {
        let of_outcome = of_both.saturating_mul(if outcome.is_one_sided() { 1 } else { 2 });
        elements = elements.saturating_add(of_outcome);
        if matches!(outcome, Outcome::Values { .. }) {
            compared = compared.saturating_add(of_outcome);
        }
        if !(options.common && outcome.is_one_sided()) {
            tensors.push(Comparison { name, equal: outcome.is_equal(options.tolerance), outcome });
        }
    }
    tensors.sort_by(|a, b| a.outcome.worse_first(&b.outcome).then_with(|| natural_order(&a.name, &b.name)));
    let compared_share = if elements == 0 { 0. } else { compared as f64 / elements as f64 };
    Diff { tensors, compared_share }
}

/// What was found of a tensor of both sides, and how many numbers it has.
fn compare(a: &Source, b: &Source, name: &str) -> (Outcome, u64) {
    let unreadable = |error: candle_quant::Error| Outcome::Unreadable { message: error.to_string() };
    let (a, b) = match pair(a, b, name) {
        Ok(weights) => weights,
        Err(error) => return (unreadable(error), 0),
    };
    let elements = count_elements(a.dims());
    if a.dims() != b.dims() {
        return (Outcome::Shapes { a: a.dims().to_vec(), b: b.dims().to_vec() }, elements);
    }
    (values::compare(&a, &b).unwrap_or_else(unreadable), elements)
}

/// The same tensor of both checkpoints.
fn pair(a: &Source, b: &Source, name: &str) -> Result<(Weight, Weight)> {
    let in_features =
        |own: &Source, other: &Source| own.in_features(name).or_else(|| other.in_features(name));
    let (k_of_a, k_of_b) = (in_features(a, b), in_features(b, a));
    let first = a.checkpoint.tensor(name, k_of_a);
    let second = b.checkpoint.tensor(name, k_of_b);
    if let (Ok(first), Ok(second)) = (&first, &second) {
        if first.dims() == second.dims() {
            return Ok((first.clone(), second.clone()));
        }
    }
    // What no config decides, the other side may.
    let with_k_of = |side: &Source, known: Option<usize>, other: &Result<Weight>| match (known, other) {
        (None, Ok(other)) => side.checkpoint.tensor(name, other.dims().last().copied()).ok(),
        _ => None,
    };
    let same_dims =
        |one: &Weight, other: &Result<Weight>| other.as_ref().is_ok_and(|other| one.dims() == other.dims());
    if let Some(reread) = with_k_of(a, k_of_a, &second).filter(|reread| same_dims(reread, &second)) {
        return Ok((reread, second?));
    }
    if let Some(reread) = with_k_of(b, k_of_b, &first).filter(|reread| same_dims(reread, &first)) {
        return Ok((first?, reread));
    }
    Ok((first?, second?))
}
