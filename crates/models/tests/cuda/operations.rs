//! What models are made of, one by one: every operation of candle, and every layer, gives on a device what it gives on the
//! CPU. All that do not are named, in the order in which a model computes them.

use crate::device;
use crate::packed::tensor;
use candle_core::{DType, Device, IndexOp, Result, Tensor, D};
use candle_nn::{ops, rotary_emb, Activation, Module};
use candle_quant::nn::{self, experts, linear_no_bias, ExpertsConfig, Gating, VarBuilder};
use candle_quant::Checkpoint;
use std::process::Command;

/// Computes on both, and keeps what differs.
struct Both {
    device: Device,
    wrong: Vec<String>,
}

fn values(x: &Tensor) -> Result<Vec<f32>> {
    x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

impl Both {
    fn new(device: &Device) -> Self {
        Self { device: device.clone(), wrong: Vec::new() }
    }

    fn compare(&mut self, what: &str, expected: &Tensor, found: &Result<Tensor>) {
        let found = match found.as_ref().map_err(ToString::to_string).and_then(|found| {
            let same = found.dims() == expected.dims();
            let values = values(found).map_err(|error| error.to_string());
            if same {
                values
            } else {
                Err(format!("expected {:?}, found {:?}", expected.dims(), found.dims()))
            }
        }) {
            Ok(found) => found,
            Err(error) => return self.wrong.push(format!("{what}: {error}")),
        };
        let expected = values(expected).unwrap();
        let largest = expected.iter().filter(|x| x.is_finite()).fold(1e-3f32, |most, x| most.max(x.abs()));
        let differs = |(expected, found): (&f32, &f32)| {
            expected != found
                && ((expected - found).abs() > 2e-5 * largest || found.is_nan() != expected.is_nan())
        };
        let places: Vec<_> = (0..expected.len()).filter(|&i| differs((&expected[i], &found[i]))).collect();
        let Some(&first) = places.first() else { return };
        let rest = &places[..places.len().min(6)];
        self.wrong.push(format!(
            "{what}: {} of {} differ, at {rest:?}..{:?}: expected {} of at most {largest}, found {}",
            places.len(),
            expected.len(),
            places.last(),
            expected[first],
            found[first],
        ));
    }

    /// `f` of the same inputs, twice.
    fn check(&mut self, what: &str, inputs: &[&Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Tensor {
        let on = |device: &Device| inputs.iter().map(|x| x.to_device(device).unwrap()).collect::<Vec<_>>();
        let expected = f(&on(&Device::Cpu)).expect(what);
        let there = on(&self.device);
        let [found, again] = [f(&there), f(&there)];
        self.compare(what, &expected, &found);
        if let (Ok(found), Ok(again)) = (&found, &again) {
            if values(found).unwrap() != values(again).unwrap() {
                self.wrong.push(format!("{what}: not the same twice"));
            }
        }
        expected
    }

    #[track_caller]
    fn finish(self) {
        assert!(
            self.wrong.is_empty(),
            "{} differ from the CPU:\n{}",
            self.wrong.len(),
            self.wrong.join("\n")
        );
    }
}

/// Sizes of the fixtures: those of a token, of a head, and of a text.
const SIZES: [(usize, usize, usize); 4] = [(128, 32, 7), (128, 32, 14), (256, 64, 7), (256, 64, 14)];
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

#[test]
fn of_candle() {
    let Some(device) = device() else { return };
    let mut both = Both::new(&device);
    for (hidden, head_dim, len) in SIZES {
        let name = |what: &str| format!("{what}, hidden {hidden}, head_dim {head_dim}, {len} tokens");
        let x = tensor(&[1, len, hidden], 1);
        let weight = tensor(&[hidden], 2);
        both.check(&name("rms_norm"), &[&x, &weight], |t| ops::rms_norm(&t[0], &t[1], 1e-6));
        both.check(&name("mean of squares"), &[&x], |t| t[0].sqr()?.mean_keepdim(D::Minus1));
        both.check(&name("broadcast_mul"), &[&x, &weight], |t| t[0].broadcast_mul(&t[1]));
        both.check(&name("silu"), &[&x], |t| t[0].silu());
        both.check(&name("gelu"), &[&x], |t| t[0].gelu());
        both.check(&name("gelu_erf"), &[&x], |t| t[0].gelu_erf());
        both.check(&name("add"), &[&x, &x], |t| &t[0] + &t[1]);
        both.check(&name("multiply"), &[&x, &x], |t| &t[0] * &t[1]);
        both.check(&name("affine"), &[&x], |t| t[0].affine(0.7, -0.2));
        let table = tensor(&[64, hidden], 3);
        let ids = Tensor::arange(3u32, 3 + len as u32, &Device::Cpu).unwrap();
        both.check(&name("index_select"), &[&table, &ids], |t| t[0].index_select(&t[1], 0));

        let heads = tensor(&[1, len, HEADS, head_dim], 4);
        let of_head = tensor(&[head_dim], 5);
        both.check(&name("rms_norm of heads"), &[&heads, &of_head], |t| ops::rms_norm(&t[0], &t[1], 1e-6));
        let turned = both.check(&name("transposed copy"), &[&heads], |t| t[0].transpose(1, 2)?.contiguous());
        both.check(&name("rms_norm of transposed heads"), &[&turned, &of_head], |t| {
            ops::rms_norm(&t[0], &t[1], 1e-6)
        });
        let places = Tensor::arange(0f32, 64., &Device::Cpu).unwrap().unsqueeze(1).unwrap();
        let frequencies = tensor(&[1, head_dim / 2], 6).abs().unwrap();
        let angles = both.check(&name("outer product"), &[&places, &frequencies], |t| t[0].matmul(&t[1]));
        let cos = both.check(&name("cos"), &[&angles], |t| t[0].cos());
        let sin = both.check(&name("sin"), &[&angles], |t| t[0].sin());
        both.check(&name("rope"), &[&turned, &cos, &sin], |t| rotary_emb::rope(&t[0], &t[1], &t[2]));
        let (cos, sin) = (cos.narrow(0, 0, len).unwrap(), sin.narrow(0, 0, len).unwrap());
        both.check(&name("rope_thd"), &[&heads, &cos, &sin], |t| rotary_emb::rope_thd(&t[0], &t[1], &t[2]));

        let [k, v] = [7, 8].map(|seed| tensor(&[1, KV_HEADS, len, head_dim], seed));
        both.check(&name("repeated heads"), &[&k], |t| {
            Tensor::cat(&[&t[0], &t[0]], 2)?.reshape((1, HEADS, len, head_dim))
        });
        let cache = tensor(&[2, 1, KV_HEADS, 256, head_dim], 9);
        both.check(&name("slice_set of a transposed view"), &[&cache, &heads], |t| {
            let cache = t[0].copy()?;
            let view = t[1].narrow(2, 0, KV_HEADS)?.transpose(1, 2)?.contiguous()?;
            cache.i(0)?.slice_set(&view, 2, 3)?;
            Ok(cache)
        });
        let scores = both.check(&name("q k^T"), &[&turned, &turned], |t| t[0].matmul(&t[1].t()?));
        let grouped = turned.reshape((1, KV_HEADS, HEADS / KV_HEADS * len, head_dim)).unwrap();
        both.check(&name("grouped q k^T"), &[&grouped, &k], |t| t[0].matmul(&t[1].t()?));
        both.check(&name("grouped q k^T of a cache"), &[&grouped, &cache], |t| {
            t[0].matmul(&t[1].i(0)?.narrow(2, 0, len)?.t()?)
        });
        let mask = Tensor::tril2(len, DType::U8, &Device::Cpu).unwrap();
        both.check(&name("tril2"), &[&x], |t| Tensor::tril2(len, DType::U8, t[0].device()));
        let masked = both.check(&name("where_cond"), &[&mask, &scores], |t| {
            let least = (t[1].zeros_like()? + f64::NEG_INFINITY)?;
            t[0].broadcast_as(t[1].shape())?.where_cond(&t[1], &least)
        });
        both.check(&name("broadcast_add of a mask"), &[&scores, &mask], |t| {
            t[0].broadcast_add(&t[1].to_dtype(DType::F32)?)
        });
        both.check(&name("divided"), &[&scores], |t| &t[0] / (head_dim as f64).sqrt());
        let p = both.check(&name("softmax"), &[&masked], |t| ops::softmax_last_dim(&t[0]));
        both.check(&name("p v"), &[&p, &turned], |t| t[0].matmul(&t[1]));
        let grouped = p.reshape((1, KV_HEADS, HEADS / KV_HEADS * len, len)).unwrap();
        both.check(&name("grouped p v"), &[&grouped, &v], |t| t[0].matmul(&t[1]));
        both.check(&name("grouped p v of a cache"), &[&grouped, &cache], |t| {
            t[0].matmul(&t[1].i(1)?.narrow(2, 0, len)?)
        });
        both.check(&name("heads side by side"), &[&turned], |t| t[0].transpose(1, 2)?.flatten_from(2));

        for experts in [4, 8] {
            let name = |what: &str| name(&format!("{what} of {experts} experts"));
            let router = tensor(&[experts, hidden], 10);
            let logits =
                both.check(&name("router"), &[&x, &router], |t| t[0].flatten_to(1)?.matmul(&t[1].t()?));
            both.check(&name("router by candle_nn"), &[&x, &router], |t| {
                candle_nn::Linear::new(t[1].clone(), None).forward(&t[0])
            });
            let scores = both.check(&name("softmax"), &[&logits], |t| ops::softmax_last_dim(&t[0]));
            both.check(&name("sigmoid"), &[&logits], |t| ops::sigmoid(&t[0]));
            let ids = both.check(&name("arg_sort"), &[&scores], |t| t[0].arg_sort_last_dim(false));
            let ids = both.check(&name("narrow"), &[&ids], |t| t[0].narrow(1, 0, 2)?.contiguous());
            let chosen =
                both.check(&name("gather"), &[&scores, &ids], |t| t[0].gather(&t[1].contiguous()?, 1));
            both.check(&name("normalized"), &[&chosen], |t| {
                t[0].broadcast_div(&t[0].sum_keepdim(D::Minus1)?)
            });
        }
    }
    both.finish();
}

/// A checkpoint among the fixtures, with the number of its experts and of elements in each, if it has any.
const CHECKPOINTS: [(&str, Option<(usize, usize)>); 6] = [
    ("mlx/qwen3-affine-b4-g64", None),
    ("mlx/llama-mixed-custom", None),
    ("hf/awq-g64", None),
    ("uqff/afq4", None),
    ("uqff/moe_afq4", Some((4, 128))),
    ("mlx/qwen3moe-affine-b4-g64", Some((8, 128))),
];

/// A first layer on one device. `keep` is told of everything on the way.
fn layer(
    vb: &VarBuilder,
    moe: Option<(usize, usize)>,
    tokens: &Tensor,
    keep: &mut dyn FnMut(&str, &Tensor),
) -> Result<Tensor> {
    let config = vb.checkpoint().unwrap().config().clone();
    let size = |name: &str| config[name].as_u64().unwrap() as usize;
    let [vocabulary, hidden, inner, heads, kv_heads] =
        ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
            .map(size);
    let (head_dim, len) = (size("head_dim"), tokens.dim(1)?);
    let mut kept = |name: &str, x: Result<Tensor>| -> Result<Tensor> {
        let x = x?;
        keep(name, &x);
        Ok(x)
    };
    let model = vb.pp("model");
    let vb = model.pp("layers.0");
    let norm = |x: &Tensor, size: usize, name: &str| {
        let weight = name.split('.').fold(vb.clone(), |vb, name| vb.pp(name)).get(size, "weight")?;
        ops::rms_norm(x, &weight, 1e-6)
    };
    let project = |x: &Tensor, k: usize, n: usize, block: &str, name: &str| {
        linear_no_bias(k, n, vb.pp(block).pp(name))?.forward(x)
    };
    let x = kept("embedding", nn::embedding(vocabulary, hidden, model.pp("embed_tokens"))?.forward(tokens))?;
    let seen = kept("norm", norm(&x, hidden, "input_layernorm"))?;
    let q = kept("q_proj", project(&seen, hidden, heads * head_dim, "self_attn", "q_proj"))?;
    let k = kept("k_proj", project(&seen, hidden, kv_heads * head_dim, "self_attn", "k_proj"))?;
    let v = kept("v_proj", project(&seen, hidden, kv_heads * head_dim, "self_attn", "v_proj"))?;
    let split =
        |x: &Tensor, heads: usize| x.reshape((1, len, heads, head_dim))?.transpose(1, 2)?.contiguous();
    let (mut q, mut k) = (kept("split q", split(&q, heads))?, kept("split k", split(&k, kv_heads))?);
    let v = kept("split v", split(&v, kv_heads))?;
    if vb.pp("self_attn").contains_tensor("q_norm.weight") {
        q = kept("q_norm", norm(&q, head_dim, "self_attn.q_norm"))?;
        k = kept("k_norm", norm(&k, head_dim, "self_attn.k_norm"))?;
    }
    let angle = |i: usize| (i / (head_dim / 2)) as f32 * 0.1f32.powi((i % (head_dim / 2)) as i32 / 4);
    let angles: Vec<f32> = (0..len * head_dim / 2).map(angle).collect();
    let angles = Tensor::from_vec(angles, (len, head_dim / 2), x.device())?;
    let (cos, sin) = (kept("cos", angles.cos())?, kept("sin", angles.sin())?);
    let q = kept("turned q", rotary_emb::rope(&q, &cos, &sin))?;
    let k = kept("turned k", rotary_emb::rope(&k, &cos, &sin))?;
    let q = q.reshape((1, kv_heads, heads / kv_heads * len, head_dim))?;
    let scores = kept("scores", (q / (head_dim as f64).sqrt())?.matmul(&k.t()?))?;
    let scores = scores.reshape((1, heads, len, len))?;
    let mask = Tensor::tril2(len, DType::F32, x.device())?.affine(1e4, -1e4)?;
    let scores = kept("masked", scores.broadcast_add(&mask))?;
    let p = kept("softmax", ops::softmax_last_dim(&scores))?;
    let p = p.reshape((1, kv_heads, heads / kv_heads * len, len))?;
    let y = kept("seen", p.matmul(&v))?.reshape((1, heads, len, head_dim))?;
    let y = kept("joined", y.transpose(1, 2)?.flatten_from(2))?;
    let y = kept("o_proj", project(&y, heads * head_dim, hidden, "self_attn", "o_proj"))?;
    let x = kept("sum", x + y)?;
    let seen = kept("second norm", norm(&x, hidden, "post_attention_layernorm"))?;
    let y = match moe {
        None => {
            let gate = kept("gate_proj", project(&seen, hidden, inner, "mlp", "gate_proj"))?;
            let up = kept("up_proj", project(&seen, hidden, inner, "mlp", "up_proj"))?;
            let gate = kept("silu", gate.silu())?;
            let y = kept("gated", gate * up)?;
            kept("down_proj", project(&y, inner, hidden, "mlp", "down_proj"))?
        }
        Some((count, intermediate_size)) => {
            let vb = vb.pp("mlp");
            let logits = kept("router", linear_no_bias(hidden, count, vb.pp("gate"))?.forward(&seen))?;
            let scores = kept("scores of experts", ops::softmax_last_dim(&logits))?;
            let ids = scores.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, 2)?.contiguous();
            let ids = kept("experts", ids)?;
            let weights = kept("weights of experts", scores.gather(&ids, D::Minus1))?;
            let config = ExpertsConfig {
                experts: count,
                hidden_size: hidden,
                intermediate_size,
                bias: false,
                gating: Gating::Plain(Activation::Silu),
            };
            kept("what experts make", experts(&config, vb)?.forward(&seen, &ids, &weights))?
        }
    };
    kept("layer", x + y)
}

/// Each step after the last, on the device as on the CPU; and the whole once more, its parts forgotten at once.
#[test]
fn of_a_layer() {
    let Some(device) = device() else { return };
    let mut both = Both::new(&device);
    for (name, moe) in CHECKPOINTS {
        let folder = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/");
        let checkpoint = Checkpoint::open(format!("{folder}{name}")).unwrap();
        let on = |device: &Device| VarBuilder::from_checkpoint(&checkpoint, DType::F32, device);
        for len in [1u32, 3, 7, 14] {
            let ids: Vec<u32> = (0..len).map(|i| (i * 37 + 5) % 64).collect();
            let tokens = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let there = tokens.to_device(&device).unwrap();
            let (mut expected, mut found) = (Vec::new(), Vec::new());
            let whole = layer(&on(&Device::Cpu), moe, &tokens, &mut |step, x| {
                expected.push((step.to_string(), x.clone()));
            })
            .unwrap();
            let first = layer(&on(&device), moe, &there, &mut |_, x| found.push(Ok(x.clone())));
            for ((step, expected), found) in expected.iter().zip(&found) {
                both.compare(&format!("{name}, {len} tokens: {step}"), expected, found);
            }
            both.compare(&format!("{name}, {len} tokens"), &whole, &first);
            let forgotten = layer(&on(&device), moe, &there, &mut |_, _| {});
            both.compare(&format!("{name}, {len} tokens, its parts forgotten"), &whole, &forgotten);
        }
    }
    both.finish();
}

/// Both tests above in processes of their own: with nothing beside them, and where no kernel starts early.
#[test]
fn alone_and_without_early_starts() {
    let Some(_) = device() else { return };
    let mut wrong = String::new();
    for early_start in ["on", "off"] {
        for test in ["operations::of_candle", "operations::of_a_layer"] {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture"])
                .env("CANDLE_QUANT_EARLY_START", early_start)
                .output()
                .unwrap();
            if !output.status.success() {
                let said = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
                wrong += &format!("\nearly start {early_start}: {}", said.concat());
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
