//! Conversions: the bytes, and the report, that the CPU alone makes.

use crate::conversion::{bundled, bundled_path, files, numbers, Source};
use crate::device;
use crate::gpu::{captures, device_with_own_stream};
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{DType, Device};
use candle_quant::{Checkpoint, QuantFormat, Result};
use candle_quant_tools::convert::{
    self, ConvertEvent, ConvertOptions, ConvertPlan, ConvertReport, Recipe, RunOptions,
};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Everything alike, as mlx-lm has it: `affine:4:g64`, say.
fn uniform(format: &str) -> ConvertOptions {
    ConvertOptions::mlx(Recipe::named("uniform", format.parse().unwrap()).unwrap())
}

fn spec(format: QuantFormat) -> String {
    format!("{format:#}")
}

fn on(device: &Device, options: &ConvertOptions) -> ConvertOptions {
    let mut options = options.clone();
    options.device = device.clone();
    options
}

fn run(plan: &ConvertPlan, out: &Path) -> Result<ConvertReport> {
    convert::convert(plan, out, &RunOptions { allow_nonfinite: true, ..RunOptions::default() }, &|_| ())
}

/// What is written, and what is told of it.
fn converted(source: &Checkpoint, options: &ConvertOptions) -> (BTreeMap<String, Vec<u8>>, String) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let report = run(&ConvertPlan::new(source, options).unwrap(), &out).unwrap();
    (files(&out), serde_json::to_string(&report).unwrap())
}

#[track_caller]
fn assert_same(source: &Checkpoint, options: &ConvertOptions, device: &Device, what: &str) {
    assert!(converted(source, options) == converted(source, &on(device, options)), "{what}");
}

#[test]
fn the_bundled_model_in_every_format() {
    let Some(device) = device() else { return };
    let source = bundled("tiny-bf16");
    // Of the groups of a width one size: codes of all are compared where single weights are.
    let sizes = QuantFormat::AFFINE_GROUP_SIZES;
    let one_size = |format: &QuantFormat| {
        !format.has_biases() || format.group_size() == sizes[format.bits() % sizes.len()]
    };
    for format in QuantFormat::all().into_iter().filter(one_size) {
        let what = spec(format);
        let options = uniform(&what);
        let plan = ConvertPlan::new(&source, &on(&device, &options)).unwrap();
        assert!(!plan.notes().iter().any(|note| note.contains("on the CPU")), "{:?}", plan.notes());
        assert_same(&source, &options, &device, &what);
    }
    // The head one step up, and numbers that are rounded before.
    for (format, dtype) in [("4", DType::F16), ("3:g32", DType::F32), ("nvfp4", DType::F16)] {
        let mut options = ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()));
        options.dtype = Some(dtype);
        assert_same(&source, &options, &device, &format!("{format} {dtype:?}"));
    }
}

/// A matrix of each float dtype, single experts that become a stack, and a fused stack that is parted.
fn zoo(numbers: &[f32]) -> Source {
    let f16s: Vec<u8> = numbers.iter().flat_map(|number| f16::from_f32(*number).to_le_bytes()).collect();
    let bf16s: Vec<u8> = numbers.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes()).collect();
    let mut source = Source::new()
        .with_config(r#"{"hidden_size": 128, "model_type": "mixtral", "num_local_experts": 2}"#)
        .with("a.up_proj.weight", &[16, 128], numbers)
        .with_bytes("b.up_proj.weight", "F16", &[16, 128], &f16s)
        .with_bytes("c.up_proj.weight", "BF16", &[16, 128], &bf16s)
        .random("l.1.mlp.experts.gate_up_proj", &[2, 64, 128])
        .random("l.1.mlp.experts.down_proj", &[2, 128, 32]);
    for expert in 0..2 {
        let path = format!("l.0.block_sparse_moe.experts.{expert}");
        source = source.random(&format!("{path}.w1.weight"), &[32, 128]);
    }
    source.finish()
}

/// Numbers of every magnitude, zeros of both signs, a constant, and what is not finite.
fn unusual() -> Vec<f32> {
    let mut all = numbers(5, 16 * 128);
    for (row, factor) in [1e-40, 1e-7, 1e4, 1e30].into_iter().enumerate() {
        all[row * 128..][..128].iter_mut().for_each(|number| *number *= factor);
    }
    all[512..640].fill(0.);
    all[513] = -0.;
    all[640..768].fill(-0.37);
    (all[1000], all[1200], all[1201], all[2047]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN);
    (all[1300], all[1301]) = (f32::MAX, f32::MIN);
    all
}

#[test]
fn sources_of_every_dtype_stacks_and_what_is_not_finite() {
    let Some(device) = device() else { return };
    for source in [zoo(&numbers(4, 16 * 128)), zoo(&unusual())] {
        for format in ["1:g32", "2:g128", "3:g32", "4", "5:g32", "6", "8:g128", "mxfp4", "mxfp8"] {
            for dtype in [None, Some(DType::F16), Some(DType::BF16), Some(DType::F32)] {
                let mut options = ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()));
                options.dtype = dtype;
                assert_same(&source.open(), &options, &device, &format!("{format} {dtype:?}"));
            }
        }
    }
    // NVFP4 has no place for large numbers.
    assert_same(&zoo(&numbers(4, 16 * 128)).open(), &uniform("nvfp4"), &device, "nvfp4");
}

#[test]
fn what_is_packed_anew() {
    let Some(device) = device() else { return };
    for (source, format) in [("tiny", "mxfp4"), ("tiny", "3:g32")] {
        let mut options = uniform(format);
        options.requantize = true;
        assert_same(&bundled(source), &options, &device, &format!("{source} {format}"));
    }
}

/// mistral.rs' own encoder is computed on the CPU, and the plan says so; Ollama's is MLX's.
#[test]
fn other_outputs() {
    let Some(device) = device() else { return };
    let source = bundled("tiny-bf16");
    for (format, left) in [("4", 22), ("3", 0), ("mxfp4", 0)] {
        let recipe = Recipe::named("uniform", format.parse().unwrap()).unwrap();
        let options = ConvertOptions::uqff(recipe);
        let plan = ConvertPlan::new(&source, &on(&device, &options)).unwrap();
        let note = plan.notes().iter().find(|note| note.contains("packed on the CPU"));
        let expected = format!("{left} tensors are packed on the CPU: the device has no kernel for them");
        assert_eq!(note, (left > 0).then_some(&expected), "{format}");
        assert_same(&source, &options, &device, format);
    }
    let recipe = Recipe::named("ollama", "int4".parse().unwrap()).unwrap();
    let store = |device: &Device| {
        let folder = tempfile::tempdir().unwrap();
        let options = on(device, &ConvertOptions::ollama(recipe.clone(), "m").unwrap());
        run(&ConvertPlan::new(&source, &options).unwrap(), folder.path()).unwrap();
        let manifests = folder.path().join("manifests/registry.ollama.ai/library/m");
        (files(folder.path().join("blobs")), files(manifests))
    };
    assert!(store(&Device::Cpu) == store(&device));
}

#[test]
fn any_number_of_threads() {
    let Some(device) = device() else { return };
    // Rows of many blocks.
    let source = Source::new().random("w.weight", &[700, 1024]).random("x.weight", &[64, 64]).finish();
    let options = uniform("6:g32");
    let expected = converted(&source.open(), &options);
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let found = pool.install(|| converted(&source.open(), &on(&device, &options)));
        assert!(found == expected, "{threads}");
    }
}

#[test]
fn measures_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    let source = Source::new().random("w.weight", &[64, 1024]).finish();
    for format in ["5", "mxfp8"] {
        let report = |device: &Device| {
            let plan = ConvertPlan::new(&source.open(), &on(device, &uniform(format))).unwrap();
            serde_json::to_string(&convert::measure(&plan, &|_| ()).unwrap()).unwrap()
        };
        assert_eq!(report(&device), report(&Device::Cpu), "{format}");
    }
}

/// What was begun with a device goes on without it, and the other way round.
#[test]
fn a_conversion_is_resumed_on_another_device() {
    let Some(device) = device() else { return };
    let source = Checkpoint::open(bundled_path("tiny-bf16")).unwrap();
    let mut options = uniform("4");
    options.max_shard_size = 100_000;
    let expected = converted(&source, &options);
    for (first, second) in [(&device, &Device::Cpu), (&Device::Cpu, &device)] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let plan = ConvertPlan::new(&source, &on(first, &options)).unwrap();
        let finished = AtomicUsize::new(0);
        let interrupt = |event: ConvertEvent| {
            let is_finished = matches!(event, ConvertEvent::Finished { .. });
            assert!(!is_finished || finished.fetch_add(1, Ordering::Relaxed) < 20, "interrupted");
        };
        let run = || convert::convert(&plan, &out, &RunOptions::default(), &interrupt);
        catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        let skipped = AtomicUsize::new(0);
        let count = |event: ConvertEvent| {
            if let ConvertEvent::Skipped { tensors, .. } = event {
                skipped.fetch_add(tensors, Ordering::Relaxed);
            }
        };
        let plan = ConvertPlan::new(&source, &on(second, &options)).unwrap();
        let resume = RunOptions { resume: true, ..RunOptions::default() };
        let report = convert::convert(&plan, &out, &resume, &count).unwrap();
        assert!(skipped.into_inner() > 0);
        assert!((files(&out), serde_json::to_string(&report).unwrap()) == expected);
    }
}

/// In a stream that is captured nothing is computed, which the driver says of no copy that reads it back.
#[test]
fn errors_of_the_device_name_the_tensor() {
    let Some(device) = device_with_own_stream() else { return };
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let source = Source::new().random("w.weight", &[32, 64]).finish();
    let plan = ConvertPlan::new(&source.open(), &on(&device, &uniform("4"))).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let _captures = captures();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    let error = run(&plan, &folder.path().join("out")).unwrap_err().to_string();
    let _ =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    assert!(error.contains("packing `w.weight` on Cuda") && error.contains("--cpu"), "{error}");
    assert!(error.contains("stream is being captured"), "{error}");
    assert!(!folder.path().join("out").exists());
}
