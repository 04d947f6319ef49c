//! Weights whose columns are not in the order of x: x is brought into it on the device.

use crate::device;
use crate::expected::Expected;
use crate::packed::{bits, flat, random, tensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::nn::{self, ReorderedTensor};
use candle_quant::{Linear, QuantFormat, QuantTensor};

const K: usize = 128;

/// Columns in an order of their own, 32 of them without an element of x.
fn order(seed: usize) -> Vec<u32> {
    let column = |place: usize| match place % 5 {
        4 => u32::MAX,
        _ => ((place / 5 * 4 + place % 5) * (2 * seed + 3) % K) as u32,
    };
    (0..K / 4 * 5).map(column).collect()
}

struct Layer {
    packed: QuantTensor,
    columns: Vec<u32>,
    there: Linear,
}

impl Layer {
    fn new(device: &Device, n: usize, seed: usize) -> Self {
        let format = QuantFormat::affine(4, 32).unwrap();
        let columns = order(seed);
        let packed = random(&[n, columns.len()], format, DType::F16, 900 + n as u64);
        let reordered = ReorderedTensor::new(packed.to_device(device).unwrap(), &columns, K).unwrap();
        Self { packed, columns, there: Linear::new(reordered, None) }
    }

    /// Elements of x in the order of the columns.
    fn gathered(&self, x: &Tensor) -> Tensor {
        let (rows, dtype) = (x.dim(0).unwrap(), x.dtype());
        let numbers: Vec<Vec<f32>> = x.to_dtype(DType::F32).unwrap().to_vec2().unwrap();
        let of_row = |row: &Vec<f32>| -> Vec<f32> {
            self.columns.iter().map(|column| row.get(*column as usize).copied().unwrap_or(0.)).collect()
        };
        let gathered: Vec<f32> = numbers.iter().flat_map(of_row).collect();
        Tensor::from_vec(gathered, (rows, self.columns.len()), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn check(&self, product: &Tensor, x: &Tensor, what: &str) {
        Expected::new(&self.packed, &self.gathered(x), None).check(product, x.dtype(), what);
    }
}

#[test]
fn columns_read_their_elements() {
    let Some(device) = device() else { return };
    let [q, k, other] = [(130, 0), (24, 0), (40, 1)].map(|(n, seed)| Layer::new(&device, n, seed));
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for m in [1, 3, 40] {
            let x = tensor(&[m, K], 901).to_dtype(dtype).unwrap();
            let there = x.to_device(&device).unwrap();
            for layers in [[&q, &k], [&q, &other]] {
                let products = nn::forward_all(layers.map(|layer| &layer.there), &there).unwrap();
                for (layer, product) in layers.iter().zip(&products) {
                    layer.check(product, &x, &format!("{dtype:?} M={m}"));
                }
            }
        }
    }
}

#[test]
fn numbers_are_in_the_order_of_x() {
    let Some(device) = device() else { return };
    let layer = Layer::new(&device, 24, 2);
    let reordered =
        ReorderedTensor::new(layer.packed.to_device(&device).unwrap(), &layer.columns, K).unwrap();
    let here = ReorderedTensor::new(layer.packed.clone(), &layer.columns, K).unwrap();
    let numbers = layer.packed.dequantize(DType::F32).unwrap();
    let packed = flat(&numbers);
    let mut expected = vec![0f32; 24 * K];
    for (place, number) in packed.iter().enumerate() {
        let (row, place) = (place / layer.columns.len(), place % layer.columns.len());
        if let Some(to) = expected[row * K..][..K].get_mut(layer.columns[place] as usize) {
            *to = *number;
        }
    }
    for weight in [&reordered, &here] {
        let found = weight.dequantize(DType::F32).unwrap().to_device(&Device::Cpu).unwrap();
        assert_eq!(flat(&found), expected);
    }
    let ids = Tensor::new(&[5u32, 0, 23], &Device::Cpu).unwrap();
    let rows = reordered.embed(&ids.to_device(&device).unwrap(), DType::F32).unwrap();
    assert_eq!(bits(&rows), bits(&here.embed(&ids, DType::F32).unwrap()));
}
