//! Blocks of GGML's types as codes and scales, one block at a time.
//!
//! The layouts are those of ggml-common.h, the order of elements that of the `dequantize_row` functions in ggml-quants.c.

use half::f16;

/// Elements of the largest block.
pub(super) const MOST: usize = 256;

/// What is in a block. Only as many codes, steps and numbers are set as its type has.
pub(super) struct Unpacked {
    /// A code for each element.
    pub codes: [u8; MOST],
    /// For each group of a super-block an integer: its scale counts `scale`.
    pub steps: [u8; 16],
    /// The same for biases, which count `bias`.
    pub bias_steps: [u8; 16],
    pub scale: f32,
    pub bias: f32,
}

impl Unpacked {
    pub fn new() -> Self {
        Self { codes: [0; MOST], steps: [0; 16], bias_steps: [0; 16], scale: 0., bias: 0. }
    }
}

/// Reads a block, which has the bytes of its type, or stays as it is.
pub(super) type Unpack = fn(&[u8], &mut Unpacked);

pub(super) fn half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

/// Low nibbles of `bytes`, then high ones.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len().min(codes.len()));
    low.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte & 15);
    high.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> 4);
}

/// Adds the fifth bits of 32 codes.
fn fifth_bits(bits: [u8; 4], codes: &mut [u8]) {
    let bits = u32::from_le_bytes(bits);
    codes.iter_mut().enumerate().for_each(|(index, code)| *code |= ((bits >> index & 1) << 4) as u8);
}

/// An F16 scale, 16 bytes of nibbles: Q4_0 and IQ4_NL.
pub(super) fn q4_0(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], rest)) = block.split_first_chunk() else { return };
    to.scale = half([*a, *b]);
    nibbles(rest, &mut to.codes[..32]);
}

/// An F16 number, 16 bytes of bits that say whether it is added or taken away.
pub(super) fn q1_0(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], bits)) = block.split_first_chunk() else { return };
    let number = half([*a, *b]);
    (to.scale, to.bias) = (2. * number, -number);
    for (codes, bits) in to.codes.chunks_exact_mut(8).zip(bits) {
        codes.iter_mut().enumerate().for_each(|(index, code)| *code = bits >> index & 1);
    }
}

/// As Q4_0, with an F16 bias behind the scale.
pub(super) fn q4_1(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b, c, d], rest)) = block.split_first_chunk() else { return };
    (to.scale, to.bias) = (half([*a, *b]), half([*c, *d]));
    nibbles(rest, &mut to.codes[..32]);
}

/// As Q4_0, with 32 fifth bits behind the scale.
pub(super) fn q5_0(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b, bits @ ..], rest)) = block.split_first_chunk::<6>() else { return };
    to.scale = half([*a, *b]);
    nibbles(rest, &mut to.codes[..32]);
    fifth_bits(*bits, &mut to.codes[..32]);
}

/// As Q5_0, with an F16 bias behind the scale.
pub(super) fn q5_1(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b, c, d, bits @ ..], rest)) = block.split_first_chunk::<8>() else { return };
    (to.scale, to.bias) = (half([*a, *b]), half([*c, *d]));
    nibbles(rest, &mut to.codes[..32]);
    fifth_bits(*bits, &mut to.codes[..32]);
}

/// Signed bytes, as many as there are, with 128 added.
fn bytes(from: &[u8], codes: &mut [u8]) {
    codes.iter_mut().zip(from).for_each(|(code, byte)| *code = byte ^ 0x80);
}

/// An F16 scale, 32 signed bytes.
pub(super) fn q8_0(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b], rest)) = block.split_first_chunk() else { return };
    to.scale = half([*a, *b]);
    bytes(rest, &mut to.codes[..32]);
}

/// As Q8_0, with an F16 sum behind the scale, which says nothing of the weights.
pub(super) fn q8_1(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b, _, _], rest)) = block.split_first_chunk() else { return };
    to.scale = half([*a, *b]);
    bytes(rest, &mut to.codes[..32]);
}

/// An F32 scale, 256 signed bytes, sums.
pub(super) fn q8_k(block: &[u8], to: &mut Unpacked) {
    let Some((scale, rest)) = block.split_first_chunk() else { return };
    to.scale = f32::from_le_bytes(*scale);
    bytes(rest, &mut to.codes);
}

/// 16 scales (low) and biases (high), 64 bytes of two bits, the F16 numbers that they count.
pub(super) fn q2_k(block: &[u8], to: &mut Unpacked) {
    let Some((steps, rest)) = block.split_first_chunk::<16>() else { return };
    let Some((codes, [a, b, c, d])) = rest.split_first_chunk::<64>() else { return };
    to.steps = steps.map(|step| step & 15);
    to.bias_steps = steps.map(|step| step >> 4);
    (to.scale, to.bias) = (half([*a, *b]), -half([*c, *d]));
    two_bits(codes, &mut to.codes);
}

/// Four codes in a byte; those of one element each of four runs of 32.
fn two_bits(bytes: &[u8; 64], codes: &mut [u8; MOST]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
            codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> (2 * run) & 3);
        }
    }
}

/// 32 bytes of highest bits, 64 bytes of two bits, 12 bytes of scales of six bits, the F16 number that they count.
pub(super) fn q3_k(block: &[u8], to: &mut Unpacked) {
    let Some((highest, rest)) = block.split_first_chunk::<32>() else { return };
    let Some((codes, rest)) = rest.split_first_chunk::<64>() else { return };
    let Some((steps, [a, b])) = rest.split_first_chunk::<12>() else { return };
    to.scale = half([*a, *b]);
    two_bits(codes, &mut to.codes);
    for (run, codes) in to.codes.chunks_exact_mut(32).enumerate() {
        codes.iter_mut().zip(highest).for_each(|(code, bits)| *code |= (bits >> run & 1) << 2);
    }
    let (low, high) = steps.split_at(8);
    for (index, step) in to.steps.iter_mut().enumerate() {
        let low = low.get(index % 8).map_or(0, |byte| byte >> (index / 8 * 4) & 15);
        let high = high.get(index % 4).map_or(0, |byte| byte >> (index / 4 * 2) & 3);
        *step = (low | high << 4).wrapping_sub(32);
    }
}

/// Eight scales and biases of six bits in twelve bytes.
fn six_bits(bytes: &[u8; 12], to: &mut Unpacked) {
    let [a, b, c] = [0, 4, 8].map(|first| [0, 1, 2, 3].map(|index| bytes[first + index]));
    for index in 0..4 {
        to.steps[index] = a[index] & 63;
        to.bias_steps[index] = b[index] & 63;
        to.steps[index + 4] = c[index] & 15 | a[index] >> 6 << 4;
        to.bias_steps[index + 4] = c[index] >> 4 | b[index] >> 6 << 4;
    }
}

/// The F16 numbers that scales and biases count, and these.
fn head(block: &[u8], to: &mut Unpacked) -> Option<()> {
    let ([a, b, c, d], rest) = block.split_first_chunk()?;
    (to.scale, to.bias) = (half([*a, *b]), -half([*c, *d]));
    six_bits(rest.first_chunk()?, to);
    Some(())
}

/// Bytes of [`head`].
const HEAD: usize = 16;

/// Numbers and scales, 128 bytes of nibbles: those of 64 elements in 32 bytes.
pub(super) fn q4_k(block: &[u8], to: &mut Unpacked) {
    if head(block, to).is_some() {
        let codes = block.get(HEAD..).unwrap_or_default();
        codes.chunks(32).zip(to.codes.chunks_exact_mut(64)).for_each(|(bytes, codes)| nibbles(bytes, codes));
    }
}

/// As Q4_K, with 32 bytes of fifth bits before the nibbles.
pub(super) fn q5_k(block: &[u8], to: &mut Unpacked) {
    if head(block, to).is_none() {
        return;
    }
    let (fifth, codes) = block.get(HEAD..).and_then(|rest| rest.split_at_checked(32)).unwrap_or_default();
    codes.chunks(32).zip(to.codes.chunks_exact_mut(64)).for_each(|(bytes, codes)| nibbles(bytes, codes));
    for (run, codes) in to.codes.chunks_exact_mut(32).enumerate() {
        codes.iter_mut().zip(fifth).for_each(|(code, bits)| *code |= (bits >> run & 1) << 4);
    }
}

/// 128 bytes of nibbles, 64 bytes of two higher bits, 16 signed scales, the F16 number that they count.
pub(super) fn q6_k(block: &[u8], to: &mut Unpacked) {
    let Some((low, rest)) = block.split_first_chunk::<128>() else { return };
    let Some((high, rest)) = rest.split_first_chunk::<64>() else { return };
    let Some((steps, [a, b])) = rest.split_first_chunk::<16>() else { return };
    (to.steps, to.scale) = (*steps, half([*a, *b]));
    two_bits(high, &mut to.codes);
    for (low, codes) in low.chunks_exact(64).zip(to.codes.chunks_exact_mut(128)) {
        let mut of_nibbles = [0; 128];
        nibbles(low, &mut of_nibbles);
        codes.iter_mut().zip(of_nibbles).for_each(|(code, low)| *code = *code << 4 | low);
    }
}

/// The F16 number that scales count, two bytes of their higher bits, four of lower nibbles, 128 bytes of nibbles: those of
/// 32 elements in 16 bytes.
pub(super) fn iq4_xs(block: &[u8], to: &mut Unpacked) {
    let Some(([a, b, c, d, low @ ..], codes)) = block.split_first_chunk::<8>() else { return };
    to.scale = half([*a, *b]);
    let high = u16::from_le_bytes([*c, *d]);
    for (index, step) in to.steps.iter_mut().take(8).enumerate() {
        let low = low.get(index / 2).map_or(0, |byte| byte >> (index % 2 * 4) & 15);
        *step = (low | ((high >> (2 * index) & 3) as u8) << 4).wrapping_sub(32);
    }
    codes.chunks(16).zip(to.codes.chunks_exact_mut(32)).for_each(|(bytes, codes)| nibbles(bytes, codes));
}

/// 64 bytes of two bits, an F16 scale: -1, 0 and 1.
pub(super) fn tq2_0(block: &[u8], to: &mut Unpacked) {
    let Some((codes, [a, b])) = block.split_first_chunk::<64>() else { return };
    to.scale = half([*a, *b]);
    to.bias = -to.scale;
    two_bits(codes, &mut to.codes);
}

/// 48 bytes of five digits to the base of three, four of four, an F16 scale: -1, 0 and 1.
pub(super) fn tq1_0(block: &[u8], to: &mut Unpacked) {
    let Some((digits, [a, b])) = block.split_first_chunk::<52>() else { return };
    to.scale = half([*a, *b]);
    to.bias = -to.scale;
    let mut codes = to.codes.iter_mut();
    for (bytes, count) in [(0..32, 5), (32..48, 5), (48..52, 4)] {
        let bytes = digits.get(bytes).unwrap_or_default();
        for power in (0..count).map(|digit| 3u8.pow(digit)) {
            // A byte is a fraction of 256: its highest digit comes before the point when it is multiplied by three.
            let of = |byte: &u8| ((u16::from(byte.wrapping_mul(power)) * 3) >> 8) as u8;
            codes.by_ref().zip(bytes).for_each(|(code, byte)| *code = of(byte));
        }
    }
}
