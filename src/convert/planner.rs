//! Decides what becomes of every tensor.

use super::experts::{Form, Group, Part};
use super::job::{stored_dtype, Job};
use super::mixed::ModelLayers;
use super::recipe::{is_default, Fallback, Subject};
use super::role::roles;
use super::{Options, Role, Spec, Target};
use crate::checkpoint::{Checkpoint, Weight};
use crate::models::Config;
use crate::verify::in_features;
use crate::Result;
use candle_core::DType;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

/// The files that tokenizers are made of, of which there is one at least.
const TOKENIZERS: [&str; 5] =
    ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model"];

/// What decides about all tensors.
pub(super) struct Planner<'a> {
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
    pub(super) fn new(source: &'a Checkpoint, options: &'a Options) -> Self {
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

    /// Whether anything may be packed.
    fn packs(&self) -> bool {
        self.options.target != Target::Dense
    }

    /// Whether a tensor is left out: a head that the model does not have.
    fn is_left_out(&self, name: &str) -> bool {
        self.tied && self.options.target.kind().leaves_out_tied_heads() && name.ends_with("lm_head.weight")
    }

    /// All tensors of the source that are converted.
    pub(super) fn tensors(&self) -> Result<Vec<(String, Weight)>> {
        let model = Config::from_json(self.source.config()).ok();
        let tensor = |name: &str| {
            let in_features = model.as_ref().and_then(|model| in_features(model, name));
            Ok((name.to_owned(), self.source.tensor(name, in_features)?))
        };
        self.source.tensor_names().filter(|name| !self.is_left_out(name)).map(tensor).collect()
    }

    /// What is odd; of tensors, what they have shown when they were asked for, and of rules, when they were applied.
    pub(super) fn notes(&self) -> Vec<String> {
        let left_out = self.source.tensor_names().filter(|name| self.is_left_out(name));
        let mut notes: Vec<_> = left_out
            .map(|name| format!("`{name}` is left out: the config says that the embedding is the head"))
            .collect();
        match self.source.stored_tokenizer() {
            Err(error) => notes.push(format!("no tokenizer is written: {error}")),
            Ok(None) if TOKENIZERS.iter().all(|name| self.source.companions().path(name).is_none()) => {
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
        match self.staying.get() {
            0 => {}
            count => {
                notes.push(format!("{count} packed weights stay as they are; --requantize packs them anew"))
            }
        }
        notes.extend(self.source.warnings());
        notes
    }

    pub(super) fn group(&self, group: Group) -> Result<Vec<Job>> {
        if self.packs() {
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
        let target = self.options.target;
        let subject =
            Subject { name: &form.name, dims: &form.dims, roles: &roles, layers: &self.layers, target };
        let decided = match self.packs() {
            true => self.options.recipe.decide(&subject),
            false => (Spec::Keep, "dequantize"),
        };
        self.used.borrow_mut().insert(decided.1);
        let role = roles.first().copied().unwrap_or(Role::Other);
        if let ([Part::Encoded(weight)], true) = (form.parts.as_slice(), self.packs()) {
            let stays = !self.options.requantize || decided.0 == Spec::Keep;
            if stays && !matches!(weight, Weight::Dense(_)) {
                if let (Weight::Packed(packed), false) = (weight, is_default(decided.1)) {
                    if let Some(job) = Job::widen(form, role, decided, packed, self.dtype, target)? {
                        return Ok(job);
                    }
                }
                let job = Job::pass_through(form, role, weight, target)?;
                if decided.0 != Spec::Keep && job.format().map(Spec::Packed) != Some(decided.0) {
                    self.staying.set(self.staying.get() + 1);
                }
                return Ok(job);
            }
        }
        let (spec, fallback) = self.fit(form, decided.0, obstacle);
        let mut job = match spec {
            Spec::Packed(format) => {
                target.check(&form.name, decided.1, format)?;
                Job::pack(form, format, self.float_dtype(form), self.options)?
            }
            Spec::Cast(dtype) => Job::plain(form, Some(dtype))?,
            Spec::Keep => Job::plain(form, self.plain_dtype(form))?,
        };
        job.planned.role = role;
        let is_vector = form.dims.len() < 2 && spec == Spec::Keep;
        job.planned.rule = if is_vector { "not a matrix" } else { decided.1 }.to_owned();
        job.planned.fallback = fallback;
        job.spec = decided.0;
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
        let experts = self.options.target.kind().experts();
        let why_not = match obstacle {
            _ if !is_float => Some("not float numbers"),
            _ if form.dims.contains(&0) => Some("no elements"),
            _ if form.dims.len() > 2 && !experts.is_stack(&form.name) => {
                Some(obstacle.unwrap_or("more than two dimensions, and no experts"))
            }
            None if !experts.is_module(&form.name) => Some("a parameter, not the weight of a module"),
            other => other,
        };
        if let Some(reason) = why_not {
            return (Spec::Keep, Some(reason.to_owned()));
        }
        if k.is_multiple_of(format.group_size()) {
            return (spec, None);
        }
        let smaller = match self.options.recipe.fallback {
            Fallback::Fit => format.smaller_groups().find(|format| k.is_multiple_of(format.group_size())),
            Fallback::Keep => None,
        };
        let reason = format!("rows of {k} are no whole number of groups of {}", format.group_size());
        (smaller.map_or(Spec::Keep, Spec::Packed), Some(reason))
    }
}
