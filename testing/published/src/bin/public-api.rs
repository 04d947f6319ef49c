//! Compares the public interfaces of all crates with those that are recorded.
//!
//!   public-api [--accept]
//!
//! --accept: records them.

use anyhow::{Result, bail, ensure};
use published::public_api::{FORMAT, Interface, Listed, list};
use published::{Alone, Packages};
use std::process::ExitCode;
use std::{env, fs};

fn main() -> ExitCode {
    let done = run();
    if let Err(error) = &done {
        eprintln!("{error:#}");
    }
    ExitCode::from(u8::from(done.is_err()))
}

fn run() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let accept = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--accept"] => true,
        _ => bail!("{}: --accept, or nothing", arguments.join(" ")),
    };
    let packages = Packages::make()?;
    let alone = Alone::new(&packages)?;
    let interfaces = match list(&packages, &alone)? {
        Listed::Interfaces(interfaces) => interfaces,
        Listed::OtherFormat(format) => {
            let problem = format!(
                "the public interfaces were not compared: this rustdoc writes JSON in format {format}, and \
                testing/published reads {FORMAT}; take the version of the crate public-api that reads it"
            );
            ensure!(env::var_os("CI").is_none(), "{problem}");
            eprintln!("{problem}");
            return Ok(());
        }
    };
    if accept {
        return interfaces
            .iter()
            .try_for_each(|interface| Ok(fs::write(interface.file(), interface.text())?));
    }
    let changed = interfaces.iter().map(compare).collect::<Result<Vec<_>>>()?;
    ensure!(
        !changed.contains(&true),
        "the public interface has changed; if that is meant, record it: cargo run -p published -- --accept, and say it in \
        CHANGELOG.md"
    );
    let items: usize = interfaces.iter().map(|interface| interface.items.len()).sum();
    println!("{items} public items of {} crates are as recorded", interfaces.len());
    Ok(())
}

/// Prints what has changed; whether anything has.
fn compare(interface: &Interface) -> Result<bool> {
    let recorded = match fs::read_to_string(interface.file()) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        recorded => recorded?,
    };
    let (removed, added) = interface.changes(&recorded);
    removed.iter().for_each(|item| println!("{}: - {item}", interface.name));
    added.iter().for_each(|item| println!("{}: + {item}", interface.name));
    Ok(!removed.is_empty() || !added.is_empty())
}
