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
    messages.iter().enumerate().map(seed).collect()
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
