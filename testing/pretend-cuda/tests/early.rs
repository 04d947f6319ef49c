//! Kernels that start before the one ahead of them in the stream has finished.

mod common;

use std::ffi::c_int;

use common::gpu::{made, message, Gpu};
use common::launch::SCHEDULES;
use pretend_cuda::argument::{Host, In};
use pretend_cuda::cublas::*;
use pretend_cuda::device::*;
use pretend_cuda::emulator::{Grid, Kernel, Memory, Params};
use pretend_cuda::event::*;
use pretend_cuda::graph::*;
use pretend_cuda::launch::*;
use pretend_cuda::status::*;
use pretend_cuda::stream::*;
use pretend_cuda::transfer::*;

const BLOCKS: u32 = 20;
const N: usize = 64 * BLOCKS as usize;

/// What a thread of `toy_early` does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    ReadsEarly,
    WritesEarly,
    LeavesEarly,
    TriggersEarly,
    WaitsAlone,
    CopiesEarly,
}
use Wrong::*;

/// Parameters of `toy_early`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Early {
    weight: u64,
    x: u64,
    y: u64,
    wrong: c_int,
}

/// Parameters of `toy_reverse`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Reverse {
    x: u64,
    y: u64,
    n: u32,
}

struct Buffers {
    gpu: Gpu,
    weight: u64,
    source: u64,
    x: u64,
    y: u64,
}

fn weight() -> Vec<f32> {
    (0..N).map(|i| i as f32 * 1e-3).collect()
}

fn source() -> Vec<f32> {
    (0..N).map(|i| (i * 7 % 1000) as f32 + 1.0).collect()
}

impl Buffers {
    fn new() -> Self {
        Self::on(0)
    }

    fn on(device: c_int) -> Self {
        let gpu = Gpu::new(device);
        let (weight, source) = (gpu.upload(&weight()), gpu.upload(&source()));
        let (x, y) = (gpu.upload(&[1f32; N]), gpu.room(4 * N));
        Self { gpu, weight, source, x, y }
    }

    /// The kernel ahead: x becomes `source`, each block reversed.
    fn ahead(&self) -> c_int {
        self.gpu.launch("toy_reverse", BLOCKS, 64, &Reverse { x: self.source, y: self.x, n: N as u32 })
    }

    /// The kernel that starts early: y becomes `weight` + x, each block reversed again.
    fn early(&self, wrong: Wrong) -> c_int {
        self.launch(wrong, 6, 1)
    }

    fn launch(&self, wrong: Wrong, attribute: c_int, value: u64) -> c_int {
        let params = Early { weight: self.weight, x: self.x, y: self.y, wrong: wrong as c_int };
        let attribute = LaunchAttribute { id: attribute, pad: [0; 4], value: [value; 8] };
        let config = LaunchConfig {
            grid: [BLOCKS, 1, 1],
            block: [64, 1, 1],
            shared_bytes: 256,
            stream: self.gpu.stream,
            attributes: In::from(&attribute),
            attribute_count: 1,
        };
        let pointers = [In::from(&params).cast()];
        let function = self.gpu.function("toy_early").unwrap();
        cuLaunchKernelEx(In::from(&config), function, In::from(&pointers[..]), In::default())
    }

    fn check(&self) {
        let expected = weight().iter().zip(source()).map(|(weight, x)| weight + x).collect::<Vec<_>>();
        assert_eq!(self.gpu.download(self.y, N), expected);
    }
}

fn told(words: &[&str]) {
    let told = message(LAUNCH_FAILED);
    for word in words {
        assert!(told.contains(word), "{word:?} is not in: {told}");
    }
}

#[test]
fn a_kernel_that_waits() {
    let buffers = Buffers::new();
    for _ in 0..2 {
        assert_eq!(buffers.ahead(), SUCCESS);
        assert_eq!(buffers.early(Nothing), SUCCESS);
        // After itself: it reads what two launches ago wrote.
        assert_eq!(buffers.early(Nothing), SUCCESS);
        buffers.check();
    }
}

#[test]
fn a_read_before_the_wait() {
    let buffers = Buffers::new();
    assert_eq!(buffers.ahead(), SUCCESS);
    assert_eq!(buffers.early(ReadsEarly), LAUNCH_FAILED);
    told(&["toy_early", "reads what the kernel before it writes", "offset 16"]);
    // A copy that is awaited behind the wait may have read before.
    let others = Buffers::new();
    assert_eq!(others.ahead(), SUCCESS);
    assert_eq!(others.early(CopiesEarly), LAUNCH_FAILED);
    told(&["toy_early", "reads what the kernel before it writes"]);
    // Memory that comes and goes between them makes no difference.
    assert_eq!(buffers.ahead(), SUCCESS);
    let freed = buffers.gpu.room(16);
    assert_eq!(cuMemFreeAsync(freed, buffers.gpu.stream), SUCCESS);
    // The same numbers again are no change.
    assert_eq!(buffers.early(ReadsEarly), SUCCESS);
    assert_eq!(cuMemsetD32Async(buffers.x, 0, N, buffers.gpu.stream), SUCCESS);
    assert_eq!(buffers.ahead(), SUCCESS);
    let freed = buffers.gpu.room(16);
    assert_eq!(cuMemFreeAsync(freed, buffers.gpu.stream), SUCCESS);
    assert_eq!(buffers.early(ReadsEarly), LAUNCH_FAILED);
}

#[test]
fn what_is_freed_in_between() {
    let buffers = Buffers::new();
    assert_eq!(buffers.ahead(), SUCCESS);
    assert_eq!(cuMemFreeAsync(buffers.x, buffers.gpu.stream), SUCCESS);
    let y = buffers.gpu.upload(&[0f32]);
    assert_eq!(buffers.gpu.download(y, 1), [0.0]);
    assert_eq!(buffers.early(Nothing), ILLEGAL_ADDRESS);
}

#[test]
fn a_launch_that_does_not_start_early() {
    let buffers = Buffers::new();
    for wrong in [ReadsEarly, LeavesEarly, TriggersEarly] {
        // The attribute is not there, or its value is zero.
        for (attribute, value) in [(0, 1), (6, 0)] {
            assert_eq!(cuMemsetD32Async(buffers.x, 0, N, buffers.gpu.stream), SUCCESS);
            assert_eq!(buffers.ahead(), SUCCESS);
            let expected = if wrong == LeavesEarly { LAUNCH_FAILED } else { SUCCESS };
            assert_eq!(buffers.launch(wrong, attribute, value), expected, "{wrong:?}");
        }
    }
    told(&["__syncthreads"]);
}

#[test]
fn work_in_between_that_lets_nothing_start_early() {
    let buffers = Buffers::new();
    let stream = buffers.gpu.stream;
    let event = made(|out| cuEventCreate(out, 0)).unwrap();
    let between: [(&str, &dyn Fn() -> c_int); 6] = [
        ("fill", &|| cuMemsetD32Async(buffers.gpu.room(4), 0, 1, stream)),
        ("copy", &|| cuMemcpyDtoDAsync_v2(buffers.gpu.room(4), buffers.source, 4, stream)),
        ("event", &|| cuEventRecord(event, stream)),
        ("stream", &|| cuStreamSynchronize(stream)),
        ("device", &|| cuCtxSynchronize()),
        ("host", &|| cuMemcpyDtoH_v2(Host([0u8; 4].as_mut_ptr().cast()), buffers.x, 4)),
    ];
    for (what, between) in between {
        assert_eq!(cuMemsetD32Async(buffers.x, 0, N, stream), SUCCESS);
        assert_eq!(buffers.ahead(), SUCCESS);
        assert_eq!(between(), SUCCESS, "{what}");
        assert_eq!(buffers.early(ReadsEarly), SUCCESS, "{what}");
        buffers.check();
    }
}

#[test]
fn what_a_thread_must_not_do_before_it_waits() {
    let buffers = Buffers::new();
    let last = "block (19, 0, 0), thread (63, 0, 0)";
    for (wrong, words) in [
        (WritesEarly, [last, "writes to memory of the device before it waits"]),
        (LeavesEarly, [last, "leaves the kernel before it has waited"]),
        (TriggersEarly, [last, "trigger before wait"]),
        (WaitsAlone, ["thread (", "trigger before wait"]),
    ] {
        // The first in its stream, after a kernel, after something else.
        for before in [
            |_: &Buffers| SUCCESS,
            Buffers::ahead,
            |buffers: &Buffers| cuStreamSynchronize(buffers.gpu.stream),
        ] {
            // A write that changes nothing is not seen.
            assert_eq!(cuMemsetD32Async(buffers.y, 0, N, buffers.gpu.stream), SUCCESS);
            assert_eq!(before(&buffers), SUCCESS);
            assert_eq!(buffers.early(wrong), LAUNCH_FAILED, "{wrong:?}");
            told(&words);
            told(&["toy_early", "block ("]);
        }
    }
    // The driver works as before.
    assert_eq!(buffers.ahead(), SUCCESS);
    assert_eq!(buffers.early(Nothing), SUCCESS);
    buffers.check();
}

#[test]
fn products_of_cublas_are_kernels_too() {
    let buffers = Buffers::new();
    let blas = made(|out| cublasCreate_v2(out)).unwrap();
    assert_eq!(cublasSetStream_v2(blas, buffers.gpu.stream), SUCCESS);
    let (one, zero) = (1f32.to_ne_bytes(), 0f32.to_ne_bytes());
    let product = || {
        let n = N as c_int;
        let (alpha, beta) = (In::from(&one[..]), In::from(&zero[..]));
        cublasSgemm_v2(
            blas,
            0,
            0,
            n,
            1,
            1,
            alpha,
            buffers.source,
            n,
            buffers.weight + 4,
            1,
            beta,
            buffers.x,
            n,
        )
    };
    assert_eq!(product(), SUCCESS);
    assert_eq!(buffers.early(ReadsEarly), LAUNCH_FAILED);
    told(&["reads what the kernel before it writes"]);
    assert_eq!(product(), SUCCESS);
    assert_eq!(buffers.early(Nothing), SUCCESS);
}

#[test]
fn kernels_of_a_graph() {
    // Another test waits for the first device.
    let buffers = Buffers::on(1);
    let stream = buffers.gpu.stream;
    let graph = |record: &dyn Fn()| {
        assert_eq!(cuStreamBeginCapture_v2(stream, 1), SUCCESS);
        record();
        let graph = made(|out| cuStreamEndCapture(stream, out)).unwrap();
        made(|out| cuGraphInstantiateWithFlags(out, graph, 0)).unwrap()
    };
    let captured = |function: c_int| assert_eq!(function, SUCCESS);
    let ahead = graph(&|| captured(buffers.ahead()));
    let alone = graph(&|| captured(buffers.early(ReadsEarly)));
    let both = |wrong| {
        graph(&|| {
            captured(buffers.ahead());
            captured(buffers.early(wrong));
        })
    };
    let apart = graph(&|| {
        captured(buffers.ahead());
        captured(cuMemsetD32Async(buffers.y, 0, 1, stream));
        captured(buffers.early(ReadsEarly));
    });
    let launch = |graph| {
        assert_eq!(cuMemsetD32Async(buffers.x, 0, N, stream), SUCCESS);
        cuGraphLaunch(graph, stream)
    };
    let (right, wrong) = (both(Nothing), both(ReadsEarly));
    for _ in 0..2 {
        assert_eq!(launch(right), SUCCESS);
        buffers.check();
        assert_eq!(launch(wrong), LAUNCH_FAILED);
        assert_eq!(launch(apart), SUCCESS, "other work in between");
        buffers.check();
        // Two launches of graphs do not overlap, nor do a kernel and a graph.
        assert_eq!(launch(ahead), SUCCESS);
        assert_eq!(cuGraphLaunch(alone, stream), SUCCESS);
        buffers.check();
        assert_eq!(launch(ahead), SUCCESS);
        assert_eq!(buffers.early(ReadsEarly), SUCCESS);
    }
}

/// The blocks that start early see memory as it is then, and go on with memory as it is later.
#[test]
fn blocks_stay_where_they_wait() {
    let kernel = Kernel::find(c"toy_early").unwrap();
    let weight = weight();
    for schedule in SCHEDULES {
        for wrong in [Nothing, ReadsEarly] {
            let (mut x, mut y) = (vec![0f32; N], vec![0f32; N]);
            let mut bytes = Vec::new();
            for pointer in [weight.as_ptr(), x.as_ptr(), y.as_ptr()] {
                bytes.extend((pointer as usize).to_ne_bytes());
            }
            bytes.extend((wrong as u64).to_ne_bytes());
            let grid = Grid {
                blocks: [BLOCKS, 1, 1],
                threads: [64, 1, 1],
                shared_bytes: 256,
                params: Params::new(&bytes),
                starts_early: true,
            };
            let watched = [Memory { start: y.as_mut_ptr().cast(), size: 4 * N }];
            // SAFETY: memory that is large enough, and live.
            let early = unsafe { kernel.start_early(&grid, schedule, &watched) }.unwrap();
            x.copy_from_slice(&source());
            std::hint::black_box(&mut x);
            // SAFETY: as above.
            unsafe { early.finish() }.unwrap();
            let mut old = Vec::new();
            for (block, y) in std::hint::black_box(&y).chunks(64).enumerate() {
                let weight = &weight[block * 64..][..64];
                let reversed = x[block * 64..][..64].iter().rev();
                let with_x: Vec<_> = weight.iter().zip(reversed).map(|(weight, x)| weight + x).collect();
                if y == weight {
                    old.push(block);
                } else {
                    assert_eq!(y, with_x, "block {block}, {wrong:?}, {schedule:?}");
                }
            }
            match wrong {
                Nothing => assert_eq!(old, [0; 0]),
                _ => assert!(old.starts_with(&[0]) && old.ends_with(&[19]) && old.len() > 3, "{old:?}"),
            }
        }
    }
}

#[test]
fn blocks_that_never_go_on() {
    let kernel = Kernel::find(c"toy_early").unwrap();
    let x = vec![1f32; N];
    let mut bytes = Vec::new();
    for _ in 0..3 {
        bytes.extend((x.as_ptr() as usize).to_ne_bytes());
    }
    bytes.extend(0u64.to_ne_bytes());
    let (blocks, threads) = ([BLOCKS, 1, 1], [64, 1, 1]);
    let grid = Grid { blocks, threads, shared_bytes: 256, params: Params::new(&bytes), starts_early: true };
    for schedule in SCHEDULES {
        // SAFETY: memory that is large enough, and live.
        drop(unsafe { kernel.start_early(&grid, schedule, &[]) }.unwrap());
    }
    assert_eq!(x, [1.0; N]);
}
