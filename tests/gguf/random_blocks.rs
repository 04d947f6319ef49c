//! Blocks of GGML's types of random codes, under scales that make them weights of a model.

use crate::writer::{tensor, Tensor};
use half::f16;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

/// A number that a block counts by: where it stands, and how large it is if weights are to be about 0.06.
#[derive(Clone, Copy)]
enum Scale {
    F16(usize, f32),
    F32(usize, f32),
    /// The four nibbles of an F16 number, the highest of each of four words of 16 bits from there.
    Nibbles(usize, f32),
    /// This many bytes, each of this one or the next.
    Bytes(usize, u8),
}

/// The scales of a type. Everything else in a block may be any bytes.
fn scales(name: &str) -> Vec<Scale> {
    use Scale::{Bytes, Nibbles, F16, F32};
    match name {
        "Q4_0" => vec![F16(0, 0.013)],
        "Q4_1" => vec![F16(0, 0.013), F16(2, -0.1)],
        "Q5_0" => vec![F16(0, 0.0065)],
        "Q5_1" => vec![F16(0, 0.0065), F16(2, -0.1)],
        "Q8_0" | "Q8_1" => vec![F16(0, 0.0008)],
        "Q2_K" => vec![F16(80, 0.0043), F16(82, 0.0064)],
        "Q3_K" => vec![F16(108, 0.0014)],
        "Q4_K" => vec![F16(0, 0.00023), F16(2, 0.0018)],
        "Q5_K" => vec![F16(0, 0.00012), F16(2, 0.0018)],
        "Q6_K" => vec![F16(208, 4.4e-5)],
        "Q8_K" => vec![F32(0, 0.0008)],
        "IQ1_S" => vec![F16(0, 0.008)],
        "IQ1_M" => vec![Nibbles(48, 0.008)],
        "IQ2_XXS" | "IQ2_XS" | "IQ2_S" => vec![F16(0, 0.0009)],
        "IQ3_XXS" => vec![F16(0, 0.0004)],
        "IQ3_S" => vec![F16(0, 0.00035)],
        "IQ4_NL" => vec![F16(0, 0.0009)],
        "IQ4_XS" => vec![F16(0, 4.6e-5)],
        "TQ1_0" => vec![F16(52, 0.07)],
        "TQ2_0" => vec![F16(64, 0.07)],
        "Q1_0" => vec![F16(0, 0.06)],
        "MXFP4" => vec![Bytes(1, 120)],
        "NVFP4" => vec![Bytes(4, 12)],
        other => panic!("say which bytes of a block of {other} are its scales"),
    }
}

impl Scale {
    /// Each block has another one, so that none can stand for its neighbour.
    fn write(self, block: &mut [u8], random: &mut StdRng) {
        let factor = random.random_range(0.5..1.0);
        let half = |number: f32| f16::from_f32(number * factor).to_bits();
        match self {
            Self::F16(at, number) => block[at..at + 2].copy_from_slice(&half(number).to_le_bytes()),
            Self::F32(at, number) => block[at..at + 4].copy_from_slice(&(number * factor).to_le_bytes()),
            Self::Nibbles(at, number) => {
                for (index, word) in block[at..at + 8].chunks_exact_mut(2).enumerate() {
                    word[1] = word[1] & 15 | ((half(number) >> (4 * index) & 15) as u8) << 4;
                }
            }
            Self::Bytes(count, first) => {
                block[..count].fill_with(|| first + random.random_range(0..2));
            }
        }
    }
}

/// A matrix of random blocks. `of` is the type as `block_types` has it.
pub fn matrix(
    name: &str,
    dims: &[usize],
    of: (u32, &'static str, usize, usize),
    random: &mut StdRng,
) -> Tensor {
    let (type_id, type_name, elements, bytes) = of;
    let scales = scales(type_name);
    let mut blocks = vec![0; dims.iter().product::<usize>() / elements * bytes];
    random.fill_bytes(&mut blocks);
    for block in blocks.chunks_exact_mut(bytes) {
        scales.iter().for_each(|scale| scale.write(block, random));
    }
    let dims: Vec<_> = dims.iter().map(|dim| *dim as u64).collect();
    tensor(name, &dims, type_id, blocks)
}
