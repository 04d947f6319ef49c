//! Codes of keys and values: those of the CPU, bit for bit, whichever launch makes them.

use super::device;
use super::reference::numbers;
use crate::backend::{attention, decode_attention, prefill_attention, AttentionOptions};
use crate::tensor::{DeviceRows, KvLayout, KvPlane, KV_BLOCK};
use crate::{DeviceKvCache, KvCache, KvCacheConfig, KvFormat};
use candle_core::{DType, Device, Tensor};

/// Tokens of a prompt, and behind it.
const TOKENS: (usize, usize) = (59, 3);

/// Sizes of heads, and seeds of rows whose rotation has other codes if its sums come in another order: the first of those from 1 on.
const ORDERED: [(usize, [u64; 2]); 5] =
    [(64, [4559, 8268]), (80, [6133, 15337]), (96, [18648, 27642]), (128, [4509, 4850]), (256, [920, 2155])];

/// Codes, and the bits of scales and biases, of one head of one token.
#[derive(Debug, PartialEq)]
struct Row {
    codes: Vec<u8>,
    groups: Vec<[u16; 2]>,
}

/// From a block of the CPU's cache.
fn row_on_cpu(plane: &KvPlane, layout: &KvLayout, head_dim: usize, token: usize, is_keys: bool) -> Row {
    let code = |element: usize| {
        let (row, column) = if is_keys { (element, token) } else { (token, element) };
        let row = &plane.codes()[row * layout.row_bytes..];
        match layout.format.bits() {
            8 => row[column],
            _ => row[column / 32 * 16 + column % 16] >> (column % 32 / 16 * 4) & 15,
        }
    };
    let (scales, biases) = plane.groups(layout);
    let group = |group: usize| [scales, biases].map(|all| all[group * KV_BLOCK + token].to_bits());
    Row { codes: (0..head_dim).map(code).collect(), groups: (0..layout.groups).map(group).collect() }
}

/// From the memory of a device.
fn row_on_device(memory: &[u8], rows: &DeviceRows, head: usize, token: usize, is_keys: bool) -> Row {
    let (offsets, part) = (rows.offsets(), usize::from(!is_keys));
    let (format, index) = (rows.formats[part], head * rows.capacity + token);
    let (row_bytes, groups) =
        (rows.head_dim * format.bits() / 8, rows.head_dim.div_ceil(format.group_size().unwrap()));
    let codes = &memory[offsets[part] + index * row_bytes..][..row_bytes];
    let code = |element: usize| match format.bits() {
        8 => codes[element],
        _ => {
            // Of a word's codes, the even ones come first.
            let bit = element % 2 * 16 + element % 8 / 2 * 4;
            codes[element / 8 * 4 + bit / 8] >> (bit % 8) & 15
        }
    };
    let pair = |group: usize| {
        let at = offsets[2 + part] + (index * groups + group) * 4;
        [at, at + 2].map(|at| u16::from_le_bytes([memory[at], memory[at + 1]]))
    };
    Row { codes: (0..rows.head_dim).map(code).collect(), groups: (0..groups).map(pair).collect() }
}

#[test]
fn codes_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    let formats = [KvFormat::Affine8, KvFormat::Affine4];
    let kinds = ORDERED.into_iter().flat_map(|of_size| {
        formats.iter().map(move |keys| (of_size, (*keys, formats[usize::from(*keys == formats[0])])))
    });
    for ((head_dim, seeds), (keys, values)) in kinds {
        // Sums of bf16 numbers do not depend on their order.
        let dtype = if keys == KvFormat::Affine8 { DType::BF16 } else { DType::F32 };
        let (batch, kv_heads) = (2, 3);
        let config = KvCacheConfig { keys, values, ..KvCacheConfig::new(kv_heads, head_dim) };
        let (mut cache, mut on_cpu) = (DeviceKvCache::new(config).unwrap(), KvCache::new(config).unwrap());
        let tokens = TOKENS.0 + TOKENS.1;
        let tensor = |seed| {
            let mut all = numbers(batch * tokens * kv_heads * head_dim, seed);
            // Outliers, and groups of one number.
            all.iter_mut().step_by(97).for_each(|x| *x *= 30.);
            all[..head_dim].fill(0.);
            all[head_dim..2 * head_dim].fill(-1.5);
            let rows = all[2 * head_dim..].chunks_exact_mut(head_dim);
            for (row, seed) in rows.zip(seeds) {
                row.copy_from_slice(&numbers(head_dim, seed));
            }
            let shape = (batch, tokens, kv_heads, head_dim);
            Tensor::from_vec(all, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
        };
        let (k, v) = (tensor(81), tensor(82));
        let options = AttentionOptions { scale: 0.1, ..Default::default() };
        let mut begin = 0;
        for tokens in std::iter::once(TOKENS.0).chain(std::iter::repeat_n(1, TOKENS.1)) {
            let [k, v] = [&k, &v].map(|rows| rows.narrow(1, begin, tokens).unwrap().contiguous().unwrap());
            attention(&k, &k, &v, &mut on_cpu, options).unwrap();
            let [k, v] = [k, v].map(|rows| rows.to_device(&device).unwrap());
            match tokens {
                1 => decode_attention(&k, &k, &v, &mut cache, options),
                _ => prefill_attention(&k, &k, &v, &mut cache, options),
            }
            .unwrap()
            .expect("a kernel");
            begin += tokens;
        }
        let (rows, _) = cache.room_on(&device, batch, 0, None).unwrap();
        let memory: Vec<u8> = rows.memory.to_vec1().unwrap();
        let (key_layout, value_layout) = on_cpu.layouts();
        for (sequence, kv_head) in
            (0..batch).flat_map(|sequence| (0..kv_heads).map(move |head| (sequence, head)))
        {
            let of_head = on_cpu.head(sequence, kv_head).unwrap();
            let block = of_head.block(0).unwrap();
            for token in 0..tokens {
                for (plane, layout, is_keys) in
                    [(&block.keys, key_layout, true), (&block.values, value_layout, false)]
                {
                    let expected = row_on_cpu(plane, layout, head_dim, token, is_keys);
                    let head = sequence * kv_heads + kv_head;
                    let found = row_on_device(&memory, &rows, head, token, is_keys);
                    assert_eq!(
                        found, expected,
                        "{keys} {values} {head_dim}: {sequence} {kv_head} {token} {is_keys}"
                    );
                }
            }
        }
        // Nothing behind the last token.
        let groups = row_on_device(&memory, &rows, 0, tokens, true).groups;
        assert!(groups.iter().all(|group| *group == [0, 0]));
    }
}
