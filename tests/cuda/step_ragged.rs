//! Steps of sequences of different lengths, of which some have no token.

use crate::device;
use crate::gpu::captures;
use crate::packed::{bits, flat, relative_error, tensor};
use crate::steps::{caches, id, kv_format, on_cpu, plan};
use candle_core::{DType, Device, Tensor};
use candle_quant::ops::{decode_attention, prefill_attention, AttentionOptions, SampleOptions};
use candle_quant::step::StepToken;
use candle_quant::{DeviceKvCache, KvCacheConfig, KvFormat};

const SEQUENCES: usize = 4;

/// In which steps which sequences take part: one begins late, one pauses, one ends.
fn takes_part(step: usize, sequence: usize) -> bool {
    match sequence {
        0 => true,
        1 => step >= 3,
        2 => !(2..50).contains(&step),
        _ => step < 30,
    }
}

#[test]
fn each_sequence_has_the_logits_that_it_has_alone() {
    let Some(device) = device() else { return };
    let _captures = captures();
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::BF16, 5e-2)] {
        let (plan, _) = plan(&device, dtype);
        let mut cached = caches(dtype, usize::MAX);
        let [mut step, mut eager] = [(); 2].map(|()| plan.on_device(SEQUENCES, dtype).unwrap());
        let (cpu, mut cached_on_cpu) = on_cpu();
        let mut lens = [0; SEQUENCES];
        for number in 0..56 {
            let active: Vec<_> = (0..SEQUENCES).map(|sequence| takes_part(number, sequence)).collect();
            let ids: Vec<_> = (0..SEQUENCES).map(|sequence| id(lens[sequence], sequence)).collect();
            let there = Tensor::new(ids.as_slice(), &device).unwrap();
            let logits = step.run_some(&there, &active, &mut cached).unwrap();
            let taking: Vec<_> = (0..SEQUENCES).filter(|sequence| active[*sequence]).collect();
            let tokens: Vec<_> = taking
                .iter()
                .map(|&sequence| StepToken { id: ids[sequence], sequence, position: lens[sequence] })
                .collect();
            let wanted: Vec<_> = (0..tokens.len()).collect();
            let expected = cpu.run(&tokens, &mut cached_on_cpu, &wanted).unwrap();
            for (row, &sequence) in taking.iter().enumerate() {
                let expected = flat(&expected.get(row).unwrap());
                let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
                let found = logits.get(sequence).unwrap();
                let error = relative_error(&flat(&found), &expected);
                assert!(error < limit, "{dtype:?}, step {number}, sequence {sequence}: {error:.2e}");
                lens[sequence] += 1;
            }
            assert!(cached.iter().all(|cache| cache.lens() == lens));
            if number == 54 {
                // The graph and launches one by one, and what nothing was appended to.
                assert!(step.is_captured());
                let (before, rows) = (lens, |cache: &DeviceKvCache| format!("{cache:?}"));
                for cache in &mut cached {
                    let mut sequences = taking.iter();
                    assert!(sequences.all(|&sequence| cache.truncate_sequence(sequence, lens[sequence] - 1)));
                }
                let again = eager.run_some(&there, &active, &mut cached).unwrap();
                for &sequence in &taking {
                    let [a, b] = [&again, &logits].map(|logits| bits(&logits.get(sequence).unwrap()));
                    assert!(a == b, "{dtype:?}, sequence {sequence}");
                }
                assert!(cached.iter().all(|cache| cache.lens() == before), "{}", rows(&cached[0]));
            }
        }
    }
}

/// Tokens of a prompt of one sequence beside others, and then steps, as a server does.
#[test]
fn prompts_are_put_into_one_sequence() {
    let Some(device) = device() else { return };
    let _captures = captures();
    let (plan, _) = plan(&device, DType::F32);
    let config = KvCacheConfig { keys: KvFormat::F32, values: KvFormat::F32, ..KvCacheConfig::new(2, 64) };
    let prompt = |tokens: usize, seed: u64| {
        [seed, seed + 1].map(|seed| tensor(&[1, tokens, 2, 64], seed).to_device(&device).unwrap())
    };
    let of = |prompts: &[(usize, usize, u64)], sequences: usize| {
        let mut cached = [(); 2].map(|()| DeviceKvCache::of_sequences(config, sequences).unwrap());
        for (index, &(sequence, tokens, seed)) in prompts.iter().enumerate() {
            for cache in &mut cached {
                let [k, v] = prompt(tokens, seed);
                let [keys, _] = cache.append_to(sequence, &k, &v).unwrap();
                assert_eq!(keys.dims()[2], cache.lens()[sequence], "{index}");
            }
        }
        cached
    };
    let options = SampleOptions::GREEDY;
    let mut together = of(&[(0, 5, 1), (2, 300, 3), (0, 12, 7)], 3);
    assert_eq!(together[0].lens(), [17, 0, 300]);
    let mut step = plan.on_device(3, DType::F32).unwrap();
    let mut ids = [Some(3), None, Some(4)];
    let mut drawn = Vec::new();
    for number in 0..4 {
        let next = step.next_some(&ids, &mut together, &options, 1, number).unwrap();
        assert!(next.iter().zip(&ids).all(|(token, id)| token.is_some() == id.is_some()));
        drawn.push(next.clone());
        ids = [next[0], next[1].or((number == 1).then_some(9)), next[2]];
    }
    for (sequence, prompts, first) in
        [(0, vec![(0, 5, 1), (0, 12, 7)], 3), (2, vec![(0, 300, 3)], 4), (1, vec![], 9)]
    {
        let (mut alone, mut step) = (of(&prompts, 1), plan.on_device(1, DType::F32).unwrap());
        let tokens: Vec<_> = drawn.iter().filter_map(|tokens| tokens[sequence]).collect();
        let mut id = first;
        for (number, token) in tokens.iter().enumerate() {
            let next = step.next(&[id], &mut alone, &options, 1, number as u64).unwrap();
            assert_eq!(next, [*token], "sequence {sequence}");
            id = *token;
        }
        assert!(tokens.len() == if sequence == 1 { 2 } else { 4 });
    }
    let told =
        |ids: &[Option<u32>], step: &mut candle_quant::step::DeviceStep, cached: &mut [DeviceKvCache]| {
            step.next_some(ids, cached, &options, 1, 0).unwrap_err().to_string()
        };
    assert!(told(&[None; 3], &mut step, &mut together).contains("0 for 3"));
    assert!(told(&[Some(1); 2], &mut step, &mut together).contains("expected 3"));
    let [k, v] = prompt(2, 1);
    let error = together[0].append_to(3, &k, &v).unwrap_err().to_string();
    assert!(error.contains("one below 3"), "{error}");
    let both = Tensor::cat(&[&k, &k, &k], 0).unwrap();
    let error = together[0].append(&both, &both).unwrap_err().to_string();
    assert!(error.contains("append_to"), "{error}");
    // A full sequence that has no token in steps does not keep graphs from being reused.
    let mut full = of(&[(0, 256, 1), (1, 3, 3)], 2);
    let mut two = plan.on_device(2, DType::F32).unwrap();
    for number in 0..4 {
        two.next_some(&[None, Some(7)], &mut full, &options, 1, number).unwrap();
        assert_eq!(two.is_captured(), number > 0);
    }
    two.next_some(&[Some(1), Some(7)], &mut full, &options, 1, 4).unwrap();
    assert!(!two.is_captured() && full[0].lens() == [257, 8]);
    // Of another batch than before, once they are empty.
    let mut one = plan.on_device(1, DType::F32).unwrap();
    let error = one.next(&[3], &mut together, &options, 1, 0).unwrap_err().to_string();
    assert!(error.contains("sequences of a cache"), "{error}");
    let mut others = of(&[(0, 5, 1)], 1);
    others.iter_mut().for_each(DeviceKvCache::clear);
    let first = step.next(&[3, 4, 5], &mut others, &options, 1, 0).unwrap();
    assert_eq!((first.len(), others[0].lens()), (3, &[1, 1, 1][..]));
    others.iter_mut().for_each(DeviceKvCache::clear);
    assert_eq!(one.next(&[3], &mut others, &options, 1, 0).unwrap(), first[..1]);
    assert!(together[1].truncate_sequence(0, 1));
    assert!(told(&[Some(1); 3], &mut step, &mut together).contains("as the first"));
}

#[test]
fn attention_of_one_launch_is_that_of_each_sequence() {
    let Some(device) = device() else { return };
    let kinds = [(DType::F32, None), (DType::BF16, None), (DType::BF16, Some(KvFormat::Affine4))];
    for (dtype, codes) in kinds {
        let format = codes.unwrap_or(kv_format(dtype));
        let config =
            KvCacheConfig { keys: format, values: format, window: Some(33), ..KvCacheConfig::new(2, 64) };
        let random = |dims: &[usize], seed: u64, device: &Device| {
            tensor(dims, seed).to_dtype(dtype).unwrap().to_device(device).unwrap()
        };
        let lens = [0, 70, 7];
        let mut cache = DeviceKvCache::of_sequences(config, 3).unwrap();
        let mut each: Vec<_> = lens.map(|_| DeviceKvCache::new(config).unwrap()).into();
        for (sequence, len) in lens.into_iter().enumerate().filter(|(_, len)| *len > 0) {
            let [k, v] = [10, 20].map(|seed| random(&[1, len, 2, 64], seed + sequence as u64, &device));
            if codes.is_some() {
                let q = random(&[1, len, 4, 64], 5, &device);
                let options = AttentionOptions { scale: 0.125, ..AttentionOptions::default() };
                prefill_attention(&q, &k, &v, &mut each[sequence], options).unwrap().unwrap();
                let options = AttentionOptions { sequences: Some(&[sequence]), ..options };
                prefill_attention(&q, &k, &v, &mut cache, options).unwrap().unwrap();
                continue;
            }
            cache.append_to(sequence, &k, &v).unwrap();
            each[sequence].append(&k, &v).unwrap();
        }
        for number in 0..3 {
            let [q, k, v] = [(4, 30), (2, 40), (2, 50)]
                .map(|(heads, seed)| random(&[3, 1, heads, 64], seed + number, &device));
            let options = AttentionOptions { scale: 0.125, ..AttentionOptions::default() };
            let all = decode_attention(&q, &k, &v, &mut cache, options).unwrap().unwrap();
            for (sequence, cache) in each.iter_mut().enumerate() {
                let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(0, sequence, 1).unwrap().contiguous().unwrap());
                let alone = decode_attention(&q, &k, &v, cache, options).unwrap().unwrap();
                let all = all.narrow(0, sequence, 1).unwrap();
                let expected: Vec<f64> = flat(&alone).into_iter().map(f64::from).collect();
                let error = relative_error(&flat(&all), &expected);
                assert!(
                    error < if dtype == DType::F32 { 1e-6 } else { 4e-3 },
                    "{dtype:?} {sequence}: {error:.2e}"
                );
            }
        }
        assert_eq!(cache.lens(), [3, 73, 10]);
    }
}
