//! A plan as a recipe file, with a rule for each tensor.

use super::plan::ConvertPlan;
use crate::convert::output::Job;
use crate::convert::recipe::{Fallback, Spec};
use candle_quant::{Error, Result};
use globset::escape;
use serde::Serialize;

#[derive(Serialize)]
struct SavedRecipe {
    format: String,
    fallback: Fallback,
    defaults: bool,
    rule: Vec<SavedRule>,
}

#[derive(Serialize)]
struct SavedRule {
    tensors: String,
    format: String,
}

impl ConvertPlan {
    /// A recipe file, as [`Recipe::from_toml`](crate::convert::Recipe::from_toml) reads it, with a rule for each tensor that
    /// does not stay what it is. With the same options otherwise, it gives the same output.
    ///
    /// # Errors
    /// If there are files of several recipes.
    pub fn recipe_toml(&self) -> Result<String> {
        if self.is_several {
            let expected = "a plan of one recipe";
            return Err(Error::mismatch(
                "a recipe file",
                expected,
                "several; save that of each format alone",
            ));
        }
        let is_said = |job: &&Job| {
            job.format().is_some() || job.planned.fallback.is_some() || matches!(job.spec, Spec::Cast(_))
        };
        let mut jobs: Vec<_> = self.jobs().filter(|job| job.spec != Spec::Keep).filter(is_said).collect();
        // A rule for `a` also holds for `a.weight`, whose own one has to come first.
        jobs.sort_by_key(|job| !job.planned.name.ends_with(".weight"));
        let rule = |tensors: String, spec: Spec| SavedRule { tensors, format: spec.to_string() };
        let mut rules: Vec<_> = jobs.iter().map(|job| rule(escape(&job.planned.name), job.spec)).collect();
        rules.push(rule("*".into(), Spec::Keep));
        let format = self.top.unwrap_or(Spec::Keep).to_string();
        let file = SavedRecipe { format, fallback: self.fallback, defaults: false, rule: rules };
        toml::to_string(&file)
            .map_err(|error| Error::file(self.source.path(), error.to_string(), "report this"))
    }
}
