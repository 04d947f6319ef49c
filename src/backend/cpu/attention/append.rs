//! New keys and values: rounded or quantized, and put where the kernels read them.

use super::hadamard;
use super::parts::Rows;
use crate::format::{quantize_affine_group, Bits};
use crate::tensor::{KvCache, KvFormat, KvLayout, KvPlane, KV_BLOCK};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::ops::Range;

/// Puts the keys and values of one head, `[tokens][head_dim]` each, into the cache, from `position` of the sequence on.
/// Different heads may be appended to at the same time.
///
/// The cache has room for them, see `KvCache::extend`; what stands behind its end, or before its window, is dropped.
pub(crate) fn append(
    cache: &KvCache,
    sequence: usize,
    kv_head: usize,
    position: usize,
    k: &[f32],
    v: &[f32],
) {
    let dim = cache.config().head_dim;
    let tokens = (k.len() / dim).min(v.len() / dim);
    let rows = |values| Rows { values, stride: dim };
    append_rows(cache, (sequence, kv_head), position, (rows(k), rows(v)), (0..tokens, 0));
}

/// As [`append`], for `rows` of keys and values in which the head begins at element `start`.
pub(super) fn append_rows(
    cache: &KvCache,
    (sequence, kv_head): (usize, usize),
    position: usize,
    (k, v): (Rows, Rows),
    (rows, start): (Range<usize>, usize),
) {
    let (key_layout, value_layout) = cache.layouts();
    let dim = cache.config().head_dim;
    let Some(mut head) = cache.head_mut(sequence, kv_head) else { return };
    let mut row = Row { numbers: vec![0.; dim], halves: vec![0; dim], codes: vec![0; dim] };
    for (position, index) in (position..cache.len(sequence)).zip(rows) {
        let Some(block) = head.block_mut(position / KV_BLOCK, key_layout, value_layout) else { continue };
        let token = position % KV_BLOCK;
        for (plane, layout, numbers, is_keys) in
            [(&mut block.keys, key_layout, k, true), (&mut block.values, value_layout, v, false)]
        {
            row.numbers.fill(0.);
            let numbers = numbers.get(index, start..start + dim);
            row.numbers.iter_mut().zip(numbers).for_each(|(to, from)| *to = *from);
            row.put(plane, layout, token, is_keys);
        }
    }
}

/// Buffers for one head of one token.
struct Row {
    numbers: Vec<f32>,
    halves: Vec<u16>,
    codes: Vec<u8>,
}

impl Row {
    /// Puts the numbers of a token into its column of keys, or its row of values.
    fn put(&mut self, plane: &mut KvPlane, layout: &KvLayout, token: usize, is_keys: bool) {
        let (codes, scales, biases) = plane.parts_mut(layout);
        match layout.format {
            KvFormat::F32 => put(codes, layout, token, is_keys, &self.numbers),
            KvFormat::F16 => {
                let halves: &mut [f16] =
                    half::slice::HalfBitsSliceExt::reinterpret_cast_mut(&mut *self.halves);
                halves.convert_from_f32_slice(&self.numbers);
                put(codes, layout, token, is_keys, &self.halves);
            }
            KvFormat::Bf16 => {
                let halves: &mut [bf16] =
                    half::slice::HalfBitsSliceExt::reinterpret_cast_mut(&mut *self.halves);
                halves.convert_from_f32_slice(&self.numbers);
                put(codes, layout, token, is_keys, &self.halves);
            }
            KvFormat::Affine8 | KvFormat::Affine4 => {
                if layout.format.is_rotated() {
                    hadamard::rotate(&mut self.numbers);
                }
                self.quantize(layout.format, token, scales, biases);
                match layout.format.bits() {
                    8 => put(codes, layout, token, is_keys, &self.codes),
                    _ => put_nibbles(codes, layout, token, is_keys, &self.codes),
                }
            }
        }
    }

    /// Makes codes of the numbers; the scale and the bias of each group become those of the token.
    fn quantize(&mut self, format: KvFormat, token: usize, scales: &mut [f16], biases: &mut [f16]) {
        let bits = if format.bits() == 8 { Bits::Eight } else { Bits::Four };
        let size = format.group_size().unwrap_or(self.numbers.len());
        let groups = self.numbers.chunks(size).zip(self.codes.chunks_mut(size));
        let of_token = scales.iter_mut().zip(biases).skip(token).step_by(KV_BLOCK);
        for ((numbers, codes), (scale, bias)) in groups.zip(of_token) {
            let quantized = match numbers.iter().all(|number| number.is_finite()) {
                true => quantize_affine_group(bits, numbers, codes),
                // No code says so: the whole group becomes NaN.
                false => (f32::NAN, f32::NAN),
            };
            (*scale, *bias) = (f16::from_f32(quantized.0), f16::from_f32(quantized.1));
        }
    }
}

/// Puts words of one size, the numbers of a token, into a column or a row.
fn put<W: bytemuck::Pod>(plane: &mut [u8], layout: &KvLayout, token: usize, is_keys: bool, words: &[W]) {
    let plane: &mut [W] = bytemuck::cast_slice_mut(plane);
    let row_len = layout.row_bytes / size_of::<W>();
    match is_keys {
        true => {
            for (row, word) in plane.chunks_exact_mut(row_len).zip(words) {
                row.get_mut(token).into_iter().for_each(|place| *place = *word);
            }
        }
        false => {
            let row = plane.get_mut(token * row_len..).unwrap_or_default();
            row.iter_mut().zip(words).for_each(|(to, from)| *to = *from);
        }
    }
}

/// As [`put`], of 4-bit codes: code `i` of 32 is in byte `i % 16`, in its high half from 16 on.
fn put_nibbles(plane: &mut [u8], layout: &KvLayout, token: usize, is_keys: bool, codes: &[u8]) {
    let mut put = |row: usize, column: usize, code: u8| {
        let byte = plane.get_mut(row * layout.row_bytes + column / 32 * 16 + column % 16);
        if let Some(byte) = byte {
            let shift = column % 32 / 16 * 4;
            *byte = *byte & !(15 << shift) | code << shift;
        }
    };
    for (index, code) in codes.iter().enumerate() {
        match is_keys {
            true => put(index, token, *code),
            false => put(token, index, *code),
        }
    }
}
