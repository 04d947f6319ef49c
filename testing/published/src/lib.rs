//! What a release uploads. The tests look at the packages, their READMEs and their dependencies; the program `public-api`
//! compares the public interfaces with those that are recorded in the folder `public-api`.

mod alone;
mod packages;
pub mod public_api;

pub use alone::Alone;
pub use packages::{Package, Packages};

use anyhow::{Context, Result, ensure};
use std::env;
use std::path::Path;
use std::process::Command;

/// The root of the repository.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// cargo in `folder`, as if a user had called it.
pub fn cargo(folder: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(folder).env_remove("RUSTDOCFLAGS").env_remove("CANDLE_QUANT_REPOSITORY");
    // What cargo says of this crate. Build scripts look at it, and would run again.
    let of_this = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_this)) {
        command.env_remove(name);
    }
    command
}

/// What the command prints.
///
/// # Errors
/// If it fails: with all that it said.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}
