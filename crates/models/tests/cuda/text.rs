//! Text that is generated on a device.

use crate::common::bundled;
use crate::device;
use candle_core::{DType, Device};
use candle_quant_models::generate::{generate, load_tokenizer, Params, Sampling};
use candle_quant_models::Model;
use std::ops::ControlFlow;

/// Greedy, and drawn with one seed, the prompt in chunks.
#[test]
fn the_text_of_the_bundled_model_is_that_of_the_cpu() {
    let Some(device) = device() else { return };
    let checkpoint = bundled("tiny");
    let tokenizer = load_tokenizer(&checkpoint).unwrap();
    let greedy = Params { sample_len: 24, sampling: Sampling::GREEDY, prefill_chunk: 3, ..Params::default() };
    let drawn = Params { seed: Some(1), sampling: Sampling::default(), ..greedy.clone() };
    let few = Sampling { top_k: Some(20), top_p: Some(0.8), min_p: Some(0.01), ..Sampling::default() };
    let few = Params { sampling: few, ..drawn.clone() };
    // From logits, on the host.
    let penalized = Sampling { repetition_penalty: 1.2, ..Sampling::default() };
    let penalized = Params { sampling: penalized, ..drawn.clone() };
    let [here, there] = [&Device::Cpu, &device].map(|device| {
        let mut model = Model::load(&checkpoint, DType::F32, device).unwrap();
        [&greedy, &drawn, &few, &penalized].map(|params| {
            let go_on = |_: &str| ControlFlow::Continue(());
            generate(&mut model, &tokenizer, "Once upon a time", params, go_on).unwrap().tokens
        })
    });
    assert_eq!(here[0].len(), 24);
    assert_ne!(here[0], here[1]);
    assert_eq!(there, here);
}
