//! A rank as a process, and somebody who speaks to one.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

pub const SECRET: &str = "an only moderately secret secret";
/// Seconds that are never waited for.
const LONG: u64 = 60;

/// Held by who starts a process: until it runs its program it has a copy of every open file, a listener on a port, too.
static STARTS: Mutex<()> = Mutex::new(());

pub struct Process {
    pub child: Child,
    pub stdout: BufReader<ChildStdout>,
}

/// A port that nobody has just now. Below those that systems give to connections: a flood of these does not take it.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Programs that run side by side begin elsewhere.
    let first = 10_000 + (std::process::id() % 500) as u16 * 40;
    let _nobody_starts = STARTS.lock().unwrap();
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % 2000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A rank that does something, with changes of its environment.
pub fn start(does: &str, rank: usize, world_size: usize, port: u16, changes: &[(&str, &str)]) -> Process {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "rank", "--nocapture"]).env("RANK_DOES", does);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
    command.env("LOCAL_RANK", rank.to_string()).env("MASTER_ADDR", "127.0.0.1");
    command.env("MASTER_PORT", port.to_string()).env("CANDLE_QUANT_SECRET", SECRET);
    command.env("TIMEOUT", LONG.to_string()).env("HEARTBEAT_TIMEOUT", LONG.to_string());
    command
        .env_remove("CANDLE_QUANT_JOB")
        .env_remove("TORCHELASTIC_RUN_ID")
        .envs(changes.iter().copied())
        .env_remove("RUST_BACKTRACE");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = {
        let _alone = STARTS.lock().unwrap();
        command.spawn().unwrap()
    };
    let stdout = BufReader::new(child.stdout.take().unwrap());
    Process { child, stdout }
}

pub fn start_all(does: &[&str]) -> Vec<Process> {
    let port = free_port();
    does.iter().enumerate().map(|(rank, what)| start(what, rank, does.len(), port, &[])).collect()
}

impl Process {
    pub fn wait_until(&mut self, said: &str) {
        let mut line = String::new();
        while !line.ends_with(&format!("{said}\n")) {
            line.clear();
            let count = self.stdout.read_line(&mut line).unwrap();
            assert_ne!(count, 0, "it has ended: {}", self.errors());
        }
    }

    /// What it has written to stderr, once it has ended.
    fn errors(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// Of the process, until it has joined the others.
    pub fn milliseconds_to_join(&mut self) -> u64 {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "it has ended");
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [.., "after", milliseconds, "ms"] = words[..] {
                return milliseconds.parse().unwrap();
            }
        }
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn ends_well(mut self) {
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert!(self.child.wait().unwrap().success(), "{stderr}");
    }

    /// Ends with an exit code, and these messages.
    #[track_caller]
    pub fn last_words(mut self) -> String {
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(1), "{stderr}");
        stderr
    }

    /// Ends with an exit code, after this message.
    #[track_caller]
    pub fn fails(self, expected: &str) {
        let stderr = self.last_words();
        assert!(stderr.contains(&format!("Error: {expected}")), "{stderr}");
    }
}

/// Connects as soon as somebody listens.
pub fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// What is sent before anybody has proven anything.
pub fn read_frame(stream: &mut TcpStream) -> [u8; 64] {
    let mut frame = [0; 64];
    stream.read_exact(&mut frame).unwrap();
    frame
}
