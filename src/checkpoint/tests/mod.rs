//! Tests that look at which bytes of files are read.

mod slices;
mod views;
