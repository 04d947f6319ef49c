//! Checkpoints in MLX's layout with random weights, made once.

use crate::gguf::{self, Mix};
use crate::options::{Library, Options};
use crate::shapes::Shape;
use anyhow::{Context, Result};
use half::bf16;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use serde_json::{json, Map, Value};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Part of the files' names: what is made in another way is made anew.
const VERSION: u32 = 1;
const GROUP: usize = 64;
/// The standard deviation of weights, as that of models that begin to learn: no layer grows what goes through it much.
pub const SPREAD: f32 = 0.02;

/// The files of one shape in one number of bits.
pub struct Files {
    pub shape: Shape,
    pub bits: usize,
    /// The folder of this crate's checkpoint.
    pub mlx: PathBuf,
    /// That of candle.
    pub gguf: PathBuf,
    /// Bytes of all weights of the first, which a step reads.
    pub bytes: usize,
}

impl Files {
    pub fn path(&self, library: Library) -> &Path {
        match library {
            Library::CandleQuant => &self.mlx,
            Library::Candle => &self.gguf,
        }
    }
}

/// Makes the files that are not there yet.
pub fn make(options: &Options, shape: &Shape, bits: usize) -> Result<Files> {
    let folder = &options.files;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let stem = format!("qwen3-{}-v{VERSION}", shape.name);
    let mlx = folder.join(format!("{stem}-affine-{bits}"));
    once(&mlx, |path| write_mlx(path, shape, bits))?;
    let mix = if bits == 4 { Mix::Q4K } else { Mix::Q8 };
    let gguf = folder.join(format!("{stem}-{}.gguf", mix.name()));
    once(&gguf, |path| gguf::write(path, shape, mix))?;
    if options.make {
        let mut paths = json!({"kind": "files", "model": shape.name, "bits": bits, "mlx": mlx, "gguf": gguf});
        if bits == 4 {
            let mixed = folder.join(format!("{stem}-{}.gguf", Mix::Q4KM.name()));
            once(&mixed, |path| gguf::write(path, shape, Mix::Q4KM))?;
            paths["mixed"] = json!(mixed);
        }
        println!("{paths}");
    }
    let bytes = fs::metadata(mlx.join("model.safetensors"))?.len() as usize;
    Ok(Files { shape: shape.clone(), bits, mlx, gguf, bytes })
}

/// Makes a file or folder under another name first, so that a run that was broken off leaves none that looks whole.
fn once(path: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    // Of this process alone: tests may run beside each other.
    let partial = path.with_extension(format!("partial-{}", std::process::id()));
    make(&partial).with_context(|| format!("{}: can't be made", path.display()))?;
    match fs::rename(&partial, path) {
        // Another process was faster.
        Err(_) if path.exists() => Ok(()),
        result => Ok(result?),
    }
}

/// One tensor of a safetensors file: its name, dtype and shape, and how its bytes are made.
struct Stored {
    name: String,
    dtype: &'static str,
    dims: Vec<usize>,
    content: Content,
}

#[derive(Clone, Copy)]
enum Content {
    Codes,
    /// Scales around this value, each between half of it and one and a half.
    Scales(f32),
    /// What is added to code 0, so that the mean of a group is near 0.
    Biases(f32),
    Ones,
}

fn write_mlx(folder: &Path, shape: &Shape, bits: usize) -> Result<()> {
    fs::create_dir_all(folder)?;
    // Codes are uniform: their deviation is that of a range divided by sqrt(12).
    let codes = (1usize << bits) as f32;
    let scale = SPREAD / (codes / 12f32.sqrt());
    let mut tensors = Vec::new();
    for weight in shape.weights() {
        let (module, n) = (weight.module, weight.n);
        let mut add = |part: &str, dtype, dims, content| {
            tensors.push(Stored { name: format!("{module}.{part}"), dtype, dims, content });
        };
        match weight.k {
            None => add("weight", "BF16", vec![n], Content::Ones),
            Some(k) => {
                add("weight", "U32", vec![n, k * bits / 32], Content::Codes);
                add("scales", "BF16", vec![n, k / GROUP], Content::Scales(scale));
                add("biases", "BF16", vec![n, k / GROUP], Content::Biases(-scale * (codes - 1.) / 2.));
            }
        }
    }
    write_safetensors(&folder.join("model.safetensors"), &tensors)?;
    fs::write(folder.join("config.json"), config(shape, bits).to_string())?;
    Ok(())
}

fn config(shape: &Shape, bits: usize) -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": true,
        "quantization": {"group_size": GROUP, "bits": bits, "mode": "affine"},
    })
}

fn write_safetensors(path: &Path, tensors: &[Stored]) -> Result<()> {
    let (mut header, mut end) = (Map::new(), 0);
    for Stored { name, dtype, dims, .. } in tensors {
        let bytes = dims.iter().product::<usize>() * if *dtype == "U32" { 4 } else { 2 };
        let entry = json!({"dtype": dtype, "shape": dims, "data_offsets": [end, end + bytes]});
        header.insert(name.clone(), entry);
        end += bytes;
    }
    let mut header = Value::Object(header).to_string();
    // Weights can be used where they lie only if they are aligned.
    header += &" ".repeat(header.len().next_multiple_of(64) - header.len() + 56);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut rng = StdRng::seed_from_u64(1);
    let mut codes = vec![0; 1 << 20];
    for Stored { dtype, dims, content, .. } in tensors {
        let elements = dims.iter().product::<usize>();
        debug_assert_eq!(*dtype == "U32", matches!(content, Content::Codes));
        match *content {
            Content::Codes => {
                let mut left = elements * 4;
                while left > 0 {
                    let part = left.min(codes.len());
                    rng.fill_bytes(&mut codes[..part]);
                    file.write_all(&codes[..part])?;
                    left -= part;
                }
            }
            Content::Ones => file.write_all(&bf16::ONE.to_le_bytes().repeat(elements))?,
            Content::Scales(mean) => {
                let bytes: Vec<u8> = (0..elements)
                    .flat_map(|_| bf16::from_f32(mean * rng.random_range(0.5f32..1.5)).to_le_bytes())
                    .collect();
                file.write_all(&bytes)?;
            }
            Content::Biases(mean) => file.write_all(&bf16::from_f32(mean).to_le_bytes().repeat(elements))?,
        }
    }
    file.flush()?;
    Ok(())
}
