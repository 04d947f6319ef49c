//! Puts queries and keys where they stand: norms, and turns by positions.

use super::super::team::Shared;
use super::elementwise::{part_neighbours, turn, Moments};
use crate::backend::step::{HeadNorm, Heads, QueryGrowth, StepToken, Turn};

/// What a turn does at the positions of some tokens. Angles are f32 products, as in the implementations that models were
/// trained with.
pub(super) struct Angles {
    pairs: usize,
    /// Times the turn's factor, as are sines.
    cos: Vec<f32>,
    sin: Vec<f32>,
    interleaved: bool,
    /// By what queries of each token are multiplied; nothing if they do not grow.
    growth: Vec<f32>,
}

impl Angles {
    pub(super) fn new(turn: &Turn, tokens: &[StepToken], is_long: bool) -> Self {
        let frequencies = turn.frequencies(is_long);
        let angles = tokens.iter().flat_map(|token| {
            frequencies.iter().map(|frequency| (token.position as f32 * frequency).sin_cos())
        });
        let (sin, cos) = angles.map(|(sin, cos)| (sin * turn.factor, cos * turn.factor)).unzip();
        let growth = |growth: QueryGrowth| tokens.iter().map(|token| growth.factor(token.position)).collect();
        let growth = turn.query_growth.map(growth).unwrap_or_default();
        Self { pairs: frequencies.len(), cos, sin, interleaved: turn.interleaved, growth }
    }

    /// Turns a head of a row.
    fn turn(&self, row: usize, head: &mut [f32]) {
        let range = row * self.pairs..(row + 1) * self.pairs;
        let Some((cos, sin)) = self.cos.get(range.clone()).zip(self.sin.get(range)) else { return };
        if self.interleaved {
            part_neighbours(head.get_mut(..2 * self.pairs).unwrap_or_default());
        }
        turn(head, cos, sin);
    }
}

/// What a layer does to its queries, or to its keys.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    angles: &'a Angles,
    head_dim: usize,
    /// Numbers from one head to the next.
    stride: usize,
    norm: Option<&'a HeadNorm>,
    turns_first: bool,
    growth: &'a [f32],
}

impl<'a> Place<'a> {
    pub(super) fn of_queries(heads: &'a Heads, angles: &'a Angles) -> Self {
        let (norm, stride) = (heads.q_norm.as_ref(), heads.query_stride());
        Self { norm, stride, growth: &angles.growth, ..Self::of_keys(heads, angles) }
    }

    pub(super) fn of_keys(heads: &'a Heads, angles: &'a Angles) -> Self {
        let Heads { head_dim, turns_first, .. } = *heads;
        Self { angles, head_dim, stride: head_dim, norm: heads.k_norm.as_ref(), turns_first, growth: &[] }
    }

    /// Those of all heads of a row, if they are normalized together.
    pub(super) fn moments(&self, row: &[f32]) -> Option<Moments> {
        self.norm.filter(|norm| norm.over_all).map(|norm| Moments::new(&norm.norm, row))
    }

    /// Places some heads of a row, from head `first` on.
    pub(super) fn place(&self, row: usize, first: usize, moments: Option<Moments>, heads: &mut [f32]) {
        for (index, head) in (first..).zip(heads.chunks_exact_mut(self.head_dim)) {
            if self.turns_first {
                self.angles.turn(row, head);
            }
            if let Some(HeadNorm { norm, .. }) = self.norm {
                let copy = head.to_vec();
                // Zero, where all heads have the same numbers.
                let numbers = norm.weight.as_ref().or(norm.bias.as_ref()).map_or(self.head_dim, Vec::len);
                let start = index * self.head_dim % numbers.max(1);
                moments.unwrap_or_else(|| Moments::new(norm, &copy)).apply(norm, start, &copy, head);
            }
            if !self.turns_first {
                self.angles.turn(row, head);
            }
            if let Some(growth) = self.growth.get(row) {
                head.iter_mut().for_each(|x| *x *= growth);
            }
        }
    }
}

/// Queries or keys of all rows in a buffer, `[rows][heads * head_dim]`, placed when they are read.
pub(super) struct Placed<'a> {
    place: Place<'a>,
    buffer: &'a Shared,
    heads: usize,
    /// Of each row, if they are needed.
    moments: Vec<Moments>,
}

impl<'a> Placed<'a> {
    pub(super) fn new(place: Place<'a>, buffer: &'a Shared, (rows, heads): (usize, usize)) -> Self {
        let mut this = Self { place, buffer, heads, moments: Vec::new() };
        if place.norm.is_some_and(|norm| norm.over_all) {
            let mut row = vec![0.; heads * place.head_dim];
            for index in 0..rows {
                this.read_unplaced(index, 0, &mut row);
                this.moments.extend(place.moments(&row));
            }
        }
        this
    }

    fn read_unplaced(&self, row: usize, first: usize, to: &mut [f32]) {
        let first = row * self.heads + first;
        match self.place.stride == self.place.head_dim {
            true => self.buffer.read(first * self.place.stride, to),
            false => {
                for (head, to) in (first..).zip(to.chunks_exact_mut(self.place.head_dim)) {
                    self.buffer.read(head * self.place.stride, to);
                }
            }
        }
    }

    /// Some heads of a row, from head `first` on.
    pub(super) fn read(&self, row: usize, first: usize, to: &mut [f32]) {
        self.read_unplaced(row, first, to);
        self.place.place(row, first, self.moments.get(row).copied(), to);
    }
}
