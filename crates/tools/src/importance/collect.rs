//! Statistics by a model's own run.

use super::columns::ColumnSums;
use super::file::{Begun, Progress};
use super::observed::ObservedModel;
use super::statistics::Statistics;
use super::text::CalibrationText;
use crate::source::fingerprint;
use candle_core::Tensor;
use candle_quant::nn::{AdapterSlot, LayerInput};
use candle_quant::{Checkpoint, Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Runs a model on a text, piece by piece, and sums the squares of what its layers are given. What is done can be kept in a
/// file and taken up again: the sums are the same, to the bit.
pub struct Collector<'a> {
    model: ObservedModel<BTreeMap<String, ColumnSums>>,
    text: &'a CalibrationText,
    progress: Progress,
}

impl<'a> Collector<'a> {
    /// Loads the model of a checkpoint, in f32. Nothing is run yet.
    ///
    /// # Errors
    /// If the checkpoint has no model that is known, or is damaged.
    pub fn new(source: &Checkpoint, text: &'a CalibrationText) -> Result<Self> {
        let progress = Progress {
            source: fingerprint(source)?,
            text: text.digest().to_owned(),
            pieces: text.pieces().len(),
            done: 0,
        };
        let model = ObservedModel::new(
            source,
            |model| {
                let of_slot = |slot: AdapterSlot| {
                    let sums = match *slot.dims() {
                        [experts, _, k] => ColumnSums::new(experts, k),
                        [_, k] => ColumnSums::new(1, k),
                        _ => return None,
                    };
                    Some((slot.module().to_owned(), sums))
                };
                Ok(model.adapters().slots().into_iter().filter_map(of_slot).collect())
            },
            add,
        )?;
        Ok(Self { model, text, progress })
    }

    /// Takes up what a file has of the same source and text, and returns whether all of it is done. A file of another one is
    /// refused; if there is none, nothing is done.
    ///
    /// # Errors
    /// If the file can't be read, or is not of this source and text.
    pub fn take_up(&mut self, path: impl AsRef<Path>) -> Result<bool> {
        let path = path.as_ref();
        if let Some(begun) = Begun::read(path)? {
            let Begun { statistics, progress } = begun;
            if progress.text != self.progress.text {
                return Err(Error::file(
                    path,
                    "statistics of another text",
                    "remove it, or give another file",
                ));
            }
            progress.check_source(path, &self.progress.source)?;
            self.model.seen(|seen| -> Result<()> {
                for (name, sums) in seen.iter_mut() {
                    match statistics.module(name) {
                        Some(read) if read.columns() == sums.columns() => *sums = read.clone(),
                        _ => {
                            let problem = format!("no statistics of `{name}`, which the model has");
                            return Err(Error::file(path, problem, "remove it, or give another file"));
                        }
                    }
                }
                Ok(())
            })?;
            self.progress.done = progress.done.min(self.progress.pieces);
        }
        Ok(self.is_done())
    }

    /// Runs the model on the next piece; false if there is none.
    ///
    /// # Errors
    /// If the model can't run, or gives a layer numbers that are not finite.
    pub fn advance(&mut self) -> Result<bool> {
        let Some(piece) = self.text.pieces().get(self.progress.done) else { return Ok(false) };
        self.model.run(piece)?;
        self.progress.done += 1;
        Ok(true)
    }

    /// Pieces that are done, and all.
    pub fn done(&self) -> (usize, usize) {
        (self.progress.done, self.progress.pieces)
    }

    fn is_done(&self) -> bool {
        self.progress.done >= self.progress.pieces
    }

    /// What was seen so far.
    pub fn statistics(&self) -> Statistics {
        let origin = format!("statistics of a text of {} tokens", self.text.tokens());
        Statistics::new(origin, self.model.seen(|seen| seen.clone()))
    }

    /// Writes what was seen so far to a file, which appears when it is complete.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        Begun { statistics: self.statistics(), progress: self.progress.clone() }.write(path.as_ref())
    }
}

fn add(
    seen: &mut BTreeMap<String, ColumnSums>,
    input: &LayerInput,
    rows: &Tensor,
) -> candle_core::Result<()> {
    let rows = rows.flatten_all()?.to_vec1::<f32>()?;
    if let Some(wrong) = rows.iter().find(|number| !number.is_finite()) {
        candle_core::bail!(
            "`{}` is given {wrong}: the model computes nothing that statistics can be of",
            input.module
        );
    }
    if let Some(sums) = seen.get_mut(input.module) {
        sums.add(input.expert.unwrap_or(0), &rows);
    }
    Ok(())
}
