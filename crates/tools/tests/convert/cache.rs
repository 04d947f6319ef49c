//! Models that are quantized once and opened again.

use super::common::{bundled_path, files};
use super::loading::{builder, logits};
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe};
use candle_quant_tools::quantized::{CacheEvent, QuantizedCache};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use tempfile::TempDir;

/// A folder with a cache in `cache`, and a copy of a model in `model`.
struct Home(TempDir);

impl Home {
    fn new(model: &Path) -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        fs::create_dir(home.model()).unwrap();
        for (name, bytes) in files(model) {
            fs::write(home.model().join(name), bytes).unwrap();
        }
        home
    }

    fn model(&self) -> PathBuf {
        self.0.path().join("model")
    }

    fn cache(&self) -> QuantizedCache {
        QuantizedCache::at(self.0.path().join("cache"))
    }

    fn source(&self) -> Checkpoint {
        Checkpoint::open(self.model()).unwrap()
    }

    /// The quantized model, and whether it was made now.
    fn open(&self, format: &str) -> (Checkpoint, bool) {
        open(&self.cache(), &plan(&self.source(), format))
    }
}

fn tiny() -> Home {
    Home::new(&bundled_path("tiny-bf16"))
}

fn plan(source: &Checkpoint, format: &str) -> ConvertPlan {
    ConvertPlan::new(source, &ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()))).unwrap()
}

fn open(cache: &QuantizedCache, plan: &ConvertPlan) -> (Checkpoint, bool) {
    let told = Mutex::new((0, 0));
    let opened = cache.open(plan, &|event| match event {
        CacheEvent::Found { .. } => told.lock().unwrap().0 += 1,
        CacheEvent::Begun { .. } => told.lock().unwrap().1 += 1,
        _ => {}
    });
    let opened = opened.unwrap();
    let (found, made) = told.into_inner().unwrap();
    assert_eq!(found + made, 1);
    (opened, made == 1)
}

#[test]
fn what_is_opened_again_has_the_same_logits_and_needs_no_dense_weights() {
    let experts = PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/convert/qwen3moe_s");
    for model in [bundled_path("tiny-bf16"), experts] {
        let home = Home::new(&model);
        let source = home.source();
        let plan = plan(&source, "3");
        let formats = plan.formats();
        let vb = builder(&source).quantize_with(move |module| formats.get(module).copied());
        let expected = logits(vb, &source);
        assert!(logits(builder(&source), &source) != expected);
        let (made, is_made) = open(&home.cache(), &plan);
        assert!(is_made);
        assert!(logits(builder(&made), &made) == expected);
        // Nothing but the headers of the source is left, which are in memory.
        let (found, is_made) = open(&home.cache(), &plan);
        drop((source, plan, made));
        fs::remove_dir_all(home.model()).unwrap();
        assert!(!is_made);
        assert!(logits(builder(&found), &found) == expected);
        assert_eq!(home.cache().models().unwrap(), [found.path()]);
    }
}

/// Zeros in the place of all numbers, with the size and the times that the file had.
fn zero_numbers(file: &Path) {
    let (mut bytes, metadata) = (fs::read(file).unwrap(), fs::metadata(file).unwrap());
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header..].fill(0);
    fs::write(file, bytes).unwrap();
    fs::File::options().write(true).open(file).unwrap().set_modified(metadata.modified().unwrap()).unwrap();
    assert_eq!(fs::metadata(file).unwrap().modified().unwrap(), metadata.modified().unwrap());
}

#[test]
fn another_recipe_or_source_is_another_model() {
    let home = tiny();
    let (first, _) = home.open("4");
    assert!(!home.open("4").1);
    // Other words for the same.
    assert!(!home.open("affine:4:g64").1);
    let (other, is_made) = home.open("affine:4:g32");
    assert!(is_made && first.path() != other.path());
    // A file that is copied beside the weights.
    fs::write(home.model().join("generation_config.json"), "{\"temperature\": 0.5}").unwrap();
    let (with_file, is_made) = home.open("4");
    assert!(is_made && with_file.path().join("generation_config.json").is_file());
    // Times that can be set are not enough.
    if cfg!(unix) {
        zero_numbers(&home.model().join("model.safetensors"));
        let (zeros, is_made) = home.open("4");
        assert!(is_made && files(zeros.path()) != files(with_file.path()));
    }
}

#[test]
fn a_damaged_model_is_made_again() {
    let home = tiny();
    let (made, _) = home.open("4");
    let (folder, expected) = (made.path().to_owned(), files(made.path()));
    drop(made);
    let weights = expected.keys().find(|name| name.ends_with(".safetensors")).unwrap();
    type Damage<'d> = &'d dyn Fn(&Path);
    let damages: [Damage; 7] = [
        &|folder| fs::remove_file(folder.join(weights)).unwrap(),
        &|folder| fs::write(folder.join(weights), &expected[weights][..1000]).unwrap(),
        &|folder| {
            let mut bytes = expected[weights].clone();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(folder.join(weights), bytes).unwrap();
        },
        &|folder| fs::remove_file(folder.join("config.json")).unwrap(),
        &|folder| fs::write(folder.join("candle-quant.json"), "{").unwrap(),
        &|folder| fs::remove_file(folder.join("candle-quant.json")).unwrap(),
        &|folder| {
            fs::remove_dir_all(folder).unwrap();
            fs::write(folder, "a file").unwrap();
        },
    ];
    for (index, damage) in damages.iter().enumerate() {
        damage(&folder);
        let (again, is_made) = home.open("4");
        assert!(is_made, "{index}");
        assert_eq!(again.path(), folder);
        assert!(files(&folder) == expected, "{index}");
    }
    // What else is in the folder is no damage.
    fs::write(folder.join("notes.txt"), "mine").unwrap();
    assert!(!home.open("4").1);
}

#[test]
fn one_of_several_writes_and_the_others_wait() {
    let home = tiny();
    let counts: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| home.open("4").1)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(counts.iter().filter(|is_made| **is_made).count(), 1);
    assert_eq!(home.cache().models().unwrap().len(), 1);
}

#[test]
fn a_folder_that_can_not_be_written_is_one_sentence() {
    let home = tiny();
    let file = home.0.path().join("file");
    fs::write(&file, "").unwrap();
    let cache = QuantizedCache::at(file.join("cache"));
    let error = cache.open(&plan(&home.source(), "4"), &|_| ()).unwrap_err().to_string();
    assert!(error.contains("file/cache: quantized models can't be kept here: "), "{error}");
    assert!(error.contains("CANDLE_QUANT_CACHE") && !error.contains('\n'), "{error}");
    assert!(QuantizedCache::at(home.0.path().join("none")).models().unwrap().is_empty());
}

/// As they are without the cache.
#[test]
fn numbers_that_are_not_finite_are_refused() {
    let home = tiny();
    let file = home.model().join("model.safetensors");
    let (start, mut bytes) = (home.source(), fs::read(&file).unwrap());
    let (range, nan) = (start.dense("model.layers.0.mlp.up_proj.weight").unwrap(), [0xC0, 0x7F]);
    let stored = range.load(candle_core::DType::BF16, &candle_core::Device::Cpu).unwrap();
    let first = stored.flatten_all().unwrap().to_vec1::<half::bf16>().unwrap();
    let pattern: Vec<u8> = first[..64].iter().flat_map(|number| number.to_le_bytes()).collect();
    let at = bytes.windows(pattern.len()).position(|window| window == pattern).unwrap();
    bytes[at..at + 2].copy_from_slice(&nan);
    drop((start, range));
    fs::write(&file, bytes).unwrap();
    for _ in 0..2 {
        let error = home.cache().open(&plan(&home.source(), "4"), &|_| ()).unwrap_err().to_string();
        assert!(error.contains("layers.0.mlp.up_proj") && error.contains("finite numbers"), "{error}");
        assert!(home.cache().models().unwrap().is_empty());
    }
}
