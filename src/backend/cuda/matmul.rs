//! `x * weight^T`: GEMV on tensor cores, SIMT in fp32, or dequantized weights and cuBLAS.

use super::bindings::{CqFillBias, CqFinish, CqOperand, CqSimt, CQ_ACTIVATION_SILU, CQ_SIMT_SHARED_BYTES};
use super::card::Card;
use super::cublas;
use super::formats::FormatKernels;
use super::gemv_call::{FusedNorm, GemvCall, GemvLaunch, MOST_WEIGHTS, PLAIN};
use super::kernel::Kernel;
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, float_dtype, u32_of, Address, Locked, View};
use super::operand::{are_alike, has_narrow_scales, LockedOperand, OperandAddresses, OperandPointers};
use super::plan::{self, Circumstances, Route};
use super::tiles::{self, Tiles};
use super::tiles_call::{self, TilesCall};
use super::{dequantize, workspace};
use crate::backend::{unsupported_dtype, Epilogue, NormOfX, Operand};
use crate::QuantFormat;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// `x` `[.., K]` times a matrix `[N, K]`.
pub(crate) fn matmul(
    operand: Operand,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let [.., n, _] = operand.weight.dims()[..] else { bail!("a weight has at least two dimensions") };
    let mut dims = layout.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = n;
    }
    let x = View { storage, layout };
    Ok((one_by_one(operand, &[(0, 0)], x, layout.shape().elem_count())?, Shape::from(dims)))
}

/// For each of `pairs` an entry `[M, K]` of `x` `[.., M, K]` times a matrix of a stack: (matrix, entry).
pub(crate) fn stacked(operand: Operand, pairs: &[(usize, usize)], x: &Tensor) -> Result<Tensor> {
    let [.., n, _] = operand.weight.dims()[..] else { bail!("a weight has at least two dimensions") };
    let [.., m, k] = x.dims()[..] else { bail!("x for a stack has at least two dimensions") };
    let x = Locked::new(x);
    let storage = one_by_one(operand, pairs, x.view()?, m * k)?;
    Ok(Tensor::from_storage(Storage::Cuda(storage), (pairs.len(), m, n), BackpropOp::none(), false))
}

/// One matmul after another, `[pairs, M, N]`. An entry of x has so many `elements`.
fn one_by_one(operand: Operand, pairs: &[(usize, usize)], x: View, elements: usize) -> Result<CudaStorage> {
    let device = x.storage.device();
    let stream = device.cuda_stream();
    let locked = LockedOperands::new(&[operand], x, &stream)?;
    let kernels = FormatKernels::of(operand.weight.format())?;
    let [.., n, k] = operand.weight.dims()[..] else { bail!("a weight has at least two dimensions") };
    let m = elements / k;
    let mut outputs = allocate(device, &Shape::from((pairs.len(), m, n)), locked.x.dtype())?;
    if m == 0 {
        return Ok(outputs);
    }
    let size = locked.x.dtype().size_in_bytes();
    let held = locked.hold(&stream)?;
    let y = address_mut(&mut outputs, &stream)?;
    let circumstances = locked.circumstances(Card::of(stream.context())?);
    let route = plan::route(kernels, operand.weight.format(), m, k, circumstances);
    for (index, (matrix, entry)) in pairs.iter().enumerate() {
        let operands_of_pair =
            held.operands.iter().map(|operand| operand.pointers(*matrix)).collect::<Result<Vec<_>>>()?;
        let matmul = Matmul {
            device,
            stream: &stream,
            format: operand.weight.format(),
            kernels,
            m,
            k,
            x: held.x.get() + (entry * elements * size) as u64,
            x_dtype: locked.x.dtype(),
            norm: None,
            operands: &operands_of_pair,
            y: &[y.get() + (index * m * n * size) as u64],
            gated: false,
            residual: 0,
        };
        match route {
            Route::Gemv if matmul.gemv()? => {}
            Route::Gemv | Route::Simt => matmul.simt()?,
            Route::Tiles if tiles::can_index(operand.weight.format(), n, k) => matmul.tiles()?,
            Route::Tiles => matmul.simt()?,
            Route::Dense => matmul.dense()?,
        }
    }
    drop(y);
    Ok(outputs)
}

/// Several matmuls with the same x in one launch, or what [`Epilogue`] makes of them; none if the
/// weights or x do not allow one launch.
pub(crate) fn fused(
    operands: &[Operand],
    x: &Tensor,
    norm: Option<NormOfX>,
    epilogue: Epilogue,
) -> Result<Option<Vec<Tensor>>> {
    let Some(format) = operands.first().map(|operand| operand.weight.format()) else { return Ok(None) };
    let [leading @ .., k] = x.dims() else { bail!("x has at least one dimension") };
    let (k, m) = (*k, leading.iter().product::<usize>());
    let locked_x = Locked::new(x);
    let x = locked_x.view()?;
    let device = x.storage.device();
    let stream = device.cuda_stream();
    let locked = LockedOperands::new(operands, x, &stream)?;
    let alike = operands.iter().all(|operand| operand.weight.format() == format);
    let kernels = FormatKernels::of(format)?;
    let route = plan::route(kernels, format, m, k, locked.circumstances(Card::of(stream.context())?));
    let can_index = |operand: &Operand| {
        tiles::can_index(format, operand.weight.dims().first().copied().unwrap_or_default(), k)
    };
    let has_kernel = route == Route::Gemv || (route == Route::Tiles && operands.iter().all(can_index));
    let fits = has_kernel && operands.len() <= MOST_WEIGHTS;
    if !(alike && fits) || m == 0 {
        return Ok(None);
    }
    let mut outputs = Vec::with_capacity(operands.len());
    for operand in operands.iter().take(epilogue.results(operands.len())) {
        let [n, _] = operand.weight.dims()[..] else { bail!("one launch multiplies matrices") };
        let shape = Shape::from([leading, &[n]].concat());
        outputs.push((allocate(device, &shape, x.dtype())?, shape));
    }
    {
        let held = locked.hold(&stream)?;
        let pointers = held.operands.iter().map(|operand| operand.pointers(0)).collect::<Result<Vec<_>>>()?;
        let gated = matches!(epilogue, Epilogue::Swiglu);
        if gated && !are_alike(&pointers) {
            return Ok(None);
        }
        let residual = epilogue.residual().map(Locked::new);
        let residual = residual.as_ref().map(|residual| residual.view()?.address(&stream)).transpose()?;
        let locked_norm = norm.map(|norm| (Locked::new(norm.weight), norm.eps));
        let norm = match &locked_norm {
            Some((weight, eps)) => Some((weight.view()?.address(&stream)?, *eps)),
            None => None,
        };
        let addresses: Vec<Address> =
            outputs.iter_mut().map(|(storage, _)| address_mut(storage, &stream)).collect::<Result<_>>()?;
        let y: Vec<u64> = addresses.iter().map(Address::get).collect();
        let matmul = Matmul {
            device,
            stream: &stream,
            format,
            kernels,
            m,
            k,
            x: held.x.get(),
            x_dtype: x.dtype(),
            norm: norm.as_ref().map(|(weight, eps)| FusedNorm { weight: weight.get(), eps: *eps }),
            operands: &pointers,
            y: &y,
            gated,
            residual: residual.as_ref().map_or(0, Address::get),
        };
        match route {
            Route::Tiles => matmul.tiles()?,
            Route::Gemv | Route::Simt | Route::Dense if !matmul.gemv()? => return Ok(None),
            Route::Gemv | Route::Simt | Route::Dense => {}
        }
    }
    let tensor =
        |(storage, shape)| Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false);
    Ok(Some(outputs.into_iter().map(tensor).collect()))
}

/// The launch of the fp32 matmul of `[m, k]` at an address.
pub(super) fn simt_launch(
    operand: CqOperand,
    format: QuantFormat,
    (m, k): (usize, usize),
    (x, x_dtype): (u64, DType),
) -> Result<(CqSimt, Grid)> {
    const ROWS_OF_X: usize = 8;
    let params = CqSimt {
        operand,
        x: x as *const _,
        m: u32_of("rows of x", m)?,
        k: u32_of("K", k)?,
        group_size: u32_of("group size", format.group_size())?,
        x_stride: u32_of("K", k)?,
        x_dtype: float_dtype(x_dtype)?,
        unused: 0,
    };
    let rows = operand.matrix.rows as usize;
    let blocks = (rows.div_ceil(plan::SIMT_ROWS), m.div_ceil(ROWS_OF_X));
    Ok((params, Grid { blocks, shared_bytes: CQ_SIMT_SHARED_BYTES as usize }))
}

/// What is multiplied, locked for reading; x is in order.
struct LockedOperands<'a> {
    operands: Vec<LockedOperand<'a>>,
    x: View<'a>,
    /// A copy of x, if it was not.
    realigned: Option<(CudaStorage, Layout)>,
    /// Whether scales and biases are of 16 bits or less: what the tensor cores take.
    narrow_scales: bool,
}

/// Addresses of all that.
struct Held<'a> {
    operands: Vec<OperandAddresses<'a>>,
    x: Address<'a>,
}

impl<'a> LockedOperands<'a> {
    fn new(operands: &[Operand<'a>], x: View<'a>, stream: &CudaStream) -> Result<Self> {
        if !matches!(x.dtype(), DType::F16 | DType::BF16 | DType::F32) {
            return Err(unsupported_dtype("matmul", x.dtype()));
        }
        let realigned = x.realigned(stream)?;
        Ok(Self {
            narrow_scales: operands.iter().all(|operand| has_narrow_scales(operand.weight)),
            realigned: realigned.map(|copy| (copy, Layout::contiguous(x.layout.shape()))),
            operands: operands.iter().map(|operand| LockedOperand::new(*operand)).collect(),
            x,
        })
    }

    fn circumstances(&self, card: Card) -> Circumstances {
        let half = self.x.dtype() != DType::F32;
        Circumstances { half, narrow_scales: self.narrow_scales, fast_cublas: card.fast_cublas }
    }

    fn hold<'b>(&'b self, stream: &'b CudaStream) -> Result<Held<'b>> {
        let x = self.realigned.as_ref().map_or(self.x, |(storage, layout)| View { storage, layout });
        Ok(Held {
            operands: self.operands.iter().map(|operand| operand.addresses(stream)).collect::<Result<_>>()?,
            x: x.address(stream)?,
        })
    }
}

/// A matmul of operands whose addresses the caller holds.
struct Matmul<'a> {
    device: &'a CudaDevice,
    stream: &'a Arc<CudaStream>,
    format: QuantFormat,
    kernels: FormatKernels,
    m: usize,
    k: usize,
    /// `[m, k]`.
    x: u64,
    x_dtype: DType,
    norm: Option<FusedNorm>,
    operands: &'a [OperandPointers],
    /// Where the result of each operand goes, `[m, rows]`; a single one if gated.
    y: &'a [u64],
    /// Whether the result is SwiGLU of two operands.
    gated: bool,
    /// `[m, rows]`, or null.
    residual: u64,
}

impl Matmul<'_> {
    fn bytes_of_x(&self) -> usize {
        self.x_dtype.size_in_bytes()
    }

    /// Launches for up to 16 rows of x each. False if no kernel takes these weights.
    fn gemv(&self) -> Result<bool> {
        let call = GemvCall {
            format: self.format,
            m: self.m,
            k: self.k,
            x: self.x,
            x_dtype: self.x_dtype,
            norm: self.norm,
            operands: self.operands,
            y: self.y,
            gated: self.gated,
            finish: self.finish(),
            residual: self.residual,
        };
        let card = Card::of(self.stream.context())?;
        let Some(launches) = call.launches(card.most_shared_bytes)? else { return Ok(false) };
        for gemv in launches {
            let (grid, GemvLaunch { kernel, plan, mut params }) = (gemv.grid(card), gemv);
            if plan.splits > 1 {
                (params.partial, params.arrivals) = workspace::with(self.stream, |workspace| {
                    workspace.split_sums(plan.partial_sums(), plan.blocks)
                })?;
            }
            // SAFETY: all addresses are those of tensors that are held until after the launch, and of the
            // workspace of this thread and stream. Shapes were checked when the weights were made and by the
            // caller; x begins at a multiple of 16 bytes, as do its rows, since K is a multiple of 16.
            unsafe { launch(self.stream, kernel, grid, &params)? };
        }
        Ok(true)
    }

    fn finish(&self) -> CqFinish {
        match self.gated {
            true => CqFinish { activation: CQ_ACTIVATION_SILU, ..PLAIN },
            false => PLAIN,
        }
    }

    /// x is brought into the order of tensor cores once, for all weights.
    fn tiles(&self) -> Result<()> {
        let card = Card::of(self.stream.context())?;
        let (size, terms) = (self.bytes_of_x(), tiles_call::terms(self.x_dtype));
        let of_launch = tiles_call::rows_of_launch(self.k, self.x_dtype);
        for first in (0..self.m).step_by(of_launch) {
            let rows = of_launch.min(self.m - first);
            let row = |address: u64, columns: usize| address + (first * columns * size) as u64;
            let x = (row(self.x, self.k), self.x_dtype);
            // SAFETY: x is held, has so many rows, which begin at multiples of 16 bytes, since K is a multiple of 16.
            let x = unsafe { tiles_call::prepare(self.stream, self.format, x, (rows, self.k), self.norm)? };
            let of_call = if self.gated { self.operands.len() } else { 1 };
            for (index, (operands, y)) in self.operands.chunks(of_call).zip(self.y).enumerate() {
                let Some(operand) = operands.first() else { continue };
                let columns = operand.matrix.rows as usize;
                let residual = if index == 0 { self.residual } else { 0 };
                let call = TilesCall {
                    format: self.format,
                    x,
                    operands,
                    y: row(*y, columns),
                    y_dtype: self.x_dtype,
                    m: rows,
                    gating: tiles_call::plain_gating(self.gated),
                    finish: self.finish(),
                    residual: if residual == 0 { 0 } else { row(residual, columns) },
                    pairs: None,
                };
                let plan = Tiles::plan(self.format, self.kernels.tiles(), rows * terms, card.shared());
                // SAFETY: as for the GEMV.
                unsafe { call.launch(self.stream, plan)? };
            }
        }
        Ok(())
    }

    /// One weight at a time, of any alignment.
    fn simt(&self) -> Result<()> {
        for (operand, y) in self.operands.iter().zip(self.y) {
            let (params, grid) =
                simt_launch(operand.into_rows(*y), self.format, (self.m, self.k), (self.x, self.x_dtype))?;
            // SAFETY: as for the GEMV.
            unsafe { launch(self.stream, self.kernels.simt(), grid, &params)? };
        }
        Ok(())
    }

    /// Dequantizes rows of the weight to the dtype of x, as many as the scratch holds, while cuBLAS multiplies those
    /// before them; y has the bias in it already.
    fn dense(&self) -> Result<()> {
        let size = self.bytes_of_x();
        for (operand, y) in self.operands.iter().zip(self.y) {
            let rows = operand.matrix.rows as usize;
            let add = !operand.bias.is_null();
            if add {
                self.fill_bias(operand, *y)?;
            }
            let most = plan::rows_of_scratch(self.k, size).min(rows);
            let parts = (0..rows).step_by(most).map(|first| first..rows.min(first + most));
            let fill = |stream: &CudaStream, part, place| {
                let target = (place, self.x_dtype);
                // SAFETY: the matrix is held, and the scratch has room for so many rows.
                unsafe { dequantize::rows_to(stream, self.format, &operand.matrix, part, self.k, target) }
            };
            let multiply = |part: Range<usize>, place| {
                let gemm = cublas::Gemm {
                    m: self.m,
                    n: part.len(),
                    k: self.k,
                    dtype: self.x_dtype,
                    x: self.x,
                    x_stride: self.k,
                    weight: place,
                    transposed: true,
                    y: y + (part.start * size) as u64,
                    y_stride: rows,
                    y_dtype: self.x_dtype,
                    add,
                };
                // SAFETY: x, scratch and y are as large as their dimensions say, and stay until the stream has passed.
                unsafe { cublas::multiply(self.device, gemm) }
            };
            workspace::with(self.stream, |workspace| {
                let scratch = workspace.scratch(most * self.k * size, rows > most)?;
                scratch.each_part(self.stream, parts, fill, multiply)
            })?;
        }
        Ok(())
    }

    fn fill_bias(&self, operand: &OperandPointers, y: u64) -> Result<()> {
        const ROWS_OF_Y: usize = 32;
        let rows = operand.matrix.rows;
        let params = CqFillBias {
            bias: operand.bias,
            y: y as *mut _,
            rows,
            m: u32_of("rows of x", self.m)?,
            bias_dtype: operand.bias_dtype,
            y_dtype: float_dtype(self.x_dtype)?,
        };
        let columns = (rows as usize).div_ceil(plan::THREADS as usize);
        let grid = Grid { blocks: (columns, self.m.div_ceil(ROWS_OF_Y)), shared_bytes: 0 };
        // SAFETY: the bias has as many elements as the weight has rows, y as many for each row of x.
        unsafe { launch(self.stream, Kernel::FillBias, grid, &params) }
    }
}
