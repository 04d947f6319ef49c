//! The public interface of each crate as a list of lines.

use crate::{Alone, Packages, output, repository};
use anyhow::{Context, Result};
use cargo_metadata::TargetKind;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

/// The format of rustdoc's JSON that `public_api` reads.
pub const FORMAT: u32 = 57;

/// A crate and its interface, a line for each item.
pub struct Interface {
    /// The name of the crate.
    pub name: String,
    /// The items, sorted.
    pub items: BTreeSet<String>,
}

/// What rustdoc wrote.
pub enum Listed {
    /// The interfaces of all crates.
    Interfaces(Vec<Interface>),
    /// A format that can't be read.
    OtherFormat(u32),
}

/// The interfaces of the packages with the features that docs.rs shows.
///
/// # Errors
/// If they do not compile.
pub fn list(packages: &Packages, alone: &Alone) -> Result<Listed> {
    // Stable compilers know how, if they are told that they may. The variable for cargo itself would build all dependencies
    // anew, as some look at it.
    let mut doc = alone.cargo("doc");
    doc.args(["--no-deps", "--lib"]).env("RUSTDOC", repository().join("testing/published/rustdoc.sh"));
    doc.env("RUSTDOCFLAGS", "--cfg docsrs -Z unstable-options --output-format json");
    output(&mut doc)?;
    let mut interfaces = Vec::new();
    for (name, package) in &packages.packages {
        let libraries = |target: &&cargo_metadata::Target| target.kind.contains(&TargetKind::Lib);
        let library =
            package.metadata.targets.iter().find(libraries).context("a package without a library")?;
        let file = packages.target.join(format!("doc/{}.json", library.name));
        let format = format_of(&fs::read_to_string(&file).with_context(|| file.to_string())?)?;
        if format != FORMAT {
            return Ok(Listed::OtherFormat(format));
        }
        // What every type has by a blanket implementation is not listed.
        let builder = public_api::Builder::from_rustdoc_json(&file).omit_blanket_impls(true);
        let items = builder.build()?.items().map(ToString::to_string).filter(|item| is_ours(item)).collect();
        interfaces.push(Interface { name: name.clone(), items });
    }
    Ok(Listed::Interfaces(interfaces))
}

/// The number of the format of rustdoc's JSON.
fn format_of(json: &str) -> Result<u32> {
    #[derive(Deserialize)]
    struct Format {
        format_version: u32,
    }
    let mut reader = serde_json::Deserializer::from_str(json);
    reader.disable_recursion_limit();
    Ok(Format::deserialize(&mut reader)?.format_version)
}

/// Traits that the compiler implements by itself are as many as it knows; two of them matter to users.
fn is_ours(item: &str) -> bool {
    let Some(implemented) = item.strip_prefix("impl") else { return true };
    let automatic =
        ["::Freeze for", "::RefUnwindSafe for", "::Unpin for", "::UnsafeUnpin for", "::UnwindSafe for"];
    !automatic.iter().any(|end| implemented.contains(end))
}

impl Interface {
    /// The file that records it.
    pub fn file(&self) -> PathBuf {
        repository().join(format!("testing/published/public-api/{}.txt", self.name))
    }

    /// Lines that are recorded but no longer there, and lines that are not recorded.
    pub fn changes(&self, recorded: &str) -> (Vec<String>, Vec<String>) {
        let recorded: BTreeSet<String> = recorded.lines().map(String::from).collect();
        let removed = recorded.difference(&self.items).cloned().collect();
        let added = self.items.difference(&recorded).cloned().collect();
        (removed, added)
    }

    /// The text to record.
    pub fn text(&self) -> String {
        self.items.iter().map(|item| format!("{item}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen() {
        let items = ["pub fn a::b()", "pub fn a::c(u8)"].map(String::from).into();
        let interface = Interface { name: "a".into(), items };
        assert_eq!(interface.changes(&interface.text()), (vec![], vec![]));
        let (removed, added) = interface.changes("pub fn a::b()\npub fn a::c(u16)\n");
        assert_eq!((removed, added), (vec!["pub fn a::c(u16)".into()], vec!["pub fn a::c(u8)".into()]));
    }

    #[test]
    fn only_two_automatic_traits_are_listed() {
        assert!(is_ours("impl core::marker::Send for a::B"));
        assert!(is_ours("impl<T> !core::marker::Sync for a::B<T>"));
        assert!(is_ours("pub fn a::unwind() -> bool"));
        assert!(!is_ours("impl<T> core::panic::unwind_safe::UnwindSafe for a::B<T> where T: Clone"));
    }
}
