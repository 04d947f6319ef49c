//! The rows of tokens in the table that a step begins with.

use super::super::bindings::{CqDequantize, CqEmbed};
use super::super::dequantize::ELEMENTS_OF_BLOCK;
use super::super::formats::FormatKernels;
use super::super::kernel::Kernel;
use super::super::launch::Grid;
use super::super::memory::{float_dtype, u32_of, Locked};
use super::super::operand::LockedWeight;
use super::super::plan::THREADS;
use super::builder::{Builder, Places};
use super::LaunchParams;
use crate::backend::step::Matrix;
use crate::QuantTensor;
use candle_core::{Result, Tensor};

impl Builder<'_> {
    /// hidden = rows of the table, times a number; of a part of the table that begins with `first_token`, summed over ranks.
    pub(super) fn embed(
        &mut self,
        table: &Matrix,
        factor: f32,
        first_token: Option<usize>,
        places: &Places,
    ) -> Result<()> {
        let first = first_token.unwrap_or(0);
        match table {
            Matrix::Packed(table) => self.embed_packed(table, factor, first, places)?,
            Matrix::Dense(table) => self.embed_dense(table, factor, first, places)?,
        }
        if first_token.is_some() {
            self.sum(places.hidden);
        }
        Ok(())
    }

    fn embed_packed(
        &mut self,
        table: &QuantTensor,
        factor: f32,
        first: usize,
        places: &Places,
    ) -> Result<()> {
        let weight = LockedWeight::new(table);
        let params = CqDequantize {
            matrix: weight.addresses(self.stream)?.matrix(0, table.global_scale_of(0))?,
            ids: places.ids as *const _,
            y: places.hidden as *mut _,
            first_row: first as u64,
            vocabulary: self.plan.vocabulary as u64,
            count: u32_of("sequences", self.sequences)?,
            k: u32_of("K", self.plan.hidden)?,
            group_size: u32_of("group size", table.format().group_size())?,
            ids_bytes: size_of::<u32>() as u32,
            y_dtype: float_dtype(self.dtype)?,
            factor,
        };
        let blocks = (self.sequences, self.plan.hidden.div_ceil(ELEMENTS_OF_BLOCK));
        let kernel = FormatKernels::of(table.format())?.dequantize();
        self.push(kernel, Grid { blocks, shared_bytes: 0 }, LaunchParams::Dequantize(params));
        Ok(())
    }

    fn embed_dense(&mut self, table: &Tensor, factor: f32, first: usize, places: &Places) -> Result<()> {
        let params = CqEmbed {
            table: Locked::new(table).view()?.address(self.stream)?.as_ptr(),
            ids: places.ids as *const _,
            y: places.hidden as *mut _,
            first_row: u32_of("first token", first)?,
            rows: u32_of("rows of a table", table.dims().first().copied().unwrap_or_default())?,
            vocabulary: u32_of("vocabulary", self.plan.vocabulary)?,
            k: u32_of("hidden size", self.plan.hidden)?,
            table_dtype: float_dtype(table.dtype())?,
            y_dtype: float_dtype(self.dtype)?,
            factor,
            unused: 0,
        };
        let blocks = (self.sequences, self.plan.hidden.div_ceil(THREADS as usize));
        self.push(Kernel::Embed, Grid { blocks, shared_bytes: 0 }, LaunchParams::Embed(params));
        Ok(())
    }
}
