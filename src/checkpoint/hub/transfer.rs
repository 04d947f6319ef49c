//! One file on its way from the hub into the cache.
//!
//! What has come lies in `<etag>.incomplete`. It gets its name when it has the size and, if the hub states one, the
//! SHA-256 that it should have; until then no reader sees it. A later attempt goes on where the last one ended.

use super::cache::{Commit, Folder};
use super::client::{Client, Failure, Stated};
use super::name::Name;
use super::options::{HubEvent, HubOptions};
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use ureq::http::{Response, StatusCode};
use ureq::Body;

/// Attempts that bring less than [`WORTH`] bytes, one after another.
const ATTEMPTS: u32 = 5;
const WORTH: u64 = 1 << 20;

const CHUNK: usize = 256 << 10;
/// How often somebody else's download is looked at.
const EVERY: Duration = Duration::from_millis(100);

/// What all transfers of a model have in common.
pub(super) struct Transfers<'t> {
    pub client: Client<'t>,
    pub name: &'t Name,
    pub options: &'t HubOptions,
    pub folder: Folder,
    pub commit: Commit,
    /// Set when one has failed: the others end, too.
    pub stop: AtomicBool,
}

/// One file that is wanted.
pub(super) struct Wanted {
    pub file: String,
    pub stated: Stated,
}

/// What has come of a file.
struct Partial {
    path: PathBuf,
    file: File,
    have: u64,
    /// Of these bytes, if the digest is known.
    digest: Option<Sha256>,
}

impl Transfers<'_> {
    /// The file of that name is in the cache after this, complete.
    pub fn fetch(&self, Wanted { file, stated }: &Wanted) -> Result<()> {
        let blob = self.folder.blob(&stated.etag);
        let lock = self.lock(file, &stated.etag)?;
        if blob.is_file() {
            self.tell(&HubEvent::Resumed { file, bytes: stated.size.unwrap_or(0) });
        } else {
            log::info!("{}: fetching {file}", self.name);
            self.fetch_blob(file, stated, &blob)?;
        }
        self.folder.link(&self.commit, file, &stated.etag)?;
        drop(lock);
        self.tell(&HubEvent::Finished { file });
        Ok(())
    }

    fn tell(&self, event: &HubEvent<'_>) {
        if let Some(progress) = &self.options.progress {
            progress(event);
        }
    }

    /// Waits until nobody else, in this process or in another, fetches a blob. Python's huggingface_hub takes the
    /// same lock.
    fn lock(&self, file: &str, etag: &str) -> Result<File> {
        let path = self.folder.locks.join(format!("{etag}.lock"));
        let failed = |error| Error::Io { path: path.clone(), error };
        fs::create_dir_all(&self.folder.locks).map_err(failed)?;
        let lock = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
        let mut is_told = false;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(lock),
                Err(TryLockError::WouldBlock) => self.go_on()?,
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
            if !std::mem::replace(&mut is_told, true) {
                log::info!("{}: {file} is being fetched by somebody else; waiting", self.name);
            }
            std::thread::sleep(EVERY);
        }
    }

    /// Fails if another file has failed: its error is the one that counts.
    fn go_on(&self) -> Result<()> {
        match self.stop.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::hub(self.name, "another file has failed", "fetch it again")),
        }
    }

    fn fetch_blob(&self, file: &str, stated: &Stated, blob: &Path) -> Result<()> {
        let mut partial = Partial::open(blob, stated)?;
        if partial.have > 0 {
            self.tell(&HubEvent::Resumed { file, bytes: partial.have });
        }
        let mut attempts = 0;
        while partial.have == 0 || stated.size != Some(partial.have) {
            let before = partial.have;
            let failure = match self.attempt(file, stated, &mut partial) {
                Ok(()) => break,
                Err(failure) => failure,
            };
            let gained = partial.have.saturating_sub(before);
            attempts = if gained >= WORTH { 1 } else { attempts + 1 };
            match failure {
                Failure::Again(error) if attempts < ATTEMPTS => {
                    log::info!("{}: {file}: {error}; again from byte {}", self.name, partial.have);
                    self.go_on()?;
                    std::thread::sleep(self.client.pause(attempts));
                }
                Failure::Again(error) | Failure::Final(error) => return Err(error),
                Failure::Unknown(unknown) => return Err(unknown.error(self.name)),
            }
        }
        partial.finish(file, stated, blob, self.name)
    }

    /// What to say if a part of a file can't be written.
    fn not_kept(&self, file: &str, stated: &Stated, partial: &Partial, error: io::Error) -> Error {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        if !matches!(error.kind(), FileTooLarge | QuotaExceeded | StorageFull) {
            return partial.failed(error);
        }
        let size = stated.size.map(|size| format!(" of {size}")).unwrap_or_default();
        let folder = partial.path.parent().unwrap_or(&partial.path).display();
        let problem = format!("`{file}` has no room in {folder} after {}{size} bytes: {error}", partial.have);
        Error::hub(self.name, problem, "make room, or set HF_HUB_CACHE to a folder of another disk")
    }

    fn attempt(&self, file: &str, stated: &Stated, partial: &mut Partial) -> Result<(), Failure> {
        let response = self.client.get(&self.commit, file, partial.have)?;
        let again = |problem: String| {
            Failure::Again(Error::hub(self.name, problem, "try again; what has come so far is kept"))
        };
        match response.status() {
            StatusCode::PARTIAL_CONTENT if begins_at(&response, partial.have) => {}
            StatusCode::OK => partial.restart()?,
            status => {
                partial.restart()?;
                let problem = format!("`{file}` can't be resumed: HTTP {}", status.as_u16());
                return Err(again(problem));
            }
        }
        let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
        let mut chunk = vec![0; CHUNK];
        loop {
            self.go_on()?;
            let read = match body.read(&mut chunk) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.client.broken_off(file, error)),
            };
            let Some(bytes) = chunk.get(..read).filter(|bytes| !bytes.is_empty()) else { break };
            partial.add(bytes).map_err(|error| self.not_kept(file, stated, partial, error))?;
            if stated.size.is_some_and(|size| partial.have > size) {
                let have = partial.have;
                partial.restart()?;
                let problem =
                    format!("`{file}` has {have} bytes or more, {} were stated", stated.size.unwrap_or(0));
                return Err(Error::hub(self.name, problem, "fetch it again").into());
            }
            self.tell(&HubEvent::Advanced { file, bytes: read as u64 });
        }
        match stated.size {
            Some(size) if partial.have < size => {
                Err(again(format!("`{file}` ends after {} of {size} bytes", partial.have)))
            }
            _ => Ok(()),
        }
    }
}

impl Partial {
    /// What an earlier attempt has left, if it can be checked in the end; else nothing.
    fn open(blob: &Path, stated: &Stated) -> Result<Self> {
        let mut path = blob.as_os_str().to_owned();
        path.push(".incomplete");
        let path = PathBuf::from(path);
        let failed = |error| Error::Io { path: path.clone(), error };
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(failed)?;
        }
        let mut options = File::options();
        let file = options.create(true).truncate(false).read(true).write(true).open(&path).map_err(failed)?;
        let is_sha256 = stated.etag.len() == 64 && stated.etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        let have = file.metadata().map_err(failed)?.len();
        let mut partial = Self { path, file, have: 0, digest: is_sha256.then(Sha256::new) };
        match (&partial.digest, stated.size) {
            (Some(_), Some(size)) if have <= size => partial.read()?,
            _ => partial.restart()?,
        }
        Ok(partial)
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::Io { path: self.path.clone(), error }
    }

    /// Digests what is there.
    fn read(&mut self) -> Result<()> {
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = self.file.read(&mut chunk).map_err(|error| self.failed(error))?;
            let Some(bytes) = chunk.get(..read).filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
            if let Some(digest) = &mut self.digest {
                digest.update(bytes);
            }
            self.have += bytes.len() as u64;
        }
    }

    fn restart(&mut self) -> Result<()> {
        self.have = 0;
        self.digest = self.digest.take().map(|_| Sha256::new());
        self.file.set_len(0).map_err(|error| self.failed(error))?;
        self.file.seek(SeekFrom::Start(0)).map_err(|error| self.failed(error))?;
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        if let Some(digest) = &mut self.digest {
            digest.update(bytes);
        }
        self.have += bytes.len() as u64;
        Ok(())
    }

    /// Gives the file its name, if it is what it should be.
    fn finish(mut self, file: &str, stated: &Stated, blob: &Path, name: &Name) -> Result<()> {
        if let Some(digest) = self.digest.take() {
            let found = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            if !found.eq_ignore_ascii_case(&stated.etag) {
                fs::remove_file(&self.path).map_err(|error| self.failed(error))?;
                let problem = format!("`{file}` has the SHA-256 {found}, {} was stated", stated.etag);
                let remedy = "fetch it again; if that fails too, somebody on the way changes it";
                return Err(Error::hub(name, problem, remedy));
            }
        }
        self.file.sync_all().map_err(|error| self.failed(error))?;
        fs::rename(&self.path, blob).map_err(|error| self.failed(error))
    }
}

/// Whether a part of a file begins where it should.
fn begins_at(response: &Response<Body>, from: u64) -> bool {
    let range = response.headers().get("content-range").and_then(|range| range.to_str().ok());
    let first = range.and_then(|range| range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok());
    first == Some(from)
}
