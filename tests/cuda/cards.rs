//! Other cards and older drivers, which the pretend driver imitates in a process of its own. A GPU ignores the
//! variables, and does the same once more.

use crate::device;
use std::env;
use std::process::Command;

/// Runs tests of this program with a variable in the environment.
#[track_caller]
fn pass_with(variable: (&str, &str), tests: &[&str]) {
    if device().is_none() {
        return;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact"]).args(tests).env(variable.0, variable.1);
    // One order of threads is enough: what all of them give is compared without the variable.
    let output = command.env("PRETEND_CUDA_SCHEDULES", "random").output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    let passed = format!("test result: ok. {} passed", tests.len());
    assert!(output.status.success() && told.contains(&passed), "{variable:?}\n{told}");
}

#[test]
fn blocks_take_no_more_shared_memory_than_the_card_gives() {
    for card in ["64", "99", "163"] {
        let tests = [
            "matmul::k_that_is_split_over_blocks",
            "attention::heads_of_128",
            "tiles::every_kind_with_every_number_of_columns",
            "cache_codes::what_a_card_has_room_for",
        ];
        pass_with(("PRETEND_CUDA_CARD", card), &tests);
    }
}

/// It knows nothing of early starts in graphs.
#[test]
fn a_driver_before_cuda_12_3_captures_launches() {
    pass_with(("PRETEND_CUDA_DRIVER", "12020"), &["graph::launches_of_a_layer"]);
}
