//! Random packed weights of every format.

use super::super::{GroupValues, PackedMatrix, SuperBlockValues};
use crate::format::{Element, QuantFormat, Scale, SUPER_BLOCK};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::RngExt;

/// Scales (and biases) of a test weight, owned.
pub(super) enum Groups {
    Byte(Vec<u8>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
}

impl Groups {
    /// Floats in one of the three dtypes.
    pub(super) fn of(values: Vec<f32>, turn: usize) -> Self {
        match turn % 3 {
            0 => Self::F16(values.into_iter().map(f16::from_f32).collect()),
            1 => Self::Bf16(values.into_iter().map(bf16::from_f32).collect()),
            _ => Self::F32(values),
        }
    }

    /// Replaces one of floats.
    pub(super) fn set(&mut self, index: usize, value: f32) {
        match self {
            Self::Byte(_) => panic!("bytes are no floats"),
            Self::F16(values) => values[index] = f16::from_f32(value),
            Self::Bf16(values) => values[index] = bf16::from_f32(value),
            Self::F32(values) => values[index] = value,
        }
    }

    pub(super) fn view(&self) -> GroupValues<'_> {
        match self {
            Self::Byte(values) => GroupValues::Byte(values),
            Self::F16(values) => GroupValues::F16(values),
            Self::Bf16(values) => GroupValues::Bf16(values),
            Self::F32(values) => GroupValues::F32(values),
        }
    }
}

/// A packed weight, owned.
pub(super) struct Weight {
    pub(super) format: QuantFormat,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) words: Vec<u32>,
    pub(super) scales: Groups,
    pub(super) biases: Option<Groups>,
    pub(super) global_scale: f32,
    /// Of scales and biases; empty where the format has none.
    pub(super) super_blocks: [Vec<f16>; 2],
}

impl Weight {
    pub(super) fn view(&self) -> PackedMatrix<'_> {
        PackedMatrix {
            format: self.format,
            rows: self.n,
            k: self.k,
            words: &self.words,
            scales: self.scales.view(),
            biases: self.biases.as_ref().map(Groups::view),
            global_scale: self.global_scale,
            super_blocks: self.super_blocks(),
        }
    }

    fn super_blocks(&self) -> Option<SuperBlockValues<'_>> {
        let [scales, biases] = &self.super_blocks;
        (self.format.scale() == Scale::SuperBlock).then_some(SuperBlockValues { scales, biases })
    }

    /// Random codes (every code occurs) under random scales.
    pub(super) fn random(format: QuantFormat, n: usize, k: usize, rng: &mut StdRng) -> Self {
        let groups = n * k / format.group_size();
        let words = (0..n * k * format.bits() / 32).map(|_| rng.random()).collect();
        let floats = |low: f32, rng: &mut StdRng| -> Vec<f32> {
            (0..groups).map(|_| rng.random_range(low..0.02)).collect()
        };
        // Dtypes of scales and biases take turns over the shapes.
        let turn = n + k / 32;
        let stored = |values| Groups::of(values, turn);
        let (scales, biases) = match format.scale() {
            Scale::Float if !format.has_biases() => (stored(floats(-0.02, rng)), None),
            Scale::Float => {
                let (scales, biases) = (floats(-0.02, rng), floats(-0.1, rng));
                (stored(scales), Some(stored(biases)))
            }
            Scale::E4m3 => {
                // Signed, with subnormals, without NaN.
                let byte = |rng: &mut StdRng| rng.random_range(0..0x70u8) | (rng.random::<u8>() & 0x80);
                (Groups::Byte((0..groups).map(|_| byte(rng)).collect()), None)
            }
            Scale::E8m0 => (Groups::Byte((0..groups).map(|_| rng.random_range(115..125)).collect()), None),
            Scale::SuperBlock => {
                let bytes = |rng: &mut StdRng| Groups::Byte((0..groups).map(|_| rng.random()).collect());
                let scales = bytes(rng);
                (scales, format.has_biases().then(|| bytes(rng)))
            }
        };
        let super_blocks = match format.scale() {
            Scale::SuperBlock => [0.0002, 0.001].map(|most| {
                (0..n * k / SUPER_BLOCK).map(|_| f16::from_f32(rng.random_range(-most..most))).collect()
            }),
            Scale::Float | Scale::E8m0 | Scale::E4m3 => Default::default(),
        };
        let global_scale = match format.scale() {
            Scale::E8m0 | Scale::E4m3 => 0.37,
            Scale::Float | Scale::SuperBlock => 1.0,
        };
        let mut weight = Self { format, n, k, words, scales, biases, global_scale, super_blocks };
        if format.element() == Element::E4m3 {
            // Zeros and subnormals, which kernels look for, are everywhere, here and there, or nowhere.
            weight.replace_rare_codes([1., 0.002, 0.][turn % 3], rng);
        }
        weight
    }

    /// E4M3 codes that stand for NaN are tested by themselves; of zeros and subnormals a share is kept.
    fn replace_rare_codes(&mut self, kept: f64, rng: &mut StdRng) {
        for word in &mut self.words {
            let bytes = word.to_le_bytes().map(|byte| match byte & 0x7F {
                0x7F => byte ^ 1,
                0..8 if !rng.random_bool(kept) => byte ^ 0x40,
                _ => byte,
            });
            *word = u32::from_le_bytes(bytes);
        }
    }

    /// The scalar reference.
    pub(super) fn dequantized(&self) -> Vec<f32> {
        let mut all = vec![0.0; self.n * self.k];
        for (row, out) in all.chunks_exact_mut(self.k).enumerate() {
            self.view().dequantize_row(row, out);
        }
        all
    }
}
