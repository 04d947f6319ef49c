//! Pointers among the arguments of the driver's functions.

use std::ffi::{c_char, c_void, CStr};

use crate::status::{fail, Result, INVALID_VALUE};

/// Where a result goes.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the result.
    pub fn set(self, value: T) -> Result<()> {
        if self.0.is_null() {
            return fail(INVALID_VALUE, "no place for the result");
        }
        // SAFETY: the caller of a driver function passes null or a place for the result.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Writes a result of several values.
    pub fn set_all(self, values: &[T]) -> Result<()>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return fail(INVALID_VALUE, "no place for the result");
        }
        // SAFETY: the caller of a driver function passes null or room for as many values as the function writes.
        unsafe { self.0.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(())
    }

    /// Whether there is no place.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Writes the result if there is a place for it.
    pub fn set_if_wanted(self, value: T) -> Result<()> {
        if self.0.is_null() {
            Ok(())
        } else {
            self.set(value)
        }
    }
}

impl<T> From<&mut T> for Out<T> {
    fn from(place: &mut T) -> Self {
        Self(place)
    }
}

/// Values to read.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Value number `i`, which the caller of the driver promised.
    pub fn get(self, i: usize) -> Result<T> {
        if self.0.is_null() {
            return fail(INVALID_VALUE, "a null pointer for an argument");
        }
        // SAFETY: the caller of a driver function passes null or as many values as the function reads.
        Ok(unsafe { self.0.add(i).read_unaligned() })
    }

    /// Whether there are values.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The same values, of another type.
    pub fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }
}

impl<T> From<&[T]> for In<T> {
    fn from(values: &[T]) -> Self {
        Self(values.as_ptr())
    }
}

impl<T> From<&T> for In<T> {
    fn from(value: &T) -> Self {
        Self(value)
    }
}

impl<T> Default for In<T> {
    fn default() -> Self {
        Self(std::ptr::null())
    }
}

/// A string.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    /// The string, without the zero at its end.
    pub fn get(&self) -> Result<&CStr> {
        if self.0.is_null() {
            return fail(INVALID_VALUE, "a null pointer for a string");
        }
        // SAFETY: the caller of a driver function passes null or a string that ends with zero.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}

impl From<&CStr> for Text {
    fn from(text: &CStr) -> Self {
        Self(text.as_ptr())
    }
}

/// Memory of the host.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Host(pub *mut c_void);

impl Host {
    /// Its address, which is the same on the devices.
    pub fn address(self) -> u64 {
        self.0 as usize as u64
    }
}
