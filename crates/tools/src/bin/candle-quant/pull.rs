//! The `pull` subcommand.

use super::{names, terminal};
use anyhow::Result;
use candle_quant::checkpoint::HubName;
use std::io::Write;

#[derive(clap::Args)]
#[command(after_help = "\
Only the files of one checkpoint are fetched: config, tokenizer and the like, and safetensors, or one GGUF or UQFF model. \
They lie in the cache that Python's huggingface_hub has, too. What was interrupted goes on where it ended.

Variables: HF_HUB_CACHE or HF_HOME for the place of the cache, HF_TOKEN for gated and private models, HF_ENDPOINT for a \
mirror, HF_HUB_OFFLINE=1 to fetch nothing.")]
pub struct Options {
    /// The model: org/model[@revision][:QUANT].
    name: String,
    /// Which of several GGUF or UQFF models, as Q4_K_M or afq4; the same as NAME:QUANT.
    #[arg(long, value_name = "QUANT")]
    include: Option<String>,
}

/// Fetches a model, and prints where it is.
pub fn run(options: &Options) -> Result<()> {
    let mut name = HubName::parse(&options.name)?;
    if let Some(choice) = &options.include {
        name = name.choose(choice)?;
    }
    let path = names::pull(&name)?;
    Ok(writeln!(terminal::stdout(false), "{}", path.display())?)
}
