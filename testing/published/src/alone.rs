//! The packages without the repository around them.

use crate::{Packages, cargo, output, repository};
use anyhow::{Context, Result};
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use std::fs;
use std::process::Command;
use toml::{Table, Value};

/// The packages, unpacked, in a workspace of their own. They find each other as if a registry had them.
pub struct Alone {
    folder: Utf8PathBuf,
    target: Utf8PathBuf,
}

impl Alone {
    /// Unpacks them, in place of earlier ones.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn new(packages: &Packages) -> Result<Self> {
        let folder = packages.target.join("published/alone");
        let root: Table = fs::read_to_string(repository().join("Cargo.toml"))?.parse()?;
        // The profiles of the repository, so that what it has compiled is not compiled again.
        let mut manifest = Table::from_iter([("profile".to_string(), root["profile"].clone())]);
        let members = packages.packages.keys().map(|name| Value::from(name.as_str())).collect();
        let resolver = root["workspace"].get("resolver").cloned().unwrap_or_else(|| "2".into());
        let workspace =
            Table::from_iter([("members".into(), Value::Array(members)), ("resolver".into(), resolver)]);
        manifest.insert("workspace".into(), workspace.into());
        let patched = packages.packages.keys().map(|name| {
            let path = Table::from_iter([("path".to_string(), Value::from(name.as_str()))]);
            (name.clone(), path.into())
        });
        let patch = Table::from_iter([("crates-io".to_string(), Value::Table(patched.collect()))]);
        manifest.insert("patch".into(), patch.into());

        // Only what has changed is written, so that cargo builds only that.
        let mut wanted = vec![folder.join("Cargo.toml"), folder.join("Cargo.lock")];
        write(&wanted[0], manifest.to_string().as_bytes())?;
        write(&wanted[1], &fs::read(repository().join("Cargo.lock"))?)?;
        for (name, package) in &packages.packages {
            for (path, content) in &package.files {
                let file = folder.join(name).join(path);
                write(&file, content)?;
                wanted.push(file);
            }
        }
        remove_others(&folder, &wanted)?;
        Ok(Self { folder, target: packages.target.clone() })
    }

    /// Has cargo build them in the profile that this crate was built in.
    pub fn cargo(&self, command: &str) -> Command {
        let mut cargo = cargo(self.folder.as_std_path());
        cargo.arg(command).arg("--target-dir").arg(&self.target);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        cargo
    }

    /// Runs their unit tests and the examples of their documentation.
    ///
    /// # Errors
    /// If one fails: what it says.
    pub fn test(&self) -> Result<()> {
        // Cargo takes examples alone.
        for kinds in [&["--lib", "--bins"][..], &["--doc"]] {
            output(self.cargo("test").args(kinds))?;
        }
        Ok(())
    }

    /// Checks that they compile.
    ///
    /// # Errors
    /// If they do not: what the compiler says.
    pub fn check(&self) -> Result<()> {
        output(&mut self.cargo("check")).map(drop)
    }
}

fn write(file: &Utf8Path, content: &[u8]) -> Result<()> {
    if fs::read(file).is_ok_and(|old| old == content) {
        return Ok(());
    }
    let folder = file.parent().context("a file in no folder")?;
    fs::create_dir_all(folder).and_then(|()| fs::write(file, content)).with_context(|| file.to_string())
}

/// Removes files below `folder` that are not `wanted`.
fn remove_others(folder: &Utf8Path, wanted: &[Utf8PathBuf]) -> Result<()> {
    for entry in folder.read_dir_utf8()? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_others(entry.path(), wanted)?;
        } else if !wanted.iter().any(|wanted| wanted == entry.path()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
