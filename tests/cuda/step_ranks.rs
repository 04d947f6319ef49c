//! Step plans of which every rank has a part.
#![cfg(feature = "nccl")]

use crate::packed::{bits, flat, relative_error};
use crate::steps::{caches, id, plan};
use crate::{device, nth_device};
use candle_core::{DType, Device, Tensor};
use candle_quant::nn::Linear;
use candle_quant::ops::SampleOptions;
use candle_quant::parallel::{
    column_parallel, row_parallel, run, vocab_parallel_embedding, Launch, PartialSum, Rank, RowParallel,
};
use candle_quant::step::{
    AttentionBlock, BlockOutput, FeedForwardBlock, HeadBlock, StepBuilder, StepPlan, Turn,
};
use candle_quant::{rms_norm, Checkpoint, DeviceKvCache, KvCacheConfig, Result, VarBuilder};

const RANKS: usize = 2;
const SEQUENCES: usize = 3;

/// The output of a block, of which a rank has a part.
fn summed(layer: &RowParallel) -> (&Linear, BlockOutput<'_>) {
    let (linear, sum) = layer.part().unwrap();
    (linear, BlockOutput { sum, ..Default::default() })
}

/// A rank's part of [`plan`]: two of four query heads, one of two heads of keys, half of what is inside of blocks.
fn part(rank: &Rank, dtype: DType) -> Result<StepPlan> {
    let checkpoint = Checkpoint::open(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny"))?;
    let vb = VarBuilder::sharded(&checkpoint, rank, dtype).pp("model");
    let table = vocab_parallel_embedding(640, 256, vb.pp("embed_tokens"))?;
    let inverse_frequencies = (0..32).map(|pair| 10_000f32.powf(-(pair as f32) / 32.)).collect();
    let turn = Turn { inverse_frequencies, ..Turn::default() };
    let own = |size: usize| rank.index() * size / RANKS..(rank.index() + 1) * size / RANKS;
    let columns = |inputs, outputs, vb: VarBuilder| column_parallel(inputs, outputs, own(outputs), false, vb);
    let mut plan = StepBuilder::of_part(&table, 1.)?;
    for layer in 0..2 {
        let layer = vb.pp("layers").pp(layer);
        let (attn, mlp) = (layer.pp("self_attn"), layer.pp("mlp"));
        let [q, k, v] = [("q_proj", 256), ("k_proj", 128), ("v_proj", 128)]
            .map(|(name, rows)| columns(256, rows, attn.pp(name)).unwrap());
        let o = row_parallel(256, 256, own(256), false, attn.pp("o_proj"))?;
        let (o, out) = summed(&o);
        plan.attention(AttentionBlock {
            norm: Some((&rms_norm(256, 1e-6, layer.pp("input_layernorm"))?).into()),
            q_norm: Some((&rms_norm(64, 1e-6, attn.pp("q_norm"))?).into()),
            k_norm: Some((&rms_norm(64, 1e-6, attn.pp("k_norm"))?).into()),
            turn: Some(&turn),
            out,
            ..AttentionBlock::new([&q, &k, &v, o], 64)
        })?;
        let (gate, up) = (columns(256, 512, mlp.pp("gate_proj"))?, columns(256, 512, mlp.pp("up_proj"))?);
        let down = row_parallel(512, 256, own(512), false, mlp.pp("down_proj"))?;
        let (down, out) = summed(&down);
        plan.feed_forward(FeedForwardBlock {
            norm: Some((&rms_norm(256, 1e-6, layer.pp("post_attention_layernorm"))?).into()),
            out,
            ..FeedForwardBlock::new(Some(&gate), &up, down)
        })?;
    }
    let (norm, head) = (rms_norm(256, 1e-6, vb.pp("norm"))?, table.as_head());
    let (head, share) = head.part();
    plan.head(HeadBlock { share, ..HeadBlock::new(&norm, head) })
}

fn caches_of_part(dtype: DType) -> Vec<DeviceKvCache> {
    let of_whole = caches(dtype, usize::MAX);
    let config = |cache: &DeviceKvCache| KvCacheConfig { kv_heads: 1, ..*cache.config() };
    of_whole.iter().map(|cache| DeviceKvCache::new(config(cache)).unwrap()).collect()
}

fn ids(position: usize, device: &Device) -> Tensor {
    let ids: Vec<u32> = (0..SEQUENCES).map(|sequence| id(position, sequence)).collect();
    Tensor::new(ids, device).unwrap()
}

fn devices() -> Option<Vec<Device>> {
    (0..RANKS).map(nth_device).collect()
}

#[test]
fn parts_compute_what_the_whole_does() {
    let (Some(device), Some(devices)) = (device(), devices()) else { return };
    const STEPS: usize = 20;
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
        let (whole, _) = plan(&device, dtype);
        let (mut step, mut of_whole) =
            (whole.on_device(SEQUENCES, dtype).unwrap(), caches(dtype, usize::MAX));
        let expected: Vec<Vec<f32>> = (0..STEPS)
            .map(|position| flat(&step.run(&ids(position, &device), &mut of_whole).unwrap()))
            .collect();
        let of_ranks = run(&devices, move |rank| {
            let (part, mut caches) = (part(&rank, dtype)?, caches_of_part(dtype));
            let mut step = part.on_device(SEQUENCES, dtype)?;
            let mut all = Vec::new();
            for position in 0..STEPS {
                let ids = ids(position, rank.device());
                let logits = step.run(&ids, &mut caches)?;
                assert_eq!(step.is_captured(), position > 0, "position {position}");
                // Embedding and head and their exchanges; of a layer five launches, two sums, and what adds these.
                assert!(dtype == DType::F32 || step.launches() == Some(4 + 2 * 9), "{step:?}");
                if position % 8 == 3 {
                    assert!(caches.iter_mut().all(|cache| cache.truncate(position)));
                    let mut eager = part.on_device(SEQUENCES, dtype)?;
                    let one_by_one = eager.run(&ids, &mut caches)?;
                    assert!(!eager.is_captured() && bits(&one_by_one) == bits(&logits), "{position}");
                }
                all.push(flat(&logits));
            }
            let options = SampleOptions { temperature: 1., ..SampleOptions::GREEDY };
            let tokens = step.next(&[3, 4, 5], &mut caches, &options, 7, 0)?;
            Ok((all, tokens))
        });
        let of_ranks = of_ranks.unwrap();
        assert!(of_ranks.iter().all(|rank| *rank == of_ranks[0]), "ranks differ");
        for (position, (found, expected)) in of_ranks[0].0.iter().zip(&expected).enumerate() {
            let expected: Vec<f64> = expected.iter().map(|number| f64::from(*number)).collect();
            let error = relative_error(found, &expected);
            assert!(error < bound, "{dtype:?}, position {position}: {error:.2e}");
        }
    }
}

#[test]
fn parts_that_make_no_plan() {
    let Some(devices) = devices() else { return };
    // Through the memory of the host nothing is exchanged in a stream.
    let refused = |rank: Rank| Ok(part(&rank, DType::F32).unwrap_err().to_string());
    let cpus = vec![Device::Cpu; RANKS];
    for told in [Launch::default().through_host().run(&devices, refused), run(&cpus, refused)] {
        for told in told.unwrap() {
            assert!(told.contains("without NCCL is not supported; call the layers one by one"), "{told}");
        }
    }
    let told = run(&devices, |rank| {
        let checkpoint = Checkpoint::open(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny"))?;
        let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32).pp("model");
        let table = vocab_parallel_embedding(640, 256, vb.pp("embed_tokens"))?;
        let mlp = vb.pp("layers.0.mlp");
        let up = column_parallel(256, 512, 0..256, false, mlp.pp("up_proj"))?;
        let down = row_parallel(512, 256, 0..256, false, mlp.pp("down_proj"))?;
        let (down, out) = summed(&down);
        let bias = Tensor::ones(256, DType::F32, rank.device())?;
        let with_bias = Linear::new(down.weight().clone(), Some(bias.clone()));
        let block = FeedForwardBlock { out, ..FeedForwardBlock::new(None, &up, &with_bias) };
        let of_part = StepBuilder::of_part(&table, 1.)?.feed_forward(block).unwrap_err().to_string();
        let sum = Some(PartialSum { rank: &rank, bias: Some(&bias.narrow(0, 0, 7)?) });
        let out = BlockOutput { sum, ..out };
        let block = FeedForwardBlock { out, ..FeedForwardBlock::new(None, &up, down) };
        let of_sum = StepBuilder::of_part(&table, 1.)?.feed_forward(block).unwrap_err().to_string();
        // The whole table's rows are not those of a share of the head.
        let (table, share) = table.part();
        let norm = rms_norm(256, 1e-6, vb.pp("norm"))?;
        let narrow = Linear::new(Tensor::zeros((64, 256), DType::F32, rank.device())?, None);
        let head = StepBuilder::new(table, 1.)?.head(HeadBlock { share, ..HeadBlock::new(&norm, &narrow) });
        Ok([of_part, of_sum, head.unwrap_err().to_string()])
    });
    for told in told.unwrap() {
        for (told, expected) in told.iter().zip(["bias of down", "256 numbers", "320 outputs"]) {
            assert!(told.contains(expected), "{told}");
        }
    }
}
