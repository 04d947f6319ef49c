//! What the numbers of a tensor are multiplied and divided by before anything else becomes of them.

use crate::sha256;
use candle_core::{DType, Tensor};
use candle_quant::Result;
use std::fmt;

/// What the numbers of a tensor are multiplied and divided by, in f32: columns of what is multiplied by a scaled input, rows of
/// what makes one.
#[derive(Clone, Default)]
pub(in crate::convert) struct Scaling {
    /// What columns are multiplied by, of each matrix or of all; none if they stay.
    pub columns: Vec<Vec<f32>>,
    /// What rows are divided by, of all matrices one after another, or what the numbers of a vector are; none if they stay.
    pub rows: Vec<f32>,
    /// Numbers of a row: K of a matrix, one of a vector.
    pub width: usize,
    /// What is added to a number before and subtracted again after it: 1 of norms that multiply by one more.
    pub offset: f32,
}

impl Scaling {
    /// Numbers of which the first is the number `first` of all, at the beginning of a row; a matrix has so many rows.
    pub(in crate::convert) fn apply(
        &self,
        numbers: &Tensor,
        first: usize,
        rows_of_matrix: usize,
    ) -> Result<Tensor> {
        let width = self.width.max(1);
        let mut scaled: Vec<f32> = numbers.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        for (row, numbers) in scaled.chunks_mut(width).enumerate() {
            let row = first / width + row;
            let matrix = if self.columns.len() == 1 { 0 } else { row / rows_of_matrix.max(1) };
            for (number, scale) in numbers.iter_mut().zip(self.columns.get(matrix).into_iter().flatten()) {
                *number *= scale;
            }
            if let Some(scale) = self.rows.get(row) {
                numbers.iter_mut().for_each(|number| *number = (*number + self.offset) / scale - self.offset);
            }
        }
        Ok(Tensor::from_vec(scaled, numbers.elem_count(), numbers.device())?)
    }
}

/// A digest, which tells whether an output is made of the same.
impl fmt::Debug for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut hasher = sha256::Hasher::default();
        for scales in self.columns.iter().chain([&self.rows]) {
            hasher.update(scales.len().to_le_bytes());
            scales.iter().for_each(|scale| hasher.update(scale.to_le_bytes()));
        }
        hasher.update(self.offset.to_le_bytes());
        f.write_str(&hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn columns_rows_and_norms_have_their_own() {
        let numbers = Tensor::new(&[1f32, 2., 3., 4.], &Device::Cpu).unwrap();
        let scaled = |scaling: &Scaling, first: usize| -> Vec<f32> {
            scaling.apply(&numbers, first, 2).unwrap().to_vec1().unwrap()
        };
        let columns = Scaling { columns: vec![vec![1., 10.]], width: 2, ..Scaling::default() };
        assert_eq!(scaled(&columns, 0), [1., 20., 3., 40.]);
        // Rows 1 and 2 are the last of one matrix and the first of the next.
        let stack = Scaling {
            columns: vec![vec![1., 10.], vec![100., 1.]],
            rows: vec![1., 2., 4., 8.],
            width: 2,
            offset: 0.,
        };
        assert_eq!(scaled(&stack, 2), [0.5, 10., 75., 1.]);
        let norm = Scaling { rows: vec![1., 2., 4., 0.5], width: 1, offset: 1., ..Scaling::default() };
        assert_eq!(scaled(&norm, 0), [1., 0.5, 0., 9.]);
        assert_eq!(scaled(&Scaling::default(), 2), [1., 2., 3., 4.]);
    }
}
