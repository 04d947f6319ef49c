//! Processes that are there and do nothing any more.

use crate::process::{free_port, start, Process};
use std::process::Command;
use std::time::{Duration, Instant};

/// As a debugger, or a machine that is about to fall asleep, does it.
fn freeze(process: &Process) {
    assert!(Command::new("kill")
        .args(["-STOP", &process.child.id().to_string()])
        .status()
        .unwrap()
        .success());
}

#[test]
fn a_frozen_rank_ends_all_within_the_heartbeat_timeout() {
    for frozen in [0, 1] {
        let port = free_port();
        // What rank 0 is told counts.
        let timeout = |rank| [("HEARTBEAT_TIMEOUT", if rank == 0 { "2" } else { "50" })];
        let does = ["work", "block", "work"];
        let ranks = does.iter().enumerate().map(|(rank, does)| start(does, rank, 3, port, &timeout(rank)));
        let mut processes: Vec<Process> = ranks.collect();
        processes.iter_mut().for_each(|process| process.wait_until("joined"));
        let process = processes.remove(frozen);
        freeze(&process);
        let start = Instant::now();
        for process in processes {
            process.fails(&format!("rank {frozen}: has not been heard of for 2 s"));
        }
        // Ranks that are stuck end some seconds later.
        assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
        process.kill();
    }
}
