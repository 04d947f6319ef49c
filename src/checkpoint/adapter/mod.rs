//! Files of low-rank adapters, as PEFT and mlx-lm write them: tensors by module, and by what they are multiplied.
//!
//! What an adapter does to a layer is not known here.

mod config;
mod mlx_lm;
mod parts;
mod peft;
mod write;

pub use write::write;

use super::file::{open, Opening};
use super::{DenseTensor, OpenOptions};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use config::Config;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Whose files adapters are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterFormat {
    /// PEFT's `adapter_model.safetensors`.
    #[default]
    Peft,
    /// mlx-lm's `adapters.safetensors`.
    MlxLm,
}

impl AdapterFormat {
    /// The file of the tensors, beside `adapter_config.json`.
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Peft => "adapter_model.safetensors",
            Self::MlxLm => "adapters.safetensors",
        }
    }
}

impl fmt::Display for AdapterFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Peft => "peft",
            Self::MlxLm => "mlx-lm",
        })
    }
}

impl FromStr for AdapterFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let named = [Self::Peft, Self::MlxLm].into_iter().find(|format| format.to_string() == text);
        named.ok_or_else(|| Error::mismatch("format of adapters", "`peft` or `mlx-lm`", format!("`{text}`")))
    }
}

const CONFIG: &str = "adapter_config.json";

/// An adapter of a model, opened: names, shapes and settings are checked, no tensor is read.
///
/// Read are LoRA, rsLoRA and DoRA of linear layers, and LoRA of experts. A setting or a tensor that would change numbers
/// in another way is an error: nothing in a file is ignored.
#[derive(Clone, Debug)]
pub struct AdapterFile {
    file: PathBuf,
    format: AdapterFormat,
    loras: BTreeMap<String, StoredLora>,
}

/// What a file has for one module.
#[derive(Clone, Debug)]
pub struct StoredLora {
    a: DenseTensor,
    b: DenseTensor,
    magnitude: Option<DenseTensor>,
    scale: f64,
    rank: usize,
    /// Of the module's weight.
    dims: Vec<usize>,
    /// Whether A is stored as `[K, rank]` and B as `[rank, N]`.
    transposed: bool,
}

/// The tensors of an adapter of one module. With W `[N, K]`, the module's weight, it makes it `W + scale * B A`.
#[derive(Clone, Debug)]
pub struct LoraTensors {
    /// A, `[rank, K]`, or `[E, rank, K]` for a stack of experts.
    pub a: Tensor,
    /// B, `[N, rank]`, or `[E, N, rank]`.
    pub b: Tensor,
    /// DoRA's lengths of the rows, `[N]`.
    pub magnitude: Option<Tensor>,
    /// What `B A` is multiplied by.
    pub scale: f64,
}

impl AdapterFile {
    /// Opens the adapter in a directory: `adapter_config.json`, and beside it `adapter_model.safetensors` of PEFT or
    /// `adapters.safetensors` of mlx-lm.
    ///
    /// # Errors
    /// If files are missing or malformed, contradict each other, or ask for what is not computed here.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(dir, OpenOptions::default())
    }

    /// As [`open`](Self::open), with another budget for header and config, or another way to read tensors.
    ///
    /// # Errors
    /// As those of [`open`](Self::open).
    pub fn open_with(dir: impl AsRef<Path>, options: OpenOptions) -> Result<Self> {
        let (dir, opening) = (dir.as_ref(), Opening::with(options));
        let config = Config::read(&dir.join(CONFIG), &opening)?;
        let format = config.format()?;
        let file = dir.join(format.file_name());
        if !file.is_file() {
            let problem = format!("there is no such file, which {CONFIG} beside it is for");
            let remedy = match format {
                AdapterFormat::Peft => "a pickled adapter_model.bin becomes one when PEFT loads and saves it",
                AdapterFormat::MlxLm => "fetch it",
            };
            return Err(Error::file(&file, problem, remedy));
        }
        let tensors = open(&file, &opening)?;
        let loras = match format {
            AdapterFormat::Peft => peft::read(&config, &file, &tensors)?,
            AdapterFormat::MlxLm => mlx_lm::read(&config, &file, &tensors)?,
        };
        if loras.is_empty() {
            return Err(Error::file(&file, "it has no tensors", "write the adapter again"));
        }
        Ok(Self { file, format, loras })
    }

    /// The file of the tensors.
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// Whose file it is.
    pub fn format(&self) -> AdapterFormat {
        self.format
    }

    /// What it has, by the paths of modules.
    pub fn loras(&self) -> &BTreeMap<String, StoredLora> {
        &self.loras
    }
}

impl StoredLora {
    /// Rows of A.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// What `B A` is multiplied by.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether it has DoRA's magnitudes.
    pub fn is_dora(&self) -> bool {
        self.magnitude.is_some()
    }

    /// The dimensions of a weight that it fits, `[N, K]` or `[E, N, K]`.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Copies its tensors to `device`, in F32.
    ///
    /// # Errors
    /// If the device refuses the memory.
    pub fn load(&self, device: &Device) -> Result<LoraTensors> {
        let load = |tensor: &DenseTensor| tensor.load(DType::F32, device);
        let in_order = |tensor: Tensor| match self.transposed {
            true => tensor.t()?.contiguous(),
            false => Ok(tensor),
        };
        Ok(LoraTensors {
            a: in_order(load(&self.a)?)?,
            b: in_order(load(&self.b)?)?,
            magnitude: self.magnitude.as_ref().map(load).transpose()?,
            scale: self.scale,
        })
    }
}
