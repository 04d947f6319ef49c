//! Ways to multiply, each with as many copies of its weights as keep them out of the second-level cache.

use crate::gpu::Gpu;
use crate::options::Activations;
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_quant::format::ScaleKind;
use candle_quant::{QuantFormat, QuantTensor};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::borrow::Cow;
use std::ops::Range;

/// Copies begin at multiples of this many elements.
const COPY_ALIGNMENT: usize = 256;
/// Random elements made on the host; pools repeat them.
const RANDOM_ELEMENTS: usize = 1 << 22;
const CHECKED_ROWS: usize = 8;

type Multiply = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// One way to multiply by one matrix.
pub struct Contender {
    pub name: String,
    pub library: &'static str,
    /// Of one copy: weights and scales.
    pub bytes: usize,
    pub copies: Vec<Multiply>,
    /// Decoded rows of the first copy, for the error.
    pub checked: Vec<(usize, Vec<f32>)>,
}

/// Rows of an [n, k] product whose error is computed: the first, the last, and some in between.
fn checked_rows(n: usize) -> Vec<Range<usize>> {
    let size = CHECKED_ROWS.min(n);
    [0, n / 2, n - size].into_iter().map(|start| start..(start + size).min(n)).collect()
}

/// Random data on the GPU that weights are views of.
pub struct Pools<'a> {
    gpu: &'a Gpu,
    cold_bytes: usize,
    codes: Tensor,
    /// Without the codes that are NaN in E4M3.
    e4m3_codes: Tensor,
    e4m3_scales: Tensor,
    e8m0_scales: Tensor,
    floats: Vec<FloatPools>,
}

/// Pools of one dtype.
struct FloatPools {
    dtype: DType,
    scales: Tensor,
    biases: Tensor,
    dense: Tensor,
}

impl<'a> Pools<'a> {
    /// For matrices of up to `most` weights.
    pub fn new(gpu: &'a Gpu, cold_bytes: usize, most: usize, dtypes: &[Activations]) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(1);
        let device = &gpu.device;
        let bytes = cold_bytes + 2 * most + (1 << 20);
        let random: Vec<u32> = (0..RANDOM_ELEMENTS).map(|_| rng.random()).collect();
        let bytes_below = |rng: &mut StdRng, low: u8, high: u8| -> Vec<u8> {
            (0..RANDOM_ELEMENTS).map(|_| rng.random_range(low..high)).collect()
        };
        // Every bit 3 of E4M3 is the lowest of its exponent, which is odd in NaN.
        let finite: Vec<u32> = random.iter().map(|word| word & 0xf7f7_f7f7).collect();
        let mut floats = Vec::new();
        for dtype in dtypes.iter().map(|dtype| dtype.dtype()) {
            let mut uniform = |low: f32, high: f32, count| {
                let values: Vec<f32> = (0..RANDOM_ELEMENTS).map(|_| rng.random_range(low..high)).collect();
                pool(float_tensor(&values, dtype)?.to_device(device)?, count)
            };
            floats.push(FloatPools {
                dtype,
                scales: uniform(0.005, 0.015, bytes / 32)?,
                biases: uniform(-0.12, -0.04, bytes / 32)?,
                dense: uniform(-0.05, 0.05, bytes)?,
            });
        }
        Ok(Self {
            gpu,
            cold_bytes,
            codes: pool(Tensor::new(random, device)?, bytes / 4)?,
            e4m3_codes: pool(Tensor::new(finite, device)?, bytes / 4)?,
            e4m3_scales: pool(Tensor::new(bytes_below(&mut rng, 0x20, 0x58), device)?, bytes / 8)?,
            e8m0_scales: pool(Tensor::new(bytes_below(&mut rng, 118, 126), device)?, bytes / 8)?,
            floats,
        })
    }

    /// What floors are measured on, and may move about.
    pub fn memory(&self) -> &Tensor {
        &self.codes
    }

    fn copies(&self, bytes: usize) -> usize {
        self.cold_bytes.div_ceil(bytes).max(2)
    }

    fn floats(&self, dtype: Activations) -> Result<&FloatPools> {
        let found = self.floats.iter().find(|pools| pools.dtype == dtype.dtype());
        found.ok_or_else(|| candle_core::Error::Msg("this dtype was not asked for".into()))
    }

    fn quantized(
        &self,
        format: QuantFormat,
        (n, k): (usize, usize),
        dtype: Activations,
    ) -> Result<Contender> {
        let groups = n * format.groups_per_row(k)?;
        let words = n * format.words_per_row(k)?;
        let floats = self.floats(dtype)?;
        let (codes, scales) = match format.scale_kind() {
            ScaleKind::Float => (&self.codes, &floats.scales),
            ScaleKind::E4m3 => (&self.codes, &self.e4m3_scales),
            ScaleKind::E8m0 if format.bits() == 8 => (&self.e4m3_codes, &self.e8m0_scales),
            ScaleKind::E8m0 => (&self.codes, &self.e8m0_scales),
        };
        let weight = |copy: usize| -> Result<QuantTensor> {
            let biases = match format.has_biases() {
                true => Some(view(&floats.biases, copy, (n, groups / n))?),
                false => None,
            };
            let packed = view(codes, copy, (n, words / n))?;
            Ok(QuantTensor::new(format, packed, view(scales, copy, (n, groups / n))?, biases, None)?)
        };
        let first = weight(0)?;
        let mut checked = Vec::new();
        for rows in checked_rows(n) {
            let part = first.narrow(0, rows.start, rows.len())?.to_device(&Device::Cpu)?;
            checked.extend(rows.zip(part.dequantize(DType::F32)?.to_vec2::<f32>()?));
        }
        let bytes = first.size_in_bytes();
        let multiply = |copy| -> Result<Multiply> {
            let weight = weight(copy)?;
            Ok(Box::new(move |x: &Tensor| weight.matmul(x, None)))
        };
        let copies = (0..self.copies(bytes)).map(multiply).collect::<Result<_>>()?;
        Ok(Contender { name: format.to_string(), library: "candle-quant", bytes, copies, checked })
    }

    fn dense(&self, (n, k): (usize, usize), dtype: Activations) -> Result<Contender> {
        let pool = &self.floats(dtype)?.dense;
        let first = view(pool, 0, (n, k))?;
        let mut checked = Vec::new();
        for rows in checked_rows(n) {
            let part = first.narrow(0, rows.start, rows.len())?.to_device(&Device::Cpu)?;
            checked.extend(rows.zip(part.to_dtype(DType::F32)?.to_vec2::<f32>()?));
        }
        let bytes = n * k * 2;
        let multiply = |copy| -> Result<Multiply> {
            let transposed = view(pool, copy, (n, k))?.t()?;
            Ok(Box::new(move |x: &Tensor| x.matmul(&transposed)))
        };
        let copies = (0..self.copies(bytes)).map(multiply).collect::<Result<_>>()?;
        Ok(Contender { name: "dense".into(), library: "cuBLAS", bytes, copies, checked })
    }

    fn ggml(&self, dtype: GgmlDType, (n, k): (usize, usize)) -> Result<Contender> {
        let (block, size) = (dtype.block_size(), dtype.type_size());
        if k % block != 0 {
            candle_core::bail!("K = {k} is not whole blocks of {block}");
        }
        let row_bytes = k / block * size;
        let data = random_blocks(size, if dtype == GgmlDType::Q4K { 2 } else { 1 }, n * row_bytes);
        let mut checked = Vec::new();
        for rows in checked_rows(n) {
            let part = Cow::Borrowed(&data[rows.start * row_bytes..rows.end * row_bytes]);
            let part = QTensor::new(QStorage::from_data(part, &Device::Cpu, dtype)?, (rows.len(), k))?;
            checked.extend(rows.zip(part.dequantize(&Device::Cpu)?.to_vec2::<f32>()?));
        }
        let multiply = |_| -> Result<Multiply> {
            let storage = QStorage::from_data(Cow::Borrowed(&data), &self.gpu.device, dtype)?;
            let weight = QMatMul::from_qtensor(QTensor::new(storage, (n, k))?)?;
            Ok(Box::new(move |x: &Tensor| weight.forward(x)))
        };
        let copies = (0..self.copies(data.len())).map(multiply).collect::<Result<_>>()?;
        Ok(Contender { name: format!("{dtype:?}"), library: "candle", bytes: data.len(), copies, checked })
    }

    /// Everything to compare, made one after the other: baselines lie between the formats.
    pub fn contenders(&self) -> Vec<Entry<'_, 'a>> {
        let affine = |bits, group_size| Kind::Quantized(QuantFormat::Affine { bits, group_size });
        let kinds = [
            Kind::Dense,
            affine(4, 64),
            Kind::Quantized(QuantFormat::Mxfp4),
            Kind::Quantized(QuantFormat::Nvfp4),
            Kind::Ggml(GgmlDType::Q4_0),
            affine(8, 64),
            Kind::Quantized(QuantFormat::Mxfp8),
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
        kinds.into_iter().map(|kind| Entry { pools: self, kind }).collect()
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Dense,
    Quantized(QuantFormat),
    Ggml(GgmlDType),
}

/// A contender that is not made yet.
pub struct Entry<'p, 'a> {
    pools: &'p Pools<'a>,
    kind: Kind,
}

impl Entry<'_, '_> {
    pub fn name(&self) -> String {
        match self.kind {
            Kind::Dense => "cuBLAS dense".into(),
            Kind::Quantized(format) => format!("candle-quant {format}"),
            Kind::Ggml(dtype) => format!("candle {dtype:?}"),
        }
    }

    pub fn make(&self, shape: (usize, usize), dtype: Activations) -> Result<Contender> {
        match self.kind {
            Kind::Dense => self.pools.dense(shape, dtype),
            Kind::Quantized(format) => self.pools.quantized(format, shape, dtype),
            Kind::Ggml(ggml) => self.pools.ggml(ggml, shape),
        }
    }
}

/// `count` elements and a bit more, the same ones over and over.
fn pool(chunk: Tensor, count: usize) -> Result<Tensor> {
    let times = (count + COPY_ALIGNMENT).div_ceil(chunk.elem_count());
    Tensor::cat(&vec![chunk; times], 0)
}

/// Matrix number `copy` of this shape in a pool.
fn view(pool: &Tensor, copy: usize, (rows, columns): (usize, usize)) -> Result<Tensor> {
    let stride = (rows * columns).next_multiple_of(COPY_ALIGNMENT);
    pool.narrow(0, copy * stride, rows * columns)?.reshape((rows, columns))
}

/// Rounded on the host: the GPU of a test need not have candle's kernels.
pub fn float_tensor(values: &[f32], dtype: DType) -> Result<Tensor> {
    match dtype {
        DType::F16 => {
            Tensor::new(values.iter().map(|value| f16::from_f32(*value)).collect::<Vec<_>>(), &Device::Cpu)
        }
        DType::BF16 => {
            Tensor::new(values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>(), &Device::Cpu)
        }
        other => candle_core::bail!("no activations of {other:?}"),
    }
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
