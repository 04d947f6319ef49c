//! Work shared by all threads.

use rayon::prelude::*;
use std::cell::Cell;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

/// Who does some work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Threads {
    /// The calling thread alone, which may be one of many that work side by side.
    #[cfg_attr(not(test), allow(dead_code))]
    This,
    /// All, through [`for_each`].
    All,
}

thread_local! {
    /// Whether the thread works on an item for candle's pool.
    static IS_TASK: Cell<bool> = const { Cell::new(false) };
}

/// How many threads share the items of [`for_each`].
pub(super) fn threads() -> usize {
    match rayon::current_thread_index() {
        Some(_) => rayon::current_num_threads(),
        None if IS_TASK.get() => 1,
        None => candle_core::utils::barrier_pool().n_workers() + 1,
    }
}

/// Runs `task` with each item and its number.
///
/// A thread of a rayon pool shares the items with its pool. Other threads share them with candle's own pool, as
/// candle's quantized matmuls do: its threads stay awake for a while after each call, whereas waking rayon's takes as long
/// as multiplying a small weight. It takes one call at a time: a task that calls this function itself runs its items alone.
pub(super) fn for_each<T: Send>(items: impl IntoIterator<Item = T>, task: impl Fn(usize, T) + Send + Sync) {
    let items: Vec<T> = items.into_iter().collect();
    if items.len() < 2 || IS_TASK.get() {
        items.into_iter().enumerate().for_each(|(index, item)| task(index, item));
    } else if rayon::current_thread_index().is_some() {
        items.into_par_iter().enumerate().for_each(|(index, item)| task(index, item));
    } else {
        let len = items.len();
        let queue = Mutex::new(items.into_iter().enumerate());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let panic = Mutex::new(None);
        // Every thread takes items until none are left. The pool would hand them out in fixed parts, eight for each
        // thread, and a thread with one part more would keep the others waiting.
        candle_core::utils::barrier_pool().execute_chunked(len, |_| {
            IS_TASK.set(true);
            while let Some((index, item)) = next() {
                // The pool could not be used any more.
                if let Err(cause) = catch_unwind(AssertUnwindSafe(|| task(index, item))) {
                    panic.lock().unwrap_or_else(PoisonError::into_inner).replace(cause);
                }
            }
            IS_TASK.set(false);
        });
        if let Some(cause) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(cause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn all_items_once() {
        for count in [0, 1, 2, 17, 1000] {
            let mut places = vec![0usize; count];
            let calls = AtomicUsize::new(0);
            for_each(&mut places, |index, place| {
                *place += index + 1;
                calls.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(calls.into_inner(), count);
            assert!(places.iter().enumerate().all(|(index, place)| *place == index + 1));
        }
    }

    #[test]
    fn every_item_is_taken_once_inside_and_outside_of_rayon() {
        all_items_once();
        rayon::scope(|_| all_items_once());
    }

    #[test]
    fn callers_may_be_many() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(all_items_once);
            }
        });
    }

    #[test]
    fn tasks_may_have_tasks() {
        let inside_and_outside_of_rayon = || {
            for_each(0..20, |_, _| all_items_once());
            all_items_once();
        };
        inside_and_outside_of_rayon();
        rayon::scope(|_| inside_and_outside_of_rayon());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_next_call_works() {
        let panicked = std::panic::catch_unwind(|| for_each(0..100, |index, _| assert!(index != 63)));
        assert!(panicked.is_err());
        all_items_once();
    }
}
