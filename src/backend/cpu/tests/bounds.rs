//! Nothing is read behind a weight: where its last byte is the last of a file, a byte more would be a bus error.

use super::super::dispatch::MAX_FEW;
use super::super::{isa, GroupValues, PackedMatrix, SuperBlockValues};
use super::weights::{Groups, Weight};
use super::{assert_same_bits, backward_with, dequantize_with, formats_for, matmul_with};
use memmap2::{Mmap, MmapOptions};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::io::Write;
use std::marker::PhantomData;
use std::ops::Deref;

/// A multiple of the page size of every system.
const PAGES: usize = 1 << 16;

/// A copy of numbers at the end of a file that is mapped with as many bytes behind it.
struct AtTheEnd<'a, T> {
    map: Mmap,
    len: usize,
    numbers: PhantomData<&'a [T]>,
}

impl<'a, T: Copy> AtTheEnd<'a, T> {
    fn new(numbers: &'a [T]) -> Self {
        let len = size_of_val(numbers);
        // SAFETY: plain numbers without padding.
        let bytes = unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast::<u8>(), len) };
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![0; PAGES - len]).unwrap();
        file.write_all(bytes).unwrap();
        // SAFETY: nobody else has the file.
        let map = unsafe { MmapOptions::new().len(2 * PAGES).map(&file) }.unwrap();
        Self { map, len: numbers.len(), numbers: PhantomData }
    }
}

impl<T> Deref for AtTheEnd<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let start = PAGES - self.len * size_of::<T>();
        // SAFETY: the copies that `new` wrote, aligned as the end of a page is.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(start).cast(), self.len) }
    }
}

/// Calls `check` with a view of the groups' copies.
fn with_copies(groups: &Groups, check: impl FnOnce(GroupValues)) {
    match groups {
        Groups::Byte(values) => check(GroupValues::Byte(&AtTheEnd::new(values))),
        Groups::F16(values) => check(GroupValues::F16(&AtTheEnd::new(values))),
        Groups::Bf16(values) => check(GroupValues::Bf16(&AtTheEnd::new(values))),
        Groups::F32(values) => check(GroupValues::F32(&AtTheEnd::new(values))),
    }
}

fn check(weight: &Weight, scales: GroupValues, biases: Option<GroupValues>, rng: &mut StdRng) {
    let words = AtTheEnd::new(&weight.words);
    let [of_scales, of_biases] = weight.super_blocks.each_ref().map(|numbers| AtTheEnd::new(numbers));
    let of = SuperBlockValues { scales: &of_scales, biases: &of_biases };
    let super_blocks = weight.view().super_blocks.map(|_| of);
    let copied = PackedMatrix { words: &words, scales, biases, super_blocks, ..weight.view() };
    for isa in isa::available() {
        for m in [1, 2, 8, MAX_FEW + 1] {
            let mut x: Vec<f32> = (0..m * weight.k).map(|_| rng.random_range(-1.0..1.0)).collect();
            // An outlier, which meets its weights by itself.
            x.iter_mut().skip(weight.k - 1).step_by(weight.k).for_each(|x| *x = 1e3);
            let multiply = |matrix| matmul_with::<f32>(isa, matrix, &x, None);
            let name = (isa.name(), weight.format, weight.n, weight.k, m);
            assert_same_bits(name, &multiply(&copied), &multiply(&weight.view()));
        }
        for m in [1, 5] {
            let dy: Vec<f32> = (0..m * weight.n).map(|_| rng.random_range(-1.0..1.0)).collect();
            let multiply = |matrix| backward_with::<f32>(isa, matrix, &dy);
            let name = (isa.name(), "backward", weight.format, weight.n, weight.k, m);
            assert_same_bits(name, &multiply(&copied), &multiply(&weight.view()));
        }
        let dequantized: Vec<f32> = dequantize_with(isa, &copied);
        assert_same_bits((isa.name(), weight.format), &dequantized, &weight.dequantized());
    }
}

#[test]
fn nothing_behind_a_weight_is_read() {
    let mut rng = StdRng::seed_from_u64(17);
    // Rows end with a whole block, or with every kind of incomplete one.
    for k in [32, 64, 96, 128, 160, 224, 1024, 1056, 1088] {
        for format in formats_for(k) {
            for n in [1, 3] {
                let weight = Weight::random(format, n, k, &mut rng);
                with_copies(&weight.scales, |scales| match &weight.biases {
                    Some(biases) => {
                        with_copies(biases, |biases| check(&weight, scales, Some(biases), &mut rng))
                    }
                    None => check(&weight, scales, None, &mut rng),
                });
            }
        }
    }
}
