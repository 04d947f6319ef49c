//! Ranks that are processes: how they find each other, and how they end. This program starts itself as each rank.

#[path = "../../../tests/common/mod.rs"]
mod common;

use candle_core::{DType, Device, Tensor};
use candle_quant::parallel::{Joined, Launch, RankInfo, Secret};
use candle_quant::{Error, Result};
use candle_quant_models::Model;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{self, Child, ChildStdout, Command, Stdio};
use std::time::Duration;
use std::{env, thread};

const SECRET: &str = "an only moderately secret secret";
/// Seconds that are never waited for.
const LONG: u64 = 60;

/// What a rank does when it has joined is said by `RANK_DOES`.
#[test]
fn rank() {
    let Ok(does) = env::var("RANK_DOES") else { return };
    if let Err(error) = be_rank(&does) {
        eprintln!("Error: {error}");
        process::exit(1);
    }
    process::exit(0);
}

fn be_rank(does: &str) -> Result<()> {
    let place = RankInfo::from_env()?;
    let timeout = Duration::from_secs(env::var("TIMEOUT").unwrap().parse().unwrap());
    let token = || match does {
        "no token" => Err(Error::Unsupported { what: "a token".into(), remedy: "go on without".into() }),
        _ => Ok(b"from rank 0".to_vec()),
    };
    Launch::default().timeout(timeout).join(&place, &Secret::from_env()?, token, |joined| {
        assert_eq!(joined.token(), b"from rank 0");
        println!("joined");
        match does {
            "end" => Ok(()),
            "fail" => Err(Error::Unsupported { what: "this rank".into(), remedy: "take another".into() }),
            "panic" => panic!("a fuse blew"),
            // As if in a collective that never ends.
            "block" => loop {
                thread::park();
            },
            "work" => loop {
                if let Some(failure) = joined.failure() {
                    return Err(failure);
                }
                thread::sleep(Duration::from_millis(10));
            },
            "load and decode" => load_and_decode(joined),
            other => panic!("{other}"),
        }
    })
}

/// Says how far it is, and goes on until another rank fails.
fn load_and_decode(joined: &Joined) -> Result<()> {
    let checkpoint = common::open("qwen3-affine-b4-g64");
    let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu)?;
    println!("loaded");
    for offset in 0.. {
        if let Some(failure) = joined.failure() {
            return Err(failure);
        }
        model.forward(&Tensor::new(&[[7u32]], &Device::Cpu)?, offset)?;
        println!("step {offset}");
    }
    Ok(())
}

struct Process {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

/// A port that nobody has just now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A rank that does something, with changes of its environment.
fn start(does: &str, rank: usize, world_size: usize, port: u16, changes: &[(&str, &str)]) -> Process {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "rank", "--nocapture"]).env("RANK_DOES", does);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
    command.env("LOCAL_RANK", rank.to_string()).env("MASTER_ADDR", "127.0.0.1");
    command.env("MASTER_PORT", port.to_string()).env("CANDLE_QUANT_SECRET", SECRET);
    command.env("TIMEOUT", LONG.to_string()).envs(changes.iter().copied()).env_remove("RUST_BACKTRACE");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    Process { child, stdout }
}

fn start_all(does: &[&str]) -> Vec<Process> {
    let port = free_port();
    does.iter().enumerate().map(|(rank, what)| start(what, rank, does.len(), port, &[])).collect()
}

impl Process {
    fn wait_until(&mut self, said: &str) {
        let mut line = String::new();
        while !line.ends_with(&format!("{said}\n")) {
            line.clear();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "it has ended");
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn ends_well(mut self) {
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert!(self.child.wait().unwrap().success(), "{stderr}");
    }

    /// Ends with an exit code, after this message.
    #[track_caller]
    fn fails(mut self, expected: &str) {
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(1), "{stderr}");
        assert!(stderr.contains(&format!("Error: {expected}")), "{stderr}");
    }
}

/// These mostly wait for silence: side by side they take as long as the longest.
#[test]
fn ranks_that_fall_silent() {
    let tests = [
        a_failing_rank_ends_all_with_its_message,
        a_panicking_rank_ends_all_with_its_message,
        a_killed_rank_ends_all,
        a_rank_killed_before_all_have_come_or_gone_ends_all,
        a_rank_that_works_on_when_others_have_ended_fails,
        a_rank_that_is_there_twice_ends_all_at_once,
        a_rank_with_another_secret_is_not_let_in,
        strangers_disturb_nobody_and_are_told_of,
        a_master_that_does_not_answer_is_named,
    ];
    thread::scope(|scope| tests.map(|test| scope.spawn(test)).map(|test| test.join().unwrap()));
}

#[test]
fn ranks_find_each_other_and_wait_for_all_to_end() {
    for count in [1, 2, 5] {
        start_all(&vec!["end"; count]).into_iter().for_each(Process::ends_well);
    }
}

fn a_failing_rank_ends_all_with_its_message() {
    for failed in [0, 2] {
        let mut does = ["block", "work", "block", "work", "end"];
        does[failed] = "fail";
        for process in start_all(&does) {
            process.fails(&format!("rank {failed}: this rank is not supported; take another"));
        }
    }
}

fn a_panicking_rank_ends_all_with_its_message() {
    for process in start_all(&["work", "panic", "block"]) {
        process.fails("rank 1: panicked: a fuse blew");
    }
}

fn a_killed_rank_ends_all() {
    for killed in [0, 1] {
        let mut processes = start_all(&["block", "block", "work"]);
        processes.iter_mut().for_each(|process| process.wait_until("joined"));
        processes.remove(killed).kill();
        for process in processes {
            process.fails(&format!("rank {killed}: its process has ended or cannot be reached"));
        }
    }
}

#[test]
fn a_rank_killed_at_any_point_of_load_or_decode_ends_all() {
    for point in ["joined", "loaded", "step 0", "step 9"] {
        for killed in [0, 2] {
            let mut processes = start_all(&["load and decode"; 3]);
            processes[killed].wait_until(point);
            processes.remove(killed).kill();
            for process in processes {
                process.fails(&format!("rank {killed}: its process has ended or cannot be reached"));
            }
        }
    }
}

/// One that has been let in, and waits for the others to come, or is waited for at the end.
fn a_rank_killed_before_all_have_come_or_gone_ends_all() {
    for killed in [0, 1] {
        let (port, listener) = (free_port(), TcpListener::bind("127.0.0.1:0").unwrap());
        let master = start("block", 0, 3, port, &[]);
        let waiting = start("block", 1, 3, listener.local_addr().unwrap().port(), &[]);
        let (mut of_rank, mut of_master) = (listener.accept().unwrap().0, connect(port));
        write_frame(&mut of_master, &read_frame(&mut of_rank));
        write_frame(&mut of_rank, &read_frame(&mut of_master));
        write_frame(&mut of_master, &read_frame(&mut of_rank));
        let expected = format!("rank {killed}: its process has ended or cannot be reached");
        if killed == 0 {
            master.kill();
            drop((of_rank, of_master));
            waiting.fails(&expected);
        } else {
            waiting.kill();
            drop((of_rank, of_master));
            let late = start("block", 2, 3, port, &[]);
            master.fails(&expected);
            late.fails(&expected);
        }
    }
    let mut processes = start_all(&["work", "end", "work"]);
    processes.iter_mut().for_each(|process| process.wait_until("joined"));
    processes.remove(1).kill();
    for process in processes {
        process.fails("rank 1: its process has ended or cannot be reached");
    }
}

fn a_rank_that_works_on_when_others_have_ended_fails() {
    let port = free_port();
    let timeout = [("TIMEOUT", "10")];
    let does = ["end", "block", "end"];
    let ranks = does.iter().enumerate().map(|(rank, does)| start(does, rank, 3, port, &timeout));
    for process in ranks.collect::<Vec<_>>() {
        process.fails("rank 1: still works 10 s after the first rank has ended");
    }
}

#[test]
fn what_rank_0_cannot_make_is_told_to_all() {
    for process in start_all(&["no token", "end", "end"]) {
        process.fails("rank 0: a token is not supported; go on without");
    }
}

#[test]
fn a_rank_of_another_world_size_ends_all_at_once() {
    let port = free_port();
    let sizes = [3, 3, 4];
    let ranks = sizes.iter().enumerate().map(|(rank, &size)| start("end", rank, size, port, &[]));
    for process in ranks.collect::<Vec<_>>() {
        process.fails("rank 2: was told of 4 ranks, rank 0 of 3");
    }
}

fn a_rank_that_is_there_twice_ends_all_at_once() {
    let port = free_port();
    let processes = [0, 1, 1].map(|rank| start("end", rank, 3, port, &[]));
    for process in processes {
        process.fails("rank 1: two processes are this rank");
    }
    let timeout = [("TIMEOUT", "5")];
    let (first, second) = (start("end", 0, 2, port, &timeout), start("end", 0, 2, port, &timeout));
    let mut told = [first, second].map(|mut process| {
        let mut stderr = String::new();
        process.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!(process.child.wait().unwrap().code(), Some(1));
        stderr
    });
    told.sort();
    assert!(told[0].contains(&format!("Error: rank 0: cannot listen on 127.0.0.1:{port}")), "{told:?}");
    assert!(told[1].contains("Error: rank 1: has not come to rank 0 at 127.0.0.1:"), "{told:?}");
}

/// The one without it ends at once. The others wait for the right one, which does not come.
fn a_rank_with_another_secret_is_not_let_in() {
    let port = free_port();
    let wrong = start("end", 2, 3, port, &[("CANDLE_QUANT_SECRET", "another secret, but long enough")]);
    let right = start("end", 1, 3, port, &[]);
    let master = start("end", 0, 3, port, &[("TIMEOUT", "15")]);
    wrong.fails("rank 2: does not know the secret of rank 0");
    let told =
        format!("rank 2: has not come to rank 0 at 127.0.0.1:{port} within 15 s; 1 connections were refused");
    master.fails(&told);
    right.fails(&told);
    let unset = start("end", 1, 2, port, &[("CANDLE_QUANT_SECRET", "")]);
    unset.fails("secret of the ranks: expected 16 bytes or more");
}

/// Connects as soon as somebody listens.
fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn strangers_disturb_nobody_and_are_told_of() {
    let garbage: [&[u8]; 4] =
        [b"GET / HTTP/1.1\r\n\r\n", &[0; 4096], &[0xff; 64], b"\x09\0\0\0\"Alive\"  \x07\0\0\0\"Alive\""];
    let port = free_port();
    let master = start("end", 0, 2, port, &[]);
    let silent = connect(port);
    let mut strangers = Vec::new();
    for bytes in garbage {
        let mut stranger = connect(port);
        stranger.write_all(bytes).unwrap();
        strangers.push(stranger);
    }
    let rank = start("end", 1, 2, port, &[]);
    master.ends_well();
    rank.ends_well();
    drop((silent, strangers));

    let master = start("end", 0, 2, port, &[("TIMEOUT", "10")]);
    connect(port).write_all(garbage[0]).unwrap();
    master.fails(&format!(
        "rank 1: has not come to rank 0 at 127.0.0.1:{port} within 10 s; 1 connections were refused: 127.0.0.1:"
    ));
}

fn a_master_that_does_not_answer_is_named() {
    let timeout = [("TIMEOUT", "2")];
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let expected =
        format!("rank 0: does not answer rank 1 at 127.0.0.1:{port} within 2 s: it accepts connections");
    start("end", 1, 2, port, &timeout).fails(&expected);
    let port = free_port();
    let expected =
        format!("rank 0: does not answer rank 1 at 127.0.0.1:{port} within 2 s: Connection refused");
    start("end", 1, 2, port, &timeout).fails(&expected);
}

fn read_frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn write_message(stream: &mut TcpStream, message: &serde_json::Value) {
    write_frame(stream, message.to_string().as_bytes());
}

fn write_frame(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(bytes).unwrap();
}

/// Somebody who listens in place of rank 0 learns nothing and is not believed, even if he returns the proof.
#[test]
fn a_master_without_the_secret_is_not_believed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rank = start("end", 1, 2, listener.local_addr().unwrap().port(), &[]);
    let (mut stream, _) = listener.accept().unwrap();
    let hello = read_frame(&mut stream);
    write_message(&mut stream, &serde_json::json!({ "Challenge": { "nonce": vec![7; 32] } }));
    let proof = read_frame(&mut stream);
    for sent in [&hello, &proof] {
        assert!(!sent.windows(SECRET.len()).any(|window| window == SECRET.as_bytes()));
    }
    let proof: serde_json::Value = serde_json::from_slice(&proof).unwrap();
    let proof = &proof["Proof"]["proof"];
    assert_eq!(proof.as_array().unwrap().len(), 32);
    write_message(
        &mut stream,
        &serde_json::json!({ "Welcome": { "proof": proof, "token": b"from rank 0" } }),
    );
    rank.fails("rank 0: does not know the secret; set CANDLE_QUANT_SECRET alike");
}

#[test]
fn another_version_is_refused_with_both_named() {
    let port = free_port();
    let master = start("end", 0, 2, port, &[]);
    let mut stream = connect(port);
    let nonce = vec![1; 32];
    let hello = |protocol: u32| serde_json::json!({ "Hello": { "protocol": protocol, "version": "9.9.9", "rank": 1, "world_size": 2, "nonce": nonce } });
    write_message(&mut stream, &hello(2));
    let refused = String::from_utf8(read_frame(&mut stream)).unwrap();
    assert!(refused.contains("speaks protocol 2 (candle-quant 9.9.9), rank 0 protocol 1"), "{refused}");
    let rank = start("end", 1, 2, port, &[]);
    master.ends_well();
    rank.ends_well();
}
