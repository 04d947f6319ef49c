//! Chooses a format for each weight, for a number of bits per weight: plans every candidate, measures what it loses,
//! and spends the bytes where they save most error.

mod allocation;
mod greedy;
mod sensitivities;

pub use allocation::BitAllocation;
pub use sensitivities::Sensitivities;
