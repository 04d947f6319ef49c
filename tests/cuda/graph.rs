//! CUDA graphs: what was captured gives, replayed, the bits of eager launches.

use crate::expected::KINDS;
use crate::gpu::{captures, device_with_own_stream};
use crate::packed::{bits, random, tensor};
use candle_core::cuda_backend::cudarc::driver::{result, sys, CudaGraph, CudaStream, DevicePtr};
use candle_core::{DType, Device, Module, Result, Storage, Tensor};
use candle_quant::ops::{decode_attention, sample, AttentionOptions, SampleOptions};
use candle_quant::{
    nn, Checkpoint, DeviceKvCache, KvCacheConfig, KvFormat, Linear, QuantFormat, QuantTensor,
};
use candle_quant_models::Model;

/// A device with a stream of its own, no tensor of which is tracked by events: those of before a capture
/// cannot be waited for in it.
fn capturing_device() -> Option<Device> {
    let device = device_with_own_stream()?;
    // SAFETY: all work is done on the one stream of this device.
    unsafe { device.as_cuda_device().unwrap().disable_event_tracking() };
    Some(device)
}

/// Runs `step` once, captures it, and gives the graph with the tensor that it writes to. `prepare` is run
/// before each of these.
fn capture<S>(
    device: &Device,
    state: &mut S,
    prepare: impl Fn(&mut S),
    step: impl Fn(&mut S) -> Result<Tensor>,
) -> (CudaGraph, Tensor) {
    let cuda = device.as_cuda_device().unwrap();
    let _cached_uploads = cuda.enable_cuda_graph_htod_cache();
    prepare(state);
    let result = step(state).unwrap();
    prepare(state);
    device.synchronize().unwrap();
    let stream = cuda.cuda_stream();
    let captures = captures();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    // What was allocated in the capture is dropped before its end.
    let captured = step(state).map(|product| write(&result, &product));
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags);
    drop(captures);
    captured.unwrap();
    (graph.unwrap().expect("a graph"), result)
}

/// Overwrites a tensor in place, by a copy in the stream.
fn write(to: &Tensor, from: &Tensor) {
    assert_eq!((to.dims(), to.dtype()), (from.dims(), from.dtype()));
    let from = from.to_device(to.device()).unwrap();
    let stream = to.device().as_cuda_device().unwrap().cuda_stream();
    let bytes = to.elem_count() * to.dtype().size_in_bytes();
    // SAFETY: both are allocations of this size on one device, used in its stream alone.
    unsafe {
        result::memcpy_dtod_async(address(to, &stream), address(&from, &stream), bytes, stream.cu_stream())
    }
    .unwrap();
}

/// Where a tensor begins.
fn address(tensor: &Tensor, stream: &CudaStream) -> sys::CUdeviceptr {
    let (storage, layout) = tensor.storage_and_layout();
    assert_eq!(layout.start_offset(), 0);
    let Storage::Cuda(storage) = &*storage else { panic!("a tensor on the CPU") };
    match tensor.dtype() {
        DType::F16 => storage.as_cuda_slice::<half::f16>().unwrap().device_ptr(stream).0,
        DType::BF16 => storage.as_cuda_slice::<half::bf16>().unwrap().device_ptr(stream).0,
        DType::F32 => storage.as_cuda_slice::<f32>().unwrap().device_ptr(stream).0,
        DType::U32 => storage.as_cuda_slice::<u32>().unwrap().device_ptr(stream).0,
        other => panic!("{other:?}"),
    }
}

/// Launches, copies, allocations and what gives them back.
fn nodes(graph: &CudaGraph) -> usize {
    let mut count = 0;
    // SAFETY: the graph exists, and without room for nodes the driver writes their number alone.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut count) }.result().unwrap();
    count
}

#[test]
fn launches_of_a_layer() {
    let Some(device) = capturing_device() else { return };
    for format in [KINDS[0], QuantFormat::NVFP4] {
        let layer = |n, k, seed| {
            Linear::from_quant(random(&[n, k], format, DType::F16, seed).to_device(&device).unwrap(), None)
        };
        let (q, k, v) = (layer(512, 4096, 600), layer(40, 4096, 601), layer(40, 4096, 602));
        let (gate, up, down) = (layer(96, 512, 603), layer(96, 512, 604), layer(4096, 192, 605));
        let table = random(&[9, 192], format, DType::F16, 606).to_device(&device).unwrap();
        for m in [1, 16] {
            let inputs = [0, 1].map(|seed| tensor(&[m, 4096], 610 + seed).to_dtype(DType::F16).unwrap());
            let x = inputs[0].to_device(&device).unwrap();
            let ids = Tensor::from_vec((0..m as u32).map(|id| id % 9).collect(), m, &device).unwrap();
            // K of q, k and v is split.
            let step = || {
                let [q, _, _] = nn::forward_all([&q, &k, &v], &x)?;
                nn::swiglu(&gate, &up, &q)?;
                nn::forward_add(&down, &table.embed(&ids, DType::F16)?, &x)
            };
            let eager = inputs.each_ref().map(|input| {
                write(&x, input);
                bits(&step().unwrap())
            });
            let (graph, result) = capture(&device, &mut (), |_| (), |_| step());
            for _ in 0..2 {
                for (input, eager) in inputs.iter().zip(&eager) {
                    write(&x, input);
                    graph.launch().unwrap();
                    assert_eq!(&bits(&result), eager, "{format} M={m}");
                }
            }
        }
    }
}

/// A dense product in parts, which a second stream dequantizes.
#[test]
fn parts_of_a_dense_product() {
    let Some(device) = capturing_device() else { return };
    // What has scales of 32 bits has no kernel for many rows.
    let weight = random(&[65, 131_072], QuantFormat::affine(2, 128).unwrap(), DType::F32, 620);
    let layer = Linear::from_quant(weight.to_device(&device).unwrap(), None);
    let inputs = [0, 1].map(|seed| tensor(&[66, 131_072], 621 + seed));
    let x = inputs[0].to_device(&device).unwrap();
    let step = || layer.forward(&x)?.to_dtype(DType::F16);
    let eager = inputs.each_ref().map(|input| {
        write(&x, input);
        bits(&step().unwrap())
    });
    let (graph, result) = capture(&device, &mut (), |_| (), |_| step());
    for (input, eager) in inputs.iter().zip(&eager) {
        write(&x, input);
        graph.launch().unwrap();
        assert!(bits(&result) == *eager, "other bits than without a graph");
    }
}

/// Experts: which of them a replay uses is told by the ids that lie on the device then.
#[test]
fn a_choice_of_experts() {
    let Some(device) = capturing_device() else { return };
    for format in [KINDS[0], QuantFormat::MXFP4] {
        let stack = |n, k, seed| {
            let stack = random(&[3, n, k], format, DType::F16, seed).to_device(&device).unwrap();
            nn::ExpertStack::from_quant(stack, None).unwrap()
        };
        let (gate, up, down) = (stack(64, 128, 630), stack(64, 128, 631), stack(128, 64, 632));
        let experts =
            nn::Experts::new(gate, up, down, nn::Gating::Plain(candle_nn::Activation::Silu)).unwrap();
        // One by one, and in tiles.
        for tokens in [1, 9] {
            let x = (tensor(&[1, tokens, 128], 634) * 0.05).unwrap().to_dtype(DType::BF16).unwrap();
            let x = x.to_device(&device).unwrap();
            let choices = [0, 1].map(|seed: u32| {
                let ids = (0..2 * tokens as u32).map(|pair| (pair + seed) % 3);
                Tensor::from_vec(ids.collect(), (1, tokens, 2), &Device::Cpu).unwrap()
            });
            let ids = choices[0].to_device(&device).unwrap();
            let routing_weights =
                Tensor::from_vec(vec![0.5f32; 2 * tokens], (1, tokens, 2), &device).unwrap();
            let step = || experts.forward(&x, &ids, &routing_weights);
            let eager = choices.each_ref().map(|choice| {
                write(&ids, choice);
                bits(&step().unwrap())
            });
            assert_ne!(eager[0], eager[1]);
            let (graph, result) = capture(&device, &mut (), |_| (), |_| step());
            for _ in 0..2 {
                for (choice, eager) in choices.iter().zip(&eager) {
                    write(&ids, choice);
                    graph.launch().unwrap();
                    assert_eq!(&bits(&result), eager, "{format}, {tokens} tokens");
                }
            }
        }
    }
}

/// A token's attention, with its key and value appended, is one launch, whose sums several blocks join.
#[test]
fn attention_of_a_token() {
    let Some(device) = capturing_device() else { return };
    let on_device =
        |dims: &[usize], seed| tensor(dims, seed).to_dtype(DType::F16).unwrap().to_device(&device).unwrap();
    let format = KvFormat::F16;
    let config = KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(2, 64) };
    let mut cache = DeviceKvCache::new(config).unwrap();
    let [k, v] = [640, 641].map(|seed| on_device(&[1, 71, 2, 64], seed));
    cache.append(&k, &v).unwrap();
    let (k, v) = (k.narrow(1, 70, 1).unwrap(), v.narrow(1, 70, 1).unwrap());
    let inputs = [642, 643].map(|seed| tensor(&[1, 1, 8, 64], seed).to_dtype(DType::F16).unwrap());
    let q = inputs[0].to_device(&device).unwrap();
    let options = AttentionOptions { scale: 0.5, ..Default::default() };
    let step =
        |cache: &mut DeviceKvCache| Ok(decode_attention(&q, &k, &v, cache, options)?.expect("a kernel"));
    let prepare = |cache: &mut DeviceKvCache| assert!(cache.truncate(70));
    let eager = inputs.each_ref().map(|input| {
        write(&q, input);
        prepare(&mut cache);
        bits(&step(&mut cache).unwrap())
    });
    assert_ne!(eager[0], eager[1]);
    let (graph, result) = capture(&device, &mut cache, prepare, step);
    // Beside it the memory of its output, the copy of that, and the memory given back.
    assert_eq!(nodes(&graph), 4);
    for (input, eager) in inputs.iter().zip(&eager) {
        write(&q, input);
        graph.launch().unwrap();
        assert_eq!(&bits(&result), eager);
    }
}

/// Memory that is to be kept is not taken from a graph.
#[test]
fn a_capture_without_a_step_before_is_refused() {
    let Some(device) = capturing_device() else { return };
    let weight = random(&[40, 4096], KINDS[0], DType::F16, 620).to_device(&device).unwrap();
    let x = tensor(&[16, 4096], 621).to_dtype(DType::F16).unwrap().to_device(&device).unwrap();
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let captures = captures();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let product = weight.matmul(&x, None).map(|_| ());
    let graph =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    drop((graph, captures));
    let told = product.unwrap_err().to_string();
    assert!(told.contains("run the same step once on this thread before capturing it"), "{told}");
    // And outside of it all is well.
    weight.matmul(&x, None).unwrap();
    device.synchronize().unwrap();
}

/// Numbers that come back from a stream that is captured were not computed.
#[test]
fn what_is_read_back_in_a_capture_is_refused() {
    let Some(device) = capturing_device() else { return };
    let x = tensor(&[16, 128], 622).to_device(&device).unwrap();
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let captures = captures();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let quantized = QuantTensor::quantize(&x, KINDS[0]).map(|_| ());
    let drawn = sample(&x, &SampleOptions::GREEDY, 1, 0).map(|_| ());
    let _ =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    drop(captures);
    for refused in [quantized, drawn] {
        let told = refused.unwrap_err().to_string();
        assert!(told.contains("end the capture first"), "{told}");
    }
    sample(&x, &SampleOptions::GREEDY, 1, 0).unwrap();
}

/// One token through a whole model, layer by layer: attention with its cache, norms and rotation by candle's kernels.
#[test]
fn a_decode_step_of_a_model() {
    let Some(device) = capturing_device() else { return };
    if std::env::var("CANDLE_QUANT_GRAPH").as_deref() != Ok("off") {
        // Outside of a capture it would be a step of a plan, with other bits.
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "graph::a_decode_step_of_a_model", "--nocapture"]);
        let output = child.env("CANDLE_QUANT_GRAPH", "off").output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && told.contains("1 passed"),
            "{told}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    let _cached_uploads = device.as_cuda_device().unwrap().enable_cuda_graph_htod_cache();
    let checkpoint = Checkpoint::open(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny")).unwrap();
    let prompt = Tensor::new(&[[1u32, 17, 42, 7, 99]], &device).unwrap();
    let id = Tensor::new(&[[3u32]], &device).unwrap();
    let put = |token: u32| write(&id, &Tensor::new(&[[token]], &Device::Cpu).unwrap());
    for dtype in [DType::F16, DType::BF16] {
        let mut model = Model::load(&checkpoint, dtype, &device).unwrap();
        let after_prompt = |model: &mut Model| {
            model.clear_kv_cache();
            model.forward_last(&prompt, 0).unwrap();
        };
        let tokens = [3u32, 57];
        let eager = tokens.map(|token| {
            put(token);
            after_prompt(&mut model);
            bits(&model.forward_last(&id, 5).unwrap())
        });
        assert_ne!(eager[0], eager[1]);
        // The prompt is no part of the graph.
        let (graph, logits) = capture(&device, &mut model, after_prompt, |model| model.forward_last(&id, 5));
        // Of three layers; each had 17 more while attention was candle's operations, of which eight are launches.
        assert!(nodes(&graph) <= 133, "{dtype:?}: {} nodes", nodes(&graph));
        for _ in 0..2 {
            for (token, eager) in tokens.into_iter().zip(&eager) {
                put(token);
                graph.launch().unwrap();
                assert_eq!(&bits(&logits), eager, "{dtype:?}, token {token}");
            }
        }
    }
}
