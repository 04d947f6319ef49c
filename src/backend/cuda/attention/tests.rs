//! Launches for positions in device memory, and what they do with queries and keys.

mod codes;
mod reference;
mod run;

use super::call::{AttendCall, AttendMemory, Positions, Turns};
use super::{AttendShape, Cached};
use crate::backend::cuda::card::{Card, EarlyStart};
use candle_core::{DType, Device};
use reference::{Case, Norm};
use run::Run;

/// The first CUDA device, a real one or the pretended one of `scripts/test-cuda.sh`; none with a message.
fn device() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) if std::env::var("CANDLE_QUANT_REQUIRE_CUDA").as_deref() == Ok("1") => {
            panic!("CANDLE_QUANT_REQUIRE_CUDA is set, and there is no CUDA device: {error}")
        }
        Err(error) => {
            eprintln!("skipped, for there is no CUDA device: {error}");
            None
        }
    }
}

const DTYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

fn case(dtype: DType, head_dim: usize, positions: &[u32]) -> Case {
    Case {
        dtype,
        positions: positions.to_vec(),
        heads: 6,
        kv_heads: 2,
        head_dim,
        capacity: 256,
        window: None,
        is_chunked: false,
        norm: Norm::Rms { of_each_head: false },
        turns_first: false,
        turn_rows: 256,
        pairs: head_dim / 2,
        interleaved: false,
        grows: false,
        has_gate: false,
    }
}

/// The bits of launches that the host plans for each position, with fewer blocks.
#[test]
fn one_launch_serves_every_position() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        let windows = [(None, false), (Some(40), false), (Some(150), false), (Some(48), true)];
        for (window, is_chunked) in windows.into_iter().take(if dtype == DType::BF16 { 1 } else { 4 }) {
            let has_gate = window == Some(150);
            let mut run = Run::new(Case { window, is_chunked, has_gate, ..case(dtype, 64, &[0]) }, &device);
            let around = window.map_or(31, |window| window as u32);
            for position in
                [0, 1, 15, 16, 63, 64, 65, 127, 128, 191, 193, around - 1, around, around + 1, 255]
            {
                let planned = run.planned(position);
                run.check(&planned);
                assert!(planned == run.at(&[position]), "{dtype:?} {window:?} {position}: other bits");
            }
        }
    }
}

/// So many key heads that few splits are left, of several tiles for each warp, and not all with blocks for them.
#[test]
fn splits_depend_on_the_position_alone() {
    let Some(device) = device() else { return };
    for (dtype, positions) in [(DType::F16, &[260, 400][..]), (DType::F32, &[260])] {
        let many = Case { heads: 64, kv_heads: 64, capacity: 512, turn_rows: 512, ..case(dtype, 64, &[0]) };
        let mut run = Run::new(many, &device);
        for &position in positions {
            let planned = run.planned(position);
            run.check(&planned);
            assert!(planned == run.at(&[position]), "{dtype:?} {position}: other bits");
        }
    }
}

/// Each where it stands; those without a new token, or without a row for it, stay as they are.
#[test]
fn sequences_at_positions_of_their_own() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        for (window, is_chunked) in [(None, false), (Some(33), false), (Some(64), true)] {
            let positions = [200, u32::MAX, 0, 64, 15];
            let mut run = Run::new(
                Case { window, is_chunked, grows: true, turn_rows: 300, ..case(dtype, 64, &positions) },
                &device,
            );
            for positions in [positions, [u32::MAX; 5], [7, 255, 256, 130, 1_000_000]] {
                let left = run.at(&positions);
                run.check(&left);
            }
        }
        // Tables that end before the cache does.
        let mut run = Run::new(Case { turn_rows: 70, ..case(dtype, 64, &[0; 2]) }, &device);
        let left = run.at(&[69, 70]);
        run.check(&left);
    }
}

#[test]
fn heads_are_normalized_and_turned() {
    let Some(device) = device() else { return };
    let positions = [37, 0, 90];
    for dtype in DTYPES {
        let sizes: &[usize] = if dtype == DType::F32 { &[33, 64, 100, 256] } else { &[64, 80, 96, 128, 256] };
        for (index, &head_dim) in sizes.iter().enumerate() {
            let half = head_dim / 2;
            let base = case(dtype, head_dim, &positions);
            let cases = [
                Case { norm: Norm::None, interleaved: true, grows: true, ..base.clone() },
                Case { norm: Norm::None, pairs: 0, ..base.clone() },
                Case {
                    norm: Norm::Rms { of_each_head: true },
                    pairs: half / 2,
                    has_gate: true,
                    ..base.clone()
                },
                Case {
                    norm: Norm::Rms { of_each_head: false },
                    turns_first: true,
                    grows: true,
                    ..base.clone()
                },
                Case {
                    norm: Norm::Layer { of_each_head: true },
                    pairs: half - 3,
                    interleaved: true,
                    ..base.clone()
                },
                Case {
                    norm: Norm::Layer { of_each_head: true },
                    turns_first: true,
                    interleaved: true,
                    ..base.clone()
                },
                Case { norm: Norm::Layer { of_each_head: false }, pairs: 0, grows: true, ..base.clone() },
                Case {
                    norm: Norm::PlainKeys,
                    turns_first: true,
                    pairs: 5,
                    heads: 18,
                    has_gate: true,
                    ..base
                },
            ];
            for (number, case) in cases.into_iter().enumerate() {
                // All of them with heads of one size, the others with every other size.
                if index == 1 || number % 2 == index % 2 {
                    let mut run = Run::new(case, &device);
                    let left = run.at(&positions);
                    run.check(&left);
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let card = Card {
        all_shared_bytes: 227 << 10,
        fast_cublas: true,
        most_shared_bytes: 113 << 10,
        multiprocessors: 132,
        bf16: true,
        early_start: EarlyStart::Always,
    };
    let call = AttendCall {
        shape: AttendShape { sequences: 1, heads: 8, kv_heads: 2, head_dim: 64 },
        dtype: DType::F16,
        cached: Cached::Numbers,
        capacity: 64,
        is_ring: false,
        positions: Positions::OnDevice(16),
        window: None,
        is_chunked: false,
        scale: 1.,
        softcap: None,
        has_gate: false,
        q_norm: None,
        k_norm: None,
        turns_first: false,
        turns: Turns { table: 16, growth: 0, rows: 50, pairs: 32, interleaved: false },
    };
    let memory = AttendMemory { partial: 16, arrivals: 16, ..Default::default() };
    let plan = call.plan(card).unwrap();
    let told = |call: AttendCall| call.params(&plan, &memory).unwrap_err().to_string();
    assert!(call.params(&plan, &memory).is_ok());
    let known = |position| Positions::Known { first: 0, position, settled: 0 };
    assert!(told(AttendCall { positions: known(64), ..call }).contains("position 64 in a cache of 64 rows"));
    assert!(told(AttendCall { positions: known(50), ..call }).contains("position 50 in tables of 50 rows"));
    assert!(told(AttendCall { capacity: 60, ..call }).contains("no multiple of 16"));
    assert!(told(AttendCall { is_ring: true, ..call }).contains("a ring of 64 rows for a window of None"));
    let turns = |pairs, table| AttendCall { turns: Turns { table, pairs, ..call.turns }, ..call };
    assert!(told(turns(33, 16)).contains("33 pairs") && told(turns(32, 0)).contains("32 pairs"));
    let shape = AttendShape { kv_heads: 3, ..call.shape };
    assert!(told(AttendCall { shape, ..call }).contains("8 query heads are no multiple of 3"));
    let without = AttendMemory::default();
    assert!(call.params(&plan, &without).unwrap_err().to_string().contains("splits of keys have no memory"));
    let wide = AttendShape { head_dim: 72, ..call.shape };
    assert!(AttendCall { shape: wide, ..call }.plan(card).is_none());
}
