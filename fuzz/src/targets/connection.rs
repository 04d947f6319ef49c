//! What ranks, and those who are none, say to each other.

use super::{content, Seeds};
use crate::Bundle;
use candle_quant::parallel::fuzzing::{attack, Attack, Outcome};

/// Files of an input: bits that change in a frame, what a rank says, what somebody adds.
const FRAMES: [&str; 3] = ["knock", "answer", "proof"];
const MESSAGE: &str = "message";
const ADDED: &str = "added";

/// More than a message has, and less than a connection holds.
const MOST: usize = 1 << 16;

pub(super) fn seeds(_: &str) -> Seeds {
    let messages = [
        r#""Alive""#,
        r#""Left""#,
        r#""AllLeft""#,
        r#"{"Failed":{"rank":1,"problem":"out of\u001b[2J memory"}}"#,
        r#"{"Welcome":{"token":[1,2,255],"silence":{"secs":20,"nanos":5}}}"#,
    ];
    let seed = |(number, message): (usize, &&str)| {
        let none: &[u8] = &[0; 64];
        let [knock, answer, proof] = FRAMES.map(|name| (name, none));
        let bundle = super::bundle([knock, answer, proof, (MESSAGE, message.as_bytes()), (ADDED, &[])]);
        (number.to_string(), bundle)
    };
    let mut seeds: Seeds = messages.iter().enumerate().map(seed).collect();
    // Of each frame one that is changed, also where it says nothing.
    for (name, at) in [(FRAMES[0], 40), (FRAMES[1], 12), (FRAMES[2], 63)] {
        let (_, mut bundle) = seeds[0].clone();
        let changes = bundle.files.iter_mut().find(|file| file.0 == name);
        changes.into_iter().for_each(|(_, bits)| bits[at] = 1);
        seeds.push((format!("changed-{name}"), bundle));
    }
    seeds
}

pub(super) fn run(bundle: &Bundle) -> bool {
    let changes = FRAMES.map(|name| {
        let mut changes = [0; 64];
        changes.iter_mut().zip(content(bundle, name)).for_each(|(to, from)| *to = *from);
        changes
    });
    let part = |name| content(bundle, name).iter().take(MOST).copied().collect();
    attack(&Attack { changes, message: part(MESSAGE), added: part(ADDED) }) == Outcome::Understood
}
