//! What is asked of the hub over HTTP: which files a repository has, and their bytes.
//!
//! Redirects are followed here, so that the token goes to the hub alone and nothing is asked without encryption that
//! was asked with it.

use super::cache::Commit;
use super::name::Name;
use super::options::HubOptions;
use super::unknown::Unknown;
use crate::{Error, Result};
use percent_encoding::{utf8_percent_encode, AsciiSet, NON_ALPHANUMERIC};
use serde::Deserialize;
use std::time::Duration;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::{Agent, Body};

/// A longer list of files is not read.
const MOST_LIST_BYTES: u64 = 32 << 20;
const MOST_REDIRECTS: usize = 10;

/// How often a request is repeated that the hub can't answer at the moment.
const ATTEMPTS: u32 = 4;

const PLAIN: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
const PLAIN_PATH: AsciiSet = PLAIN.remove(b'/');

/// Connections to the hub, for one model.
pub(super) struct Client<'o> {
    agent: Agent,
    options: &'o HubOptions,
    /// Without a slash at its end.
    endpoint: &'o str,
    name: &'o Name,
}

/// The files of a repository at a commit.
pub(super) struct Listing {
    pub commit: Commit,
    pub files: Vec<String>,
}

/// What the hub states of a file.
#[derive(Default)]
pub(super) struct Stated {
    /// The name of its blob.
    pub etag: String,
    /// Whether that was stated of the file itself, and not of an answer.
    is_linked: bool,
    pub size: Option<u64>,
}

/// Why something was not fetched.
pub(super) enum Failure {
    /// It may come if it is asked for again.
    Again(Error),
    /// There is no such model, as far as can be known.
    Unknown(Unknown),
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl<'o> Client<'o> {
    pub fn new(name: &'o Name, options: &'o HubOptions) -> Result<Self> {
        let endpoint = options.endpoint.trim_end_matches('/');
        if origin(endpoint).is_none() {
            let problem = format!("`{endpoint}` is no address of a hub");
            return Err(Error::hub(name, problem, "set HF_ENDPOINT to one that begins with https://"));
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("candle-quant/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_resolve(Some(options.stalled))
            .timeout_connect(Some(options.stalled))
            .timeout_recv_response(Some(options.stalled))
            .timeout_per_read(Some(options.stalled))
            .timeout_per_write(Some(options.stalled));
        Ok(Self { agent: config.build().new_agent(), options, endpoint, name })
    }

    /// The files of the revision that the name has.
    pub fn list(&self) -> Result<Listing, Failure> {
        let revision = utf8_percent_encode(self.name.revision(), &PLAIN);
        let url = format!("{}/api/models/{}/revision/{revision}", self.endpoint, self.name.repo());
        let text = self.persistently(|| {
            let (response, _) = self.request(&url, false, 0)?;
            let body = response.into_body().into_with_config().limit(MOST_LIST_BYTES).read_to_vec();
            body.map_err(|error| self.network_failure(&url, error))
        })?;
        let wrong = |problem: String| {
            Error::hub(self.name, format!("{url} is no list of files: {problem}"), "check HF_ENDPOINT")
        };
        let info: Info = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let commit = Commit::parse(&info.sha).ok_or_else(|| wrong(format!("`{}` is no commit", info.sha)))?;
        if Commit::parse(self.name.revision()).is_some_and(|wanted| wanted != commit) {
            return Err(wrong(format!("it is of the commit {}", commit.as_str())).into());
        }
        let files: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        match files.iter().find(|file| !is_safe(file)) {
            None => Ok(Listing { commit, files }),
            Some(file) => Err(Error::hub(
                self.name,
                format!("the repository has a file called `{file}`, which could lie outside of its folder"),
                "nothing of it is fetched: take another repository",
            )
            .into()),
        }
    }

    /// What the hub states of a file.
    pub fn stated(&self, commit: &Commit, file: &str) -> Result<Stated, Failure> {
        let url = self.url(commit, file);
        let (_, stated) = self.persistently(|| self.request(&url, true, 0))?;
        let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        match (1..=128).contains(&stated.etag.len()) && stated.etag.bytes().all(is_safe) {
            true => Ok(stated),
            false => {
                let problem = format!("the hub states no usable etag of `{file}`, but `{}`", stated.etag);
                Err(Error::hub(self.name, problem, "check HF_ENDPOINT").into())
            }
        }
    }

    /// The bytes of a file, from this one on if the server can do that.
    pub fn get(&self, commit: &Commit, file: &str, from: u64) -> Result<Response<Body>, Failure> {
        Ok(self.request(&self.url(commit, file), false, from)?.0)
    }

    fn url(&self, commit: &Commit, file: &str) -> String {
        let file = utf8_percent_encode(file, &PLAIN_PATH);
        format!("{}/{}/resolve/{}/{file}", self.endpoint, self.name.repo(), commit.as_str())
    }

    /// Repeats a request that the hub can't answer at the moment.
    fn persistently<T>(&self, request: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
        for attempt in 1..ATTEMPTS {
            match request() {
                Err(Failure::Again(_)) => std::thread::sleep(self.pause(attempt)),
                other => return other,
            }
        }
        request()
    }

    /// How long to wait before the next attempt.
    pub fn pause(&self, attempt: u32) -> Duration {
        self.options.stalled / 10 * attempt
    }

    /// One request, and those that it leads to. What the hub itself says of a file is kept on the way; where only that
    /// is wanted, no other server is asked.
    fn request(&self, url: &str, stated_only: bool, from: u64) -> Result<(Response<Body>, Stated), Failure> {
        let hub = origin(self.endpoint);
        let (mut url, mut stated) = (url.to_owned(), Stated::default());
        for _ in 0..MOST_REDIRECTS {
            let is_hub = origin(&url) == hub;
            let mut request = if stated_only { self.agent.head(&url) } else { self.agent.get(&url) };
            if let Some(token) = self.options.token.as_ref().filter(|_| is_hub) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header("Range", format!("bytes={from}-"));
            }
            let response = request.call().map_err(|error| self.network_failure(&url, error))?;
            if is_hub {
                stated.take(response.headers(), response.status());
            }
            if !response.status().is_redirection() {
                return self.checked(response, &url).map(|response| (response, stated));
            }
            let target =
                header(response.headers(), "location").and_then(|location| redirected(&url, location));
            let Some(target) = target else {
                let problem = format!("{url} leads nowhere, or to a place without encryption");
                return Err(Error::hub(self.name, problem, "check HF_ENDPOINT").into());
            };
            if stated_only && origin(&target) != hub {
                return Ok((response, stated));
            }
            url = target;
        }
        Err(Error::hub(self.name, format!("{url}: too many redirects"), "check HF_ENDPOINT").into())
    }

    /// The response, if it is none of failure.
    fn checked(&self, response: Response<Body>, url: &str) -> Result<Response<Body>, Failure> {
        let status = response.status();
        // A range behind the end is for the transfer to understand.
        if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(response);
        }
        let Self { name, options, endpoint, .. } = self;
        let repo = name.repo();
        let code = header(response.headers(), "x-error-code").unwrap_or_default();
        let unknown = |problem: String, remedy: &str| Err(Failure::Unknown(Unknown::new(problem, remedy)));
        let account = match options.token {
            Some(_) => "with the account of HF_TOKEN",
            None => "and set HF_TOKEN to a token of your account",
        };
        match (status, code) {
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, "GatedRepo") | (StatusCode::FORBIDDEN, _) => {
                let problem = format!("access to it is gated (HTTP {})", status.as_u16());
                let remedy = format!("accept its licence at {endpoint}/{repo}, {account}");
                Err(Error::hub(name, problem, remedy).into())
            }
            (StatusCode::NOT_FOUND, "RevisionNotFound") => unknown(
                format!("`{repo}` has no revision `{}` at {endpoint}", name.revision()),
                "check the name",
            ),
            (StatusCode::NOT_FOUND, "EntryNotFound") => {
                Err(Error::hub(name, format!("{url} is not there"), "check HF_ENDPOINT").into())
            }
            (StatusCode::UNAUTHORIZED, _) => unknown(
                format!("there is no repository `{repo}` at {endpoint}, or it is private (HTTP 401)"),
                match options.token {
                    Some(_) => "check the name, and that HF_TOKEN is valid and may read it",
                    None => "check the name; for a private one set HF_TOKEN",
                },
            ),
            (StatusCode::NOT_FOUND, _) => {
                let revision = name.revision();
                unknown(
                    format!("there is no repository `{repo}` with `{revision}` at {endpoint}"),
                    "check the name",
                )
            }
            (StatusCode::TOO_MANY_REQUESTS, _) => Err(Failure::Again(Error::hub(
                name,
                format!("{endpoint} refuses more requests for now"),
                "try again later; with HF_TOKEN set more are allowed",
            ))),
            _ if status.is_server_error() => {
                let problem = format!("{} answers HTTP {}", origin(url).unwrap_or(url), status.as_u16());
                Err(Failure::Again(Error::hub(name, problem, "try again later")))
            }
            _ => {
                let problem = format!("unexpected answer of {url}: HTTP {}", status.as_u16());
                Err(Error::hub(name, problem, "check HF_ENDPOINT").into())
            }
        }
    }

    /// The failure of a request. An address may have been signed: only its host is told.
    fn network_failure(&self, url: &str, error: ureq::Error) -> Failure {
        let host = origin(url).unwrap_or(url);
        #[allow(clippy::wildcard_enum_match_arm, reason = "all others speak for themselves")]
        let problem = match error {
            ureq::Error::Timeout(_) => {
                format!("{host} sends nothing for {:?}", self.options.stalled)
            }
            ureq::Error::HostNotFound => format!("{host} is not found"),
            ureq::Error::Io(error) => format!("{host} can't be reached: {error}"),
            other => format!("{host} can't be reached: {other}"),
        };
        Failure::Again(Error::hub(self.name, problem, "check the network, and HF_ENDPOINT"))
    }

    /// The failure of reading the bytes of a file.
    pub fn broken_off(&self, file: &str, error: std::io::Error) -> Failure {
        #[allow(clippy::wildcard_enum_match_arm, reason = "all others speak for themselves")]
        let problem = match ureq::Error::from(error) {
            ureq::Error::Timeout(_) => {
                format!("the hub sends nothing for {:?} of `{file}`", self.options.stalled)
            }
            other => format!("the transfer of `{file}` breaks off: {other}"),
        };
        let remedy = "check the network and try again; what has come is kept";
        Failure::Again(Error::hub(self.name, problem, remedy))
    }
}

impl Stated {
    fn take(&mut self, headers: &HeaderMap, status: StatusCode) {
        // Weak or not, quoted or not.
        let etag = |name| header(headers, name).map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
        let linked = etag("x-linked-etag");
        self.is_linked |= linked.is_some();
        if let Some(etag) = linked.or_else(|| etag("etag").filter(|_| !self.is_linked)) {
            self.etag = etag.to_owned();
        }
        let number = |name| header(headers, name).and_then(|text| text.parse().ok());
        let own = || number("content-length").filter(|_| status.is_success());
        self.size = number("x-linked-size").or(self.size).or_else(own);
    }
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Scheme, host and port; `None` if it is no address of the web.
fn origin(url: &str) -> Option<&str> {
    let scheme = ["https://", "http://"].into_iter().find(|scheme| url.starts_with(scheme))?;
    let host = url.get(scheme.len()..)?;
    let end = host.find(['/', '?', '#']).unwrap_or(host.len());
    let is_host = end > 0 && !host.get(..end)?.contains('@');
    is_host.then(|| url.get(..scheme.len() + end)).flatten()
}

/// Where a redirect leads; `None` if it may not be followed.
fn redirected(url: &str, location: &str) -> Option<String> {
    let base = origin(url)?;
    let target = match location.strip_prefix("//") {
        None if location.starts_with('/') => format!("{base}{location}"),
        None => location.to_owned(),
        Some(_) => return None,
    };
    let is_encrypted = |url: &str| url.starts_with("https://");
    (origin(&target).is_some() && (is_encrypted(&target) || !is_encrypted(url))).then_some(target)
}

/// Whether a name in a list of files leads into the folder of its repository, on every system.
fn is_safe(file: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && part != "." && part != "..";
    let is_harmful = |char: char| char.is_control() || char == '\\' || char == ':';
    file.split('/').all(is_part) && !file.contains(is_harmful)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_has_one_origin() {
        assert_eq!(origin("https://huggingface.co/a/b"), Some("https://huggingface.co"));
        assert_eq!(origin("http://localhost:80?x"), Some("http://localhost:80"));
        assert_eq!(
            origin("https://huggingface.co.evil.example/a"),
            Some("https://huggingface.co.evil.example")
        );
        for wrong in
            ["", "huggingface.co", "ftp://a/b", "https://", "https:///a", "https://hub@evil.example/a"]
        {
            assert_eq!(origin(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn redirects_keep_to_encryption() {
        let at = |location| redirected("https://hub/a/b", location);
        assert_eq!(at("/c?d").as_deref(), Some("https://hub/c?d"));
        assert_eq!(at("https://cdn/x").as_deref(), Some("https://cdn/x"));
        for wrong in ["http://hub/c", "//cdn/x", "c", "", "file:///etc/passwd", "https://hub@cdn/"] {
            assert_eq!(at(wrong), None, "{wrong}");
        }
        assert_eq!(redirected("http://hub/a", "http://cdn/x").as_deref(), Some("http://cdn/x"));
    }

    #[test]
    fn names_of_files_stay_in_their_folder() {
        for name in ["a", "a.b/c", ".gitattributes", "a..b", "ä b", "1_Pooling/config.json"] {
            assert!(is_safe(name), "{name}");
        }
        for name in [
            "", "..", "../a", "a/../b", "a/..", "/a", "a//b", "a/", "./a", "a\\b", "..\\a", "C:a", "a\nb",
            "\0",
        ] {
            assert!(!is_safe(name), "{name:?}");
        }
    }
}
