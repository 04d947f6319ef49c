//! The formats that each weight may have, and the choice among them for a number of bits per weight.

use super::greedy::{best, choose, smallest, Cost};
use super::sensitivities::{Sensitivities, Settings};
use crate::convert::options::ConvertOptions;
use crate::convert::output::OutputFile;
use crate::convert::plan::{bits_per_weight as bits, elements, ConvertPlan};
use crate::convert::recipe::{Choice, Recipe, Spec, OPEN};
use crate::convert::run::{ConvertEvent, ShardFile, Writer};
use crate::convert::target::Target;
use candle_quant::checkpoint::Checkpoint;
use candle_quant::format::Bits;
use candle_quant::{Error, QuantFormat, Result};
use std::collections::BTreeMap;

/// The formats that each weight may have that a recipe leaves open: from them some are chosen, so that all weights
/// together have a number of bits and lose as little as possible.
///
/// What rules say of single tensors stands, and what the recipe keeps is kept; its own format, and the next wider one
/// for the head, are what is chosen anew.
///
/// ```
/// use candle_quant_tools::convert::{BitAllocation, ConvertOptions, ConvertPlan, Recipe};
/// use candle_quant::Checkpoint;
///
/// # use candle_quant_tools::convert::{convert, RunOptions};
/// # let folder = tempfile::tempdir().unwrap();
/// # let dense = folder.path().join("dense");
/// # let plan = ConvertPlan::new(&Checkpoint::open("assets/tiny")?, &ConvertOptions::dense())?;
/// # convert(&plan, &dense, &RunOptions::default(), &|_event| ())?;
/// let source = Checkpoint::open(&dense)?;
/// let mut options = ConvertOptions::mlx(Recipe::safe("4".parse()?));
/// let candidates = ["3".parse()?, "4".parse()?, "mxfp8".parse()?];
/// let allocation = BitAllocation::new(&source, &options, &candidates)?;
/// let sensitivities = allocation.measure(&|_event| ())?; // reads the weights
/// options.recipe = allocation.recipe(&sensitivities, 4.75)?;
/// let bits = ConvertPlan::new(&source, &options)?.bits_per_weight();
/// assert!(4.6 < bits && bits <= 4.75); // the smallest weights are the smallest steps
/// # Ok::<(), candle_quant::Error>(())
/// ```
pub struct BitAllocation<'a> {
    source: &'a Checkpoint,
    options: &'a ConvertOptions,
    /// The first of the candidates.
    first: Spec,
    weights: BTreeMap<String, Vec<Candidate>>,
    /// What is to be measured.
    files: Vec<OutputFile>,
}

/// One of the formats that a weight may have.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    spec: Spec,
    /// What it becomes then.
    format: QuantFormat,
    is_fallback: bool,
    elements: f64,
    bytes: u64,
}

impl<'a> BitAllocation<'a> {
    /// The affine formats with groups of 64 that this kind of output has, but for those of one and two bits, whose
    /// errors are too large to be chosen unasked.
    pub fn candidates(target: Target) -> Vec<Spec> {
        let affine = Bits::ALL.into_iter().filter(|bits| *bits > Bits::Two);
        let formats = affine.filter_map(|bits| QuantFormat::affine_opt(bits.get(), 64));
        formats.filter(|format| target.has(*format)).map(Spec::Packed).collect()
    }

    /// Builds the candidates for a conversion. Reads no weights.
    ///
    /// # Errors
    /// As [`ConvertPlan::new`] with each of the candidates; if one of these is no quantized format; or if the recipe leaves
    /// nothing open.
    pub fn new(source: &'a Checkpoint, options: &'a ConvertOptions, candidates: &[Spec]) -> Result<Self> {
        let expected = "quantized formats, such as 3,4,6,8";
        let mismatch = |found: String| Error::mismatch("candidates", expected, found);
        let first = *candidates.first().ok_or_else(|| mismatch("none".into()))?;
        let mut weights = BTreeMap::<String, Vec<Candidate>>::new();
        let mut files = Vec::new();
        for &spec in candidates {
            if !matches!(spec, Spec::Packed(_)) {
                return Err(mismatch(format!("`{spec}`")));
            }
            let recipe = options.recipe.clone().with_choice(spec, Choice::All(spec));
            let plan =
                ConvertPlan::new(source, &ConvertOptions { recipe, strict: false, ..options.clone() })?;
            for job in plan.jobs().filter(|job| job.planned.rule == OPEN) {
                let Some(format) = job.format() else { continue };
                let (is_fallback, bytes) = (job.planned.fallback.is_some(), job.planned.bytes);
                let elements = elements(&job.planned.shape);
                let known = weights.entry(job.planned.name.clone()).or_default();
                if known.iter().all(|candidate| candidate.format != format) {
                    known.push(Candidate { spec, format, is_fallback, elements, bytes });
                }
            }
            files.push((spec, plan.files));
        }
        if weights.is_empty() {
            let problem = "the rules say of every tensor what it becomes, so that there is nothing to choose";
            return Err(Error::file(source.path(), problem, "leave out some of them, or the number of bits"));
        }
        for known in weights.values_mut() {
            if known.iter().any(|candidate| !candidate.is_fallback) {
                known.retain(|candidate| !candidate.is_fallback);
            }
        }
        let mut allocation = Self { source, options, first, weights, files: Vec::new() };
        for (spec, mut of_spec) in files {
            for file in &mut of_spec {
                file.jobs.retain(|job| allocation.has(&job.planned.name, spec, job.format()));
                file.others.clear();
            }
            allocation.files.extend(of_spec.into_iter().filter(|file| !file.jobs.is_empty()));
        }
        Ok(allocation)
    }

    fn has(&self, name: &str, spec: Spec, format: Option<QuantFormat>) -> bool {
        let known = self.weights.get(name).into_iter().flatten();
        known.into_iter().any(|candidate| candidate.spec == spec && Some(candidate.format) == format)
    }

    /// How many tensors, and bytes of the source, [`BitAllocation::measure`] goes through; a tensor counts once for
    /// each format.
    pub fn work(&self) -> (usize, u64) {
        let jobs = || self.files.iter().flat_map(|file| &file.jobs);
        (jobs().count(), jobs().map(|job| job.planned.source_bytes).sum())
    }

    /// What each weight loses in each of its formats, on the values as they would be stored. Numbers that are not
    /// finite in the source are left out.
    ///
    /// # Errors
    /// If the source can't be read, or a weight is too large for a format.
    pub fn measure(&self, progress: &(dyn Fn(ConvertEvent) + Sync)) -> Result<Sensitivities> {
        let mut sensitivities = Sensitivities::new(self.source, self.settings())?;
        for file in &self.files {
            let measured = Writer { file, device: &self.options.device, feedback: None, progress }
                .write(ShardFile::nowhere())?
                .tensors;
            for (job, quality) in file.jobs.iter().zip(measured) {
                if let Some(format) = job.format() {
                    // What the dtype of the scales can't express is the worst of all.
                    let lost = quality.weighted_rms.unwrap_or(quality.relative_rms);
                    let error = if quality.overflowing > 0 { f64::MAX } else { lost };
                    sensitivities.insert(&job.planned.name, Spec::Packed(format), error);
                }
            }
        }
        Ok(sensitivities)
    }

    fn settings(&self) -> Settings {
        Settings::of(self.options)
    }

    /// The recipe with chosen formats. All matrices together have at most `bits_per_weight`, as
    /// [`ConvertPlan::bits_per_weight`] counts, and nearly as many. From the smallest formats on, the step is taken again and
    /// again that saves most squared error for a byte. Errors are relative to the RMS of their weight, so that in each
    /// weight an element counts alike.
    ///
    /// # Errors
    /// If the sensitivities are those of another source or of another conversion, or lack one of the formats; or if
    /// the formats do not reach this number of bits.
    pub fn recipe(&self, sensitivities: &Sensitivities, bits_per_weight: f64) -> Result<Recipe> {
        sensitivities.check(self.source, &self.settings())?;
        let cost = |name: &str, candidate: &Candidate| {
            let error = sensitivities.required(name, Spec::Packed(candidate.format))?;
            // Squares have to be finite.
            Ok(Cost { bytes: candidate.bytes, error: error.min(1e100).powi(2) * candidate.elements })
        };
        let costs = self.weights.iter().map(|(name, all)| all.iter().map(|one| cost(name, one)).collect());
        let costs = costs.collect::<Result<Vec<Vec<Cost>>>>()?;
        let recipe = |chosen: &[Option<usize>]| {
            let weights = self.weights.iter().zip(chosen);
            let spec = |(known, chosen): (&Vec<Candidate>, &Option<usize>)| Some(known.get((*chosen)?)?.spec);
            let formats =
                weights.filter_map(|((name, known), chosen)| Some((name.clone(), spec((known, chosen))?)));
            let choice = Choice::Each(formats.collect(), format!("for {bits_per_weight} bits per weight"));
            self.options.recipe.clone().with_choice(self.first, choice)
        };
        let narrowest: Vec<_> = costs.iter().map(|costs| smallest(costs)).collect();
        let options = ConvertOptions { recipe: recipe(&narrowest), strict: false, ..self.options.clone() };
        let (elements, least) = ConvertPlan::new(self.source, &options)?.matrices();
        let bytes = |of: fn(&[Cost]) -> Option<usize>| -> u64 {
            costs.iter().filter_map(|costs| Some(costs.get(of(costs)?)?.bytes)).sum()
        };
        let most = least + (bytes(best) - bytes(smallest));
        check_reach(bits_per_weight, bits(least, elements), bits(most, elements))?;
        let mut room = ((bits_per_weight * elements / 8.) as u64).saturating_sub(least);
        while room > 0 && bits(least + room, elements) > bits_per_weight {
            room -= 1;
        }
        Ok(recipe(&choose(&costs, room)))
    }
}

/// Refuses a number of bits that the formats do not reach.
fn check_reach(wanted: f64, least: f64, most: f64) -> Result<()> {
    if wanted >= least && wanted <= most {
        return Ok(());
    }
    // What is named is reached.
    let (low, high) = ((least * 1e3).ceil() / 1e3, (most * 1e3).floor() / 1e3);
    let expected = format!("{low} to {high}, which these candidates reach with all that is kept");
    Err(Error::mismatch("bits per weight", expected, format!("{wanted}; give other candidates")))
}
