//! Codes to and from a row's bit stream.

/// Code `index` of a row whose codes have `bits` bits (1 to 8), or `None` beyond the row's end.
pub fn code_at(words: &[u32], bits: usize, index: usize) -> Option<u8> {
    let bit = index.checked_mul(bits)?;
    let low = u64::from(*words.get(bit / 32)?);
    // A code of 3, 5 or 6 bits may straddle two words.
    let high = words.get(bit / 32 + 1).map_or(0, |&word| u64::from(word));
    let window = (high << 32 | low) >> (bit % 32);
    Some((window & ((1 << bits) - 1)) as u8)
}

/// Writes `codes` (each below `2^bits`) as one bit stream. `words` has `codes.len() * bits / 32` words.
pub fn pack(codes: &[u8], bits: usize, words: &mut [u32]) {
    let mut words = words.iter_mut();
    let (mut window, mut filled) = (0u64, 0);
    for &code in codes {
        window |= u64::from(code) << filled;
        filled += bits;
        if filled >= 32 {
            if let Some(word) = words.next() {
                *word = window as u32;
            }
            window >>= 32;
            filled -= 32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn codes_survive_packing(bits in 1usize..=8, seed in proptest::collection::vec(any::<u8>(), 96)) {
            let codes: Vec<u8> = seed.iter().map(|byte| (u32::from(*byte) & ((1 << bits) - 1)) as u8).collect();
            let mut words = vec![u32::MAX; codes.len() * bits / 32];
            pack(&codes, bits, &mut words);
            for (index, &code) in codes.iter().enumerate() {
                prop_assert_eq!(code_at(&words, bits, index), Some(code));
            }
            prop_assert_eq!(code_at(&words, bits, codes.len()), None);
        }
    }

    #[test]
    fn three_bit_codes_follow_the_byte_table_of_mlx() {
        // e2 = b0[7:6] | b1[0] << 2, e5 = b1[7] | b2[1:0] << 1
        let words = [u32::from_le_bytes([0b1100_0000, 0b1000_0001, 0b0000_0011, 0]), 0, 0];
        assert_eq!(code_at(&words, 3, 2), Some(0b111));
        assert_eq!(code_at(&words, 3, 5), Some(0b111));
        assert_eq!(code_at(&words, 3, 3), Some(0));
    }
}
