//! Sources that shrink while they are converted: an error that names file and tensor, never the end of the process.

use super::common::{bundled_path, files, Source};
use candle_quant::checkpoint::{self, Checkpoint, Reads};
use candle_quant_tools::convert::{self, ConvertEvent, ConvertOptions, ConvertPlan, Recipe, RunOptions};
use std::fs::{self, OpenOptions};
use std::path::Path;

fn plan(source: &Path, format: &str, reads: Reads) -> ConvertPlan {
    let mut options = ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()));
    options.max_shard_size = 100_000;
    ConvertPlan::new(
        &Checkpoint::open_with(source, checkpoint::OpenOptions { reads, ..Default::default() }).unwrap(),
        &options,
    )
    .unwrap()
}

#[test]
fn a_source_that_is_cut_is_an_error_that_names_the_tensor() {
    for format in ["4", "f16", "keep"] {
        let mut source = Source::new();
        for index in 0..8 {
            source = source.random(&format!("layers.{index}.up_proj.weight"), &[64, 1024]);
        }
        let source = source.finish();
        let path = source.folder.path().join("model.safetensors");
        let size = fs::metadata(&path).unwrap().len();
        let plan = plan(source.folder.path(), format, Reads::Positioned);
        let out = tempfile::tempdir().unwrap();
        let cut = |event: ConvertEvent| {
            if let ConvertEvent::Finished { .. } = event {
                OpenOptions::new().write(true).open(&path).unwrap().set_len(size / 2).unwrap();
            }
        };
        let error =
            convert::convert(&plan, out.path().join("out"), &RunOptions::default(), &cut).unwrap_err();
        let error = error.to_string();
        let found = format!("found a file cut after it was opened: {} of {size} bytes are left", size / 2);
        for part in
            ["model.safetensors: `layers.", "up_proj.weight`: expected all its bytes", &found, "fetch"]
        {
            assert!(error.contains(part), "{format}: {part} in {error}");
        }
        assert!(!out.path().join("out").exists());
    }
}

#[test]
fn packed_weights_of_a_source_that_is_cut() {
    let source = tempfile::tempdir().unwrap();
    for (name, bytes) in files(bundled_path("tiny")) {
        fs::write(source.path().join(name), bytes).unwrap();
    }
    let path = source.path().join("model.safetensors");
    let plan = plan(source.path(), "keep", Reads::Positioned);
    OpenOptions::new().write(true).open(&path).unwrap().set_len(5000).unwrap();
    let error = convert::measure(&plan, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: `model.") && error.contains("5000 of"), "{error}");
}

#[test]
fn both_ways_of_reading_give_the_same_bytes() {
    for format in ["4", "keep"] {
        for source in ["tiny", "tiny-bf16"] {
            let [mapped, positioned] = [Reads::Mapped, Reads::Positioned].map(|reads| {
                let out = tempfile::tempdir().unwrap();
                let plan = plan(&bundled_path(source), format, reads);
                convert::convert(&plan, out.path().join("out"), &RunOptions::default(), &|_| ()).unwrap();
                files(out.path().join("out"))
            });
            assert!(mapped == positioned, "{source} {format}");
        }
    }
}
