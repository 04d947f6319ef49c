//! `x * weight^T`: tensor cores, fp32, or decoded weights and cuBLAS.

use super::bindings::{CqFillBias, CqGemv, CqSimt, CQ_MAX_WEIGHTS, CQ_STORE, CQ_SWIGLU};
use super::factor::{has_narrow_scales, FactorAddresses, LockedFactor};
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, float_dtype, pointer_or_null, u32_of, Address, Locked, View};
use super::module::Kernel;
use super::plan::{self, Gemv, Outputs, Route};
use super::{dense, workspace};
use crate::backend::{Epilogue, Factor};
use crate::QuantFormat;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor};
use std::sync::Arc;

/// The product with a matrix `[N, K]`, of `x` `[.., K]`.
pub(crate) fn matmul(factor: Factor, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
    let x = View { storage, layout };
    let mut products = multiply(&[factor], x, Epilogue::Store { residual: None }, Others::Allowed)?;
    match products.as_mut().and_then(Vec::pop) {
        Some(product) => Ok(product),
        None => bail!("{:?} has no product with x {layout:?}", factor.weight),
    }
}

/// Several products with the same x in one launch, or what [`Epilogue`] makes of them; none if the
/// weights or x are not such that one launch can do it.
pub(crate) fn fused(factors: &[Factor], x: &Tensor, epilogue: Epilogue) -> Result<Option<Vec<Tensor>>> {
    let x = Locked::new(x);
    let products = multiply(factors, x.view()?, epilogue, Others::Refused)?;
    Ok(products.map(|products| {
        let tensor =
            |(storage, shape)| Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false);
        products.into_iter().map(tensor).collect()
    }))
}

/// The most weights of one launch.
const MOST_WEIGHTS: usize = CQ_MAX_WEIGHTS as usize;

/// Whether other ways than one launch of the tensor-core kernel may be taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Others {
    Allowed,
    Refused,
}

/// A product in the making: x in order, everything at its address.
struct Product<'a> {
    stream: &'a Arc<CudaStream>,
    format: QuantFormat,
    m: usize,
    k: usize,
    x: &'a Address<'a>,
    x_dtype: DType,
    factors: &'a [FactorAddresses<'a>],
    /// Where the result of each factor goes, `[m, rows]`; one alone for SwiGLU.
    y: &'a [u64],
    epilogue: Epilogue<'a>,
    /// `[m, rows]`.
    residual: Option<&'a Address<'a>>,
}

fn multiply(
    factors: &[Factor],
    x: View,
    epilogue: Epilogue,
    others: Others,
) -> Result<Option<Vec<(CudaStorage, Shape)>>> {
    let Some(first) = factors.first() else { return Ok(None) };
    let format = first.weight.format();
    let (device, x_dtype) = (x.storage.device(), x.dtype());
    if !matches!(x_dtype, DType::F16 | DType::BF16 | DType::F32) {
        return Err(crate::backend::unsupported_dtype("matmul", x_dtype));
    }
    let [leading @ .., k] = x.layout.dims() else { bail!("x has at least one dimension") };
    let (k, m) = (*k, leading.iter().product::<usize>());

    let half = x_dtype != DType::F32 && factors.iter().all(|factor| has_narrow_scales(factor.weight));
    let route = plan::route(format, m, k, half);
    let alike = factors.iter().all(|factor| factor.weight.format() == format);
    let few = factors.len() <= MOST_WEIGHTS;
    if others == Others::Refused && (route != Route::Gemv || !alike || !few || m == 0) {
        return Ok(None);
    }

    let stream = device.cuda_stream();
    let rows: Vec<usize> =
        factors.iter().filter_map(|factor| factor.weight.dims().first().copied()).collect();
    let mut products = Vec::with_capacity(factors.len());
    for rows in rows.iter().take(epilogue.results(factors.len())) {
        let shape = Shape::from([leading, &[*rows]].concat());
        products.push((allocate(device, &shape, x_dtype)?, shape));
    }
    if m == 0 {
        return Ok(Some(products));
    }

    let realigned = x.realigned(&stream)?;
    let contiguous = Layout::contiguous(x.layout.shape());
    let x = realigned.as_ref().map_or(x, |storage| View { storage, layout: &contiguous });
    let x = x.address(&stream)?;
    let locked: Vec<LockedFactor> = factors.iter().map(|factor| LockedFactor::new(*factor)).collect();
    let factors: Vec<FactorAddresses> =
        locked.iter().map(|factor| factor.addresses(&stream)).collect::<Result<_>>()?;
    let residual = epilogue.residual().map(Locked::new);
    let residual = residual.as_ref().map(|residual| residual.view()?.address(&stream)).transpose()?;
    let outputs: Vec<Address> =
        products.iter_mut().map(|(storage, _)| address_mut(storage, &stream)).collect::<Result<_>>()?;
    let y: Vec<u64> = outputs.iter().map(Address::get).collect();
    let product = Product {
        stream: &stream,
        format,
        m,
        k,
        x: &x,
        x_dtype,
        factors: &factors,
        y: &y,
        epilogue,
        residual: residual.as_ref(),
    };
    match route {
        Route::Gemv if product.gemv()? => {}
        Route::Gemv if others == Others::Refused => return Ok(None),
        Route::Gemv | Route::Plain => product.simt()?,
        Route::Dense => product.dense(device)?,
    }
    drop(outputs);
    Ok(Some(products))
}

impl Product<'_> {
    fn bytes_of_x(&self) -> usize {
        self.x_dtype.size_in_bytes()
    }

    /// In slabs of up to 16 rows of x. False if no kernel takes these weights.
    fn gemv(&self) -> Result<bool> {
        let addresses = self.factors.iter().map(|factor| factor.matrix().packed as usize);
        let alignment = 1 << addresses.fold(0, |all, address| all | address).trailing_zeros().min(8);
        let rows: Vec<usize> = self.factors.iter().map(|factor| factor.matrix().rows as usize).collect();
        let outputs = match self.epilogue {
            Epilogue::Swiglu => Outputs::Gated,
            Epilogue::Store { .. } => Outputs::Each,
        };
        let mut first_row = 0;
        while first_row < self.m {
            let left = self.m - first_row;
            let Some(plan) = Gemv::plan(self.format, &rows, outputs, left, self.k, alignment) else {
                return Ok(false);
            };
            self.gemv_slab(first_row, plan)?;
            first_row += plan.m;
        }
        Ok(true)
    }

    fn gemv_slab(&self, first_row: usize, plan: Gemv) -> Result<()> {
        let (Some(first), Some(last)) = (self.factors.first(), self.y.last()) else { bail!("no factors") };
        let of_x = (first_row * self.bytes_of_x()) as u64;
        // Kernels do not look at factors beyond their number.
        let mut factor = [first.with_rows(*last, 0); MOST_WEIGHTS];
        for (index, (place, source)) in factor.iter_mut().zip(self.factors).enumerate() {
            let rows = source.matrix().rows;
            let y = self.y.get(index).unwrap_or(last);
            *place = source.with_rows(y + of_x * u64::from(rows), rows);
        }
        let columns = first.matrix().rows;
        let residual = self.residual.map_or(0, |residual| residual.get() + of_x * u64::from(columns));
        let (partial, arrivals) = match plan.splits {
            1 => (std::ptr::null_mut(), std::ptr::null_mut()),
            _ => workspace::with(self.stream, |workspace| {
                workspace.split_sums(plan.partial_sums(), plan.blocks)
            })?,
        };
        let params = CqGemv {
            factor,
            x: (self.x.get() + of_x * self.k as u64) as *const _,
            residual: residual as *const _,
            partial,
            arrivals,
            factors: u32_of("weights of a product", self.factors.len())?,
            m: u32_of("rows of x", plan.m)?,
            k: u32_of("K", self.k)?,
            k_per_split: u32_of("K", plan.k_per_split)?,
            x_stride: u32_of("K", self.k)?,
            residual_stride: columns,
            x_dtype: float_dtype(self.x_dtype)?,
            epilogue: match self.epilogue {
                Epilogue::Swiglu => CQ_SWIGLU,
                Epilogue::Store { .. } => CQ_STORE,
            },
        };
        let kernel = Kernel::Gemv { format: self.format, rows: plan.shape.rows };
        let grid = Grid { blocks: (plan.blocks, plan.splits), shared_bytes: plan.shared_bytes };
        // SAFETY: all addresses are those of tensors that are borrowed until after the launch, and of the
        // workspace of this thread and stream. Shapes were checked when the weights were made and by the
        // caller; x begins at a multiple of 16 bytes, as do its rows, since K is a multiple of 16.
        unsafe { launch(self.stream, kernel, grid, &params) }
    }

    /// One weight at a time.
    fn simt(&self) -> Result<()> {
        const ROWS_OF_BLOCK: usize = 32;
        const ROWS_OF_X: usize = 8;
        for (factor, y) in self.factors.iter().zip(self.y) {
            let rows = factor.matrix().rows;
            let params = CqSimt {
                factor: factor.with_rows(*y, rows),
                x: self.x.as_ptr(),
                m: u32_of("rows of x", self.m)?,
                k: u32_of("K", self.k)?,
                group_size: u32_of("group size", self.format.group_size())?,
                x_stride: u32_of("K", self.k)?,
                x_dtype: float_dtype(self.x_dtype)?,
            };
            let blocks = ((rows as usize).div_ceil(ROWS_OF_BLOCK), self.m.div_ceil(ROWS_OF_X));
            // SAFETY: as for the tensor-core kernel.
            unsafe {
                launch(self.stream, Kernel::Simt(self.format), Grid { blocks, shared_bytes: 0 }, &params)?;
            }
        }
        Ok(())
    }

    /// Rows of the weight are decoded to the dtype of x, as many as the scratch holds, and multiplied by
    /// cuBLAS; y has the bias in it already.
    fn dense(&self, device: &CudaDevice) -> Result<()> {
        let size = self.bytes_of_x();
        for (factor, y) in self.factors.iter().zip(self.y) {
            let rows = factor.matrix().rows as usize;
            if factor.bias().is_some() {
                self.fill_bias(factor, *y)?;
            }
            let chunk = plan::rows_of_scratch(self.k, size).min(rows);
            workspace::with(self.stream, |workspace| {
                let scratch = workspace.scratch(chunk * self.k * size)?;
                for first in (0..rows).step_by(chunk) {
                    let rows_here = chunk.min(rows - first);
                    super::decode::rows_to(
                        self.stream,
                        self.format,
                        factor.matrix(),
                        first..first + rows_here,
                        self.k,
                        (scratch, self.x_dtype),
                    )?;
                    let product = dense::Product {
                        m: self.m,
                        n: rows_here,
                        k: self.k,
                        dtype: self.x_dtype,
                        x: self.x.get(),
                        weight: scratch,
                        y: y + (first * size) as u64,
                        y_stride: rows,
                        add: factor.bias().is_some(),
                    };
                    // SAFETY: x, scratch and y are as large as their dimensions say, and stay until the
                    // stream has passed.
                    unsafe { dense::multiply(device, product)? };
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn fill_bias(&self, factor: &FactorAddresses, y: u64) -> Result<()> {
        const ROWS_OF_Y: usize = 32;
        let rows = factor.matrix().rows;
        let params = CqFillBias {
            bias: pointer_or_null(factor.bias()),
            y: y as *mut _,
            rows,
            m: u32_of("rows of x", self.m)?,
            bias_dtype: factor.bias_dtype(),
            y_dtype: float_dtype(self.x_dtype)?,
        };
        let blocks = ((rows as usize).div_ceil(plan::THREADS as usize), self.m.div_ceil(ROWS_OF_Y));
        // SAFETY: the bias has as many elements as the weight has rows, y as many for each row of x.
        unsafe { launch(self.stream, Kernel::FillBias, Grid { blocks, shared_bytes: 0 }, &params) }
    }
}
