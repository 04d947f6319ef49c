//! Running a launch in one order of threads, or in several, with the same result.

use std::env;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;

use crate::edge::{copies, Edge};
use crate::emulator::Schedule;
use crate::launch::Launch;
use crate::memory::Region;
use crate::status::{fail, Result, INVALID_VALUE, LAUNCH_FAILED};

/// Schedules of launches, which take turns: the others of a launch must give the same result as the first. In the last one, some
/// blocks start early.
type Turns = Vec<Vec<Schedule>>;

/// Those of the next launch.
fn schedules_in_turn() -> Result<&'static [Schedule]> {
    static TURNS: OnceLock<std::result::Result<Turns, String>> = OnceLock::new();
    static LAUNCHES: AtomicUsize = AtomicUsize::new(0);
    let from_environment = || {
        let seed = env::var("PRETEND_CUDA_SEED").unwrap_or_else(|_| "1".into());
        let seed = seed.parse().map_err(|_| format!("PRETEND_CUDA_SEED is {seed}, not a number"))?;
        let random = Schedule::Random { seed };
        match env::var("PRETEND_CUDA_SCHEDULES").as_deref() {
            Err(_) | Ok("forward") => Ok(vec![vec![Schedule::Forward]]),
            Ok("reverse") => Ok(vec![vec![Schedule::Reverse]]),
            Ok("random") => Ok(vec![vec![random]]),
            Ok("some") => Ok(vec![
                vec![random],
                vec![Schedule::Forward, random],
                vec![random],
                vec![Schedule::Reverse, random],
                vec![random],
            ]),
            Ok("two") => Ok([Schedule::Forward, Schedule::Reverse].map(|one| vec![one, random]).into()),
            Ok("all") => Ok(vec![vec![Schedule::Forward, Schedule::Reverse, random]]),
            Ok(other) => Err(format!(
                "PRETEND_CUDA_SCHEDULES is {other}; it can be forward, reverse, random, two (random, and one of the others \
                 by turns), some (two of five launches in two), or all"
            )),
        }
    };
    match TURNS.get_or_init(from_environment) {
        Ok(turns) => Ok(&turns[LAUNCHES.fetch_add(1, Ordering::Relaxed) % turns.len()]),
        Err(message) => fail(INVALID_VALUE, message.clone()),
    }
}

/// Runs `launch`, which may read and write the regions of `touched`, after the work that `edge` stands for.
pub fn run(launch: &Launch, touched: &[Region], edge: &mut Edge) -> Result<()> {
    let before = copies(touched);
    // Candle's own kernels are not what is tested, and many.
    let schedules = if launch.is_of_candle() { &[Schedule::Forward] } else { schedules_in_turn()? };
    let result = run_in(schedules, launch, touched, &before, edge);
    edge.cut();
    result?;
    edge.ran(touched, before)
        .or_else(|error| fail(error.code(), format!("kernel `{}` {}", launch.name(), error.message())))
}

fn run_in(
    schedules: &[Schedule],
    launch: &Launch,
    touched: &[Region],
    before: &[Vec<u8>],
    edge: &Edge,
) -> Result<()> {
    let Some((last, others)) = schedules.split_last() else { return Ok(()) };
    let mut after: Option<(Schedule, Vec<Vec<u8>>)> = None;
    for schedule in others {
        restore(touched, before);
        launch.run(*schedule)?;
        match &after {
            None => after = Some((*schedule, copies(touched))),
            Some((first, expected)) => match difference(touched, expected) {
                None => (),
                Some((region, at)) => return depends_on_order(launch, [*first, *schedule], region, at),
            },
        }
    }
    if after.is_some() {
        restore(touched, before);
    }
    launch.run_after(*last, touched, edge)?;
    let Some((first, expected)) = after else { return Ok(()) };
    let Some((region, at)) = difference(touched, &expected) else { return Ok(()) };
    // Is it the order, or that it started early?
    restore(touched, before);
    launch.run(*last)?;
    if difference(touched, &expected).is_some() {
        return depends_on_order(launch, [first, *last], region, at);
    }
    fail(
        LAUNCH_FAILED,
        format!(
            "kernel `{}`: reads what the kernel before it writes, before it waits for that: byte {at} of {} is another \
             than without an early start",
            launch.name(),
            launch.describe(region),
        ),
    )
}

fn depends_on_order(
    launch: &Launch,
    [first, second]: [Schedule; 2],
    region: Region,
    at: usize,
) -> Result<()> {
    fail(
        LAUNCH_FAILED,
        format!(
            "kernel `{}`: the result depends on the order of threads ({first:?} against {second:?}): \
             byte {at} of {}; a barrier is missing, or sums are added in any order",
            launch.name(),
            launch.describe(region),
        ),
    )
}

/// The first byte of `regions` that is not as expected.
fn difference(regions: &[Region], expected: &[Vec<u8>]) -> Option<(Region, usize)> {
    regions.iter().zip(expected).find_map(|(region, bytes)| {
        // SAFETY: see `copies`.
        let memory = unsafe { region.bytes() };
        if memory == bytes.as_slice() {
            return None;
        }
        let at = memory.iter().zip(bytes).position(|(a, b)| a != b);
        Some((*region, at.unwrap_or_default()))
    })
}

fn restore(regions: &[Region], bytes: &[Vec<u8>]) {
    for (region, bytes) in regions.iter().zip(bytes) {
        // SAFETY: see `copies`.
        let memory = unsafe { region.bytes_mut() };
        if memory != bytes.as_slice() {
            memory.copy_from_slice(bytes);
        }
    }
}
