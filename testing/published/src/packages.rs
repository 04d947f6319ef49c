//! The packages, as cargo makes them.

use crate::{cargo, output, repository};
use anyhow::{Context, Result};
use cargo_metadata::camino::Utf8PathBuf;
use cargo_metadata::{Metadata, MetadataCommand};
use flate2::read::GzDecoder;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use tar::Archive;

/// A package, as a registry gets it.
pub struct Package {
    /// What cargo knows of it.
    pub metadata: cargo_metadata::Package,
    /// Its folder, seen from the root of the repository; empty for the root.
    pub folder: Utf8PathBuf,
    /// What is in it, by paths that begin below the folder that it is unpacked to.
    pub files: BTreeMap<Utf8PathBuf, Vec<u8>>,
    /// The size of what is uploaded and downloaded.
    pub compressed: u64,
}

/// All that this repository publishes.
pub struct Packages {
    /// By name.
    pub packages: BTreeMap<String, Package>,
    /// Where cargo builds.
    pub target: Utf8PathBuf,
}

impl Packages {
    /// Has cargo make the packages of all members that are published, changes that are not committed included.
    ///
    /// # Errors
    /// If cargo does not.
    pub fn make() -> Result<Self> {
        let metadata =
            MetadataCommand::new().current_dir(repository()).no_deps().exec().context("cargo metadata")?;
        let target = metadata.target_directory.join("published");
        let mut command = cargo(repository());
        command
            .args(["package", "--workspace", "--no-verify", "--allow-dirty", "--offline", "--target-dir"])
            .arg(&target);
        for member in metadata.packages.iter().filter(|package| !is_published(package)) {
            command.arg("--exclude").arg(member.name.as_str());
        }
        output(&mut command)?;
        let published = metadata.packages.iter().filter(|package| is_published(package));
        let packages = published
            .map(|package| {
                let file = target.join(format!("package/{}-{}.crate", package.name, package.version));
                let package = Package::read(package.clone(), &metadata, &file);
                package
                    .with_context(|| file.to_string())
                    .map(|package| (package.metadata.name.to_string(), package))
            })
            .collect::<Result<_>>()?;
        Ok(Self { packages, target: metadata.target_directory })
    }
}

fn is_published(package: &cargo_metadata::Package) -> bool {
    package.publish.is_none()
}

impl Package {
    fn read(package: cargo_metadata::Package, all: &Metadata, file: &Utf8PathBuf) -> Result<Self> {
        let folder = package.manifest_path.parent().context("a manifest in no folder")?;
        let folder = folder.strip_prefix(&all.workspace_root)?.to_owned();
        let compressed = fs::metadata(file)?.len();
        let mut files = BTreeMap::new();
        for entry in Archive::new(GzDecoder::new(File::open(file)?)).entries()? {
            let mut entry = entry?;
            let path = Utf8PathBuf::try_from(entry.path()?.into_owned())?;
            // All are in one folder.
            let path = path.components().skip(1).collect();
            let mut content = Vec::new();
            entry.read_to_end(&mut content)?;
            files.insert(path, content);
        }
        Ok(Self { metadata: package, folder, files, compressed })
    }

    /// A text file of the package.
    ///
    /// # Errors
    /// If it is missing, or no UTF-8.
    pub fn text(&self, path: &str) -> Result<&str> {
        let file = self.files.get(path.as_ref() as &cargo_metadata::camino::Utf8Path);
        let file = file.with_context(|| format!("{path} is not in the package of {}", self.metadata.name))?;
        Ok(std::str::from_utf8(file)?)
    }
}
