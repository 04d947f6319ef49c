//! What those who do not know the secret can do to ranks.

use crate::process::{connect, free_port, read_frame, start, SECRET};
use std::env;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// The head of a knock of rank 1 of 2.
const FORGED: &[u8] = b"cqRV\x02\0\0\0\x01\0\0\0\x02\0\0\0";

/// Some of a frame, none of one, one that nobody with the secret has made, and what ranks of an earlier protocol said.
pub fn disturb_nobody_and_are_told_of() {
    let forged = [FORGED, &[7; 48]].concat();
    let garbage: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 4096],
        &[0xff; 64],
        b"\x09\0\0\0\"Alive\"  \x07\0\0\0\"Alive\"",
        &forged,
        &forged[..20],
    ];
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

/// Somebody who listens in place of rank 0: what he says does not get anywhere.
pub fn are_not_printed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let rank = start("end", 1, 2, port, &[("TIMEOUT", "3")]);
    let text = format!("{{\"Failed\":{{\"rank\":0,\"problem\":\"\x1b[2Jhaha{}\"}}}}", "x".repeat(50_000));
    let sent = [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    // Until it gives up.
    thread::spawn(move || {
        let mut open = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.write_all(&sent);
            open.push(stream);
        }
    });
    let said = rank.last_words();
    let expected = format!(
        "Error: rank 0: does not answer rank 1 at 127.0.0.1:{port} within 3 s: it is no rank of candle-quant\n"
    );
    assert!(said.contains(&expected), "{said:.1000}");
    assert!(!said.contains("haha") && !said.contains('\x1b') && said.len() < 2000, "{said:.1000}");
}

/// One byte after another, forever.
pub fn cannot_hold_a_rank_by_answering_slowly() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let rank = start("end", 1, 2, port, &[("TIMEOUT", "2")]);
    let (mut stream, _) = listener.accept().unwrap();
    thread::spawn(move || {
        while stream.write_all(b"c").is_ok() {
            thread::sleep(Duration::from_millis(300));
        }
    });
    rank.fails(&format!(
        "rank 0: does not answer rank 1 at 127.0.0.1:{port} within 2 s: it accepts connections and says nothing"
    ));
}

/// Somebody who listens in place of rank 0 learns nothing and is not believed, even if he returns what he was sent.
#[test]
fn a_master_without_the_secret_is_not_believed() {
    for reflects in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let rank = start("end", 1, 2, listener.local_addr().unwrap().port(), &[]);
        let (mut stream, _) = listener.accept().unwrap();
        let knock = read_frame(&mut stream);
        assert!(!knock.windows(8).any(|window| SECRET.as_bytes().windows(8).any(|part| part == window)));
        let mut answer = if reflects { knock } else { [7; 64] };
        answer[..8].copy_from_slice(&knock[..8]);
        answer[8..16].fill(0);
        stream.write_all(&answer).unwrap();
        rank.fails("rank 0: does not know the secret; set CANDLE_QUANT_SECRET");
    }
}

#[test]
fn another_protocol_is_refused_with_both_named() {
    let port = free_port();
    let master = start("end", 0, 2, port, &[]);
    let mut stream = connect(port);
    let mut knock = [1; 64];
    knock[..8].copy_from_slice(b"cqRV\x09\0\0\0");
    stream.write_all(&knock).unwrap();
    let refused = read_frame(&mut stream);
    assert_eq!(refused[..16], *b"cqRV\x02\0\0\0\x02\0\0\0\0\0\0\0");
    let rank = start("end", 1, 2, port, &[]);
    master.ends_well();
    rank.ends_well();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rank = start("end", 1, 2, listener.local_addr().unwrap().port(), &[]);
    let (mut stream, _) = listener.accept().unwrap();
    read_frame(&mut stream);
    stream.write_all(&knock).unwrap();
    rank.fails("rank 0: speaks protocol 9, rank 1 protocol 2; install the same candle-quant on all machines");
}

/// A rank that waits for one of them waits as long as its patience, which is 10 s.
#[test]
fn silent_connections_delay_nobody() {
    let port = free_port();
    let master = start("end", 0, 2, port, &[]);
    let silent: Vec<TcpStream> = (0..256).map(|_| connect(port)).collect();
    let mut rank = start("end", 1, 2, port, &[]);
    let milliseconds = rank.milliseconds_to_join();
    assert!(milliseconds < 5000, "{milliseconds} ms");
    rank.ends_well();
    master.ends_well();
    drop(silent);
}

/// One who connects as fast as he can. `CANDLE_QUANT_STRANGERS` says how often he has, when the rank comes.
#[test]
#[cfg(target_os = "linux")]
fn a_flood_of_connections_costs_little_memory_and_delays_nobody() {
    let strangers = env::var("CANDLE_QUANT_STRANGERS").map_or(3000, |count| count.parse().unwrap());
    let port = free_port();
    let master = start("end", 0, 2, port, &[("TIMEOUT", "300")]);
    let resident = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", master.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    drop(connect(port));
    let before = resident();
    let (came, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let forged = [FORGED, &[7; 48]].concat();
    let foreign = [b"cqRV\x09\0\0\0".as_slice(), &[7; 56]].concat();
    let flood = || {
        let mut open: Vec<TcpStream> = Vec::new();
        let mut next = 0;
        while !is_over.load(Ordering::SeqCst) {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(mut stream) => {
                    // Nothing, much that has no meaning, the begin of a knock, and knocks that nobody believes.
                    let said: [&[u8]; 5] = [b"", &[b'x'; 60_000], &forged[..8], &forged, &foreign];
                    let count = came.fetch_add(1, Ordering::SeqCst);
                    let _ = stream.write_all(said[count as usize % said.len()]);
                    if open.len() < 400 {
                        open.push(stream);
                    } else {
                        open[next % 400] = stream;
                        next += 1;
                    }
                }
                // Ports of this machine are used up for a moment.
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    };
    let (milliseconds, most) = thread::scope(|scope| {
        scope.spawn(flood);
        let mut most = 0;
        while came.load(Ordering::SeqCst) < strangers {
            most = most.max(resident());
            thread::sleep(Duration::from_millis(5));
        }
        let mut rank = start("end", 1, 2, port, &[]);
        let milliseconds = rank.milliseconds_to_join();
        is_over.store(true, Ordering::SeqCst);
        rank.ends_well();
        (milliseconds, most)
    });
    println!(
        "{} connections: {before} kB before, at most {most} kB; a rank joined within {milliseconds} ms",
        came.load(Ordering::SeqCst)
    );
    assert!(most < before + (16 << 10), "{before} kB before, {most} kB after {strangers} connections");
    assert!(milliseconds < 5000, "{milliseconds} ms");
    master.ends_well();
}
