//! What a step changes, layer by layer.

use crate::DeltaNetState;
use std::borrow::BorrowMut;

/// What the layers of a plan keep of the tokens so far, each kind in the order of its layers: the caches of attention blocks, of
/// type [`KvCache`](crate::KvCache) or on a device [`DeviceKvCache`](crate::DeviceKvCache), and the states of linear attention.
/// Where there is no linear attention, a list of caches becomes one by `into`.
///
/// ```
/// use candle_core::Device;
/// use candle_quant::step::StepCaches;
/// use candle_quant::{DeltaNetConfig, DeltaNetState, KvCache, KvCacheConfig};
///
/// let sizes = DeltaNetConfig { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 16, kernel: 4 };
/// let mut keys = [KvCache::new(KvCacheConfig::new(2, 64))?];
/// let mut states = [DeltaNetState::new(sizes, &Device::Cpu)?, DeltaNetState::new(sizes, &Device::Cpu)?];
/// let _of_three_layers = StepCaches::new(&mut keys, &mut states);
/// let _of_one: StepCaches<KvCache> = (&mut keys).into();
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Debug)]
pub struct StepCaches<'a, K> {
    pub(crate) keys: Vec<&'a mut K>,
    pub(crate) states: Vec<&'a mut DeltaNetState>,
}

impl<'a, K> StepCaches<'a, K> {
    /// Caches of attention blocks, and states of blocks of linear attention.
    pub fn new(
        keys: impl IntoIterator<Item = &'a mut K>,
        states: impl IntoIterator<Item = &'a mut DeltaNetState>,
    ) -> Self {
        Self { keys: keys.into_iter().collect(), states: states.into_iter().collect() }
    }
}

impl<'a, K, C: BorrowMut<K>> From<&'a mut [C]> for StepCaches<'a, K> {
    fn from(keys: &'a mut [C]) -> Self {
        Self { keys: keys.iter_mut().map(BorrowMut::borrow_mut).collect(), states: Vec::new() }
    }
}

impl<'a, K, C: BorrowMut<K>, const LAYERS: usize> From<&'a mut [C; LAYERS]> for StepCaches<'a, K> {
    fn from(keys: &'a mut [C; LAYERS]) -> Self {
        keys.as_mut_slice().into()
    }
}

impl<'a, K, C: BorrowMut<K>> From<&'a mut Vec<C>> for StepCaches<'a, K> {
    fn from(keys: &'a mut Vec<C>) -> Self {
        keys.as_mut_slice().into()
    }
}
