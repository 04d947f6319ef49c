//! What a conversion is to do.

use super::recipe::{Recipe, Spec};
use super::target::Target;
use crate::importance::{CalibrationText, ColumnScales, Statistics};
use candle_core::{DType, Device};
use candle_quant::checkpoint::OllamaName;
use candle_quant::{Error, Result};
use std::sync::Arc;

/// What a conversion is to do.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// What is written.
    pub target: Target,
    /// Which tensor becomes what.
    pub recipe: Recipe,
    /// Further recipes, whose shards are written beside those of the first: UQFF models may have several types, which share what is
    /// in no shard.
    pub also: Vec<Recipe>,
    /// Rounds all float numbers to F16, BF16 or F32 first: those that stay dense elements, those that are packed,
    /// and their scales. Without it they keep the dtype of the source; dequantized ones get that of the config.
    pub dtype: Option<DType>,
    /// Dequantizes weights that are packed already, to pack them as the recipe says.
    pub requantize: bool,
    /// Writes dense elements: dequantizes what is packed already, and packs nothing.
    pub dequantize: bool,
    /// Looks for codes and scales of a smaller squared error than those of the encoder, group by group; see
    /// [`QuantizedRows::improve`](candle_quant::format::QuantizedRows::improve). The bytes are no longer those of the program whose format it is.
    pub search: bool,
    /// What layers are given: columns count by it in a search, and in the errors by which formats are chosen for a number
    /// of bits.
    pub statistics: Option<Arc<Statistics>>,
    /// Runs the source on this text, and lets the columns of a weight make up for what those before them lose, as GPTQ does:
    /// one after another, by the products of what their layer is given.
    pub feedback: Option<Arc<CalibrationText>>,
    /// By what columns are multiplied before they are packed; what makes their inputs is divided by the same. See
    /// [`column_scales`](super::column_scales).
    pub scales: Option<Arc<ColumnScales>>,
    /// Refuses a plan in which a tensor can't become what its rule says.
    pub strict: bool,
    /// The size of a file of weights that is not exceeded, unless one weight does.
    pub max_shard_size: u64,
    /// What packs: a CUDA device, or the CPU (the default). The bytes are the same; what a device has no kernel for is
    /// done by the CPU, and noted in the plan.
    pub device: Device,
    /// What an output of Ollama is called.
    pub(super) model: Option<OllamaName>,
}

impl ConvertOptions {
    /// The default size of a file of weights, 5 GB, as Hugging Face has it.
    pub const MAX_SHARD_SIZE: u64 = 5_000_000_000;

    /// An MLX checkpoint by a recipe.
    pub fn mlx(recipe: Recipe) -> Self {
        let max_shard_size = Self::MAX_SHARD_SIZE;
        Self {
            target: Target::Mlx,
            recipe,
            also: Vec::new(),
            dtype: None,
            requantize: false,
            dequantize: false,
            search: false,
            statistics: None,
            feedback: None,
            scales: None,
            strict: false,
            max_shard_size,
            device: Device::Cpu,
            model: None,
        }
    }

    /// A UQFF model by a recipe, of which [`Recipe::named`] has one that is meant for it, `mistralrs`.
    pub fn uqff(recipe: Recipe) -> Self {
        Self { target: Target::Uqff, ..Self::mlx(recipe) }
    }

    /// A UQFF model of several types, as [`uqff`](Self::uqff) of each of these recipes.
    ///
    /// # Errors
    /// If there is none.
    pub fn uqff_of_several(recipes: impl IntoIterator<Item = Recipe>) -> Result<Self> {
        let mut recipes = recipes.into_iter();
        let first =
            recipes.next().ok_or_else(|| Error::mismatch("a UQFF model", "one recipe at least", "none"))?;
        Ok(Self { also: recipes.collect(), ..Self::uqff(first) })
    }

    /// A model called `name`, `[[host/]namespace/]model[:tag]`, in a store of Ollama, by a recipe, of which
    /// [`Recipe::named`] has one that is meant for it, `ollama`. The output is the store, which may have other models.
    ///
    /// # Errors
    /// If Ollama has no such names.
    pub fn ollama(recipe: Recipe, name: &str) -> Result<Self> {
        let Some(model) = OllamaName::parse(name) else {
            let expected = "[[host/]namespace/]model[:tag] of letters, digits, `-`, `_` and `.`";
            return Err(Error::mismatch("name of a model", expected, format!("`{name}`")));
        };
        Ok(Self { target: Target::Ollama, model: Some(model), ..Self::mlx(recipe) })
    }

    /// The model of a store that is written, if one is.
    pub(super) fn model(&self) -> Result<Option<&OllamaName>> {
        match (self.target, &self.model) {
            (Target::Ollama, None) => Err(Error::mismatch(
                "model of Ollama",
                "a name, as `ConvertOptions::ollama` takes one",
                "none",
            )),
            (Target::Ollama, model) => Ok(model.as_ref()),
            _ => Ok(None),
        }
    }

    /// A GGUF file by a recipe. See [`dequantize`](Self::dequantize) for one without packed weights. It is one file, whatever
    /// [`max_shard_size`](Self::max_shard_size) says.
    pub fn gguf(recipe: Recipe) -> Self {
        Self { target: Target::Gguf, ..Self::mlx(recipe) }
    }

    /// An SLM1 file by a recipe, for a model of the llama family, with a placeholder for the checksum, whose algorithm is not
    /// published.
    pub fn slm1(recipe: Recipe) -> Self {
        Self { target: Target::Slm1, ..Self::mlx(recipe) }
    }

    /// A checkpoint that transformers loads, by a recipe. See [`dequantize`](Self::dequantize) for one without packed weights.
    pub fn hugging_face(recipe: Recipe) -> Self {
        Self { target: Target::HuggingFace, ..Self::mlx(recipe) }
    }

    /// Dense elements under the names of the source.
    pub fn dense() -> Self {
        Self { target: Target::Dense, dequantize: true, ..Self::mlx(Recipe::safe(Spec::Keep)) }
    }
}
