//! Operations of weights whose groups run across rows: integer codes times an x for each class of rows.

use super::{check_device, cpu, group_values, with_matrix, GroupValues};
use crate::tensor::ColumnScaledTensor;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, D};
use half::slice::HalfFloatSliceExt;
use std::sync::{Mutex, PoisonError};

/// Elements of the x of all classes that are computed at once.
const AT_ONCE: usize = 1 << 24;
/// Elements of the numbers of some rows that are computed at once.
const ROWS_AT_ONCE: usize = 1 << 22;
/// Rows of x that a CPU multiplies by packed codes at most. Measured: with more, an x for each class takes longer than numbers do.
const MOST_PACKED: usize = 192;
/// Sums that a sum of products is made of.
const LANES: usize = 16;

impl ColumnScaledTensor {
    /// `x * weight^T + bias`, as [`QuantTensor::matmul`](crate::QuantTensor::matmul). It is computed in f32, and rounded once.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn matmul(&self, x: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let (n, k) = self.sizes();
        if x.dims().last() != Some(&k) {
            let expected = format!("last dimension {k} (K of {self:?})");
            return Err(Error::mismatch("x", expected, format!("shape {:?}", x.dims())).into());
        }
        if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(super::unsupported_dtype("matmul", x.dtype()));
        }
        check_device("x", x, self.codes().device())?;
        let rows = x.to_dtype(DType::F32)?.contiguous()?.reshape(((), k))?;
        let is_plain = x.device().is_cpu() && !rows.track_op();
        let most = if is_plain { MOST_PACKED } else { self.codes().dims().get(1).copied().unwrap_or(0) };
        let y = match rows.dim(0)? {
            m if m > most => self.of_numbers(&rows)?,
            _ if is_plain => self.products(&rows)?,
            _ => self.of_operations(&rows)?,
        };
        let y = match bias {
            Some(bias) if bias.dims() == [n] => y.broadcast_add(&bias.to_dtype(DType::F32)?)?,
            Some(bias) => {
                let found = format!("{:?}", bias.dims());
                return Err(Error::mismatch("bias", format!("shape [{n}]"), found).into());
            }
            None => y,
        };
        let mut dims = x.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = n;
        }
        y.to_dtype(x.dtype())?.reshape(dims)
    }

    fn sizes(&self) -> (usize, usize) {
        match self.dims().as_slice() {
            &[n, k] => (n, k),
            _ => (0, 0),
        }
    }

    /// K filled up to whole groups.
    fn filled(&self) -> usize {
        self.codes().dims().last().copied().unwrap_or(0)
    }

    /// From the least code on, which the codes of a symmetric format count from their middle.
    fn midpoint(&self) -> f64 {
        self.codes().format().midpoint().into()
    }

    /// `[M, N]` of x `[M, K]`, by some rows of numbers after the other: of so many rows of x that one x for each class is more
    /// than these.
    fn of_numbers(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (n, k) = self.sizes();
        let step = (ROWS_AT_ONCE / k.max(1)).max(1);
        let parts = (0..n)
            .step_by(step)
            .map(|row| x.matmul(&self.dequantize_rows(row, step.min(n - row), DType::F32)?.t()?));
        Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, 1)
    }

    /// `[M, N]` of x `[M, K]`, in operations that have gradients and are on every device.
    fn of_operations(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (m, k) = x.dims2()?;
        let classes = self.class_count();
        let step = (AT_ONCE / (m * k).max(1)).clamp(1, classes.max(1));
        let mut products = Vec::new();
        for first in (0..classes).step_by(step) {
            let count = step.min(classes - first);
            let of_columns = |part: &Tensor| part.narrow(0, first, count)?.to_dtype(DType::F32);
            let x = x.unsqueeze(0)?.broadcast_mul(&of_columns(self.scales())?.unsqueeze(1)?)?;
            let zeros = (of_columns(self.zeros())? - self.midpoint())?;
            let of_zeros = x.matmul(&zeros.unsqueeze(2)?)?;
            let filled = x.pad_with_zeros(D::Minus1, 0, self.filled() - k)?;
            let of_codes = self.codes().narrow(0, first, count)?.matmul(&filled, None)?;
            products.push(of_codes.broadcast_sub(&of_zeros)?);
        }
        // From [classes, M, rows of a class] to the rows of the weight.
        let rows = Tensor::cat(&products, 0)?.transpose(0, 1)?.contiguous()?.flatten_from(1)?;
        rows.index_select(self.places(), 1)
    }

    /// The same on a CPU, where classes are shared among threads.
    fn products(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (m, k) = x.dims2()?;
        let (n, filled) = (self.sizes().0, self.filled());
        let x = x.flatten_all()?.to_vec1::<f32>()?;
        let (scales, layout_of_scales) = self.scales().storage_and_layout();
        let (zeros, layout_of_zeros) = self.zeros().storage_and_layout();
        let midpoint = self.midpoint() as f32;
        let product = |class: usize| -> candle_core::Result<Vec<f32>> {
            let scales = widened(&group_values(&scales, layout_of_scales, (class * k, k))?);
            let mut zeros = widened(&group_values(&zeros, layout_of_zeros, (class * k, k))?);
            zeros.iter_mut().for_each(|zero| *zero -= midpoint);
            let mut of_class = vec![0.; m * filled];
            let mut of_zeros = Vec::with_capacity(m);
            for (to, x) in of_class.chunks_exact_mut(filled.max(1)).zip(x.chunks_exact(k.max(1))) {
                for ((to, x), scale) in to.iter_mut().zip(x).zip(&scales) {
                    *to = x * scale;
                }
                of_zeros.push(dot(to, &zeros));
            }
            let mut y = with_matrix(self.codes(), class, |matrix| Ok(cpu::matmul(matrix, &of_class, None)))?;
            let rows = y.len().checked_div(m).unwrap_or(0).max(1);
            for (y, of_zeros) in y.chunks_exact_mut(rows).zip(of_zeros) {
                y.iter_mut().for_each(|y| *y -= of_zeros);
            }
            Ok(y)
        };
        let classes = self.class_count();
        let mut products: Vec<_> = (0..classes).map(|_| Ok(Vec::new())).collect();
        match cpu::is_few(m) {
            // Rows of a class are few: all threads would wait for each other at each of them.
            true => {
                let all = Mutex::new(&mut products);
                cpu::for_each(0..classes, |_, class| {
                    let product = product(class);
                    if let Some(place) = all.lock().unwrap_or_else(PoisonError::into_inner).get_mut(class) {
                        *place = product;
                    }
                });
            }
            false => products.iter_mut().enumerate().for_each(|(class, place)| *place = product(class)),
        }
        let products = products.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
        let rows = self.codes().dims().get(1).copied().unwrap_or(0).max(1);
        let places: Vec<_> = self
            .places()
            .to_vec1::<u32>()?
            .into_iter()
            .map(|place| (place as usize / rows, place as usize % rows))
            .collect();
        let mut y = Vec::with_capacity(m * n);
        for row in 0..m {
            y.extend(places.iter().map(|(class, index)| {
                products.get(*class).and_then(|of| of.get(row * rows + index)).copied().unwrap_or(f32::NAN)
            }));
        }
        Tensor::from_vec(y, (m, n), &Device::Cpu)
    }

    /// All weights as a dense tensor `[N, K]`: `(code - zero) * scale` in f32, rounded to `dtype`.
    ///
    /// # Errors
    /// If `dtype` is not F32, F16 or BF16, or the device fails.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        let (n, k) = self.sizes();
        let step = (AT_ONCE / k.max(1)).max(1);
        let parts = (0..n).step_by(step).map(|row| self.dequantize_rows(row, step.min(n - row), dtype));
        Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }

    /// Rows from `start` on, `len` of them, dequantized.
    ///
    /// # Errors
    /// As those of [`dequantize`](Self::dequantize), and if the range leaves the weight.
    pub fn dequantize_rows(&self, start: usize, len: usize, dtype: DType) -> Result<Tensor> {
        let rows = |of_rows: &Tensor| of_rows.narrow(0, start, len);
        Ok(self.rows_of(&rows(self.places())?, &rows(self.row_classes())?, dtype)?)
    }

    /// The rows `ids`, as [`QuantTensor::embed`](crate::QuantTensor::embed).
    ///
    /// # Errors
    /// As those of it; an id of N or more is one on all devices.
    pub fn embed(&self, ids: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
        check_device("ids", ids, self.codes().device())?;
        let flat = ids.flatten_all()?.contiguous()?;
        let rows = |of_rows: &Tensor| of_rows.index_select(&flat, 0);
        let rows = self.rows_of(&rows(self.places())?, &rows(self.row_classes())?, dtype)?;
        rows.reshape([ids.dims(), &[self.sizes().1]].concat())
    }

    /// The rows at these places, which are of these classes.
    fn rows_of(&self, places: &Tensor, classes: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(super::unsupported_dtype("dequantize", dtype));
        }
        let k = self.sizes().1;
        if places.device().is_cpu() {
            let (places, classes) = (places.to_vec1::<u32>()?, classes.to_vec1::<u32>()?);
            let numbers = self.numbers(&places, &classes)?;
            return Tensor::from_vec(numbers, (places.len(), k), &Device::Cpu)?.to_dtype(dtype);
        }
        let codes = self.codes().as_matrix()?.embed(places, DType::F32)?.narrow(1, 0, k)?;
        let of_columns = |part: &Tensor| part.index_select(classes, 0)?.to_dtype(DType::F32);
        let numbers = ((codes + self.midpoint())? - of_columns(self.zeros())?)?;
        (numbers * of_columns(self.scales())?)?.to_dtype(dtype)
    }

    /// The same on a CPU, where rows are shared among threads.
    fn numbers(&self, places: &[u32], classes: &[u32]) -> candle_core::Result<Vec<f32>> {
        let (k, midpoint) = (self.sizes().1, self.midpoint() as f32);
        let in_f32 = |part: &Tensor| part.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let (scales, zeros) = (in_f32(self.scales())?, in_f32(self.zeros())?);
        let mut numbers = vec![0f32; places.len() * k];
        let rows = numbers.chunks_mut(k.max(1)).zip(places.iter().zip(classes));
        with_matrix(&self.codes().as_matrix()?, 0, |matrix| {
            cpu::for_each(rows, |_, (to, (place, class))| {
                let codes = cpu::embed::<f32>(matrix, &[*place as usize]);
                let start = *class as usize * k;
                let columns = zeros.iter().zip(&scales).skip(start);
                for ((to, code), (zero, scale)) in to.iter_mut().zip(&codes).zip(columns) {
                    *to = (code + midpoint - zero) * scale;
                }
            });
            Ok(())
        })?;
        Ok(numbers)
    }
}

/// The sum of products of the first elements.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (mut sums, len) = ([0f32; LANES], a.len().min(b.len()));
    let (a, b) = (a.get(..len).unwrap_or_default(), b.get(..len).unwrap_or_default());
    let ((a, rest_of_a), (b, rest_of_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = rest_of_a.iter().zip(rest_of_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// Numbers of a part in f32.
fn widened(values: &GroupValues) -> Vec<f32> {
    match values {
        GroupValues::F16(values) => values.to_f32_vec(),
        GroupValues::Bf16(values) => values.to_f32_vec(),
        GroupValues::F32(values) => values.to_vec(),
        GroupValues::Byte(values) => values.iter().map(|value| f32::from(*value)).collect(),
    }
}
