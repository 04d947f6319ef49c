//! Models over several ranks against themselves as one.

use crate::common::{byte_tokenizer, distance, open, reference, FIXTURES};
use crate::packed::bits;
use crate::ranks::{check, over, RANKS};
use candle_core::{DType, Device, Tensor, D};
use candle_quant::parallel::{run, Collective, ExpertSplit, Launch, Rank};
use candle_quant::{Checkpoint, Result, VarBuilder};
use candle_quant_models::generate::{generate, Params, Sampling};
use candle_quant_models::sharding::ShardPlan;
use candle_quant_models::{Config, Model};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn devices(count: usize) -> Vec<Device> {
    vec![Device::Cpu; count]
}

fn load(checkpoint: &Checkpoint, rank: &Rank, dtype: DType) -> Result<Model> {
    let config = Config::from_json(checkpoint.config())?;
    Model::new(&config, VarBuilder::sharded(checkpoint, rank, dtype))
}

#[test]
fn logits_are_those_of_one_rank() {
    for name in FIXTURES {
        let (tokens, expected) = reference(name);
        let to_mlx = distance(&check(name, &open(name), &tokens), &expected);
        assert!(to_mlx.max <= 3e-4 && to_mlx.other_argmax == 0, "{name}: {to_mlx:?}");
    }
}

#[test]
fn half_precision_stays_as_close_as_it_is_alone() {
    for name in ["qwen3-affine-b4-g64", "llama-untied-bias-b4-g64-f16", "qwen3-nvfp4"] {
        let checkpoint = open(name);
        let (tokens, expected) = reference(name);
        for (dtype, bound) in [(DType::F16, 0.003), (DType::BF16, 0.025)] {
            for ranks in [2, 4] {
                let of_ranks = over(&checkpoint, ranks, ExpertSplit::Inside, &tokens, dtype);
                assert_eq!(of_ranks[0].dtype(), dtype);
                let distance = distance(&of_ranks[0], &expected);
                assert!(distance.rms <= bound, "{name} {dtype:?} over {ranks}: {distance:?}");
            }
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_text() {
    for (name, temperature) in [("qwen3-affine-b4-g64", 0.), ("llama-mixed-custom", 0.9)] {
        let checkpoint = open(name);
        let text = |ranks: usize| {
            let checkpoint = checkpoint.clone();
            let texts = run(&devices(ranks), move |rank| {
                let mut model = load(&checkpoint, &rank, DType::F32)?;
                let sampling = Sampling { temperature, ..Sampling::default() };
                let params = Params { sample_len: 40, sampling, seed: Some(7), ..Params::default() };
                let prompt = "Once upon a time";
                let go_on = |_: &str| ControlFlow::Continue(());
                Ok(generate(&mut model, &byte_tokenizer(), prompt, &params, go_on)?.tokens)
            })
            .unwrap();
            assert!(texts.iter().all(|text| *text == texts[0]), "{name} over {ranks}");
            texts[0].clone()
        };
        let alone = text(1);
        assert_eq!(alone.len(), 40);
        for ranks in &RANKS[1..] {
            assert_eq!(text(*ranks), alone, "{name} over {ranks}");
        }
    }
}

/// Slices of rows are computed as the whole is: joined, they are its bits.
#[test]
fn column_parallel_parts_are_bits_of_the_whole() {
    use candle_quant::parallel::column_parallel;
    use candle_quant::{linear_b, Module};
    for name in FIXTURES {
        let checkpoint = open(name);
        let bias = name.contains("bias");
        let x = Tensor::randn(0f32, 1., (1, 128), &Device::Cpu).unwrap();
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        for module in ["self_attn.q_proj", "mlp.up_proj"] {
            let vb = vb.pp("model.layers.1").pp(module);
            let out = if module.ends_with("q_proj") { 128 } else { 256 };
            let whole = linear_b(128, out, bias, vb.clone()).unwrap().forward(&x).unwrap();
            let cuts = [0, 1, 33, 96, out];
            let parts: Vec<_> = cuts
                .windows(2)
                .map(|cut| column_parallel(128, out, cut[0]..cut[1], bias, vb.clone()).unwrap())
                .map(|layer| layer.forward(&x).unwrap())
                .collect();
            assert_eq!(bits(&Tensor::cat(&parts, D::Minus1).unwrap()), bits(&whole), "{name} {module}");
        }
    }
}

#[test]
fn ids_outside_the_vocabulary_are_refused_by_all_ranks() {
    for ids in [[1u32, 256], [256, 1]] {
        let checkpoint = open("qwen3-mxfp8");
        let errors = run(&devices(2), move |rank| {
            let mut model = load(&checkpoint, &rank, DType::F32)?;
            let ids = Tensor::new(&[ids], rank.device())?;
            let error = model.forward(&ids, 0).unwrap_err().to_string();
            // And it goes on.
            model.forward(&Tensor::new(&[[1u32, 255]], rank.device())?, 0)?;
            Ok(error)
        });
        for error in errors.unwrap() {
            assert!(error.contains("each below 256"), "{error}");
        }
    }
}

/// A rank that counts what it does together with others.
#[derive(Debug)]
struct Counting {
    rank: Rank,
    all_reduces: AtomicUsize,
    others: AtomicUsize,
}

impl Counting {
    fn count(counter: &AtomicUsize) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Collective for Counting {
    fn index(&self) -> usize {
        self.rank.index()
    }

    fn world_size(&self) -> usize {
        self.rank.world_size()
    }

    fn all_reduce_sum(&self, x: &Tensor) -> Result<Tensor> {
        Self::count(&self.all_reduces);
        self.rank.all_reduce_sum(x)
    }

    fn all_gather(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        Self::count(&self.others);
        self.rank.all_gather(x, dim)
    }

    fn reduce_scatter(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        Self::count(&self.others);
        self.rank.reduce_scatter(x, dim)
    }

    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        Self::count(&self.others);
        self.rank.broadcast(x, root)
    }

    fn barrier(&self) -> Result<()> {
        Self::count(&self.others);
        self.rank.barrier()
    }
}

#[test]
fn a_layer_sums_once_after_attention_and_once_after_the_mlp() {
    // What the plan says; with 8 ranks, attention is whole on each.
    for (ranks, all_reduces) in [(2, 2 * 2 + 1), (4, 2 * 2 + 1), (8, 2 + 1)] {
        let checkpoint = open("qwen3-nvfp4");
        assert_eq!(ShardPlan::new(&checkpoint, ranks).unwrap().communication().all_reduces, all_reduces);
        run(&devices(ranks), move |rank| {
            let device = rank.device().clone();
            let counting =
                Arc::new(Counting { rank, all_reduces: AtomicUsize::new(0), others: AtomicUsize::new(0) });
            let mut model = load(&checkpoint, &Rank::new(&device, counting.clone()), DType::F32)?;
            let counts =
                || [&counting.all_reduces, &counting.others].map(|count| count.load(Ordering::Relaxed));
            assert_eq!(counts(), [0, 0], "nothing is done together while loading");
            for step in 1..4 {
                model.forward(&Tensor::new(&[[5u32]], &device)?, step - 1)?;
                assert_eq!(counts(), [all_reduces * step, step]);
            }
            Ok(())
        })
        .unwrap();
    }
}

/// Runs 3 ranks that generate without end, until something fails.
fn failing(
    launch: Launch,
    body: impl Fn(&Rank, &mut Model, usize) -> Result<()> + Send + Sync + 'static,
) -> String {
    let checkpoint = open("qwen3-affine-b4-g64");
    let start = Instant::now();
    let error = launch.run(&devices(3), move |rank| -> Result<()> {
        let mut model = load(&checkpoint, &rank, DType::F32)?;
        for offset in 0.. {
            body(&rank, &mut model, offset)?;
            model.forward(&Tensor::new(&[[offset as u32 % 256]], rank.device())?, offset)?;
        }
        Ok(())
    });
    assert!(start.elapsed() < Duration::from_secs(200), "waited for the timeout: {:?}", start.elapsed());
    error.unwrap_err().to_string()
}

#[test]
fn a_failing_rank_ends_a_decode() {
    let launch = Launch::default;
    let error = failing(launch(), |rank, _, offset| match (rank.index(), offset) {
        (1, 5) => Err(candle_quant::Error::Unsupported { what: "step 5".into(), remedy: "stop".into() }),
        _ => Ok(()),
    });
    assert_eq!(error, "rank 1: step 5 is not supported; stop");
    let error = failing(launch(), |rank, _, offset| {
        assert!((rank.index(), offset) != (2, 3), "a wire broke");
        Ok(())
    });
    assert!(error.starts_with("rank 2: panicked: ") && error.contains("a wire broke"), "{error}");
    let error = failing(launch().timeout(Duration::from_secs(10)), |rank, _, offset| {
        if (rank.index(), offset) == (0, 4) {
            std::thread::sleep(Duration::from_secs(600));
        }
        Ok(())
    });
    assert!(error.starts_with("rank 0: has not come to all_reduce_sum of F32 [1, 1, 128]"), "{error}");
    // Another length on one rank.
    let error = failing(launch(), |rank, model, offset| match (rank.index(), offset) {
        (1, 2) => Ok(model.forward(&Tensor::zeros((1, 2), DType::U32, rank.device())?, 2).map(drop)?),
        _ => Ok(()),
    });
    assert!(error.contains("is at all_reduce_sum of F32 [1, ") && error.contains("while rank "), "{error}");
}

#[test]
fn a_config_of_other_sizes_is_an_error_with_its_rank() {
    // The last rank's rows of a weight of wrong shape in the config: every rank refuses.
    let checkpoint = open("llama-untied-mxfp4");
    let mut config = checkpoint.config().clone();
    config["intermediate_size"] = 512.into();
    let error = run(&devices(2), move |rank| {
        let config = Config::from_json(&config)?;
        Model::new(&config, VarBuilder::sharded(&checkpoint, &rank, DType::F32)).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("rank ") && error.contains("mlp.down_proj"), "{error}");
}
