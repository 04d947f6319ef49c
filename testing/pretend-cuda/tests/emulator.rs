//! What threads, warps, and blocks do together in the emulator, and what it finds wrong.

mod common;

use common::launch::{launch, launch_grid, params, SCHEDULES};
use common::oracle::Random;
use half::{bf16, f16};
use pretend_cuda::emulator::{Kernel, Params, Schedule};

#[test]
fn sums_of_rows() {
    let (rows, columns) = (37, 101);
    let x: Vec<f32> = (0..rows * columns).map(|i| (i * 31 % 257) as f32 - 100.0).collect();
    for schedule in SCHEDULES {
        let mut y = vec![f32::NAN; rows];
        let params = params!(x.as_ptr(), y.as_mut_ptr(), rows as u32, columns as u32);
        launch("toy_row_sum", 10, 128, 0, &params, schedule).unwrap();
        for (row, y) in y.iter().enumerate() {
            let sum: f64 = x[row * columns..][..columns].iter().map(|x| f64::from(*x)).sum();
            assert_eq!(f64::from(*y), sum, "row {row}, {schedule:?}");
        }
    }
}

#[test]
fn shuffles_and_votes() {
    for schedule in SCHEDULES {
        let mut y = [[-1i32; 32]; 6];
        launch("toy_shuffles", 1, 32, 0, &params!(y.as_mut_ptr()), schedule).unwrap();
        for lane in 0..32i32 {
            let at = lane as usize;
            assert_eq!(y[0][at], 100 + lane * 7 % 32, "shfl of lane {lane}");
            assert_eq!(y[1][at], 100 + if lane % 8 >= 3 { lane - 3 } else { lane }, "shfl_up of lane {lane}");
            assert_eq!(
                y[2][at],
                100 + if lane % 16 < 13 { lane + 3 } else { lane },
                "shfl_down of lane {lane}"
            );
            // 12 flips bits 2 and 3: inside the eight lanes of a segment, or before it, but never after it.
            let source = if (lane ^ 12) / 8 > lane / 8 { lane } else { lane ^ 12 };
            assert_eq!(y[3][at], 100 + source, "shfl_xor of lane {lane}");
            assert_eq!(y[4][at] as u32, (0..32).filter(|l| l % 3 == 0).map(|l| 1 << l).sum::<u32>());
            let expected = if lane < 16 { 100 + (lane ^ 1) + 10 } else { 100 + (lane ^ 2) };
            assert_eq!(y[5][at], expected, "lane {lane}");
        }
    }
}

fn mma(bfloat16: bool, value: impl Fn(f64) -> (u16, f64)) {
    let mut random = Random::new(3);
    let mut matrix =
        |n: usize| -> Vec<(u16, f64)> { (0..n).map(|_| value(random.number() * 4.0 - 2.0)).collect() };
    let (a, b, c) = (matrix(256), matrix(128), matrix(128));
    let bits = |matrix: &[(u16, f64)]| -> Vec<u16> { matrix.iter().map(|(bits, _)| *bits).collect() };
    let (a_bits, b_bits) = (bits(&a), bits(&b));
    for schedule in SCHEDULES {
        let mut d: Vec<f32> = c.iter().map(|(_, c)| *c as f32).collect();
        let params = params!(a_bits.as_ptr(), b_bits.as_ptr(), d.as_mut_ptr(), u32::from(bfloat16));
        launch("toy_mma", 1, 32, 0, &params, schedule).unwrap();
        for (i, d) in d.iter().enumerate() {
            let (row, column) = (i / 8, i % 8);
            let products = (0..16).map(|k| a[row * 16 + k].1 * b[k * 8 + column].1);
            let exact: f64 = c[i].1 + products.clone().sum::<f64>();
            let size: f64 = c[i].1.abs() + products.map(f64::abs).sum::<f64>();
            let bound = 16.0 * 2f64.powi(-24) * size;
            assert!(
                (f64::from(*d) - exact).abs() <= bound,
                "[{row}][{column}]: {d} for {exact}, {schedule:?}"
            );
        }
    }
}

#[test]
fn tensor_core_products() {
    mma(false, |x| (f16::from_f64(x).to_bits(), f16::from_f64(x).to_f64()));
    mma(true, |x| (bf16::from_f64(x).to_bits(), bf16::from_f64(x).to_f64()));
}

#[test]
fn matrices_from_shared_memory() {
    // Aligned to 16 bytes, as rows have to be.
    let x: Vec<u128> =
        (0..32u16).map(|row| (0..8).fold(0, |all, i| all | u128::from(row * 8 + i) << (16 * i))).collect();
    for schedule in SCHEDULES {
        let mut y = [[[0u32; 4]; 32]; 2];
        launch("toy_ldmatrix", 1, 32, 0, &params!(x.as_ptr(), y.as_mut_ptr()), schedule).unwrap();
        let [as_stored, transposed] = &y;
        for (lane, (as_stored, transposed)) in as_stored.iter().zip(transposed).enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            let element = |matrix: usize, row: usize, column: usize| ((8 * matrix + row) * 8 + column) as u32;
            let pairs = |first: [usize; 2], second: [usize; 2]| {
                [0, 1, 2, 3].map(|i| element(i, first[0], first[1]) | element(i, second[0], second[1]) << 16)
            };
            assert_eq!(*as_stored, pairs([g, 2 * t], [g, 2 * t + 1]));
            assert_eq!(*transposed, pairs([2 * t, g], [2 * t + 1, g]));
        }
    }
}

#[test]
fn transposed_fragments() {
    let x: Vec<u16> = (0..64).map(|i| i * 31).collect();
    for schedule in SCHEDULES {
        let mut y = [0u32; 32];
        launch("toy_movmatrix", 1, 32, 0, &params!(x.as_ptr(), y.as_mut_ptr()), schedule).unwrap();
        for (lane, y) in y.iter().enumerate() {
            let column = |row: usize| u32::from(x[row * 8 + lane / 4]);
            assert_eq!(*y, column(lane % 4 * 2) | column(lane % 4 * 2 + 1) << 16, "lane {lane}");
        }
    }
}

#[test]
fn indices() {
    let (grid, block) = ([3, 2, 4], [4, 3, 2]);
    for schedule in SCHEDULES {
        let mut y = vec![0u32; 24 * 24];
        launch_grid("toy_indices", grid, block, 0, &params!(y.as_mut_ptr()), schedule).unwrap();
        let mut at = 0;
        let all = |n: [u32; 3]| {
            (0..n[2])
                .flat_map(move |z| (0..n[1]).flat_map(move |y| (0..n[0]).map(move |x| x | y << 4 | z << 8)))
        };
        for b in all(grid) {
            for t in all(block) {
                assert_eq!(y[at], (b | t << 12) + 1, "{schedule:?}");
                at += 1;
            }
        }
    }
}

fn reversed_tiles(x: &[f32]) -> Vec<f32> {
    let mut y = x.to_vec();
    y.chunks_mut(64).for_each(<[f32]>::reverse);
    y
}

#[test]
fn barriers() {
    let x: Vec<f32> = (0..640).map(|i| i as f32).collect();
    let reverse = |kernel: &str, schedule| {
        let mut y = vec![0f32; x.len()];
        launch(kernel, 10, 64, 256, &params!(x.as_ptr(), y.as_mut_ptr(), x.len() as u32), schedule).unwrap();
        y
    };
    for schedule in SCHEDULES {
        assert_eq!(reverse("toy_reverse", schedule), reversed_tiles(&x), "{schedule:?}");
        // Without the barrier, half of the threads read what was not yet written.
        let y = reverse("toy_reverse_without_barrier", schedule);
        assert!(y.iter().any(|y| y.is_nan()), "a missing barrier shows, {schedule:?}");
    }
    let bits = |schedule| -> Vec<u32> {
        reverse("toy_reverse_without_barrier", schedule).iter().map(|y| y.to_bits()).collect()
    };
    assert_ne!(bits(Schedule::Forward), bits(Schedule::Reverse));
}

#[test]
fn shared_memory_is_poisoned_before_each_block() {
    for schedule in SCHEDULES {
        let mut y = [0f32; 10];
        launch(
            "toy_stale_shared",
            10,
            1,
            16,
            &params!(std::ptr::null::<f32>(), y.as_mut_ptr(), 10),
            schedule,
        )
        .unwrap();
        assert!(y.iter().all(|y| y.is_nan()), "{y:?}");
    }
}

#[test]
fn copies_arrive_when_waited_for() {
    let x: Vec<u128> = (0..64u128).map(|i| i * 0x3f80_0000_4000_0000_4040_0000_0001).collect();
    // SAFETY: 64 times 16 bytes, of numbers that any bits are.
    let numbers: Vec<u32> = unsafe { std::slice::from_raw_parts(x.as_ptr().cast::<u32>(), 256) }.to_vec();
    for wait in [1, 0] {
        let mut y = [0u32; 256];
        launch("toy_async_copy", 1, 32, 1024, &params!(x.as_ptr(), y.as_mut_ptr(), wait), Schedule::Forward)
            .unwrap();
        assert_eq!(y[..128], numbers[..128]);
        for (i, y) in y.iter().enumerate().skip(128) {
            // Of the second copy, the last eight of sixteen bytes are zeros.
            let expected = if wait == 0 {
                0x7fff_7fff
            } else if i % 4 < 2 {
                numbers[i]
            } else {
                0
            };
            assert_eq!(*y, expected, "{i}");
        }
    }
}

#[test]
fn copies_are_for_other_threads_after_a_barrier() {
    // Aligned to 16 bytes.
    let x: Vec<[f32; 4]> = (0..64).map(|i| [i as f32; 4]).collect();
    for schedule in SCHEDULES {
        // Nothing, a shuffle, mma, __syncwarp, __syncthreads.
        for between in 0..5u32 {
            let mut y = [[[0f32; 4]; 64]; 3];
            let params = params!(x.as_ptr(), y.as_mut_ptr(), between);
            launch("toy_copies", 1, 64, 1024, &params, schedule).unwrap();
            for (i, own) in x.iter().enumerate() {
                let context = format!("thread {i}, {between} between, {schedule:?}");
                assert_eq!(y[0][i], *own, "its own: {context}");
                for (of, seen, visible) in [(i ^ 1, y[1][i], between >= 3), (i ^ 32, y[2][i], between == 4)] {
                    match visible {
                        true => assert_eq!(seen, x[of], "of thread {of}: {context}"),
                        false => {
                            assert!(seen.iter().all(|y| y.is_nan()), "of thread {of}: {seen:?}, {context}")
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn copies_to_slots_of_one_thread() {
    let steps = 7;
    let x: Vec<[f32; 4]> = (0..steps * 64).map(|i| [i as f32, 1.0, 2.0, 3.0]).collect();
    for schedule in SCHEDULES {
        let mut y = [0f32; 64];
        launch("toy_ring", 1, 64, 2048, &params!(x.as_ptr(), y.as_mut_ptr(), steps as u32), schedule)
            .unwrap();
        for (i, y) in y.iter().enumerate() {
            let sum: usize = (0..steps).map(|step| step * 64 + i + 6).sum();
            assert_eq!(*y, sum as f32, "thread {i}, {schedule:?}");
        }
        let mut y = [0f32; 64];
        launch("toy_refilled_early", 1, 64, 1024, &params!(x.as_ptr(), y.as_mut_ptr(), 0), schedule).unwrap();
        assert!(y.iter().all(|y| y.is_nan()), "what a copy is on its way to is not there: {y:?}");
    }
}

#[test]
fn the_last_block_adds_up() {
    let x: Vec<f32> = (0..100).map(|i| i as f32 * 0.1).collect();
    for schedule in SCHEDULES {
        let (mut partial, mut y, mut arrivals) = (vec![0f32; 100], 0f32, 0u32);
        let params = params!(
            x.as_ptr(),
            partial.as_mut_ptr(),
            &mut y as *mut f32,
            &mut arrivals as *mut u32,
            std::ptr::null_mut::<f32>(),
        );
        launch("toy_last_block", 100, 1, 0, &params, schedule).unwrap();
        assert_eq!(y, x.iter().sum::<f32>(), "{schedule:?}");
        assert_eq!(arrivals, 0);
    }
}

#[test]
fn launches_in_many_threads() {
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let x: Vec<f32> = (0..640).map(|i| (i * (thread + 1)) as f32).collect();
                for round in 0..50 {
                    let mut y = vec![0f32; x.len()];
                    let params = params!(x.as_ptr(), y.as_mut_ptr(), x.len() as u32);
                    launch("toy_reverse", 10, 64, 256, &params, SCHEDULES[round % 4]).unwrap();
                    assert_eq!(y, reversed_tiles(&x));
                }
            });
        }
    });
}

/// In every order, the fault is found, and its description has all of `words`.
fn diagnosed(kernel: &str, threads: u32, at: i32, words: &[&str]) {
    diagnosed_anywhere(kernel, threads, at, &[words, &["faults.cu"]].concat());
}

/// The same of a fault whose place in the source is not known.
fn diagnosed_anywhere(kernel: &str, threads: u32, at: i32, words: &[&str]) {
    let mut y = [0f32; 64];
    for schedule in SCHEDULES {
        let fault = launch(kernel, 2, threads, 128, &params!(y.as_mut_ptr(), at as u32), schedule);
        let fault = fault.expect_err("the fault is found");
        for word in words.iter().copied().chain([kernel, "block ("]) {
            assert!(fault.contains(word), "{word:?} is not in: {fault}");
        }
    }
    // The emulator works as before.
    let x = [1f32; 64];
    launch("toy_reverse", 1, 64, 256, &params!(x.as_ptr(), y.as_mut_ptr(), 64), Schedule::Forward).unwrap();
    assert_eq!(x, y);
}

#[test]
fn faults_are_diagnosed() {
    diagnosed(
        "toy_divergent_shuffle",
        64,
        37,
        &["divergent warp", "__syncwarp", "__shfl_xor_sync", "thread ("],
    );
    diagnosed("toy_lane_left", 64, 37, &["__shfl_xor_sync", "the kernel", "thread ("]);
    diagnosed("toy_thread_left", 64, 37, &["__syncthreads", "the kernel", "thread ("]);
    diagnosed("toy_two_barriers", 64, 20, &["different barriers", "thread ("]);
    diagnosed(
        "toy_deadlock",
        32,
        0,
        &["deadlock", "__syncwarp", "mask 00000003", "mask 00000006", "mask 00000005"],
    );
    diagnosed("toy_wrong_source", 32, 0, &["reads from lane 20"]);
    diagnosed("toy_not_in_mask", 32, 8, &["not in its mask"]);
    diagnosed("toy_trap", 32, 9, &["__trap", "block (1, 0, 0)", "thread (9, 0, 0)"]);
    diagnosed("toy_misaligned_copy", 32, 0, &["misaligned cp.async"]);
}

// AddressSanitizer would end the process.
#[cfg(not(address_sanitizer))]
#[test]
fn illegal_addresses_are_diagnosed() {
    for stores in [0, 1] {
        diagnosed_anywhere("toy_illegal_address", 32, stores, &["illegal address 0x40", "thread (7, 0, 0)"]);
    }
}

// AddressSanitizer would end the process.
#[cfg(not(address_sanitizer))]
#[test]
fn overruns_of_shared_memory_are_diagnosed() {
    diagnosed("toy_shared_overrun", 32, 32, &["shared memory overrun", "byte 128", "thread (7, 0, 0)"]);
    diagnosed("toy_shared_overrun", 32, 60, &["shared memory overrun", "byte 240", "thread (7, 0, 0)"]);
    diagnosed("toy_shared_overrun", 32, -1, &["4 bytes before its start", "thread (7, 0, 0)"]);
}

#[test]
fn what_is_not_there() {
    assert!(Kernel::find(c"no_such_kernel").is_none());
    let wrong = launch("toy_row_sum", 1, 128, 0, &Params::new(&[0; 8]), Schedule::Forward);
    assert!(wrong.unwrap_err().contains("8 bytes of parameters"));
}
