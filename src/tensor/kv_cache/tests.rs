//! Blocks, lengths and limits.

use super::*;
use candle_core::{DType, Device, Tensor};

fn cache(window: Option<usize>, max_tokens: usize) -> KvCache {
    KvCache::new(KvCacheConfig { window, max_tokens, ..KvCacheConfig::new(2, 16) }).unwrap()
}

/// Adds `tokens` tokens, and the blocks that they need.
fn grow(cache: &mut KvCache, sequence: usize, tokens: usize) {
    let positions = cache.extend(&[sequence], tokens).unwrap().remove(0);
    let (keys, values) = (cache.keys, cache.values);
    for head in 0..2 {
        for position in positions.clone() {
            let mut head = cache.head_mut(sequence, head).unwrap();
            assert!(head.block_mut(position / BLOCK, &keys, &values).is_some());
        }
    }
}

/// Blocks of all heads and sequences.
fn blocks(cache: &KvCache) -> usize {
    cache.size_in_bytes() / (2 * 64 * 16 * 4)
}

#[test]
fn it_grows_by_blocks_and_keeps_them_when_cleared() {
    let mut cache = cache(None, 1000);
    for (tokens, expected) in [(1, 2), (63, 2), (1, 4), (64, 6), (200, 12)] {
        grow(&mut cache, 0, tokens);
        assert_eq!(blocks(&cache), expected, "{tokens}");
    }
    assert_eq!((cache.len(0), cache.sequences(), cache.is_empty()), (329, 1, false));
    cache.clear();
    assert_eq!((cache.len(0), cache.sequences(), cache.is_empty()), (0, 0, true));
    assert_eq!(blocks(&cache), 12);
    grow(&mut cache, 0, 329);
    assert_eq!(blocks(&cache), 12);
}

#[test]
fn a_window_needs_no_more_blocks_than_it_covers_and_one() {
    for (window, most) in [(1, 2), (63, 2), (64, 2), (65, 3), (128, 3)] {
        let mut cache = cache(Some(window), usize::MAX);
        for position in 0..700 {
            grow(&mut cache, 0, 1);
            assert!(blocks(&cache) <= 2 * most, "{window} {position}");
            let seen = (position + 1usize).saturating_sub(window)..=position;
            let head = cache.head(0, 1).unwrap();
            assert!(seen.clone().all(|token| head.block(token / BLOCK).is_some()), "{window} {position}");
        }
        // A long prompt needs more, for as long as it is computed.
        grow(&mut cache, 0, 300);
        cache.free_unseen(0);
        assert!(blocks(&cache) <= 2 * most, "{window}");
    }
}

#[test]
fn a_config_knows_what_its_cache_will_need() {
    let formats = [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, KvFormat::Affine8, KvFormat::Affine4];
    for (window, keys) in [None, Some(1), Some(64), Some(65), Some(300)].into_iter().zip(formats) {
        for (values, head_dim) in formats.into_iter().zip([8, 64, 80, 96, 128]) {
            let config = KvCacheConfig { window, keys, values, ..KvCacheConfig::new(2, head_dim) };
            let mut cache = KvCache::new(config).unwrap();
            assert_eq!(config.size_in_bytes(0), 0);
            for tokens in [1, 63, 64, 65, 265, 465, 665] {
                let more = tokens - cache.len(0);
                grow(&mut cache, 0, more);
                cache.free_unseen(0);
                let (found, said) = (cache.size_in_bytes() as u64, config.size_in_bytes(tokens));
                assert!(if window.is_some() { found <= said } else { found == said }, "{config:?} {tokens}");
            }
            // Somewhere a window needs all that is said.
            let needs_all = |tokens: usize| {
                let mut cache = KvCache::new(config).unwrap();
                grow(&mut cache, 0, tokens);
                cache.free_unseen(0);
                cache.size_in_bytes() as u64 == config.size_in_bytes(1000)
            };
            assert!(window.is_none() || (300..1000).any(needs_all), "{config:?}");
        }
    }
    assert_eq!(KvCacheConfig::new(usize::MAX, usize::MAX).size_in_bytes(usize::MAX), u64::MAX);
}

#[test]
fn it_is_truncated_to_any_length_and_grows_again() {
    let mut cache = cache(None, 1000);
    grow(&mut cache, 0, 200);
    grow(&mut cache, 1, 10);
    for (len, expected) in [(500, 200), (200, 200), (199, 199), (129, 129), (128, 128), (5, 5)] {
        assert!(cache.truncate(0, len));
        assert_eq!((cache.len(0), cache.len(1)), (expected, 10), "{len}");
    }
    // What was freed is used again.
    let size = cache.size_in_bytes();
    grow(&mut cache, 0, 195);
    assert_eq!((cache.size_in_bytes(), cache.len(0)), (size, 200));
    assert!(cache.truncate(0, 0) && cache.truncate(7, 3));
    assert_eq!((cache.len(0), cache.len(1)), (0, 10));
}

#[test]
fn what_a_window_has_left_behind_does_not_come_back() {
    let mut cache = cache(Some(100), usize::MAX);
    for _ in 0..700 {
        grow(&mut cache, 0, 1);
    }
    // The 701st token would see 601 and those after it: blocks 9 and 10 are left.
    assert!(!cache.truncate(0, 400) && cache.len(0) == 700);
    assert!(!cache.truncate(0, 674) && cache.len(0) == 700);
    assert!(cache.truncate(0, 675) && cache.len(0) == 675);
    for _ in 0..100 {
        grow(&mut cache, 0, 1);
    }
    assert!(cache.truncate(0, 0) && cache.is_empty());
    grow(&mut cache, 0, 3);
}

#[test]
fn a_full_cache_is_an_error_that_changes_nothing() {
    let mut cache = cache(None, 100);
    grow(&mut cache, 1, 100);
    grow(&mut cache, 0, 40);
    let error = cache.extend(&[0, 1], 1).unwrap_err();
    assert!(matches!(error, Error::OutOfCache { needed: 101, max_tokens: 100 }), "{error}");
    assert_eq!((cache.len(0), cache.len(1)), (40, 100));
    assert!(cache.extend(&[0], usize::MAX).is_err());
    assert!(cache.extend(&[0], 60).is_ok());
}

#[test]
fn senseless_configs_are_refused() {
    for (config, what) in [
        (KvCacheConfig::new(0, 8), "heads"),
        (KvCacheConfig::new(1, 0), "elements of a head"),
        (KvCacheConfig::new(1, usize::MAX), "elements of a head"),
        (KvCacheConfig { window: Some(0), ..KvCacheConfig::new(1, 8) }, "window"),
    ] {
        let error = KvCache::new(config).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn formats_have_names() {
    for format in ["f32", "f16", "bf16", "8bit", "4bit"] {
        assert_eq!(format.to_uppercase().parse::<KvFormat>().unwrap().to_string(), format);
    }
    let error = "int8".parse::<KvFormat>().unwrap_err().to_string();
    assert!(error.contains("f32, f16, bf16, 8bit or 4bit") && error.contains("int8"), "{error}");
}

#[test]
fn a_cache_on_a_device_grows_and_keeps_what_is_there() {
    let config = KvCacheConfig { max_tokens: 700, ..KvCacheConfig::new(2, 8) };
    let mut cache = DeviceKvCache::new(config).unwrap();
    // Row `token` of head `head` is `10 * token + head`.
    let rows = |tokens: Range<usize>, add: f32| {
        let values =
            tokens.clone().flat_map(|token| [0., 1.].map(|head| [10. * token as f32 + head + add; 8]));
        let values: Vec<f32> = values.flatten().collect();
        Tensor::from_vec(values, (1, tokens.len(), 2, 8), &Device::Cpu).unwrap()
    };
    let check = |parts: [Tensor; 2], len: usize| {
        for (part, add) in parts.iter().zip([0., 0.5]) {
            let expected = rows(0..len, add).transpose(1, 2).unwrap();
            assert_eq!(part.dims(), expected.dims());
            let far = (part - expected).unwrap().abs().unwrap().max_all().unwrap();
            assert_eq!(far.to_scalar::<f32>().unwrap(), 0., "{len}");
        }
    };
    let mut len = 0;
    for (tokens, capacity) in [(1, 256), (255, 256), (1, 512), (256, 768), (100, 768)] {
        let new = [0., 0.5].map(|add| rows(len..len + tokens, add));
        check(cache.append(&new[0], &new[1]).unwrap(), len + tokens);
        len += tokens;
        assert_eq!((cache.len(), cache.size_in_bytes()), (len, 2 * 2 * capacity * 8 * 4));
        assert!(capacity <= DeviceKvCache::most_rows(&config, len, len) as u64);
    }
    assert!(cache.truncate(300) && cache.truncate(400));
    assert_eq!((cache.len(), cache.is_empty()), (300, false));
    check(cache.append(&rows(300..302, 0.), &rows(300..302, 0.5)).unwrap(), 302);

    let two = |tokens: usize| rows(0..tokens, 0.);
    let error = cache.append(&two(399), &two(399)).unwrap_err();
    assert!(matches!(error, Error::OutOfCache { needed: 701, max_tokens: 700 }), "{error}");
    let error = cache.append(&two(2), &two(1)).unwrap_err().to_string();
    assert!(error.contains("values for a cache"), "{error}");
    let halves = two(1).to_dtype(DType::F16).unwrap();
    let error = cache.append(&halves, &halves).unwrap_err().to_string();
    assert!(error.contains("keys for a cache") && error.contains("F16"), "{error}");
    let batch = Tensor::cat(&[two(1), two(1)], 0).unwrap();
    let error = cache.append(&batch, &batch).unwrap_err().to_string();
    assert!(error.contains("as many sequences as before"), "{error}");
    assert_eq!(cache.len(), 302);
    // Another batch once the cache is empty.
    cache.clear();
    assert_eq!(cache.append(&batch, &batch).unwrap()[0].dims(), [2, 2, 1, 8]);
    assert_eq!(cache.size_in_bytes(), 2 * 2 * 2 * 256 * 8 * 4);
}

/// Each part of a row stays with its head.
#[test]
fn a_cache_of_codes_grows_and_keeps_what_is_there() {
    let formats = [KvFormat::Affine8, KvFormat::Affine4];
    let config = KvCacheConfig { keys: formats[0], values: formats[1], ..KvCacheConfig::new(3, 80) };
    let mut cache = DeviceKvCache::new(config).unwrap();
    let (rows, _) = cache.room_on(&Device::Cpu, 2, 10, None).unwrap();
    // Codes of keys and values, then two and three pairs of scale and bias.
    let bytes = [80, 40, 8, 12];
    let heads_rows = 6 * 256;
    assert_eq!(rows.offsets(), [0, 80 * heads_rows, 120 * heads_rows, 128 * heads_rows]);
    assert_eq!(cache.size_in_bytes(), 140 * heads_rows as u64);
    let marks: Vec<u8> = (0..140 * heads_rows).map(|index| (index % 251) as u8).collect();
    let all = Tensor::from_slice(&marks, marks.len(), &Device::Cpu).unwrap();
    rows.memory.slice_set(&all, 0, 0).unwrap();
    let (grown, _) = cache.room_on(&Device::Cpu, 2, 300, None).unwrap();
    assert_eq!((grown.capacity, grown.codes()), (512, Some(formats)));
    let (before, after) = (marks, grown.memory.to_vec1::<u8>().unwrap());
    for ((bytes, old), new) in bytes.into_iter().zip(rows.offsets()).zip(grown.offsets()) {
        for head in 0..6 {
            let of_head = &after[new + head * 512 * bytes..][..512 * bytes];
            assert_eq!(of_head[..256 * bytes], before[old + head * 256 * bytes..][..256 * bytes]);
            assert!(of_head[256 * bytes..].iter().all(|byte| *byte == 0));
        }
    }
}

/// Rows of a ring, written as launches write them: what the next token sees is there, through growth and whatever is taken back.
#[test]
fn a_ring_keeps_what_its_window_sees() {
    let (window, format) = (70, KvFormat::F16);
    let config =
        KvCacheConfig { window: Some(window), keys: format, values: format, ..KvCacheConfig::new(2, 64) };
    let mut cache = DeviceKvCache::of_sequences(config, 2).unwrap();
    // Every element of a row is `token`, of values one half more, of the second sequence 600 more.
    let rows = |sequence: usize, tokens: Range<usize>, add: f32| {
        let values = tokens.clone().flat_map(|token| [token as f32 + add + 600. * sequence as f32; 128]);
        let rows = Tensor::from_iter(values, &Device::Cpu).unwrap().to_dtype(DType::F16).unwrap();
        rows.reshape((1, tokens.len(), 2, 64)).unwrap()
    };
    let put = |cache: &mut DeviceKvCache, sequence: usize, tokens: usize| {
        let begin = cache.lens()[sequence];
        let [k, v] = [0., 0.5].map(|add| rows(sequence, begin..begin + tokens, add));
        let places = cache.places(&k, Some(&[sequence])).unwrap();
        let there = cache.room_at(&k, Some(&[sequence]), &places, true).unwrap();
        there.put([&k, &v], &places).unwrap();
        cache.appended(&places, tokens);
        // All that the first of the new tokens sees, up to the last one.
        for (sequence, end) in cache.lens().iter().copied().enumerate() {
            let first = if sequence == places[0].sequence { begin } else { end.max(1) - 1 };
            for token in config.first_seen(first)..end {
                for (part, add) in [0., 0.5].into_iter().enumerate() {
                    let row = there.memory.get(part).unwrap().get(sequence).unwrap().get(1).unwrap();
                    let found = row.get(token % there.capacity).unwrap().get(63).unwrap();
                    let expected = token as f32 + add + 600. * sequence as f32;
                    assert_eq!(
                        f32::from(found.to_scalar::<half::f16>().unwrap()),
                        expected,
                        "{sequence} {token}"
                    );
                }
            }
        }
        there.capacity
    };
    // As few rows as serve; more where more come at once, whatever has gone round by then.
    for (sequence, tokens, capacity) in [
        (0, 5, 192),
        (1, 100, 192),
        (0, 100, 192),
        (0, 88, 192),
        (0, 1, 192),
        (0, 64, 192),
        (1, 120, 192),
        (0, 122, 192),
    ] {
        assert_eq!(put(&mut cache, sequence, tokens), capacity);
        assert!(capacity <= DeviceKvCache::most_rows(&config, cache.len(), tokens));
    }
    assert_eq!(cache.lens(), [380, 220]);
    assert!(
        cache.has_room(2, 64) && cache.has_room(2, 122) && !cache.has_room(2, 123) && !cache.has_room(1, 1)
    );
    assert_eq!(put(&mut cache, 0, 123), 256);
    assert_eq!(put(&mut cache, 1, 1), 256);
    assert_eq!(cache.size_in_bytes(), 256 * 2 * cache.token_bytes());

    // Token 247 is the first that is there: 256 rows end with token 502.
    assert_eq!(cache.lens(), [503, 221]);
    assert!(!cache.truncate_sequence(0, 315) && !cache.truncate(315) && cache.lens() == [503, 221]);
    assert!(cache.truncate_sequence(0, 316) && cache.truncate(400) && cache.lens() == [316, 221]);
    put(&mut cache, 0, 147);
    let error = cache.append_to(0, &rows(0, 463..464, 0.), &rows(0, 463..464, 0.5)).unwrap_err().to_string();
    assert!(error.contains("left those before token") && error.contains("prefill_attention"), "{error}");
    // Another text begins anew, and may be kept whole.
    assert!(cache.truncate_sequence(0, 0));
    assert_eq!(
        cache.append_to(0, &rows(0, 0..300, 0.), &rows(0, 0..300, 0.5)).unwrap()[0].dims(),
        [1, 2, 300, 64]
    );
    cache.clear();
    assert!(cache.is_empty() && cache.lens() == [0, 0]);
}

/// What no kernel reads, or no window leaves behind, stays.
#[test]
fn rows_that_are_planned_for() {
    let format = KvFormat::Bf16;
    let config =
        KvCacheConfig { window: Some(128), keys: format, values: format, ..KvCacheConfig::new(2, 64) };
    let rows = |config: &KvCacheConfig, tokens| DeviceKvCache::most_rows(config, tokens, 256);
    assert_eq!((rows(&config, 100), rows(&config, 100_000)), (256, 384));
    for whole in [
        KvCacheConfig { window: None, ..config },
        KvCacheConfig { head_dim: 72, ..config },
        KvCacheConfig { keys: KvFormat::F32, values: KvFormat::F32, ..config },
    ] {
        assert_eq!(rows(&whole, 100_000), 125_184);
    }
}
