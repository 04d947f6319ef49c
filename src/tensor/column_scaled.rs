//! A packed weight with groups across rows: scales and zeros belong to columns.

use super::QuantTensor;
use crate::format::{Scale, ZeroPoint};
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// A packed weight of logical shape `[N, K]` whose groups run across rows, as HQQ has them along axis 0.
///
/// Rows fall into classes. All rows of a class share a scale and a zero for each column:
/// `w = (code - zero[k]) * scale[k]`. So a product is that of integer codes with an x that has been multiplied by the scales of
/// the class, less a sum that all rows of the class share; one x for each class is little beside its rows.
#[derive(Clone)]
pub struct ColumnScaledTensor {
    /// Integers `[classes, rows of a class, K']`, K filled up to whole groups; all of their scales are one.
    codes: QuantTensor,
    /// `[classes, K]`.
    scales: Tensor,
    /// `[classes, K]`, counted from the least code on.
    zeros: Tensor,
    /// Where each row is among those of all classes, U32 `[N]`.
    places: Tensor,
    /// The class of each row, U32 `[N]`.
    classes: Tensor,
    /// Elements of a group, for reports.
    group_size: usize,
}

impl std::fmt::Debug for ColumnScaledTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.codes.device().location();
        write!(f, "ColumnScaledTensor[{}; {:?}, {device:?}]", self.format_name(), self.dims())
    }
}

impl ColumnScaledTensor {
    /// A weight of symmetric codes `[classes, rows of a class, K']` whose scales are one, with scales and zeros `[classes, K]`
    /// and the `places` of its rows among those of all classes, one class after another. Zeros are counted from the least code
    /// on; K' is K filled up to whole groups of the codes. `group_size` is for reports alone.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, a scale of the codes is not one, or there is no such place.
    pub fn new(
        codes: QuantTensor,
        scales: Tensor,
        zeros: Tensor,
        places: &[u32],
        group_size: usize,
    ) -> Result<Self> {
        let others = codes.scales().ne(1f32)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
        if others > 0. {
            let found = format!("{others} others");
            return Err(Error::mismatch("scales of integers", "ones: columns have scales", found));
        }
        Self::of_ones(codes, scales, zeros, places, group_size)
    }

    /// As [`new`](Self::new), of codes whose scales are known to be one: what is on a device is not waited for.
    pub(crate) fn of_ones(
        codes: QuantTensor,
        scales: Tensor,
        zeros: Tensor,
        places: &[u32],
        group_size: usize,
    ) -> Result<Self> {
        let format = codes.format();
        let is_integer = format.zero_point() == ZeroPoint::Midpoint && format.scale() == Scale::Float;
        let &[classes, rows, filled] = codes.dims().as_slice() else {
            let found = format!("{:?}", codes.dims());
            return Err(Error::mismatch("codes of classes of rows", "[classes, rows, K]", found));
        };
        if !is_integer {
            let found = format.to_string();
            return Err(Error::mismatch("codes of classes of rows", "symmetric integers", found));
        }
        for (what, part) in [("scales of columns", &scales), ("zeros of columns", &zeros)] {
            let fits = match part.dims() {
                &[of, k] => of == classes && k > 0 && k.next_multiple_of(format.group_size()) == filled,
                _ => false,
            };
            if !fits || part.dims() != scales.dims() {
                let expected = format!("[{classes}, K] for K of {filled} filled up");
                return Err(Error::mismatch(what, expected, format!("{:?}", part.dims())));
            }
            if !matches!(part.dtype(), DType::F16 | DType::BF16 | DType::F32) {
                return Err(Error::mismatch(what, "F16, BF16 or F32", format!("{:?}", part.dtype())));
            }
            if !part.device().same_device(codes.device()) {
                let (expected, found) = (codes.device().location(), part.device().location());
                return Err(Error::mismatch(what, format!("on {expected:?}"), format!("on {found:?}")));
            }
        }
        if let Some(place) = places.iter().find(|place| **place as usize >= classes.saturating_mul(rows)) {
            let expected = format!("each below {}", classes.saturating_mul(rows));
            return Err(Error::mismatch("places of rows", expected, place.to_string()));
        }
        if places.is_empty() {
            return Err(Error::mismatch("places of rows", "one or more", "none"));
        }
        let device = codes.device().clone();
        let of_class = u32::try_from(rows.max(1)).unwrap_or(u32::MAX);
        let classes = Tensor::from_iter(places.iter().map(|place| place / of_class), &device)?;
        let places = Tensor::new(places, &device)?;
        let (scales, zeros) = (scales.contiguous()?, zeros.contiguous()?);
        Ok(Self { codes, scales, zeros, places, classes, group_size })
    }

    /// Logical shape `[N, K]`.
    pub fn dims(&self) -> Vec<usize> {
        vec![self.places.elem_count(), self.scales.elem_count() / self.class_count().max(1)]
    }

    /// The integers, `[classes, rows of a class, K']`.
    pub fn codes(&self) -> &QuantTensor {
        &self.codes
    }

    /// `[classes, K]`.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// `[classes, K]`, counted from the least code on.
    pub fn zeros(&self) -> &Tensor {
        &self.zeros
    }

    /// The name of its format, for reports.
    pub fn format_name(&self) -> String {
        column_scaled_name(self.codes.format().bits(), self.group_size)
    }

    /// Where each row is among those of all classes, U32 `[N]`.
    pub(crate) fn places(&self) -> &Tensor {
        &self.places
    }

    /// The class of each row, U32 `[N]`.
    pub(crate) fn row_classes(&self) -> &Tensor {
        &self.classes
    }

    pub(crate) fn class_count(&self) -> usize {
        self.codes.dims().first().copied().unwrap_or(0)
    }

    /// All parts.
    pub fn parts(&self) -> impl Iterator<Item = &Tensor> {
        self.codes.parts().chain([&self.scales, &self.zeros, &self.places, &self.classes])
    }

    /// Bytes of all parts.
    pub fn size_in_bytes(&self) -> usize {
        self.parts().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }
}

/// The name of integers with groups across rows.
pub(crate) fn column_scaled_name(bits: usize, group_size: usize) -> String {
    format!("affine {bits}-bit g{group_size}, across rows")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QuantFormat;
    use candle_core::Device;

    fn zeros(dims: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(dims, dtype, &Device::Cpu).unwrap()
    }

    #[test]
    fn parts_fit_each_other() {
        let codes = |format: QuantFormat, scale: f32| {
            let biases = format.has_biases().then(|| zeros(&[2, 3, 1], DType::F32));
            let scales = Tensor::full(scale, (2, 3, 1), &Device::Cpu).unwrap();
            QuantTensor::new(format, zeros(&[2, 3, 4], DType::U32), scales, biases, None).unwrap()
        };
        let symmetric = codes(QuantFormat::symmetric(4, 32).unwrap(), 1.);
        let of_columns = |k: usize| zeros(&[2, k], DType::F16);
        let made =
            ColumnScaledTensor::new(symmetric.clone(), of_columns(30), of_columns(30), &[5, 0, 3, 4], 3);
        let weight = made.unwrap();
        assert_eq!(weight.dims(), [4, 30]);
        assert_eq!(weight.format_name(), "affine 4-bit g3, across rows");
        assert_eq!(weight.row_classes().to_vec1::<u32>().unwrap(), [1, 0, 1, 1]);
        let affine = codes(QuantFormat::affine(4, 32).unwrap(), 1.);
        let scaled = codes(QuantFormat::symmetric(4, 32).unwrap(), 2.);
        for (codes, scales, zeros, places, told) in [
            (affine, of_columns(32), of_columns(32), &[0u32][..], "symmetric integers"),
            (scaled, of_columns(32), of_columns(32), &[0], "scales of integers"),
            (symmetric.matrix(0).unwrap(), of_columns(32), of_columns(32), &[0], "[classes, rows, K]"),
            (symmetric.clone(), of_columns(33), of_columns(33), &[0], "scales of columns"),
            (symmetric.clone(), of_columns(32), of_columns(31), &[0], "zeros of columns"),
            (symmetric.clone(), zeros(&[2, 32], DType::U32), of_columns(32), &[0], "F16, BF16 or F32"),
            (symmetric.clone(), of_columns(32), of_columns(32), &[1, 6], "each below 6"),
            (symmetric, of_columns(32), of_columns(32), &[], "one or more"),
        ] {
            let error = ColumnScaledTensor::new(codes, scales, zeros, places, 3).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
