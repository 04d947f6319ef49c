//! Which activations are outliers.
//!
//! Typical of a group is the magnitude that three eighths of its numbers stay below, zeros left out: a group in which half
//! of the numbers are large by turns is one with outliers, too, and a product of two others, as gated layers have it, is
//! not.

#[cfg(target_arch = "aarch64")]
use super::super::isa::neon::Neon;
#[cfg(target_arch = "x86_64")]
use super::super::isa::{avx2::Avx2, avx512::Avx512};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// How many times as large as what is typical a number may be. Three digits round by at most 2^-24 of the largest number of
/// a group, about: 1e-7 of a result that the usual numbers make. Where those just below the limit meet weights of zero, and
/// half of the group does, it is 1.5e-6 of what the rest makes, computed. Not found are small numbers that are fewer than
/// three eighths of their group, and groups that are large throughout.
const FACTOR: f32 = 32.;

/// Activations have to be below this, so that sums of products are finite before they are scaled, too.
const LIMIT: f32 = (1u128 << 96) as f32;

/// The least of what is largest in a group, unless all is zero: their units are normal numbers, whose inverses are, too.
const LEAST: f32 = 1. / (1u128 << 100) as f32;

/// What is counted of the magnitudes of a group, a multiple of sixteen numbers up to 128. A value proves that the CPU has the
/// instructions.
pub(in super::super) trait Magnitudes: Copy + Sync {
    /// The largest magnitude that is no outlier in a group; `Some(None)` if there are no outliers, `None` if the group has a
    /// number that is no fixed-point number.
    fn limit(self, group: &[f32]) -> Option<Option<f32>>;

    /// The largest; `None` if one is not below [`LIMIT`].
    ///
    /// # Safety
    /// The caller enables the features of the instruction set, here and below.
    unsafe fn largest(group: &[f32]) -> Option<f32>;

    /// How many are below `bound`, zeros left out.
    ///
    /// # Safety
    /// See [`Self::largest`].
    unsafe fn below(group: &[f32], bound: f32) -> u32;
}

/// See [`Magnitudes::limit`].
///
/// # Safety
/// The caller enables the features of the instruction set.
#[inline(always)]
unsafe fn limit<M: Magnitudes>(group: &[f32]) -> Option<Option<f32>> {
    // SAFETY: the caller has enabled the features.
    unsafe {
        let largest = M::largest(group)?;
        if largest > 0. && largest < LEAST {
            return None;
        }
        let (small, any) = (M::below(group, largest * (1. / FACTOR)), M::below(group, f32::INFINITY));
        Some((8 * small > 3 * any).then(|| FACTOR * typical::<M>(group, any * 3 / 8)))
    }
}

/// The magnitude that `below` numbers of a group stay below, zeros left out, to its four leading bits: bit after bit, the
/// largest number that no more are below.
///
/// # Safety
/// The caller enables the features of the instruction set.
#[inline(always)]
unsafe fn typical<M: Magnitudes>(group: &[f32], below: u32) -> f32 {
    let mut bits = 0;
    for bit in (20..31).rev() {
        // SAFETY: the caller has enabled the features.
        if unsafe { M::below(group, f32::from_bits(bits | 1 << bit)) } <= below {
            bits |= 1 << bit;
        }
    }
    f32::from_bits(bits)
}

#[cfg(target_arch = "x86_64")]
impl Magnitudes for Avx512 {
    fn limit(self, group: &[f32]) -> Option<Option<f32>> {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")]
        fn with_features(group: &[f32]) -> Option<Option<f32>> {
            // SAFETY: the features are enabled.
            unsafe { limit::<Avx512>(group) }
        }
        // SAFETY: `self` proves that the CPU has the features of the function.
        unsafe { with_features(group) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")]
    unsafe fn largest(group: &[f32]) -> Option<f32> {
        let limit = _mm512_set1_ps(LIMIT);
        let mut largest = _mm512_setzero_ps();
        let mut all_below = !0;
        for x in group.chunks_exact(16) {
            // SAFETY: a chunk has the sixteen numbers of a vector.
            let magnitudes = _mm512_abs_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) });
            largest = _mm512_max_ps(largest, magnitudes);
            all_below &= _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitudes, limit);
        }
        (all_below == !0).then(|| _mm512_reduce_max_ps(largest))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")]
    unsafe fn below(group: &[f32], bound: f32) -> u32 {
        let bound = _mm512_set1_ps(bound);
        let mut count = 0;
        for x in group.chunks_exact(16) {
            // SAFETY: a chunk has the sixteen numbers of a vector.
            let magnitudes = _mm512_abs_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) });
            let not_zero = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(magnitudes, _mm512_setzero_ps());
            count += _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(not_zero, magnitudes, bound).count_ones();
        }
        count
    }
}

#[cfg(target_arch = "x86_64")]
impl Magnitudes for Avx2 {
    fn limit(self, group: &[f32]) -> Option<Option<f32>> {
        #[target_feature(enable = "avx2,fma,popcnt")]
        fn with_features(group: &[f32]) -> Option<Option<f32>> {
            // SAFETY: the features are enabled.
            unsafe { limit::<Avx2>(group) }
        }
        // SAFETY: `self` proves that the CPU has the features of the function.
        unsafe { with_features(group) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,popcnt")]
    unsafe fn largest(group: &[f32]) -> Option<f32> {
        largest_of(group)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,popcnt")]
    unsafe fn below(group: &[f32], bound: f32) -> u32 {
        count_below(group, bound)
    }
}

#[cfg(target_arch = "aarch64")]
impl Magnitudes for Neon {
    fn limit(self, group: &[f32]) -> Option<Option<f32>> {
        // SAFETY: every CPU of this architecture has the features that its functions are compiled for.
        unsafe { limit::<Self>(group) }
    }

    #[inline(always)]
    unsafe fn largest(group: &[f32]) -> Option<f32> {
        largest_of(group)
    }

    #[inline(always)]
    unsafe fn below(group: &[f32], bound: f32) -> u32 {
        count_below(group, bound)
    }
}

/// See [`Magnitudes::largest`]: a loop that compilers make wide.
#[inline(always)]
fn largest_of(group: &[f32]) -> Option<f32> {
    // As integers, magnitudes have the order of numbers, and NaN is above all.
    let bits = group.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
    let largest = f32::from_bits(bits);
    (largest < LIMIT).then_some(largest)
}

/// See [`Magnitudes::below`].
#[inline(always)]
fn count_below(group: &[f32], bound: f32) -> u32 {
    group.iter().map(|x| u32::from(x.abs() > 0. && x.abs() < bound)).sum()
}
