//! Running a launch in one order of threads, or in all, with the same result.

use std::env;
use std::sync::OnceLock;

use crate::emulator::Schedule;
use crate::launch::Launch;
use crate::memory::Region;
use crate::status::{fail, Result, INVALID_VALUE, LAUNCH_FAILED};

/// Schedules of every launch: the result of the first is kept, the others must give the same.
fn schedules() -> Result<&'static [Schedule]> {
    static SCHEDULES: OnceLock<std::result::Result<Vec<Schedule>, String>> = OnceLock::new();
    let from_environment = || {
        let seed = env::var("PRETEND_CUDA_SEED").unwrap_or_else(|_| "1".into());
        let seed = seed.parse().map_err(|_| format!("PRETEND_CUDA_SEED is {seed}, not a number"))?;
        let random = Schedule::Random { seed };
        match env::var("PRETEND_CUDA_SCHEDULES").as_deref() {
            Err(_) | Ok("forward") => Ok(vec![Schedule::Forward]),
            Ok("reverse") => Ok(vec![Schedule::Reverse]),
            Ok("random") => Ok(vec![random]),
            Ok("all") => Ok(vec![Schedule::Forward, Schedule::Reverse, random]),
            Ok(other) => {
                Err(format!("PRETEND_CUDA_SCHEDULES is {other}; it can be forward, reverse, random, or all"))
            }
        }
    };
    match SCHEDULES.get_or_init(from_environment) {
        Ok(schedules) => Ok(schedules),
        Err(message) => fail(INVALID_VALUE, message.clone()),
    }
}

/// Runs `launch`, which may read and write the regions of `touched`.
pub fn run(launch: &Launch, touched: &[Region]) -> Result<()> {
    run_in(schedules()?, launch, touched)
}

fn run_in(schedules: &[Schedule], launch: &Launch, touched: &[Region]) -> Result<()> {
    let Some((first, others)) = schedules.split_first() else { return Ok(()) };
    if others.is_empty() {
        return launch.run(*first);
    }
    let before = copies(touched);
    launch.run(*first)?;
    let after = copies(touched);
    for schedule in others {
        for (region, bytes) in touched.iter().zip(&before) {
            // SAFETY: see `copies`.
            let memory = unsafe { region.bytes_mut() };
            if memory != bytes.as_slice() {
                memory.copy_from_slice(bytes);
            }
        }
        launch.run(*schedule)?;
        for (region, bytes) in touched.iter().zip(&after) {
            // SAFETY: see `copies`.
            let memory = unsafe { region.bytes() };
            if memory == bytes.as_slice() {
                continue;
            }
            let at = memory.iter().zip(bytes).position(|(a, b)| a != b).unwrap_or_default();
            return fail(
                LAUNCH_FAILED,
                format!(
                    "kernel `{}`: the result depends on the order of threads ({first:?} against {schedule:?}): \
                     byte {at} of {}; a barrier is missing, or sums are added in any order",
                    launch.name(),
                    launch.describe(*region),
                ),
            );
        }
    }
    Ok(())
}

fn copies(regions: &[Region]) -> Vec<Vec<u8>> {
    // SAFETY: the regions were just found live; a program that frees or writes them in another thread, while
    // it uses them in a launch, is wrong on a GPU too.
    regions.iter().map(|region| unsafe { region.bytes() }.to_vec()).collect()
}
