//! Plans of weights whose columns have an order of their own: the numbers of the same weights in order. And what plans refuse.

use super::*;
use crate::backend::DeltaNetWeights;
use crate::nn::ReorderedTensor;
use crate::tensor::NO_COLUMN;
use crate::{DeltaNetConfig, KvCacheConfig, QuantFormat, QuantTensor};
use candle_core::DType;
use candle_nn::RmsNorm;

const HIDDEN: usize = 64;
const INNER: usize = 128;
const HEAD_DIM: usize = 16;

fn numbers_of(n: usize, k: usize, seed: usize) -> Tensor {
    let number = |at: usize| (((at * 37 + seed * 101) % 197) as f32 / 98. - 1.) * 0.3;
    Tensor::from_iter((0..n * k).map(number), &Device::Cpu).unwrap().reshape((n, k)).unwrap()
}

fn quantized(numbers: &Tensor) -> QuantTensor {
    QuantTensor::quantize(numbers, QuantFormat::affine(8, 32).unwrap()).unwrap()
}

/// Of each way a linear layer of the same numbers: in order; with the columns of each group turned around, and the groups, too;
/// and so with 32 columns behind that no input belongs to, which are not zeros.
fn layers(n: usize, k: usize, seed: usize, order: Order) -> Linear {
    let numbers = numbers_of(n, k, seed);
    let turned: Vec<u32> = (0..k as u32).rev().collect();
    let of_turned =
        || numbers.index_select(&Tensor::new(turned.as_slice(), &Device::Cpu).unwrap(), 1).unwrap();
    let columns = |more: usize| [turned.clone(), vec![NO_COLUMN; more]].concat();
    match order {
        Order::Same => Linear::new(quantized(&numbers), None),
        Order::Turned => {
            let reordered = ReorderedTensor::new(quantized(&of_turned()), &columns(0), k).unwrap();
            Linear::new(LayerWeight::from(reordered), None)
        }
        Order::Filled => {
            let filled = Tensor::cat(&[of_turned(), numbers_of(n, 32, seed + 1)], 1).unwrap();
            let reordered = ReorderedTensor::new(quantized(&filled), &columns(32), k).unwrap();
            Linear::new(LayerWeight::from(reordered), None)
        }
    }
}

#[derive(Clone, Copy)]
enum Order {
    Same,
    Turned,
    Filled,
}

/// The logits of all tokens.
fn logits(orders: [Order; 8], tokens: usize) -> Vec<f32> {
    let table = Embedding::from_quant(quantized(&numbers_of(40, HIDDEN, 1)), DType::F32).unwrap();
    let norm = RmsNorm::new(Tensor::ones(HIDDEN, DType::F32, &Device::Cpu).unwrap(), 1e-6);
    let mut plan = StepBuilder::new(&table, 1.).unwrap();
    let [q, k, v, o, gate, up, down, head] = orders;
    let (q, k) = (layers(HIDDEN, HIDDEN, 2, q), layers(32, HIDDEN, 3, k));
    let (v, o) = (layers(32, HIDDEN, 4, v), layers(HIDDEN, HIDDEN, 5, o));
    let block = AttentionBlock::new([&q, &k, &v, &o], HEAD_DIM);
    plan.attention(AttentionBlock { norm: Some((&norm).into()), ..block }).unwrap();
    let (gate, up) = (layers(INNER, HIDDEN, 6, gate), layers(INNER, HIDDEN, 7, up));
    let down = layers(HIDDEN, INNER, 8, down);
    plan.feed_forward(FeedForwardBlock::new(Some(&gate), &up, &down)).unwrap();
    let plan = plan.head(HeadBlock::new(&norm, &layers(40, HIDDEN, 9, head))).unwrap();
    let token = |position| StepToken { id: (position * 7 % 40) as u32, sequence: 0, position };
    let tokens: Vec<_> = (0..tokens).map(token).collect();
    let mut caches = [crate::KvCache::new(KvCacheConfig::new(2, HEAD_DIM)).unwrap()];
    let wanted: Vec<_> = (0..tokens.len()).collect();
    plan.run(&tokens, &mut caches, &wanted).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn columns_of_any_order_are_those_of_the_inputs() {
    use Order::{Filled, Same, Turned};
    for tokens in [1, 3, 70] {
        let expected = logits([Same; 8], tokens);
        let largest = expected.iter().fold(0f32, |largest, number| largest.max(number.abs()));
        assert!(largest > 0.1, "{largest}");
        for orders in [
            [Turned; 8],
            [Filled; 8],
            [Turned, Filled, Same, Turned, Same, Turned, Filled, Same],
            [Same, Turned, Turned, Filled, Filled, Turned, Same, Turned],
        ] {
            let found = logits(orders, tokens);
            let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(far <= 2e-5 * largest, "{tokens} tokens: {far} of {largest}");
        }
    }
}

#[test]
fn blocks_that_do_not_fit_are_refused() {
    let table = Embedding::from_quant(quantized(&numbers_of(40, HIDDEN, 1)), DType::F32).unwrap();
    let config = DeltaNetConfig { key_heads: 1, value_heads: 2, key_dim: 16, value_dim: 8, kernel: 4 };
    let of = |n, seed| layers(n, HIDDEN, seed, Order::Same);
    let (qkvz, ba, out) = (of(2 * 16 + 2 * 16, 2), of(4, 3), layers(HIDDEN, 32, 4, Order::Same));
    let numbers = |n, k| numbers_of(n, k, 5);
    let (convolution, of_heads) = (numbers(4, 48), numbers(1, 2).flatten_all().unwrap());
    let norm = numbers(1, 8).flatten_all().unwrap();
    let refused = |config, convolution: &Tensor, rates: &Tensor, ba: &Linear, expected: &str| {
        let weights = DeltaNetWeights { convolution, rates, gate_bias: &of_heads, norm: &norm, eps: 1e-6 };
        let projections = DeltaNetProjections::Grouped { qkvz: &qkvz, ba };
        let mut plan = StepBuilder::new(&table, 1.).unwrap();
        let error = plan.delta_net(DeltaNetBlock::new(config, projections, weights, &out)).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    // As files have it.
    let turned = convolution.t().unwrap();
    refused(config, &turned, &of_heads, &ba, "the convolution: expected [4, 48]");
    refused(config, &convolution, &norm, &ba, "rates: expected [2]");
    refused(config, &convolution, &of_heads, &of(6, 3), "4 outputs");
    refused(config, &convolution, &of_heads, &ba, "output of linear attention");
    refused(DeltaNetConfig { key_heads: 0, ..config }, &convolution, &of_heads, &ba, "linear attention");

    // Gates are no queries that could be cut.
    let (q, k, o) = (of(2 * HIDDEN, 6), of(32, 7), of(HIDDEN, 8));
    let block = AttentionBlock::new([&q, &k, &k, &o], HEAD_DIM);
    let mut plan = StepBuilder::new(&table, 1.).unwrap();
    let mut error = |block| plan.attention(block).unwrap_err().to_string();
    assert!(error(AttentionBlock { has_gate: true, clip: Some(1.), ..block }).contains("clip of queries"));
    let told = error(AttentionBlock { has_gate: true, head_dim: 48, ..block });
    assert!(told.contains("as many gates as queries"), "{told}");
    plan.attention(AttentionBlock { has_gate: true, ..block }).unwrap();
}
