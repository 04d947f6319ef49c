//! Plans: what becomes of every tensor of a checkpoint, decided from headers alone.

mod arranged;
mod config;
mod exact;
mod experts;
mod fused;
mod heads;
mod importance;
mod integers;
mod jobs;
mod linear;
#[allow(clippy::module_inception)]
mod plan;
mod planner;
mod published;
mod saved;
mod scaling;
mod usual;

pub(super) use integers::half_scales;
pub use plan::ConvertPlan;
pub(super) use plan::{bits_per_weight, elements};
pub(super) use scaling::ScaledGroup;
pub(crate) use usual::{elements as count_elements, rearranged, Rearranged, UsualTensor};
