//! How codes and scales of the K types lie in a block (ggml-common.h, ggml-quants.c).

use super::ggml::SUPER_BLOCK;
use super::ggml_blocks::{append_half, halves};

/// Codes of 256 elements, each in a byte of its own.
pub(super) type Codes = [u8; SUPER_BLOCK];

/// Sixteen scales and biases at most, those that a type has first.
pub(super) type Steps = [(u8, u8); 16];

/// Two bits of each code from bit `shift` on: of 128 elements, four that lie 32 apart share a byte.
fn quarters(codes: &Codes, shift: u32, blocks: &mut Vec<u8>) {
    for codes in codes.chunks_exact(128) {
        let run = |run: usize, index: usize| codes.get(32 * run + index).map_or(0, |code| code >> shift & 3);
        let four = |index| run(0, index) | run(1, index) << 2 | run(2, index) << 4 | run(3, index) << 6;
        blocks.extend((0..32).map(four));
    }
}

/// One bit of each code, `bit`: eight elements that lie 32 apart share a byte.
fn eighths(codes: &Codes, bit: u32, blocks: &mut Vec<u8>) {
    let of_byte = |index: usize| {
        let runs = codes.iter().skip(index).step_by(32).enumerate();
        runs.fold(0, |byte, (run, code)| byte | (code >> bit & 1) << run)
    };
    blocks.extend((0..32).map(of_byte));
}

/// Scales and biases of six bits in twelve bytes: the higher bits of the last four are beside the first four.
fn six_bits(steps: &Steps, blocks: &mut Vec<u8>) {
    let [a, b, c, d, e, f, g, h, ..] = *steps;
    let groups = [(a, e), (b, f), (c, g), (d, h)];
    blocks.extend(groups.iter().map(|(first, second)| first.0 | second.0 >> 4 << 6));
    blocks.extend(groups.iter().map(|(first, second)| first.1 | second.1 >> 4 << 6));
    blocks.extend(groups.iter().map(|(_, second)| second.0 & 15 | second.1 << 4));
}

/// The lower four bits of codes, of each `run` elements those of its first half beside those of its second.
fn nibbles(codes: &Codes, run: usize, blocks: &mut Vec<u8>) {
    let low = codes.map(|code| code & 15);
    low.chunks_exact(run).for_each(|codes| halves(codes, blocks));
}

pub(super) fn q2_k(numbers: (f32, f32), steps: &Steps, codes: &Codes, blocks: &mut Vec<u8>) {
    blocks.extend(steps.iter().map(|(scale, bias)| scale | bias << 4));
    quarters(codes, 0, blocks);
    append_half(numbers.0, blocks);
    append_half(numbers.1, blocks);
}

pub(super) fn q4_k(numbers: (f32, f32), steps: &Steps, codes: &Codes, blocks: &mut Vec<u8>) {
    append_half(numbers.0, blocks);
    append_half(numbers.1, blocks);
    six_bits(steps, blocks);
    nibbles(codes, 64, blocks);
}

pub(super) fn q5_k(numbers: (f32, f32), steps: &Steps, codes: &Codes, blocks: &mut Vec<u8>) {
    append_half(numbers.0, blocks);
    append_half(numbers.1, blocks);
    six_bits(steps, blocks);
    eighths(codes, 4, blocks);
    nibbles(codes, 64, blocks);
}

pub(super) fn q3_k(number: f32, steps: &[i8; 16], codes: &Codes, blocks: &mut Vec<u8>) {
    eighths(codes, 2, blocks);
    quarters(codes, 0, blocks);
    // Scales of six bits, counted from -32 on: the lower four of two share a byte, the higher two of four.
    let stored = steps.map(|step| step.wrapping_add(32).cast_unsigned());
    let (first, second) = stored.split_at(8);
    blocks.extend(first.iter().zip(second).map(|(first, second)| first & 15 | second << 4));
    let [a, b, c, d] = [0, 1, 2, 3].map(|index| {
        let runs = stored.iter().skip(index).step_by(4).enumerate();
        runs.fold(0, |byte, (run, step)| byte | step >> 4 << (2 * run))
    });
    blocks.extend([a, b, c, d]);
    append_half(number, blocks);
}

pub(super) fn q6_k(number: f32, steps: &[i8; 16], codes: &Codes, blocks: &mut Vec<u8>) {
    nibbles(codes, 128, blocks);
    quarters(codes, 4, blocks);
    blocks.extend(steps.map(i8::cast_unsigned));
    append_half(number, blocks);
}
