//! A packed weight whose columns have another order than the elements of x.

use super::QuantTensor;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// What a packed column reads that no element of x belongs to: candle's index of a zero.
pub(crate) const NO_COLUMN: u32 = u32::MAX;

/// A packed weight of logical shape `[N, K]` whose columns are stored in the order of their groups: GPTQ quantizes the
/// columns with the largest activations first (`desc_act`, `actorder`), and groups are made in that order.
///
/// Kernels see an ordinary [`QuantTensor`] of K' columns; x is brought into their order once, before it is multiplied.
/// Where the columns of a group do not fill groups of the format, K' is more than K, and columns without an element of x
/// lie between, which count for nothing.
#[derive(Clone)]
pub struct ReorderedTensor {
    weight: QuantTensor,
    /// The column of x that each packed one reads, or [`NO_COLUMN`].
    columns: Arc<[u32]>,
    /// The same on the device of the weight, U32 `[K']`.
    on_device: Tensor,
    /// Where each column of x is packed, U32 `[K]` on the device.
    places: Tensor,
}

impl std::fmt::Debug for ReorderedTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.weight.device().location();
        write!(f, "ReorderedTensor[{}; {:?}, {device:?}]", self.weight.format(), self.dims())
    }
}

impl ReorderedTensor {
    /// A packed weight `[N, K']`, of which column `i` belongs to element `columns[i]` of an x of `k` elements, or to none
    /// where that is `u32::MAX`.
    ///
    /// # Errors
    /// If the weight is no matrix, there are not K' numbers, or an element of x has no column or several.
    pub fn new(weight: QuantTensor, columns: &[u32], k: usize) -> Result<Self> {
        let &[_, packed] = weight.dims().as_slice() else {
            let found = format!("{:?}", weight.dims());
            return Err(Error::mismatch("weight with an order of columns", "a shape [N, K]", found));
        };
        if columns.len() != packed {
            let expected = format!("{packed}, one for each of the weight");
            return Err(Error::mismatch("order of columns", expected, columns.len().to_string()));
        }
        let mut places = vec![NO_COLUMN; k];
        for (place, column) in (0u32..).zip(columns).filter(|(_, column)| **column != NO_COLUMN) {
            match places.get_mut(*column as usize) {
                Some(of_column) if *of_column == NO_COLUMN => *of_column = place,
                Some(_) => return Err(once(k, format!("column {column} twice"))),
                None => return Err(once(k, format!("column {column}"))),
            }
        }
        if let Some(missing) = places.iter().position(|place| *place == NO_COLUMN) {
            return Err(once(k, format!("no column {missing}")));
        }
        let device = weight.device().clone();
        let on_device = Tensor::new(columns, &device)?;
        let places = Tensor::from_vec(places, k, &device)?;
        Ok(Self { weight, columns: columns.into(), on_device, places })
    }

    /// Logical shape `[N, K]`.
    pub fn dims(&self) -> Vec<usize> {
        let mut dims = self.weight.dims();
        if let Some(last) = dims.last_mut() {
            *last = self.places.elem_count();
        }
        dims
    }

    /// The weight as it is packed, `[N, K']`.
    pub fn weight(&self) -> &QuantTensor {
        &self.weight
    }

    /// The column of x that each packed one reads; `u32::MAX` for none.
    pub fn columns(&self) -> &[u32] {
        &self.columns
    }

    /// Whether columns are in the order of x, and only filled up to whole groups.
    pub fn is_in_order(&self) -> bool {
        self.columns.iter().filter(|column| **column != NO_COLUMN).is_sorted()
    }

    pub(crate) fn shared_columns(&self) -> &Arc<[u32]> {
        &self.columns
    }

    pub(crate) fn columns_on_device(&self) -> &Tensor {
        &self.on_device
    }

    pub(crate) fn places(&self) -> &Tensor {
        &self.places
    }

    /// Whether both want the same order of x.
    pub fn has_order_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.columns, &other.columns) || self.columns == other.columns
    }

    /// Rows from `start` on, `len` of them.
    ///
    /// # Errors
    /// If the range is empty or leaves the weight.
    pub fn rows(&self, start: usize, len: usize) -> Result<Self> {
        Ok(Self { weight: self.weight.narrow(0, start, len)?, ..self.clone() })
    }

    /// The same weight on another device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            weight: self.weight.to_device(device)?,
            columns: self.columns.clone(),
            on_device: self.on_device.to_device(device)?,
            places: self.places.to_device(device)?,
        })
    }

    /// Bytes of all parts, and of both orders.
    pub fn size_in_bytes(&self) -> usize {
        self.weight.size_in_bytes() + (self.columns.len() + self.places.elem_count()) * size_of::<u32>()
    }
}

fn once(k: usize, found: String) -> Error {
    Error::mismatch("order of columns", format!("each column below {k} once"), found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QuantFormat;
    use candle_core::DType;

    #[test]
    fn each_column_has_one_place() {
        let numbers = Tensor::zeros((2, 32), DType::F32, &Device::Cpu).unwrap();
        let weight = QuantTensor::quantize(&numbers, QuantFormat::affine(4, 32).unwrap()).unwrap();
        let order: Vec<u32> = (0..32).rev().collect();
        let made = |order: &[u32], k| ReorderedTensor::new(weight.clone(), order, k);
        let reordered = made(&order, 32).unwrap();
        assert_eq!(reordered.dims(), [2, 32]);
        assert_eq!(reordered.places().to_vec1::<u32>().unwrap(), order);
        let padded: Vec<u32> = (0..31).chain([NO_COLUMN]).collect();
        assert_eq!(made(&padded, 31).unwrap().dims(), [2, 31]);
        for (order, k, found) in [
            (&order[..31], 32, "31"),
            (&padded, 30, "column 30"),
            (&padded, 32, "no column 31"),
            (&[vec![3], order[1..].to_vec()].concat(), 32, "column 3 twice"),
        ] {
            let error = made(order, k).unwrap_err().to_string();
            assert!(error.contains(found), "{error}");
        }
    }
}
