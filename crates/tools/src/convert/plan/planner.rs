//! Decides what becomes of every tensor.

use super::arranged::Arranged;
use super::experts::{self, TensorGroup};
use super::importance::Importance;
use super::jobs::stored_dtype;
use super::published::PublishedPlan;
use crate::convert::gguf::GgufModel;
use crate::convert::options::ConvertOptions;
use crate::convert::output::{Job, SourcePart, SourceTensor, View};
use crate::convert::recipe::{is_default, roles, ModelLayers, Role, Spec, TensorInfo};
use crate::convert::target::{Target, PACKED_ALREADY};
use crate::source::Source;
use candle_core::DType;
use candle_quant::checkpoint::{module_of, Checkpoint, CheckpointKind, DenseTensor, Weight};
use candle_quant::format::UqffType;
use candle_quant::{QuantFormat, Result};
use candle_quant_models::generate::stored_tokenizer;
use candle_quant_models::{name_in_mlx_lm, Config, MlxLm, MlxWeight, PublishedForm, EXPERT_BLOCKS};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

/// The files that tokenizers are made of, of which there is one at least.
const TOKENIZERS: [&str; 5] =
    ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model"];

/// Why experts in another format are not packed.
const IN_MXFP4_ALONE: &str = "experts that transformers has packed in mxfp4 alone";

/// What decides about all tensors.
pub(super) struct Planner<'a> {
    source: &'a Checkpoint,
    options: &'a ConvertOptions,
    layers: ModelLayers,
    /// How mlx-lm keeps the family of the model.
    pub family: MlxLm,
    /// Whether tensors get the names of mlx-lm's models of more parts than text.
    is_within_larger: bool,
    /// Whether the embedding is the head.
    tied: bool,
    /// What is dequantized becomes this, unless a rule says otherwise.
    dtype: DType,
    /// The rules that have decided.
    used: RefCell<BTreeSet<&'a str>>,
    /// Packed weights that do not become what their rule says, because they stay as they are.
    staying: Cell<usize>,
    /// How much columns count.
    pub importance: Importance<'a>,
}

impl<'a> Planner<'a> {
    pub(super) fn new(
        source: &'a Checkpoint,
        options: &'a ConvertOptions,
        model: Option<&'a Config>,
    ) -> Self {
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
        let family = MlxLm::of(config);
        // What mlx-lm, or mlx-vlm, has written keeps its names, but for the text that mlx-lm does not know alone.
        let is_mlx = source.kind() == CheckpointKind::Mlx && family.larger.is_none();
        let is_within_larger = options.target == Target::Mlx && !is_mlx && family.is_within_larger(config);
        let names: Vec<_> = source.tensor_names().map(|name| name_in(is_within_larger, name)).collect();
        Self {
            source,
            options,
            layers: ModelLayers::new(|| names.iter().map(String::as_str), layers),
            family,
            is_within_larger,
            tied: tied == Some(true) || !head,
            dtype: options.dtype.or(dtype).unwrap_or(DType::BF16),
            used: RefCell::default(),
            staying: Cell::default(),
            importance: Importance::new(options, model),
        }
    }

    /// Whether anything may be packed.
    fn packs(&self) -> bool {
        !self.options.dequantize
    }

    /// Whether a tensor is left out: a head that the model does not have.
    fn is_left_out(&self, name: &str) -> bool {
        self.tied && self.options.target.kind().leaves_out_tied_heads() && name.ends_with("lm_head.weight")
    }

    /// Whether a tensor is of layers that mlx-lm does not have.
    fn is_further(&self, name: &str) -> bool {
        self.options.target == Target::Mlx && self.family.leaves_out(name, self.layers.count)
    }

    /// All tensors of the source that are converted.
    fn tensors(&self) -> Result<Vec<(String, Weight)>> {
        let source = Source::new(self.source);
        let tensor = |name: &str| Ok((name.to_owned(), source.tensor(name)?));
        self.source
            .tensor_names()
            .filter(|name| !self.is_left_out(name) && !self.is_further(name))
            .map(tensor)
            .collect()
    }

    /// Warnings about tensors and rules, collected while planning.
    pub(super) fn notes(&self) -> Vec<String> {
        let left_out = self.source.tensor_names().filter(|name| self.is_left_out(name));
        let mut notes: Vec<_> = left_out
            .map(|name| format!("`{name}` is left out: the config says that the embedding is the head"))
            .collect();
        let further: Vec<_> = self.source.tensor_names().filter(|name| self.is_further(name)).collect();
        if let Some(first) = further.first() {
            notes.push(format!(
                "{} tensors of layers that predict further tokens are left out, as mlx-lm does, `{first}` among them",
                further.len()
            ));
        }
        match stored_tokenizer(self.source) {
            Err(error) => notes.push(format!("no tokenizer is written: {error}")),
            Ok(None) if TOKENIZERS.iter().all(|name| self.source.sidecar_files().path(name).is_none()) => {
                notes.push("no tokenizer is written: there is none beside the weights".into());
            }
            Ok(_) => {}
        }
        let used = self.used.borrow();
        if self.packs() {
            let idle = self.options.recipe.labels().filter(|label| !used.contains(label));
            notes.extend(idle.map(|label| format!("{label} decides about no tensor")));
        }
        notes.extend(self.options.recipe.choice_note());
        notes.extend(self.options.target.kind().notes(self.source));
        match self.staying.get() {
            0 => {}
            count => {
                notes.push(format!("{count} packed weights stay as they are; --requantize packs them anew"))
            }
        }
        notes.extend(self.source.warnings());
        notes
    }

    /// The jobs of all tensors, and the model as transformers knows it if it is written so.
    pub(super) fn all_jobs(&self, form: PublishedForm) -> Result<(Option<PublishedPlan>, Vec<Job>)> {
        let (source, options) = (self.source, self.options);
        self.staying.set(0);
        self.importance.forget();
        let (published, groups) = match options.target {
            Target::HuggingFace => {
                let published = PublishedPlan::new(source, form)?;
                let groups = published.groups()?;
                (Some(published), groups)
            }
            Target::Mlx | Target::Dense | Target::Uqff | Target::Ollama | Target::Gguf | Target::Slm1 => {
                let arranged = Arranged::new(source, self.family, options);
                let mut groups = experts::group(self.tensors()?, &arranged)?;
                if options.target == Target::Gguf {
                    add_to_norms(&GgufModel::of(source)?, &mut groups);
                }
                for tensor in
                    groups.iter_mut().flat_map(|group| group.packed.iter_mut().chain(&mut group.plain))
                {
                    tensor.name = name_in(self.is_within_larger, &tensor.name);
                }
                (None, groups)
            }
        };
        let jobs = groups.into_iter().map(|group| self.jobs(group)).collect::<Result<Vec<_>>>()?;
        Ok((published, jobs.into_iter().flatten().collect()))
    }

    fn jobs(&self, group: TensorGroup) -> Result<Vec<Job>> {
        if self.packs() {
            let jobs = group.packed.iter().map(|source| self.job(source, group.obstacle));
            let jobs = jobs.collect::<Result<Vec<_>>>()?;
            if group.plain.is_empty() || jobs.iter().any(|job| job.format().is_some()) {
                return Ok(jobs);
            }
        }
        let forms = if group.plain.is_empty() { &group.packed } else { &group.plain };
        forms.iter().map(|source| self.job(source, group.obstacle)).collect()
    }

    fn job(&self, source: &SourceTensor, obstacle: Option<&str>) -> Result<Job> {
        let roles = roles(&source.name, &source.dims, self.tied);
        let target = self.options.target;
        let module = module_of(&source.name).unwrap_or(&source.name);
        let info = TensorInfo {
            name: &source.name,
            mlx_lm: self.family.weight(module),
            dims: &source.dims,
            roles: &roles,
            layers: &self.layers,
            has_format: &|format| target.has(format),
        };
        let decided = match self.packs() {
            true => self.options.recipe.decide(&info),
            false => (Spec::Keep, "dequantize"),
        };
        let decided = (target.kind().meant(decided.0), decided.1);
        self.used.borrow_mut().insert(decided.1);
        let role = roles.first().copied().unwrap_or(Role::Other);
        if let ([SourcePart::Encoded(weight)], true) = (source.parts.as_slice(), self.packs()) {
            let stays = !self.options.requantize || decided.0 == Spec::Keep;
            let beside = obstacle.filter(|_| target == Target::HuggingFace);
            let not_linear = match weight {
                Weight::Packed(_) | Weight::Irregular(_) => beside.or_else(|| self.not_linear(source)),
                Weight::Ggml(_) => beside,
                Weight::Dense(_) | _ => None,
            };
            if let (true, Some(reason)) = (stays, not_linear) {
                let mut job = Job::plain(source, self.plain_dtype(source))?;
                (job.planned.role, job.planned.fallback) = (role, Some(reason.to_owned()));
                job.planned.rule = PACKED_ALREADY.into();
                return Ok(job);
            }
            if let (true, Some(entries)) = (stays, self.uqff_entries(source)?) {
                let job = Job::of_uqff(source, role, entries)?;
                self.count_staying(&job, decided.0);
                return Ok(job);
            }
            // What is dequantized when it is loaded has a form, too.
            if stays && beside.is_none() && self.not_linear(source).is_none() {
                if let Some(job) = Job::exact(source, role, weight, target)? {
                    self.count_staying(&job, decided.0);
                    return Ok(job);
                }
            }
            if stays && !matches!(weight, Weight::Dense(_)) {
                if let (Weight::Packed(packed), false) = (weight, is_default(decided.1)) {
                    if let Some(job) = Job::widen(source, role, decided, packed, self.dtype, target)? {
                        return Ok(job);
                    }
                }
                let job = Job::pass_through(source, role, weight, target, self.source.kind())?;
                self.count_staying(&job, decided.0);
                return Ok(job);
            }
        }
        if self.packs() && (!self.options.requantize || decided.0 == Spec::Keep) {
            if let Some(job) = Job::in_turn(source, role, target)? {
                return Ok(job);
            }
        }
        // What is packed and put together with others is not quantized anew without a word; the same codes come of the same rows.
        let is_rounded = |weight: &Weight| match weight {
            Weight::Dense(_) => false,
            Weight::Packed(packed) => {
                let format = packed.format();
                !format.scale().is_byte() || decided.0 != Spec::Packed(format)
            }
            Weight::Ggml(_) | _ => true,
        };
        let is_rounded_again = source.parts.iter().any(|part| match part {
            SourcePart::Encoded(weight) => is_rounded(weight),
            SourcePart::Viewed(weights, _) => {
                weights.iter().any(|weight| !matches!(weight, Weight::Dense(_)))
            }
            SourcePart::Stored(_) => false,
        });
        let rearranged = (self.packs() && is_rounded_again && !self.options.requantize)
            .then_some("packed already, and arranged otherwise: --requantize packs it anew");
        let (spec, fallback) = self.fit(source, decided.0, obstacle.or(rearranged));
        let mut job = match spec {
            Spec::Packed(_) | Spec::Type(_) => {
                target.check_spec(&source.name, decided.1, spec)?;
                Job::pack(
                    source,
                    spec,
                    self.float_dtype(source),
                    self.options,
                    self.importance.of(source, &roles, self.tied)?,
                )?
            }
            Spec::Cast(dtype) => Job::plain(source, Some(dtype))?,
            Spec::Keep => Job::plain(source, self.plain_dtype(source))?,
        };
        job.planned.role = role;
        let is_vector = matrix_dims(source).len() < 2 && spec == Spec::Keep;
        job.planned.rule = if is_vector { "not a matrix" } else { decided.1 }.to_owned();
        job.planned.fallback = fallback;
        job.spec = decided.0;
        Ok(job)
    }

    /// Counts a weight that is packed already, if that is not what the rule says.
    fn count_staying(&self, job: &Job, decided: Spec) {
        if decided != Spec::Keep && job.becomes() != Some(decided) {
            self.staying.set(self.staying.get() + 1);
        }
    }

    /// What the source has of a whole weight that is written to the same kind of files.
    fn uqff_entries(&self, source: &SourceTensor) -> Result<Option<(UqffType, Vec<DenseTensor>)>> {
        match (self.options.target, module_of(&source.name)) {
            (Target::Uqff, Some(module)) => self.source.uqff_entries(module),
            _ => Ok(None),
        }
    }

    /// The dtype in which numbers are packed, which that of the scales is too.
    fn float_dtype(&self, source: &SourceTensor) -> DType {
        self.plain_dtype(source)
            .or_else(|| stored_dtype(source))
            .filter(|dtype| *dtype != DType::F64)
            .unwrap_or(self.dtype)
    }

    /// What a tensor that is not packed is converted to, if to anything.
    fn plain_dtype(&self, source: &SourceTensor) -> Option<DType> {
        let role = roles(&source.name, &source.dims, self.tied).first().copied().unwrap_or(Role::Other);
        let always = self.options.target.kind().plain_dtype(&source.name, &source.dims, role);
        match source.parts.first() {
            _ if always.is_some() => always,
            Some(SourcePart::Stored(dense)) if dense.dtype().is_float() => self.options.dtype,
            Some(SourcePart::Stored(_)) | None => None,
            Some(part) => self.options.dtype.or(Some(part.dense().map_or(self.dtype, DenseTensor::dtype))),
        }
    }

    /// Why transformers has no packed form of experts that are one tensor, if they are such: what llm-compressor writes, a module
    /// for each, it does not load.
    fn experts_without_form(&self, source: &SourceTensor) -> Option<&'static str> {
        let is_one = |ends: [&str; 2]| ends.iter().any(|end| source.name.ends_with(end));
        if self.options.target != Target::HuggingFace || source.dims.len() < 3 {
            return None;
        }
        let parameters = is_one([".experts.gate_up_proj", ".experts.down_proj"]).then_some(IN_MXFP4_ALONE);
        let linear = is_one([".input_linear.weight", ".output_linear.weight"]);
        parameters.or(linear.then_some("experts of which transformers loads no packed form"))
    }

    /// Why transformers has no packed weight for a tensor, if so.
    fn not_linear(&self, source: &SourceTensor) -> Option<&'static str> {
        if self.options.target != Target::HuggingFace || source.name.ends_with(EXPERT_BLOCKS) {
            return None;
        }
        let roles = roles(&source.name, &source.dims, self.tied);
        match source.dims.as_slice() {
            [_, _] if roles.contains(&Role::Router) => {
                Some("a router, which is no linear layer in transformers")
            }
            [_, _] if roles.contains(&Role::Embed) => {
                Some("an embedding, where transformers has packed linear layers alone")
            }
            [_, _] => None,
            _ => Some("no linear layer, of which alone transformers has packed ones"),
        }
    }

    /// The format actually used, and the reason if it differs from the rule.
    fn fit(&self, source: &SourceTensor, spec: Spec, obstacle: Option<&str>) -> (Spec, Option<String>) {
        let is_float = source.parts.first().is_some_and(|part| match part.dense() {
            Some(dense) => dense.dtype().is_float(),
            None => true,
        });
        let [.., _, _] = matrix_dims(source) else {
            // Norms, biases and the like: no rule means to pack them.
            return (if is_float && matches!(spec, Spec::Cast(_)) { spec } else { Spec::Keep }, None);
        };
        if spec.format().is_none() {
            return (if is_float { spec } else { Spec::Keep }, None);
        }
        let module = module_of(&source.name).unwrap_or(&source.name);
        let layout = self.options.target.kind().experts(&self.family);
        let is_stack = layout.is_stack(&source.name) || self.family.is_stack(module);
        let why_not = match obstacle {
            _ if !is_float => Some("not float numbers"),
            _ if source.dims.contains(&0) => Some("no elements"),
            None if self.experts_without_form(source).is_some() => self.experts_without_form(source),
            _ if source.dims.len() > 2 && !is_stack => {
                Some(obstacle.unwrap_or("more than two dimensions, and no experts"))
            }
            None if self.options.target == Target::Mlx && self.family.weight(module) == MlxWeight::Dense => {
                Some("mlx-lm has the numbers themselves, and no layer")
            }
            None if source.name.ends_with(EXPERT_BLOCKS) => {
                (spec != Spec::Packed(QuantFormat::MXFP4)).then_some(IN_MXFP4_ALONE)
            }
            None if !layout.is_module(&source.name) => Some("a parameter, not the weight of a module"),
            None => self.not_linear(source),
            other => other,
        };
        if let Some(reason) = why_not {
            return (Spec::Keep, Some(reason.to_owned()));
        }
        let kind = self.options.target.kind();
        let Some(reason) = kind.obstacle(spec, &source.name, &source.dims) else {
            return (spec, None);
        };
        let others = kind.instead(spec, self.options.recipe.fallback);
        let fits = |other: &Spec| kind.obstacle(*other, &source.name, &source.dims).is_none();
        (others.into_iter().find(fits).unwrap_or(Spec::Keep), Some(reason))
    }
}

/// Norms of which a file has one more than their numbers.
fn add_to_norms(model: &GgufModel, groups: &mut [TensorGroup]) {
    let tensors = groups.iter_mut().flat_map(|group| group.packed.iter_mut().chain(&mut group.plain));
    for tensor in tensors.filter(|tensor| model.is_sum(&tensor.name)) {
        for part in &mut tensor.parts {
            let weight = match part {
                SourcePart::Stored(dense) => Weight::Dense(dense.clone()),
                SourcePart::Encoded(weight) => weight.clone(),
                SourcePart::Viewed(..) => continue,
            };
            *part = SourcePart::Viewed(vec![weight], View::PlusOne);
        }
    }
}

/// The name of a tensor in the output.
fn name_in(is_within_larger: bool, name: &str) -> String {
    let other = if is_within_larger { name_in_mlx_lm(name) } else { None };
    other.unwrap_or_else(|| name.to_owned())
}

/// The shape, of a matrix or of many. The biases of many are none.
fn matrix_dims(source: &SourceTensor) -> &[usize] {
    if source.name.ends_with("bias") {
        return &[];
    }
    &source.dims
}
