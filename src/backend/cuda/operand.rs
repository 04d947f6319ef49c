//! A packed weight and its bias as kernels see them.

use super::bindings::{CqMatrix, CqOperand, CQ_F16, CQ_F32};
use super::memory::{float_dtype, u32_of, Address, Locked, View};
use crate::backend::Operand;
use crate::format::{Scale, ZeroPoint, SUPER_BLOCK};
use crate::{QuantFormat, QuantTensor};
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, DType, Result, Tensor};
use std::ffi::c_void;

/// A weight `[.., N, K]` locked for reading.
pub(super) struct LockedWeight<'a> {
    weight: &'a QuantTensor,
    packed: Locked<'a>,
    scales: Locked<'a>,
    biases: Option<Locked<'a>>,
    scale_units: Option<Locked<'a>>,
    bias_units: Option<Locked<'a>>,
}

/// Addresses of its parts.
pub(super) struct WeightAddresses<'a> {
    packed: Address<'a>,
    scales: Address<'a>,
    biases: Option<Address<'a>>,
    scale_units: Option<Address<'a>>,
    bias_units: Option<Address<'a>>,
    scale_dtype: u32,
    biases_dtype: u32,
    format: QuantFormat,
    k: usize,
    /// Of one matrix of the stack.
    rows: usize,
}

impl<'a> LockedWeight<'a> {
    pub(super) fn new(weight: &'a QuantTensor) -> Self {
        let super_blocks = weight.super_blocks();
        Self {
            weight,
            packed: Locked::new(weight.packed()),
            scales: Locked::new(weight.scales()),
            biases: weight.biases().map(Locked::new),
            scale_units: super_blocks.map(|of| Locked::new(&of.scales)),
            bias_units: super_blocks.and_then(|of| of.biases.as_ref()).map(Locked::new),
        }
    }

    pub(super) fn addresses<'b>(&'b self, stream: &'b CudaStream) -> Result<WeightAddresses<'b>> {
        let [.., rows, k] = self.weight.dims()[..] else { bail!("a weight has at least two dimensions") };
        let view = |part: &'b Option<Locked>| part.as_ref().map(Locked::view).transpose();
        let address = |view: Option<View<'b>>| view.map(|part| part.address(stream)).transpose();
        let (scales, biases) = (self.scales.view()?, view(&self.biases)?);
        let format = self.weight.format();
        // Integer kernels take the middle code for zero if there are no biases.
        let takes_biases = match format.zero_point() {
            ZeroPoint::Bias => true,
            ZeroPoint::Midpoint | ZeroPoint::None => false,
        };
        if takes_biases != biases.is_some() {
            bail!("{format} {} biases", if takes_biases { "needs" } else { "has no" });
        }
        Ok(WeightAddresses {
            packed: self.packed.view()?.address(stream)?,
            scale_dtype: match format.scale() {
                Scale::Float => float_dtype(scales.dtype())?,
                Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => CQ_F16, // not read
            },
            scales: scales.address(stream)?,
            biases_dtype: match format.scale() {
                Scale::Float => biases.map_or(Ok(CQ_F16), |biases| float_dtype(biases.dtype()))?,
                Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => CQ_F16,
            },
            biases: address(biases)?,
            scale_units: address(view(&self.scale_units)?)?,
            bias_units: address(view(&self.bias_units)?)?,
            format,
            k,
            rows,
        })
    }
}

impl WeightAddresses<'_> {
    /// Matrix `index` of the stack.
    pub(super) fn matrix(&self, index: usize, global_scale: f32) -> Result<CqMatrix> {
        self.rows_of(index * self.rows, self.rows, global_scale)
    }

    /// `rows` rows from `first` on, as if the stack were one matrix.
    pub(super) fn rows_of(&self, first: usize, rows: usize, global_scale: f32) -> Result<CqMatrix> {
        let groups = first * (self.k / self.format.group_size());
        let bytes = |dtype: u32| match self.format.scale() {
            Scale::Float if dtype == CQ_F32 => 4,
            Scale::Float => 2,
            Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => 1,
        };
        let at = |address: &Address, bytes: usize| (address.get() + bytes as u64) as *const _;
        let part =
            |part: &Option<Address>, bytes| part.as_ref().map_or(std::ptr::null(), |part| at(part, bytes));
        let units = first * (self.k / SUPER_BLOCK) * DType::F16.size_in_bytes();
        Ok(CqMatrix {
            packed: at(&self.packed, first * (self.k * self.format.bits() / 8)) as *const u32,
            scales: at(&self.scales, groups * bytes(self.scale_dtype)),
            biases: part(&self.biases, groups * bytes(self.biases_dtype)),
            scale_units: part(&self.scale_units, units),
            bias_units: part(&self.bias_units, units),
            global_scale,
            rows: u32_of("rows of a weight", rows)?,
            scale_dtype: self.scale_dtype,
            biases_dtype: self.biases_dtype,
        })
    }
}

/// A weight and its bias, locked for reading.
pub(super) struct LockedOperand<'a> {
    weight: LockedWeight<'a>,
    global_scales: Option<Locked<'a>>,
    bias: Option<Locked<'a>>,
}

/// Addresses of both.
pub(super) struct OperandAddresses<'a> {
    weight: WeightAddresses<'a>,
    of: &'a QuantTensor,
    /// A multiplier for each matrix of a stack, if they differ.
    global_scales: Option<Address<'a>>,
    bias: Option<Address<'a>>,
    bias_dtype: u32,
}

/// A matrix and its bias, while their addresses are held.
#[derive(Clone, Copy)]
pub(super) struct OperandPointers {
    pub(super) matrix: CqMatrix,
    /// Null if there is none.
    pub(super) bias: *const c_void,
    pub(super) bias_dtype: u32,
}

impl<'a> LockedOperand<'a> {
    pub(super) fn new(operand: Operand<'a>) -> Self {
        let global_scales = operand.weight.global_scale().filter(|scales| scales.elem_count() > 1);
        Self {
            weight: LockedWeight::new(operand.weight),
            global_scales: global_scales.map(Locked::new),
            bias: operand.bias.map(Locked::new),
        }
    }

    pub(super) fn addresses<'b>(&'b self, stream: &'b CudaStream) -> Result<OperandAddresses<'b>> {
        let bias = self.bias.as_ref().map(Locked::view).transpose()?;
        Ok(OperandAddresses {
            weight: self.weight.addresses(stream)?,
            of: self.weight.weight,
            global_scales: match &self.global_scales {
                Some(scales) => Some(scales.view()?.address(stream)?),
                None => None,
            },
            bias: bias.map(|bias| bias.address(stream)).transpose()?,
            bias_dtype: bias.map_or(Ok(CQ_F16), |bias| float_dtype(bias.dtype()))?,
        })
    }
}

impl OperandAddresses<'_> {
    /// Matrix `index` of the stack, with the bias that all have in common.
    pub(super) fn pointers(&self, index: usize) -> Result<OperandPointers> {
        Ok(OperandPointers {
            matrix: self.weight.matrix(index, self.of.global_scale_of(index))?,
            bias: self.bias.as_ref().map_or(std::ptr::null(), Address::as_ptr),
            bias_dtype: self.bias_dtype,
        })
    }

    /// The first matrix of the stack, with the biases of all, and the multipliers of each matrix, if they
    /// differ.
    pub(super) fn stack(&self) -> Result<(OperandPointers, *const f32)> {
        let first = self.pointers(0)?;
        Ok(match &self.global_scales {
            Some(scales) => (
                OperandPointers { matrix: CqMatrix { global_scale: 1., ..first.matrix }, ..first },
                scales.as_ptr(),
            ),
            None => (first, std::ptr::null()),
        })
    }
}

impl OperandPointers {
    /// With the output written to `y`, row after row.
    pub(super) fn into_rows(self, y: u64) -> CqOperand {
        let Self { matrix, bias, bias_dtype } = self;
        CqOperand { matrix, bias, y: y as *mut _, y_stride: matrix.rows, bias_dtype }
    }
}

/// Whether tensor cores take the weight: scales and biases are not f32.
pub(super) fn has_narrow_scales(weight: &QuantTensor) -> bool {
    let narrow = |tensor: &Tensor| tensor.dtype() != DType::F32;
    narrow(weight.scales()) && weight.biases().is_none_or(narrow)
}

/// Whether scales are of one dtype, and biases: what kernels of two weights that are joined go by.
pub(super) fn are_alike<'a>(operands: impl IntoIterator<Item = &'a OperandPointers>) -> bool {
    let mut dtypes =
        operands.into_iter().map(|operand| (operand.matrix.scale_dtype, operand.matrix.biases_dtype));
    dtypes.next().is_none_or(|first| dtypes.all(|other| other == first))
}
