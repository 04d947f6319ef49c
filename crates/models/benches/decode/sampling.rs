//! Drawing one token from the logits of a large vocabulary.

use crate::options::{Library, Options};
use crate::report::{Case, Report};
use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_quant_models::generate::{Sampler, Sampling};
use candle_transformers::generation::{LogitsProcessor, Sampling as CandleSampling};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::time::Instant;

const TEMPERATURE: f64 = 0.8;
const TOP_K: usize = 40;
const TOP_P: f64 = 0.9;

/// Draws a token in one way.
type Draw = Box<dyn FnMut(&Tensor) -> Result<()>>;

pub fn measure(options: &Options, report: &mut Report) -> Result<()> {
    let vocabulary = options.sampled_vocabulary();
    let mut rng = StdRng::seed_from_u64(3);
    // Sums of uniform numbers: near to a normal distribution of deviation 2.5, with few likely tokens.
    let mut logit = || (0..12).map(|_| rng.random_range(-0.5f32..0.5)).sum::<f32>() * 2.5;
    let logits = Tensor::from_vec((0..vocabulary).map(|_| logit()).collect(), vocabulary, &Device::Cpu)?;
    let temperature = TEMPERATURE;
    let ways = [
        ("greedy", Sampling::GREEDY, CandleSampling::ArgMax),
        ("temperature", sampling(None, None), CandleSampling::All { temperature }),
        ("top-k 40", sampling(Some(TOP_K), None), CandleSampling::TopK { k: TOP_K, temperature }),
        ("top-p 0.9", sampling(None, Some(TOP_P)), CandleSampling::TopP { p: TOP_P, temperature }),
        (
            "top-k 40, top-p 0.9",
            sampling(Some(TOP_K), Some(TOP_P)),
            CandleSampling::TopKThenTopP { k: TOP_K, p: TOP_P, temperature },
        ),
    ];
    for (name, ours, candles) in ways {
        let mut sampler = Sampler::new(ours, Some(1))?;
        let mut processor = LogitsProcessor::from_sampling(1, candles);
        let mut draws: Vec<(Library, Draw)> = vec![
            (Library::CandleQuant, Box::new(move |logits| Ok(sampler.sample(logits).map(drop)?))),
            (Library::Candle, Box::new(move |logits| Ok(processor.sample(logits).map(drop)?))),
        ];
        draws.retain(|(library, _)| options.library(*library));
        let mut values = vec![Vec::new(); draws.len()];
        for _ in 0..options.rounds {
            for ((_, draw), values) in draws.iter_mut().zip(&mut values) {
                let start = Instant::now();
                (0..options.steps).try_for_each(|_| draw(&logits))?;
                values.push(start.elapsed().as_secs_f64() * 1e3 / f64::from(options.steps));
            }
        }
        let case = Case { kind: "sampling", model: "", bits: 0, case: name.to_string() };
        for ((library, _), values) in draws.iter().zip(&values) {
            report.write(case.figure(library.name(), "ms", values))?;
        }
    }
    Ok(())
}

fn sampling(top_k: Option<usize>, top_p: Option<f64>) -> Sampling {
    Sampling { temperature: TEMPERATURE, top_k, top_p, ..Sampling::GREEDY }
}
