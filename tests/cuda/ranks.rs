//! Ranks that are GPUs and speak through NCCL, as threads and as processes.
#![cfg(feature = "nccl")]

use crate::common::open;
use crate::nth_device;
use candle_core::{DType, Device, Module, Tensor, WithDType};
use candle_quant::parallel::{
    column_parallel, row_parallel, run, vocab_parallel_head, Launch, Rank, RankInfo, Secret,
};
use candle_quant::{linear_no_bias, Result, VarBuilder};
use candle_quant_models::{Config, Model};
use half::{bf16, f16};
use std::io::{BufRead, BufReader, Read};
use std::process::{self, Child, Command, Stdio};
use std::time::Duration;
use std::{env, net};

/// Sizes of groups, as far as there are GPUs.
fn groups() -> Vec<Vec<Device>> {
    let device = |ordinal| nth_device(ordinal);
    [2, 3, 4].iter().filter_map(|&count| (0..count).map(device).collect()).collect()
}

/// Whole numbers: their sums are the same in every order, and in every dtype.
fn numbers(rank: usize) -> Vec<f32> {
    (0..12).map(|i| ((rank + 1) * (i + 1)) as f32).collect()
}

fn sums(ranks: usize) -> Vec<f32> {
    (0..12).map(|i| (0..ranks).map(|rank| numbers(rank)[i]).sum()).collect()
}

fn values<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    Ok(tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<T>()?)
}

#[test]
fn sums_of_every_dtype() {
    fn of<T: WithDType + std::fmt::Debug + PartialEq>(devices: &[Device], from: fn(f32) -> T) {
        let on_ranks = run(devices, move |rank| {
            let own: Vec<T> = numbers(rank.index()).into_iter().map(from).collect();
            let x = Tensor::from_vec(own, (3, 4), rank.device())?;
            let sum = rank.all_reduce_sum(&x)?;
            assert!(sum.dims() == [3, 4] && sum.device().same_device(rank.device()));
            values::<T>(&sum)
        });
        let expected: Vec<T> = sums(devices.len()).into_iter().map(from).collect();
        assert_eq!(on_ranks.unwrap(), vec![expected; devices.len()]);
    }
    for devices in groups() {
        of(&devices, |x| x);
        of(&devices, f64::from);
        of(&devices, f16::from_f32);
        of(&devices, bf16::from_f32);
        of(&devices, |x| x as u32);
        of(&devices, |x| x as i64);
    }
}

/// The test is of NCCL only if it is what is used: between threads, bf16 would be summed in f32.
#[test]
fn it_is_nccl_that_sums() {
    let Some(devices) = groups().into_iter().find(|devices| devices.len() == 3) else { return };
    let sum = |launch: Launch| {
        let sums = launch.run(&devices, |rank| {
            let x = bf16::from_f32([256., 1., 1.][rank.index()]);
            values::<bf16>(&rank.all_reduce_sum(&Tensor::new(&[x], rank.device())?)?)
        });
        sums.unwrap().concat()
    };
    assert_eq!(sum(Launch::default().through_host()), [bf16::from_f32(258.); 3]);
    let nccl = sum(Launch::default());
    // 256 + 1 is 256 in bf16; 1 + 1 + 256 is not.
    assert!(nccl == [bf16::from_f32(256.); 3] || nccl == [bf16::from_f32(258.); 3], "{nccl:?}");
}

#[test]
fn parts_are_joined_in_the_order_of_ranks() {
    for devices in groups() {
        let count = devices.len();
        for uneven in [false, true] {
            let joined = run(&devices, move |rank| {
                let len = if uneven { rank.index() + 1 } else { 2 };
                let own = vec![rank.index() as u32; 3 * len];
                let rows = rank.all_gather(&Tensor::from_vec(own.clone(), (len, 3), rank.device())?, 0)?;
                let columns = rank.all_gather(&Tensor::from_vec(own, (1, 3 * len), rank.device())?, 1)?;
                assert_eq!(columns.dims(), [1, rows.elem_count()]);
                assert_eq!(values::<u32>(&rows)?, values::<u32>(&columns)?);
                Ok((rows.dims().to_vec(), values::<u32>(&rows)?))
            });
            let of_rank = |rank: u32| vec![rank; 3 * if uneven { rank as usize + 1 } else { 2 }];
            let expected: Vec<u32> = (0..count as u32).flat_map(of_rank).collect();
            assert_eq!(joined.unwrap(), vec![(vec![expected.len() / 3, 3], expected); count]);
        }
    }
}

#[test]
fn every_rank_gets_its_share_of_a_sum() {
    for devices in groups() {
        let count = devices.len();
        for len in [count, 2 * count + 1] {
            let shares = run(&devices, move |rank| {
                let own: Vec<f32> = (0..2 * len).map(|i| (i * (rank.index() + 1)) as f32).collect();
                values::<f32>(&rank.reduce_scatter(&Tensor::from_vec(own, (len, 2), rank.device())?, 0)?)
            });
            let shares = shares.unwrap();
            let factor: usize = (1..=count).sum();
            assert_eq!(shares.concat(), (0..2 * len).map(|i| (i * factor) as f32).collect::<Vec<_>>());
            // The first is the larger one.
            assert_eq!(shares[0].len(), 2 * len.div_ceil(count));
            assert_eq!(shares[count - 1].len(), 2 * (len / count));
        }
    }
}

#[test]
fn one_rank_tells_all_and_the_host_takes_part() {
    for devices in groups() {
        let told = run(&devices, |rank| {
            rank.barrier()?;
            let mut told = Vec::new();
            for root in 0..rank.world_size() {
                let own = Tensor::new(&[rank.index() as u8 + 10], &Device::Cpu)?;
                let from_root = rank.broadcast(&own, root)?;
                assert!(from_root.device().is_cpu());
                told.extend(from_root.to_vec1::<u8>()?);
            }
            assert!(rank.broadcast(&Tensor::new(1u8, rank.device())?, 9).is_err());
            assert!(rank.all_gather(&Tensor::new(1u8, rank.device())?, 0).is_err());
            Ok(told)
        });
        let expected: Vec<u8> = (0..devices.len() as u8).map(|rank| rank + 10).collect();
        assert_eq!(told.unwrap(), vec![expected; devices.len()]);
    }
}

#[test]
fn unlike_parts_are_refused() {
    for devices in groups() {
        let error = run(&devices, |rank| {
            let x = Tensor::zeros((1, 2 + rank.index()), DType::F32, rank.device())?;
            rank.all_gather(&x, 0).map(drop)
        });
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("is at all_gather along 0 of F32 [1, ") && error.contains("while rank "),
            "{error}"
        );
    }
}

#[test]
fn a_failing_rank_ends_all() {
    for devices in groups() {
        let error = run(&devices, |rank| match rank.index() {
            1 => Err(candle_quant::Error::Unsupported { what: "rank 1".into(), remedy: "go on".into() }),
            _ => rank.barrier(),
        });
        assert_eq!(error.unwrap_err().to_string(), "rank 1: rank 1 is not supported; go on");
    }
}

/// Inputs and the products of an up projection, a down projection, and the head.
fn chain(name: &str, rank: Option<&Rank>) -> Result<Vec<f32>> {
    let checkpoint = open(name);
    let x: Vec<f32> = (0..128).map(|i| ((i * 37 % 101) as f32 - 50.) / 50.).collect();
    let (hidden, inner, vocabulary) = (128, 256, 256);
    let up = "model.layers.1.mlp.up_proj";
    let down = "model.layers.1.mlp.down_proj";
    let head = if checkpoint.contains("lm_head.weight") { "lm_head" } else { "model.embed_tokens" };
    let device = rank.map_or(Device::Cpu, |rank| rank.device().clone());
    let x = Tensor::from_vec(x, (1, hidden), &device)?;
    let logits = match rank {
        None => {
            let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &device);
            let x = linear_no_bias(hidden, inner, vb.pp(up))?.forward(&x)?;
            let x = linear_no_bias(inner, hidden, vb.pp(down))?.forward(&x)?;
            linear_no_bias(hidden, vocabulary, vb.pp(head))?.forward(&x)?
        }
        Some(rank) => {
            let vb = VarBuilder::sharded(&checkpoint, rank, DType::F32);
            // In groups of 64.
            let ends =
                [&[0, 128, 256][..], &[0, 128, 192, 256], &[0, 64, 128, 192, 256]][rank.world_size() - 2];
            let own = ends[rank.index()]..ends[rank.index() + 1];
            let x = column_parallel(hidden, inner, own.clone(), false, vb.pp(up))?.forward(&x)?;
            let x = row_parallel(inner, hidden, own, false, vb.pp(down))?.forward(&x)?;
            vocab_parallel_head(hidden, vocabulary, false, vb.pp(head))?.forward(&x)?
        }
    };
    values(&logits)
}

#[test]
fn slices_of_models_compute_what_the_whole_does() {
    for name in ["qwen3-affine-b4-g64", "llama-untied-mxfp4", "qwen3-nvfp4"] {
        let expected = chain(name, None).unwrap();
        for devices in groups() {
            let of_ranks = run(&devices, move |rank| chain(name, Some(&rank))).unwrap();
            for logits in &of_ranks {
                assert_eq!(logits, &of_ranks[0], "{name}: ranks differ");
                assert_close(logits, &expected);
            }
        }
    }
}

#[track_caller]
fn assert_close(actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len());
    let scale = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    for (actual, expected) in actual.iter().zip(expected) {
        assert!((actual - expected).abs() <= 1e-4 * scale, "{actual} for {expected}");
    }
}

const OF_PROCESSES: &str = "llama-untied-mxfp4";

/// A process of a group, which is told to be so by `RANK_DOES`.
#[test]
fn rank() {
    let Ok(does) = env::var("RANK_DOES") else { return };
    let place = RankInfo::from_env().unwrap();
    let secret = Secret::from_env().unwrap();
    let at = |point: &str| {
        println!("{point}");
        while does == format!("stop at {point}") {
            std::thread::park();
        }
    };
    let result = Launch::default().distributed(&place, &secret, |rank| {
        at("joined");
        let checkpoint = open(OF_PROCESSES);
        let config = Config::from_json(checkpoint.config())?;
        let model = Model::new(&config, VarBuilder::sharded(&checkpoint, &rank, DType::BF16))?;
        at("loaded");
        let logits = chain(OF_PROCESSES, Some(&rank))?;
        at("computed");
        if does != "end" {
            rank.barrier()?;
        }
        drop(model);
        Ok(logits)
    });
    match result {
        Ok(logits) => println!("logits {logits:?}"),
        Err(error) => {
            eprintln!("Error: {error}");
            process::exit(1);
        }
    }
    process::exit(0);
}

fn start_all(does: &[&str]) -> Vec<Child> {
    let port = net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |(rank, what): (usize, &&str)| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "ranks::rank", "--nocapture"]).env("RANK_DOES", what);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", does.len().to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", port.to_string()).env("CANDLE_QUANT_SECRET", "known to these only");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    does.iter().enumerate().map(start).collect()
}

#[test]
fn processes_compute_what_one_does() {
    let expected = chain(OF_PROCESSES, None).unwrap();
    for devices in groups() {
        for child in start_all(&vec!["end"; devices.len()]) {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{}", String::from_utf8(output.stderr).unwrap());
            let list = text.lines().find_map(|line| line.split_once("logits ")).unwrap().1;
            let logits: Vec<f32> = serde_json::from_str(list).unwrap();
            assert_close(&logits, &expected);
        }
    }
}

/// Also those that are in an operation, which would wait for the killed one for ever; and those that wait for it to
/// connect NCCL, or while it loads.
#[test]
fn a_killed_process_ends_all() {
    let Some(devices) = groups().into_iter().next() else { return };
    for (point, killed) in [("joined", 1), ("loaded", 0), ("computed", 1), ("computed", 0)] {
        let mut does = vec!["wait"; devices.len()];
        // At the point it stops: others come to where they wait for it.
        let stop = format!("stop at {point}");
        does[killed] = &stop;
        let mut children = start_all(&does);
        let mut reader = BufReader::new(children[killed].stdout.take().unwrap());
        let mut line = String::new();
        while !line.ends_with(&format!("{point}\n")) {
            line.clear();
            assert_ne!(reader.read_line(&mut line).unwrap(), 0);
        }
        let mut killed_child = children.remove(killed);
        killed_child.kill().unwrap();
        killed_child.wait().unwrap();
        for mut child in children {
            let mut stderr = String::new();
            child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
            assert_eq!(child.wait().unwrap().code(), Some(1));
            // The pretend driver may write between the words of an error.
            let expected = format!("rank {killed}: its process has ended or cannot be reached");
            assert!(stderr.contains(&expected), "{point}: {stderr}");
        }
    }
}

/// `Launch::timeout` is of no use to NCCL, but when a rank has ended.
#[test]
fn a_rank_that_has_ended_is_not_waited_for_forever() {
    let Some(devices) = groups().into_iter().next() else { return };
    let launch = Launch::default().timeout(Duration::from_secs(3));
    let error = launch.run(&devices, |rank| match rank.index() {
        0 => Ok(()),
        _ => rank.barrier(),
    });
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "rank 1: still works 3 s after the first rank has ended");
}
