//! Blocks of GGML's types with grids (IQ1, IQ2 and IQ3) as codes and scales: each place in a grid becomes the codes of its
//! elements.
//!
//! The layouts are those of ggml-common.h, the order of elements that of the `dequantize_row` functions in ggml-quants.c.

use super::ggml_grids as grids;
use super::ggml_unpack::{half, Unpacked};

/// Eight elements of a pattern of two-bit magnitudes, and a bit for each that is set if it is negative.
fn eight(pattern: u16, signs: u8, codes: &mut [u8]) {
    for (index, code) in codes.iter_mut().take(8).enumerate() {
        *code = (pattern >> (2 * index) & 3) as u8 | (signs >> index & 1) << 2;
    }
}

/// The same of two patterns of four magnitudes each.
fn two_of_four(patterns: [u16; 2], signs: u8, codes: &mut [u8]) {
    for (index, code) in codes.iter_mut().take(8).enumerate() {
        let pattern = patterns[index / 4 % 2];
        *code = (pattern >> (4 * (index % 4)) & 7) as u8 | (signs >> index & 1) << 3;
    }
}

/// Signs of eight elements of which seven are stored: an even number of them is negative.
fn even(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// The nibble of this place in `bytes`, the low one of a byte first.
fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes.get(index / 2).map_or(0, |byte| byte >> (index % 2 * 4) & 15)
}

/// An odd number of units for each group, from a nibble each.
fn odd_steps(nibbles: &[u8], to: &mut Unpacked) {
    for (index, step) in to.steps.iter_mut().enumerate() {
        *step = 2 * nibble(nibbles, index) + 1;
    }
}

/// An F16 scale; for each 32 elements four bytes of places, and 28 bits of signs below four of a scale.
pub(super) fn iq2_xxs(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], groups)) = block.split_first_chunk() else { return };
    to.scale = half([*a, *b]);
    let groups = groups.as_chunks::<8>().0.iter().zip(to.codes.chunks_exact_mut(32)).zip(&mut to.steps);
    for (([places @ .., c, d, e, f], codes), step) in groups {
        let places: &[u8; 4] = places;
        let signs = u32::from_le_bytes([*c, *d, *e, *f]);
        *step = 2 * (signs >> 28) as u8 + 1;
        for (index, (place, codes)) in places.iter().zip(codes.chunks_exact_mut(8)).enumerate() {
            eight(grids::IQ2_XXS[usize::from(*place)], even(signs >> (7 * index)), codes);
        }
    }
}

/// An F16 scale, for each eight elements seven bits of signs above nine of a place, nibbles of scales.
pub(super) fn iq2_xs(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], rest)) = block.split_first_chunk() else { return };
    let Some((patterns, steps)) = rest.split_first_chunk::<64>() else { return };
    to.scale = half([*a, *b]);
    odd_steps(steps, to);
    for (bytes, codes) in patterns.as_chunks::<2>().0.iter().zip(to.codes.chunks_exact_mut(8)) {
        let word = u16::from_le_bytes(*bytes);
        eight(grids::IQ2_XS[usize::from(word & 511)], even(u32::from(word >> 9)), codes);
    }
}

/// An F16 scale, lower bits of places, signs, two higher bits of each place, nibbles of scales.
pub(super) fn iq2_s(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], rest)) = block.split_first_chunk() else { return };
    let Some((low, rest)) = rest.split_first_chunk::<32>() else { return };
    let Some((signs, rest)) = rest.split_first_chunk::<32>() else { return };
    let Some((high, steps)) = rest.split_first_chunk::<8>() else { return };
    to.scale = half([*a, *b]);
    odd_steps(steps, to);
    let eights = low.iter().zip(signs).zip(to.codes.chunks_exact_mut(8)).enumerate();
    for (index, ((low, signs), codes)) in eights {
        let high = high.get(index / 4).map_or(0, |bits| bits >> (index % 4 * 2) & 3);
        eight(grids::IQ2_S[usize::from(u16::from_le_bytes([*low, high]) & 1023)], *signs, codes);
    }
}

/// An F16 scale, a place for each four elements, for each 32 elements 28 bits of signs below four of a scale.
pub(super) fn iq3_xxs(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], rest)) = block.split_first_chunk() else { return };
    let Some((places, signs)) = rest.split_first_chunk::<64>() else { return };
    to.scale = half([*a, *b]);
    let groups = places.as_chunks::<8>().0.iter().zip(signs.as_chunks::<4>().0);
    for ((places, signs), (codes, step)) in groups.zip(to.codes.chunks_exact_mut(32).zip(&mut to.steps)) {
        let signs = u32::from_le_bytes(*signs);
        *step = 2 * (signs >> 28) as u8 + 1;
        let pairs = places.as_chunks::<2>().0.iter().zip(codes.chunks_exact_mut(8));
        for (index, (places, codes)) in pairs.enumerate() {
            let patterns = places.map(|place| grids::IQ3_XXS[usize::from(place)]);
            two_of_four(patterns, even(signs >> (7 * index)), codes);
        }
    }
}

/// An F16 scale, lower bits of a place for each four elements, the highest bit of each, signs, nibbles of scales.
pub(super) fn iq3_s(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], rest)) = block.split_first_chunk() else { return };
    let Some((low, rest)) = rest.split_first_chunk::<64>() else { return };
    let Some((high, rest)) = rest.split_first_chunk::<8>() else { return };
    let Some((signs, steps)) = rest.split_first_chunk::<32>() else { return };
    to.scale = half([*a, *b]);
    odd_steps(steps, to);
    let eights = low.as_chunks::<2>().0.iter().zip(signs).zip(to.codes.chunks_exact_mut(8)).enumerate();
    for (index, (([first, second], signs), codes)) in eights {
        let high = high.get(index / 4).map_or(0, |bits| bits >> (index % 4 * 2));
        let pattern =
            |low: u8, high: u8| grids::IQ3_S[usize::from(u16::from_le_bytes([low, high & 1]) & 511)];
        two_of_four([pattern(*first, high), pattern(*second, high >> 1)], *signs, codes);
    }
}

/// An F16 scale, lower bits of a place for each eight elements; for each 32 three higher bits of their four places, three of
/// a scale, and a bit that is set if an eighth is taken from the elements, not added.
pub(super) fn iq1_s(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], rest)) = block.split_first_chunk() else { return };
    let Some((low, high)) = rest.split_first_chunk::<32>() else { return };
    to.scale = half([*a, *b]);
    let groups = low.as_chunks::<4>().0.iter().zip(high.as_chunks::<2>().0);
    for ((low, high), (codes, step)) in groups.zip(to.codes.chunks_exact_mut(32).zip(&mut to.steps)) {
        let high = u16::from_le_bytes(*high);
        let (units, negative) = ((2 * (high >> 12 & 7) + 1) as u8, high >> 15 != 0);
        *step = if negative { units.wrapping_neg() } else { units };
        for (index, (low, codes)) in low.iter().zip(codes.chunks_exact_mut(8)).enumerate() {
            eighths(*low, (high >> (3 * index)) as u8, negative, codes);
        }
    }
}

/// Lower bits of a place for each eight elements; a nibble for each of three higher bits and one that is set if an eighth is
/// taken from the elements, not added; four words of four scales of three bits, and of a part of the F16 scale each.
pub(super) fn iq1_m(block: &[u8], to: &mut Unpacked) {
    let Some((low, rest)) = block.split_first_chunk::<32>() else { return };
    let Some((high, steps)) = rest.split_first_chunk::<16>() else { return };
    let mut scale = 0;
    let words = steps.as_chunks::<2>().0.iter().zip(to.steps.chunks_exact_mut(4));
    for (index, (word, steps)) in words.enumerate() {
        let word = u16::from_le_bytes(*word);
        scale |= word >> 12 << (4 * index);
        for (index, step) in steps.iter_mut().enumerate() {
            *step = (2 * (word >> (3 * index) & 7) + 1) as u8;
        }
    }
    to.scale = half(scale.to_le_bytes());
    for (index, (low, codes)) in low.iter().zip(to.codes.chunks_exact_mut(8)).enumerate() {
        let high = nibble(high, index);
        let negative = high & 8 != 0;
        eighths(*low, high, negative, codes);
        // Groups do not share the sign.
        codes.iter_mut().for_each(|code| *code |= u8::from(negative) << 2);
    }
}

/// Codes of eight elements -1, 0 and 1 with an eighth added; if it is taken away, of their negatives.
fn eighths(low: u8, high: u8, negative: bool, codes: &mut [u8]) {
    let pattern = grids::IQ1[usize::from(u16::from_le_bytes([low, high & 7]) & 2047)];
    eight(pattern, 0, codes);
    if negative {
        codes.iter_mut().for_each(|code| *code = 2 - (*code).min(2));
    }
}
