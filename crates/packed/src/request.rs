//! Who asks for a weight says whether it takes a packed one.

use super::stand_in::{has_no_elements, packed_of};
use candle_core::{Result, Tensor};
use std::cell::Cell;

thread_local! {
    static TAKES_PACKED: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller that now loads a weight on this thread takes a [stand-in](crate::stand_in).
pub fn takes_packed() -> bool {
    TAKES_PACKED.get()
}

/// Runs `load` so that the backends below may answer with the stand-in of a packed weight.
///
/// A backend that computes on what another one returns (a sum with an adapter, a transposed view) can't do that with a
/// stand-in: `load` is then run again for dense tensors.
///
/// # Errors
/// As those of `load`.
pub fn load_packed(load: impl Fn() -> Result<Tensor>) -> Result<Tensor> {
    let before = TAKES_PACKED.replace(true);
    let _restore = Restore(before);
    match load() {
        Ok(tensor) if !has_no_elements(&tensor) || packed_of(&tensor).is_some() => Ok(tensor),
        _ => {
            TAKES_PACKED.set(false);
            load()
        }
    }
}

/// Sets the flag to what it was, after a panic too.
struct Restore(bool);

impl Drop for Restore {
    fn drop(&mut self) {
        TAKES_PACKED.set(self.0);
    }
}
