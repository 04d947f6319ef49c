//! Memory for weights.

/// Room for so many elements; what is as large as a huge page of 2 MiB lies in such pages if the system has them for who
/// asks. Every token reads all weights, and a page of 4 KiB is behind the CPU after 64 cache lines.
pub(super) fn room_for<T>(count: usize) -> Vec<T> {
    let mut room = Vec::with_capacity(count);
    advise(room.spare_capacity_mut());
    room
}

#[cfg(target_os = "linux")]
fn advise<T>(room: &mut [std::mem::MaybeUninit<T>]) {
    /// The size of a huge page; smaller rooms may also lie between those of others, in an allocator's arena.
    const LEAST: usize = 2 << 20;
    const PAGE: usize = 64 << 10; // a multiple of every usual size

    let begin = room.as_mut_ptr() as usize;
    let end = (begin + size_of_val(room)) / PAGE * PAGE;
    let start = begin.next_multiple_of(PAGE);
    if end.saturating_sub(start) >= LEAST {
        // SAFETY: the pages lie in memory that belongs to the caller, and only the way in which the system maps them changes.
        // Where it has no huge pages, it says so, and nothing is lost.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise<T>(_room: &mut [std::mem::MaybeUninit<T>]) {}

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

    /// A kernel that has huge pages notes who asked for them as the flag `hg` of the mapping.
    #[cfg(target_os = "linux")]
    #[test]
    fn large_rooms_ask_for_huge_pages() {
        let has_flag = |room: &Vec<u32>| {
            let middle = room.as_ptr() as usize + room.capacity() * 2;
            let mut is_here = false;
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            smaps.lines().any(|line| {
                let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                let address = |text| usize::from_str_radix(text, 16).ok();
                if let Some((start, end)) = range.and_then(|(a, b)| address(a).zip(address(b))) {
                    is_here = (start..end).contains(&middle);
                }
                is_here && line.starts_with("VmFlags:") && line.split(' ').any(|flag| flag == "hg")
            })
        };
        let there_are = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!(has_flag(&room_for(16 << 20)), there_are);
        assert!(!has_flag(&Vec::with_capacity(16 << 20)));
    }
}
