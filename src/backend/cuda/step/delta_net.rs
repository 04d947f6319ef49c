//! Linear attention in a step.

use super::super::delta_net::{groups, DeltaCall, DeltaMemory, Positions};
use super::super::memory::Locked;
use super::builder::{Builder, Places};
use super::LaunchParams;
use crate::backend::step::{DeltaNet, Lane};
use crate::Error;
use candle_core::{bail, Result};

impl Builder<'_> {
    pub(super) fn delta_net(&mut self, net: &DeltaNet, places: &Places) -> Result<()> {
        let Some(state) = self.memory.states.get(net.layer) else {
            bail!("layer {} has no state", net.layer)
        };
        if state.config != net.config {
            let (expected, found) = (format!("{:?}", net.config), format!("{:?}", state.config));
            return Err(Error::mismatch("state of a step plan", expected, found).into());
        }
        let lanes =
            [&net.lanes.q, &net.lanes.k, &net.lanes.v, &net.lanes.gate, &net.lanes.decay, &net.lanes.beta];
        let size = self.dtype.size_in_bytes();
        let at = |lane: &Lane| {
            let made = places.projected.get(lane.projection).copied().unwrap_or_default();
            (made + (lane.start * size) as u64, lane.width, lane.stride)
        };
        let call = DeltaCall {
            config: net.config,
            sequences: self.sequences,
            tokens: 1,
            dtype: self.dtype,
            eps: net.norm.eps,
            tiled: net.tiled,
            positions: Positions::OnDevice(places.positions),
        };
        let state = Locked::new(&state.numbers).view()?.address(self.stream)?.get();
        let memory = DeltaMemory {
            lanes: lanes.map(at),
            weights: [
                self.numbers(Some(&net.convolution)),
                self.numbers(Some(&net.rates)),
                self.numbers(Some(&net.gate_bias)),
                self.weight_of(&net.norm, net.config.value_dim),
            ],
            state,
            y: places.attended,
        };
        self.push(call.kernel(), call.grid(), LaunchParams::DeltaNet(call.params(&memory)?));
        Ok(())
    }
}

/// Refuses heads for which there is no kernel.
pub(super) fn check(net: &DeltaNet) -> crate::Result<()> {
    match groups(&net.config) {
        Some(_) => Ok(()),
        None => Err(Error::Unsupported {
            what: format!("a step plan with linear attention of {:?} on a CUDA device", net.config),
            remedy: "call the layers one by one".to_string(),
        }),
    }
}
