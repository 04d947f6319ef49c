//! What starting ranks and waiting for their end have in common.

use std::any::Any;
use std::time::Duration;

/// How long ranks that have not noticed a failure are waited for.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// What a panic said.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
