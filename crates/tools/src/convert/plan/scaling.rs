//! What modules are given that can be scaled: which tensors multiply by it, and which make it.

use crate::convert::output::{Encoding, Job, Packing, Scaling, SourcePart, View, Work};
use crate::importance::ColumnScales;
use candle_quant::checkpoint::{module_of, Checkpoint};
use candle_quant::{Error, Result};
use candle_quant_models::{Config, Maker, ScaledInput};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};

/// An input of modules that can be scaled.
#[derive(Clone, Debug)]
pub(in crate::convert) struct ScaledGroup {
    pub input: ScaledInput,
    /// How many matrices have scales of their own, and of how many columns.
    pub dims: (usize, usize),
    /// The tensors that it is multiplied by, and which of the scales each has: those of one expert, or of all.
    pub readers: Vec<(String, Option<usize>)>,
    pub makers: Vec<Making>,
    /// Whether tensors are scaled that stay dense, of fewer than 32 bits: scales are powers of two then, so that nothing is rounded.
    pub has_dense: bool,
    /// Whether a weight is packed that it is multiplied by.
    pub is_packed: bool,
    /// Of each column the first that has the same scale.
    pub shared_with: Vec<usize>,
}

/// How a tensor makes an input.
#[derive(Clone, Debug)]
pub(in crate::convert) struct Making {
    pub name: String,
    /// What is added to its numbers before they multiply, if it is the weight of a norm.
    pub norm: Option<f32>,
    /// Of its rows, of all matrices one after another, the scales that they have: matrix and column.
    rows: Vec<Option<(usize, usize)>>,
    width: usize,
}

/// Why an input is not scaled, and whether a weight is packed that it is multiplied by.
type Refused = Vec<(ScaledInput, String, bool)>;

/// What was found of one input.
#[derive(Default)]
struct Found<'a> {
    readers: Vec<&'a Job>,
    /// With the part that makes it.
    makers: Vec<(&'a Job, Part<'a>, Maker)>,
}

/// What a tensor is of its module.
#[derive(Clone, Copy, Debug)]
struct Part<'a> {
    module: &'a str,
    is_bias: bool,
}

impl<'a> Part<'a> {
    fn of(tensor: &'a str) -> Self {
        let bias = tensor.strip_suffix(".bias").or_else(|| tensor.strip_suffix("_bias"));
        let module = bias.or_else(|| module_of(tensor)).unwrap_or(tensor);
        Self { module, is_bias: bias.is_some() }
    }

    /// Rows of a matrix.
    fn rows(self, dims: &[usize]) -> usize {
        let place = usize::from(!self.is_bias && dims.len() > 1);
        dims.iter().rev().nth(place).copied().unwrap_or_default()
    }
}

/// The inputs that can be scaled, of those that packed weights are multiplied by; and why others can't be.
pub(super) fn groups(jobs: &[Job], config: &Config, source: &Checkpoint) -> (Vec<ScaledGroup>, Refused) {
    let mut found = BTreeMap::<ScaledInput, Found>::new();
    for job in jobs {
        let part = Part::of(&job.planned.name);
        let dims = &job.planned.shape;
        if let Some(input) = config.scaled_input(part.module).filter(|_| !part.is_bias && dims.len() > 1) {
            found.entry(input).or_default().readers.push(job);
        }
        if let Some((input, maker)) = config.makes(part.module, part.rows(dims)) {
            found.entry(input).or_default().makers.push((job, part, maker));
        }
    }
    // What the model multiplies by each.
    let mut elements = BTreeMap::<ScaledInput, usize>::new();
    for (name, expected) in config.inventory(source.tensor_names()).0 {
        let part = Part::of(&name);
        if let Some(input) = config.scaled_input(part.module).filter(|_| !part.is_bias) {
            let all = elements.entry(input).or_default();
            *all =
                expected.dims.iter().fold(1usize, |all, dim| all.saturating_mul(*dim)).saturating_add(*all);
        }
    }
    let (mut groups, mut refused) = (Vec::new(), Vec::new());
    for (input, found) in found {
        if found.readers.is_empty() {
            continue;
        }
        let is_packed = found.readers.iter().any(|job| job.packing().is_some());
        match group(input, &found, config, elements.get(&input).copied().unwrap_or_default()) {
            Ok(group) => groups.push(ScaledGroup { is_packed, ..group }),
            Err(reason) => refused.push((input, reason, is_packed)),
        }
    }
    (groups, refused)
}

fn group(
    input: ScaledInput,
    found: &Found,
    config: &Config,
    elements: usize,
) -> std::result::Result<ScaledGroup, String> {
    if let Some(reason) = config.unscalable(input) {
        return Err(reason.to_owned());
    }
    let (matrices, k) = config.scales_of(input).ok_or("its size is not known")?;
    // Tensors whose columns are rows are no modules.
    let is_turned = |job: &Job| {
        let parameter = job.planned.shape.len() > 2 && module_of(&job.planned.name).is_none();
        parameter && config.moe.as_ref().is_some_and(|moe| moe.transposed_parameters)
    };
    for job in found.readers.iter().copied().chain(found.makers.iter().map(|(job, ..)| *job)) {
        if is_turned(job) {
            return Err("experts are stored with rows for columns".to_owned());
        }
        if let Some(Packing { encoding: Encoding::Whole(kind), .. }) = job.packing() {
            return Err(format!("{} is made of whole matrices", kind.name()));
        }
        if !takes_scales(job) {
            return Err(format!("`{}` is packed already: --requantize packs it anew", job.planned.name));
        }
    }
    let count = |job: &&Job| job.planned.shape.iter().fold(1usize, |all, dim| all.saturating_mul(*dim));
    let all = found.readers.iter().map(count).fold(0usize, usize::saturating_add);
    let other = found.readers.iter().find(|job| job.planned.shape.last() != Some(&k));
    if let Some(other) = other {
        return Err(format!("`{}` has other columns than the {k} of the model", other.planned.name));
    }
    if all != elements {
        return Err("not all that sees it is known".to_owned());
    }
    let expert = |job: &Job| config.input_of(Part::of(&job.planned.name).module)?.expert;
    let own = |job: &&Job| (job.planned.name.clone(), expert(job).filter(|_| matrices > 1));
    let readers = found.readers.iter().map(own).collect();
    let (mut shared_with, mut makers, mut made) = (Vec::new(), Vec::new(), 0usize);
    for (job, part, maker) in &found.makers {
        let making = Making::of(job, *part, maker, input, config)
            .ok_or_else(|| format!("`{}` is not of the dimensions that the model has", job.planned.name))?;
        if !part.is_bias {
            made = made.saturating_add(making.rows.iter().flatten().count());
        }
        makers.push(making);
    }
    let times = config.columns_of_row(input, 0).count().max(1);
    if made.checked_mul(times) != matrices.checked_mul(k) {
        return Err("not all that makes it is known".to_owned());
    }
    shared_with.extend(0..k);
    for row in 0..k / times {
        let columns: Vec<_> = config.columns_of_row(input, row).collect();
        for column in &columns {
            if let (Some(shared), Some(first)) = (shared_with.get_mut(*column), columns.first()) {
                *shared = *first;
            }
        }
    }
    let is_norm = |part: &Part, maker: &Maker| !part.is_bias && matches!(maker, Maker::Norm { .. });
    let dense_makers =
        found.makers.iter().filter(|(_, part, maker)| !is_norm(part, maker)).map(|(job, ..)| *job);
    let has_dense = found.readers.iter().copied().chain(dense_makers).any(is_narrow);
    Ok(ScaledGroup { input, dims: (matrices, k), readers, makers, has_dense, is_packed: false, shared_with })
}

/// Whether a tensor stays dense, of numbers of fewer than 32 bits.
fn is_narrow(job: &Job) -> bool {
    job.packing().is_none() && job.outputs.first().is_some_and(|output| output.dtype != Dtype::F32)
}

/// Whether the numbers of a tensor are there, to be scaled.
fn takes_scales(job: &Job) -> bool {
    let is_float = || {
        job.outputs
            .first()
            .is_some_and(|output| matches!(output.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16))
    };
    match &job.work {
        Work::Pack(..) => true,
        Work::Cast(..) | Work::Copy(_, None) => is_float(),
        Work::Copy(_, Some(_)) | Work::Repack(..) | Work::Blocks(..) => false,
    }
}

impl Making {
    fn of(job: &Job, part: Part, maker: &Maker, input: ScaledInput, config: &Config) -> Option<Self> {
        let dims = &job.planned.shape;
        let (name, (matrices, k)) = (job.planned.name.clone(), config.scales_of(input)?);
        match maker {
            Maker::Norm { one_plus } => {
                if *dims.as_slice() != [k] {
                    return None;
                }
                // As it is written: some tools add one to norms.
                let added = |part: &SourcePart| match part {
                    SourcePart::Viewed(_, View::PlusOne) => -1.,
                    SourcePart::Viewed(_, View::LessOne) => 1.,
                    SourcePart::Viewed(..) | SourcePart::Stored(_) | SourcePart::Encoded(_) => 0.,
                };
                let parts = match &job.work {
                    Work::Cast(parts, _) | Work::Pack(parts, _) => parts.as_slice(),
                    Work::Copy(..) | Work::Repack(..) | Work::Blocks(..) => &[],
                };
                let offset = f32::from(u8::from(*one_plus)) + parts.first().map_or(0., added);
                let rows = (0..k).map(|column| Some((0, column))).collect();
                Some(Self { name, norm: (!part.is_bias).then_some(offset), rows, width: 1 })
            }
            Maker::Rows(own) => {
                let n = part.rows(dims);
                let stack = dims.iter().rev().skip(if part.is_bias { 1 } else { 2 }).product::<usize>();
                let expert = config.input_of(part.module)?.expert;
                let mut rows = vec![None; stack.checked_mul(n)?];
                for (matrix, rows) in rows.chunks_exact_mut(n.max(1)).enumerate() {
                    let matrix = if matrices > 1 { expert.unwrap_or(matrix) } else { 0 };
                    for (index, row) in rows.get_mut(own.clone())?.iter_mut().enumerate() {
                        let column = config.columns_of_row(input, index).next()?;
                        *row = (matrix < matrices && column < k).then_some((matrix, column));
                    }
                }
                let width = if part.is_bias { 1 } else { dims.last().copied()? };
                Some(Self { name, norm: None, rows, width })
            }
        }
    }

    /// What the rows are divided by.
    fn divisors(&self, scales: &[Vec<f32>]) -> Vec<f32> {
        let of_row = |(matrix, column): (usize, usize)| scales.get(matrix)?.get(column).copied();
        self.rows.iter().map(|row| row.and_then(of_row).unwrap_or(1.)).collect()
    }
}

/// Scales what there are scales for.
///
/// # Errors
/// If they are those of another model.
pub(super) fn apply(jobs: &mut [Job], groups: &[ScaledGroup], scales: &ColumnScales) -> Result<()> {
    let places: BTreeMap<_, _> =
        jobs.iter().enumerate().map(|(index, job)| (job.planned.name.clone(), index)).collect();
    for group in groups {
        let Some(scales) = scales.get(group.input) else { continue };
        let (matrices, k) = group.dims;
        if scales.len() != matrices || scales.iter().any(|row| row.len() != k) {
            let found = format!("{} rows of {}", scales.len(), scales.first().map_or(0, Vec::len));
            return Err(Error::mismatch(
                format!("scales of {}", group.input),
                format!("{matrices} rows of {k}"),
                found,
            ));
        }
        let of_expert = |expert: Option<usize>| match expert.and_then(|expert| scales.get(expert)) {
            Some(own) => vec![own.clone()],
            None => scales.to_vec(),
        };
        for (name, expert) in &group.readers {
            let Some(job) = places.get(name).and_then(|place| jobs.get_mut(*place)) else { continue };
            let own = of_expert(*expert);
            if let Work::Pack(_, Packing { columns: Some(columns), .. }) = &mut job.work {
                *columns = columns.of_scaled(&own);
            }
            let k = job.k();
            let scaling = scaling_of(job);
            (scaling.columns, scaling.width) = (own, k);
        }
        for making in &group.makers {
            let Some(job) = places.get(&making.name).and_then(|place| jobs.get_mut(*place)) else { continue };
            let scaling = scaling_of(job);
            scaling.rows = making.divisors(scales);
            (scaling.width, scaling.offset) = (making.width, making.norm.unwrap_or_default());
        }
    }
    Ok(())
}

/// What a tensor is scaled by, which is said of it.
fn scaling_of(job: &mut Job) -> &mut Scaling {
    if let Work::Copy(runs, None) = &job.work {
        let runs: Vec<_> = runs.iter().flatten().cloned().collect();
        let dtype = runs.first().map(|run| run.dtype());
        let parts = runs.into_iter().map(SourcePart::Stored).collect();
        job.work = Work::Cast(parts, dtype.unwrap_or(candle_core::DType::F32));
    }
    if job.scaling.is_none() {
        job.planned.to.push_str(", scaled");
    }
    job.scaling.get_or_insert_default()
}

/// What is not scaled, and why.
pub(super) fn notes(groups: &[ScaledGroup], scales: &ColumnScales, refused: &Refused) -> Vec<String> {
    let mut reasons = BTreeMap::<(String, &str), BTreeSet<usize>>::new();
    let is_asked = |input: ScaledInput, is_packed: bool| is_packed || scales.get(input).is_some();
    for (input, reason, _) in refused.iter().filter(|(input, _, is_packed)| is_asked(*input, *is_packed)) {
        reasons.entry((input.to_string(), reason)).or_default().extend(input.layer);
    }
    let mut notes: Vec<_> = reasons
        .iter()
        .map(|((what, reason), layers)| match layers.is_empty() {
            true => format!("{what} is not scaled: {reason}"),
            false => format!("{what} in {} is not scaled: {reason}", in_words(layers)),
        })
        .collect();
    let unchanged = groups.iter().filter(|group| scales.get(group.input).is_none());
    match unchanged.count() {
        0 => {}
        count => notes
            .push(format!("{count} of {} inputs are not scaled: nothing would be saved by it", groups.len())),
    }
    notes
}

/// `layer 3`, `layers 0 to 4, 7`.
fn in_words(layers: &BTreeSet<usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &layer in layers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == layer => *last = layer,
            _ => runs.push((layer, layer)),
        }
    }
    let words = runs.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first} to {last}"),
    });
    let words: Vec<_> = words.collect();
    let noun = if layers.len() == 1 { "layer" } else { "layers" };
    format!("{noun} {}", words.join(", "))
}
