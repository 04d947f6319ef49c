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

/// Calls a function for the width of codes that is known at run time: shifts are constant then.
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
    // Eight codes are whole bytes, the lowest first.
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
    let mut bytes = bytes.chunks_mut(BITS);
    let (eights, rest) = codes.as_chunks::<8>();
    for (eight, bytes) in eights.iter().zip(&mut bytes) {
        let closed = close::<BITS>(u64::from_le_bytes(*eight)).to_le_bytes();
        bytes.iter_mut().zip(closed).for_each(|(byte, closed)| *byte = closed);
    }
    let last = rest.iter().rev().fold(0, |eight, code| eight << 8 | u64::from(*code));
    let last = close::<BITS>(last).to_le_bytes();
    bytes.next().unwrap_or_default().iter_mut().zip(last).for_each(|(byte, closed)| *byte = closed);
}

/// As many ones at the lower end of every lane of this width.
const fn lower(ones: usize, lane: usize) -> u64 {
    let (mut all, mut at) = (0, 0);
    while at < 64 {
        all |= u64::MAX >> (64 - ones) << at;
        at += lane;
    }
    all
}

/// Eight codes, from one in every byte to one beside the other.
#[inline(always)]
fn close<const BITS: usize>(codes: u64) -> u64 {
    let (bytes, pairs, fours) = const { (lower(BITS, 16), lower(2 * BITS, 32), lower(4 * BITS, 64)) };
    let pair = codes & bytes | codes >> (8 - BITS) & bytes << BITS;
    let four = pair & pairs | pair >> (16 - 2 * BITS) & pairs << (2 * BITS);
    four & fours | four >> (32 - 4 * BITS) & fours << (4 * BITS)
}

/// The undoing of [`close`].
#[inline(always)]
fn open<const BITS: usize>(closed: u64) -> u64 {
    let (bytes, pairs, fours) = const { (lower(BITS, 16), lower(2 * BITS, 32), lower(4 * BITS, 64)) };
    let four = closed & fours | (closed & fours << (4 * BITS)) << (32 - 4 * BITS);
    let pair = four & pairs | (four & pairs << (2 * BITS)) << (16 - 2 * BITS);
    pair & bytes | (pair & bytes << BITS) << (8 - BITS)
}

/// Reads the first codes of a bit stream, as many as there are and `codes` takes; tells how many those are.
pub(crate) fn unpack(words: &[u32], bits: usize, codes: &mut [u8]) -> usize {
    for_width!(bits, unpack_all(words, codes))
}

fn unpack_all<const BITS: usize>(words: &[u32], codes: &mut [u8]) -> usize {
    let count = codes.len().min(words.len() * 32 / BITS);
    let (eights, rest) = codes.split_at_mut(count - count % 8);
    let bytes: &[u8] = bytemuck::cast_slice(words);
    for (eight, bytes) in eights.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks::<BITS>().0) {
        let mut closed = [0; 8];
        closed.iter_mut().zip(bytes).for_each(|(closed, byte)| *closed = *byte);
        *eight = open::<BITS>(u64::from_le_bytes(closed)).to_le_bytes();
    }
    for (index, code) in rest.iter_mut().enumerate() {
        *code = code_at(words, BITS, eights.len() + index).unwrap_or_default();
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
