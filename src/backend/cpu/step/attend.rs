//! The attention of a step: queries and keys are placed ([`place`](super::place)), keys and values appended, parts computed and
//! combined ([`attention`](super::super::attention)), let through by gates.

use super::super::attention::{
    append, append_all, attend, combine, parts, run_part, Attention, Part, Queries, Rows,
};
use super::super::tasks;
use super::super::team::{Member, Shared, Stopped};
use super::delta_net::check_state;
use super::elementwise::let_through;
use super::few::Cursors;
use super::many::{AT_ONCE, ROWS};
use super::place::{Angles, Place, Placed};
use crate::backend::step::{DeltaNet, Heads, Input, Node, Plan, StepToken, MOST_PROJECTIONS};
use crate::backend::StepCaches;
use crate::{DeltaNetState, Error, KvCache};
use candle_core::Result;
use std::ops::Range;
use std::sync::Arc;

/// Tokens, caches and states, for all layers.
pub(super) struct Layers<'a> {
    /// How many tokens there are.
    rows: usize,
    /// Those of each turn of the plan.
    angles: Vec<Angles>,
    queries: Vec<Queries>,
    caches: Vec<&'a KvCache>,
    states: Vec<&'a DeltaNetState>,
    /// For each layer the parts of its attention.
    parts: Vec<Arc<[Part]>>,
}

impl<'a> Layers<'a> {
    /// Makes room for the tokens in the caches, which [`check`] has found to fit.
    pub(super) fn new(plan: &Plan, input: Input, caches: &'a mut StepCaches<KvCache>) -> Result<Self> {
        let Input { tokens, is_long, .. } = input;
        let queries = queries_of(tokens)?;
        let StepCaches { keys: caches, states } = caches;
        for Queries { sequence, tokens, .. } in &queries {
            for cache in caches.iter_mut() {
                cache.extend(&[*sequence], *tokens)?;
            }
            for state in states.iter_mut() {
                state.make_room(sequence.saturating_add(1));
                state.extend(*sequence, *tokens);
            }
        }
        let mut layers = Self {
            rows: tokens.len(),
            angles: plan.turns.iter().map(|turn| Angles::new(turn, tokens, is_long)).collect(),
            queries,
            caches: caches.iter().map(|cache| &**cache).collect(),
            states: states.iter().map(|state| &**state).collect(),
            parts: Vec::new(),
        };
        let mut known: Option<(&KvCache, usize, Arc<[Part]>)> = None;
        for heads in heads_of(plan) {
            let Some(&cache) = layers.caches.get(heads.layer) else { continue };
            let of_layer = match known {
                Some((other, count, of_other))
                    if other.config() == cache.config() && count == heads.heads =>
                {
                    of_other
                }
                _ => parts(&attention(heads, cache, &layers.queries)).into(),
            };
            layers.parts.push(of_layer.clone());
            known = Some((cache, heads.heads, of_layer));
        }
        Ok(layers)
    }

    /// The most numbers that the parts of a layer have together.
    pub(super) fn partial_len(&self) -> usize {
        self.parts.iter().filter_map(|parts| parts.last()).map(|part| part.partial.end).max().unwrap_or(0)
    }

    /// A member's share of a layer's attention.
    ///
    /// # Errors
    /// If another member has failed.
    pub(super) fn compute(
        &self,
        heads: &Heads,
        (member, cursors): (&Member, &Cursors),
        [queries, keys, values, ..]: &[Shared; MOST_PROJECTIONS],
        (partials, attended): (&Shared, &Shared),
    ) -> std::result::Result<(), Stopped> {
        let layer = self.caches.get(heads.layer).copied().zip(self.parts.get(heads.layer));
        let Some(((cache, parts), angles)) = layer.zip(self.angles.get(heads.turn)) else { return Ok(()) };
        let attention = attention(heads, cache, &self.queries);
        let groups: Vec<&[Part]> = parts.chunk_by(|a, b| a.group == b.group).collect();
        let [appended, computed, combined, _] = cursors;
        let heads_of_keys = self.queries.len() * heads.kv_heads;
        let group_width = heads.heads / heads.kv_heads * heads.head_dim;
        let width = heads.heads * heads.head_dim;
        let mut q = vec![0.; self.rows * width];
        let gates = heads.has_gate.then_some(queries);
        let placed = [
            Placed::new(Place::of_queries(heads, angles), queries, (self.rows, heads.heads)),
            Placed::new(Place::of_keys(heads, angles), keys, (self.rows, heads.kv_heads)),
        ];
        // Whoever appends a head may attend to it at once, if no other thread has a part of that.
        let is_whole = groups.len() == parts.len() && groups.len() == heads_of_keys;
        while let Some(taken) = appended.take_near(heads_of_keys, member) {
            let kv_head = taken % heads.kv_heads;
            let Some(queries) = self.queries.get(taken / heads.kv_heads) else { continue };
            append_group(heads, cache, (queries, kv_head), &placed, values, &mut q);
            match groups.get(taken).filter(|_| is_whole) {
                Some(group) => {
                    let mut partials = vec![0.; numbers_of(group).len()];
                    run_parts(&attention, group, &q, &mut partials);
                    write_combined((heads, &attention), group, &partials, gates, attended);
                }
                // Until there is what they see: others may have to read them yet as they were.
                None => {
                    for row in queries.first_row..queries.first_row + queries.tokens {
                        let start = row * width + kv_head * group_width;
                        let own = q.get(start..start + group_width).unwrap_or_default();
                        attended.write(start, own);
                    }
                }
            }
        }
        if is_whole {
            return Ok(());
        }
        member.wait()?;
        attended.read(0, &mut q);
        while let Some(taken) = computed.take_near(parts.len(), member) {
            let Some(part) = parts.get(taken..=taken) else { continue };
            let numbers = numbers_of(part);
            let mut partial = vec![0.; numbers.len()];
            run_parts(&attention, part, &q, &mut partial);
            partials.write(numbers.start, &partial);
        }
        member.wait()?;
        while let Some(taken) = combined.take(groups.len(), 1) {
            let Some(group) = groups.get(taken.start) else { continue };
            let numbers = numbers_of(group);
            let mut of_group = vec![0.; numbers.len()];
            partials.read(numbers.start, &mut of_group);
            write_combined((heads, &attention), group, &of_group, gates, attended);
        }
        Ok(())
    }

    /// The state of a layer of linear attention, and whose tokens change it.
    pub(super) fn state(&self, net: &DeltaNet) -> Option<(&DeltaNetState, &[Queries])> {
        Some((self.states.get(net.layer)?, &self.queries))
    }

    /// A layer's attention for many rows, by all threads, in place of what `attended` has: `[rows][heads * head_dim]`.
    pub(super) fn compute_many(
        &self,
        heads: &Heads,
        [queries, keys, values, ..]: &mut [Vec<f32>; MOST_PROJECTIONS],
        attended: &mut Vec<f32>,
    ) {
        let layer = self.caches.get(heads.layer).zip(self.angles.get(heads.turn));
        let Some((&cache, angles)) = layer else { return attended.clear() };
        let (of_queries, of_keys) = (Place::of_queries(heads, angles), Place::of_keys(heads, angles));
        let (width, kv_width) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
        let gates = heads.has_gate.then(|| part_gates(queries, heads.head_dim));
        let rows = queries.chunks_mut(ROWS * width).zip(keys.chunks_mut(ROWS * kv_width));
        tasks::for_each(rows, |task, (q, k)| {
            let rows = (task * ROWS..).zip(q.chunks_exact_mut(width).zip(k.chunks_exact_mut(kv_width)));
            for (row, (q, k)) in rows {
                of_queries.place(row, 0, of_queries.moments(q), q);
                of_keys.place(row, 0, of_keys.moments(k), k);
            }
        });
        let rows = |values, stride| Rows { values, stride };
        append_all(cache, &self.queries, rows(keys, kv_width), rows(values, kv_width));
        // All of it is written.
        attended.resize(queries.len(), 0.);
        attend(&attention(heads, cache, &self.queries), rows(queries, width), attended);
        if let Some(gates) = gates {
            tasks::for_each(
                attended.chunks_mut(AT_ONCE).zip(gates.chunks(AT_ONCE)),
                |_, (attended, gates)| {
                    let_through(attended, gates);
                },
            );
        }
    }
}

/// Takes the gate behind each query away, and returns them.
fn part_gates(queries: &mut Vec<f32>, head_dim: usize) -> Vec<f32> {
    let (mut alone, mut gates) = (Vec::new(), Vec::new());
    for both in queries.chunks_exact(2 * head_dim) {
        let (query, gate) = both.split_at(head_dim);
        alone.extend_from_slice(query);
        gates.extend_from_slice(gate);
    }
    *queries = alone;
    gates
}

fn attention<'a>(heads: &'a Heads, cache: &'a KvCache, queries: &'a [Queries]) -> Attention<'a> {
    let Heads { heads, scale, softcap, ref sinks, .. } = *heads;
    Attention { cache, queries, heads, scale, sinks: sinks.as_deref(), softcap }
}

fn heads_of(plan: &Plan) -> impl Iterator<Item = &Heads> {
    plan.nodes.iter().filter_map(|node| match node {
        Node::Attend(heads) => Some(heads),
        Node::Embed { .. } | Node::Project(..) | Node::DeltaNet(_) | Node::AddAttended(..) => None,
        Node::Inner { .. } | Node::AddInner(..) | Node::Experts(_) | Node::Logits { .. } => None,
    })
}

fn nets_of(plan: &Plan) -> impl Iterator<Item = &DeltaNet> {
    plan.nodes.iter().filter_map(|node| match node {
        Node::DeltaNet(net) => Some(&**net),
        Node::Embed { .. } | Node::Project(..) | Node::Attend(_) | Node::AddAttended(..) => None,
        Node::Inner { .. } | Node::AddInner(..) | Node::Experts(_) | Node::Logits { .. } => None,
    })
}

/// Appends the keys and values of one head, and puts the queries of its group where they lie in `q`,
/// `[rows][heads * head_dim]`.
fn append_group(
    heads: &Heads,
    cache: &KvCache,
    (queries, kv_head): (&Queries, usize),
    [of_queries, of_keys]: &[Placed; 2],
    values: &Shared,
    q: &mut [f32],
) {
    let Heads { head_dim, kv_heads, .. } = *heads;
    let group = heads.heads / kv_heads;
    let mut k = vec![0.; queries.tokens * head_dim];
    let mut v = vec![0.; queries.tokens * head_dim];
    let rows = queries.first_row..;
    for ((row, k), v) in rows.zip(k.chunks_exact_mut(head_dim)).zip(v.chunks_exact_mut(head_dim)) {
        of_keys.read(row, kv_head, k);
        values.read((row * kv_heads + kv_head) * head_dim, v);
        let start = (row * heads.heads + kv_head * group) * head_dim;
        of_queries.read(row, kv_head * group, q.get_mut(start..start + group * head_dim).unwrap_or_default());
    }
    append(cache, queries.sequence, kv_head, queries.position, &k, &v);
}

/// Where the numbers of some parts are.
fn numbers_of(parts: &[Part]) -> Range<usize> {
    let (first, last) = (parts.first(), parts.last());
    first.map_or(0, |part| part.partial.start)..last.map_or(0, |part| part.partial.end)
}

/// Computes some parts one after another, for queries of all rows.
fn run_parts(attention: &Attention, parts: &[Part], q: &[f32], partials: &mut [f32]) {
    let q = Rows { values: q, stride: attention.heads * attention.cache.config().head_dim };
    let mut rest = partials;
    for part in parts {
        let (partial, others) = std::mem::take(&mut rest).split_at_mut(part.partial.len());
        run_part(attention, part, q, partial);
        rest = others;
    }
}

/// Combines the parts of a group into their slots of `attended`, let through by the gates behind its queries, if there are any.
fn write_combined(
    (heads, attention): (&Heads, &Attention),
    group: &[Part],
    partials: &[f32],
    gates: Option<&Shared>,
    attended: &Shared,
) {
    let Some(part) = group.first() else { return };
    let &Heads { kv_heads, head_dim, .. } = heads;
    let group_width = heads.heads / kv_heads * head_dim;
    let mut out = vec![0.; part.queries.tokens * group_width];
    combine(attention, group, partials, &mut out.chunks_exact_mut(group_width).collect::<Vec<_>>());
    let mut gate = vec![0.; head_dim];
    for (row, out) in (part.queries.first_row..).zip(out.chunks_exact_mut(group_width)) {
        let at = row * kv_heads * group_width + part.kv_head * group_width;
        if let Some(queries) = gates {
            for (head, out) in (at / head_dim..).zip(out.chunks_exact_mut(head_dim)) {
                queries.read(head * heads.query_stride() + head_dim, &mut gate);
                let_through(out, &gate);
            }
        }
        attended.write(at, out);
    }
}

/// The tokens sequence by sequence.
fn queries_of(tokens: &[StepToken]) -> Result<Vec<Queries>> {
    let mut all: Vec<Queries> = Vec::new();
    for (row, token) in tokens.iter().enumerate() {
        let StepToken { sequence, position, .. } = *token;
        if let Some(last) = all.last_mut().filter(|last| last.sequence == sequence) {
            if last.position + last.tokens != position {
                let expected = format!("{}, behind that of the token before", last.position + last.tokens);
                return Err(Error::mismatch("position", expected, position.to_string()).into());
            }
            last.tokens += 1;
        } else if all.iter().any(|queries| queries.sequence == sequence) {
            let expected = "the tokens of a sequence one after another";
            return Err(Error::mismatch("tokens", expected, format!("sequence {sequence} twice")).into());
        } else {
            all.push(Queries { sequence, position, tokens: 1, first_row: row });
        }
    }
    Ok(all)
}

/// Checks that caches fit the plan, and that tokens follow what is cached and find room.
pub(super) fn check(plan: &Plan, tokens: &[StepToken], caches: &StepCaches<KvCache>) -> Result<()> {
    let queries = queries_of(tokens)?;
    heads_of(plan).try_for_each(|heads| {
        check_layer(heads, &queries, caches.keys.get(heads.layer).map(|cache| &**cache))
    })?;
    nets_of(plan)
        .try_for_each(|net| check_state(net, &queries, caches.states.get(net.layer).map(|state| &**state)))
}

pub(super) fn check_position(len: usize, position: usize) -> Result<()> {
    match len == position {
        true => Ok(()),
        false => {
            let expected = format!("{len}, the tokens in the cache");
            Err(Error::mismatch("position", expected, position.to_string()).into())
        }
    }
}

fn check_layer(heads: &Heads, queries: &[Queries], cache: Option<&KvCache>) -> Result<()> {
    let Some(cache) = cache else {
        return Err(Error::mismatch("caches", "one for each layer", "fewer").into());
    };
    let config = cache.config();
    let (kv_heads, head_dim) = (config.kv_heads, config.head_dim);
    if (kv_heads, head_dim) != (heads.kv_heads, heads.head_dim) {
        let expected = format!("{} heads of {} elements", heads.kv_heads, heads.head_dim);
        return Err(Error::mismatch("cache", expected, format!("{kv_heads} of {head_dim}")).into());
    }
    for &Queries { sequence, position, tokens, .. } in queries {
        check_position(cache.len(sequence), position)?;
        cache.room_for(&[sequence], tokens)?;
    }
    Ok(())
}
