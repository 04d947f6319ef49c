//! Memory for weights. Every token reads all of them, and a page of 4 KiB is behind the CPU after 64 cache lines: two cores read
//! 43 GB/s of such pages, and 62 of those of 2 MiB (benches/results/2026-11-27-epyc-2-cores/decode.md).

use std::mem::MaybeUninit;
#[cfg(target_os = "linux")]
use std::ops::Range;

/// The size of a huge page.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// Room for so many elements; what is as large as a huge page lies in such pages if the system has them for who asks.
pub(super) fn room_for<T>(count: usize) -> Vec<T> {
    let mut room = Vec::with_capacity(count);
    advise(room.spare_capacity_mut());
    room
}

#[cfg(target_os = "linux")]
fn advise<T>(room: &mut [MaybeUninit<T>]) {
    const PAGE: usize = 64 << 10; // a multiple of every usual size

    // An allocator keeps a few bytes of its own ahead of a large room, at the start of what Linux has laid out for huge pages: from the
    // next page on, the first two mebibytes would be no such page.
    let begin = room.as_mut_ptr() as usize;
    let (start, end) = (begin / PAGE * PAGE, (begin + size_of_val(room)) / PAGE * PAGE);
    // Smaller rooms may also lie between those of others, in an allocator's arena.
    if end.saturating_sub(start) >= HUGE {
        // SAFETY: whatever lies in these pages, the caller's or its neighbours', stays as it is, and only the way in which the system maps
        // them changes. Where it has no huge pages, or nothing at the start, it says so, and nothing is lost.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// Has the system put what was read into huge pages, with its neighbours in them: most weights of small models are smaller than
/// a page, and one behind the other. Beside the next reads, since a system whose memory is in pieces moves others first.
#[cfg(target_os = "linux")]
pub(super) fn gather<T>(read: &[T]) {
    /// Of smaller ones there are too few to matter, and of larger ones all but their ends are in huge pages.
    const SIZES: Range<usize> = 64 << 10..64 << 20;

    if SIZES.contains(&size_of_val(read)) {
        let pages = huge_pages_of(read);
        rayon::spawn(move || collapse(pages));
    }
}

/// The huge pages that have a part of something.
#[cfg(target_os = "linux")]
fn huge_pages_of<T>(part: &[T]) -> Range<usize> {
    let begin = part.as_ptr() as usize;
    begin / HUGE * HUGE..(begin + size_of_val(part)).next_multiple_of(HUGE)
}

/// Makes one huge page of each.
#[cfg(target_os = "linux")]
fn collapse(pages: Range<usize>) {
    // SAFETY: whatever lies in these pages by now stays as it is, and where it is; only the way in which the system maps it
    // changes. It leaves out what is not mapped as one, and does nothing if it does not know the request (before Linux 6.1).
    unsafe { libc::madvise(pages.start as *mut libc::c_void, pages.len(), libc::MADV_COLLAPSE) };
}

#[cfg(not(target_os = "linux"))]
fn advise<T>(_room: &mut [MaybeUninit<T>]) {}

#[cfg(not(target_os = "linux"))]
pub(super) fn gather<T>(_read: &[T]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_any_count() {
        for count in [0, 1, 1000, (2 << 20) + 12345, 5 << 20] {
            let mut room = room_for::<u8>(count);
            assert!(room.capacity() >= count && room.is_empty());
            room.resize(count, 7);
            assert!(room.iter().all(|byte| *byte == 7));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_gathered_into_huge_pages_stays_as_it_is() {
        let rooms: Vec<Vec<u32>> = (0..20).map(|index| (index..index + 150_000).collect()).collect();
        for room in &rooms {
            let pages = huge_pages_of(room);
            assert!(pages.contains(&(room.as_ptr() as usize)) && pages.len() % HUGE == 0);
            collapse(pages);
        }
        for (index, room) in rooms.iter().enumerate() {
            assert!(room.iter().copied().eq(index as u32..index as u32 + 150_000), "room {index}");
        }
    }

    /// A kernel that has huge pages notes who asked for them as the flag `hg` of the mapping.
    #[cfg(target_os = "linux")]
    #[test]
    fn large_rooms_ask_for_huge_pages() {
        let has_flag_at = |address: usize| {
            let mut is_here = false;
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            smaps.lines().any(|line| {
                let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                let parsed = |text| usize::from_str_radix(text, 16).ok();
                if let Some((start, end)) = range.and_then(|(a, b)| parsed(a).zip(parsed(b))) {
                    is_here = (start..end).contains(&address);
                }
                is_here && line.starts_with("VmFlags:") && line.split(' ').any(|flag| flag == "hg")
            })
        };
        let there_are = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        let has_flag = |room: Vec<u32>| {
            let begin = room.as_ptr() as usize;
            [begin, begin + room.capacity() * 2].map(has_flag_at)
        };
        assert_eq!(has_flag(room_for(16 << 20)), [there_are; 2]);
        assert_eq!(has_flag(Vec::with_capacity(16 << 20)), [false; 2]);
    }
}
