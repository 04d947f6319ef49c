//! Every instruction set against the scalar reference in f64: where blocks, windows, tiles and parts begin and end.

use super::super::isa::available;
use super::*;
use crate::format::{code_at, GroupScales, QuantizedRows, Quantizer};
use crate::tensor::{KvCacheConfig, KvFormat};
use crate::QuantFormat;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// What a cache makes of one head's numbers: rounded, or quantized as weights are.
fn held(format: KvFormat, head: &[f32]) -> Vec<f64> {
    let rounded = |round: fn(f32) -> f32| head.iter().map(|number| f64::from(round(*number))).collect();
    match format {
        KvFormat::F32 => rounded(|number| number),
        KvFormat::F16 => rounded(|number| f16::from_f32(number).to_f32()),
        KvFormat::Bf16 => rounded(|number| bf16::from_f32(number).to_f32()),
        KvFormat::Affine8 => dequantized(8, 64, head),
        KvFormat::Affine4 => {
            let mut rotated = head.to_vec();
            hadamard::rotate(&mut rotated);
            let mut back = dequantized(4, 32, &rotated);
            rotate_in_f64(&mut back);
            back
        }
    }
}

/// Quantized by the crate's encoder with scales in f16, and dequantized in f64. It knows no shorter group: the last one is
/// filled up with a number of its own, which changes neither scale nor bias.
fn dequantized(bits: usize, group_size: usize, head: &[f32]) -> Vec<f64> {
    let format = QuantFormat::affine(bits, group_size).unwrap();
    let quantize = |group: &[f32]| {
        let mut whole = group.to_vec();
        whole.resize(group_size, group[0]);
        let rows = QuantizedRows::quantize(format, Quantizer::Mlx, &whole, group_size, None).unwrap();
        let GroupScales::Float { scales, biases } = &rows.scales else { panic!("{format}") };
        let f16_of = |number: f32| f64::from(f16::from_f32(number).to_f32());
        let (scale, bias) = (f16_of(scales[0]), f16_of(biases[0]));
        let code = |index| f64::from(code_at(&rows.words, bits, index).unwrap());
        (0..group.len()).map(|index| code(index) * scale + bias).collect::<Vec<_>>()
    };
    head.chunks(group_size).flat_map(quantize).collect()
}

/// [`hadamard::rotate`] by its definition.
fn rotate_in_f64(head: &mut [f64]) {
    let size = 1usize << head.len().trailing_zeros();
    for part in head.chunks_exact_mut(size) {
        let sign =
            |row: usize, column: usize| if (row & column).count_ones().is_multiple_of(2) { 1. } else { -1. };
        let of_row = |row| part.iter().enumerate().map(|(column, x)| sign(row, column) * x).sum::<f64>();
        let rotated: Vec<f64> = (0..size).map(|row| of_row(row) / (size as f64).sqrt()).collect();
        part.copy_from_slice(&rotated);
    }
}

/// A cache, and all that was appended to it: for each sequence and head the keys and values that it holds.
struct Texts {
    cache: KvCache,
    heads: usize,
    sinks: Option<Vec<f32>>,
    softcap: Option<f32>,
    keys: Vec<Vec<Vec<Vec<f64>>>>,
    values: Vec<Vec<Vec<Vec<f64>>>>,
    rng: StdRng,
}

/// Queries of a step, and what is to come out.
struct Step {
    queries: Vec<Queries>,
    q: Vec<f32>,
    want: Vec<f64>,
}

const SCALE: f32 = 0.37;

impl Texts {
    fn new(config: KvCacheConfig, group_size: usize, has_sinks: bool) -> Self {
        let heads = config.kv_heads * group_size;
        let mut rng = StdRng::seed_from_u64(7);
        let sinks = has_sinks.then(|| (0..heads).map(|_| rng.random_range(-1.0..3.0)).collect());
        let (keys, values) = Default::default();
        Self { cache: KvCache::new(config).unwrap(), heads, sinks, softcap: None, keys, values, rng }
    }

    fn random(&mut self, count: usize, size: f32) -> Vec<f32> {
        (0..count).map(|_| self.rng.random_range(-size..size)).collect()
    }

    /// Appends so many tokens of each sequence, and says what attention makes of them.
    fn append(&mut self, sequences: &[usize], tokens: usize) -> Step {
        let KvCacheConfig { kv_heads, head_dim, keys, values, .. } = *self.cache.config();
        let positions = self.cache.extend(sequences, tokens).unwrap();
        let queries = |(entry, (sequence, positions)): (usize, (&usize, &std::ops::Range<usize>))| Queries {
            sequence: *sequence,
            position: positions.start,
            tokens,
            first_row: entry * tokens,
        };
        let queries: Vec<Queries> = sequences.iter().zip(&positions).enumerate().map(queries).collect();
        let rows = sequences.len() * tokens;
        // Scores have a standard deviation of about 2.
        let size = 3. / (head_dim as f32).powf(0.25);
        let (q, k) =
            (self.random(rows * self.heads * head_dim, size), self.random(rows * kv_heads * head_dim, size));
        let v = self.random(rows * kv_heads * head_dim, 1.);
        let stride = kv_heads * head_dim;
        append_all(&self.cache, &queries, Rows { values: &k, stride }, Rows { values: &v, stride });
        let count = sequences.iter().max().unwrap() + 1;
        for (all, rows, format) in [(&mut self.keys, &k, keys), (&mut self.values, &v, values)] {
            all.resize(count.max(all.len()), vec![Vec::new(); kv_heads]);
            for (row, numbers) in rows.chunks_exact(stride).enumerate() {
                for (head, numbers) in numbers.chunks_exact(head_dim).enumerate() {
                    all[sequences[row / tokens]][head].push(held(format, numbers));
                }
            }
        }
        let want = self.expected(&queries, &q);
        Step { queries, q, want }
    }

    fn expected(&self, queries: &[Queries], q: &[f32]) -> Vec<f64> {
        let KvCacheConfig { kv_heads, head_dim, window, is_chunked, .. } = *self.cache.config();
        let mut want = Vec::new();
        for queries in queries {
            for token in 0..queries.tokens {
                let position = queries.position + token;
                let first = match window {
                    Some(window) if is_chunked => position / window * window,
                    window => (position + 1).saturating_sub(window.unwrap_or(usize::MAX)),
                };
                let seen = first..position + 1;
                for head in 0..self.heads {
                    let row = (queries.first_row + token) * self.heads + head;
                    let q: Vec<f64> = q[row * head_dim..][..head_dim].iter().map(|q| f64::from(*q)).collect();
                    let kv_head = head / (self.heads / kv_heads);
                    let (keys, values) =
                        (&self.keys[queries.sequence][kv_head], &self.values[queries.sequence][kv_head]);
                    let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
                    let how = (f64::from(SCALE), self.softcap.map(f64::from), sink);
                    want.extend(reference::attend(&q, keys, values, seen.clone(), how));
                }
            }
        }
        want
    }

    fn attention<'a>(&'a self, step: &'a Step) -> Attention<'a> {
        let sinks = self.sinks.as_deref();
        let (heads, softcap) = (self.heads, self.softcap);
        Attention { cache: &self.cache, queries: &step.queries, heads, scale: SCALE, sinks, softcap }
    }

    fn attend(&self, isa: &InstructionSet, step: &Step) -> Vec<f32> {
        let stride = self.heads * self.cache.config().head_dim;
        let mut out = vec![f32::NAN; step.q.len()];
        attend_with(isa, &self.attention(step), Rows { values: &step.q, stride }, &mut out);
        out
    }

    /// Appends, and checks all instruction sets.
    #[track_caller]
    fn check(&mut self, sequences: &[usize], tokens: usize) {
        let step = self.append(sequences, tokens);
        for isa in available() {
            // Of all tokens and heads: one that is wrong shows, one whose values happen to cancel does not.
            let error = relative_error(&self.attend(isa, &step), &step.want);
            let name = (isa.name(), self.cache.config(), self.heads, &step.queries);
            assert!(error <= 2e-6, "{name:?}: {error:e}");
        }
    }
}

fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    let square = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
    let error = square(&mut got.iter().zip(want).map(|(got, want)| f64::from(*got) - want));
    let size = square(&mut want.iter().copied());
    if error.is_nan() {
        f64::INFINITY
    } else {
        (error / size).sqrt()
    }
}

const FORMATS: [KvFormat; 5] =
    [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, KvFormat::Affine8, KvFormat::Affine4];

fn config(kv_heads: usize, head_dim: usize, format: KvFormat) -> KvCacheConfig {
    KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(kv_heads, head_dim) }
}

/// Tokens of steps whose ends lie around those of blocks, of key ranges and of tiles.
const STEPS: [usize; 14] = [1, 1, 60, 1, 1, 1, 1, 61, 3, 17, 120, 16, 1, 97];

#[test]
fn every_position_agrees_with_f64() {
    for format in FORMATS {
        let mut texts = Texts::new(config(2, 64, format), 2, false);
        for tokens in STEPS {
            texts.check(&[0], tokens);
        }
    }
}

#[test]
fn every_size_of_heads_and_groups_agrees_with_f64() {
    for head_dim in [1, 5, 8, 24, 64, 80, 96, 128, 256] {
        for group_size in [1, 3, 4, 8, 16] {
            for (format, has_sinks) in FORMATS.into_iter().zip([true, false, true, false, true]) {
                let mut texts = Texts::new(config(1, head_dim, format), group_size, has_sinks);
                for tokens in [1, 65, 1, 2, 13] {
                    texts.check(&[0], tokens);
                }
            }
        }
    }
}

#[test]
fn windows_hide_what_is_behind_them() {
    for window in [1, 2, 5, 63, 64, 65, 100, 128] {
        let kinds = [false, true, false, true, false].into_iter().zip([false, false, true, true, true]);
        for (format, (has_sinks, is_chunked)) in FORMATS.into_iter().zip(kinds) {
            let config = KvCacheConfig { window: Some(window), is_chunked, ..config(2, 16, format) };
            let mut texts = Texts::new(config, 2, has_sinks);
            for tokens in STEPS.into_iter().chain([1, 64, 1, 1]) {
                texts.check(&[0], tokens);
            }
        }
    }
}

#[test]
fn sequences_of_a_batch_may_differ_in_length() {
    for window in [None, Some(70)] {
        let config = KvCacheConfig { window, ..config(2, 32, KvFormat::F16) };
        let mut texts = Texts::new(config, 2, true);
        for (sequence, tokens) in [63, 1, 64, 5, 300, 129, 2, 65].into_iter().enumerate() {
            texts.check(&[sequence], tokens);
        }
        for sequences in [&[0, 1, 2, 3, 4, 5, 6, 7][..], &[4, 0], &[7, 6, 5, 4, 3, 2, 1, 0], &[3]] {
            for tokens in [1, 2, 20] {
                texts.check(sequences, tokens);
            }
        }
    }
}

/// Scores have a standard deviation of about 2: most are changed.
#[test]
fn capped_scores_agree_with_f64() {
    for (softcap, window) in [(0.5, None), (3., Some(70)), (50., None)] {
        for (format, has_sinks) in FORMATS.into_iter().zip([false, true, false, true, false]) {
            let config = KvCacheConfig { window, ..config(2, 64, format) };
            let mut texts = Texts { softcap: Some(softcap), ..Texts::new(config, 2, has_sinks) };
            for tokens in [1, 65, 1, 2, 130] {
                texts.check(&[0], tokens);
            }
        }
    }
}

/// More than 64 ranges of keys would be too many: they grow.
#[test]
fn a_long_text_agrees_with_f64() {
    let mut texts = Texts::new(config(1, 8, KvFormat::Bf16), 2, true);
    for _ in 0..20 {
        let step = texts.append(&[0], 1000);
        assert_eq!(step.want.len(), 1000 * 16);
    }
    texts.check(&[0], 1);
    texts.check(&[0], 3);
}

#[test]
fn sums_do_not_depend_on_the_number_of_threads() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let pools = [1, 2, 3].map(pool);
    for has_sinks in [false, true] {
        let mut texts = Texts::new(config(4, 64, KvFormat::F16), 2, has_sinks);
        for tokens in [700, 1, 4, 33] {
            let step = texts.append(&[0, 1], tokens);
            for isa in available() {
                let want = texts.attend(isa, &step);
                for pool in &pools {
                    let got = pool.install(|| texts.attend(isa, &step));
                    let same = got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits());
                    assert!(same, "{} {tokens}", isa.name());
                }
            }
        }
    }
}

/// Token by token, in chunks and at once.
#[test]
fn a_prompt_gives_the_same_in_any_pieces() {
    for window in [None, Some(100)] {
        let config = KvCacheConfig { window, ..config(2, 64, KvFormat::F16) };
        let width = 4 * 64;
        let mut rng = StdRng::seed_from_u64(11);
        let mut random =
            |count: usize| -> Vec<f32> { (0..count).map(|_| rng.random_range(-1.0..1.0)).collect() };
        let (q, k, v) = (random(300 * width), random(300 * width / 2), random(300 * width / 2));
        let run = |isa: &InstructionSet, pieces: usize| {
            let mut cache = KvCache::new(config).unwrap();
            let mut out = vec![0.; 300 * width];
            for first_row in (0..300).step_by(pieces) {
                let tokens = pieces.min(300 - first_row);
                let position = cache.extend(&[0], tokens).unwrap()[0].start;
                let queries = [Queries { sequence: 0, position, tokens, first_row }];
                let stride = width / 2;
                append_all(&cache, &queries, Rows { values: &k, stride }, Rows { values: &v, stride });
                let attention = Attention {
                    cache: &cache,
                    queries: &queries,
                    heads: 4,
                    scale: 0.5,
                    sinks: None,
                    softcap: None,
                };
                attend_with(isa, &attention, Rows { values: &q, stride: width }, &mut out);
            }
            out
        };
        for isa in available() {
            let whole: Vec<f64> = run(isa, 300).into_iter().map(f64::from).collect();
            for pieces in [1, 7, 64, 65, 131] {
                let error = relative_error(&run(isa, pieces), &whole);
                assert!(error < 1e-6, "{} {pieces}: {error:e}", isa.name());
            }
        }
    }
}

/// What a step of threads of one's own does: parts by hand, heads appended one by one.
#[test]
fn parts_by_hand_give_what_all_threads_do() {
    let mut texts = Texts::new(config(2, 64, KvFormat::F32), 2, true);
    texts.append(&[0], 600);
    let position = texts.cache.extend(&[0], 1).unwrap()[0].start;
    let (q, k, v) = (texts.random(4 * 64, 1.), texts.random(2 * 64, 1.), texts.random(2 * 64, 1.));
    for (head, (k, v)) in k.chunks_exact(64).zip(v.chunks_exact(64)).enumerate() {
        append(&texts.cache, 0, head, position, k, v);
    }
    let queries = vec![Queries { sequence: 0, position, tokens: 1, first_row: 0 }];
    let step = Step { queries, q, want: Vec::new() };
    let attention = texts.attention(&step);
    let all = parts(&attention);
    let mut out = vec![0.; 4 * 64];
    for group in all.chunk_by(|a, b| a.group == b.group) {
        let start = group[0].partial.start;
        let mut partials = vec![f32::NAN; group.iter().map(|part| part.partial.len()).sum()];
        for part in group.iter().rev() {
            let range = part.partial.start - start..part.partial.end - start;
            run_part(&attention, part, Rows { values: &step.q, stride: 4 * 64 }, &mut partials[range]);
        }
        let head = group[0].kv_head;
        combine(&attention, group, &partials, &mut [&mut out[head * 128..][..128]]);
    }
    assert_eq!(out, texts.attend(isa::best(), &step));
}

#[test]
fn a_nan_reaches_the_tokens_that_see_it() {
    let mut texts = Texts::new(config(1, 16, KvFormat::F32), 2, false);
    texts.append(&[0], 70);
    let mut step = texts.append(&[0], 8);
    step.q[3 * 32 + 16] = f32::NAN;
    for isa in available() {
        for (index, out) in texts.attend(isa, &step).chunks_exact(16).enumerate() {
            assert_eq!(out.iter().all(|x| x.is_nan()), index == 7, "{} {index}", isa.name());
            assert_eq!(out.iter().any(|x| x.is_nan()), index == 7, "{} {index}", isa.name());
        }
    }
}

#[test]
fn large_scores_leave_one_key() {
    let mut texts = Texts::new(config(1, 64, KvFormat::F32), 1, false);
    texts.append(&[0], 100);
    let mut step = texts.append(&[0], 1);
    step.q.iter_mut().for_each(|q| *q *= 1e4);
    step.want = texts.expected(&step.queries, &step.q);
    for isa in available() {
        let error = relative_error(&texts.attend(isa, &step), &step.want);
        assert!(error <= 2e-6, "{}: {error:e}", isa.name());
    }
}

/// Keys and values in formats of their own: what is rotated, grouped and scaled is told apart.
#[test]
fn keys_and_values_may_differ_in_format() {
    for keys in FORMATS {
        for values in FORMATS {
            let config = KvCacheConfig { keys, values, ..config(2, 96, KvFormat::F32) };
            let mut texts = Texts::new(config, 2, true);
            for tokens in [70, 1, 4, 30] {
                texts.check(&[0], tokens);
            }
        }
    }
}

/// Old numbers in blocks that are used again, NaN among them, reach no new token.
#[test]
fn a_cleared_cache_is_as_good_as_a_new_one() {
    for format in FORMATS {
        let mut texts = Texts::new(config(1, 64, format), 2, false);
        texts.append(&[0], 130);
        let positions = texts.cache.extend(&[0], 2).unwrap().remove(0);
        append(&texts.cache, 0, 0, positions.start, &[f32::NAN; 128], &[f32::NAN; 128]);
        texts.cache.clear();
        (texts.keys, texts.values) = Default::default();
        for tokens in [1, 1, 70, 1] {
            texts.check(&[0], tokens);
        }
    }
}

/// `DECODE.md`'s measure, and its bars: 4096 random keys, some channels ten times as large, scores of a standard deviation
/// of 1 and of 3; the error of outputs relative to those of exact keys and values.
#[test]
fn formats_lose_no_more_than_they_may() {
    let mut rng = StdRng::seed_from_u64(3);
    let mut normal = |count: usize| -> Vec<f32> {
        let pair = |rng: &mut StdRng| {
            let (u, angle): (f32, f32) =
                (rng.random_range(1e-6..1.0), rng.random_range(0.0..std::f32::consts::TAU));
            (-2. * u.ln()).sqrt() * angle.cos()
        };
        (0..count).map(|_| pair(&mut rng)).collect()
    };
    const KEYS: usize = 4096;
    let (mut k, v) = (normal(KEYS * 128), normal(KEYS * 128));
    k.chunks_exact_mut(128).for_each(|k| [3, 40, 77, 101].into_iter().for_each(|channel| k[channel] *= 10.));
    let q = normal(8 * 128);
    let wide =
        |all: &[f32]| all.chunks_exact(128).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect();
    let (exact_k, exact_v): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (wide(&k), wide(&v));
    let dots = q.chunks_exact(128).flat_map(|q| {
        exact_k.iter().map(move |k| k.iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>())
    });
    let deviation = (dots.map(|dot| dot * dot).sum::<f64>() / (8 * KEYS) as f64).sqrt();
    for (format, bars) in [
        (KvFormat::F16, [1e-3, 2e-3]),
        (KvFormat::Bf16, [4e-3, 1e-2]),
        (KvFormat::Affine8, [1.6e-2, 4.5e-2]),
        (KvFormat::Affine4, [1.5e-1, 2.2e-1]),
    ] {
        for (sigma, bar) in [1., 3.].into_iter().zip(bars) {
            let scale = (sigma / deviation) as f32;
            let mut cache = KvCache::new(config(1, 128, format)).unwrap();
            cache.extend(&[0], KEYS).unwrap();
            append(&cache, 0, 0, 0, &k, &v);
            let queries = [Queries { sequence: 0, position: KEYS - 1, tokens: 1, first_row: 0 }];
            let attention =
                Attention { cache: &cache, queries: &queries, heads: 8, scale, sinks: None, softcap: None };
            let mut out = vec![0.; 8 * 128];
            attend(&attention, Rows { values: &q, stride: 8 * 128 }, &mut out);
            let head = |q: &[f32]| {
                let q: Vec<f64> = q.iter().map(|q| f64::from(*q)).collect();
                reference::attend(&q, &exact_k, &exact_v, 0..KEYS, (f64::from(scale), None, None))
            };
            let want: Vec<f64> = q.chunks_exact(128).flat_map(head).collect();
            let error = relative_error(&out, &want);
            println!("{format}, sigma {sigma}: {error:.1e}");
            assert!(error <= bar, "{format}, sigma {sigma}: {error:e}");
        }
    }
}
