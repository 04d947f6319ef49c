//! Dense weights of a step, in the dtype in which they are stored: products with x in f32, which no copy of a weight is made for.
//!
//! A few rows of x are multiplied row by row of the weight, which is read once; many by the `gemm` crate, some rows of the
//! weight at a time.

use super::attention::{Bf16, Numbers, F16, F32};
#[cfg(target_arch = "aarch64")]
use super::isa::neon::Neon;
use super::isa::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::isa::{avx2::Avx2, avx512::Avx512};
use super::isa::{InstructionSet, Simd};
use super::{f32::multiply_add, tasks};
use crate::format::Real;
use candle_core::{bail, CpuStorage, Result, Storage, Tensor};
use half::{bf16, f16};
use std::borrow::Cow;

/// Rows of a weight that are widened and multiplied at a time: as many as the `gemm` crate takes without a copy of them.
const WIDENED: usize = 48;

/// Rows and columns of a square that is transposed at a time.
const SQUARE: usize = 32;

/// Numbers one after another.
#[derive(Clone, Copy, Debug)]
enum Stored<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> Stored<'a> {
    /// Rows of `k` numbers from `first` on, at most `count`.
    fn rows(self, k: usize, first: usize, count: usize) -> Self {
        let range = |len: usize| {
            let start = first.saturating_mul(k).min(len);
            start..start.saturating_add(count.saturating_mul(k)).min(len)
        };
        match self {
            Self::F32(all) => Self::F32(all.get(range(all.len())).unwrap_or_default()),
            Self::F16(all) => Self::F16(all.get(range(all.len())).unwrap_or_default()),
            Self::Bf16(all) => Self::Bf16(all.get(range(all.len())).unwrap_or_default()),
        }
    }

    fn widened(self) -> Cow<'a, [f32]> {
        fn all<T: Real>(stored: &[T]) -> Vec<f32> {
            let mut wide = vec![0.; stored.len()];
            T::widen(stored, &mut wide);
            wide
        }
        match self {
            Self::F32(stored) => Cow::Borrowed(stored),
            Self::F16(stored) => Cow::Owned(all(stored)),
            Self::Bf16(stored) => Cow::Owned(all(stored)),
        }
    }
}

/// What `read` makes of the numbers of a contiguous matrix on a CPU, and of its columns.
fn with_stored<T>(matrix: &Tensor, read: impl FnOnce(Stored, usize) -> Result<T>) -> Result<T> {
    let (storage, layout) = matrix.storage_and_layout();
    let (Some((start, end)), [.., k]) = (layout.contiguous_offsets(), layout.dims()) else {
        bail!("a contiguous matrix is needed here, found layout {layout:?}")
    };
    let Storage::Cpu(storage) = &*storage else { bail!("a matrix on the CPU is needed here") };
    #[allow(clippy::wildcard_enum_match_arm, reason = "plans have no other dtypes")]
    let stored = match storage {
        CpuStorage::F32(all) => Stored::F32(all.get(start..end).unwrap_or_default()),
        CpuStorage::F16(all) => Stored::F16(all.get(start..end).unwrap_or_default()),
        CpuStorage::BF16(all) => Stored::Bf16(all.get(start..end).unwrap_or_default()),
        _ => bail!("a matrix of {:?} in a step plan", matrix.dtype()),
    };
    read(stored, *k)
}

/// A row of a matrix in f32.
pub(super) fn row(matrix: &Tensor, index: usize) -> Result<Vec<f32>> {
    with_stored(matrix, |stored, k| Ok(stored.rows(k, index, 1).widened().into_owned()))
}

/// Products `[count, rows of x]` of some rows of a matrix `[N, K]`, from `first` on, and rows of x, by this thread.
pub(super) fn few(
    isa: &InstructionSet,
    matrix: &Tensor,
    first: usize,
    count: usize,
    x: &[f32],
) -> Result<Vec<f32>> {
    with_stored(matrix, |stored, k| {
        let mut products = vec![0.; count * (x.len() / k.max(1))];
        dots(isa, Dots { weight: stored.rows(k, first, count), k, x, products: &mut products });
        Ok(products)
    })
}

/// Products `[rows of x, N]` of all rows of a matrix `[N, K]` and rows of x, and what is added to each column, by all threads.
pub(super) fn many(matrix: &Tensor, x: &[f32], bias: Option<&[f32]>) -> Result<Vec<f32>> {
    with_stored(matrix, |stored, k| {
        let n = matrix.dims().first().copied().unwrap_or(0);
        let rows = x.len() / k.max(1);
        let columns = transposed(x, k);
        // [N, rows of x].
        let mut products = vec![0.; n * rows];
        let chunks = products.chunks_mut((WIDENED * rows).max(1));
        tasks::for_each(chunks, |chunk, products| {
            let first = chunk * WIDENED;
            if let Some(bias) = bias.and_then(|bias| bias.get(first..)) {
                for (products, bias) in products.chunks_exact_mut(rows.max(1)).zip(bias) {
                    products.fill(*bias);
                }
            }
            let count = products.len() / rows.max(1);
            let weight = stored.rows(k, first, count).widened();
            multiply_add((rows, count, k), (&columns, rows), &weight, products);
        });
        Ok(transposed(&products, rows))
    })
}

/// A matrix of rows of `width`, its columns as rows.
fn transposed(matrix: &[f32], width: usize) -> Vec<f32> {
    let width = width.max(1);
    let height = matrix.len() / width;
    let mut columns = vec![0.; matrix.len()];
    tasks::for_each(columns.chunks_mut((SQUARE * height).max(1)), |chunk, columns| {
        let first = chunk * SQUARE;
        for top in (0..height).step_by(SQUARE) {
            for (column, out) in columns.chunks_exact_mut(height).enumerate() {
                let rows = matrix.iter().skip(top * width + first + column).step_by(width);
                out.iter_mut().skip(top).take(SQUARE).zip(rows).for_each(|(out, number)| *out = *number);
            }
        }
    });
    columns
}

/// Products of rows of a weight and rows of x, `k` numbers each.
struct Dots<'a> {
    weight: Stored<'a>,
    k: usize,
    x: &'a [f32],
    /// `[rows of the weight, rows of x]`.
    products: &'a mut [f32],
}

/// Numbers of a weight.
trait Number: Real {
    type Vectors: Numbers;
}

impl Number for f32 {
    type Vectors = F32;
}

impl Number for f16 {
    type Vectors = F16;
}

impl Number for bf16 {
    type Vectors = Bf16;
}

/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn each_row<S: Simd, T: Number>(weight: &[T], k: usize, x: &[f32], products: &mut [f32]) {
    let k = k.max(1);
    let rows = x.len() / k;
    for (weight, products) in weight.chunks_exact(k).zip(products.chunks_exact_mut(rows.max(1))) {
        let (mut x, mut products) = (x.chunks_exact(k), products);
        // SAFETY: rows of k numbers; the caller vouches for the features.
        unsafe {
            while products.len() >= 4 {
                let (of_four, rest) = products.split_at_mut(4);
                dot::<S, T, 4, 2>(weight, std::array::from_fn(|_| x.next().unwrap_or_default()), of_four);
                products = rest;
            }
            if products.len() >= 2 {
                let (of_two, rest) = products.split_at_mut(2);
                dot::<S, T, 2, 4>(weight, std::array::from_fn(|_| x.next().unwrap_or_default()), of_two);
                products = rest;
            }
            if let [_] = products {
                dot::<S, T, 1, 8>(weight, [x.next().unwrap_or_default()], products);
            }
        }
    }
}

/// A row of a weight times `M` rows of x, in `VECTORS` vectors of sums for each.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "sums have to stay in registers")]
unsafe fn dot<S: Simd, T: Number, const M: usize, const VECTORS: usize>(
    weight: &[T],
    x: [&[f32]; M],
    products: &mut [f32],
) {
    let k = x.iter().fold(weight.len(), |k, x| k.min(x.len()));
    let whole = k - k % S::LANES;
    // SAFETY: vectors lie within `whole` numbers, which all rows have; the caller vouches for the features.
    unsafe {
        let row = weight.as_ptr().cast::<u8>();
        let mut sums = [[S::zero(); VECTORS]; M];
        let mut element = 0;
        while element + VECTORS * S::LANES <= whole {
            for vector in 0..VECTORS {
                let at = element + vector * S::LANES;
                let numbers = T::Vectors::load::<S>(row, at);
                for m in 0..M {
                    sums[m][vector] = S::mul_add(numbers, S::load(x[m].as_ptr().add(at)), sums[m][vector]);
                }
            }
            element += VECTORS * S::LANES;
        }
        while element < whole {
            let numbers = T::Vectors::load::<S>(row, element);
            for m in 0..M {
                sums[m][0] = S::mul_add(numbers, S::load(x[m].as_ptr().add(element)), sums[m][0]);
            }
            element += S::LANES;
        }
        for m in 0..M {
            let mut sum = sums[m][0];
            for vector in 1..VECTORS {
                sum = S::add(sum, sums[m][vector]);
            }
            let rest = weight.iter().zip(x[m]).skip(whole).map(|(a, b)| a.to_f32() * b).sum::<f32>();
            if let Some(product) = products.get_mut(m) {
                *product = S::sum(sum) + rest;
            }
        }
    }
}

/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn run<S: Simd>(task: Dots) {
    let Dots { weight, k, x, products } = task;
    // SAFETY: the caller vouches for the features.
    unsafe {
        match weight {
            Stored::F32(weight) => each_row::<S, f32>(weight, k, x, products),
            Stored::F16(weight) => each_row::<S, f16>(weight, k, x, products),
            Stored::Bf16(weight) => each_row::<S, bf16>(weight, k, x, products),
        }
    }
}

/// [`run`] in a function that enables the features of an instruction set.
macro_rules! entry {
    ($isa:ty, $task:expr, $($features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn entry(task: Dots) {
            // SAFETY: `entry` enables the features.
            unsafe { run::<$isa>(task) }
        }
        // SAFETY: the value of the instruction set proves that the CPU has its features.
        unsafe { entry($task) }
    }};
}

fn dots(isa: &InstructionSet, task: Dots) {
    match isa {
        InstructionSet::Portable(_) => entry!(Portable, task,),
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon(_) | InstructionSet::NeonDotprod(_) | InstructionSet::NeonI8mm(_) => {
            entry!(Neon, task, "neon")
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2(_) => entry!(Avx2, task, "avx2,fma,f16c"),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512(_) | InstructionSet::Avx512Vnni(_) | InstructionSet::Avx512Amx(_) => {
            entry!(Avx512, task, "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::tested;
    use super::*;
    use candle_core::{DType, Device};

    fn numbers(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|at| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1001. - 1.).collect()
    }

    /// Products in f64, of the numbers as they are stored.
    fn expected(weight: &Tensor, x: &[f32]) -> Vec<Vec<f64>> {
        let weight: Vec<Vec<f64>> = weight.to_dtype(DType::F64).unwrap().to_vec2().unwrap();
        let dot = |x: &[f32], row: &Vec<f64>| row.iter().zip(x).map(|(a, b)| a * f64::from(*b)).sum();
        let k = weight[0].len();
        x.chunks(k).map(|x| weight.iter().map(|row| dot(x, row)).collect()).collect()
    }

    #[test]
    fn products_are_those_of_the_numbers_that_are_stored() {
        for (n, k) in [(1, 1), (5, 33), (50, 64), (97, 130), (49, 300)] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let weight = Tensor::from_vec(numbers(n * k, 1), (n, k), &Device::Cpu).unwrap();
                let weight = weight.to_dtype(dtype).unwrap();
                for rows in [1, 2, 3, 4, 7, 16, 40] {
                    let (x, bias) = (numbers(rows * k, 2), numbers(n, 3));
                    let expected = expected(&weight, &x);
                    let check = |found: &dyn Fn(usize, usize) -> f32, bias: &[f32], what: &str| {
                        for (row, expected) in expected.iter().enumerate() {
                            for (output, expected) in expected.iter().enumerate() {
                                let added = bias.get(output).copied().unwrap_or(0.);
                                let far = (f64::from(found(row, output)) - expected - f64::from(added)).abs();
                                assert!(
                                    far < 1e-5 * (k as f64).sqrt(),
                                    "{what} {n}x{k} {dtype:?} {rows}: {far}"
                                );
                            }
                        }
                    };
                    for isa in tested() {
                        let (first, count) = (n / 3, n - n / 3);
                        let found = few(isa, &weight, first, count, &x).unwrap();
                        assert_eq!(found.len(), count * rows);
                        let of = |row: usize, output: usize| match output.checked_sub(first) {
                            Some(output) => found[output * rows + row],
                            None => expected[row][output] as f32,
                        };
                        check(&of, &[], "few");
                    }
                    let found = many(&weight, &x, Some(&bias)).unwrap();
                    check(&|row, output| found[row * n + output], &bias, "many");
                    let found = many(&weight, &x, None).unwrap();
                    check(&|row, output| found[row * n + output], &[], "many without a bias");
                }
                let stored: Vec<Vec<f32>> = weight.to_dtype(DType::F32).unwrap().to_vec2().unwrap();
                assert_eq!(row(&weight, n - 1).unwrap(), stored[n - 1]);
            }
        }
    }
}
