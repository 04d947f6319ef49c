//! Objects known to callers by an opaque handle.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::status::{fail, Result, INVALID_HANDLE};

/// A pointer, for callers.
pub type Handle = usize;

/// Handles of one kind of object. No two objects ever have the same handle.
pub struct Handles<T> {
    kind: &'static str,
    objects: OnceLock<Mutex<HashMap<Handle, Arc<T>>>>,
}

static NEXT: AtomicUsize = AtomicUsize::new(0x10000);

impl<T> Handles<T> {
    /// No handles yet; `kind` is for messages.
    pub const fn new(kind: &'static str) -> Self {
        Self { kind, objects: OnceLock::new() }
    }

    fn objects(&self) -> MutexGuard<'_, HashMap<Handle, Arc<T>>> {
        lock(self.objects.get_or_init(Mutex::default))
    }

    /// A handle for `object`.
    pub fn insert(&self, object: T) -> Handle {
        let handle = NEXT.fetch_add(16, Ordering::Relaxed);
        self.objects().insert(handle, Arc::new(object));
        handle
    }

    /// The object that `handle` stands for.
    pub fn get(&self, handle: Handle) -> Result<Arc<T>> {
        match self.objects().get(&handle) {
            Some(object) => Ok(object.clone()),
            None => fail(INVALID_HANDLE, format!("{handle:#x} is no {}, or was destroyed", self.kind)),
        }
    }

    /// Forgets a handle.
    pub fn remove(&self, handle: Handle) -> Result<Arc<T>> {
        match self.objects().remove(&handle) {
            Some(object) => Ok(object),
            None => fail(INVALID_HANDLE, format!("{handle:#x} is no {}, or was destroyed", self.kind)),
        }
    }
}

/// Locks, whatever became of others that held the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
