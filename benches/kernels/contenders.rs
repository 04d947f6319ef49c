//! Ways to multiply, each with as many copies of its weights as keep them out of the second-level cache.

use crate::accuracy::{self, Exact};
use crate::options::Activations;
use crate::pools::Pools;
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_quant::QuantFormat;
use half::f16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::borrow::Cow;
use std::ops::Range;

const CHECKED_ROWS: usize = 8;

pub type Multiply = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// One way to multiply.
pub struct Contender<'p> {
    pub name: String,
    pub library: &'static str,
    /// Of what one copy reads: weights and scales.
    pub bytes: usize,
    pub copies: Vec<Multiply>,
    /// Some of what the first copy should give.
    pub exact: Exact<'p>,
}

/// Rows of a weight whose products are checked: the first, the last, and some in between.
pub fn checked_rows(n: usize) -> Vec<Range<usize>> {
    let size = CHECKED_ROWS.min(n);
    [0, n / 2, n - size].into_iter().map(|start| start..(start + size).min(n)).collect()
}

/// The same, with their weights.
pub fn checked(
    n: usize,
    decoded: impl Fn(Range<usize>) -> Result<Vec<Vec<f32>>>,
) -> Result<Vec<(usize, Vec<f32>)>> {
    let mut all = Vec::new();
    for rows in checked_rows(n) {
        all.extend(rows.clone().zip(decoded(rows)?));
    }
    Ok(all)
}

/// What to compare.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Dense,
    Quantized(QuantFormat),
    Ggml(GgmlDType),
}

/// `affine`, for lists of constants.
pub const fn affine(bits: usize, group_size: usize) -> Kind {
    Kind::Quantized(QuantFormat::affine_opt(bits, group_size).unwrap())
}

/// Everything to compare, in this order: baselines lie between the formats.
pub const KINDS: [Kind; 16] = [
    Kind::Dense,
    affine(4, 64),
    Kind::Quantized(QuantFormat::MXFP4),
    Kind::Quantized(QuantFormat::NVFP4),
    Kind::Ggml(GgmlDType::Q4_0),
    affine(8, 64),
    Kind::Quantized(QuantFormat::MXFP8),
    Kind::Ggml(GgmlDType::Q8_0),
    affine(2, 64),
    affine(3, 64),
    affine(5, 64),
    affine(6, 64),
    Kind::Ggml(GgmlDType::Q4K),
    affine(1, 64),
    affine(4, 32),
    affine(4, 128),
];

impl Kind {
    pub fn name(self) -> String {
        match self {
            Self::Dense => "cuBLAS dense".into(),
            Self::Quantized(format) => format!("candle-quant {format}"),
            Self::Ggml(dtype) => format!("candle {dtype:?}"),
        }
    }

    /// For products with a weight `[n, k]`.
    pub fn make<'p>(
        self,
        pools: &'p Pools,
        (n, k): (usize, usize),
        dtype: Activations,
    ) -> Result<Contender<'p>> {
        match self {
            Self::Dense => dense(pools, (n, k), dtype),
            Self::Quantized(format) => quantized(pools, format, (n, k), dtype),
            Self::Ggml(ggml_dtype) => ggml(pools, ggml_dtype, (n, k)),
        }
    }
}

fn quantized<'p>(
    pools: &'p Pools,
    format: QuantFormat,
    (n, k): (usize, usize),
    dtype: Activations,
) -> Result<Contender<'p>> {
    let packed = pools.packed(format, &[n, k], dtype)?;
    let bytes = packed.weight(0)?.size_in_bytes();
    let multiply = |copy| -> Result<Multiply> {
        let weight = packed.weight(copy)?;
        Ok(Box::new(move |x: &Tensor| weight.matmul(x, None)))
    };
    Ok(Contender {
        name: format.to_string(),
        library: "candle-quant",
        bytes,
        copies: (0..pools.copies(bytes)).map(multiply).collect::<Result<_>>()?,
        exact: accuracy::products(checked(n, |rows| packed.decoded(0, rows))?),
    })
}

fn dense<'p>(pools: &'p Pools, (n, k): (usize, usize), dtype: Activations) -> Result<Contender<'p>> {
    let pool = pools.dense(dtype)?;
    let bytes = n * k * 2;
    let multiply = |copy| -> Result<Multiply> {
        let transposed = pool.view(copy, &[n, k])?.t()?;
        Ok(Box::new(move |x: &Tensor| x.matmul(&transposed)))
    };
    let decoded = |rows| pool.rows(0, &[n, k], rows)?.to_dtype(DType::F32)?.to_vec2();
    Ok(Contender {
        name: "dense".into(),
        library: "cuBLAS",
        bytes,
        copies: (0..pools.copies(bytes)).map(multiply).collect::<Result<_>>()?,
        exact: accuracy::products(checked(n, decoded)?),
    })
}

fn ggml<'p>(pools: &'p Pools, dtype: GgmlDType, (n, k): (usize, usize)) -> Result<Contender<'p>> {
    let (block, size) = (dtype.block_size(), dtype.type_size());
    if k % block != 0 {
        candle_core::bail!("K = {k} is not whole blocks of {block}");
    }
    let row_bytes = k / block * size;
    let data = random_blocks(size, if dtype == GgmlDType::Q4K { 2 } else { 1 }, n * row_bytes);
    let decoded = |rows: Range<usize>| {
        let part = Cow::Borrowed(&data[rows.start * row_bytes..rows.end * row_bytes]);
        let part = QTensor::new(QStorage::from_data(part, &Device::Cpu, dtype)?, (rows.len(), k))?;
        part.dequantize(&Device::Cpu)?.to_vec2::<f32>()
    };
    let multiply = |_| -> Result<Multiply> {
        let storage = QStorage::from_data(Cow::Borrowed(&data), &pools.gpu.device, dtype)?;
        let weight = QMatMul::from_qtensor(QTensor::new(storage, (n, k))?)?;
        Ok(Box::new(move |x: &Tensor| weight.forward(x)))
    };
    Ok(Contender {
        name: format!("{dtype:?}"),
        library: "candle",
        bytes: data.len(),
        copies: (0..pools.copies(data.len())).map(multiply).collect::<Result<_>>()?,
        exact: accuracy::products(checked(n, decoded)?),
    })
}

/// GGML blocks of random codes that begin with `scales` small f16 numbers.
fn random_blocks(size: usize, scales: usize, bytes: usize) -> Vec<u8> {
    const BLOCKS: usize = 4096;
    let mut rng = StdRng::seed_from_u64(2);
    let mut some: Vec<u8> = (0..BLOCKS * size).map(|_| rng.random()).collect();
    for block in some.chunks_exact_mut(size) {
        for scale in block.chunks_exact_mut(2).take(scales) {
            scale.copy_from_slice(&f16::from_f32(rng.random_range(0.005..0.015)).to_le_bytes());
        }
    }
    let mut all = some.repeat(bytes.div_ceil(some.len()));
    all.truncate(bytes);
    all
}
