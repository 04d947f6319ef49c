//! Where models of the hub are, and how they are fetched: options, and what huggingface_hub's variables say of them.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs};

const ENDPOINT: &str = "https://huggingface.co";

/// How long nothing may come before a transfer counts as stalled.
const STALLED: Duration = Duration::from_secs(10);

/// Where models of the Hugging Face hub are, and how they are fetched.
///
/// ```
/// use candle_quant::checkpoint::{HubEvent, HubOptions};
/// use std::sync::Arc;
///
/// let mut options = HubOptions::from_env();
/// options.progress = Some(Arc::new(|event| {
///     if let HubEvent::Finished { file } = event {
///         eprintln!("{file}");
///     }
/// }));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct HubOptions {
    /// The folder of the cache, which other programs share: `models--org--model` lie in it.
    pub cache: PathBuf,
    /// The hub, or a mirror that speaks as it does: `https://huggingface.co`.
    pub endpoint: String,
    /// The token of an account, for repositories that are gated or private. It is sent to the endpoint alone.
    pub token: Option<String>,
    /// Whether nothing is fetched.
    pub offline: bool,
    /// How long nothing may come before a transfer counts as stalled.
    pub stalled: Duration,
    /// Who is told what is fetched, from several threads.
    pub progress: Option<HubProgress>,
}

/// Who is told what is fetched.
pub type HubProgress = Arc<dyn Fn(&HubEvent<'_>) + Send + Sync>;

/// What happens while files are fetched.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum HubEvent<'a> {
    /// So many more files are to be fetched.
    Planned {
        /// How many.
        files: usize,
        /// Their bytes, as far as the hub states them.
        bytes: u64,
    },
    /// Bytes that an interrupted download has left are not fetched again.
    Resumed {
        /// The file's name in the repository.
        file: &'a str,
        /// How many.
        bytes: u64,
    },
    /// Bytes came.
    Advanced {
        /// The file's name in the repository.
        file: &'a str,
        /// How many, since the last time.
        bytes: u64,
    },
    /// A file is complete, and its digest is right.
    Finished {
        /// The file's name in the repository.
        file: &'a str,
    },
}

impl HubOptions {
    /// What the environment says, as Python's huggingface_hub reads it.
    ///
    /// | variable | what it says |
    /// |---|---|
    /// | `HF_HUB_CACHE`, or else `HF_HOME`, `XDG_CACHE_HOME` | the cache: it, `$HF_HOME/hub`, `$XDG_CACHE_HOME/huggingface/hub`, or `~/.cache/huggingface/hub` |
    /// | `HF_ENDPOINT` | the hub, or a mirror |
    /// | `HF_TOKEN`, or else the file `HF_TOKEN_PATH`, or `$HF_HOME/token` | the token |
    /// | `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`: `1`, `on`, `yes`, `true` | fetch nothing |
    /// | `HF_HUB_DOWNLOAD_TIMEOUT` | seconds until a transfer counts as stalled, 10 if it says nothing |
    pub fn from_env() -> Self {
        Self::from_variables(|name| env::var_os(name))
    }

    /// The hub with this folder as the cache, whatever the environment says.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        let (token, offline, progress) = Default::default();
        Self { cache: cache.into(), endpoint: ENDPOINT.into(), token, offline, stalled: STALLED, progress }
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| Some(set(name)?.to_str()?.trim().to_owned()).filter(|text| !text.is_empty());
        let path = |name: &str| set(name).map(|path| expand(path, &variable));
        let home = || expand("~".into(), &variable);
        let hf_home = path("HF_HOME").unwrap_or_else(|| {
            path("XDG_CACHE_HOME").unwrap_or_else(|| home().join(".cache")).join("huggingface")
        });
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| hf_home.join("token"));
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
        let is_true = |text: String| ["1", "ON", "YES", "TRUE"].contains(&&*text.to_ascii_uppercase());
        let seconds = text("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.parse::<u64>().ok());
        Self {
            endpoint: text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into()),
            token: token.or_else(|| {
                let text = fs::read_to_string(token_file).ok()?;
                Some(text.trim().to_owned()).filter(|text| !text.is_empty())
            }),
            offline: text("HF_HUB_OFFLINE").or_else(|| text("TRANSFORMERS_OFFLINE")).is_some_and(is_true),
            stalled: seconds.filter(|seconds| *seconds > 0).map_or(STALLED, Duration::from_secs),
            ..Self::new(cache.unwrap_or_else(|| hf_home.join("hub")))
        }
    }
}

/// A path with `~` and `$VARIABLE` in it, as huggingface_hub expands it.
fn expand(path: OsString, variable: &impl Fn(&str) -> Option<OsString>) -> PathBuf {
    // What is no text has nothing that would be expanded.
    let Some(text) = path.to_str() else { return path.into() };
    let home = || variable("HOME").filter(|home| !home.is_empty()).map(PathBuf::from).or_else(env::home_dir);
    let mut expanded = match text.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/')) {
        Some(rest) => match home() {
            Some(home) => home.join(rest.trim_start_matches('/')).into_os_string(),
            None => path,
        },
        None => path,
    };
    let Some(text) = expanded.to_str().filter(|text| text.contains('$')) else { return expanded.into() };
    let (mut parts, mut result) = (text.split('$'), OsString::new());
    result.push(parts.next().unwrap_or_default());
    for part in parts {
        let (name, rest) = match part.strip_prefix('{').and_then(|part| part.split_once('}')) {
            Some(named) => named,
            None => {
                let end = part.find(|char: char| !char.is_ascii_alphanumeric() && char != '_');
                part.split_at(end.unwrap_or(part.len()))
            }
        };
        match variable(name).filter(|_| !name.is_empty()) {
            Some(value) => {
                result.push(value);
                result.push(rest);
            }
            None => {
                result.push("$");
                result.push(part);
            }
        }
    }
    expanded = result;
    expanded.into()
}

impl fmt::Debug for HubOptions {
    /// Without the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("offline", &self.offline)
            .field("stalled", &self.stalled)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn of(variables: &[(&str, &str)]) -> HubOptions {
        HubOptions::from_variables(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_cache_is_where_huggingface_hub_looks() {
        let home = ("HOME", "/h");
        for (variables, cache) in [
            (&[home][..], "/h/.cache/huggingface/hub"),
            (&[home, ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[home, ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/hf")], "/h/hf/hub"),
            (&[home, ("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old"),
            (&[home, ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[home, ("HF_HUB_CACHE", "$D/a/${E}b$"), ("D", "/d"), ("E", "e")], "/d/a/eb$"),
            (&[home, ("HF_HUB_CACHE", "~other/$NONE/x")], "~other/$NONE/x"),
            (&[home, ("HF_HOME", ""), ("HF_HUB_CACHE", "")], "/h/.cache/huggingface/hub"),
        ] {
            assert_eq!(of(variables).cache, Path::new(cache), "{variables:?}");
        }
    }

    #[test]
    fn the_token_is_a_variable_or_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, " hf_file \n").unwrap();
        let (home, file) = (dir.path().to_str().unwrap(), path.to_str().unwrap());
        for (variables, token) in [
            (&[("HF_HOME", home)][..], Some("hf_file")),
            (&[("HF_TOKEN_PATH", file), ("HF_HOME", "/none")], Some("hf_file")),
            (&[("HF_TOKEN", "hf_env\n"), ("HF_HOME", home)], Some("hf_env")),
            (&[("HF_TOKEN", " "), ("HUGGING_FACE_HUB_TOKEN", "old"), ("HF_HOME", home)], Some("old")),
            (&[("HF_HOME", "/none")], None),
        ] {
            let options = of(variables);
            assert_eq!(options.token.as_deref(), token, "{variables:?}");
            assert!(!format!("{options:?}").contains("hf_"));
        }
    }

    #[test]
    fn the_hub_and_whether_it_is_asked() {
        let options = of(&[("HF_ENDPOINT", "http://mirror:1/"), ("HF_HUB_DOWNLOAD_TIMEOUT", "3")]);
        assert_eq!((&*options.endpoint, options.stalled), ("http://mirror:1/", Duration::from_secs(3)));
        let options = of(&[("HF_HUB_DOWNLOAD_TIMEOUT", "x")]);
        assert_eq!((&*options.endpoint, options.offline, options.stalled), (ENDPOINT, false, STALLED));
        for (variable, value, offline) in [
            ("HF_HUB_OFFLINE", "1", true),
            ("HF_HUB_OFFLINE", "True", true),
            ("HF_HUB_OFFLINE", "0", false),
            ("HF_HUB_OFFLINE", "", false),
            ("TRANSFORMERS_OFFLINE", "yes", true),
        ] {
            assert_eq!(of(&[(variable, value)]).offline, offline, "{variable}={value}");
        }
    }
}
