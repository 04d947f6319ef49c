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

/// Codes that begin and end with a word, whatever their width.
const BLOCK: usize = 32;

/// Calls a function for the width of codes that is known at run time: loops over them have constant shifts.
macro_rules! for_width {
    ($bits:expr, $function:ident($($argument:expr),*)) => {
        match $bits {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            3 => $function::<3>($($argument),*),
            4 => $function::<4>($($argument),*),
            5 => $function::<5>($($argument),*),
            6 => $function::<6>($($argument),*),
            7 => $function::<7>($($argument),*),
            _ => $function::<8>($($argument),*),
        }
    };
}

/// Writes `codes` (each below `2^bits`, 1 to 8 bits) as one bit stream. `words` has `codes.len() * bits / 32` words.
pub fn pack(codes: &[u8], bits: usize, words: &mut [u32]) {
    for_width!(bits, pack_all(codes, words))
}

fn pack_all<const BITS: usize>(codes: &[u8], words: &mut [u32]) {
    let (blocks, rest) = codes.as_chunks::<BLOCK>();
    let mut words = words.chunks_mut(BITS);
    for (block, words) in blocks.iter().zip(&mut words) {
        pack_block::<BITS>(block, words);
    }
    pack_block::<BITS>(rest, words.next().unwrap_or_default());
}

#[inline(always)]
fn pack_block<const BITS: usize>(codes: &[u8], words: &mut [u32]) {
    let mut words = words.iter_mut();
    let (mut window, mut filled) = (0u64, 0);
    for &code in codes {
        window |= u64::from(code) << filled;
        filled += BITS;
        if filled >= 32 {
            if let Some(word) = words.next() {
                *word = window as u32;
            }
            window >>= 32;
            filled -= 32;
        }
    }
}

/// Reads the first codes of a bit stream, as many as there are and `codes` takes; tells how many those are.
pub(crate) fn unpack(words: &[u32], bits: usize, codes: &mut [u8]) -> usize {
    for_width!(bits, unpack_all(words, codes))
}

fn unpack_all<const BITS: usize>(words: &[u32], codes: &mut [u8]) -> usize {
    let count = codes.len().min(words.len() * 32 / BITS);
    let (blocks, rest) = codes.split_at_mut(count - count % BLOCK);
    for (block, words) in blocks.as_chunks_mut::<BLOCK>().0.iter_mut().zip(words.as_chunks::<BITS>().0) {
        let (mut window, mut filled, mut words) = (0u64, 0, words.iter());
        for code in block {
            if filled < BITS {
                window |= words.next().map_or(0, |word| u64::from(*word) << filled);
                filled += 32;
            }
            *code = (window & ((1 << BITS) - 1)) as u8;
            window >>= BITS;
            filled -= BITS;
        }
    }
    for (index, code) in rest.iter_mut().enumerate() {
        *code = code_at(words, BITS, blocks.len() + index).unwrap_or_default();
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn codes_survive_packing(bits in 1usize..=8, skipped in 0usize..40, seed in proptest::collection::vec(any::<u8>(), 96)) {
            let codes: Vec<u8> = seed.iter().map(|byte| (u32::from(*byte) & ((1 << bits) - 1)) as u8).collect();
            let mut words = vec![u32::MAX; codes.len() * bits / 32];
            pack(&codes, bits, &mut words);
            for (index, &code) in codes.iter().enumerate() {
                prop_assert_eq!(code_at(&words, bits, index), Some(code));
            }
            prop_assert_eq!(code_at(&words, bits, codes.len()), None);
            // Of the first codes, and of more than there are.
            for (len, expected) in [(96, 96), (96 - skipped, 96 - skipped), (96 + skipped, 96)] {
                let mut unpacked = vec![0xAA; len];
                prop_assert_eq!(unpack(&words, bits, &mut unpacked), expected);
                prop_assert_eq!(&unpacked[..expected], &codes[..expected]);
                prop_assert!(unpacked[expected..].iter().all(|code| *code == 0 || *code == 0xAA));
            }
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
