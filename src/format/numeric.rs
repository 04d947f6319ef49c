//! Numbers that weights and activations come in, and arithmetic that several quantizers share.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A floating-point type that weights, scales and activations come in.
///
/// `from_f32` rounds to nearest, ties to even; `to_f32` is exact.
pub trait Real: Copy + PartialEq + std::fmt::Debug + Send + Sync + candle_core::WithDType {
    /// Rounds to this type.
    fn from_f32(value: f32) -> Self;
    /// The exact value.
    fn to_f32(self) -> f32;
    /// [`Real::to_f32`] of each number; the slices are of one length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// [`Real::from_f32`] of each number; the slices are of one length.
    fn round(from: &[f32], to: &mut [Self]);
    /// [`Real::from_f32`] of each number.
    fn round_all(from: Vec<f32>) -> Vec<Self> {
        let mut to = vec![Self::from_f32(0.0); from.len()];
        Self::round(&from, &mut to);
        to
    }
}

impl Real for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    fn widen(from: &[Self], to: &mut [f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
    }
    fn round(from: &[f32], to: &mut [Self]) {
        Self::widen(from, to);
    }
    fn round_all(from: Vec<f32>) -> Vec<Self> {
        from
    }
}

impl Real for f16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn widen(from: &[Self], to: &mut [f32]) {
        let len = to.len().min(from.len());
        from[..len].convert_to_f32_slice(&mut to[..len]);
    }
    fn round(from: &[f32], to: &mut [Self]) {
        let len = to.len().min(from.len());
        to[..len].convert_from_f32_slice(&from[..len]);
    }
}

impl Real for bf16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn widen(from: &[Self], to: &mut [f32]) {
        // Widening is a shift; written out, the loop vectorizes.
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
    fn round(from: &[f32], to: &mut [Self]) {
        let len = to.len().min(from.len());
        to[..len].convert_from_f32_slice(&from[..len]);
    }
}

/// Rounded to `T`.
#[inline(always)]
pub(super) fn rounded<T: Real>(value: f32) -> f32 {
    T::from_f32(value).to_f32()
}

/// [`Real::widen`] into a vector.
pub(super) fn widened<T: Real>(weights: &[T]) -> Vec<f32> {
    let mut numbers = vec![0.; weights.len()];
    T::widen(weights, &mut numbers);
    numbers
}

/// A number from 0 to `largest`; 0 for NaN.
#[inline(always)]
pub(super) fn clamped(value: f32, largest: f32) -> f32 {
    let value = if value > 0. { value } else { 0. };
    if value < largest {
        value
    } else {
        largest
    }
}

/// A number from 0 to 255, rounded with ties to even, in instructions that every machine has: from 2^23 on there are
/// whole numbers only, whose lowest bits are those of the number.
#[inline(always)]
pub(super) fn small_integer(value: f32) -> u8 {
    const WHOLE: f32 = (1 << 23) as f32;
    (value + WHOLE).to_bits() as u8
}

/// The smallest and the largest number of a group, in one pass over all lanes of a vector.
pub(super) fn ends(group: &[f32]) -> (f32, f32) {
    const LANES: usize = 16;
    let smaller = |a: f32, b: f32| if b < a { b } else { a };
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    let (chunks, rest) = group.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            low[lane] = smaller(low[lane], chunk[lane]);
            high[lane] = larger(high[lane], chunk[lane]);
        }
    }
    for (lane, weight) in rest.iter().enumerate() {
        low[lane] = smaller(low[lane], *weight);
        high[lane] = larger(high[lane], *weight);
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            low[lane] = smaller(low[lane], low[lane + half]);
            high[lane] = larger(high[lane], high[lane + half]);
        }
    }
    (low[0], high[0])
}

/// The largest magnitude of a group.
pub(super) fn absmax(group: &[f32]) -> f32 {
    let (low, high) = ends(group);
    low.abs().max(high.abs())
}
