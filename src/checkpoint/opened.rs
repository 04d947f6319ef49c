//! An open checkpoint.

use super::chat::StoredChatTemplates;
use super::container::Opened;
use super::file::{open_with_metadata, read_json, Digest, GgmlKernels, OpenOptions, Opening, Warnings};
use super::gguf::GgufValue;
use super::kind::CheckpointKind;
use super::sidecar::SidecarFiles;
use super::slm1::Slm1Tokenizer;
use super::tokenizer::StoredTokenizer;
use super::views::Views;
use super::weight::{module_of, natural_order, tensor_of, DenseTensor, Weight};
use crate::format::UqffType;
use crate::{Error, Result};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// An open checkpoint. Cloning is cheap and shares the open files.
#[derive(Clone)]
pub struct Checkpoint(Arc<Inner>);

struct Inner {
    path: PathBuf,
    opened: Opened,
    warnings: Warnings,
    options: OpenOptions,
}

impl Checkpoint {
    pub(super) fn new(path: &Path, opened: Opened, opening: Opening) -> Self {
        let (options, warnings) = (opening.options(), opening.warnings);
        Self(Arc::new(Inner { path: path.to_owned(), opened, warnings, options }))
    }

    /// The path that was opened; of a model of the Hugging Face hub, where it is in the cache.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// What the checkpoint was recognised as, from its tensors.
    pub fn kind(&self) -> CheckpointKind {
        self.0.opened.kind
    }

    /// What layers compute with weights in blocks of GGML's types.
    pub fn ggml_kernels(&self) -> GgmlKernels {
        self.0.options.ggml
    }

    /// The content of `config.json`, or what a container without one says instead; null if there is
    /// neither. `NaN`, `Infinity` and `-Infinity`, as Python writes them, are strings in it.
    pub fn config(&self) -> &serde_json::Value {
        &self.0.opened.config
    }

    /// The path of `tokenizer.json`, if there is one.
    pub fn tokenizer_file(&self) -> Option<PathBuf> {
        self.0.opened.sidecars.path("tokenizer.json")
    }

    /// The tokenizer that lies in the same files as the weights, if there is one.
    pub fn stored_tokenizer(&self) -> Result<Option<StoredTokenizer>> {
        self.0.opened.container.tokenizer()
    }

    /// The metadata of a GGUF file; `None` of other kinds. Whole numbers come in 32 bits where they fit.
    pub fn gguf_values(&self) -> Option<BTreeMap<String, GgufValue>> {
        self.0.opened.container.gguf_values()
    }

    /// The tokenizer of an SLM1 file as it stands there; `None` of other kinds.
    pub fn slm1_tokenizer(&self) -> Option<&Slm1Tokenizer> {
        self.0.opened.container.slm1_tokenizer()
    }

    /// The entries of a layer of UQFF files whose weight is in a type of mistral.rs that is made of a whole matrix, to be written
    /// again: `<module>.weight` and all `<module>.weight.*`, as they are stored; those of E4M3 numbers are U8. `None` of other
    /// layers and other kinds.
    ///
    /// # Errors
    /// If an entry is of a dtype that is not [loaded](Self::dense).
    pub fn uqff_entries(&self, module: &str) -> Result<Option<(UqffType, Vec<DenseTensor>)>> {
        self.0.opened.container.uqff_entries(module)
    }

    /// The chat templates that lie in the same files as the weights, if there are any.
    ///
    /// # Errors
    /// If the file says something else there than text.
    pub fn stored_chat_templates(&self) -> Result<Option<StoredChatTemplates>> {
        self.0.opened.container.chat_templates()
    }

    /// The file of an Ollama model that is its `template` (of Go, not of Jinja), its `params` or its `system` prompt: the
    /// last part of a media type; `None` if there is no such file.
    pub fn ollama_layer(&self, media: &str) -> Option<&Path> {
        self.0.opened.ollama_layers.get(media).map(PathBuf::as_path)
    }

    /// The content of a layer of an Ollama model that is JSON, as its `params`; `None` if there is no such layer. It may
    /// cost what the [`Budget`](super::Budget) allowed of opening.
    pub fn read_ollama_json(&self, media: &str) -> Result<Option<serde_json::Value>> {
        self.ollama_layer(media).map_or(Ok(None), |path| read_json(path, &Opening::with(self.0.options)))
    }

    /// The content of a text file that belongs to the weights; `None` if there is no such file.
    ///
    /// # Errors
    /// If it can't be read, is no UTF-8, or has more than `most` bytes.
    pub fn read_text(&self, file: &str, most: usize) -> Result<Option<String>> {
        self.0.opened.sidecars.text(file, most)
    }

    /// The content of a JSON file that belongs to the weights; `None` if there is no such file. It may cost what the
    /// [`Budget`](super::Budget) allowed of opening.
    pub fn read_json(&self, file: &str) -> Result<Option<serde_json::Value>> {
        self.0.opened.sidecars.json(file, &Opening::with(self.0.options))
    }

    /// The names of all tensors, sorted, as models know them. A quantized weight is one tensor, of the name
    /// that it has in a dense checkpoint; its parts (scales and the like) have no names here.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.0.opened.container.names()
    }

    /// Whether a tensor of this full name is stored, for example `model.norm.weight`.
    pub fn contains(&self, tensor: &str) -> bool {
        self.0.opened.container.contains(tensor)
    }

    /// The paths of all modules that have a weight, with numbers in counting order (layer 2 before
    /// layer 10).
    pub fn modules(&self) -> Vec<String> {
        let mut modules: Vec<_> = self.tensor_names().filter_map(module_of).collect();
        modules.sort_by(|a, b| natural_order(a, b));
        modules.into_iter().map(str::to_owned).collect()
    }

    /// The weight of a module, in the format in which the checkpoint has it.
    ///
    /// `module` is the path without `.weight`, empty at the root. `in_features` is K, the length of a row,
    /// as the model knows it. It decides the format where the checkpoint leaves more than one reading, and
    /// everything is checked against it. Without it the config decides, and has to fit the shapes.
    ///
    /// If the module is not stored, its other names are tried: an expert `experts.3.gate_proj` (or `w1`) is a matrix of
    /// the stack `switch_mlp.gate_proj` or `experts.gate_proj`, `q_proj` is rows of `qkv_proj`, `gate_proj` and `up_proj`
    /// are those of `gate_up_proj`, each also the other way round, and `lm_head` is the embedding if the config ties
    /// them. Weights stay as they are packed, and only the bytes of the part are read.
    ///
    /// # Errors
    /// If the weight is missing, if its tensors contradict each other, the config or `in_features`, if
    /// more than one format fits, or if the parts that it would be made of have several.
    pub fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Weight> {
        let weight = match self.0.opened.container.weight(module, in_features)? {
            Some(weight) => Some(weight),
            None => self.views().weight(module, in_features)?,
        };
        weight.ok_or_else(|| self.missing(&tensor_of(module, "weight")))
    }

    /// A tensor that is not quantized, by its full name. Biases have the other names of their modules, as for
    /// [`weight`](Checkpoint::weight).
    ///
    /// # Errors
    /// If there is none of that name, if it is a quantized weight, or if its dtype is not one of
    /// F16, BF16, F32, F64, U8, U32, I16, I32 and I64.
    pub fn dense(&self, tensor: &str) -> Result<DenseTensor> {
        let dense = match self.0.opened.container.dense(tensor)? {
            Some(dense) => Some(dense),
            None => self.views().dense(tensor)?,
        };
        dense.ok_or_else(|| self.missing(tensor))
    }

    /// Any tensor by its full name, in the format in which the checkpoint has it; `in_features` as for
    /// [`weight`](Checkpoint::weight).
    ///
    /// # Errors
    /// As those of [`weight`](Checkpoint::weight) and [`dense`](Checkpoint::dense).
    pub fn tensor(&self, name: &str, in_features: Option<usize>) -> Result<Weight> {
        let container = &self.0.opened.container;
        match (container.weight(module_of(name).unwrap_or(name), in_features)?, module_of(name)) {
            (Some(weight), _) => Ok(weight),
            (None, Some(module)) if !container.contains(name) => self.weight(module, in_features),
            (None, _) => self.dense(name).map(Weight::Dense),
        }
    }

    /// Whether the weight `module` has so many rows as the only one outside of the layers that has one for each entry of
    /// the vocabulary (`vocab_size` of the config, rounded up to a `pad_vocab_size_multiple`): then it is both
    /// embedding and output head.
    pub(crate) fn is_only_vocabulary(&self, module: &str, rows: usize) -> bool {
        let number = |config: &serde_json::Value, key| config.get(key)?.as_u64();
        let size = |config| {
            let multiple = number(config, "pad_vocab_size_multiple").filter(|multiple| *multiple > 0);
            number(config, "vocab_size")?.checked_next_multiple_of(multiple.unwrap_or(1))
        };
        let config = self.config();
        let vocabulary = size(config).or_else(|| size(config.get("text_config")?));
        let is_in_layer = |module: &str| module.split('.').any(|part| part.parse::<usize>().is_ok());
        if is_in_layer(module) || vocabulary != u64::try_from(rows).ok() {
            return false;
        }
        let modules = self.tensor_names().filter_map(module_of).filter(|module| !is_in_layer(module));
        // One that can't be read without its K may be another one.
        let may_be_one = |module: &&str| match self.weight(module, None) {
            Ok(weight) => matches!(weight.dims(), [n, _] if *n == rows),
            Err(_) => true,
        };
        modules.filter(may_be_one).count() == 1
    }

    /// The files that hold the tensors.
    pub fn weight_files(&self) -> BTreeSet<PathBuf> {
        let container = &self.0.opened.container;
        let parts = |name: &str| {
            let module = module_of(name).unwrap_or(name).to_owned();
            ["scales", "biases"].map(|part| tensor_of(&module, part))
        };
        let files = |name: &str| {
            let names = std::iter::once(name.to_owned()).chain(parts(name));
            names.filter_map(|name| container.file_of(&name).map(Path::to_owned)).collect::<Vec<_>>()
        };
        self.tensor_names().flat_map(files).collect()
    }

    /// What the files of the weights say of themselves, by keys: the text of the first safetensors file's `__metadata__`, or
    /// short texts and numbers of a GGUF file's metadata. Anybody may have written anything there. It may cost what the
    /// [`Budget`](super::Budget) allowed of opening.
    ///
    /// # Errors
    /// If the file can't be read any more.
    pub fn metadata(&self) -> Result<BTreeMap<String, String>> {
        if let Some(known) = self.0.opened.container.metadata() {
            return Ok(known);
        }
        match (self.kind(), self.weight_files().first()) {
            // The blobs of a store are many, each with words on its own tensor.
            (CheckpointKind::Ollama | CheckpointKind::Slm1 | CheckpointKind::Gguf, _) | (_, None) => {
                Ok(BTreeMap::new())
            }
            (_, Some(first)) => {
                let (_, metadata) = open_with_metadata(first, &Opening::with(self.0.options))?;
                Ok(metadata)
            }
        }
    }

    /// The files beside the weights: config, tokenizer and the like.
    pub fn sidecar_files(&self) -> &SidecarFiles {
        &self.0.opened.sidecars
    }

    /// The files of which the checkpoint states the SHA-256, with these digests: all blobs of a model of an
    /// Ollama store, none elsewhere. They are not checked while opening.
    pub fn digests(&self) -> &[Digest] {
        &self.0.opened.digests
    }

    /// The full names of the stored tensors that answer for a full name: itself, if it is stored; those of a stack, of parts or
    /// of a fused projection; none if nothing does.
    pub fn answering(&self, tensor: &str) -> Vec<String> {
        match self.contains(tensor) {
            true => vec![tensor.to_owned()],
            false => self.views().answering(tensor),
        }
    }

    /// What was accepted although something about it is odd, so far. Each is also sent to [`log::warn!`].
    pub fn warnings(&self) -> Vec<String> {
        self.0.warnings.list()
    }

    /// The file that holds a tensor, or what answers for it; the path that was opened, if it is not known.
    pub(crate) fn file_of(&self, tensor: &str) -> &Path {
        let stored = self.0.opened.container.file_of(tensor);
        stored.or_else(|| self.views().file_of(tensor)).unwrap_or(self.path())
    }

    /// Whether there is a tensor of this full name, or others answer for it.
    pub(crate) fn provides(&self, tensor: &str) -> bool {
        self.contains(tensor) || self.views().contains(tensor)
    }

    fn views(&self) -> Views<'_> {
        Views::new(&*self.0.opened.container, self.config(), self.path())
    }

    /// The file that states the [`config`](Checkpoint::config), be it there or not: `config.json`, or that of the
    /// weights, if it says everything itself.
    pub fn config_file(&self) -> PathBuf {
        match (self.kind(), self.sidecar_files()) {
            (CheckpointKind::Gguf | CheckpointKind::Slm1, _) => self.path().to_owned(),
            (_, SidecarFiles::Directory(dir)) => dir.join("config.json"),
            (_, files) => files.path("config.json").unwrap_or_else(|| self.path().to_owned()),
        }
    }

    fn missing(&self, tensor: &str) -> Error {
        Error::tensor(self.file_of(tensor), tensor, "a tensor of this name", "none", self.similar(tensor))
    }

    /// Help for a name that does not exist: the same name under another prefix.
    fn similar(&self, tensor: &str) -> String {
        let tail_of =
            |long: &str, short: &str| long.strip_suffix(short).is_some_and(|prefix| prefix.ends_with('.'));
        match self.tensor_names().find(|name| tail_of(name, tensor) || tail_of(tensor, name)) {
            Some(name) => format!("there is `{name}`"),
            None => "check that the model fits the checkpoint".into(),
        }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.0.path)
            .field("kind", &self.kind())
            .field("tensors", &self.tensor_names().count())
            .finish_non_exhaustive()
    }
}
