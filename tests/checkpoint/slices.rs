//! Parts of every weight of every fixture have the bits of the whole's parts, and nothing else is read.

use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{reads, Checkpoint, Weight};
use candle_quant_models::Config;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// All checkpoints below a folder of fixtures.
pub fn checkpoints(folder: &str) -> Vec<(PathBuf, Checkpoint)> {
    let root = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(folder);
    let mut entries: Vec<_> = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    let found = entries.into_iter().filter_map(|path| Some((path.clone(), Checkpoint::open(&path).ok()?)));
    found.collect()
}

/// Manifests of a store.
pub fn manifests(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let below = |path: PathBuf| if path.is_dir() { manifests(&path) } else { vec![path] };
    entries.flat_map(below).collect()
}

/// The bits of all that a weight is made of in memory.
pub fn bits(weight: &Weight, cut: Option<(usize, Range<usize>)>) -> Vec<Vec<u8>> {
    let device = &Device::Cpu;
    let bytes = |tensor: &Tensor| {
        let flat = tensor.flatten_all().unwrap();
        let mut file = Vec::new();
        flat.write_bytes(&mut file).unwrap();
        file
    };
    let narrowed = |tensor: Tensor| match &cut {
        Some((dim, range)) => tensor.narrow(*dim, range.start, range.len()).unwrap(),
        None => tensor,
    };
    match weight {
        Weight::Packed(packed) => {
            let mut tensor = packed.load(device).unwrap();
            if let Some((dim, range)) = &cut {
                tensor = tensor.narrow(*dim, range.start, range.len()).unwrap();
            }
            tensor.parts().map(bytes).collect()
        }
        // Columns of a part lie otherwise than those of the whole.
        Weight::Irregular(_) => {
            vec![bytes(&narrowed(weight.to_dense(DType::F32, device).unwrap()).contiguous().unwrap())]
        }
        Weight::Ggml(blocks) => {
            vec![bytes(&narrowed(blocks.load(device).unwrap().dequantize(device).unwrap()))]
        }
        Weight::Dense(dense) => vec![bytes(&narrowed(dense.load(dense.dtype(), device).unwrap()))],
        other => panic!("{other:?}"),
    }
}

/// Three or fewer ranges, cut at multiples of `unit`.
fn ranges(len: usize, unit: usize) -> Vec<Range<usize>> {
    let units = len / unit;
    let cuts = [0, units.div_ceil(4), units.div_ceil(3).max(2).min(units), units].map(|cut| cut * unit);
    let ranges = cuts.windows(2).map(|pair| pair[0]..pair[1]);
    ranges.filter(|range| !range.is_empty()).collect()
}

/// Bytes read since the last call, and whether any of them twice.
fn read() -> (usize, bool) {
    let mut reads = reads::take();
    reads.sort_by(|(path, range), (other, after)| (path, range.start).cmp(&(other, after.start)));
    let overlap =
        |pair: &[(PathBuf, Range<usize>)]| pair[0].0 == pair[1].0 && pair[0].1.end > pair[1].1.start;
    (reads.iter().map(|(_, range)| range.len()).sum(), reads.windows(2).any(overlap))
}

/// What is read more than once when a weight is read in parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shared {
    /// Scales for all rows or all of K.
    Scales,
    /// Everything: there are no parts in the file.
    All,
}

/// Loads a weight in parts along each dimension; returns what was shared.
pub fn check(name: &str, weight: &Weight) -> Option<Shared> {
    let mut shared = None;
    let dims = weight.dims().to_vec();
    for (dim, &len) in dims.iter().enumerate() {
        let unit = if dim + 1 == dims.len() { weight.granularity() } else { 1 };
        let ranges = ranges(len, unit);
        reads::take();
        let mut total = 0;
        for range in &ranges {
            let part = weight.narrow(dim, range.clone()).unwrap();
            assert_eq!(part.dims()[dim], range.len(), "{name} {dim} {range:?}");
            assert_eq!(part.granularity(), weight.granularity(), "{name}");
            let before: usize = reads::take().iter().map(|(_, range)| range.len()).sum();
            assert_eq!(before, 0, "{name}: read before it was asked for");
            let of_part = bits(&part, None);
            let (count, twice) = read();
            assert!(!twice, "{name} {dim} {range:?}: bytes were read twice");
            // PerTensorFp8 counts the scale that was read while opening.
            assert!(part.size_in_bytes() - count <= 4, "{name} {dim} {range:?}: {count} of {part:?}");
            total += count;
            assert!(of_part == bits(weight, Some((dim, range.clone()))), "{name} {dim} {range:?}");
            reads::take();

            // And the half of the part.
            let half = range.len() / 2 / unit * unit;
            if half > 0 {
                let whole = bits(weight, Some((dim, range.start..range.start + half)));
                assert!(
                    bits(&part.narrow(dim, 0..half).unwrap(), None) == whole,
                    "{name} {dim} {range:?} half"
                );
            }
            if let (0, Some(&k)) = (dim, dims.get(1)) {
                let last = k - weight.granularity().min(k)..k;
                let corner = part.narrow(1, last.clone()).unwrap();
                assert!(
                    bits(&corner, None) == bits(&part, Some((1, last))),
                    "{name} {range:?}: last columns of some rows"
                );
            }
            reads::take();
        }
        let whole = weight.size_in_bytes();
        let of_this_dim = match total {
            total if total <= whole => None,
            total if total == ranges.len() * whole => Some(Shared::All),
            _ => Some(Shared::Scales),
        };
        if of_this_dim.is_some() {
            shared = of_this_dim;
        }
    }
    shared
}

/// Checks every weight of a checkpoint; returns the names of those that shared something.
fn check_all(path: &Path, checkpoint: &Checkpoint) -> (usize, Vec<(String, Shared)>) {
    let config = Config::from_json(checkpoint.config()).ok();
    let k = |name: &str| config.as_ref()?.in_features(name.strip_suffix(".weight").unwrap_or(name));
    let mut count = 0;
    let mut shared = Vec::new();
    for name in checkpoint.tensor_names() {
        let Ok(weight) = checkpoint.tensor(name, k(name)) else { continue };
        count += 1;
        shared.extend(check(&format!("{} {name}", path.display()), &weight).map(|of| (name.to_owned(), of)));
    }
    (count, shared)
}

#[test]
fn mlx_weights() {
    for (path, checkpoint) in checkpoints("mlx") {
        let (count, shared) = check_all(&path, &checkpoint);
        assert!(count >= 10, "{}", path.display());
        // The global scale of a matrix serves all its parts.
        let global = |(_, of): &(String, Shared)| {
            *of == Shared::Scales && path.ends_with("qwen3moe-nvfp4-global_scale")
        };
        assert!(shared.iter().all(global), "{}", path.display());
    }
}

#[test]
fn weights_of_other_tools() {
    let mut names = Vec::new();
    for (path, checkpoint) in checkpoints("hf") {
        names.push(path.file_name().unwrap().to_string_lossy().into_owned());
        let (count, shared) = check_all(&path, &checkpoint);
        assert!(count >= 5, "{}", path.display());
        let all: Vec<_> = shared.iter().filter(|(_, of)| *of == Shared::All).collect();
        // Rows that are far apart share bytes of HQQ.
        let is_hqq = names[names.len() - 1].starts_with("hqq");
        assert_eq!(!all.is_empty(), is_hqq, "{}: {}", path.display(), all.len());
        // Global scales; scales of tiles or groups that a cut goes through; scales of rows;
        // words of eight rows and of zeros.
        let shares = ["act-order", "asym", "awq", "bnb", "channel", "gptq", "hqq", "nvfp4", "fp8", "w8a8"]
            .iter()
            .any(|kind| names[names.len() - 1].contains(kind));
        assert!(shares || shared.is_empty(), "{}: {}", path.display(), shared[0].0);
    }
    assert_eq!(names.len(), 46, "{names:?}");
}

#[test]
fn uqff_weights() {
    let mut opened = 0;
    for (path, checkpoint) in checkpoints("uqff") {
        opened += 1;
        for (name, of) in check_all(&path, &checkpoint).1 {
            let format = checkpoint.tensor(&name, None).unwrap().format_name();
            // Scales of HQQ are those of several rows, that of FP8 is one for all. Blocks of F8Q8, and of HQQ where groups are no
            // whole rows, run across rows.
            let in_rows =
                path.ends_with("hqq4") && format.ends_with("across rows") || format.starts_with("fp8 ");
            let expected = if in_rows { Shared::Scales } else { Shared::All };
            assert!(in_rows || format == "F32" || format.ends_with("across rows"), "{name}: {format}");
            assert!(of == expected, "{} {name}: {format} {of:?}", path.display());
        }
    }
    assert!(opened >= 12, "{opened}");
}

#[test]
fn slm1_and_ollama_weights() {
    for (path, checkpoint) in checkpoints("slm1") {
        let (count, shared) = check_all(&path, &checkpoint);
        assert!(count >= 10, "{}", path.display());
        // Of q8_0 each row has one scale, for all of K.
        let of_rows = |(_, of): &(String, Shared)| *of == Shared::Scales && path.ends_with("q8_0.slm");
        assert!(shared.iter().all(of_rows), "{}", path.display());
    }
    for store in ["current", "v0.15", "v0.16", "v0.21"] {
        let root = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/ollama").join(store);
        let mut opened = 0;
        for path in manifests(&root.join("manifests")) {
            let Ok(checkpoint) = Checkpoint::open(&path) else { continue };
            opened += 1;
            let (_, shared) = check_all(&path, &checkpoint);
            assert!(shared.iter().all(|(_, of)| *of == Shared::Scales), "{}", path.display());
        }
        assert!(opened > 0, "{store}");
    }
}

#[test]
fn a_cut_through_a_group_is_refused() {
    let fixtures = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/mlx");
    let checkpoint = Checkpoint::open(fixtures.join("qwen3-affine-b3-g64")).unwrap();
    let weight = checkpoint.weight("model.layers.0.mlp.down_proj", Some(256)).unwrap();
    let error = weight.narrow(1, 0..32).unwrap_err().to_string();
    assert!(error.contains("mlp.down_proj") && error.contains("multiples of 64"), "{error}");
    assert!(error.contains("0..32"), "{error}");
    for (dim, range) in [(0, 0..0), (0, 100..129), (1, 192..320), (2, 0..1)] {
        let error = weight.narrow(dim, range.clone()).unwrap_err().to_string();
        assert!(error.contains("1 or more of") && error.contains(&format!("{range:?}")), "{error}");
    }
    assert_eq!(weight.load(&Device::Cpu).unwrap().dims(), [128, 256]);
}
