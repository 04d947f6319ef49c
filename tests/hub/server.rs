//! A small server that speaks as the hub does, and as badly as a test wants it to.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong with the file of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The first connections end after so many bytes.
    Cut { connections: usize, after: usize },
    /// Nothing comes after so many bytes, for ever.
    Stall { after: usize },
    /// One byte is another one.
    Changed,
    /// More bytes come than were stated.
    Longer,
    /// Ranges are not known.
    NoRanges,
    /// The first answers are 503.
    Busy { times: usize },
}

#[derive(Clone)]
pub struct Answer {
    pub status: &'static str,
    pub code: &'static str,
}

/// What the server has, and what it was asked.
#[derive(Default)]
pub struct Hub {
    pub files: BTreeMap<String, Vec<u8>>,
    /// Files that are listed and nothing else.
    pub listed: Vec<String>,
    pub faults: BTreeMap<String, Fault>,
    /// The answer to everything.
    pub refusal: Option<Answer>,
    pub commit: String,
    /// Another host that has the bytes of large files.
    pub elsewhere: Option<String>,
    pub requests: Vec<Request>,
    /// Bytes of bodies of files that were sent.
    pub sent: usize,
}

#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub authorization: Option<String>,
    pub range: Option<usize>,
}

pub struct Server {
    pub url: String,
    pub hub: Arc<Mutex<Hub>>,
    end: Arc<AtomicBool>,
}

impl Server {
    pub fn new(files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        Self::with(Hub { files, commit: COMMIT.into(), ..Hub::default() })
    }

    pub fn with(hub: Hub) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (hub, end) = (Arc::new(Mutex::new(hub)), Arc::new(AtomicBool::new(false)));
        let (served, ended) = (hub.clone(), end.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let (hub, end) = (served.clone(), ended.clone());
                // Whoever goes away in the midst is part of the tests.
                thread::spawn(move || stream.and_then(|stream| serve(&hub, &end, stream)));
            }
        });
        Self { url, hub, end }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.hub.lock().unwrap().requests.clone()
    }

    pub fn fault(&self, file: &str, fault: Fault) {
        self.hub.lock().unwrap().faults.insert(file.into(), fault);
    }

    pub fn refuse(&self, status: &'static str, code: &'static str) {
        self.hub.lock().unwrap().refusal = Some(Answer { status, code });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.url.trim_start_matches("http://"));
    }
}

/// Large files have their SHA-256 as a name, others something like git's hash.
pub fn etag(name: &str, bytes: &[u8]) -> String {
    let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    match is_large(name) {
        true => digest,
        false => digest[..40].to_owned(),
    }
}

pub fn is_large(name: &str) -> bool {
    [".safetensors", ".gguf", ".uqff"].iter().any(|end| name.ends_with(end)) || name == "tokenizer.json"
}

fn serve(hub: &Mutex<Hub>, end: &AtomicBool, mut stream: TcpStream) -> io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    // Several requests may come over one connection.
    while let Some(request) = read(&mut reader)? {
        hub.lock().unwrap().requests.push(request.clone());
        if !answer(hub, end, &mut stream, &request)? {
            return Ok(());
        }
    }
    Ok(())
}

fn read(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut request = Request { method, path, authorization: None, range: None };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else { return Ok(Some(request)) };
        match (name.to_ascii_lowercase().as_str(), value.trim()) {
            ("authorization", value) => request.authorization = Some(value.to_owned()),
            ("range", value) => {
                request.range =
                    value.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-')?.parse().ok());
            }
            _ => {}
        }
    }
}

fn head(stream: &mut TcpStream, status: &str, headers: &[(&str, String)]) -> io::Result<()> {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    write!(stream, "HTTP/1.1 {status}\r\n{headers}\r\n")
}

/// Whether the connection goes on.
fn answer(hub: &Mutex<Hub>, end: &AtomicBool, stream: &mut TcpStream, request: &Request) -> io::Result<bool> {
    let (refusal, commit) = {
        let hub = hub.lock().unwrap();
        (hub.refusal.clone(), hub.commit.clone())
    };
    let length = |bytes: usize| ("Content-Length", bytes.to_string());
    if let Some(Answer { status, code }) = refusal {
        head(stream, status, &[length(0), ("X-Error-Code", code.to_owned())])?;
        return Ok(true);
    }
    if let Some(rest) = request.path.strip_prefix("/api/models/org/model/revision/") {
        let hub = hub.lock().unwrap();
        if !["main", "v1", "refs%2Fpr%2F1", &*commit].contains(&rest) {
            head(stream, "404 Not Found", &[length(0), ("X-Error-Code", "RevisionNotFound".into())])?;
            return Ok(true);
        }
        let names = hub.files.keys().chain(&hub.listed);
        let siblings: Vec<_> = names.map(|name| serde_json::json!({"rfilename": name})).collect();
        let body = serde_json::json!({"id": "org/model", "sha": commit, "siblings": siblings}).to_string();
        head(stream, "200 OK", &[length(body.len()), ("Content-Type", "application/json".into())])?;
        stream.write_all(body.as_bytes())?;
        return Ok(true);
    }
    // The hub, the place to which it sends for small files, and the other host for large ones.
    let places = [format!("/org/model/resolve/{commit}/"), "/api/resolve-cache/".into(), "/bytes/".into()];
    let found = places.iter().enumerate().find_map(|(place, prefix)| {
        let name = request.path.strip_prefix(prefix)?.replace("%20", " ");
        let hub = hub.lock().unwrap();
        Some((
            place,
            hub.files.get(&name)?.clone(),
            hub.faults.get(&name).copied(),
            hub.elsewhere.clone(),
            name,
        ))
    });
    let Some((place, bytes, fault, elsewhere, name)) = found else {
        head(stream, "404 Not Found", &[length(0), ("X-Error-Code", "EntryNotFound".into())])?;
        return Ok(true);
    };
    let etag = format!("\"{}\"", etag(&name, &bytes));
    let common = [("X-Repo-Commit", commit), ("ETag", format!("W/{etag}"))];
    let escaped = name.replace(' ', "%20");
    if place == 0 && is_large(&name) {
        if let Some(host) = elsewhere {
            let linked = [
                ("X-Linked-Etag", etag),
                ("X-Linked-Size", bytes.len().to_string()),
                ("Location", format!("{host}/bytes/{escaped}")),
                ("ETag", "\"of-the-redirect\"".into()),
                length(0),
            ];
            head(stream, "302 Found", &linked)?;
            return Ok(true);
        }
    } else if place == 0 {
        let location = ("Location", format!("/api/resolve-cache/{escaped}"));
        head(stream, "307 Temporary Redirect", &[location, length(0), common[0].clone()])?;
        return Ok(true);
    }
    if request.method == "HEAD" {
        head(stream, "200 OK", &[length(bytes.len()), common[0].clone(), common[1].clone()])?;
        return Ok(true);
    }
    send(hub, end, stream, request, &name, bytes, fault)
}

fn send(
    hub: &Mutex<Hub>,
    end: &AtomicBool,
    stream: &mut TcpStream,
    request: &Request,
    name: &str,
    mut bytes: Vec<u8>,
    fault: Option<Fault>,
) -> io::Result<bool> {
    let whole = bytes.len();
    let from = request.range.filter(|_| fault != Some(Fault::NoRanges)).unwrap_or(0);
    let mut most = usize::MAX;
    let set = |fault| hub.lock().unwrap().faults.insert(name.to_owned(), fault);
    match fault {
        Some(Fault::Changed) => bytes[whole / 2] ^= 1,
        Some(Fault::Longer) => bytes.extend([0; 10]),
        Some(Fault::Cut { connections: 1.., after }) => most = after,
        Some(Fault::Stall { after }) => most = after,
        Some(Fault::Busy { times: times @ 1.. }) => {
            set(Fault::Busy { times: times - 1 });
            head(stream, "503 Service Unavailable", &[("Content-Length", "0".into())])?;
            return Ok(true);
        }
        _ => {}
    }
    let body = &bytes[from..];
    let length = ("Content-Length", body.len().to_string());
    match from {
        0 => head(stream, "200 OK", &[length])?,
        _ => {
            let range = ("Content-Range", format!("bytes {from}-{}/{whole}", whole - 1));
            head(stream, "206 Partial Content", &[length, range])?;
        }
    }
    let sent = &body[..most.min(body.len())];
    hub.lock().unwrap().sent += sent.len();
    stream.write_all(sent)?;
    stream.flush()?;
    match fault {
        Some(Fault::Cut { connections: connections @ 1.., after }) => {
            set(Fault::Cut { connections: connections - 1, after });
            Ok(false)
        }
        Some(Fault::Stall { .. }) => {
            while !end.load(Ordering::Relaxed) && stream.peek(&mut [0]).is_ok_and(|read| read > 0) {
                thread::sleep(Duration::from_millis(10));
            }
            let _ = stream.read(&mut [0]);
            Ok(false)
        }
        _ => Ok(true),
    }
}
