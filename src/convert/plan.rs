//! What a conversion will do, from headers alone.

use super::experts::{self, Form, Group, Part};
use super::job::{stored_dtype, Job};
use super::mixed::ModelLayers;
use super::recipe::{Fallback, Subject};
use super::role::roles;
use super::shard::{self, Output};
use super::{Options, Role, Spec, Target};
use crate::checkpoint::{natural_order, Checkpoint, Weight};
use crate::models::Config;
use crate::verify::in_features;
use crate::{Error, QuantFormat, Result};
use candle_core::DType;
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

/// What becomes of one tensor.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct PlannedTensor {
    /// Its name in the output; a packed weight is one tensor.
    pub name: String,
    /// Its logical shape.
    pub shape: Vec<usize>,
    /// What it is for.
    pub role: Role,
    /// The rule that decided.
    pub rule: String,
    /// What it is in the source: `BF16`, `affine 4-bit g64`.
    pub from: String,
    /// What it becomes, in the same words.
    pub to: String,
    /// Bytes in the source.
    pub source_bytes: u64,
    /// Bytes in the output.
    pub bytes: u64,
    /// Why it does not become what the rule says, if so.
    pub fallback: Option<String>,
    /// The file it goes to.
    pub file: String,
}

/// One file of weights of the output.
#[derive(Clone, Debug)]
pub(super) struct Shard {
    pub file: String,
    pub jobs: Vec<Job>,
    /// The beginning of the file.
    pub header: Vec<u8>,
    pub size: u64,
}

/// What a conversion will do.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) source: Checkpoint,
    pub(super) shards: Vec<Shard>,
    /// The format that the config names for the whole checkpoint; `None` if nothing is packed.
    pub(super) top: Option<QuantFormat>,
    notes: Vec<String>,
}

impl Plan {
    /// Plans the conversion of `source`. Of the weights nothing is read.
    ///
    /// # Errors
    /// If a tensor can't be read or has no form in the output; if two tensors get one name, or the config is
    /// malformed; with
    /// [`Options::strict`], if a tensor can't become what its rule says.
    pub fn new(source: &Checkpoint, options: &Options) -> Result<Self> {
        let planner = Planner::new(source, options);
        let tensors = planner.tensors()?;
        let mut jobs = Vec::with_capacity(tensors.len());
        for group in experts::group(tensors, source.config())? {
            jobs.extend(planner.group(group)?);
        }
        jobs.sort_by(|a, b| natural_order(&a.planned.name, &b.planned.name));
        if jobs.is_empty() {
            return Err(Error::file(source.path(), "no tensors", "give a checkpoint that has weights"));
        }
        check_names(&jobs)?;
        let top = top_format(&jobs, options.recipe.format);
        let shards = into_shards(jobs, options);
        let plan = Self { source: source.clone(), shards, top, notes: planner.notes() };
        plan.config_json()?;
        let fallen = plan.tensors().find_map(|tensor| Some((tensor, tensor.fallback.as_ref()?)));
        if let Some((tensor, reason)) = fallen.filter(|_| options.strict) {
            return Err(Error::mismatch(
                format!("`{}`", tensor.name),
                format!("what the rule `{}` says", tensor.rule),
                format!("{} ({reason}); {} tensors fall back", tensor.to, plan.fallbacks()),
            ));
        }
        Ok(plan)
    }

    /// What becomes of each tensor, in natural order.
    pub fn tensors(&self) -> impl Iterator<Item = &PlannedTensor> {
        self.jobs().map(|job| &job.planned)
    }

    pub(super) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.shards.iter().flat_map(|shard| &shard.jobs)
    }

    /// The files of weights, and their sizes.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.shards.iter().map(|shard| (shard.file.as_str(), shard.size))
    }

    /// What is odd about the source, or left out of the output.
    pub fn notes(&self) -> &[String] {
        &self.notes
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
        self.shards.iter().map(|shard| shard.size).sum()
    }

    /// Bits for each element of the matrices of the output; 0 if there are none.
    pub fn bits_per_weight(&self) -> f64 {
        let matrices = || self.tensors().filter(|tensor| tensor.shape.len() > 1);
        let elements: f64 = matrices().map(|tensor| elements(&tensor.shape)).sum();
        let bytes: u64 = matrices().map(|tensor| tensor.bytes).sum();
        if elements == 0. {
            0.
        } else {
            bytes as f64 * 8. / elements
        }
    }

    /// About the most memory that the conversion takes, in bytes: what every thread works on, and the largest
    /// weight that has to be decoded as a whole.
    pub fn peak_memory(&self) -> u64 {
        let threads = rayon::current_num_threads() as u64;
        let blocks = self.jobs().map(Job::block_bytes).max().unwrap_or(0);
        let whole = self.jobs().map(Job::whole_bytes).max().unwrap_or(0);
        threads.saturating_mul(blocks).saturating_add(whole)
    }
}

fn elements(dims: &[usize]) -> f64 {
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

/// The format that was asked for, if anything has it, or else that of most tensors.
fn top_format(jobs: &[Job], asked: Spec) -> Option<QuantFormat> {
    let mut counts = BTreeMap::<String, (usize, QuantFormat)>::new();
    for format in jobs.iter().filter_map(Job::format) {
        counts.entry(format.to_string()).or_insert((0, format)).0 += 1;
    }
    match asked {
        Spec::Packed(format) if counts.contains_key(&format.to_string()) => Some(format),
        _ => counts.into_values().max_by_key(|(count, _)| *count).map(|(_, format)| format),
    }
}

/// Fills files up to the size that is asked for. The tensors of a packed weight stay together.
fn into_shards(jobs: Vec<Job>, options: &Options) -> Vec<Shard> {
    let mut shards: Vec<(u64, Vec<Job>)> = Vec::new();
    for job in jobs {
        let bytes = job.planned.bytes;
        match shards.last_mut() {
            Some((size, jobs)) if size.saturating_add(bytes) <= options.max_shard_size => {
                *size += bytes;
                jobs.push(job);
            }
            _ => shards.push((bytes, vec![job])),
        }
    }
    let count = shards.len();
    let finish = |(index, (_, mut jobs)): (usize, (u64, Vec<Job>))| {
        let file = shard::file_name(index, count);
        let mut outputs: Vec<_> = jobs.iter_mut().flat_map(|job| &mut job.outputs).collect();
        let (header, size) = shard::lay_out(&mut outputs, options.target.metadata_format());
        for job in &mut jobs {
            job.planned.file.clone_from(&file);
        }
        Shard { file, jobs, header, size }
    };
    shards.into_iter().enumerate().map(finish).collect()
}

/// What decides about all tensors.
struct Planner<'a> {
    source: &'a Checkpoint,
    options: &'a Options,
    layers: ModelLayers,
    /// Whether the embedding is the head.
    tied: bool,
    /// What is decoded becomes this, unless a rule says otherwise.
    dtype: DType,
    /// The rules that have decided.
    used: RefCell<BTreeSet<&'a str>>,
    /// Packed weights that do not become what their rule says, because they stay as they are.
    staying: Cell<usize>,
}

impl<'a> Planner<'a> {
    fn new(source: &'a Checkpoint, options: &'a Options) -> Self {
        let config = source.config();
        let stated = |key: &str| {
            config.get(key).or_else(|| config.get("text_config")?.get(key)).filter(|value| !value.is_null())
        };
        let layers = stated("num_hidden_layers").and_then(serde_json::Value::as_u64);
        let layers = layers.and_then(|layers| usize::try_from(layers).ok());
        let head = source.tensor_names().any(|name| name.ends_with("lm_head.weight"));
        let tied = stated("tie_word_embeddings").and_then(serde_json::Value::as_bool);
        let dtype =
            ["torch_dtype", "dtype"].into_iter().find_map(stated).and_then(|dtype| match dtype.as_str()? {
                "float16" => Some(DType::F16),
                "float32" => Some(DType::F32),
                _ => None,
            });
        Self {
            source,
            options,
            layers: ModelLayers::new(|| source.tensor_names(), layers),
            tied: tied == Some(true) || !head,
            dtype: options.dtype.or(dtype).unwrap_or(DType::BF16),
            used: RefCell::default(),
            staying: Cell::default(),
        }
    }

    /// Whether a tensor is left out: a head that the model does not have.
    fn is_left_out(&self, name: &str) -> bool {
        self.tied && self.options.target == Target::Mlx && name.ends_with("lm_head.weight")
    }

    /// All tensors of the source that are converted.
    fn tensors(&self) -> Result<Vec<(String, Weight)>> {
        let model = Config::from_json(self.source.config()).ok();
        let tensor = |name: &str| {
            let in_features = model.as_ref().and_then(|model| in_features(model, name));
            Ok((name.to_owned(), self.source.tensor(name, in_features)?))
        };
        self.source.tensor_names().filter(|name| !self.is_left_out(name)).map(tensor).collect()
    }

    /// What is odd; of tensors, what they have shown when they were asked for, and of rules, when they were applied.
    fn notes(&self) -> Vec<String> {
        let left_out = self.source.tensor_names().filter(|name| self.is_left_out(name));
        let mut notes: Vec<_> = left_out
            .map(|name| format!("`{name}` is left out: the config says that the embedding is the head"))
            .collect();
        if let Err(error) = self.source.stored_tokenizer() {
            notes.push(format!("no tokenizer is written: {error}"));
        }
        let used = self.used.borrow();
        if self.options.target == Target::Mlx {
            let idle = self.options.recipe.labels().filter(|label| !used.contains(label));
            notes.extend(idle.map(|label| format!("{label} decides about no tensor")));
        }
        match self.staying.get() {
            0 => {}
            count => {
                notes.push(format!("{count} packed weights stay as they are; --requantize packs them anew"))
            }
        }
        notes.extend(self.source.warnings());
        notes
    }

    fn group(&self, group: Group) -> Result<Vec<Job>> {
        if self.options.target == Target::Mlx {
            let jobs = group.packed.iter().map(|form| self.job(form, group.obstacle));
            let jobs = jobs.collect::<Result<Vec<_>>>()?;
            if group.plain.is_empty() || jobs.iter().any(|job| job.format().is_some()) {
                return Ok(jobs);
            }
        }
        let forms = if group.plain.is_empty() { &group.packed } else { &group.plain };
        forms.iter().map(|form| self.job(form, group.obstacle)).collect()
    }

    fn job(&self, form: &Form, obstacle: Option<&str>) -> Result<Job> {
        let roles = roles(&form.name, &form.dims, self.tied);
        let subject = Subject { name: &form.name, dims: &form.dims, roles: &roles, layers: &self.layers };
        let decided = match self.options.target {
            Target::Mlx => self.options.recipe.decide(&subject),
            Target::Dense => (Spec::Keep, "dequantize"),
        };
        self.used.borrow_mut().insert(decided.1);
        let role = roles.first().copied().unwrap_or(Role::Other);
        if let ([Part::Encoded(weight)], Target::Mlx) = (form.parts.as_slice(), self.options.target) {
            let stays = !self.options.requantize || decided.0 == Spec::Keep;
            if stays && !matches!(weight, Weight::Dense(_)) {
                let job = Job::pass_through(form, role, weight)?;
                if decided.0 != Spec::Keep && job.format().map(Spec::Packed) != Some(decided.0) {
                    self.staying.set(self.staying.get() + 1);
                }
                return Ok(job);
            }
        }
        let (spec, fallback) = self.fit(form, decided.0, obstacle);
        let mut job = match spec {
            Spec::Packed(format) => Job::pack(form, format, self.float_dtype(form))?,
            Spec::Cast(dtype) => Job::plain(form, Some(dtype))?,
            Spec::Keep => Job::plain(form, self.plain_dtype(form))?,
        };
        job.planned.role = role;
        let is_vector = form.dims.len() < 2 && spec == Spec::Keep;
        job.planned.rule = if is_vector { "not a matrix" } else { decided.1 }.to_owned();
        job.planned.fallback = fallback;
        Ok(job)
    }

    /// The dtype in which numbers are packed, which that of the scales is too.
    fn float_dtype(&self, form: &Form) -> DType {
        self.plain_dtype(form)
            .or_else(|| stored_dtype(form))
            .filter(|dtype| *dtype != DType::F64)
            .unwrap_or(self.dtype)
    }

    /// What a tensor that is not packed is converted to, if to anything.
    fn plain_dtype(&self, form: &Form) -> Option<DType> {
        match form.parts.first() {
            Some(Part::Stored(dense)) if dense.dtype().is_float() => self.options.dtype,
            Some(Part::Encoded(Weight::Dense(dense))) => self.options.dtype.or(Some(dense.dtype())),
            Some(Part::Encoded(_)) => Some(self.dtype),
            _ => None,
        }
    }

    /// What a tensor can become of what its rule says, and why not all of it.
    fn fit(&self, form: &Form, spec: Spec, obstacle: Option<&str>) -> (Spec, Option<String>) {
        let is_float = match form.parts.first() {
            Some(Part::Stored(dense)) => dense.dtype().is_float(),
            part => part.is_some(),
        };
        let [.., _, k] = form.dims.as_slice() else {
            // Norms, biases and the like: no rule means to pack them.
            return (if is_float && matches!(spec, Spec::Cast(_)) { spec } else { Spec::Keep }, None);
        };
        let Spec::Packed(format) = spec else {
            return (if is_float { spec } else { Spec::Keep }, None);
        };
        let is_module = form.name.ends_with("weight");
        let why_not = match obstacle {
            _ if !is_float => Some("not float numbers"),
            _ if form.dims.contains(&0) => Some("no elements"),
            _ if form.dims.len() > 2 && !form.name.contains(".switch_mlp.") => {
                Some(obstacle.unwrap_or("more than two dimensions, and no experts"))
            }
            None if !is_module => Some("a parameter, not the weight of a module"),
            other => other,
        };
        if let Some(reason) = why_not {
            return (Spec::Keep, Some(reason.to_owned()));
        }
        if k.is_multiple_of(format.group_size()) {
            return (spec, None);
        }
        let smaller = match (format, self.options.recipe.fallback) {
            (QuantFormat::Affine { bits, group_size }, Fallback::Fit) => {
                let mut sizes = QuantFormat::AFFINE_GROUP_SIZES.into_iter().rev();
                sizes.find(|size| *size < group_size && k.is_multiple_of(*size)).map(|size| (bits, size))
            }
            _ => None,
        };
        let reason = format!("rows of {k} are no whole number of groups of {}", format.group_size());
        let spec = match smaller {
            Some((bits, group_size)) => Spec::Packed(QuantFormat::Affine { bits, group_size }),
            None => Spec::Keep,
        };
        (spec, Some(reason))
    }
}

/// The tensors of a packed weight in the output.
pub(super) fn packed_outputs(
    module: &str,
    dims: &[usize],
    format: QuantFormat,
    scales: safetensors::Dtype,
) -> Result<Vec<Output>> {
    let k = dims.last().copied().unwrap_or(0);
    let rows = dims.get(..dims.len().saturating_sub(1)).unwrap_or_default();
    let output = |part: &str, dtype, last: usize| {
        Output::new(crate::checkpoint::tensor_of(module, part), dtype, [rows, &[last]].concat())
    };
    let groups = format.groups_per_row(k)?;
    let mut outputs = vec![
        output("weight", safetensors::Dtype::U32, format.words_per_row(k)?)?,
        output("scales", scales, groups)?,
    ];
    if format.has_biases() {
        outputs.push(output("biases", scales, groups)?);
    }
    Ok(outputs)
}
