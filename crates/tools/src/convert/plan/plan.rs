//! What a conversion will do, from headers alone.

use super::planner::Planner;
use super::published::PublishedPlan;
use super::scaling::{self, ScaledGroup};
use crate::convert::options::ConvertOptions;
use crate::convert::output::{Job, OutputFile, SourcePart, TensorPlan, Work};
use crate::convert::recipe::{Fallback, FileType, Spec};
use crate::convert::target::Target;
use crate::importance::Feedback;
use candle_core::Device;
use candle_quant::checkpoint::{
    module_of, natural_order, Checkpoint, FusedExperts, HubName, OllamaName, Weight,
};
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::{Config, PublishedForm};
use std::collections::{BTreeMap, BTreeSet};

/// What a conversion will do.
#[derive(Clone, Debug)]
pub struct ConvertPlan {
    pub(in crate::convert) source: Checkpoint,
    pub(in crate::convert) target: Target,
    /// What packs. It decides about none of the bytes.
    pub(in crate::convert) device: Device,
    /// The model of a store that it is to become.
    pub(in crate::convert) model: Option<OllamaName>,
    pub(in crate::convert) files: Vec<OutputFile>,
    /// What the whole checkpoint is called after; `None` if nothing is packed.
    pub(in crate::convert) top: Option<Spec>,
    /// What the recipe does with rows that are no whole number of groups.
    pub(in crate::convert) fallback: Fallback,
    /// Finds what columns make up for, if they do.
    pub(in crate::convert) feedback: Option<Feedback>,
    /// What modules are given that can be scaled.
    pub(in crate::convert) scaled: Vec<ScaledGroup>,
    notes: Vec<String>,
    /// Whether there are files of several recipes.
    pub(super) is_several: bool,
    /// The model as transformers knows it, if it is written so.
    pub(super) published: Option<PublishedPlan>,
}

impl ConvertPlan {
    /// Plans the conversion of `source`. Of the weights nothing is read, but the F32 scales of symmetric codes.
    ///
    /// # Errors
    /// If a tensor can't be read or has no form in the output; if two tensors get one name, or the config is
    /// malformed; with
    /// [`ConvertOptions::strict`], if a tensor can't become what its rule says.
    pub fn new(source: &Checkpoint, options: &ConvertOptions) -> Result<Self> {
        let config = Config::from_checkpoint(source).ok();
        let planner = Planner::new(source, options, config.as_ref());
        // The first form of transformers in which something is packed, or else the last one.
        let forms = match options.dequantize {
            true => &[PublishedForm::Dense][..],
            false => &[PublishedForm::Blocks, PublishedForm::Packed, PublishedForm::Dense],
        };
        let (mut published, mut jobs) = (None, Vec::new());
        for form in forms {
            (published, jobs) = planner.all_jobs(*form)?;
            if published.is_none() || jobs.iter().any(|job| job.format().is_some()) {
                break;
            }
        }
        jobs.sort_by(|a, b| natural_order(&a.planned.name, &b.planned.name));
        if jobs.is_empty() {
            return Err(Error::file(source.path(), "no tensors", "give a checkpoint that has weights"));
        }
        check_names(&jobs)?;
        if options.target == Target::Ollama {
            check_stacks(&jobs, planner.family.fused)?;
        }
        let (scaled, refused) = match &config {
            Some(config) => scaling::groups(&jobs, config, source),
            None => Default::default(),
        };
        let scaling_notes = match &options.scales {
            Some(scales) => {
                scaling::apply(&mut jobs, &scaled, scales)?;
                scaling::notes(&scaled, scales, &refused)
            }
            None => Vec::new(),
        };
        let top = top(&jobs, options.recipe.asked());
        let target = options.target;
        let files = target.kind().files(source, jobs, top, options.max_shard_size)?;
        let model = options.model()?.cloned();
        let (device, fallback) = (options.device.clone(), options.recipe.fallback);
        let (source, notes) = (source.clone(), planner.notes());
        let feedback =
            options.feedback.as_ref().map(|text| Feedback::new(&source, text.clone())).transpose()?;
        let mut plan = Self {
            source,
            target,
            device,
            model,
            files,
            top,
            fallback,
            feedback,
            scaled,
            notes,
            is_several: false,
            published,
        };
        plan.notes.extend(planner.importance.notes()?);
        plan.notes.extend(scaling_notes);
        plan.notes.extend(plan.published.iter().flat_map(|published| published.notes.clone()));
        plan.notes.extend(plan.note_of_device());
        plan.notes.extend(plan.note_of_readers());
        plan.notes.extend(plan.notes_of_transformers());
        if plan.config_json()?.is_none() && target.kind().needs_config() {
            let problem =
                format!("no config.json, without which there is no model in {}", target.kind().name());
            return Err(Error::file(plan.source.path(), problem, "put that of the model beside the weights"));
        }
        let fallen = plan.tensors().find_map(|tensor| Some((tensor, tensor.fallback.as_ref()?)));
        if let Some((tensor, reason)) = fallen.filter(|_| options.strict) {
            return Err(Error::mismatch(
                format!("`{}`", tensor.name),
                format!("what the rule `{}` says", tensor.rule),
                format!("{} ({reason}); {} tensors fall back", tensor.to, plan.fallbacks()),
            ));
        }
        for recipe in &options.also {
            let one = ConvertOptions { recipe: recipe.clone(), also: Vec::new(), ..options.clone() };
            let other = Self::new(&plan.source, &one)?;
            let inputs = |plan: &Self| plan.scaled.iter().map(|group| group.input).collect::<BTreeSet<_>>();
            if options.scales.is_some() && inputs(&plan) != inputs(&other) {
                let expected =
                    "formats whose columns can be scaled for the same inputs, since all of them share norms";
                return Err(Error::mismatch(
                    "several formats",
                    expected,
                    "others; leave out --awq, or convert into a folder each",
                ));
            }
            target.kind().join(&mut plan.files, other.files)?;
            let notes: Vec<_> = other.notes.into_iter().filter(|note| !plan.notes.contains(note)).collect();
            plan.notes.extend(notes);
            plan.is_several = true;
        }
        Ok(plan)
    }

    /// What becomes of the matrices, in a few words: the same whatever recipe led there.
    pub(in crate::convert) fn recipe_name(&self) -> String {
        let mut counts = BTreeMap::<&str, usize>::new();
        for tensor in self.tensors().filter(|tensor| tensor.shape.len() > 1) {
            *counts.entry(&tensor.to).or_default() += 1;
        }
        let counts: Vec<_> = counts.iter().map(|(format, count)| format!("{count} x {format}")).collect();
        format!("{}: {:.3} bits per weight", counts.join(", "), self.bits_per_weight())
    }

    /// What the source is called: by its name on the hub, or the last part of its path.
    pub(in crate::convert) fn source_name(&self) -> String {
        if let Some(name) = HubName::of_snapshot(self.source.path()) {
            return name.to_string();
        }
        let path = self.source.path();
        let named = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        named.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// What becomes of each tensor, in natural order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorPlan> {
        self.jobs().map(|job| &job.planned)
    }

    pub(in crate::convert) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.files.iter().flat_map(|file| &file.jobs)
    }

    /// The format of each dense weight of the source that is packed, by the path of its module: what a model's
    /// [`VarBuilder`](candle_quant::VarBuilder::quantize_with) needs to have the weights that the output would have, without
    /// writing it.
    pub fn formats(&self) -> BTreeMap<String, QuantFormat> {
        let of_job = |job: &Job| {
            let (parts, format) = match &job.work {
                Work::Pack(parts, packing) => (parts.as_slice(), Some(packing.format)),
                Work::Copy(..) | Work::Cast(..) | Work::Repack(..) | Work::Blocks(..) => {
                    (Default::default(), None)
                }
            };
            let module = |part: &SourcePart| match part {
                SourcePart::Stored(dense) => Some(module_of(dense.name()).unwrap_or(dense.name()).to_owned()),
                // As it was stored: rows that stay rows are packed alike.
                SourcePart::Viewed(weights, view) if view.keeps_rows() => match weights.as_slice() {
                    [Weight::Dense(dense)] => {
                        Some(module_of(dense.name()).unwrap_or(dense.name()).to_owned())
                    }
                    _ => None,
                },
                SourcePart::Encoded(_) | SourcePart::Viewed(..) => None,
            };
            let modules: Vec<_> = parts.iter().filter_map(module).collect();
            modules.into_iter().filter_map(move |module| Some((module, format?))).collect::<Vec<_>>()
        };
        self.jobs().flat_map(of_job).collect()
    }

    /// The files of weights, and their sizes.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.files.iter().map(|file| (file.file.as_str(), file.size))
    }

    /// What is odd about the source, or left out of the output.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What the requested device does not do.
    fn note_of_device(&self) -> Option<String> {
        let is_left = |job: &&Job| match &job.work {
            Work::Pack(_, packing) => !packing.runs_on(&self.device),
            Work::Copy(..) | Work::Cast(..) | Work::Repack(..) | Work::Blocks(..) => false,
        };
        let left = self.jobs().filter(is_left).count();
        (left > 0 && !self.device.is_cpu())
            .then(|| format!("{left} tensors are packed on the CPU: the device has no kernel for them"))
    }

    fn note_of_readers(&self) -> Option<String> {
        let known = QuantFormat::mlx();
        let unknown = self.jobs().filter_map(Job::format).filter(|format| !known.contains(format));
        let unknown: BTreeSet<_> = unknown.map(|format| format.to_string()).collect();
        let names = unknown.into_iter().collect::<Vec<_>>().join(", ");
        (self.target.kind().describes_formats() && !names.is_empty())
            .then(|| format!("candle-quant reads {names}; MLX and mlx-lm do not"))
    }

    /// What transformers 5.23 reads otherwise than it is meant.
    fn notes_of_transformers(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.target != Target::HuggingFace {
            return notes;
        }
        let has_zeros = |job: &Job| matches!(job.becomes(), Some(Spec::Type(FileType::WithZeros(_))));
        if self.jobs().any(has_zeros) {
            notes.push(
                "transformers 5.23 loads zero points with CompressedTensorsConfig(dequantize=True) alone; 5.17 needs no option"
                    .into(),
            );
        }
        let single =
            |job: &&Job| job.planned.name.contains(".experts.") && matches!(*job.planned.shape, [_, _]);
        if self.jobs().filter(single).any(|job| job.format() == Some(QuantFormat::MXFP8)) {
            notes.push(
                "compressed-tensors decodes experts in mxfp8; transformers 5.23 takes their exponents for factors, and its logits are wrong".into(),
            );
        }
        let (packed, dense): (Vec<_>, Vec<_>) =
            self.jobs().filter(single).partition(|job| job.format().is_some());
        let block = |job: &&Job| job.planned.name.split(".experts.").next().unwrap_or_default().to_owned();
        let blocks: BTreeSet<_> = packed.iter().map(block).collect();
        if dense.iter().any(|job| blocks.contains(&block(job))) {
            notes.push(
                "experts of which only some projections are packed: transformers 5.23 does not find the others".into(),
            );
        }
        notes
    }

    /// How many tensors do not become what their rule says.
    pub fn fallbacks(&self) -> usize {
        self.tensors().filter(|tensor| tensor.fallback.is_some()).count()
    }

    /// Bytes of all tensors in the source.
    pub fn source_bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.source_bytes).sum()
    }

    /// Bytes of all tensors in the output.
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.bytes).sum()
    }

    /// Bytes that the files of weights need on the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    /// Bits for each element of the matrices of the output; 0 if there are none.
    pub fn bits_per_weight(&self) -> f64 {
        let (elements, bytes) = self.matrices();
        bits_per_weight(bytes, elements)
    }

    /// The format that the config names for the whole checkpoint.
    pub(in crate::convert) fn top_format(&self) -> Option<QuantFormat> {
        self.top.and_then(Spec::format)
    }

    /// Whether anything in the output is packed.
    pub fn packs(&self) -> bool {
        self.top.is_some()
    }

    /// The share of the matrices' elements that is not packed, from 0 to 1; 0 if there are none.
    pub fn dense_share(&self) -> f64 {
        let (all, _) = self.matrices();
        let dense = self.jobs().filter(|job| job.format().is_none() && job.planned.shape.len() > 1);
        // The sum of no floats is a negative zero.
        let dense = dense.map(|job| elements(&job.planned.shape)).fold(0., |sum, elements| sum + elements);
        if all == 0. {
            0.
        } else {
            dense / all
        }
    }

    /// Elements and bytes of the matrices of the output.
    pub(in crate::convert) fn matrices(&self) -> (f64, u64) {
        let matrices = || self.tensors().filter(|tensor| tensor.shape.len() > 1);
        let elements = matrices().map(|tensor| elements(&tensor.shape)).sum();
        (elements, matrices().map(|tensor| tensor.bytes).sum())
    }

    /// About the most memory that the conversion takes, in bytes: what every thread works on, and the largest
    /// weight that has to be dequantized as a whole.
    pub fn peak_memory(&self) -> u64 {
        let threads = rayon::current_num_threads() as u64;
        let blocks = self.jobs().map(Job::block_bytes).max().unwrap_or(0);
        let whole = self.jobs().map(Job::whole_bytes).max().unwrap_or(0);
        threads.saturating_mul(blocks).saturating_add(whole).saturating_add(self.feedback_memory())
    }

    /// What is added to it where columns make up for others: the model in f32, sums of products, and a weight as a whole.
    fn feedback_memory(&self) -> u64 {
        let jobs = || self.jobs().filter(|job| job.has_feedback());
        let bytes = |job: &Job| Feedback::bytes(&job.planned.shape);
        let all = jobs().map(bytes).fold(0u64, u64::saturating_add);
        let largest = jobs().map(bytes).max().unwrap_or(0);
        let model = if all > 0 { self.matrices().0 * 4. } else { 0. };
        let weight = jobs().map(|job| job.planned.source_bytes).max().unwrap_or(0);
        all.min(Feedback::MOST_BYTES).max(largest).saturating_add(model as u64).saturating_add(weight)
    }
}

/// 0 if there are no elements.
pub(in crate::convert) fn bits_per_weight(bytes: u64, elements: f64) -> f64 {
    if elements == 0. {
        0.
    } else {
        bytes as f64 * 8. / elements
    }
}

pub(in crate::convert) fn elements(dims: &[usize]) -> f64 {
    dims.iter().map(|dim| *dim as f64).product()
}

fn check_names(jobs: &[Job]) -> Result<()> {
    let mut seen = BTreeSet::new();
    for output in jobs.iter().flat_map(|job| &job.outputs) {
        if !seen.insert(&output.name) {
            let expected = "tensors of different names in the output";
            return Err(Error::mismatch(format!("`{}`", output.name), expected, "two of this name"));
        }
    }
    Ok(())
}

/// What was asked for, if anything is that, or else what most tensors are.
fn top(jobs: &[Job], asked: Spec) -> Option<Spec> {
    let mut counts = BTreeMap::<String, (usize, Spec)>::new();
    for spec in jobs.iter().filter_map(Job::becomes) {
        counts.entry(spec.to_string()).or_insert((0, spec)).0 += 1;
    }
    match counts.contains_key(&asked.to_string()) {
        true => Some(asked),
        false => counts.into_values().max_by_key(|(count, _)| *count).map(|(_, spec)| spec),
    }
}

/// Refuses to pack experts whose columns are rows in models: Ollama's importer does so along the wrong dimension, and knows no
/// model that could read them.
fn check_stacks(jobs: &[Job], fused: Option<FusedExperts>) -> Result<()> {
    let turned = fused.is_some_and(FusedExperts::has_columns);
    let is_parameter = |job: &&Job| job.planned.shape.len() == 3 && module_of(&job.planned.name).is_none();
    match jobs.iter().filter(|job| turned && job.format().is_some()).find(is_parameter) {
        None => Ok(()),
        Some(job) => Err(Error::Unsupported {
            what: format!("packing `{}` for Ollama, whose importer would do so along the wrong dimension, since experts are stored in columns", job.planned.name),
            remedy: "convert to MLX, and the result to Ollama".into(),
        }),
    }
}
