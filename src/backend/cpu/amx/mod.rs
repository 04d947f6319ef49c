//! AMX (Sapphire Rapids and later): products on the matrix unit.
//!
//! A tile multiplies sixteen rows of signed bytes or bf16 numbers with sixteen columns in as many cycles: 1024 or 512
//! products a cycle, where two vector units have 32 in f32. The activations become sums of three terms that fit.
//!
//! * Affine codes are integers ([`codes`]), and MXFP4 codes become integers ([`mxfp4`]), and so do the terms
//!   ([`activations`]): sums are exact, and scaled group by group ([`panels`]). Nothing is lost but what the fixed point
//!   cuts off, about what f32 does.
//! * NVFP4 and MXFP8 weights are bf16 numbers, scales and all ([`weights`]), and so are the terms ([`columns`]):
//!   sums run along K in f32 ([`floats`]).

mod activations;
mod codes;
mod columns;
mod floats;
mod mxfp4;
mod panels;
mod rows;
mod tile;
mod weights;

use super::kernels::{DecodeRows, DotRows, Parameters};
use super::matrix::PackedMatrix;
use super::simd::{avx512, vnni, InstructionSet};
use super::{rows_per_task, tasks};
use crate::format::{Bits, Element, Scale};
use columns::Columns;
use floats::{CHUNK_STEPS, SLAB};
use mxfp4::Mxfp4Rows;
use panels::{Panels, ROWS_PER_PASS};
use rows::{AffineRows, Rows};
use std::sync::atomic::{AtomicBool, Ordering};
use weights::{Mxfp8, Nvfp4, Weights};

/// Whether there is what the functions of this module enable.
pub(super) fn detected() -> bool {
    vnni::detected() && tile::detected()
}

/// The kernels of `avx512.rs`, those of [`vnni`] for a single column, and those of this module for more.
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

    fn has_product(&self, _m: usize) -> bool {
        true
    }
    fn product(&self, matrix: &PackedMatrix, x: &[f32]) -> Option<Vec<f32>> {
        if x.len() == matrix.k {
            // Tiles would be nearly empty, and unpacking for them costs more than multiplying.
            return vnni::Kernels.product(matrix, x);
        }
        match (matrix.format.element(), matrix.format.scale()) {
            (Element::Uint(Bits::One), _) => of_digits::<AffineRows<1>>(matrix, x),
            (Element::Uint(Bits::Two), _) => of_digits::<AffineRows<2>>(matrix, x),
            (Element::Uint(Bits::Three), _) => of_digits::<AffineRows<3>>(matrix, x),
            (Element::Uint(Bits::Four), _) => of_digits::<AffineRows<4>>(matrix, x),
            (Element::Uint(Bits::Five), _) => of_digits::<AffineRows<5>>(matrix, x),
            (Element::Uint(Bits::Six), _) => of_digits::<AffineRows<6>>(matrix, x),
            (Element::Uint(Bits::Eight), _) => of_digits::<AffineRows<8>>(matrix, x),
            (Element::E2m1, Scale::E8m0) => of_digits::<Mxfp4Rows>(matrix, x),
            (Element::E2m1, Scale::E4m3) => of_floats(Nvfp4::new(), matrix, x),
            (Element::E4m3, Scale::E8m0) => of_floats(Mxfp8, matrix, x),
            (Element::E2m1, Scale::Float) | (Element::E4m3, Scale::Float | Scale::E4m3) => None,
        }
    }
}

/// Where the results go, each vector's `stride` behind the last one's.
#[derive(Clone, Copy)]
struct Output {
    first: *mut f32,
    stride: usize,
}

// SAFETY: threads write the places of different rows.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// None if there is an infinity or a NaN among the activations, or if they and scales are too far apart.
fn of_digits<'a, R: Rows<'a>>(matrix: &'a PackedMatrix<'a>, x: &[f32]) -> Option<Vec<f32>> {
    let (m, n, k) = (x.len() / matrix.k, matrix.rows, matrix.k);
    let slab = panels::columns_per_slab(k);
    let rows = rows_per_task(matrix, m).next_multiple_of(ROWS_PER_PASS);
    let mut out = vec![0f32; m * n];
    for (x, out) in x.chunks(slab * k).zip(out.chunks_mut(slab * n)) {
        let panels = Panels::new(R::group_size(matrix), R::UNIT, k, x)?;
        let output = Output { first: out.as_mut_ptr(), stride: n };
        let all_done = AtomicBool::new(true);
        tasks::for_each(0..n.div_ceil(rows), |_, task| {
            let (first, end) = (task * rows, ((task + 1) * rows).min(n));
            // SAFETY: `Kernels` is handed out only after its features were detected; tasks have rows of
            // their own.
            if !unsafe { panels::products::<R>(matrix, (&panels, x), first, end - first, output) } {
                all_done.store(false, Ordering::Relaxed);
            }
        });
        if !all_done.into_inner() {
            return None;
        }
    }
    Some(out)
}

/// None if there is an infinity or a NaN among the activations, or a scale that is too large.
fn of_floats<W: Weights + Send + Sync>(weights: W, matrix: &PackedMatrix, x: &[f32]) -> Option<Vec<f32>> {
    let (m, n, k) = (x.len() / matrix.k, matrix.rows, matrix.k);
    let mut out = vec![0f32; m * n];
    for (x, out) in x.chunks(SLAB * k).zip(out.chunks_mut(SLAB * n)) {
        let columns = Columns::new(k, x, CHUNK_STEPS)?;
        let rows = floats::rows_of_task(n, x.len() / k);
        let output = Output { first: out.as_mut_ptr(), stride: n };
        let all_done = AtomicBool::new(true);
        tasks::for_each(0..n.div_ceil(rows), |_, task| {
            let rows = task * rows..((task + 1) * rows).min(n);
            // SAFETY: as above.
            if !unsafe { floats::products(weights, matrix, &columns, rows, output) } {
                all_done.store(false, Ordering::Relaxed);
            }
        });
        if !all_done.into_inner() {
            return None;
        }
    }
    Some(out)
}
