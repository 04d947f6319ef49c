//! What the machine can do, and what the process has needed of it.

use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// GB/s at which all threads together read memory, for each round after a first one.
pub fn read_bandwidth(bytes: usize, rounds: u32) -> Vec<f64> {
    let words = bytes / 8;
    let share = words.div_ceil(rayon::current_num_threads());
    let mut buffer = vec![0u64; words];
    // Written by the threads that will read it: that is where a page is put.
    buffer.par_chunks_mut(share).enumerate().for_each(|(at, part)| part.fill(at as u64 + 1));
    let read = || {
        let start = Instant::now();
        let sum: u64 = buffer
            .par_chunks(share)
            .map(|part| part.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)))
            .reduce(|| 0, u64::wrapping_add);
        black_box(sum);
        bytes as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    read();
    (0..rounds.max(3)).map(|_| read()).collect()
}

/// The most memory that this process has had resident, in bytes; 0 where the system does not say.
pub fn peak_resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
