//! Weights of tokens: `exp` in arithmetic that every machine repeats bit by bit.

/// The weight of a token whose logit lies `x` (0 or less, as far as minus infinity) above the largest, in units of the
/// temperature: 2^31 exp(x), rounded down, at most 2^31 - 1. An integer, so that sums do not depend on their order.
///
/// Each operation is one of IEEE 754 and rounds once; none is fused. Whoever repeats them on a GPU gets the same integers.
/// The relative error of exp is below 2e-6 above 2^-31, which is where a weight becomes 0.
#[inline(always)]
pub(super) fn weight(x: f32) -> u32 {
    // Adding this leaves the nearest integer in the lowest bits.
    const ROUND: f32 = 12_582_912.; // 1.5 * 2^23
    let exponent = x * std::f32::consts::LOG2_E;
    // Below, weights are 0 anyway, and the steps that follow would leave their range.
    let exponent = if exponent > -64. { exponent } else { -64. };
    let shifted = exponent + ROUND;
    let fraction = exponent - (shifted - ROUND);
    // 2^fraction by its Taylor series: from -0.5 to 0.5 the rest is 1.2e-7.
    let mut power = 1.540_353e-4;
    for coefficient in [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 0.240_226_5, std::f32::consts::LN_2, 1.] {
        power = power * fraction + coefficient;
    }
    // 2^(31 + integer), put together from its bits.
    let integer = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let scale = f32::from_bits(integer.wrapping_add(127 + 31) << 23);
    // Rounded down by a shift: compilers have no vectors for conversions that stop at the largest integer.
    let bits = (power * scale).to_bits();
    let shift = (127u32 + 31).wrapping_sub(bits >> 23);
    let rounded = (bits << 8 | 1 << 31) >> shift.min(31);
    if shift < 32 {
        rounded.min(i32::MAX as u32)
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_exp() {
        assert_eq!(weight(0.), i32::MAX as u32);
        for x in [f32::NEG_INFINITY, f32::MIN, -1e9, -64., -22.] {
            assert_eq!(weight(x), 0, "{x}");
        }
        for step in 1..2_000_000 {
            let x = step as f32 * -1.1e-5;
            let exact = f64::from(x).exp() * f64::from(1u32 << 31);
            let error = (f64::from(weight(x)) - exact).abs();
            assert!(error <= 1. + 2e-6 * exact, "{x}: {} instead of {exact}", weight(x));
        }
    }

    /// Another machine has to find the same: what changes here changes every seed's text.
    #[test]
    fn weights_are_fixed_to_the_bit() {
        let found = [-1e-7, -1e-3, -0.1, -0.5, -1., -2.5, -5., -10., -20., -21.4].map(weight);
        // As numpy computes it, in float32.
        let expected = [
            2_147_483_392,
            2_145_337_216,
            1_943_123_584,
            1_302_514_688,
            790_015_104,
            176_276_192,
            14_469_631,
            97_495,
            4,
            1,
        ];
        assert_eq!(found, expected);
    }
}
