//! By what the columns of weights are multiplied before they are packed, as in AWQ.
//!
//! The columns that are given large numbers lose least if they are made larger themselves, as far as that does not widen the
//! range of their groups too much. So what modules are given has the scales `rms^alpha`, where `rms` are the roots of the mean
//! squares of its elements, and `alpha` is the one of a grid with which outputs lose least: what all modules lose that it is given
//! to is the sum of `e H e^T` for the errors `e` of their rows, where `H` is the sum of `x x^T`.

mod candidates;
mod kept;

use super::output::{Job, SourcePart, Work};
use super::plan::{ConvertPlan, ScaledGroup};
use super::run::as_packed;
use crate::importance::{products, CalibrationText, ColumnScales, Feedback};
use candidates::{candidates, Norm};
use candle_core::{DType, Device, Tensor};
use candle_quant::nn::AdapterSlot;
use candle_quant::{Error, Result};
use candle_quant_models::Config;
use kept::Kept;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// Rows of each matrix whose errors are looked at, about.
const ROWS: usize = 512;

/// Chooses by what the columns of the weights that a plan packs are multiplied, by what the model of its source is given for a text.
/// `tell` gets how many inputs are done, first those that were before, and how many there are. A plan with these
/// [`scales`](super::ConvertOptions::scales), and the same options otherwise, writes the model that is scaled by them.
///
/// With a file what is found is `kept` there, each time that the model has run, and taken from there if the source, the text and the
/// plan are the same.
///
/// # Errors
/// If the model can't run, or gives layers numbers that are not finite; if weights can't be read; if the file is of something else,
/// or can't be written.
pub fn column_scales(
    plan: &ConvertPlan,
    text: &CalibrationText,
    kept: Option<&Path>,
    tell: &dyn Fn(usize, usize),
) -> Result<ColumnScales> {
    let config = Config::from_checkpoint(&plan.source)?;
    let jobs: BTreeMap<&str, &Job> = plan.jobs().map(|job| (job.planned.name.as_str(), job)).collect();
    let bytes = |group: &ScaledGroup| {
        let (matrices, k) = group.dims;
        (matrices as u64).saturating_mul(k as u64).saturating_mul(k as u64).saturating_mul(8)
    };
    let groups: Vec<_> = plan.scaled.iter().filter(|group| group.is_packed).collect();
    let dims: Vec<_> = groups.iter().map(|group| group.dims).collect();
    let mut kept = Kept::read(kept, plan, text, &dims)?;
    tell(kept.found.len(), groups.len());
    let mut left = groups.get(kept.found.len()..).unwrap_or_default();
    while !left.is_empty() {
        let mut sum = 0u64;
        let fits = |group: &&&ScaledGroup| {
            sum = sum.saturating_add(bytes(group));
            sum <= Feedback::MOST_BYTES
        };
        let count = left.iter().take_while(fits).count().max(1);
        let (next, rest) = left.split_at_checked(count).unwrap_or((left, &[]));
        for (group, sums) in next.iter().zip(sums_of(plan, &config, text, next)?) {
            kept.found.push(search(group, &sums, &jobs)?);
            tell(kept.found.len(), groups.len());
        }
        kept.write()?;
        left = rest;
    }
    let mut scales = ColumnScales::default();
    for (group, found) in groups.iter().zip(kept.found) {
        if let Some(found) = found {
            scales.insert(group.input, found)?;
        }
    }
    Ok(scales)
}

/// For each input the sums of products, of each of its matrices.
fn sums_of(
    plan: &ConvertPlan,
    config: &Config,
    text: &CalibrationText,
    groups: &[&ScaledGroup],
) -> Result<Vec<Vec<Vec<f64>>>> {
    let places = |slots: &[AdapterSlot]| {
        let of_group = |group: &ScaledGroup| -> Vec<(String, usize, usize)> {
            let (matrices, k) = group.dims;
            // Routers, and what is no stack, see all that there is; experts what they were chosen for.
            let sees = |slot: &&AdapterSlot| {
                let is_stack = slot.dims().len() > 2;
                config.scaled_input(slot.module()) == Some(group.input) && is_stack == (matrices > 1)
            };
            let first = slots.iter().filter(sees).map(|slot| slot.module()).min();
            let all = 0..matrices;
            first.map_or_else(Vec::new, |module| all.map(|expert| (module.to_owned(), expert, k)).collect())
        };
        let places: Vec<_> = groups.iter().map(|group| of_group(group)).collect();
        (places.concat(), places)
    };
    let (mut products, places) = products(&plan.source, text, places)?;
    let mut of_group = |(group, places): (&&ScaledGroup, Vec<(String, usize, usize)>)| {
        if places.is_empty() {
            let expected = "a layer of the model that sees it";
            return Err(Error::mismatch(group.input.to_string(), expected, "none"));
        }
        // An input is one group's alone.
        Ok(places.into_iter().filter_map(|(module, expert, _)| products.remove(&(module, expert))).collect())
    };
    groups.iter().zip(places.unwrap_or_default()).map(&mut of_group).collect()
}

/// The scales of one input; none if nothing is saved by any.
fn search(
    group: &ScaledGroup,
    sums: &[Vec<f64>],
    jobs: &BTreeMap<&str, &Job>,
) -> Result<Option<Vec<Vec<f32>>>> {
    let norm = group.makers.iter().find_map(|making| Some((making.norm?, jobs.get(making.name.as_str())?)));
    let norm = norm.map(|(offset, job)| Norm::of(job, offset)).transpose()?;
    let readers = group.readers.iter().filter_map(|(name, expert)| Some((jobs.get(name.as_str())?, *expert)));
    let readers = readers
        .map(|(job, expert)| Reader::load(job, expert))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect::<Vec<_>>();
    let k = group.dims.1;
    let sums = sums.iter().map(|sums| Sums::new(sums, k)).collect::<Result<Vec<_>>>()?;
    let plain = vec![vec![1.; k]; group.dims.0];
    let lost = |scales: &[Vec<f32>]| -> Result<f64> {
        readers.iter().map(|reader| reader.lost(scales, &sums)).sum()
    };
    let rms = sums.iter().map(|sums| sums.rms.as_slice());
    let tried = candidates(group, rms, norm.as_ref()).collect::<Result<Vec<_>>>()?;
    let losses = tried.par_iter().map(|scales| lost(scales)).collect::<Result<Vec<_>>>()?;
    let (mut best, mut least) = (None, lost(&plain)?);
    for (scales, lost) in tried.into_iter().zip(losses) {
        if lost < least {
            (best, least) = (Some(scales), lost);
        }
    }
    Ok(best)
}

/// What is known of the input of one matrix.
struct Sums {
    products: Tensor,
    rms: Vec<f64>,
}

impl Sums {
    fn new(products: &[f64], k: usize) -> Result<Self> {
        if let Some(wrong) = products.iter().find(|number| !number.is_finite()) {
            return Err(Error::mismatch("sums of products", "finite numbers", wrong.to_string()));
        }
        let rms = products.iter().step_by(k.saturating_add(1)).map(|square| square.max(0.).sqrt()).collect();
        Ok(Self { products: Tensor::from_slice(products, (k, k), &Device::Cpu)?, rms })
    }
}

/// Some rows of a weight that is packed.
struct Reader<'a> {
    job: &'a Job,
    expert: Option<usize>,
    /// Of each matrix.
    rows: Vec<Vec<f32>>,
}

impl<'a> Reader<'a> {
    /// None of a weight that is not packed.
    fn load(job: &'a Job, expert: Option<usize>) -> Result<Option<Self>> {
        let Work::Pack(parts, _) = &job.work else { return Ok(None) };
        let (n, k) = (job.rows_of_matrix(), job.k());
        let step = n.div_ceil(ROWS).max(1);
        let matrices = job.planned.shape.iter().rev().skip(2).product::<usize>();
        let mut rows = vec![Vec::new(); matrices];
        let mut before = 0usize;
        for numbers in parts.iter().flat_map(numbers_of) {
            let numbers = numbers?;
            for (index, row) in numbers.chunks_exact(k).enumerate() {
                let at = before + index;
                if (at % n).is_multiple_of(step) {
                    rows.get_mut(at / n).into_iter().for_each(|rows: &mut Vec<f32>| rows.extend(row));
                }
            }
            before += numbers.len() / k;
        }
        Ok(Some(Self { job, expert, rows }))
    }

    /// What its outputs lose if its columns are multiplied by these scales.
    fn lost(&self, scales: &[Vec<f32>], sums: &[Sums]) -> Result<f64> {
        let Some(packing) = self.job.packing() else { return Ok(0.) };
        let (k, mut lost) = (self.job.k(), 0.);
        for (matrix, rows) in self.rows.iter().enumerate() {
            let own = self.expert.unwrap_or(matrix);
            let (Some(scales), Some(sums)) =
                (scales.get(own).or(scales.first()), sums.get(own).or(sums.first()))
            else {
                continue;
            };
            let columns =
                packing.columns.as_ref().map(|columns| columns.of_scaled(std::slice::from_ref(scales)));
            let columns = columns.as_ref().and_then(|columns| columns.of_matrix(matrix));
            let scaled = rows.chunks_exact(k).flat_map(|row| row.iter().zip(scales).map(|(x, s)| x * s));
            let packed = as_packed(scaled.collect(), k, packing, columns)?;
            let errors = rows.chunks_exact(k).zip(packed.chunks_exact(k)).flat_map(|(row, packed)| {
                row.iter().zip(packed).zip(scales).map(|((x, packed), scale)| f64::from(packed / scale - x))
            });
            let errors = Tensor::from_vec(errors.collect::<Vec<f64>>(), (rows.len() / k, k), &Device::Cpu)?;
            // Rows that were left out lose as much as the others.
            let share = self.job.rows_of_matrix() as f64 / (rows.len() / k).max(1) as f64;
            lost += share * (errors.matmul(&sums.products)? * &errors)?.sum_all()?.to_scalar::<f64>()?;
        }
        Ok(lost)
    }
}

/// The numbers of a part, some rows at a time.
fn numbers_of(part: &SourcePart) -> Vec<Result<Vec<f32>>> {
    let chunks = part.load().and_then(|chunks| {
        chunks.map_tensors(|_, numbers| Ok(numbers.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?))
    });
    chunks.unwrap_or_else(|error| vec![Err(error)])
}
