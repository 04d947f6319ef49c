//! Units of fixed-point activations: what the numbers that meet a group of weights are multiples of.

use super::codes::IntegerCodes;

/// Limbs of a number that is as precise as an f32.
#[cfg(target_arch = "x86_64")]
pub(super) const LIMBS: usize = 3;

/// Bits of a limb.
pub(super) const LIMB_BITS: u32 = 8;

/// Scales units of groups, the largest of which is given, so that their products with scales are normal numbers, and sums of
/// activations to the unit that is returned.
pub(super) fn normalize<'a>(
    codes: &IntegerCodes,
    largest: f32,
    groups: impl Iterator<Item = (&'a mut f32, &'a mut f32)>,
) -> f32 {
    /// Sums of integers are below 2^33: their products with units below one leave room for any usual scale.
    const HEADROOM: f32 = 4096.;
    for (unit, sum) in groups {
        *unit = *unit / largest / HEADROOM;
        *sum *= *unit / codes.unit;
    }
    largest * codes.unit * HEADROOM
}

/// The unit of a group of activations; None if there is an infinity or a NaN.
#[inline(always)]
pub(super) fn unit_of(group: &[f32], limbs: usize) -> Option<f32> {
    let bits = group.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
    let largest = f32::from_bits(bits);
    largest.is_finite().then(|| unit_of_limbs(largest, limbs))
}

/// The unit with which so many signed limbs of eight bits express numbers of up to this magnitude. For two it is a power
/// of two, so that numbers of few bits, as bf16 has them, stay what they are; else it is as small as it can be.
#[inline(always)]
pub(super) fn unit_of_limbs(largest: f32, limbs: usize) -> f32 {
    match limbs {
        1 => (largest * (1. / 127.)).max(f32::MIN_POSITIVE),
        2 => power_of_two_for(largest, 0x7F7F as f32, 14),
        // A little less than 0x7F7F7F: quotients are rounded.
        _ => (largest * (1. / 8_355_700.)).max(f32::MIN_POSITIVE),
    }
}

/// The smallest power of two of which `largest` is at most `limit` times as much, for a limit of so many bits beside the
/// leading one.
#[inline(always)]
fn power_of_two_for(largest: f32, limit: f32, bits: i32) -> f32 {
    let power_of_two = |log: i32| f32::from_bits(((log + 127) as u32) << 23);
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    let log = (exponent - bits).clamp(-126, 126);
    power_of_two(log + i32::from(largest * power_of_two(-log) > limit))
}

/// The sum of a group's activations.
#[inline(always)]
pub(super) fn sum(group: &[f32]) -> f64 {
    let mut sums = [0f64; 8];
    for eight in group.chunks_exact(8) {
        sums.iter_mut().zip(eight).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    sums.iter().sum()
}
