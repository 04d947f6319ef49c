//! compressed-tensors: `weight_packed` with `weight_scale`, for NVFP4 `weight_global_scale`, by which the scales are
//! divided, and for asymmetric integers `weight_zero_point`. Integers may be a `weight` of I8 instead. Floats of 8 bits
//! are a `weight` of F8_E4M3.
//!
//! As its `NVFP4PackedCompressor`, `MXFP4PackedCompressor`, `PackedQuantizationCompressor` and
//! `IntQuantizationCompressor` write them (src/compressed_tensors/compressors of vllm-project/compressed-tensors).
//! Packed integers are stored with half their range added, as one stream of bits in I32, zero points along N. Scales
//! are those of groups, of rows or of the tensor. What the config says of activations is not followed: they are not rounded.

use super::column_order::column_groups;
use super::filled_rows::of_rows;
use super::fp8::{self, Blocks};
use super::groups::Groups;
use super::integers::{Integers, Order, ZeroOrder, Zeros};
use super::module::{scale_dtypes, Module, PartNames, REMEDY};
use crate::checkpoint::file::{StoredTensor, Warnings};
use crate::checkpoint::weight::{GlobalScaleMeaning, Weight};
use crate::format::Scale;
use crate::{Error, QuantFormat, Result};
use safetensors::Dtype;
use std::fmt;

const PACKED: &str = "weight_packed";
const BYTES: &str = "weight";
const SCALES: &str = "weight_scale";
const ZEROS: &str = "weight_zero_point";
const ORDER: &str = "weight_g_idx";
/// The group of each column of a weight that was not ordered.
const UNORDERED: i32 = -1;
const GLOBAL_SCALE: &str = "weight_global_scale";
const SHAPE: &str = "weight_shape";
/// Widths of codes in words.
pub(super) const PACKED_BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];

/// What the config says of the weights of some modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum Scheme {
    /// Packed floats.
    Floats(QuantFormat),
    /// A byte each, with scales of the tensor, of rows or of blocks.
    Float8(Blocks),
    Integers(IntegerScheme),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) struct IntegerScheme {
    pub bits: usize,
    /// Whether codes are packed in words.
    pub packed: bool,
    pub symmetric: bool,
    /// `None`: rows have one scale each, or all of them one.
    pub group_size: Option<usize>,
    /// Whether a tensor tells the groups of columns.
    pub is_ordered: bool,
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Floats(format) => format.fmt(f),
            Self::Float8(Blocks { size: None, .. }) => f.write_str("fp8"),
            Self::Float8(Blocks { size: Some((rows, columns)), .. }) => write!(f, "fp8 {rows} x {columns}"),
            Self::Integers(IntegerScheme { bits, packed, symmetric, group_size, is_ordered }) => {
                write!(f, "{}symmetric {bits}-bit ", if *symmetric { "" } else { "a" })?;
                match group_size {
                    Some(size) => write!(f, "g{size}")?,
                    None => f.write_str("rows")?,
                }
                f.write_str(if *packed { "" } else { " in bytes" })?;
                f.write_str(if *is_ordered { ", ordered by activations" } else { "" })
            }
        }
    }
}

/// A weight in one of the `schemes` that the config names.
pub(super) fn weight(module: &Module, schemes: &[Scheme], warnings: &Warnings) -> Result<Weight> {
    if module.get(PACKED).is_none() {
        if module.get(BYTES).is_some_and(|codes| codes.dtype() == Dtype::F8_E4M3) {
            return float8(module, schemes, warnings);
        }
        return integers(module, schemes, BYTES, false);
    }
    let codes = module.require(PACKED, PACKED, &[Dtype::U8, Dtype::I32])?;
    if codes.dtype() == Dtype::I32 {
        return integers(module, schemes, PACKED, true);
    }
    let scales = module.require(
        SCALES,
        PACKED,
        &[Dtype::F8_E4M3, Dtype::U8, Dtype::F8_E8M0, Dtype::F16, Dtype::BF16, Dtype::F32],
    )?;
    let global_scale = Some((GLOBAL_SCALE, GlobalScaleMeaning::Reciprocal));
    let (format, global_scale) = match scales.dtype() == Dtype::F8_E4M3 || module.get(GLOBAL_SCALE).is_some()
    {
        true => (QuantFormat::NVFP4, global_scale),
        false => (QuantFormat::MXFP4, None),
    };
    check_scheme(module, PACKED, schemes, Scheme::Floats(format))?;
    module.refuse(ZEROS, "floats are symmetric")?;
    module.refuse(ORDER, "an order of columns (actorder) is not applied")?;
    let names = PartNames { codes: PACKED, scales: SCALES, global_scale };
    let weight = module.parts(format, &names, &[Dtype::U8], scale_dtypes(format.scale()))?;
    check_shape(module, weight.dims())?;
    Ok(weight)
}

/// A weight of 8-bit floats, in the only one of the schemes for them, or in the one that its scales tell.
fn float8(module: &Module, schemes: &[Scheme], warnings: &Warnings) -> Result<Weight> {
    let fits = |blocks: &Blocks| match (module.get(SCALES), module.get(BYTES).map(StoredTensor::dims)) {
        (Some(scales), Some([n, k])) => match blocks.size {
            Some((rows, columns)) => scales.dims() == [n.div_ceil(rows), k.div_ceil(columns)],
            None => scales.dims() == [*n, 1] || scales.dims().len() < 2,
        },
        _ => false,
    };
    let mut named = schemes.iter().filter_map(|scheme| match scheme {
        Scheme::Float8(blocks) => Some(*blocks),
        Scheme::Floats(_) | Scheme::Integers(_) => None,
    });
    let first = named.next();
    let blocks = first.into_iter().chain(named).find(fits).or(first);
    let Some(blocks) = blocks else {
        let scheme = Scheme::Float8(Blocks { size: None, exponents: false });
        return check_scheme(module, BYTES, schemes, scheme)
            .and_then(|()| integers(module, schemes, BYTES, false));
    };
    module.refuse(ZEROS, "floats are symmetric")?;
    fp8::weight(module, blocks, warnings)
}

/// Checks that the config names what is found.
fn check_scheme(module: &Module, lead: &str, schemes: &[Scheme], found: Scheme) -> Result<()> {
    if schemes.contains(&found) {
        return Ok(());
    }
    let codes = module.require(lead, lead, &[Dtype::U8, Dtype::I8, Dtype::I32, Dtype::F8_E4M3])?;
    let named: Vec<_> = schemes.iter().map(ToString::to_string).collect();
    let expected = format!("what config_groups of the config names ({})", named.join(", "));
    let scales =
        module.get(SCALES).map(|scales| format!(", scales {:?} {:?}", scales.dtype(), scales.dims()));
    let found = format!("{found}: {:?} {:?}{}", codes.dtype(), codes.dims(), scales.unwrap_or_default());
    Err(module.wrong(lead, codes, expected, found))
}

/// A weight of integers, in words or in bytes.
fn integers(module: &Module, schemes: &[Scheme], lead: &'static str, packed: bool) -> Result<Weight> {
    let code_dtype = if packed { Dtype::I32 } else { Dtype::I8 };
    let codes = module.require(lead, lead, &[code_dtype])?;
    let scales = module.require(SCALES, lead, scale_dtypes(Scale::Float))?;
    let (rows, last) = module.rows(lead, codes)?;
    let bits = if packed { bits(module, schemes, last)? } else { 8 };
    let k = last.saturating_mul(code_dtype.bitsize()) / bits;
    let one_scale = scales.dims().is_empty() || scales.dims() == [1];
    let count = scales.dims().last().copied().unwrap_or(1);
    let divided = Groups::divide(k, count).or_else(|| (count == 1 && bits == 8).then(|| of_rows(k)));
    let Some((groups, smaller)) = divided else {
        let expected =
            format!("scales for groups of 32, 64 or 128 of K = {k}, for multiples of these or for rows");
        return Err(module.wrong(SCALES, scales, expected, format!("{:?}", scales.dims())));
    };
    let named = |symmetric| {
        let is = |scheme: &Scheme| matches!(scheme, Scheme::Integers(named) if named.symmetric == symmetric);
        schemes.iter().any(is)
    };
    // Once the tool wrote zero points of symmetric codes, too.
    let says_nothing = !named(false) && zero_points_are_zero(module)?;
    let symmetric = says_nothing || module.get(ZEROS).is_none();
    let scheme = |group_size, is_ordered| IntegerScheme { bits, packed, symmetric, group_size, is_ordered };
    let is_named = |scheme| schemes.contains(&Scheme::Integers(scheme));
    let group_size = match groups.size == k && (is_named(scheme(None, false)) || is_named(scheme(None, true)))
    {
        true => None,
        false => Some(groups.size),
    };
    let scheme = match (is_named(scheme(group_size, true)), is_named(scheme(group_size, false))) {
        (true, false) => scheme(group_size, true),
        (_, _) => scheme(group_size, false),
    };
    match (named(true), named(false)) {
        (false, true) => module.require(ZEROS, lead, &[Dtype::I32, Dtype::I8]).map(drop)?,
        (_, false) if !says_nothing => module.refuse(ZEROS, "codes are symmetric, the config says")?,
        (_, _) => {}
    }
    check_scheme(module, lead, schemes, Scheme::Integers(scheme))?;
    if scheme.is_ordered && groups.size < k {
        module.require(ORDER, lead, &[Dtype::I32])?;
    }
    let order = column_groups(module, ORDER, k, groups.size, Some(UNORDERED))?;
    if packed && scheme.symmetric && groups.size == smaller && order.is_none() && !one_scale {
        let format = QuantFormat::symmetric(bits, smaller)?;
        let names = PartNames { codes: lead, scales: SCALES, global_scale: None };
        let weight = module.parts(format, &names, &[code_dtype], scale_dtypes(format.scale()))?;
        check_shape(module, weight.dims())?;
        return Ok(weight);
    }
    let [n] = *rows else {
        return Err(module.wrong(lead, codes, "a shape [N, K]", format!("{:?}", codes.dims())));
    };
    if !one_scale || scheme.group_size.is_some() {
        module.check_dims(SCALES, scales, &[n, groups.count(k)])?;
    }
    check_shape(module, &[n, k])?;
    let zeros = (!scheme.symmetric).then(|| zeros(module, lead, scheme, [n, groups.count(k)])).transpose()?;
    let format = match scheme.symmetric {
        true => QuantFormat::symmetric(bits, smaller),
        false => QuantFormat::affine(bits, smaller),
    }?;
    let layout = Integers {
        format,
        n,
        k,
        groups,
        codes: codes.clone(),
        order: if packed { Order::Rows } else { Order::Signed },
        scales: scales.clone(),
        multiplier: None,
        zeros,
        narrow_biases: false,
    };
    layout.into_weight(module, order)
}

/// The width of packed codes: the only one that the config names, or the one that makes the stored shape.
fn bits(module: &Module, schemes: &[Scheme], words: usize) -> Result<usize> {
    let widths = schemes.iter().filter_map(|scheme| match scheme {
        Scheme::Integers(IntegerScheme { bits, packed: true, .. }) => Some(*bits),
        Scheme::Floats(_) | Scheme::Float8(_) | Scheme::Integers(_) => None,
    });
    let widths: Vec<_> = widths.collect();
    let stored = match module.get(SHAPE) {
        Some(shape) if widths.iter().any(|bits| Some(bits) != widths.first()) => numbers(shape, 2)?,
        _ => None,
    };
    let k = stored.and_then(|shape| usize::try_from(*shape.last()?).ok());
    let makes_k = |bits: &&usize| k.is_some_and(|k| k.checked_mul(**bits) == words.checked_mul(32));
    Ok(widths.iter().find(makes_k).or(widths.first()).copied().unwrap_or(4))
}

/// Whether there are zero points, a byte each, of which none moves a code.
fn zero_points_are_zero(module: &Module) -> Result<bool> {
    match module.get(ZEROS) {
        Some(stored) if stored.dtype() == Dtype::I8 => {
            Ok(stored.read::<u8>()?.iter().all(|point| *point == 0))
        }
        _ => Ok(false),
    }
}

/// The zero points of `[n, groups]`, or a single one for all rows.
fn zeros(module: &Module, lead: &str, scheme: IntegerScheme, [n, groups]: [usize; 2]) -> Result<Zeros> {
    let (dtype, order, rows) = match scheme.packed {
        true => (Dtype::I32, ZeroOrder::GroupsLast, n.saturating_mul(scheme.bits).div_ceil(32)),
        false => (Dtype::I8, ZeroOrder::Signed, n),
    };
    let stored = module.require(ZEROS, lead, &[dtype])?;
    let is_one = stored.dims().is_empty() || stored.dims() == [1];
    if !(is_one && order == ZeroOrder::Signed && groups == 1) {
        module.check_dims(ZEROS, stored, &[rows, groups])?;
    }
    Ok(Zeros { stored: stored.clone(), order, first: 0, less_one: false })
}

/// The shape is stored once more, as two numbers.
fn check_shape(module: &Module, dims: &[usize]) -> Result<()> {
    let Some(shape) = module.get(SHAPE) else {
        return Ok(());
    };
    let stored = numbers(shape, dims.len())?;
    let expected: Vec<_> = dims.iter().map(|dim| i64::try_from(*dim).unwrap_or(i64::MAX)).collect();
    if stored.as_ref() == Some(&expected) {
        return Ok(());
    }
    let found = match stored {
        Some(stored) => format!("{stored:?}"),
        None => format!("{:?} {:?}", shape.dtype(), shape.dims()),
    };
    let expected = format!(
        "{expected:?}, the shape of `{}`",
        module.name(if module.get(PACKED).is_some() { PACKED } else { BYTES })
    );
    Err(Error::tensor(shape.path(), module.name(SHAPE), expected, found, REMEDY))
}

/// So many numbers of a shape; `None` if the tensor is something else.
fn numbers(shape: &StoredTensor, count: usize) -> Result<Option<Vec<i64>>> {
    Ok(match (shape.dims() == [count], shape.dtype()) {
        (true, Dtype::I64) => Some(shape.read::<i64>()?),
        (true, Dtype::I32) => Some(shape.read::<i32>()?.into_iter().map(i64::from).collect()),
        _ => None,
    })
}
