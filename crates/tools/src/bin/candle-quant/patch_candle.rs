//! `patch-candle`: a candle-nn that runs packed weights.

use super::terminal;
use anyhow::{Context, Result};
use candle_quant_tools::patch_candle::{downloaded_package, patch_candle};
use std::io::Write;
use std::path::PathBuf;

/// Options of `patch-candle`.
#[derive(clap::Args)]
pub struct Options {
    /// The folder to write, which must not exist.
    dir: PathBuf,
    /// The package of candle-nn, if it is not in cargo's registry.
    #[arg(long, value_name = "FILE")]
    package: Option<PathBuf>,
}

/// Writes the patched candle-nn and says how to use it.
pub fn run(options: &Options) -> Result<()> {
    let package = match &options.package {
        Some(package) => package.clone(),
        None => downloaded_package(&cargo_home()?)?,
    };
    patch_candle(&package, &options.dir)?;
    let mut stdout = terminal::stdout(false);
    writeln!(stdout, "Wrote {}. Use it in Cargo.toml of the workspace:", options.dir.display())?;
    writeln!(stdout)?;
    writeln!(stdout, "[patch.crates-io]")?;
    writeln!(stdout, "candle-nn = {{ path = {:?} }}", std::path::absolute(&options.dir)?)?;
    Ok(stdout.flush()?)
}

/// Where cargo keeps what it downloads.
fn cargo_home() -> Result<PathBuf> {
    let set = std::env::var_os("CARGO_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let default = || Some(std::env::home_dir()?.join(".cargo"));
    set.or_else(default).context("neither CARGO_HOME nor HOME is set; name the package with --package")
}
