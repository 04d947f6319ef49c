//! Weights whose groups run across rows, on a device as on the CPU.

use crate::device;
use crate::packed::{bits, flat, tensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_quant::format::Bits;
use candle_quant::nn::{ColumnScaledTensor, LayerWeight};
use candle_quant::{Linear, QuantFormat, QuantTensor};

const CLASSES: usize = 3;
const ROWS: usize = 8;
const K: usize = 90;
const FILLED: usize = 96;

/// Random codes, and scales and zeros of columns; of all rows but the first and the last.
fn weight(device: &Device, width: usize) -> ColumnScaledTensor {
    let format = QuantFormat::symmetric(width, 32).unwrap();
    let words = CLASSES * ROWS * FILLED * width / 32;
    let word = |at: usize| (at as u32).wrapping_mul(2_654_435_761).rotate_left(at as u32 % 31);
    let packed = Tensor::from_iter((0..words).map(word), device).unwrap();
    let packed = packed.reshape((CLASSES, ROWS, FILLED * width / 32)).unwrap();
    let ones = Tensor::ones((CLASSES, ROWS, FILLED / 32), DType::F32, device).unwrap();
    let codes = QuantTensor::new(format, packed, ones, None, None).unwrap();
    let numbers = |seed: u64, dtype: DType| {
        let numbers = (tensor(&[CLASSES, K], seed) * 0.1).unwrap();
        numbers.to_dtype(dtype).unwrap().to_device(device).unwrap()
    };
    let place = |row: usize| (row % CLASSES * ROWS + row / CLASSES) as u32;
    let places: Vec<u32> = (1..CLASSES * ROWS - 1).map(place).collect();
    ColumnScaledTensor::new(codes, numbers(40, DType::BF16), numbers(41, DType::F16), &places, ROWS).unwrap()
}

#[test]
fn groups_across_rows_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    for width in Bits::ALL.map(Bits::get) {
        let (there, here) = (weight(&device, width), weight(&Device::Cpu, width));
        let numbers = here.dequantize(DType::F32).unwrap();
        assert_eq!(bits(&there.dequantize(DType::F32).unwrap()), bits(&numbers));
        let ids = Tensor::new(&[5u32, 0, 21], &Device::Cpu).unwrap();
        let rows = there.embed(&ids.to_device(&device).unwrap(), DType::F32).unwrap();
        assert_eq!(bits(&rows), bits(&here.embed(&ids, DType::F32).unwrap()));
        let bias = tensor(&[CLASSES * ROWS - 2], 42);
        let layer = |weight: ColumnScaledTensor, device: &Device| {
            Linear::new(LayerWeight::from(weight), Some(bias.to_device(device).unwrap()))
        };
        let (there, here) = (layer(there, &device), layer(here, &Device::Cpu));
        for (m, dtype, bound) in
            [(1, DType::F32, 1e-5), (3, DType::BF16, 8e-3), (5, DType::F16, 1e-3), (40, DType::F32, 1e-5)]
        {
            let x = tensor(&[m, K], 43).to_dtype(dtype).unwrap();
            let found = there.forward(&x.to_device(&device).unwrap()).unwrap();
            assert_eq!(found.dtype(), dtype);
            let floats = |tensor: &Tensor| {
                flat(&tensor.to_dtype(DType::F32).unwrap().to_device(&Device::Cpu).unwrap())
            };
            let (found, expected) = (floats(&found), floats(&here.forward(&x).unwrap()));
            let largest = expected.iter().fold(0f32, |largest, number| largest.max(number.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() <= bound * largest,
                    "{width} {m} {dtype:?}: {found} {expected}"
                );
            }
        }
    }
}
