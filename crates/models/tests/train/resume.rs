//! A training that was interrupted ends with the bits of one that was not.

use crate::models::{load, lora, texts};
use candle_core::Device;
use candle_quant_models::train::{
    finetune, variables, Dataset, Options, Report, SaveOptions, Schedule, Sequence,
};
use candle_quant_models::Model;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

const NAME: &str = "qwen3-affine-b4-g64";
const FILE: &str = "training_state.safetensors";

fn options(folder: &Path) -> Options {
    Options {
        steps: 9,
        batch: 2,
        accumulation: 2,
        lora: lora(2),
        targets: vec!["q_proj".into(), "model.layers.*.mlp.*".into()],
        schedule: Schedule { learning_rate: 1e-2, warm_up: 2, floor: 0. },
        clip: Some(0.5),
        seed: 3,
        save: Some(SaveOptions { folder: folder.to_owned(), every: None }),
        ..Default::default()
    }
}

fn data() -> Dataset {
    Dataset { training: texts(10, 12), held_out: texts(2, 9) }
}

/// Stops after `last` steps.
fn run(model: &Model, options: &Options, last: usize) -> Report {
    let until = |step| if step == last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    finetune(model, &data(), options, |progress| until(progress.step)).unwrap()
}

fn bits(model: &Model) -> Vec<u32> {
    let all = variables(model, "default").unwrap().into_iter();
    all.flat_map(|variable| variable.var.flatten_all().unwrap().to_vec1::<f32>().unwrap())
        .map(f32::to_bits)
        .collect()
}

#[test]
fn resumed_bits_are_those_of_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (dir.path().join("one"), dir.path().join("other"));
    let whole = load(NAME);
    let expected = run(&whole, &options(&one), 0);
    assert_eq!((expected.losses.len(), expected.steps, expected.is_stopped), (9, 9, false));

    let stopped = run(&load(NAME), &options(&other), 4);
    assert_eq!((stopped.losses.len(), stopped.steps, stopped.is_stopped), (4, 4, true));
    let resumed = load(NAME);
    let options = Options { resume: Some(other.clone()), ..options(&other) };
    let rest = run(&resumed, &options, 0);
    assert_eq!((rest.losses.len(), rest.steps), (5, 9));
    assert_eq!([stopped.losses, rest.losses].concat(), expected.losses);
    assert_eq!(rest.held_out_before, stopped.held_out_after);
    assert_eq!(rest.held_out_after, expected.held_out_after);
    assert_eq!(bits(&resumed), bits(&whole));
    assert_eq!(fs::read(other.join(FILE)).unwrap(), fs::read(one.join(FILE)).unwrap());
    // There is nothing left to do.
    assert!(run(&load(NAME), &options, 0).losses.is_empty());
}

#[test]
fn it_saves_every_few_steps() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("new").join("folder");
    let save = Some(SaveOptions { folder: folder.clone(), every: Some(2) });
    let mut saved = Vec::new();
    let options = Options { save, held_out_every: Some(3), ..options(&folder) };
    finetune(&load(NAME), &data(), &options, |progress| {
        saved.push((fs::metadata(folder.join(FILE)).is_ok(), progress.held_out.is_some()));
        ControlFlow::Continue(())
    })
    .unwrap();
    // It is saved behind the callback.
    let expected = [false, false, true, true, true, true, true, true, true];
    assert_eq!(saved.iter().map(|(saved, _)| *saved).collect::<Vec<_>>(), expected);
    let expected = [false, false, true, false, false, true, false, false, true];
    assert_eq!(saved.iter().map(|(_, held_out)| *held_out).collect::<Vec<_>>(), expected);
    let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().starts_with(".tmp")), "{names:?}");
}

#[test]
fn an_adapter_that_is_there_learns_on() {
    let dir = tempfile::tempdir().unwrap();
    let model = load(NAME);
    run(&model, &options(dir.path()), 4);
    // As a loaded one is: without variables.
    for slot in model.adapters().slots() {
        if let Some(mut lora) = slot.remove("default") {
            (lora.a, lora.b) = (lora.a.copy().unwrap().detach(), lora.b.copy().unwrap().detach());
            slot.add("default", lora).unwrap();
        }
    }
    let before = bits(&model);
    let report = run(&model, &options(dir.path()), 1);
    assert_eq!(report.losses.len(), 1);
    assert_ne!(bits(&model), before);
    assert_eq!(before.len(), bits(&model).len());
}

/// What resuming from `folder` with changed options or data says.
fn refusal(folder: &Path, data: &Dataset, change: impl FnOnce(&mut Options)) -> String {
    let mut options = Options { resume: Some(folder.to_owned()), save: None, ..options(folder) };
    change(&mut options);
    let model = load(NAME);
    finetune(&model, data, &options, |_| ControlFlow::Continue(())).unwrap_err().to_string()
}

#[test]
fn a_state_of_another_training_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    run(&load(NAME), &options(dir.path()), 2);
    for (text, error) in [
        ("another seed", refusal(dir.path(), &data(), |options| options.seed = 4)),
        ("another batch", refusal(dir.path(), &data(), |options| options.batch = 3)),
        ("another accumulation", refusal(dir.path(), &data(), |options| options.accumulation = 1)),
        ("lora_A.value`: expected F32 [3,", refusal(dir.path(), &data(), |options| options.lora = lora(3))),
        ("no tensor", refusal(dir.path(), &data(), |options| options.targets = vec!["o_proj".into()])),
        ("of other modules", refusal(dir.path(), &data(), |options| options.targets = vec!["q_proj".into()])),
    ] {
        assert!(error.contains(text) && error.contains(FILE), "{text}: {error}");
    }
    let mut other = data();
    other.training.push(Sequence::new([1, 2, 3]));
    let error = refusal(dir.path(), &other, |_| {});
    assert!(error.contains("another training data"), "{error}");
}

#[test]
fn a_damaged_state_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE);
    let error = refusal(dir.path(), &data(), |_| {});
    assert!(error.contains(FILE), "{error}");
    run(&load(NAME), &options(dir.path()), 2);
    let whole = fs::read(&path).unwrap();
    let json = whole.windows(9).position(|bytes| bytes == b"\\\"step\\\":").unwrap();
    let mut bad_json = whole.clone();
    bad_json[json + 2] = b'x';
    let mut no_header = whole.clone();
    no_header[..8].fill(0xFF);
    for (what, bytes) in [
        ("empty", &[][..]),
        ("cut off", &whole[..whole.len() - 1]),
        ("half", &whole[..whole.len() / 2]),
        ("json", &bad_json[..]),
        ("header", &no_header[..]),
        ("text", &b"hello, this is no state"[..]),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = refusal(dir.path(), &data(), |_| {});
        assert!(error.contains("not the state of a training"), "{what}: {error}");
    }
    // Tensors of another program.
    let tensor = candle_core::Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("x", tensor)].into(), &path).unwrap();
    let error = refusal(dir.path(), &data(), |_| {});
    assert!(error.contains("no state of a training"), "{error}");
}
