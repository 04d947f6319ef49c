//! For fuzz targets (feature `fuzzing`): both sides of a connection between ranks, with what an attacker makes of each frame.

use super::channel::Message;
use super::handshake::{knock, may_be_frame, proof, Frame, Knock};
use super::secret::Secret;
use crate::distributed::launcher_env::{RankInfo, JOB_VARIABLE};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// What somebody does to a connection between rank 0 and rank 1.
#[derive(Debug)]
pub struct Attack {
    /// Bits that are changed in the knock of rank 1, the answer of rank 0, and the proof of rank 1.
    pub changes: [[u8; 64]; 3],
    /// What rank 1 says when the handshake is over: one who knows the secret may say anything.
    pub message: Vec<u8>,
    /// What somebody else adds to the connection then.
    pub added: Vec<u8>,
}

/// What a rank has understood of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A frame was refused, by the side that received it.
    Refused,
    /// The message is none of candle-quant's, and the connection is lost.
    Strange,
    /// It is one.
    Understood,
}

/// Runs a handshake and sends a message.
///
/// # Panics
/// If a changed frame is taken, or one that is as it was sent is not; if the system has no sockets.
pub fn attack(attack: &Attack) -> Outcome {
    let secret = Secret::new("an only moderately secret secret").expect("it is long enough");
    let info = |rank: &str| {
        let variables = [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "1"),
            (JOB_VARIABLE, "job"),
        ];
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        RankInfo::from_variables(|name| value(name).map(str::to_owned)).expect("variables of a launcher")
    };
    let changed = |frame: &Frame, changes: &[u8; 64]| {
        let mut frame = *frame;
        frame.iter_mut().zip(changes).for_each(|(byte, bits)| *byte ^= bits);
        frame
    };
    let is_changed = |number: usize| attack.changes[number].iter().any(|bits| *bits != 0);
    let [of_knock, of_answer, of_proof] = &attack.changes;

    let (state, first) = knock(&info("1"), &secret).expect("random numbers");
    let first = changed(&first, of_knock);
    let read = Knock::read(&info("0"), &secret, &first);
    assert_eq!(read.is_err(), is_changed(0), "a knock");
    assert!(read.is_err() || may_be_frame(&first));
    let Ok((answered, answer)) = read.and_then(Knock::answer) else { return Outcome::Refused };
    let proven = proof(state, &info("1"), &changed(&answer, of_answer));
    assert_eq!(proven.is_err(), is_changed(1), "an answer");
    let Ok((of_rank_1, last)) = proven else { return Outcome::Refused };
    let proven = answered.read_proof(&changed(&last, of_proof));
    assert_eq!(proven.is_err(), is_changed(2), "a proof");
    let Ok(proven) = proven else { return Outcome::Refused };
    assert_eq!(proven.problem(&info("0")), None);

    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its number");
    let stream = TcpStream::connect(address).expect("a connection");
    let (_of_rank_0, mut receiver) =
        proven.session.over(listener.accept().expect("a connection").0).expect("a socket");
    let (sender, _receiver) = of_rank_1.over(stream).expect("a socket");
    if sender.send_bytes(&attack.message).is_err() {
        return Outcome::Refused;
    }
    sender.add(&attack.added);
    drop((sender, _receiver));
    let mut outcome = Outcome::Strange;
    loop {
        match receiver.receive(Instant::now() + Duration::from_secs(10)) {
            Ok(message) => {
                assert_eq!(outcome, Outcome::Strange, "what was added is a message");
                let message = message.expect("the connection is closed");
                if let Message::Failed { problem, .. } = &message {
                    let shown = problem.to_string();
                    assert!(!shown.chars().any(char::is_control), "{shown:?}");
                }
                outcome = Outcome::Understood;
            }
            Err(_) => return outcome,
        }
    }
}
