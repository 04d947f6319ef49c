//! AMX (Sapphire Rapids and later): products on the matrix unit.
//!
//! A tile multiplies sixteen rows of signed bytes (or bf16 numbers) with sixteen columns in as many cycles:
//! 1024 products a cycle, where two vector units have 32 in f32. The activations become sums of three
//! terms that fit ([`activations`]), the codes become integers ([`codes`]), and integer products are exact.
//! Nothing is lost but what the fixed point cuts off, about what f32 does.

mod activations;
mod codes;
mod panels;
mod rows;
mod tile;

use super::kernels::{DecodeRows, DotRows, Parameters};
use super::matrix::PackedMatrix;
use super::simd::{avx512, vnni, InstructionSet};
use super::{rows_per_task, MAX_DIRECT};
use codes::{with_codes, Codes, WithCodes};
use panels::{Output, Panels, ROWS_PER_PASS};
use rayon::prelude::*;

/// Whether there is what the functions of this module enable.
pub(super) fn detected() -> bool {
    vnni::detected() && tile::detected()
}

/// The kernels of `avx512.rs`, that of `vnni.rs` for a single column, and that of this module for more.
pub(super) struct Kernels;

impl InstructionSet for Kernels {
    fn name(&self) -> &'static str {
        "avx512amx"
    }
    fn block(&self) -> usize {
        avx512::Kernels.block()
    }
    fn lanes(&self) -> usize {
        avx512::Kernels.lanes()
    }
    fn slab_widths(&self) -> &'static [usize] {
        avx512::Kernels.slab_widths()
    }
    fn load_parameters(&self, to: &mut Parameters, matrix: &PackedMatrix, first_row: usize, rows: usize) {
        avx512::Kernels.load_parameters(to, matrix, first_row, rows);
    }
    fn dot_rows(&self, task: DotRows<'_>) {
        avx512::Kernels.dot_rows(task);
    }
    fn decode_rows(&self, task: DecodeRows<'_>) {
        avx512::Kernels.decode_rows(task);
    }

    fn product(&self, matrix: &PackedMatrix, x: &[f32]) -> Option<Vec<f32>> {
        struct Call<'a>(&'a PackedMatrix<'a>, &'a [f32]);
        impl WithCodes for Call<'_> {
            type Output = Option<Vec<f32>>;
            fn run<C: Codes>(self) -> Self::Output {
                product::<C>(self.0, self.1)
            }
        }
        if x.len() == matrix.k {
            // Tiles would be nearly empty, and unpacking for them costs more than multiplying.
            return vnni::Kernels.product(matrix, x);
        }
        if x.len() > MAX_DIRECT * matrix.k && matrix.format.group_size() < 32 {
            // Groups of 16 are scaled so often that a GEMM on decoded panels overtakes.
            return None;
        }
        with_codes(matrix.format, Call(matrix, x))
    }
}

fn product<C: Codes>(matrix: &PackedMatrix, x: &[f32]) -> Option<Vec<f32>> {
    let (m, n, k) = (x.len() / matrix.k, matrix.rows, matrix.k);
    let slab = panels::columns_per_slab::<C>(k);
    let rows = rows_per_task(matrix, m).next_multiple_of(ROWS_PER_PASS);
    let mut out = vec![0f32; m * n];
    for (x, out) in x.chunks(slab * k).zip(out.chunks_mut(slab * n)) {
        let panels = Panels::new::<C>(matrix.format.group_size(), k, x)?;
        let output = Output { first: out.as_mut_ptr(), stride: n };
        let task = |task: usize| {
            let (first, end) = (task * rows, ((task + 1) * rows).min(n));
            // SAFETY: `Kernels` is handed out only after its features were detected; tasks have rows of
            // their own.
            unsafe { panels::products::<C>(matrix, &panels, first, end - first, output) }
        };
        (0..n.div_ceil(rows)).into_par_iter().for_each(task);
    }
    Some(out)
}
