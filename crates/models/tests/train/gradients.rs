//! Gradients of every family: those of one backward pass through everything, and those that the loss itself shows.

use crate::models::{ids, load, lora, texts, with_adapters, FAMILIES};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, D};
use candle_quant_models::train::{add_adapter, gradients, Sequence, Variable};
use candle_quant_models::Model;

/// The mean cross entropy of the tokens that count, in candle's operations.
fn loss(model: &Model, texts: &[Sequence]) -> Tensor {
    let logits = model.forward_whole(&ids(texts)).unwrap();
    let probabilities = candle_nn::ops::log_softmax(&logits, D::Minus1).unwrap();
    let (mut sum, mut count) = (Tensor::zeros((), DType::F32, &Device::Cpu).unwrap(), 0);
    for (row, text) in texts.iter().enumerate() {
        let counts: Vec<bool> = text.counts().collect();
        for (position, token) in text.tokens().iter().enumerate().filter(|(position, _)| counts[*position]) {
            let of_row = probabilities.get(row).unwrap().get(position - 1).unwrap();
            sum = (sum - of_row.get(*token as usize).unwrap()).unwrap();
            count += 1;
        }
    }
    (sum / count as f64).unwrap()
}

/// How far gradients are from others, relative to the largest of these.
fn difference(variables: &[Variable], found: &GradStore, expected: &GradStore) -> f32 {
    let max = |tensor: Tensor| tensor.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    let of = |store: &GradStore, variable: &Variable| {
        store.get(&variable.var).unwrap_or_else(|| panic!("{}: no gradient", variable.name)).clone()
    };
    let largest = variables.iter().map(|v| max(of(expected, v))).fold(0., f32::max);
    variables.iter().map(|v| max((of(found, v) - of(expected, v)).unwrap()) / largest).fold(0., f32::max)
}

#[test]
fn segments_give_the_gradients_of_one_pass() {
    let texts = texts(5, 14);
    for name in FAMILIES {
        let model = load(name);
        let variables = with_adapters(&model);
        let whole = loss(&model, &texts);
        let expected = whole.backward().unwrap();
        for (batch, layers) in [(5, 1), (2, 1), (5, 2), (1, 9)] {
            let found = gradients(&model, &variables, &texts, batch, layers).unwrap();
            assert_eq!(found.tokens, texts.iter().map(Sequence::counted).sum::<usize>());
            let of_loss = (found.loss - f64::from(whole.to_scalar::<f32>().unwrap())).abs();
            let of_gradients = difference(&variables, &found.store, &expected);
            assert!(of_loss < 1e-5, "{name}, {batch} texts: {of_loss}");
            assert!(of_gradients < 2e-5, "{name}, {batch} texts, {layers} layers: {of_gradients}");
        }
    }
}

/// Along the gradient, the loss rises by its length.
#[test]
fn the_loss_rises_along_the_gradient() {
    let texts = texts(3, 12);
    for name in FAMILIES {
        let model = load(name);
        let variables = with_adapters(&model);
        let found = gradients(&model, &variables, &texts, 3, 1).unwrap();
        let gradient = |variable: &Variable| found.store.get(&variable.var).unwrap().clone();
        let squares = variables.iter().map(|v| gradient(v).sqr().unwrap().sum_all().unwrap());
        let length = squares.map(|sum| f64::from(sum.to_scalar::<f32>().unwrap())).sum::<f64>().sqrt();
        let start: Vec<_> = variables.iter().map(|v| v.var.as_tensor().copy().unwrap().detach()).collect();
        let at = |distance: f64| -> f64 {
            for (variable, start) in variables.iter().zip(&start) {
                let moved = (start + (gradient(variable) * (distance / length)).unwrap()).unwrap();
                variable.var.set(&moved).unwrap();
            }
            gradients(&model, &variables, &texts, 3, 1).unwrap().loss
        };
        // So far that rounding does not matter, and so near that tokens choose the same experts.
        let h = 1e-3;
        let slope: f64 = (at(h) - at(-h)) / (2. * h);
        assert!((slope / length - 1.).abs() < 2e-3, "{name}: {slope} along a gradient of length {length}");
    }
}

#[test]
fn only_what_an_adapter_reaches_has_a_gradient() {
    let model = load("llama-untied-mxfp4");
    let texts = texts(2, 10);
    // The last layer alone, so that nothing below it is computed again; and the head.
    let variables = add_adapter(&model, "top", &lora(2), &["model.layers.1.mlp.*", "lm_head"], 1).unwrap();
    let names: Vec<_> = variables.iter().map(|variable| variable.name.as_str()).collect();
    assert_eq!(names.len(), 8);
    assert_eq!(names[..2], ["lm_head.lora_A", "lm_head.lora_B"]);
    let found = gradients(&model, &variables, &texts, 2, 1).unwrap();
    assert!(difference(&variables, &found.store, &loss(&model, &texts).backward().unwrap()) < 2e-5);
    // Without one that is switched on there is nothing to learn.
    model.adapters().set_active("top", false);
    let found = gradients(&model, &variables, &texts, 2, 1).unwrap();
    assert!(variables.iter().all(|variable| found.store.get(&variable.var).is_none()));
}
