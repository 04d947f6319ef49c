//! A gradient through a packed weight needs that of the product, itself and a little more: the weight is never whole.

use candle_core::{DType, Device, Tensor, Var};
use candle_quant::{QuantFormat, QuantTensor};

#[path = "common/allocations.rs"]
mod allocations;
use allocations::{peak_of, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: usize = 1 << 20;

/// What a backward allocates at most.
fn peak_of_backward(weight: &QuantTensor, dims: &[usize], dtype: DType) -> usize {
    let x = Tensor::ones(dims, dtype, &Device::Cpu).unwrap();
    let x = Var::from_tensor(&x).unwrap();
    let y = weight.matmul(&x, None).unwrap().sum_all().unwrap();
    let (gradients, peak) = peak_of(|| y.backward().unwrap());
    assert_eq!(gradients.get(&x).expect("a gradient").dims(), dims);
    peak
}

/// In one test, for the allocator counts what all threads do.
#[test]
fn gradients_need_no_dense_weight() {
    let (n, k, m) = (4096, 4096, 32);
    // The dense weight would be 64 MiB.
    let random = |dims: &[usize]| Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap();
    for format in [QuantFormat::affine(4, 64).unwrap(), QuantFormat::MXFP4, QuantFormat::NVFP4] {
        let weight = QuantTensor::quantize(&random(&[n, k]), format).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            // The gradient of y, in order, and in tiles in f32; that of x, which candle adds to zeros: three times.
            let gradients = (2 * n + 3 * k) * m * 4;
            let peak = peak_of_backward(&weight, &[m, k], dtype);
            assert!(peak <= gradients + 4 * MIB, "{format} {dtype:?}: {peak}, {gradients} for gradients");
        }
    }
    // Of a stack every matrix by itself: dense, one would be 4 MiB, all would be 64.
    let (e, n, k, m) = (16, 1024, 1024, 8);
    let stack = QuantTensor::quantize(&random(&[e, n, k]), QuantFormat::affine(4, 64).unwrap()).unwrap();
    let gradients = e * (2 * n + 4 * k) * m * 4;
    let peak = peak_of_backward(&stack, &[e, m, k], DType::F32);
    assert!(peak <= gradients + 4 * MIB, "stack: {peak}, {gradients} for gradients");
}
