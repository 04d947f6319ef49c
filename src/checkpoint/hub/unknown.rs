//! Why no model is known of a name.

/// Nothing is known of a model: it is not in the cache, and can't be looked for elsewhere, or is not there.
pub(in crate::checkpoint) struct Unknown {
    pub problem: String,
    pub remedy: String,
}

impl Unknown {
    pub fn new(problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { problem: problem.into(), remedy: remedy.into() }
    }

    #[cfg(feature = "hub")]
    pub fn error(self, name: &super::Name) -> crate::Error {
        crate::Error::hub(name, self.problem, self.remedy)
    }
}
