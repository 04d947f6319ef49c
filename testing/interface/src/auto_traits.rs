//! Whether a type has a trait that the compiler gives.

use std::marker::PhantomData;
use std::panic::{RefUnwindSafe, UnwindSafe};

/// `Is::<T>::Send` is whether `T` is `Send`.
pub struct Is<T: ?Sized>(PhantomData<T>);

/// What [`Is`] has no constant of its own for.
#[allow(non_upper_case_globals, missing_docs)]
pub trait No {
    const Send: bool = false;
    const Sync: bool = false;
    const Unpin: bool = false;
    const UnwindSafe: bool = false;
    const RefUnwindSafe: bool = false;
}

impl<T: ?Sized> No for Is<T> {}

macro_rules! yes {
    ($($name:ident)*) => {$(
        #[allow(non_upper_case_globals, missing_docs)]
        impl<T: ?Sized + $name> Is<T> {
            pub const $name: bool = true;
        }
    )*};
}

yes!(Send Sync Unpin UnwindSafe RefUnwindSafe);
