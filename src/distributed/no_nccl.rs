//! What stands in for NCCL without the feature `nccl`: the same functions, each an error.

use super::host_group::Group;
#[cfg(feature = "processes")]
use super::launcher_env::RankInfo;
use super::rank::Rank;
use crate::{Error, Result};
use candle_core::Device;
use std::sync::Arc;

fn error<T>() -> Result<T> {
    Err(Error::Unsupported {
        what: "NCCL, through which processes speak,".to_string(),
        remedy: "build candle-quant with the feature `nccl`".to_string(),
    })
}

#[cfg(feature = "processes")]
pub fn available() -> Result<()> {
    error()
}

pub fn serves(_: &[Device]) -> bool {
    false
}

pub fn new_id() -> Result<Vec<u8>> {
    error()
}

#[cfg(feature = "processes")]
pub fn device(_: &RankInfo) -> Result<Device> {
    error()
}

pub fn connect(_: &[u8], _: &Device, _: usize, _: &Arc<Group>) -> Result<Rank> {
    error()
}
