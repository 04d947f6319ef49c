//! Memory for weights.

/// Room for so many elements, in huge pages if the system has them for who asks: every token reads all weights, and a page
/// of 4 KiB is behind the CPU after a few dozen cache lines.
pub(super) fn room_for<T>(count: usize) -> Vec<T> {
    let mut room = Vec::with_capacity(count);
    advise(room.spare_capacity_mut());
    room
}

#[cfg(target_os = "linux")]
fn advise<T>(room: &mut [std::mem::MaybeUninit<T>]) {
    /// Pages of an allocator's arena, which others use, are left alone.
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
}
