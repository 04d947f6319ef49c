//! Generators of cuRAND, which candle makes for every device. They generate nothing.

use std::ffi::{c_int, c_ulonglong};

use crate::argument::Out;
use crate::handles::{Handle, Handles};
use crate::status::Result;

static GENERATORS: Handles<()> = Handles::new("cuRAND generator");

/// `CURAND_STATUS_NOT_INITIALIZED`
const NOT_INITIALIZED: c_int = 101;

fn curand_status(result: Result<()>) -> c_int {
    result.map_or(NOT_INITIALIZED, |()| 0)
}

/// A generator of any kind.
#[no_mangle]
pub extern "C" fn curandCreateGenerator(generator: Out<Handle>, _kind: c_int) -> c_int {
    curand_status(generator.set(GENERATORS.insert(())))
}

/// Forgets a generator.
#[no_mangle]
pub extern "C" fn curandDestroyGenerator(generator: Handle) -> c_int {
    curand_status(GENERATORS.remove(generator).map(drop))
}

/// Accepts a seed.
#[no_mangle]
pub extern "C" fn curandSetPseudoRandomGeneratorSeed(generator: Handle, _seed: c_ulonglong) -> c_int {
    curand_status(GENERATORS.get(generator).map(drop))
}

/// Accepts an offset.
#[no_mangle]
pub extern "C" fn curandSetGeneratorOffset(generator: Handle, _offset: c_ulonglong) -> c_int {
    curand_status(GENERATORS.get(generator).map(drop))
}

/// Accepts a stream.
#[no_mangle]
pub extern "C" fn curandSetStream(generator: Handle, _stream: Handle) -> c_int {
    curand_status(GENERATORS.get(generator).map(drop))
}
