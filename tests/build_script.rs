//! The unit tests of `build.rs`.
#![allow(dead_code)]

#[path = "../build.rs"]
mod build;
