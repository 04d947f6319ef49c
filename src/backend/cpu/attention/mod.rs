//! Attention to a [`KvCache`](crate::tensor::KvCache), without a matrix of scores.
//!
//! An attention is a list of independent [`parts`]: some tokens, one head of keys with all its query heads, a range of keys.
//! [`run_part`] computes one, [`combine`] joins those of the same tokens. Few new tokens (a decode step) are split over
//! ranges of keys, many (a prompt) into tiles of tokens. Whoever has several threads shares the parts among them, as
//! [`attend`] does; the result does not depend on how.
//!
//! * `flash`: one part, by online softmax over blocks of 64 keys; `product` and `exp2` are its arithmetic.
//! * `widen`: blocks in f32, where products do not read them as they are.
//! * `append`: new keys and values.

mod append;
mod block;
mod combine;
mod exp2;
mod flash;
mod hadamard;
mod kernels;
mod operand;
mod parts;
mod product;
mod widen;

pub(super) use operand::{Bf16, Numbers, F16, F32};

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use super::aligned::Aligned;
use super::isa::{self, InstructionSet};
use super::tasks;
use crate::tensor::KvCache;
pub(crate) use append::append;
use append::append_rows;
pub(crate) use combine::combine;
use flash::PartTask;
pub(crate) use parts::{parts, Attention, Part, Queries, Rows};

/// Computes a part. `q` are the queries of all tokens, `[rows][heads * head_dim]`; `partial` receives the part's numbers, as
/// many as `part.partial` says.
pub(crate) fn run_part(attention: &Attention, part: &Part, q: Rows, partial: &mut [f32]) {
    kernels::run_with(isa::best(), PartTask { attention, part, q, partial });
}

/// Appends the keys and values of all `queries`, `[rows][kv_heads * head_dim]`, by all threads.
pub(crate) fn append_all(cache: &KvCache, queries: &[Queries], k: Rows, v: Rows) {
    let dim = cache.config().head_dim;
    let heads = 0..cache.config().kv_heads;
    let tasks: Vec<_> =
        queries.iter().flat_map(|queries| heads.clone().map(move |head| (queries, head))).collect();
    let append = |(queries, head): (&Queries, usize)| {
        let rows = queries.first_row..queries.first_row + queries.tokens;
        append_rows(cache, (queries.sequence, head), queries.position, (k, v), (rows, head * dim));
    };
    let tokens: usize = queries.iter().map(|queries| queries.tokens).sum();
    if tokens * dim * heads.len() <= SERIAL_NUMBERS {
        tasks.into_iter().for_each(append);
    } else {
        tasks::for_each(tasks, |_, task| append(task));
    }
}

/// Numbers that are sooner appended than another thread is awake.
const SERIAL_NUMBERS: usize = 1 << 14;

/// The attention of all queries, by all threads: `out` is `[rows][heads * head_dim]`, as `q` is.
pub(crate) fn attend(attention: &Attention, q: Rows, out: &mut [f32]) {
    attend_with(isa::best(), attention, q, out);
}

/// [`attend`] with an instruction set.
fn attend_with(isa: &InstructionSet, attention: &Attention, q: Rows, out: &mut [f32]) {
    let parts = parts(attention);
    let groups: Vec<&[Part]> = parts.chunk_by(|a, b| a.group == b.group).collect();
    let len = |group: &[Part]| group.iter().map(|part| part.partial.len()).sum::<usize>();
    let slots = slots(attention, &groups, out);
    let run = |part: &Part, partial: &mut [f32]| {
        kernels::run_with(isa, PartTask { attention, part, q, partial });
    };
    if groups.len() == parts.len() {
        // Nothing to wait for: each thread combines what it has computed. The last tokens see the most keys: they come first.
        tasks::for_each(groups.into_iter().zip(slots).rev(), |_, (group, mut slots)| {
            let mut partial = Aligned::<f32>::new(len(group));
            group.iter().for_each(|part| run(part, &mut partial));
            combine(attention, group, &partial, &mut slots);
        });
        return;
    }
    let mut partials = Aligned::<f32>::new(len(&parts));
    let mut rest: &mut [f32] = &mut partials;
    let mut tasks = Vec::with_capacity(parts.len());
    for part in &parts {
        let (partial, others) = std::mem::take(&mut rest).split_at_mut(part.partial.len());
        tasks.push((part, partial));
        rest = others;
    }
    tasks::for_each(tasks, |_, (part, partial)| run(part, partial));
    for (group, mut slots) in groups.into_iter().zip(slots) {
        let start = group.first().map_or(0, |part| part.partial.start);
        combine(attention, group, partials.get(start..).unwrap_or_default(), &mut slots);
    }
}

/// The places in `out` that each group writes: for each of its tokens all query heads of its head of keys.
fn slots<'a>(attention: &Attention, groups: &[&[Part]], out: &'a mut [f32]) -> Vec<Vec<&'a mut [f32]>> {
    let kv_heads = attention.cache.config().kv_heads;
    let width = attention.group_size() * attention.cache.config().head_dim;
    let mut rows: Vec<_> =
        out.chunks_exact_mut(kv_heads * width).map(|row| row.chunks_exact_mut(width)).collect();
    let mut slots = Vec::with_capacity(groups.len());
    for queries in groups.iter().filter_map(|group| group.first()).map(|part| part.queries) {
        // The groups of the same tokens come one after another, one for each head of keys.
        let rows = rows.iter_mut().skip(queries.first_row).take(queries.tokens);
        slots.push(rows.filter_map(Iterator::next).collect());
    }
    slots
}
