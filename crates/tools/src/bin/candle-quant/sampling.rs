//! How tokens are chosen, on the command line: shared by `generate` and `chat`.

use candle_quant_models::generate::Params;

// (A doc comment here would replace that of the command.) Named as those of candle's examples.
#[derive(clap::Args, Debug)]
pub struct SamplingOptions {
    /// Divides the logits before sampling; 0 always takes the most likely token [default: this and the next four as the
    /// model's generation_config.json says, else 0.8].
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Sample only among the most likely tokens whose probabilities sum to this.
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Sample only among this many most likely tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample only among tokens that are at least this times as likely as the most likely one.
    #[arg(long, allow_negative_numbers = true)]
    min_p: Option<f64>,
    /// Divide the logits of tokens that are in the prompt or the text (multiply those below 0); 1 changes nothing.
    #[arg(long, value_name = "PENALTY", allow_negative_numbers = true)]
    repetition_penalty: Option<f64>,
    /// Subtract this from the logits of tokens that are in the text.
    #[arg(long, value_name = "PENALTY", allow_negative_numbers = true)]
    presence_penalty: Option<f64>,
    /// Subtract this from the logit of a token for each time that it is in the text.
    #[arg(long, value_name = "PENALTY", allow_negative_numbers = true)]
    frequency_penalty: Option<f64>,
    /// End the text before this one; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Guess up to so many next tokens, from what followed the last ones where they stood before, and compute them together
    /// with the last: faster where a text repeats itself, by the same draws.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    lookup: usize,
    /// Repeat the run that reported this seed; every run differs otherwise.
    #[arg(long)]
    seed: Option<u64>,
}

impl SamplingOptions {
    /// `params`, which the checkpoint gives, with what was asked for in place of it.
    pub fn apply(&self, mut params: Params) -> Params {
        let sampling = &mut params.sampling;
        sampling.temperature = self.temperature.unwrap_or(sampling.temperature);
        sampling.top_p = self.top_p.or(sampling.top_p);
        sampling.top_k = self.top_k.or(sampling.top_k);
        sampling.min_p = self.min_p.or(sampling.min_p);
        sampling.repetition_penalty = self.repetition_penalty.unwrap_or(sampling.repetition_penalty);
        sampling.presence_penalty = self.presence_penalty.unwrap_or(sampling.presence_penalty);
        sampling.frequency_penalty = self.frequency_penalty.unwrap_or(sampling.frequency_penalty);
        if !self.stop.is_empty() {
            params.stop_strings.clone_from(&self.stop);
        }
        params.lookup = self.lookup;
        params.seed = self.seed;
        params
    }
}
