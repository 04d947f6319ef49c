//! Groups of activations as fixed-point numbers that tiles can multiply: three signed limbs of eight bits.
//!
//! A group of weights meets numbers of 23 bits with a unit of their own, a power of two.

use super::fixed_point::{unit_for, LIMBS};
use std::arch::x86_64::*;

/// The largest group of weights.
const MAX_GROUP: usize = 128;

/// The activations that meet a group of weights.
pub(super) struct Group {
    /// For each limb, highest first: what a lane multiplies, four limbs in a word.
    pub(super) words: [[u32; MAX_GROUP / 4]; LIMBS],
    /// Numbers are multiples of this power of two.
    pub(super) unit: f32,
    /// The sum of the activations.
    pub(super) sum: f32,
}

impl Group {
    pub(super) const EMPTY: Self = Self { words: [[0; MAX_GROUP / 4]; LIMBS], unit: 0.0, sum: 0.0 };

    /// Limbs in a word.
    pub(super) const PER_WORD: usize = 4;

    /// What each limb counts, in units.
    pub(super) const WEIGHTS: [f32; LIMBS] = [65536.0, 256.0, 1.0];

    /// Fills this with a group, a multiple of 16 up to 128, of numbers that [`Outliers`](super::outliers::Outliers) leaves.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn fill(&mut self, x: &[f32]) {
        assert!(x.len() <= MAX_GROUP && x.len().is_multiple_of(16), "{} numbers are no group", x.len());
        let mut largest = _mm512_setzero_ps();
        for x in x.chunks_exact(16) {
            // SAFETY: a chunk has the sixteen numbers of a vector.
            largest = _mm512_max_ps(largest, _mm512_abs_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) }));
        }
        let largest = _mm512_reduce_max_ps(largest);
        self.unit = unit_for(largest);
        let inverse = _mm512_set1_ps(1. / self.unit);
        let mut sum = _mm512_setzero_si512();
        for (index, x) in x.chunks_exact(16).enumerate() {
            // SAFETY: a chunk has the sixteen numbers of a vector.
            let x = _mm512_mul_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) }, inverse);
            let mut number = _mm512_cvtps_epi32(x);
            sum = _mm512_add_epi32(sum, number);
            // The lowest limb first.
            for words in self.words.iter_mut().rev() {
                let limb = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(number));
                let words = &mut words[index * 16 / Self::PER_WORD..][..4];
                // SAFETY: `words` has the four words that are written.
                unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(number)) };
                number = _mm512_srai_epi32::<8>(_mm512_sub_epi32(number, limb));
            }
        }
        self.sum = _mm512_reduce_add_epi32(sum) as f32 * self.unit;
    }
}
