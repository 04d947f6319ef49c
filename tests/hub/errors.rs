//! Names that lead to nothing, and answers that mean something else than a model.

use crate::server::Server;
use crate::{bundled_server, cache, files_below, open, pull};
use candle_quant::checkpoint::{HubOptions, OllamaName};
use candle_quant::Error;

fn refused(name: &str, options: &HubOptions, parts: &[&str]) {
    let error = open(name, options).expect_err(name);
    assert!(matches!(error, Error::Hub { .. }), "{error:?}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "`{part}`: {text}");
    }
    assert!(files_below(&options.cache).is_empty());
}

#[test]
fn answers_of_the_hub_say_how_to_go_on() {
    for (status, code, token, parts) in [
        ("401 Unauthorized", "RepoNotFound", None, ["there is no repository `org/model`", "set HF_TOKEN"]),
        ("401 Unauthorized", "", Some("bad"), ["or it is private", "that HF_TOKEN is valid"]),
        ("401 Unauthorized", "GatedRepo", None, ["is gated", "accept its licence at http"]),
        ("403 Forbidden", "GatedRepo", Some("x"), ["is gated", "/org/model, with the account of HF_TOKEN"]),
        ("403 Forbidden", "", None, ["is gated", "and set HF_TOKEN to a token of your account"]),
        ("404 Not Found", "RepoNotFound", None, ["no repository `org/model` with `main`", "check the name"]),
        ("404 Not Found", "RevisionNotFound", None, ["has no revision `main`", "check the name"]),
        ("429 Too Many Requests", "", None, ["refuses more requests", "try again later"]),
        ("500 Internal Server Error", "", None, ["HTTP 500", "try again later"]),
        ("418 I'm a teapot", "", None, ["HTTP 418", "check HF_ENDPOINT"]),
    ] {
        let server = bundled_server();
        server.refuse(status, code);
        let (_dir, mut options) = cache(&server);
        options.token = token.map(str::to_owned);
        refused("org/model", &options, &parts);
        refused("hf.co/org/model", &options, &parts);
    }
    let server = bundled_server();
    let (_dir, options) = cache(&server);
    refused("org/model@v2", &options, &["has no revision `v2`"]);
}

#[test]
fn without_a_network_there_is_what_the_cache_has() {
    let server = bundled_server();
    let (_dir, mut options) = cache(&server);
    options.offline = true;
    let parts = [
        "org/model: ",
        "no model `org/model:latest` in an Ollama store",
        "not in the cache of the hub",
        "HF_HUB_OFFLINE",
    ];
    refused("org/model", &options, &parts);
    assert!(server.requests().is_empty());
    options.offline = false;
    drop(server);
    options.endpoint = "http://127.0.0.1:1".into();
    refused(
        "org/model",
        &options,
        &["not in the cache of the hub", "127.0.0.1:1 can't be reached", "check the network"],
    );
    for endpoint in ["", "huggingface.co", "ftp://a"] {
        options.endpoint = endpoint.into();
        refused("org/model", &options, &["is no address of a hub", "HF_ENDPOINT"]);
    }
}

#[test]
fn a_list_of_files_that_lie_elsewhere_is_refused() {
    for name in ["../x", "/etc/x", "a/../../x", "..\\x", "a\\b", "C:x", "a//b", "x\u{1b}[2J", ""] {
        let server = bundled_server();
        server.hub.lock().unwrap().listed.push(name.into());
        let (_dir, options) = cache(&server);
        refused("org/model", &options, &["could lie outside of its folder", "nothing of it is fetched"]);
        assert_eq!(server.requests().len(), 1, "{name}");
    }
}

#[test]
fn what_is_no_list_is_refused() {
    let server = bundled_server();
    for commit in ["", "main", "../../x", &"g".repeat(40)] {
        server.hub.lock().unwrap().commit = commit.into();
        let (_dir, options) = cache(&server);
        refused("org/model", &options, &["is no commit"]);
    }
    let empty = Server::new(&[("README.md", b"x")]);
    let (_dir, options) = cache(&empty);
    refused("org/model", &options, &["no safetensors, GGUF or UQFF files", "another repository"]);
}

#[test]
fn what_is_nothing_is_told_in_one_error() {
    let server = bundled_server();
    let (dir, options) = cache(&server);
    // A name without its first part: what has the second is shown.
    pull("org/model", &options).unwrap();
    let error = open("Model", &options).unwrap_err();
    assert!(matches!(&error, Error::Io { error, .. } if error.kind() == std::io::ErrorKind::NotFound));
    let text = error.to_string();
    let name = OllamaName::parse("Model").unwrap();
    for part in [
        "Model: No such file",
        &format!("no model `{name}` in an Ollama store ("),
        "names of the Hugging Face hub are org/model: is org/model meant?",
    ] {
        assert!(text.contains(part), "`{part}`: {text}");
    }
    let asked = server.requests().len();
    // Paths and names of files are not asked for, nor anything that is no name.
    let missing = dir.path().join("none");
    for path in
        ["../none", "./none", "a/b/c/d", "models/x.safetensors", "x/y.gguf", missing.to_str().unwrap()]
    {
        assert!(matches!(open(path, &options), Err(Error::Io { .. })), "{path}");
    }
    for name in ["hf.co/model", "hf.co/a/b/c", "https://huggingface.co/a/b@.."] {
        assert!(matches!(open(name, &options), Err(Error::Hub { .. })), "{name}");
    }
    assert_eq!(server.requests().len(), asked);
}
