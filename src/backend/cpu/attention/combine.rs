//! The parts of one group become the output of its tokens and heads.

use super::hadamard;
use super::parts::{Attention, Part};

/// One part's numbers for one row.
#[derive(Clone, Copy)]
struct RowOf<'a> {
    sums: &'a [f32],
    largest: f32,
    total: f32,
}

/// The numbers of a part for a row, `partials` being those of all parts of the group, which begin at `start`.
fn row_of<'a>(
    attention: &Attention,
    part: &Part,
    (partials, start): (&'a [f32], usize),
    row: usize,
) -> Option<RowOf<'a>> {
    let (rows, stride) = (attention.rows(part), attention.sum_stride());
    let partial =
        partials.get(part.partial.start.checked_sub(start)?..part.partial.end.checked_sub(start)?)?;
    let sums = partial.get(row * stride..)?.get(..attention.cache.config().head_dim)?;
    let largest = *partial.get(rows * stride + row)?;
    Some(RowOf { sums, largest, total: *partial.get(rows * (stride + 1) + row)? })
}

/// Combines the parts of one group, in the order of their keys.
///
/// `partials` are the numbers of these parts, one after another; `slots` has a place for each token of the group, for all
/// query heads of its head of keys, `[group_size * head_dim]`.
pub(crate) fn combine(attention: &Attention, group: &[Part], partials: &[f32], slots: &mut [&mut [f32]]) {
    let Some(first) = group.first() else { return };
    let (config, group_size) = (attention.cache.config(), attention.group_size());
    let partials = (partials, first.partial.start);
    let heads = slots.iter_mut().flat_map(|slot| slot.chunks_exact_mut(config.head_dim));
    for (row, out) in heads.enumerate() {
        let head = first.kv_head * group_size + row % group_size;
        let sink = attention.sinks.and_then(|sinks| sinks.get(head));
        let sink = sink.map_or(f32::NEG_INFINITY, |sink| sink * std::f32::consts::LOG2_E);
        let parts = || group.iter().filter_map(|part| row_of(attention, part, partials, row));
        let largest = parts().fold(sink, |largest, part| largest.max(part.largest));
        let mut total = (sink - largest).exp2();
        out.fill(0.);
        parts().for_each(|part| total += part.total * (part.largest - largest).exp2());
        for part in parts() {
            let factor = (part.largest - largest).exp2() / total;
            out.iter_mut().zip(part.sums).for_each(|(out, sum)| *out += sum * factor);
        }
        if config.values.is_rotated() {
            hadamard::rotate(out);
        }
    }
}
