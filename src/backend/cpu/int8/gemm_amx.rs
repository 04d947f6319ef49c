//! Several rows of x times integer codes, on AMX.
//!
//! A tile multiplies sixteen rows of signed bytes with sixteen columns in as many cycles: 1024 multiply-adds a cycle, where two
//! vector units have 32 in f32.

use super::super::fast_kernel::{Digits, FastKernel, NotRepresentable};
use super::super::isa::amx_tile::{self, Amx, Line, Tiles, LEFT, RIGHT, ROWS};
use super::super::matrix::PackedMatrix;
use super::super::output::{rows_per_task, OutputPtr};
use super::super::tasks;
use super::affine_codes::STEP;
use super::codes::integer_bits_of_tiles;
use super::fixed_point::LIMBS;
use super::group_limbs::Group;
use super::mxfp4_rows::Mxfp4Rows;
use super::outliers::Outliers;
use super::panels::{m_per_pass, PanelScale, Panels, Shape};
use super::tile_rows::{AffineRows, TileRows};
use crate::format::Bits;
use crate::QuantFormat;
use std::arch::x86_64::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Int8Amx {
    isa: Amx,
}

impl Int8Amx {
    pub(in super::super) fn new(isa: Amx) -> Self {
        Self { isa }
    }

    fn matmul_as<'a, R: TileRows<'a>>(
        &self,
        matrix: &'a PackedMatrix<'a>,
        x: &[f32],
        digits: Digits,
    ) -> Result<Vec<f32>, NotRepresentable> {
        let isa = self.isa;
        let (m, n, k) = (x.len() / matrix.k, matrix.rows, matrix.k);
        let at_once = m_per_pass(k);
        let rows = rows_per_task((m, n, k)).next_multiple_of(ROWS_PER_PASS);
        let mut out = vec![0f32; m * n];
        for (x, out) in x.chunks(at_once * k).zip(out.chunks_mut(at_once * n)) {
            let (x, outliers) = Outliers::split(isa.vnni.avx512, (x, k), R::group_size(matrix), digits)?;
            let panels = Panels::new(isa.vnni.avx512, (R::group_size(matrix), R::UNIT), k, &x);
            let x = (&panels, &*x, &outliers);
            let output = OutputPtr { first: out.as_mut_ptr(), stride: n };
            let all_precise = AtomicBool::new(true);
            tasks::for_each(0..n.div_ceil(rows), |_, task| {
                let (first, end) = (task * rows, ((task + 1) * rows).min(n));
                // SAFETY: `isa` proves the features. `panels` was made with K and `R`. `output` is a buffer of all rows of x,
                // which is not used otherwise meanwhile, and tasks have different rows of the weight.
                if !unsafe { multiply_rows::<R>(isa, matrix, x, (first, end - first), output) } {
                    all_precise.store(false, Ordering::Relaxed);
                }
            });
            if !all_precise.into_inner() {
                return Err(NotRepresentable);
            }
        }
        Ok(out)
    }
}

impl FastKernel for Int8Amx {
    fn supports(&self, format: QuantFormat) -> bool {
        integer_bits_of_tiles(format).is_some() || format == QuantFormat::MXFP4
    }

    fn matmul(&self, matrix: &PackedMatrix, x: &[f32], digits: Digits) -> Result<Vec<f32>, NotRepresentable> {
        match integer_bits_of_tiles(matrix.format) {
            Some(Bits::One) => self.matmul_as::<AffineRows<1>>(matrix, x, digits),
            Some(Bits::Two) => self.matmul_as::<AffineRows<2>>(matrix, x, digits),
            Some(Bits::Three) => self.matmul_as::<AffineRows<3>>(matrix, x, digits),
            Some(Bits::Four) => self.matmul_as::<AffineRows<4>>(matrix, x, digits),
            Some(Bits::Five) => self.matmul_as::<AffineRows<5>>(matrix, x, digits),
            Some(Bits::Six) => self.matmul_as::<AffineRows<6>>(matrix, x, digits),
            Some(Bits::Eight) => self.matmul_as::<AffineRows<8>>(matrix, x, digits),
            None if matrix.format == QuantFormat::MXFP4 => self.matmul_as::<Mxfp4Rows>(matrix, x, digits),
            None => Err(NotRepresentable),
        }
    }
}

/// Rows of the weight that share the loads of x: two tiles of them.
const ROWS_PER_PASS: usize = 2 * ROWS;

/// Tiles of each of the two blocks of rows that are unpacked together.
const CHUNK_TILES: usize = 4;

/// Sums of a cluster, for each limb and each of two blocks of rows.
type Counts = [[[Line; ROWS]; 2]; LIMBS];

/// Sums of a panel, for each of two blocks of rows.
type Sums = [[Line; ROWS]; 2];

/// The output of `rows` rows of the weight, from `first_row` on, for all rows of x; false if
/// [precision](TileRows::keeps_precision) is lost.
///
/// # Safety
/// `isa` proves the features. `panels` has the matrix's K, and the group size and unit of `R`; `output` is valid for the
/// slots of the rows in every row of x, and nobody else uses them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
unsafe fn multiply_rows<'a, R: TileRows<'a>>(
    isa: Amx,
    matrix: &'a PackedMatrix<'a>,
    (panels, x, outliers): (&Panels, &[f32], &Outliers),
    (first_row, rows): (usize, usize),
    output: OutputPtr,
) -> bool {
    // SAFETY: a task has one `Tiles` at a time, and calls nothing that makes another. Panels and rows agree in K and groups,
    // as the caller vouches; `output` is valid for the slots that are written.
    unsafe {
        let _tiles = Tiles::configure(isa, panels.shape.depth);
        let mut blocks = [R::new(matrix), R::new(matrix)];
        let mut sums = vec![[[Line::ZERO; ROWS]; 2]; panels.m.div_ceil(panels.shape.m_of_panel())];
        for pass in (0..rows).step_by(ROWS_PER_PASS) {
            let rows = (rows - pass).min(ROWS_PER_PASS);
            blocks[0].load(first_row + pass, rows);
            blocks[1].load(first_row + pass + ROWS, rows.saturating_sub(ROWS));
            sums.fill([[Line::ZERO; ROWS]; 2]);
            let precise = match panels.shape.groups {
                2 => add_clusters::<R, 2>(&blocks, (panels, x), matrix.k, &mut sums),
                _ => add_clusters::<R, 1>(&blocks, (panels, x), matrix.k, &mut sums),
            };
            if !precise {
                return false;
            }
            let groups = panels.shape.groups;
            for index in 0..panels.m {
                let (panel, row_of_x) =
                    (index / panels.shape.m_of_panel(), index % panels.shape.m_of_panel());
                let to = output.first.add(index * output.stride + first_row + pass);
                for (row, line) in sums[panel].as_flattened().iter().take(rows).enumerate() {
                    let lanes = line.0[row_of_x * groups..][..groups].iter();
                    let sum = lanes.fold(0.0, |sum, lane| sum + f32::from_bits(*lane));
                    *to.add(row) = sum * matrix.global_scale;
                }
            }
            outliers.for_each_column::<ROWS_PER_PASS>(
                matrix,
                (first_row + pass, rows),
                0..panels.m,
                |index, x, weights| {
                    let to = output.first.add(index * output.stride + first_row + pass);
                    for (row, weight) in weights.iter().enumerate() {
                        *to.add(row) = x.mul_add(*weight, *to.add(row));
                    }
                },
            );
        }
    }
    true
}

/// A cluster whose sums are to be scaled next.
struct Waiting<'a> {
    first_group: usize,
    scale: &'a PanelScale,
    panel: usize,
}

/// Multiplies two blocks of rows with all panels, and adds the products to `sums`. A cluster is scaled while the next one is
/// multiplied: vectors that read what a tile has just written, and the other way round, wait long. False as
/// [`multiply_rows`].
///
/// # Safety
/// The conditions of [`multiply_rows`]; tiles are configured for the depth of the panels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
unsafe fn add_clusters<'a, R: TileRows<'a>, const GROUPS: usize>(
    blocks: &[R; 2],
    (panels, x): (&Panels, &[f32]),
    k: usize,
    sums: &mut [Sums],
) -> bool {
    let cluster_size = panels.shape.group_size * GROUPS;
    let lines_per_cluster = panels.shape.lines();
    let steps = k.div_ceil(STEP);
    let clusters_per_chunk = CHUNK_TILES * STEP / cluster_size;
    let mut left = [[Line::ZERO; CHUNK_TILES * ROWS]; 2];
    let mut counts: [Counts; 2] = [[[[Line::ZERO; ROWS]; 2]; LIMBS]; 2];
    let mut turn = 0;
    for (chunk, first_step) in (0..steps).step_by(CHUNK_TILES).enumerate() {
        let end_step = (first_step + CHUNK_TILES).min(steps);
        let first_cluster = chunk * clusters_per_chunk;
        let end_cluster = (first_cluster + clusters_per_chunk).min(panels.clusters);
        let chunk_steps = first_step..end_step;
        if !blocks.iter().all(|block| block.keeps_precision(&chunk_steps, x)) {
            return false;
        }
        for pass in 0..blocks[0].passes(&chunk_steps).max(blocks[1].passes(&chunk_steps)) {
            // SAFETY: `left` has the lines of a chunk's tiles, and `panels` all its clusters; the pointers into them stay inside,
            // as clusters and steps end with K.
            unsafe {
                for (block, left) in blocks.iter().zip(&mut left) {
                    if chunk_steps.len() < CHUNK_TILES {
                        left.fill(Line::ZERO); // the last cluster may be incomplete
                    }
                    block.unpack(chunk_steps.clone(), pass, left.as_mut_ptr());
                }
                let mut waiting: Option<Waiting> = None;
                for panel in 0..sums.len() {
                    for cluster in first_cluster..end_cluster {
                        let index = panel * panels.clusters + cluster;
                        let right = amx_tile::bytes(&panels.lines[index * lines_per_cluster..]);
                        let at = (cluster - first_cluster) * cluster_size;
                        let at = at / 64 * ROWS * 64 + at % 64;
                        let left = [amx_tile::bytes(&left[0]).add(at), amx_tile::bytes(&left[1]).add(at)];
                        multiply::<0, 1>(left, right, panels.shape, 0, &mut counts[turn]);
                        multiply::<2, 3>(left, right, panels.shape, 1, &mut counts[turn]);
                        multiply::<0, 1>(left, right, panels.shape, 2, &mut counts[turn]);
                        turn ^= 1;
                        if let Some(waiting) = waiting {
                            flush::<R, GROUPS>(
                                blocks,
                                pass,
                                &waiting,
                                &counts[turn],
                                &mut sums[waiting.panel],
                            );
                        }
                        let first_group = cluster * GROUPS;
                        waiting = Some(Waiting { first_group, scale: &panels.scales[index], panel });
                    }
                }
                if let Some(waiting) = waiting {
                    flush::<R, GROUPS>(blocks, pass, &waiting, &counts[turn ^ 1], &mut sums[waiting.panel]);
                }
            }
        }
    }
    true
}

/// Multiplies a cluster of two blocks of rows with one limb of a panel's activations.
///
/// # Safety
/// Tiles are configured for `depth`; `left` is valid for the tiles of a cluster, `right` for those of all limbs.
#[inline(always)]
unsafe fn multiply<const S0: u8, const S1: u8>(
    left: [*const u8; 2],
    right: *const u8,
    Shape { tiles, depth, .. }: Shape,
    limb: usize,
    counts: &mut Counts,
) {
    // SAFETY: tiles are configured, and the offsets stay inside the cluster's tiles, for which the pointers are valid.
    unsafe {
        amx_tile::zero::<S0>();
        amx_tile::zero::<S1>();
        for tile in 0..tiles {
            let right = right.add((tile * LIMBS + limb) * 16 * depth);
            amx_tile::load::<RIGHT>(right, 64);
            if limb == 0 || tiles > 1 {
                amx_tile::load::<{ LEFT[0] }>(left[0].add(tile * 64 * ROWS), 64);
                amx_tile::load::<{ LEFT[1] }>(left[1].add(tile * 64 * ROWS), 64);
            }
            amx_tile::multiply_int8::<S0, { LEFT[0] }, RIGHT>();
            amx_tile::multiply_int8::<S1, { LEFT[1] }, RIGHT>();
        }
        amx_tile::store::<S0>(counts[limb][0].as_mut_ptr());
        amx_tile::store::<S1>(counts[limb][1].as_mut_ptr());
    }
}

/// Adds the sums of a cluster, scaled, and the bias term.
///
/// # Safety
/// The caller enables the features; the blocks have the group and the pass that wait.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
unsafe fn flush<'a, R: TileRows<'a>, const GROUPS: usize>(
    blocks: &[R; 2],
    pass: usize,
    waiting: &Waiting,
    counts: &Counts,
    sums: &mut Sums,
) {
    // SAFETY: `params` has scales and biases of sixteen rows and all groups; lines are aligned vectors.
    unsafe {
        let units = _mm512_load_ps(waiting.scale.units.0.as_ptr().cast());
        let group_sums = _mm512_load_ps(waiting.scale.sums.0.as_ptr().cast());
        let weights = [_mm512_set1_ps(Group::WEIGHTS[0]), _mm512_set1_ps(Group::WEIGHTS[1])];
        for (block, sums) in sums.iter_mut().enumerate() {
            let Some((scales, biases, stride)) = blocks[block].params(pass) else { continue };
            for (row, sum) in sums.iter_mut().enumerate() {
                let at = row * stride + waiting.first_group;
                let mut count = float(&counts[2][block][row]);
                count = _mm512_fmadd_ps(float(&counts[1][block][row]), weights[1], count);
                count = _mm512_fmadd_ps(float(&counts[0][block][row]), weights[0], count);
                let scale = repeated::<GROUPS>(scales.add(at));
                let mut total = _mm512_load_ps(sum.0.as_ptr().cast());
                total = _mm512_fmadd_ps(_mm512_mul_ps(count, units), scale, total);
                if R::BIASES {
                    total = _mm512_fmadd_ps(repeated::<GROUPS>(biases.add(at)), group_sums, total);
                }
                _mm512_store_ps(sum.0.as_mut_ptr().cast(), total);
            }
        }
    }
}

/// The numbers of a cluster's groups, repeated.
///
/// # Safety
/// `from` is valid for `GROUPS` numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn repeated<const GROUPS: usize>(from: *const f32) -> __m512 {
    // SAFETY: one or two numbers are read, `GROUPS`.
    unsafe {
        match GROUPS {
            2 => _mm512_castpd_ps(_mm512_set1_pd(from.cast::<f64>().read_unaligned())),
            _ => _mm512_set1_ps(*from),
        }
    }
}

/// The sums of lanes, as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn float(line: &Line) -> __m512 {
    // SAFETY: a line is an aligned vector.
    _mm512_cvtepi32_ps(unsafe { _mm512_load_si512(line.0.as_ptr().cast()) })
}
