//! Sums of squares of what one module is given.

use candle_quant::{Error, Result};

/// Sums of the squares of what a module is given, for each of its columns; of a stack of experts for each expert.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnSums {
    columns: usize,
    /// For each expert, or for the one weight, how many rows of numbers it was given.
    counts: Vec<u64>,
    /// As many rows of sums.
    squares: Vec<f64>,
}

impl ColumnSums {
    /// Of nothing yet.
    pub(super) fn new(experts: usize, columns: usize) -> Self {
        Self { columns, counts: vec![0; experts], squares: vec![0.; experts.saturating_mul(columns)] }
    }

    /// Of sums that are there already; `what` they are of is for errors.
    ///
    /// # Errors
    /// If there are not as many sums, or one is below zero or not finite.
    pub(super) fn of(what: &str, counts: Vec<u64>, squares: Vec<f64>, columns: usize) -> Result<Self> {
        if columns == 0 || counts.is_empty() || counts.len().checked_mul(columns) != Some(squares.len()) {
            let expected = format!("{} rows of {columns} sums", counts.len());
            return Err(Error::mismatch(what, expected, format!("{} sums", squares.len())));
        }
        match squares.iter().find(|sum| !(sum.is_finite() && **sum >= 0.)) {
            Some(wrong) => {
                Err(Error::mismatch(what, "sums of squares, finite and not below zero", wrong.to_string()))
            }
            None => Ok(Self { columns, counts, squares }),
        }
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// How many rows of numbers the weight was given, or each of the experts.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The sums of squares of each column, expert after expert.
    pub fn squares(&self) -> &[f64] {
        &self.squares
    }

    /// Adds rows that one expert is given, or the one weight.
    pub(super) fn add(&mut self, expert: usize, rows: &[f32]) {
        let sums = self.squares.chunks_exact_mut(self.columns.max(1)).nth(expert);
        let (Some(sums), Some(count)) = (sums, self.counts.get_mut(expert)) else { return };
        for row in rows.chunks_exact(self.columns.max(1)) {
            *count += 1;
            for (sum, number) in sums.iter_mut().zip(row) {
                *sum += f64::from(*number).powi(2);
            }
        }
    }

    /// How much each column counts: the mean squares, of all experts or of one. Experts that were given nothing have zeros.
    pub(super) fn weights(&self, expert: Option<usize>) -> Option<ColumnWeights> {
        let rows = self.counts.iter().zip(self.squares.chunks_exact(self.columns.max(1)));
        let mean = |(count, squares): (&u64, &[f64])| -> Vec<f32> {
            squares.iter().map(|square| (square / (*count).max(1) as f64) as f32).collect()
        };
        let means = match expert {
            None => rows.map(mean).collect(),
            Some(expert) => vec![rows.map(mean).nth(expert)?],
        };
        // What overflows counts as much as anything can.
        let bounded = |row: Vec<f32>| row.into_iter().map(|number| number.min(f32::MAX)).collect();
        Some(ColumnWeights { means: means.into_iter().map(bounded).collect() })
    }
}

/// How much each column of a weight counts; of a stack, of each of its matrices.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ColumnWeights {
    means: Vec<Vec<f32>>,
}

impl ColumnWeights {
    /// Whether they are those of a weight of these dimensions.
    pub fn fit(&self, dims: &[usize]) -> bool {
        let [stack @ .., _, k] = dims else { return false };
        let matrices: usize = stack.iter().product();
        let counts = [1, matrices].contains(&self.means.len());
        counts && self.means.iter().all(|means| means.len() == *k)
    }

    /// Those of one matrix of a stack.
    pub fn of_matrix(&self, matrix: usize) -> Option<&[f32]> {
        match self.means.as_slice() {
            [one] => Some(one),
            means => means.get(matrix).map(Vec::as_slice),
        }
    }

    /// What they are where columns are multiplied by these scales, those of each matrix or of all, and what they are multiplied by
    /// is divided.
    pub fn of_scaled(&self, scales: &[Vec<f32>]) -> Self {
        let scales_of = |matrix: usize| if scales.len() == 1 { scales.first() } else { scales.get(matrix) };
        let of_matrix = |matrix: usize| {
            let pairs =
                self.of_matrix(matrix).into_iter().flatten().zip(scales_of(matrix).into_iter().flatten());
            pairs.map(|(mean, scale)| (mean / scale / scale).min(f32::MAX)).collect()
        };
        Self { means: (0..self.means.len().max(scales.len())).map(of_matrix).collect() }
    }

    /// Rows and columns, for errors.
    pub fn dims(&self) -> [usize; 2] {
        [self.means.len(), self.means.first().map_or(0, Vec::len)]
    }

    /// Their bytes, for digests.
    pub fn bytes(&self) -> impl Iterator<Item = [u8; 4]> + '_ {
        self.means.iter().flatten().map(|mean| mean.to_le_bytes())
    }
}
