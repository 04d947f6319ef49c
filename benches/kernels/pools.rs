//! Random data that weights are views of. It is repetitions of what the host has too: what a view holds is known
//! without reading it back.

use crate::gpu::Gpu;
use crate::options::Activations;
use candle_core::{DType, Device, Result, Tensor};
use candle_quant::format::Scale;
use candle_quant::{QuantFormat, QuantTensor};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::ops::Range;

/// Copies begin at multiples of this many elements.
const COPY_ALIGNMENT: usize = 256;
/// Random elements of a pool; the others repeat them.
const RANDOM_ELEMENTS: usize = 1 << 22;
/// What moves by a multiple of this within [`Pools::memory`] changes nothing.
pub const PERIOD_BYTES: usize = RANDOM_ELEMENTS * size_of::<u32>();

/// Random elements on the GPU.
pub struct Pool {
    /// On the host.
    piece: Tensor,
    /// On the GPU: the piece over and over.
    all: Tensor,
}

impl Pool {
    /// `count` elements and a bit more.
    fn new(piece: Tensor, count: usize, device: &Device) -> Result<Self> {
        let times = (count + COPY_ALIGNMENT).div_ceil(piece.elem_count());
        let all = Tensor::cat(&vec![piece.to_device(device)?; times], 0)?;
        Ok(Self { piece, all })
    }

    fn start(copy: usize, dims: &[usize]) -> usize {
        copy * dims.iter().product::<usize>().next_multiple_of(COPY_ALIGNMENT)
    }

    /// Tensor number `copy` of this shape.
    pub fn view(&self, copy: usize, dims: &[usize]) -> Result<Tensor> {
        self.all.narrow(0, Self::start(copy, dims), dims.iter().product())?.reshape(dims)
    }

    /// Some rows of it, `[rows, last dimension]`, on the host.
    pub fn rows(&self, copy: usize, dims: &[usize], rows: Range<usize>) -> Result<Tensor> {
        let columns = dims.last().copied().unwrap_or(0);
        let start = Self::start(copy, dims);
        let (mut at, end) = (start + rows.start * columns, start + rows.end * columns);
        let mut parts = Vec::new();
        while at < end {
            let from = at % self.piece.elem_count();
            let size = (self.piece.elem_count() - from).min(end - at);
            parts.push(self.piece.narrow(0, from, size)?);
            at += size;
        }
        Tensor::cat(&parts, 0)?.reshape((rows.len(), columns))
    }
}

pub struct Pools<'a> {
    pub gpu: &'a Gpu,
    cold_bytes: usize,
    codes: Pool,
    /// Without the codes that are NaN in E4M3.
    e4m3_codes: Pool,
    e4m3_scales: Pool,
    e8m0_scales: Pool,
    floats: Vec<FloatPools>,
}

/// Pools of one dtype.
struct FloatPools {
    dtype: DType,
    scales: Pool,
    biases: Pool,
    dense: Pool,
}

impl<'a> Pools<'a> {
    /// For matrices of up to `most` weights.
    pub fn new(gpu: &'a Gpu, cold_bytes: usize, most: usize, dtypes: &[Activations]) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(1);
        let bytes = cold_bytes + 2 * most + (1 << 20);
        let pool = |piece, count| Pool::new(piece, count, &gpu.device);
        let random: Vec<u32> = (0..RANDOM_ELEMENTS).map(|_| rng.random()).collect();
        let bytes_below = |rng: &mut StdRng, low: u8, high: u8| {
            let bytes: Vec<u8> = (0..RANDOM_ELEMENTS).map(|_| rng.random_range(low..high)).collect();
            Tensor::new(bytes, &Device::Cpu)
        };
        // Every bit 3 of E4M3 is the lowest of its exponent, which is odd in NaN.
        let finite: Vec<u32> = random.iter().map(|word| word & 0xf7f7_f7f7).collect();
        let mut floats = Vec::new();
        for dtype in dtypes.iter().map(|dtype| dtype.dtype()) {
            let mut uniform = |low: f32, high: f32, count| {
                let values: Vec<f32> = (0..RANDOM_ELEMENTS).map(|_| rng.random_range(low..high)).collect();
                pool(float_tensor(&values, dtype)?, count)
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
            codes: pool(Tensor::new(random, &Device::Cpu)?, bytes / 4)?,
            e4m3_codes: pool(Tensor::new(finite, &Device::Cpu)?, bytes / 4)?,
            e4m3_scales: pool(bytes_below(&mut rng, 0x20, 0x58)?, bytes / 8)?,
            e8m0_scales: pool(bytes_below(&mut rng, 118, 126)?, bytes / 8)?,
            floats,
        })
    }

    /// What floors are measured on.
    pub fn memory(&self) -> &Tensor {
        &self.codes.all
    }

    /// So many copies are not in the second-level cache when their turn comes again.
    pub fn copies(&self, bytes: usize) -> usize {
        self.cold_bytes.div_ceil(bytes).max(2)
    }

    fn floats(&self, dtype: Activations) -> Result<&FloatPools> {
        let found = self.floats.iter().find(|pools| pools.dtype == dtype.dtype());
        found.ok_or_else(|| candle_core::Error::Msg("this dtype was not asked for".into()))
    }

    /// Dense weights, and other small numbers.
    pub fn dense(&self, dtype: Activations) -> Result<&Pool> {
        Ok(&self.floats(dtype)?.dense)
    }

    /// Packed weights `[.., N, K]`.
    pub fn packed(&self, format: QuantFormat, dims: &[usize], dtype: Activations) -> Result<PackedPools<'_>> {
        let floats = self.floats(dtype)?;
        let (codes, scales) = match format.scale() {
            Scale::Float => (&self.codes, &floats.scales),
            Scale::E4m3 => (&self.codes, &self.e4m3_scales),
            Scale::E8m0 if format.bits() == 8 => (&self.e4m3_codes, &self.e8m0_scales),
            Scale::E8m0 => (&self.codes, &self.e8m0_scales),
            scale => candle_core::bail!("no pool holds scales of {scale:?}"),
        };
        let biases = format.has_biases().then_some(&floats.biases);
        let [lead @ .., k] = dims else { candle_core::bail!("a shape [.., N, K], not {dims:?}") };
        let of_row = |last: usize| [lead, &[last]].concat();
        let (words, groups) = (of_row(format.words_per_row(*k)?), of_row(format.groups_per_row(*k)?));
        Ok(PackedPools { format, codes, scales, biases, words, groups })
    }
}

/// Where packed weights of one shape are.
pub struct PackedPools<'p> {
    format: QuantFormat,
    codes: &'p Pool,
    scales: &'p Pool,
    biases: Option<&'p Pool>,
    words: Vec<usize>,
    groups: Vec<usize>,
}

impl PackedPools<'_> {
    /// Weight number `copy`.
    pub fn weight(&self, copy: usize) -> Result<QuantTensor> {
        self.with(|pool, dims| pool.view(copy, dims))
    }

    /// Some of its rows, decoded, on the host.
    pub fn decoded(&self, copy: usize, rows: Range<usize>) -> Result<Vec<Vec<f32>>> {
        let weight = self.with(|pool, dims| pool.rows(copy, dims, rows.clone()))?;
        weight.dequantize(DType::F32)?.to_vec2()
    }

    fn with(&self, part: impl Fn(&Pool, &[usize]) -> Result<Tensor>) -> Result<QuantTensor> {
        let biases = self.biases.map(|pool| part(pool, &self.groups)).transpose()?;
        let (codes, scales) = (part(self.codes, &self.words)?, part(self.scales, &self.groups)?);
        Ok(QuantTensor::new(self.format, codes, scales, biases, None)?)
    }
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
