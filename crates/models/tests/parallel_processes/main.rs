//! Ranks that are processes: how they find each other, and how they end. This program starts itself as each rank.

#[path = "../../../../tests/common/mod.rs"]
mod common;
mod process;
#[cfg(unix)]
mod silence;
mod strangers;

use candle_core::{DType, Device, Tensor};
use candle_quant::parallel::{Joined, Launch, RankInfo, Secret};
use candle_quant::{Error, Result};
use candle_quant_models::Model;
use process::{connect, free_port, read_frame, start, start_all, Process};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};
use std::{env, thread};

/// What a rank does when it has joined is said by `RANK_DOES`.
#[test]
fn rank() {
    let Ok(does) = env::var("RANK_DOES") else { return };
    if let Err(error) = be_rank(&does) {
        eprintln!("Error: {error}");
        std::process::exit(1);
    }
    std::process::exit(0);
}

fn be_rank(does: &str) -> Result<()> {
    let place = RankInfo::from_env()?;
    let seconds = |name: &str| Duration::from_secs(env::var(name).unwrap().parse().unwrap());
    let launch =
        Launch::default().timeout(seconds("TIMEOUT")).heartbeat_timeout(seconds("HEARTBEAT_TIMEOUT"));
    let start = Instant::now();
    let token = || match does {
        "no token" => Err(Error::Unsupported { what: "a token".into(), remedy: "go on without".into() }),
        _ => Ok(b"from rank 0".to_vec()),
    };
    launch.join(&place, &Secret::from_env()?, token, |joined| {
        assert_eq!(joined.token(), b"from rank 0");
        println!("after {} ms", start.elapsed().as_millis());
        println!("joined");
        match does {
            "end" => Ok(()),
            "fail" => Err(Error::Unsupported { what: "this rank".into(), remedy: "take another".into() }),
            "fail with terminal codes" => {
                let what = format!("\u{1b}[2J\u{7}\nrank 9: well, \u{1b}]0;{}", "x".repeat(50_000));
                Err(Error::Unsupported { what, remedy: "take another".into() })
            }
            "panic" => panic!("a fuse blew"),
            // As if in a collective that never ends.
            "block" => loop {
                thread::park();
            },
            "work" => loop {
                if let Some(failure) = joined.failure() {
                    return Err(failure);
                }
                thread::sleep(Duration::from_millis(10));
            },
            "load and decode" => load_and_decode(joined),
            other => panic!("{other}"),
        }
    })
}

/// Says how far it is, and goes on until another rank fails.
fn load_and_decode(joined: &Joined) -> Result<()> {
    let checkpoint = common::open("qwen3-affine-b4-g64");
    let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu)?;
    println!("loaded");
    for step in 0.. {
        if let Some(failure) = joined.failure() {
            return Err(failure);
        }
        // Another text before this one is as long as the model allows.
        let offset = step % 100;
        if offset == 0 {
            model.clear_kv_cache();
        }
        model.forward(&Tensor::new(&[[7u32]], &Device::Cpu)?, offset)?;
        println!("step {step}");
    }
    Ok(())
}

/// These mostly wait for silence: side by side they take as long as the longest.
#[test]
fn ranks_that_fall_silent() {
    let tests = [
        a_failing_rank_ends_all_with_its_message,
        a_panicking_rank_ends_all_with_its_message,
        a_killed_rank_ends_all,
        a_rank_killed_before_all_have_come_or_gone_ends_all,
        a_rank_that_works_on_when_others_have_ended_fails,
        a_rank_that_is_there_twice_ends_all_at_once,
        a_rank_with_another_secret_is_not_let_in,
        strangers::disturb_nobody_and_are_told_of,
        strangers::are_not_printed,
        strangers::cannot_hold_a_rank_by_answering_slowly,
        a_master_that_does_not_answer_is_named,
    ];
    thread::scope(|scope| tests.map(|test| scope.spawn(test)).map(|test| test.join().unwrap()));
}

#[test]
fn ranks_find_each_other_and_wait_for_all_to_end() {
    for count in [1, 2, 5] {
        start_all(&vec!["end"; count]).into_iter().for_each(Process::ends_well);
    }
}

fn a_failing_rank_ends_all_with_its_message() {
    for failed in [0, 2] {
        let mut does = ["block", "work", "block", "work", "end"];
        does[failed] = "fail";
        for process in start_all(&does) {
            process.fails(&format!("rank {failed}: this rank is not supported; take another"));
        }
    }
}

fn a_panicking_rank_ends_all_with_its_message() {
    for process in start_all(&["work", "panic", "block"]) {
        process.fails("rank 1: panicked: a fuse blew");
    }
}

/// A rank may be wrong about everything, and yet its message is one line of text.
#[test]
fn a_message_of_another_rank_commands_no_terminal() {
    let mut ranks = start_all(&["work", "fail with terminal codes", "block"]);
    ranks.remove(1).last_words();
    for process in ranks {
        let said = process.last_words();
        let line = said.lines().find(|line| line.starts_with("Error: ")).unwrap();
        let expected = r"Error: rank 1: \u001b[2J\u0007\nrank 9: well, \u001b]0;xxx";
        assert!(line.starts_with(expected) && line.len() < 5000, "{} {line:.100}", line.len());
        assert!(!said.contains('\u{1b}'));
    }
}

fn a_killed_rank_ends_all() {
    for killed in [0, 1] {
        let mut processes = start_all(&["block", "block", "work"]);
        processes.iter_mut().for_each(|process| process.wait_until("joined"));
        processes.remove(killed).kill();
        for process in processes {
            process.fails(&format!("rank {killed}: its process has ended or cannot be reached"));
        }
    }
}

#[test]
fn a_rank_killed_at_any_point_of_load_or_decode_ends_all() {
    for point in ["joined", "loaded", "step 0", "step 9"] {
        for killed in [0, 2] {
            let mut processes = start_all(&["load and decode"; 3]);
            processes[killed].wait_until(point);
            processes.remove(killed).kill();
            for process in processes {
                process.fails(&format!("rank {killed}: its process has ended or cannot be reached"));
            }
        }
    }
}

/// One that has been let in, and waits for the others to come, or is waited for at the end.
fn a_rank_killed_before_all_have_come_or_gone_ends_all() {
    for killed in [0, 1] {
        let (port, listener) = (free_port(), TcpListener::bind("127.0.0.1:0").unwrap());
        let master = start("block", 0, 3, port, &[]);
        let waiting = start("block", 1, 3, listener.local_addr().unwrap().port(), &[]);
        let (mut of_rank, mut of_master) = (listener.accept().unwrap().0, connect(port));
        of_master.write_all(&read_frame(&mut of_rank)).unwrap();
        of_rank.write_all(&read_frame(&mut of_master)).unwrap();
        of_master.write_all(&read_frame(&mut of_rank)).unwrap();
        // That it is let in.
        let mut length = [0; 2];
        of_master.read_exact(&mut length).unwrap();
        let mut sealed = vec![0; usize::from(u16::from_le_bytes(length))];
        of_master.read_exact(&mut sealed).unwrap();
        of_rank.write_all(&[&length[..], &sealed].concat()).unwrap();
        let expected = format!("rank {killed}: its process has ended or cannot be reached");
        if killed == 0 {
            master.kill();
            drop((of_rank, of_master));
            waiting.fails(&expected);
        } else {
            waiting.kill();
            drop((of_rank, of_master));
            let late = start("block", 2, 3, port, &[]);
            master.fails(&expected);
            late.fails(&expected);
        }
    }
    let mut processes = start_all(&["work", "end", "work"]);
    processes.iter_mut().for_each(|process| process.wait_until("joined"));
    processes.remove(1).kill();
    for process in processes {
        process.fails("rank 1: its process has ended or cannot be reached");
    }
}

fn a_rank_that_works_on_when_others_have_ended_fails() {
    let port = free_port();
    let timeout = [("TIMEOUT", "10")];
    let does = ["end", "block", "end"];
    let ranks = does.iter().enumerate().map(|(rank, does)| start(does, rank, 3, port, &timeout));
    for process in ranks.collect::<Vec<_>>() {
        process.fails("rank 1: still works 10 s after the first rank has ended");
    }
}

#[test]
fn what_rank_0_cannot_make_is_told_to_all() {
    for process in start_all(&["no token", "end", "end"]) {
        process.fails("rank 0: a token is not supported; go on without");
    }
}

#[test]
fn a_rank_of_another_world_size_ends_all_at_once() {
    let port = free_port();
    let sizes = [3, 3, 4];
    let ranks = sizes.iter().enumerate().map(|(rank, &size)| start("end", rank, size, port, &[]));
    for process in ranks.collect::<Vec<_>>() {
        process.fails("rank 2: was told of 4 ranks, rank 0 of 3");
    }
}

fn a_rank_that_is_there_twice_ends_all_at_once() {
    let port = free_port();
    let processes = [0, 1, 1].map(|rank| start("end", rank, 3, port, &[]));
    for process in processes {
        process.fails("rank 1: two processes are this rank");
    }
    let timeout = [("TIMEOUT", "5")];
    let (first, second) = (start("end", 0, 2, port, &timeout), start("end", 0, 2, port, &timeout));
    let mut told = [first, second].map(|mut process| {
        let mut stderr = String::new();
        process.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!(process.child.wait().unwrap().code(), Some(1));
        stderr
    });
    told.sort();
    assert!(told[0].contains(&format!("Error: rank 0: cannot listen on 127.0.0.1:{port}")), "{told:?}");
    assert!(told[1].contains("Error: rank 1: has not come to rank 0 at 127.0.0.1:"), "{told:?}");
}

/// The one without it ends at once. The others wait for the right one, which does not come.
fn a_rank_with_another_secret_is_not_let_in() {
    let port = free_port();
    let wrong = start("end", 2, 3, port, &[("CANDLE_QUANT_SECRET", "another secret, but long enough")]);
    let right = start("end", 1, 3, port, &[]);
    let master = start("end", 0, 3, port, &[("TIMEOUT", "15")]);
    wrong.fails("rank 2: does not know the secret of rank 0, or is of another job; set CANDLE_QUANT_SECRET");
    let told =
        format!("rank 2: has not come to rank 0 at 127.0.0.1:{port} within 15 s; 1 connections were refused");
    master.fails(&told);
    right.fails(&told);
    let unset = start("end", 1, 2, port, &[("CANDLE_QUANT_SECRET", "")]);
    unset.fails("secret of the ranks: expected 16 bytes or more");
}

/// Two jobs of one secret and one port.
#[test]
fn a_rank_of_another_job_is_not_let_in() {
    let port = free_port();
    let master = start("end", 0, 2, port, &[("CANDLE_QUANT_JOB", "evaluation")]);
    let other = start("end", 1, 2, port, &[("CANDLE_QUANT_JOB", "training")]);
    other.fails("rank 1: does not know the secret of rank 0, or is of another job");
    let rank = start("end", 1, 2, port, &[("CANDLE_QUANT_JOB", "evaluation")]);
    master.ends_well();
    rank.ends_well();
}

fn a_master_that_does_not_answer_is_named() {
    let timeout = [("TIMEOUT", "2")];
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let expected =
        format!("rank 0: does not answer rank 1 at 127.0.0.1:{port} within 2 s: it accepts connections");
    start("end", 1, 2, port, &timeout).fails(&expected);
    let port = free_port();
    let expected =
        format!("rank 0: does not answer rank 1 at 127.0.0.1:{port} within 2 s: Connection refused");
    start("end", 1, 2, port, &timeout).fails(&expected);
}
