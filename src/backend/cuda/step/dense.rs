//! Dense weights of a step, as they are stored.

use super::super::bindings::{CqDense, CQ_MAX_WEIGHTS};
use super::super::kernel::Kernel;
use super::super::launch::Grid;
use super::super::memory::{float_dtype, u32_of, Locked};
use super::super::plan;
use super::builder::{Builder, Places};
use super::projections::{Seen, Source, Target};
use super::LaunchParams;
use crate::backend::step::Projection;
use candle_core::{bail, Result, Tensor};

impl Builder<'_> {
    /// Projections of the same source in one launch; none if their weights differ in dtype.
    pub(super) fn dense(
        &mut self,
        projections: &[(&Projection, &Tensor)],
        source: Source,
        target: Target,
        seen: &mut Seen,
        places: &Places,
    ) -> Result<bool> {
        let [(first, weight), rest @ ..] = projections else { return Ok(false) };
        if rest.iter().any(|(_, other)| other.dtype() != weight.dtype()) {
            return Ok(false);
        }
        let norm = source.norm.filter(|norm| norm.is_rms());
        let x = if norm.is_some() { source.x } else { self.normalized(source, seen, places)? };
        // Which the kernel counts in 32 bits.
        u32_of("numbers of x", self.sequences * source.k)?;
        let mut params = CqDense {
            weight: [std::ptr::null(); CQ_MAX_WEIGHTS as usize],
            bias: [std::ptr::null(); CQ_MAX_WEIGHTS as usize],
            y: [std::ptr::null_mut(); CQ_MAX_WEIGHTS as usize],
            x: x as *const _,
            norm: norm.map_or(0, |norm| self.weight_of(norm, source.k)) as *const _,
            residual: target.residual as *const _,
            rows: [0; CQ_MAX_WEIGHTS as usize],
            operands: u32_of("weights of a launch", projections.len())?,
            pairs: 0,
            gated: target.gated.into(),
            m: u32_of("sequences", self.sequences)?,
            k: u32_of("K", source.k)?,
            x_dtype: float_dtype(self.dtype)?,
            weight_dtype: float_dtype(weight.dtype())?,
            eps: norm.map_or(0., |norm| norm.eps),
            finish: target.finish,
        };
        let mut pairs = 0;
        for (index, (projection, weight)) in projections.iter().enumerate() {
            let places =
                (params.weight.get_mut(index), params.bias.get_mut(index), params.rows.get_mut(index));
            let (Some(place), Some(bias), Some(rows)) = places else {
                bail!("more weights than a launch has")
            };
            *place = Locked::new(weight).view()?.address(self.stream)?.as_ptr();
            *bias = self.numbers(projection.bias.as_deref()) as *const _;
            *rows = u32_of("rows of a weight", projection.rows)?;
            pairs += projection.rows.div_ceil(2);
        }
        if target.gated {
            pairs = first.rows;
        }
        for (place, y) in params.y.iter_mut().zip(target.y) {
            *place = *y as *mut _;
        }
        params.pairs = u32_of("rows of weights", pairs)?;
        let fits = |rows: &usize| *rows >= self.sequences;
        let rows = plan::DENSE_ROWS_OF_X.into_iter().find(fits).unwrap_or(plan::MOST_DENSE_ROWS_OF_X);
        let most = self.card.multiprocessors * plan::dense_blocks_at_once(rows);
        let blocks = (pairs.div_ceil(plan::DENSE_PAIRS).min(most), self.sequences.div_ceil(rows));
        let grid = Grid { blocks, shared_bytes: plan::dense_shared_bytes(rows) };
        self.push(Kernel::Dense { rows }, grid, LaunchParams::Dense(params));
        Ok(true)
    }
}
