//! Where the launches of a step find what they need: one allocation for numbers that stay as they are, one for what launches
//! write.

use candle_core::{DType, Device, Result, Tensor};
use std::borrow::Cow;

/// What all that is handed out is aligned to.
const ALIGNMENT: usize = 256;

/// Hands out addresses. A first pass over a plan, at addresses that mean nothing, finds out how much memory there has to be.
#[derive(Debug)]
pub(super) struct Addresses {
    base: u64,
    used: usize,
}

impl Addresses {
    /// Null would be no address.
    pub(super) const NOWHERE: u64 = ALIGNMENT as u64;

    pub(super) fn new(base: u64) -> Self {
        Self { base, used: 0 }
    }

    pub(super) fn take(&mut self, bytes: usize) -> u64 {
        let at = self.base + self.used as u64;
        self.used += bytes.next_multiple_of(ALIGNMENT);
        at
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }
}

/// Numbers of 32 bits that launches read.
#[derive(Debug)]
pub(super) struct Constants {
    addresses: Addresses,
    /// None while it is found out how many there are.
    words: Option<Vec<u32>>,
}

impl Constants {
    pub(super) fn measuring() -> Self {
        Self { addresses: Addresses::new(Addresses::NOWHERE), words: None }
    }

    /// Those that will be at an address.
    pub(super) fn at(base: u64) -> Self {
        Self { addresses: Addresses::new(base), words: Some(Vec::new()) }
    }

    /// The address of `len` numbers, which `make` makes.
    pub(super) fn add<'a>(&mut self, len: usize, make: impl FnOnce() -> Cow<'a, [f32]>) -> u64 {
        self.add_words(len, || make().iter().map(|number| number.to_bits()).collect())
    }

    /// The address of `len` words, which `make` makes.
    pub(super) fn add_words(&mut self, len: usize, make: impl FnOnce() -> Vec<u32>) -> u64 {
        let at = self.addresses.take(len * size_of::<u32>());
        if let Some(words) = &mut self.words {
            words.extend(make());
            words.resize(self.addresses.used() / size_of::<u32>(), 0);
        }
        at
    }

    pub(super) fn used(&self) -> usize {
        self.addresses.used()
    }

    pub(super) fn into_words(self) -> Vec<u32> {
        self.words.unwrap_or_default()
    }
}

/// Zeroed memory of at least so many bytes.
pub(super) fn zeroed(bytes: usize, device: &Device) -> Result<Tensor> {
    Tensor::zeros(bytes.max(ALIGNMENT), DType::U8, device)
}
