//! What is in the packages, whether that is enough, where their READMEs lead, what they depend on.

mod alone;
mod contents;
mod dependencies;
mod manifests;
mod readme;

use published::Packages;
use std::sync::LazyLock;

static PACKAGES: LazyLock<Packages> = LazyLock::new(|| Packages::make().expect("cargo package"));
