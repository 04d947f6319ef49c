//! What the machine can do, and what the process has needed of it.

use memmap2::{MmapMut, MmapOptions};
use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// GB/s at which all threads together read memory, for each round after a first one: `bytes` of it, which should be more
/// than any cache holds. No rounds if there is no memory to read.
pub fn read_bandwidth(bytes: usize, rounds: usize) -> Vec<f64> {
    let words = bytes / size_of::<u64>();
    let share = words.div_ceil(rayon::current_num_threads().max(1));
    if share == 0 {
        return Vec::new();
    }
    let Some(mut mapped) = mapped(words * size_of::<u64>()) else { return Vec::new() };
    let buffer: &mut [u64] = bytemuck::cast_slice_mut(&mut mapped);
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
    (0..rounds).map(|_| read()).collect()
}

/// Memory in huge pages, as that of weights is: two cores of Granite Rapids read 30 GB/s of it, and 20 of small pages
/// (benches/results/2026-11-30-xeon-2-cores/streams.md). None if there is not so much.
fn mapped(bytes: usize) -> Option<MmapMut> {
    let mapped = MmapOptions::new().len(bytes).map_anon().ok()?;
    // A system without huge pages says so, and has other pages.
    #[cfg(target_os = "linux")]
    let _ = mapped.advise(memmap2::Advice::HugePage);
    Some(mapped)
}

/// The most memory that this process has had resident, in bytes; none where the system does not say (it is Linux that does).
pub fn peak_resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// What the CPU calls itself, or else its architecture.
pub fn cpu_name() -> String {
    let of_system = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = of_system.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
