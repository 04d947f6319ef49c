//! Models of an Ollama store: a blob for each tensor or group of experts, named by a manifest. The bytes are those of
//! Ollama's importer, of which some are MLX's and some its own.

use super::experts::ExpertLayout;
use super::kind::TargetKind;
use crate::convert::output::{Job, OutputFile, OutputTensor, Style};
use crate::convert::recipe::Spec;
use candle_quant::checkpoint::Checkpoint;
use candle_quant::format::Bits;
use candle_quant::{QuantFormat, Result};
use candle_quant_models::MlxLm;
use safetensors::Dtype;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};

/// A model of Ollama.
#[derive(Debug)]
pub(super) struct Ollama;

impl TargetKind for Ollama {
    fn name(&self) -> &'static str {
        "an Ollama store"
    }

    fn recipe(&self) -> &'static str {
        "ollama"
    }

    fn check(&self, format: QuantFormat) -> std::result::Result<(), &'static str> {
        let is_known = match format.element().uint() {
            Some(bits) => matches!(bits, Bits::Four | Bits::Eight),
            None => [QuantFormat::NVFP4, QuantFormat::MXFP4, QuantFormat::MXFP8].contains(&format),
        };
        is_known.then_some(()).ok_or("affine formats of 4 and 8 bits (int4, int8), nvfp4, mxfp4 and mxfp8")
    }

    fn experts(&self, _: &MlxLm) -> ExpertLayout {
        ExpertLayout::OfSource
    }

    fn needs_config(&self) -> bool {
        true
    }

    fn copies(&self, name: &str) -> bool {
        name.ends_with(".json")
    }

    fn published(&self, _file: &str, sha256: &str) -> String {
        format!("blobs/sha256-{sha256}")
    }

    fn packed(
        &self,
        name: &str,
        dims: &[usize],
        format: QuantFormat,
        scales: Dtype,
    ) -> Result<Vec<OutputTensor>> {
        OutputTensor::packed(dims, format, scales, |part| match part {
            "scales" => format!("{name}.scale"),
            "biases" => format!("{name}.bias"),
            _ => name.to_owned(),
        })
    }

    fn files(&self, _: &Checkpoint, jobs: Vec<Job>, _: Option<Spec>, _: u64) -> Result<Vec<OutputFile>> {
        let (mut layers, mut groups) = (Vec::new(), BTreeMap::<String, Vec<Job>>::new());
        for job in jobs {
            match group_of(&job) {
                Some(group) => groups.entry(group.to_owned()).or_default().push(job),
                None => layers.push((job.planned.name.clone(), vec![job])),
            }
        }
        layers.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (group, jobs) in groups {
            // A blob has one type only.
            match jobs.iter().all(|job| job.format() == jobs.first().and_then(Job::format)) {
                true => layers.push((group, jobs)),
                false => layers.extend(jobs.into_iter().map(|job| (job.planned.name.clone(), vec![job]))),
            }
        }
        Ok(layers.into_iter().enumerate().map(|(index, (layer, jobs))| blob(index, layer, jobs)).collect())
    }

    fn sidecars(&self, _: &[OutputFile]) -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

/// The group of experts that a stack belongs to, if it was made of single ones; stacks of the source stay alone.
fn group_of(job: &Job) -> Option<&str> {
    let (group, _) = job.planned.name.strip_suffix(".weight")?.rsplit_once('.')?;
    Some(group).filter(|group| job.is_stacked && group.ends_with(".experts"))
}

fn blob(index: usize, layer: String, jobs: Vec<Job>) -> OutputFile {
    let file = format!("layer-{:05}", index + 1);
    let mut shard = match jobs.first().and_then(Job::format) {
        None => {
            let order = |a: &OutputTensor, b: &OutputTensor| a.name.cmp(&b.name);
            OutputFile::new(file, jobs, Vec::new(), order, None, Style::Common)
        }
        Some(format) => {
            let metadata =
                json!({"quant_type": label(format), "group_size": format.group_size().to_string()});
            let names = jobs.iter().flat_map(|job| &job.outputs).map(|output| output.name.clone()).collect();
            let places: HashMap<_, _> = hash_order(names).into_iter().zip(0..).collect();
            let order = |a: &OutputTensor, b: &OutputTensor| places.get(&a.name).cmp(&places.get(&b.name));
            OutputFile::new(file, jobs, Vec::new(), order, Some(metadata), Style::Mlx)
        }
    };
    for job in &mut shard.jobs {
        job.planned.file.clone_from(&layer);
    }
    shard.layer = layer;
    shard
}

/// Ollama's word for a format.
pub(super) fn label(format: QuantFormat) -> String {
    let integers = format.element().uint().map(|bits| format!("int{}", bits.get()));
    integers.unwrap_or_else(|| format.mode().to_owned())
}

/// Names in the order in which MLX writes the bytes of arrays: that of libstdc++'s `unordered_map` into which they were
/// put one after another by name. A new one comes before all of its bucket, or before all if its bucket is empty.
fn hash_order(mut names: Vec<String>) -> Vec<String> {
    // Enough for as many names, and a group of experts has nine.
    const BUCKETS: u64 = 13;
    names.sort();
    let mut ordered: Vec<(u64, String)> = Vec::new();
    for name in names {
        let bucket = murmur(name.as_bytes()) % BUCKETS;
        let at = ordered.iter().position(|(other, _)| *other == bucket).unwrap_or(0);
        ordered.insert(at, (bucket, name));
    }
    ordered.into_iter().map(|(_, name)| name).collect()
}

/// The hash of strings of libstdc++ on 64-bit machines, MurmurHash64A.
fn murmur(bytes: &[u8]) -> u64 {
    const MULTIPLIER: u64 = 0xC6A4_A793_5BD1_E995;
    const SEED: u64 = 0xC70F_6907;
    let shift = |value: u64| value ^ value >> 47;
    let mut hash = SEED ^ (bytes.len() as u64).wrapping_mul(MULTIPLIER);
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let mixed = shift(u64::from_le_bytes(*word).wrapping_mul(MULTIPLIER)).wrapping_mul(MULTIPLIER);
        hash = (hash ^ mixed).wrapping_mul(MULTIPLIER);
    }
    if !rest.is_empty() {
        let word = rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        hash = (hash ^ word).wrapping_mul(MULTIPLIER);
    }
    shift(shift(hash).wrapping_mul(MULTIPLIER))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by `std::hash<std::string>` of libstdc++.
    #[test]
    fn hashes_are_those_of_libstdcxx() {
        let hashes = [
            ("", 0x553E_9390_1E46_2A6E),
            ("a", 0x454D_DEE4_88C1_ED6B),
            ("lm_head.", 0x9AEC_CD45_B65E_6DDD),
            ("lm_head.weight", 0x2164_1C74_66AF_AB3D),
            ("model.layers.0.mlp.down_proj.weight.scale", 0xB8C0_9DAF_603A_AF17),
        ];
        for (text, hash) in hashes {
            assert_eq!(murmur(text.as_bytes()), hash, "{text}");
        }
    }
}
