//! Writes one file of weights: all threads on rows of stored numbers, then whole weights that have to be dequantized, one
//! at a time.

use super::ahead::Ahead;
use super::block::{self, Block, Importance};
use super::event::ConvertEvent;
use super::quality::{Quality, Sums};
use super::repack::{in_turn, multipliers, repack, repack_blocks, repack_signed, repack_with_zeros};
use super::rows::{copy_blocks, write_rows, write_widened};
use super::shard_file::ShardFile;
use super::source_digest::{of_all, SourceHasher};
use crate::chunks::Chunks;
use crate::convert::output::{Encoding, Job, OutputFile, Packing, SourcePart, Work};
use crate::importance::Feedback;
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::DenseTensor;
use candle_quant::format::{ErrorFeedback, NVFP4_MAX};
use candle_quant::{Error, QuantFormat, Result};
use rayon::prelude::*;
use safetensors::Dtype;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// Writes one file.
pub(in crate::convert) struct Writer<'a> {
    pub file: &'a OutputFile,
    /// What packs, where it can.
    pub device: &'a Device,
    /// What finds how columns make up for each other, where jobs ask for it.
    pub feedback: Option<&'a Feedback>,
    pub progress: &'a (dyn Fn(ConvertEvent) + Sync),
}

/// What is known of a file that was written.
pub(in crate::convert) struct Written {
    /// What was lost.
    pub tensors: Vec<Quality>,
    /// The digest of what was read of the source; that of nothing if the file went nowhere.
    pub source: String,
}

/// Rows, or bytes of a tensor that is copied, that one thread works on.
struct Unit<'a> {
    job: usize,
    /// Which tensor of the output, if it is copied.
    output: usize,
    source: &'a DenseTensor,
    elements: std::ops::Range<usize>,
    /// Elements of the output before these.
    before: usize,
}

impl Writer<'_> {
    /// Writes it.
    pub(in crate::convert) fn write(&self, file: ShardFile) -> Result<Written> {
        let jobs = &self.file.jobs;
        let units = self.units();
        let left: Vec<_> = jobs.iter().map(|_| AtomicUsize::new(0)).collect();
        for unit in &units {
            if let Some(left) = left.get(unit.job) {
                left.fetch_add(1, Ordering::Relaxed);
            }
        }
        let written = units.par_iter().map(|unit| {
            let Some((job, left)) = jobs.get(unit.job).zip(left.get(unit.job)) else {
                return Ok((unit.job, Sums::default(), String::new()));
            };
            let mut hasher = SourceHasher::new(file.is_written());
            let sums = self.unit(job, unit, &file, &mut hasher)?;
            let width = unit.source.size_in_bytes() / elements_of(unit.source).max(1);
            self.advance(job, unit.elements.len().saturating_mul(width) as u64);
            if left.fetch_sub(1, Ordering::Relaxed) == 1 {
                (self.progress)(ConvertEvent::Finished { tensor: &job.planned.name });
            }
            Ok((unit.job, sums, hasher.finish()))
        });
        // In order, so that the sums do not depend on the number of threads.
        let (mut sums, mut digests) = (vec![Sums::default(); jobs.len()], Vec::new());
        for (job, of_unit, digest) in written.collect::<Result<Vec<_>>>()? {
            digests.push(digest);
            if let Some(sums) = sums.get_mut(job) {
                *sums = sums.add(&of_unit);
            }
        }
        let mut tensors = Vec::new();
        let mut feedback = self.feedback.map(|feedback| Ahead::new(feedback, jobs));
        for (job, mut sums) in jobs.iter().zip(sums) {
            if self.is_whole(job) {
                let mut hasher = SourceHasher::new(file.is_written());
                let own = feedback.as_mut().map(|ahead| ahead.of(job)).transpose()?.unwrap_or_default();
                sums = self.whole(job, &own, &file, &mut hasher)?;
                digests.push(hasher.finish());
            } else if job.planned.bytes == 0 {
                // Nothing to be done, by no unit.
                (self.progress)(ConvertEvent::Finished { tensor: &job.planned.name });
            }
            tensors.extend(quality(job, &sums)?);
        }
        file.finish()?;
        Ok(Written { tensors, source: of_all(&digests) })
    }

    /// The digest of what [`write`](Self::write) reads of the source.
    pub(super) fn source_digest(&self) -> Result<String> {
        let jobs = &self.file.jobs;
        let of_unit = |unit: &Unit| {
            let (mut hasher, run) = (SourceHasher::new(true), unit.source.elements(unit.elements.clone())?);
            match jobs.get(unit.job).map(|job| &job.work) {
                Some(Work::Copy(..)) => run.for_each_chunk(|bytes| hasher.bytes(bytes))?,
                _ => hasher.tensor(&run.load(run.dtype(), &Device::Cpu)?)?,
            }
            Ok::<_, Error>(hasher.finish())
        };
        let mut digests = self.units().par_iter().map(of_unit).collect::<Result<Vec<_>>>()?;
        for job in jobs.iter().filter(|job| self.is_whole(job)) {
            let mut hasher = SourceHasher::new(true);
            match &job.work {
                Work::Repack(weights, ..) => {
                    weights.iter().try_for_each(|packed| hasher.packed(&packed.load(&Device::Cpu)?))?;
                }
                Work::Cast(parts, _) | Work::Pack(parts, ..) => {
                    parts.iter().try_for_each(|part| load(part, &mut hasher).map(drop))?;
                }
                Work::Blocks(weight) => weight.for_each_chunk(&mut |blocks| hasher.bytes(blocks))?,
                Work::Copy(..) => {}
            }
            digests.push(hasher.finish());
        }
        Ok(of_all(&digests))
    }

    fn advance(&self, job: &Job, bytes: u64) {
        (self.progress)(ConvertEvent::Advanced { tensor: &job.planned.name, bytes });
    }

    /// Whether a weight is read as a whole, after all that threads can do independently.
    fn is_whole(&self, job: &Job) -> bool {
        job.whole_bytes() > 0 || (self.feedback.is_some() && job.has_feedback())
    }

    /// What threads can do independently.
    fn units(&self) -> Vec<Unit<'_>> {
        let mut units = Vec::new();
        for (index, job) in self.file.jobs.iter().enumerate() {
            match &job.work {
                Work::Copy(outputs, _) => {
                    for (output, runs) in outputs.iter().enumerate() {
                        add_units(&mut units, index, output, runs.iter(), job);
                    }
                }
                Work::Cast(parts, _) | Work::Pack(parts, ..) if !self.is_whole(job) => {
                    let stored = parts.iter().filter_map(|part| match part {
                        SourcePart::Stored(dense) => Some(dense),
                        SourcePart::Encoded(_) | SourcePart::Viewed(..) => None,
                    });
                    add_units(&mut units, index, 0, stored, job);
                }
                Work::Cast(..) | Work::Pack(..) | Work::Repack(..) | Work::Blocks(..) => {}
            }
        }
        units
    }

    fn unit(&self, job: &Job, unit: &Unit, file: &ShardFile, hasher: &mut SourceHasher) -> Result<Sums> {
        let run = unit.source.elements(unit.elements.clone())?;
        if let Work::Copy(_, format) = &job.work {
            let Some(output) = job.outputs.get(unit.output) else {
                return Ok(Sums::default());
            };
            if output.dtype == Dtype::F32 && run.dtype() != DType::F32 {
                write_widened(&run, output.offset + (unit.before * size_of::<f32>()) as u64, file, hasher)?;
                return Ok(Sums::default());
            }
            let width = run.dtype().size_in_bytes();
            let (mut at, mut sums) = (output.offset + (unit.before * width) as u64, Sums::default());
            let mut result = Ok(());
            run.for_each_chunk(|bytes| {
                hasher.bytes(bytes);
                if result.is_ok() {
                    result = file.write(at, bytes);
                }
                at += bytes.len() as u64;
                if format.is_none() {
                    let (nan, infinite) = non_finite(bytes, run.dtype());
                    sums.count_copied((bytes.len() / width.max(1)) as u64, nan, infinite);
                }
            })?;
            return result.map(|()| sums);
        }
        let numbers = run.load(run.dtype(), &Device::Cpu)?;
        hasher.tensor(&numbers)?;
        self.scaled_rows(job, &numbers, unit.before / job.k(), &[], file)
    }

    /// As [`rows`](Self::rows), of numbers that may have to be scaled before.
    fn scaled_rows(
        &self,
        job: &Job,
        numbers: &Tensor,
        row: usize,
        feedback: &[Arc<ErrorFeedback>],
        file: &ShardFile,
    ) -> Result<Sums> {
        let Some(scaling) = &job.scaling else { return self.rows(job, numbers, row, feedback, file) };
        let numbers = scaling.apply(numbers, row * job.k(), job.rows_of_matrix())?;
        self.rows(job, &numbers, row, feedback, file)
    }

    /// Converts rows of numbers and writes them; `row` is the number of the first.
    fn rows(
        &self,
        job: &Job,
        numbers: &Tensor,
        row: usize,
        feedback: &[Arc<ErrorFeedback>],
        file: &ShardFile,
    ) -> Result<Sums> {
        let Block { bytes, sums } = match &job.work {
            Work::Pack(_, packing) => {
                let of_matrix = job.rows_of_matrix();
                let (rows, end) = (numbers.elem_count() / job.k(), row / of_matrix * of_matrix + of_matrix);
                // Of a stack, each matrix has its own.
                if row + rows > end {
                    let (first, rest) = (end - row, rows + row - end);
                    let first = numbers.narrow(0, 0, first * job.k())?;
                    let rest = numbers.narrow(0, (end - row) * job.k(), rest * job.k())?;
                    let sums = self.rows(job, &first, row, feedback, file)?;
                    return Ok(sums.add(&self.rows(job, &rest, end, feedback, file)?));
                }
                let matrix = row / of_matrix;
                let own = if feedback.len() == 1 { feedback.first() } else { feedback.get(matrix) };
                let importance = Importance {
                    columns: packing.columns.as_ref().and_then(|columns| columns.of_matrix(matrix)),
                    feedback: own.map(|own| &**own),
                };
                block::pack(numbers, job.k(), packing, importance, self.device)
                    .map_err(|error| of_tensor(error, &job.planned.name, self.device))?
            }
            Work::Cast(_, dtype) => block::cast(numbers, *dtype)?,
            Work::Copy(..) | Work::Repack(..) | Work::Blocks(..) => return Ok(Sums::default()),
        };
        write_rows(job, row, &bytes, file)?;
        Ok(sums)
    }

    /// A weight that is loaded as a whole.
    fn whole(
        &self,
        job: &Job,
        feedback: &[Arc<ErrorFeedback>],
        file: &ShardFile,
        hasher: &mut SourceHasher,
    ) -> Result<Sums> {
        let mut sums = Sums::default();
        match &job.work {
            Work::Repack(weights, format, encoding) => {
                let mut loaded = Vec::new();
                for packed in weights {
                    let weight = packed.load(&Device::Cpu)?;
                    hasher.packed(&weight)?;
                    loaded.push(weight);
                }
                let weight = in_turn(&job.planned.name, loaded)?;
                let write = |row, bytes: Vec<_>| write_rows(job, row, &bytes, file);
                let name = weights.first().map_or(job.planned.name.as_str(), |weight| weight.name());
                match encoding {
                    Encoding::Blocks(kind) => {
                        repack_blocks(name, &weight, *kind, write)?;
                        if let Some(output) = job.outputs.get(1) {
                            file.write(output.offset, &multipliers(name, &weight, output)?)?;
                        }
                    }
                    Encoding::Signed(kind) => repack_signed(name, &weight, *kind, write)?,
                    Encoding::WithZeros => repack_with_zeros(name, &weight, write)?,
                    Encoding::Parts | Encoding::Whole(_) => {
                        repack(name, weight, *format, &job.outputs, write)?;
                    }
                }
                self.advance(job, job.planned.source_bytes);
            }
            Work::Pack(parts, packing @ Packing { encoding: Encoding::Whole(kind), .. }) => {
                let mut numbers = Vec::new();
                for part in parts {
                    numbers.extend(load(part, hasher)?.map_tensors(|_, numbers| numbers)?);
                }
                let numbers = in_one_dtype(&numbers)?;
                let Block { bytes, sums: of_all } = block::pack_whole(&numbers, job.k(), *kind, packing)
                    .map_err(|error| of_tensor(error, &job.planned.name, self.device))?;
                sums = of_all;
                let unknown = job.outputs.iter().filter(|output| output.value.is_none());
                for (output, bytes) in unknown.zip(&bytes) {
                    file.write(output.offset, bytes)?;
                }
                self.advance(job, job.planned.source_bytes);
            }
            Work::Cast(parts, _) | Work::Pack(parts, ..) => {
                let (mut before, part_bytes) = (0, job.planned.source_bytes / parts.len().max(1) as u64);
                for part in parts {
                    let chunks = load(part, hasher)?;
                    // Its rows may have another length than those of the output.
                    let row = |first: usize| (before + first * chunks.columns()) / job.k();
                    let of_chunks = chunks.map_tensors(|first, numbers| {
                        self.scaled_rows(job, &numbers, row(first), feedback, file)
                    })?;
                    for of_chunk in of_chunks {
                        sums = sums.add(&of_chunk?);
                    }
                    before += chunks.rows_in_all().saturating_mul(chunks.columns());
                    self.advance(job, part_bytes);
                }
            }
            Work::Blocks(weight) => {
                copy_blocks(job, weight, file, hasher)?;
                self.advance(job, job.planned.source_bytes);
            }
            Work::Copy(..) => {}
        }
        (self.progress)(ConvertEvent::Finished { tensor: &job.planned.name });
        Ok(sums)
    }
}

fn load(part: &SourcePart, hasher: &mut SourceHasher) -> Result<Chunks> {
    let chunks = part.load()?;
    hasher.weight(chunks.loaded())?;
    Ok(chunks)
}

/// Numbers one after another, in the dtype that all have, or in F32.
fn in_one_dtype(numbers: &[Tensor]) -> Result<Tensor> {
    let dtype = numbers.first().map_or(DType::F32, Tensor::dtype);
    if numbers.iter().all(|part| part.dtype() == dtype) {
        return Ok(Tensor::cat(numbers, 0)?);
    }
    let widened: Vec<_> =
        numbers.iter().map(|part| part.to_dtype(DType::F32)).collect::<candle_core::Result<_>>()?;
    Ok(Tensor::cat(&widened, 0)?)
}

/// The error with the name of the tensor that was packed.
fn of_tensor(error: Error, name: &str, device: &Device) -> Error {
    match (error, device) {
        (Error::Candle(error), Device::Cpu) => Error::Candle(error.context(format!("packing `{name}`"))),
        (Error::Candle(error), device) => {
            let place = device.location();
            Error::Candle(error.context(format!("packing `{name}` on {place:?}; --cpu does without")))
        }
        (Error::Unsupported { what, remedy }, _) => {
            Error::Unsupported { what: format!("packing `{name}`: {what}"), remedy }
        }
        (Error::Mismatch { what, expected, found }, _) => {
            Error::Mismatch { what: format!("packing `{name}`: {what}"), expected, found }
        }
        (other, _) => other,
    }
}

fn elements_of(tensor: &DenseTensor) -> usize {
    tensor.dims().iter().product()
}

/// Cuts tensors that follow one another in the output into whole rows.
fn add_units<'a>(
    units: &mut Vec<Unit<'a>>,
    job_index: usize,
    output: usize,
    sources: impl Iterator<Item = &'a DenseTensor>,
    job: &Job,
) {
    let step = job.block_rows().saturating_mul(job.k());
    let mut before = 0;
    for source in sources {
        let count = elements_of(source);
        for start in (0..count).step_by(step) {
            let elements = start..count.min(start.saturating_add(step));
            units.push(Unit { job: job_index, output, source, elements, before: before + start });
        }
        before += count;
    }
}

/// What is to be told of a tensor; nothing of one that is only copied.
fn quality(job: &Job, sums: &Sums) -> Result<Option<Quality>> {
    let planned = &job.planned;
    if job.format() == Some(QuantFormat::NVFP4) && sums.largest > f64::from(NVFP4_MAX) {
        return Err(Error::mismatch(
            format!("`{}` as nvfp4", planned.name),
            format!("magnitudes up to {NVFP4_MAX}, which it holds without a global scale"),
            format!("{}; give this tensor another format", sums.largest),
        ));
    }
    let converted = matches!(job.work, Work::Cast(..) | Work::Pack(..));
    Ok((converted || sums.non_finite() > 0).then(|| sums.quality(&planned.name, &planned.from, &planned.to)))
}

/// How many numbers of a float dtype are NaN, and how many infinite.
#[allow(clippy::wildcard_enum_match_arm, reason = "integers are finite")]
fn non_finite(bytes: &[u8], dtype: DType) -> (u64, u64) {
    let count = |exponents: u64, width: usize| {
        let (mut nan, mut infinite) = (0, 0);
        for number in bytes.chunks_exact(width) {
            let bits = number.iter().rev().fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
            let sign = 1u64 << (8 * width - 1);
            if bits & exponents == exponents {
                let is_infinite = bits & !sign == exponents;
                infinite += u64::from(is_infinite);
                nan += u64::from(!is_infinite);
            }
        }
        (nan, infinite)
    };
    match dtype {
        DType::F16 => count(0x7C00, 2),
        DType::BF16 => count(0x7F80, 2),
        DType::F32 => count(0x7F80_0000, 4),
        DType::F64 => count(0x7FF0 << 48, 8),
        _ => (0, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_of_packing_names_the_tensor() {
        let errors = [
            Error::Candle(candle_core::Error::Msg("out of memory".into())),
            Error::Unsupported { what: "quantizing to symmetric 4-bit g64".into(), remedy: "other".into() },
            Error::mismatch("K of mxfp4", "a multiple of 32", "31"),
        ];
        for error in errors {
            let (text, named) = (error.to_string(), of_tensor(error, "m.weight", &Device::Cpu).to_string());
            assert!(named.contains("`m.weight`") && named.contains(&text), "{text}: {named}");
        }
    }
}
