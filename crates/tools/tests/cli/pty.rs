//! A terminal, as programs see it.

use rustix::io::{fcntl_setfd, FdFlags};
use rustix::pty::{grantpt, openpt, ptsname, unlockpt, OpenptFlags};
use rustix::termios::{tcgetattr, tcsetwinsize, LocalModes, Winsize};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longer than any program here runs.
const PATIENCE: Duration = Duration::from_secs(60);

/// What somebody types, and sees.
pub struct Pty {
    keys: File,
    /// Where programs read and write. Open as long as this, so that its modes can be asked for at any time.
    program_side: File,
    name: String,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Pty {
    pub fn new(columns: u16) -> Self {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        // If a test fails, its program loses the terminal, and ends.
        fcntl_setfd(&keys, FdFlags::CLOEXEC).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name = ptsname(&keys, Vec::new()).unwrap().into_string().unwrap();
        let keys = File::from(keys);
        let program_side = File::options().read(true).write(true).open(&name).unwrap();
        let size = Winsize { ws_col: columns, ws_row: 24, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&program_side, size).unwrap();
        let (mut screen, shown) = (keys.try_clone().unwrap(), Arc::default());
        let drawn: Arc<Mutex<Vec<u8>>> = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut piece = [0; 1024];
            while let Ok(count @ 1..) = screen.read(&mut piece) {
                drawn.lock().unwrap().extend_from_slice(&piece[..count]);
            }
        });
        Self { keys, program_side, name, shown }
    }

    pub fn spawn(&self, command: &mut Command) -> Child {
        let open = || File::options().read(true).write(true).open(&self.name).unwrap();
        command.stdin(open()).stdout(open()).stderr(open()).env("TERM", "xterm").spawn().unwrap()
    }

    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Whether the terminal itself shows what is typed.
    pub fn echoes(&self) -> bool {
        tcgetattr(&self.program_side).unwrap().local_modes.contains(LocalModes::ECHO | LocalModes::ICANON)
    }

    /// Writes a text behind all that a program has written so far.
    pub fn mark(&self, text: &str) {
        (&self.program_side).write_all(text.as_bytes()).unwrap();
    }

    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    pub fn wait_for(&self, text: &str) {
        let begun = Instant::now();
        while !self.shown().contains(text) {
            assert!(begun.elapsed() < PATIENCE, "{text:?} does not come: {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// All that was shown, once a program has ended. Meanwhile this is called again and again.
    pub fn end(self, mut child: Child, mut watch: impl FnMut(&Self)) -> String {
        let begun = Instant::now();
        while child.try_wait().unwrap().is_none() {
            watch(&self);
            std::thread::sleep(Duration::from_millis(1));
            if begun.elapsed() > PATIENCE {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("it does not end: {}", self.shown());
            }
        }
        assert!(child.wait().unwrap().success(), "{}", self.shown());
        assert!(self.echoes(), "the terminal is not left as it was found");
        const LAST: &str = "that was all";
        self.mark(LAST);
        self.wait_for(LAST);
        self.shown()
    }
}
