//! What several tests need.
#![allow(dead_code, unused_imports, unused_macros)]

pub mod gpu;
pub mod launch;
pub mod oracle;
