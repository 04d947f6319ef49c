//! GPTQ: `qweight` I32 `[K * bits / 32, N]`, `qzeros` I32 `[K/g, N * bits / 32]`, `scales` `[K/g, N]`, `g_idx` I32
//! `[K]`, with `w = (q - zero) * scale`.
//!
//! As auto-gptq 0.7.1 and gptqmodel 7.7.0 pack it (`nn_modules/qlinear`): the codes of a column of `qweight`, and those
//! of a row of `qzeros`, are one stream of bits, of 3 bits, too. Zeros are stored less one, but in `gptq_v2`. The
//! shapes say how many bits and which groups a module has; `g_idx` says of each column in which group it is, which with
//! `desc_act` is another order than that of the columns.

use super::column_order::column_groups;
use super::config::GptqConfig;
use super::groups::Groups;
use super::integers::{Integers, Order, ZeroOrder, Zeros};
use super::module::{scale_dtypes, Module};
use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::Weight;
use crate::format::Scale;
use crate::{QuantFormat, Result};
use safetensors::Dtype;

/// The widths that the tools write.
pub(super) const BITS: [usize; 4] = [2, 3, 4, 8];
/// The group of each column.
const ORDER: &str = "g_idx";

pub(super) fn weight(module: &Module, config: &GptqConfig) -> Result<Weight> {
    let qweight = module.require("qweight", "qweight", &[Dtype::I32])?;
    let qzeros = module.require("qzeros", "qweight", &[Dtype::I32])?;
    let scales = module.require("scales", "qweight", scale_dtypes(Scale::Float))?;
    let ([words], n) = module.rows("qweight", qweight)? else {
        let expected = "a shape [K * bits / 32, N]";
        return Err(module.wrong("qweight", qweight, expected, format!("{:?}", qweight.dims())));
    };
    let ([groups], _) = module.rows("scales", scales)? else {
        return Err(module.wrong("scales", scales, "a shape [K/g, N]", format!("{:?}", scales.dims())));
    };
    module.check_dims("scales", scales, &[*groups, n])?;
    let bits = bits(module, qzeros, *groups, n, config)?;
    let k = words.saturating_mul(32) / bits;
    let divided = Groups::divide(k, *groups).filter(|_| words % bits == 0);
    let stated = |(of_file, _): &(Groups, usize)| match config.group_size {
        None => true,
        Some(stated) => stated.min(k) == of_file.size,
    };
    let Some((of_file, group_size)) = divided.filter(stated) else {
        let expected = match config.group_size {
            Some(stated) => format!("one row for each {stated} of K = {k}, as the config says"),
            None => format!("one row for each 32 of K = {k}, or for each multiple of 32"),
        };
        return Err(module.wrong("scales", scales, expected, format!("shape {:?}", scales.dims())));
    };
    let order = column_groups(module, ORDER, k, of_file.size, None)?;
    if config.is_ordered && *groups > 1 {
        module.require(ORDER, "qweight", &[Dtype::I32])?;
    }
    let format = QuantFormat::affine(bits, group_size)?;
    let zeros = Zeros {
        stored: qzeros.clone(),
        order: ZeroOrder::GroupsFirst,
        first: 0,
        less_one: config.zeros_less_one,
    };
    let layout = Integers {
        format,
        n,
        k,
        groups: of_file,
        codes: qweight.clone(),
        order: Order::Columns,
        scales: scales.clone(),
        multiplier: None,
        zeros: Some(zeros),
        narrow_biases: config.symmetric,
    };
    layout.into_weight(module, order)
}

/// The width of the codes, which the zeros have, too.
fn bits(
    module: &Module,
    qzeros: &StoredTensor,
    groups: usize,
    n: usize,
    config: &GptqConfig,
) -> Result<usize> {
    let words = |bits: usize| n.checked_mul(bits).filter(|of_n| of_n % 32 == 0).map(|of_n| of_n / 32);
    let fits = |bits: &usize| words(*bits).is_some_and(|words| qzeros.dims() == [groups, words]);
    let stated = config.bits.map_or(BITS.to_vec(), |bits| vec![bits]);
    stated.iter().copied().find(fits).ok_or_else(|| {
        let shapes =
            stated.iter().filter_map(|bits| Some(format!("{:?} of {bits} bits", [groups, words(*bits)?])));
        let shapes: Vec<_> = shapes.collect();
        let expected = match shapes.is_empty() {
            true => format!("N = {n} that is whole words of {stated:?} bits"),
            false => format!("shape {}", shapes.join(" or ")),
        };
        module.wrong("qzeros", qzeros, expected, format!("{:?}", qzeros.dims()))
    })
}
