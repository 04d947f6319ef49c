//! Random numbers that are a function of a counter: any of them can be drawn without those before it, anywhere.

/// 64 bits for this step of this row: Philox4x32 with ten rounds (Salmon et al., Parallel Random Numbers: As Easy as
/// 1, 2, 3), key `seed`, of which the first two words are taken.
pub(super) fn random(seed: u64, step: u64, row: u64) -> u64 {
    let words = |number: u64| [number as u32, (number >> 32) as u32];
    let ([a, b], [c, d]) = (words(step), words(row));
    let [low, high, ..] = philox([a, b, c, d], words(seed));
    u64::from(high) << 32 | u64::from(low)
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const ROUNDS: usize = 10;
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for _ in 0..ROUNDS {
        let [a, b, c, d] = counter;
        let product = |x: u32, y: u32| {
            let product = u64::from(x) * u64::from(y);
            ((product >> 32) as u32, product as u32)
        };
        let (first_high, first_low) = product(MULTIPLIERS[0], a);
        let (second_high, second_low) = product(MULTIPLIERS[1], c);
        counter = [second_high ^ b ^ key[0], second_low, first_high ^ d ^ key[1], first_low];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The authors' test vectors.
    #[test]
    fn numbers_are_those_of_the_paper() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let found = philox(pi, [0xa409_3822, 0x299f_31d0]);
        assert_eq!(found, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
        let seed = 0x299f_31d0_a409_3822;
        assert_eq!(random(seed, 0x85a3_08d3_243f_6a88, 0x0370_7344_1319_8a2e), 0x94fd_cceb_d16c_fe09);
    }
}
