//! Adapters as PEFT and mlx-lm read them.

use super::{peft, AdapterFormat, LoraTensors, CONFIG};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use serde_json::{json, Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

type Loras = BTreeMap<String, LoraTensors>;
type Named = Vec<(String, Tensor)>;

/// Writes an adapter to a directory, which is made if there is none: its tensors in F32, and its config. Files that are
/// there under these names are replaced.
///
/// PEFT has no stacks of experts: its modules have to have two dimensions.
///
/// # Errors
/// If there is no module, some have magnitudes and others don't, shapes do not fit, or a file can't be written.
pub fn write(dir: impl AsRef<Path>, format: AdapterFormat, loras: &Loras) -> Result<()> {
    let dir = dir.as_ref();
    let is_dora = match loras.values().filter(|lora| lora.magnitude.is_some()).count() {
        0 => false,
        count if count == loras.len() => true,
        count => {
            let expected = "magnitudes in all modules or in none, as a file has them";
            return Err(Error::mismatch("adapter to write", expected, format!("{count} of {}", loras.len())));
        }
    };
    if loras.is_empty() {
        return Err(Error::mismatch("adapter to write", "one module or more", "none"));
    }
    let (tensors, config) = match format {
        AdapterFormat::Peft => of_peft(loras, is_dora)?,
        AdapterFormat::MlxLm => of_mlx_lm(loras, is_dora)?,
    };
    fs::create_dir_all(dir).map_err(|error| Error::Io { path: dir.to_owned(), error })?;
    replace(&dir.join(format.file_name()), |path| {
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let written = safetensors::serialize_to_file(tensors, Some(metadata), path);
        written.map_err(|error| Error::file(path, error.to_string(), "write it to another place"))
    })?;
    replace(&dir.join(CONFIG), |path| {
        fs::write(path, format!("{config:#}\n")).map_err(|error| Error::Io { path: path.to_owned(), error })
    })
}

/// Writes a file beside its place and moves it there.
fn replace(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let partial = path.with_extension("partial");
    write(&partial)?;
    fs::rename(&partial, path).map_err(|error| Error::Io { path: path.to_owned(), error })
}

fn on_host(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.detach().to_dtype(DType::F32)?.to_device(&Device::Cpu)?.contiguous()?)
}

fn rank_of(module: &str, lora: &LoraTensors) -> Result<usize> {
    match lora.a.dims() {
        [.., rank, _] => Ok(*rank),
        other => Err(Error::mismatch(format!("A of `{module}`"), "[rank, K]", format!("{other:?}"))),
    }
}

fn of_peft(loras: &Loras, is_dora: bool) -> Result<(Named, Value)> {
    let (mut tensors, mut counts) = (Named::new(), BTreeMap::<(usize, u64), usize>::new());
    let settings = |module: &str, lora: &LoraTensors| -> Result<(usize, f64)> {
        let rank = rank_of(module, lora)?;
        Ok((rank, lora.scale * rank as f64))
    };
    for (module, lora) in loras {
        if lora.a.rank() != 2 {
            let found = format!("{:?}", lora.a.dims());
            return Err(Error::mismatch(format!("A of `{module}` for PEFT"), "[rank, K]", found));
        }
        let name = |end: &str| format!("{}{module}.{end}", peft::PREFIX);
        tensors.push((name("lora_A.weight"), on_host(&lora.a)?));
        tensors.push((name("lora_B.weight"), on_host(&lora.b)?));
        if let Some(magnitude) = &lora.magnitude {
            tensors.push((name("lora_magnitude_vector"), on_host(magnitude)?));
        }
        let (rank, alpha) = settings(module, lora)?;
        *counts.entry((rank, alpha.to_bits())).or_default() += 1;
    }
    // What most modules have; the others are named.
    let usual = counts.iter().max_by_key(|(_, count)| **count).map(|(settings, _)| *settings);
    let (rank, alpha) = usual.map_or((1, 1.), |(rank, alpha)| (rank, f64::from_bits(alpha)));
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for (module, lora) in loras {
        let (own_rank, own_alpha) = settings(module, lora)?;
        if own_rank != rank {
            ranks.insert(module.clone(), json!(own_rank));
        }
        if own_alpha.to_bits() != alpha.to_bits() {
            alphas.insert(module.clone(), number(own_alpha));
        }
    }
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": null,
        "inference_mode": true,
        "r": rank,
        "lora_alpha": number(alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": false,
        "use_rslora": false,
        "use_dora": is_dora,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": loras.keys().collect::<Vec<_>>(),
        "modules_to_save": null,
    });
    Ok((tensors, config))
}

/// As a whole number, if it is one.
fn number(value: f64) -> Value {
    match value.fract() == 0. && value.abs() < 1e9 {
        true => json!(value as i64),
        false => json!(value),
    }
}

/// All modules of a file have one rank and one scale: smaller ranks get rows of zeros, and other scales become B's.
fn of_mlx_lm(loras: &Loras, is_dora: bool) -> Result<(Named, Value)> {
    let ranks = loras.iter().map(|(module, lora)| rank_of(module, lora)).collect::<Result<Vec<_>>>()?;
    let rank = ranks.into_iter().max().unwrap_or(1);
    let scale = loras.values().map(|lora| lora.scale).find(|scale| *scale != 0.).unwrap_or(1.);
    let (mut tensors, mut keys) = (Named::new(), Vec::<&str>::new());
    for (module, lora) in loras {
        let (a, b) = (on_host(&lora.a)?, on_host(&lora.b)?);
        let (of_rank, last) = (a.rank().saturating_sub(2), b.rank().saturating_sub(1));
        let missing = rank.saturating_sub(rank_of(module, lora)?);
        let a = a.pad_with_zeros(of_rank, 0, missing)?;
        let b = (b.pad_with_zeros(last, 0, missing)? * (lora.scale / scale))?;
        let (a, b) = match a.rank() {
            2 => (a.t()?.contiguous()?, b.t()?.contiguous()?),
            _ => (a, b),
        };
        tensors.push((format!("{module}.lora_a"), a));
        tensors.push((format!("{module}.lora_b"), b));
        if let Some(magnitude) = &lora.magnitude {
            tensors.push((format!("{module}.m"), on_host(magnitude)?));
        }
        // Keys are names in a layer, or of modules that are in none.
        let in_layer = module.split_once("layers.").and_then(|(_, rest)| rest.split_once('.'));
        let key = in_layer.map_or(module.as_str(), |(_, key)| key);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let config = json!({
        "fine_tune_type": if is_dora { "dora" } else { "lora" },
        // All of them.
        "num_layers": -1,
        "lora_parameters": { "rank": rank, "scale": scale, "dropout": 0.0, "keys": keys },
    });
    Ok((tensors, config))
}
