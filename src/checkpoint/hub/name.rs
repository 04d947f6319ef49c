//! Names of models of the Hugging Face hub: `org/model`, `org/model@revision:Q4_K_M`, `hf.co/org/model`.

use super::cache::Commit;
use crate::{Error, Result};
use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// What people write before a name, as they copied it from a browser or from other programs.
const HOSTS: [&str; 2] = ["hf.co/", "huggingface.co/"];

/// The revision of a name without one.
const DEFAULT_REVISION: &str = "main";

/// The most characters of `org/model`, of a revision, and of a choice.
const LONGEST_REPO: usize = 96;
const LONGEST: usize = 200;

const REMEDY: &str =
    "write org/model, org/model@revision or org/model:Q4_K_M, with hf.co/ before it or without";

/// The name of a model of the Hugging Face hub: a repository, a revision of it, and which of several GGUF or UQFF models.
///
/// `[https://][hf.co/]org/model[@revision][:choice]`. No part of it can lead out of the folder of the cache.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    org: String,
    model: String,
    revision: Option<String>,
    choice: Option<String>,
}

impl Name {
    /// The name that a text is.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |problem: String| Error::hub(text, problem, REMEDY);
        let (rest, choice) = split(without_host(text), ':');
        let (repo, revision) = split(rest, '@');
        let (org, model) = match repo.split_once('/') {
            Some((org, model)) if !model.contains('/') => (org, model),
            Some(_) => return Err(wrong("more than org/model".into())),
            None => return Err(wrong("no org/model".into())),
        };
        let name = Self {
            org: org.to_owned(),
            model: model.to_owned(),
            revision: revision.map(str::to_owned),
            choice: choice.map(str::to_owned),
        };
        match name.problem() {
            None => Ok(name),
            Some(problem) => Err(wrong(problem)),
        }
    }

    /// The repository of a folder of the cache; `None` if it is no name.
    pub(super) fn of_repo(org: &str, model: &str) -> Option<Self> {
        let name = Self { org: org.to_owned(), model: model.to_owned(), revision: None, choice: None };
        name.problem().is_none().then_some(name)
    }

    /// The same repository at this revision.
    pub(super) fn at(&self, revision: &str) -> Self {
        Self { revision: (revision != DEFAULT_REVISION).then(|| revision.to_owned()), ..self.clone() }
    }

    /// The same, with a choice among several GGUF or UQFF models.
    ///
    /// # Errors
    /// If the name has another choice already, or if this can't be one.
    pub fn choose(&self, choice: &str) -> Result<Self> {
        if self.choice.as_ref().is_some_and(|first| !first.eq_ignore_ascii_case(choice)) {
            return Err(Error::hub(self, format!("and `{choice}`: two choices"), "leave out one of them"));
        }
        let name = Self { choice: Some(choice.to_owned()), ..self.clone() };
        match name.problem() {
            None => Ok(name),
            Some(problem) => Err(Error::hub(self, problem, REMEDY)),
        }
    }

    fn problem(&self) -> Option<String> {
        let Self { org, model, revision, choice } = self;
        let is_word = |text: &str| {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            !text.is_empty() && text.bytes().all(allowed)
        };
        // `--` parts org and model in the names of folders.
        let is_part = |text: &str| {
            is_word(text)
                && !text.starts_with(['-', '.'])
                && !text.ends_with(['-', '.'])
                && !text.contains("..")
                && !text.contains("--")
        };
        let is_revision = |text: &str| {
            let is_part = |part: &str| is_word(part) && !part.starts_with(['-', '.']) && !part.contains("..");
            text.split('/').all(is_part) && !text.ends_with(['.', '/'])
        };
        if let Some(part) = [org, model].into_iter().find(|part| !is_part(part)) {
            return Some(format!("`{part}` can't be part of a name of the hub"));
        }
        if self.repo().len() > LONGEST_REPO {
            return Some(format!("longer than a name of the hub can be, {LONGEST_REPO} characters"));
        }
        if let Some(revision) = revision.as_ref().filter(|text| text.len() > LONGEST || !is_revision(text)) {
            return Some(format!("`{revision}` can't be a revision"));
        }
        let choice = choice.as_ref().filter(|text| text.len() > LONGEST || !is_word(text));
        choice.map(|choice| format!("`{choice}` can't be a choice among files"))
    }

    /// `org/model`.
    pub fn repo(&self) -> String {
        format!("{}/{}", self.org, self.model)
    }

    /// The part behind the slash.
    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// The branch, the tag or the commit; `main` if the name has none.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(DEFAULT_REVISION)
    }

    /// Which of several GGUF or UQFF models, if the name says so.
    pub fn choice(&self) -> Option<&str> {
        self.choice.as_deref()
    }

    /// The repository and the commit of what lies at a path in the cache of the hub: in
    /// `models--org--model/snapshots/<commit>`.
    ///
    /// ```
    /// use candle_quant::checkpoint::HubName;
    /// use std::path::Path;
    ///
    /// let commit = "0123456789abcdef0123456789abcdef01234567";
    /// let path = format!("/cache/models--org--model/snapshots/{commit}/model.gguf");
    /// let name = HubName::of_snapshot(Path::new(&path)).expect("a snapshot");
    /// assert_eq!((name.repo().as_str(), name.revision()), ("org/model", commit));
    /// assert_eq!(HubName::of_snapshot(Path::new("org/model")), None);
    /// ```
    pub fn of_snapshot(path: &Path) -> Option<Self> {
        let parts: Vec<_> = path.iter().filter_map(OsStr::to_str).collect();
        parts.windows(3).find_map(|parts| match parts {
            [repo, "snapshots", commit] => {
                let (org, model) = repo.strip_prefix("models--")?.split_once("--")?;
                Some(Self::of_repo(org, model)?.at(Commit::parse(commit)?.as_str()))
            }
            _ => None,
        })
    }

    /// The folder of the repository in the cache.
    pub(super) fn folder(&self) -> String {
        format!("models--{}--{}", self.org, self.model)
    }
}

/// Whether a text says itself that it is a name of the hub.
pub(in crate::checkpoint) fn has_host(text: &str) -> bool {
    without_host(text) != text
}

fn without_host(text: &str) -> &str {
    let bare = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
    HOSTS.iter().find_map(|host| bare.strip_prefix(host)).unwrap_or(text)
}

/// What is before the first of these characters, and what is behind it.
fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.split_once(at).map_or((text, None), |(before, behind)| (before, Some(behind)))
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { org, model, revision, choice } = self;
        write!(f, "{org}/{model}")?;
        if let Some(revision) = revision {
            write!(f, "@{revision}")?;
        }
        match choice {
            Some(choice) => write!(f, ":{choice}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_revision_and_a_choice() {
        for (text, repo, revision, choice) in [
            ("org/model", "org/model", "main", None),
            ("org/Mo_d.el-4b@v1.0", "org/Mo_d.el-4b", "v1.0", None),
            ("org/model:Q4_K_M", "org/model", "main", Some("Q4_K_M")),
            ("org/model@refs/pr/1:afq4", "org/model", "refs/pr/1", Some("afq4")),
            ("hf.co/org/model", "org/model", "main", None),
            ("huggingface.co/org/model:q8_0", "org/model", "main", Some("q8_0")),
            ("https://huggingface.co/org/model@abc", "org/model", "abc", None),
            ("https://hf.co/org/model", "org/model", "main", None),
        ] {
            let name = Name::parse(text).unwrap();
            assert_eq!((&*name.repo(), name.revision(), name.choice()), (repo, revision, choice), "{text}");
            assert_eq!(Name::parse(&name.to_string()).unwrap(), name);
        }
        assert_eq!(Name::parse("org/model@main:Q4").unwrap().at("main").to_string(), "org/model:Q4");
        assert_eq!(Name::parse("org/model").unwrap().folder(), "models--org--model");
    }

    #[test]
    fn what_could_lead_out_of_the_cache_is_no_name() {
        let long = format!("org/{}", "a".repeat(LONGEST_REPO));
        for text in [
            "",
            "model",
            "/model",
            "org/",
            "org//model",
            "a/b/c",
            "../model",
            "org/..",
            "./model",
            "org/.",
            "org/.git",
            "org/-m",
            "org/m-",
            "org/a..b",
            "org/a--b",
            "a--b/model",
            "org/mo del",
            "org/m\u{7}",
            "org/m\n",
            "org/m\\n",
            "org/m@",
            "org/m@..",
            "org/m@a/../b",
            "org/m@/a",
            "org/m@a/",
            "org/m@a//b",
            "org/m@-a",
            "org/m@a b",
            "org/m@\u{1b}[2J",
            "org/m@.a",
            "org/m@a.",
            "org/m:",
            "org/m:a/b",
            "org/m:a b",
            "org/m:..\\x",
            "org/m:a:b",
            "C:\\org\\model",
            "/org/model",
            "\u{e9}/model",
            "hf.co/model",
            "https://hf.co/",
            "https://example.org/a/b",
            &long,
        ] {
            let Err(error) = Name::parse(text) else { panic!("{text}") };
            assert!(matches!(error, Error::Hub { .. }), "{text}: {error}");
        }
        let found = Name::parse("org/model@a..b").unwrap_err().to_string();
        assert!(found.starts_with("org/model@a..b: `a..b` can't be a revision; write org/model"), "{found}");
        assert!(has_host("hf.co/a/b") && has_host("https://huggingface.co/x") && !has_host("org/hf.co"));
    }

    #[test]
    fn a_choice_is_made_once() {
        let name = Name::parse("org/model").unwrap();
        assert_eq!(name.choose("Q4_0").unwrap().to_string(), "org/model:Q4_0");
        assert_eq!(name.choose("Q4_0").unwrap().choose("q4_0").unwrap().choice(), Some("q4_0"));
        assert!(name.choose("Q4_0").unwrap().choose("Q8_0").is_err() && name.choose("a/b").is_err());
    }
}
