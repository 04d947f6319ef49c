//! What is fetched, and what becomes of transfers that go wrong.

use crate::server::{etag, Fault, Server, COMMIT};
use crate::{bundled, bundled_server, cache, files_below, open, pull, repo};
use candle_quant::checkpoint::{CheckpointKind, HubEvent};
use std::fs;
use std::sync::{Arc, Mutex};

/// As large as the tests need it: more than one chunk of a transfer.
fn large() -> Vec<u8> {
    (0..3_000_000u32).map(|i| (i % 251) as u8).collect()
}

/// A repository of one GGUF file, which is not opened here.
fn gguf_server() -> (Server, String) {
    let bytes = large();
    (Server::new(&[("m-Q4_0.gguf", &bytes)]), etag("m-Q4_0.gguf", &bytes))
}

#[test]
fn a_model_is_fetched_once_and_only_what_is_needed() {
    let server = bundled_server();
    let (_dir, mut options) = cache(&server);
    let events = Arc::new(Mutex::new((0, 0, 0, 0)));
    let told = events.clone();
    options.progress = Some(Arc::new(move |event: &HubEvent<'_>| {
        let mut told = told.lock().unwrap();
        match *event {
            HubEvent::Planned { files, bytes } => {
                told.0 += files;
                told.1 += bytes;
            }
            HubEvent::Advanced { bytes, .. } => told.2 += bytes,
            HubEvent::Finished { .. } => told.3 += 1,
            _ => {}
        }
    }));
    let checkpoint = open("org/model", &options).unwrap();
    assert_eq!(checkpoint.kind(), CheckpointKind::Mlx);
    assert_eq!(checkpoint.path(), repo(&options).join("snapshots").join(COMMIT));
    assert!(checkpoint.tokenizer_file().is_some());
    let bytes: usize = bundled().iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(*events.lock().unwrap(), (5, bytes as u64, bytes as u64, 5));
    let asked = server.requests();
    assert!(!asked
        .iter()
        .any(|request| ["README", ".bin", "onnx"].iter().any(|part| request.path.contains(part))));
    // Weights come last: whoever sees them sees everything.
    let first = asked.iter().position(|request| request.path.ends_with("model.safetensors")).unwrap();
    assert!(asked[first..].iter().all(|request| request.path.ends_with("model.safetensors")), "{asked:?}");
    assert_eq!(fs::read_to_string(repo(&options).join("refs/main")).unwrap(), COMMIT);

    // What is there is opened without the network, by every form of the name, whatever the mirror.
    for name in [
        "org/model",
        "hf.co/org/model",
        "https://huggingface.co/org/model@main",
        &format!("org/model@{COMMIT}"),
    ] {
        options.offline = !options.offline;
        open(name, &options).unwrap();
    }
    assert_eq!(server.requests().len(), asked.len());
    // To pull it is to look for something newer.
    options.offline = false;
    pull("org/model", &options).unwrap();
    assert_eq!(server.requests().len(), asked.len() + 1);
    server.hub.lock().unwrap().commit = "f".repeat(40);
    let newer = pull("org/model", &options).unwrap();
    assert!(newer.ends_with("f".repeat(40)));
    assert_eq!(open("org/model", &options).unwrap().path(), newer);
    // The blobs are the same: nothing but what the hub states was asked for.
    let gets = |request: &&crate::server::Request| {
        request.method == "GET" && !request.path.starts_with("/api/models")
    };
    assert_eq!(server.requests()[asked.len()..].iter().filter(gets).count(), 0);
}

#[test]
fn branches_and_tags_have_their_own_commits() {
    let server = bundled_server();
    let (_dir, options) = cache(&server);
    for revision in ["v1", "refs/pr/1"] {
        open(&format!("org/model@{revision}"), &options).unwrap();
        assert_eq!(fs::read_to_string(repo(&options).join("refs").join(revision)).unwrap(), COMMIT);
    }
    assert!(!repo(&options).join("refs/main").exists());
}

#[test]
fn a_cut_transfer_goes_on_where_it_ended() {
    let (server, _) = gguf_server();
    let (_dir, options) = cache(&server);
    server.fault("m-Q4_0.gguf", Fault::Cut { connections: 2, after: 1_200_000 });
    let path = pull("org/model", &options).unwrap();
    assert_eq!(fs::read(&path).unwrap(), large());
    assert!(path.ends_with("m-Q4_0.gguf"));
    let gets: Vec<_> =
        server.requests().into_iter().filter(|request| request.method == "GET").skip(1).collect();
    let ranges: Vec<_> = gets.iter().map(|request| request.range).collect();
    assert_eq!(ranges, [None, Some(1_200_000), Some(2_400_000)]);
    assert_eq!(server.hub.lock().unwrap().sent, large().len());
}

#[test]
fn another_process_goes_on_where_one_ended() {
    let (server, etag) = gguf_server();
    let (_dir, options) = cache(&server);
    let blobs = repo(&options).join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{etag}.incomplete"));
    fs::write(&partial, &large()[..1_000_000]).unwrap();
    pull("org/model", &options).unwrap();
    assert_eq!(server.hub.lock().unwrap().sent, 2_000_000);
    // What has come completely, but had no name yet.
    fs::rename(blobs.join(&etag), &partial).unwrap();
    pull("org/model", &options).unwrap();
    assert_eq!(server.hub.lock().unwrap().sent, 2_000_000);
    // A server without ranges, and remains that are too long: all of it comes again.
    server.fault("m-Q4_0.gguf", Fault::NoRanges);
    for remains in [&large()[..1_000_000], &[0; 4_000_000]] {
        fs::remove_file(blobs.join(&etag)).unwrap();
        fs::write(&partial, remains).unwrap();
        let path = pull("org/model", &options).unwrap();
        assert_eq!(fs::read(path).unwrap(), large());
    }
    assert_eq!(server.hub.lock().unwrap().sent, 2_000_000 + 2 * large().len());
}

#[test]
fn what_is_wrong_gets_no_name() {
    for (fault, problem, kept) in [
        (Fault::Changed, "has the SHA-256", None),
        (Fault::Longer, "has 3000010 bytes or more, 3000000 were stated", None),
        (Fault::Cut { connections: 99, after: 1000 }, "breaks off", Some(5000)),
        (Fault::Stall { after: 1000 }, "sends nothing for 300ms", Some(5000)),
        (Fault::Busy { times: 99 }, "HTTP 503", Some(0)),
    ] {
        let (server, etag) = gguf_server();
        let (_dir, options) = cache(&server);
        server.fault("m-Q4_0.gguf", fault);
        let error = pull("org/model", &options).unwrap_err().to_string();
        let parts = ["org/model: ", problem];
        assert!(parts.iter().all(|part| error.contains(part)), "{fault:?}: {error}");
        let incomplete = format!("blobs/{etag}.incomplete");
        let remains = fs::metadata(repo(&options).join(&incomplete)).ok().map(|metadata| metadata.len());
        assert!(remains == kept || (kept.is_none() && remains == Some(0)), "{fault:?}: {remains:?}");
        let found = files_below(&repo(&options));
        assert!(found.iter().all(|file| *file == incomplete), "{fault:?}: {found:?}");
        // It is not opened either, and comes when the server is well again.
        let mut offline = options.clone();
        offline.offline = true;
        assert!(open("org/model", &offline).is_err());
        server.hub.lock().unwrap().faults.clear();
        assert_eq!(fs::read(pull("org/model", &options).unwrap()).unwrap(), large(), "{fault:?}");
    }
}

#[test]
fn remains_that_are_not_of_the_file_are_found_out() {
    let (server, etag) = gguf_server();
    let (_dir, options) = cache(&server);
    fs::create_dir_all(repo(&options).join("blobs")).unwrap();
    fs::write(repo(&options).join(format!("blobs/{etag}.incomplete")), [0; 1000]).unwrap();
    let error = pull("org/model", &options).unwrap_err().to_string();
    assert!(error.contains("has the SHA-256") && error.contains(&etag), "{error}");
    pull("org/model", &options).unwrap();
}

#[test]
fn another_host_gets_no_token() {
    let server = bundled_server();
    let other = bundled_server();
    server.hub.lock().unwrap().elsewhere = Some(other.url.clone());
    let (_dir, mut options) = cache(&server);
    options.token = Some("hf_secret".into());
    open("org/model", &options).unwrap();
    let (own, others) = (server.requests(), other.requests());
    assert!(own.iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_secret")));
    assert_eq!(others.len(), 2, "{others:?}");
    assert!(others.iter().all(|request| request.authorization.is_none() && request.method == "GET"));
    // Redirects on the hub itself keep it: small files come by such.
    assert!(own.iter().any(|request| request.path.starts_with("/api/resolve-cache/")));
}

#[test]
fn a_blob_is_fetched_by_one_of_many() {
    let server = bundled_server();
    let (_dir, options) = cache(&server);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| open("org/model", &options).unwrap());
        }
    });
    let sizes: usize = bundled().iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(server.hub.lock().unwrap().sent, sizes);
    assert!(files_below(&repo(&options))
        .iter()
        .all(|file| !file.contains("incomplete") && !file.contains("tmp")));
}

#[test]
fn one_of_several_gguf_models_is_fetched() {
    let bytes = large();
    let names =
        ["a-Q4_K_M.gguf", "a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf", "sub dir/a-F16.gguf"];
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (*name, &bytes[..10])).collect();
    let server = Server::new(&files);
    let (_dir, options) = cache(&server);
    for (name, opened, count) in [
        ("org/model:q8_0", "a-Q8_0-00001-of-00002.gguf", 2),
        ("org/model:F16", "sub dir/a-F16.gguf", 3),
        ("org/model:Q4_K_M", "a-Q4_K_M.gguf", 4),
    ] {
        assert!(pull(name, &options).unwrap().ends_with(opened), "{name}");
        let snapshot = repo(&options).join("snapshots").join(COMMIT);
        let there = names.iter().filter(|name| snapshot.join(name).is_file()).count();
        assert_eq!(there, count, "{name}");
    }
    for name in ["org/model", "org/model:Q2_K"] {
        let error = pull(name, &options).unwrap_err().to_string();
        assert!(error.contains("it has :Q4_K_M, :Q8_0, :F16; write one of these behind the name"), "{error}");
    }
}

#[test]
fn shards_are_those_of_the_index() {
    let index = r#"{"weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "other.safetensors"}}"#;
    let one = crate::checkpoint::file(&[("a.weight", "F32", &[2])]);
    let two = crate::checkpoint::file(&[("b.weight", "F32", &[3])]);
    let files: [(&str, &[u8]); 5] = [
        ("config.json", b"{}"),
        ("model.safetensors.index.json", index.as_bytes()),
        ("model-00001-of-00002.safetensors", &one),
        ("other.safetensors", &two),
        ("consolidated.safetensors", b"not needed"),
    ];
    let server = Server::new(&files);
    let (_dir, options) = cache(&server);
    assert_eq!(open("org/model", &options).unwrap().tensor_names().count(), 2);
    assert!(server.requests().iter().all(|request| !request.path.contains("consolidated")));
    // An index of a shard that is not there, or elsewhere.
    for (shard, problem) in
        [("missing.safetensors", "`missing.safetensors` is missing"), ("../x", "not a plain file name")]
    {
        let index = format!(r#"{{"weight_map": {{"a": "{shard}"}}}}"#);
        let server =
            Server::new(&[("model.safetensors.index.json", index.as_bytes()), ("config.json", b"{}")]);
        let (_dir, options) = cache(&server);
        let error = pull("org/model", &options).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}
