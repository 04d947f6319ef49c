//! Rows of x, prepared for the weights that they are multiplied with; and rows of tables.

use super::super::dense;
use super::super::dispatch::{self, Prepared};
use super::super::fast_kernel::Digits;
use super::super::isa;
use super::super::low_rank::LowRank;
use crate::backend::step::{same_order, Matrix, Projection, StackProjection, Updates};
use crate::backend::{with_matrix, Lent};
use crate::{QuantFormat, QuantTensor};
use candle_core::Result;
use std::borrow::Cow;
use std::ptr;
use std::sync::Arc;

/// Rows of an embedding table.
pub(super) fn embedded(table: &Matrix, ids: &[usize]) -> Result<Vec<f32>> {
    match table {
        Matrix::Packed(table) => with_matrix(table, 0, |table| Ok(super::super::embed::<f32>(table, ids))),
        Matrix::Dense(table) => {
            Ok(ids.iter().map(|id| dense::row(table, *id)).collect::<Result<Vec<_>>>()?.concat())
        }
    }
}

/// Rows of x in the order of a weight's columns.
pub(super) fn in_order<'x>(x: &'x [f32], rows: usize, columns: Option<&Arc<[u32]>>) -> Cow<'x, [f32]> {
    let Some(columns) = columns else { return Cow::Borrowed(x) };
    let k = x.len().checked_div(rows).unwrap_or(0);
    let mut ordered = Vec::with_capacity(rows * columns.len());
    for row in x.chunks_exact(k.max(1)) {
        // What has no input is beyond all of them.
        ordered.extend(columns.iter().map(|column| row.get(*column as usize).copied().unwrap_or(0.)));
    }
    Cow::Owned(ordered)
}

/// A format, an order of columns, and x as these have it.
type PreparedFor = (QuantFormat, Option<Arc<[u32]>>, Prepared<'static>);

/// x, prepared for each format and order of columns, and for the adapters of each projection that it meets.
pub(super) struct Operand<'a> {
    x: Vec<f32>,
    rows: usize,
    digits: Digits,
    updates: &'a Updates,
    prepared: Vec<PreparedFor>,
    lent: Vec<Lent<'a>>,
    /// By the numbers of projections.
    adapters: Vec<(usize, LowRank<'a>)>,
}

impl<'a> Operand<'a> {
    pub(super) fn new(x: Vec<f32>, rows: usize, digits: Digits, updates: &'a Updates) -> Self {
        Self { x, rows, digits, updates, prepared: Vec::new(), lent: Vec::new(), adapters: Vec::new() }
    }

    /// Outputs `[outputs, rows of x]` of some rows of a weight, with the bias.
    pub(super) fn multiply(
        &mut self,
        projection: &'a Projection,
        first: usize,
        count: usize,
    ) -> Result<Vec<f32>> {
        let mut sums = match &projection.weight {
            Matrix::Packed(weight) => {
                self.products((weight, 0), projection.columns.as_ref(), first, count)?
            }
            Matrix::Dense(weight) => dense::few(isa::best(), weight, first, count, &self.x)?,
        };
        let rows = self.rows;
        if let Some(adapters) = self.adapters(projection) {
            adapters.apply_to_columns(&mut sums, rows, first);
        }
        self.add_bias(projection.bias.as_deref(), first, &mut sums);
        Ok(sums)
    }

    /// The same of a matrix of a stack.
    pub(super) fn multiply_expert(
        &mut self,
        stack: &'a StackProjection,
        expert: usize,
        first: usize,
        count: usize,
    ) -> Result<Vec<f32>> {
        let mut sums = self.products((&stack.weight, expert), None, first, count)?;
        self.add_bias(stack.bias.as_deref(), expert * stack.rows + first, &mut sums);
        Ok(sums)
    }

    fn products(
        &mut self,
        (weight, index): (&'a QuantTensor, usize),
        columns: Option<&Arc<[u32]>>,
        first: usize,
        count: usize,
    ) -> Result<Vec<f32>> {
        let format = weight.format();
        let is_same = |order: &Option<Arc<[u32]>>| same_order(order.as_ref(), columns);
        let known = self.prepared.iter().position(|(known, order, _)| *known == format && is_same(order));
        let place = known.unwrap_or_else(|| {
            let x = in_order(&self.x, self.rows, columns);
            let k = x.len() / self.rows.max(1);
            let prepared = dispatch::prepare(isa::best(), format, k, &x, self.digits);
            self.prepared.push((format, columns.cloned(), prepared));
            self.prepared.len() - 1
        });
        let lent = match self.lent.iter().position(|lent| ptr::eq(lent.weight(), weight)) {
            Some(lent) => lent,
            None => {
                self.lent.push(Lent::new(weight)?);
                self.lent.len() - 1
            }
        };
        let mut sums = vec![0.; count * self.rows];
        if let Some(((_, _, prepared), lent)) = self.prepared.get(place).zip(self.lent.get(lent)) {
            prepared.rows(&lent.matrix(index)?, first, &mut sums);
        }
        Ok(sums)
    }

    fn add_bias(&self, bias: Option<&[f32]>, first: usize, sums: &mut [f32]) {
        if let Some(bias) = bias.and_then(|bias| bias.get(first..)) {
            for (sums, bias) in sums.chunks_exact_mut(self.rows).zip(bias) {
                sums.iter_mut().for_each(|sum| *sum += bias);
            }
        }
    }

    /// The active adapters of a projection, if there are any.
    fn adapters(&mut self, projection: &Projection) -> Option<&LowRank<'a>> {
        let updates = self.updates.get(projection.index).filter(|updates| !updates.is_empty())?;
        let known = self.adapters.iter().position(|(known, _)| *known == projection.index);
        let index = known.unwrap_or_else(|| {
            self.adapters.push((projection.index, LowRank::new(updates, 0, &self.x)));
            self.adapters.len() - 1
        });
        self.adapters.get(index).map(|(_, adapters)| adapters)
    }
}
