use super::*;
use crate::distributed::rendezvous::channel::Session;
use crate::distributed::rendezvous::handshake::tests::{info, secret};
use crate::distributed::rendezvous::handshake::{knock, proof};

fn door() -> Door {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Door::around(listener, &info("a", 0, 3), &secret()).unwrap()
}

fn connect(door: &Door) -> TcpStream {
    TcpStream::connect(door.listener.local_addr().unwrap()).unwrap()
}

/// What happens at the door within some time, if nobody is let in.
fn wait(door: &mut Door) {
    assert!(door.next(Instant::now() + Duration::from_millis(500)).is_none());
}

/// Until somebody is let in.
fn next(door: &mut Door) -> Result<Peer, Error> {
    door.next(Instant::now() + Duration::from_secs(60)).unwrap()
}

fn read_frame(stream: &mut TcpStream) -> io::Result<Frame> {
    let mut frame = [0; 64];
    stream.read_exact(&mut frame).map(|()| frame)
}

/// A knock, the connection it came over, and what is needed to go on.
struct Visit {
    stream: TcpStream,
    knock: Frame,
    of_rank: RankInfo,
    state: snow::HandshakeState,
}

impl Visit {
    fn new(door: &Door, rank: usize, world_size: usize) -> Self {
        let of_rank = info("a", rank, world_size);
        let (state, knock) = knock(&of_rank, &secret()).unwrap();
        let mut stream = connect(door);
        stream.write_all(&knock).unwrap();
        Self { stream, knock, of_rank, state }
    }

    /// Says all, and returns the last frame besides.
    fn prove(mut self) -> ((Sender, Receiver), Frame) {
        let answer = read_frame(&mut self.stream).unwrap();
        let (session, proof) = proof(self.state, &self.of_rank, &answer).unwrap();
        self.stream.write_all(&proof).unwrap();
        (Session::over(session, self.stream).unwrap(), proof)
    }
}

#[test]
fn who_repeats_a_handshake_is_not_let_in() {
    let mut door = door();
    let visit = Visit::new(&door, 1, 3);
    let first = visit.knock;
    wait(&mut door);
    let ((_, mut receiver), last) = visit.prove();
    assert_eq!(next(&mut door).unwrap().rank, 1);
    assert!(matches!(receiver.receive(Instant::now() + PATIENCE).unwrap(), Some(Message::Alive)));
    let mut again = connect(&door);
    again.write_all(&[first, last].concat()).unwrap();
    wait(&mut door);
    assert!(read_frame(&mut again).is_err());
    assert!(door.refused.summary().ends_with("repeats what another has said"), "{}", door.refused.summary());
    // A recorded knock that comes first is answered, and that is all.
    let (_, knock) = knock(&info("a", 2, 3), &secret()).unwrap();
    let mut recorded = connect(&door);
    recorded.write_all(&[knock, last].concat()).unwrap();
    wait(&mut door);
    assert!(read_frame(&mut recorded).is_ok() && read_frame(&mut recorded).is_err());
    assert!(door.strangers.is_empty());
}

#[test]
fn who_knows_the_secret_and_cannot_take_part_is_told_why() {
    let mut door = door();
    let visit = Visit::new(&door, 1, 4);
    wait(&mut door);
    let ((_, mut receiver), _) = visit.prove();
    let error = next(&mut door).unwrap_err().to_string();
    assert_eq!(error, "rank 1: was told of 4 ranks, rank 0 of 3");
    let Some(Message::Failed { rank: 1, problem }) = receiver.receive(Instant::now() + PATIENCE).unwrap()
    else {
        panic!()
    };
    assert_eq!(problem.to_string(), "was told of 4 ranks, rank 0 of 3");
}

#[test]
fn the_first_of_too_many_has_to_go() {
    let mut door = door();
    let mut silent: Vec<TcpStream> = (0..MOST_OF_A_SOURCE + 6).map(|_| connect(&door)).collect();
    wait(&mut door);
    assert_eq!((door.strangers.len(), door.refused.count), (MOST_OF_A_SOURCE, 6));
    let is_gone = |stream: &mut TcpStream| {
        stream.set_nonblocking(true).unwrap();
        stream.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
    };
    let gone: Vec<usize> = (0..silent.len()).filter(|index| is_gone(&mut silent[*index])).collect();
    assert_eq!(gone, [0, 1, 2, 3, 4, 5]);
}

/// Whoever has knocked like a rank goes for none of those that have not.
#[test]
fn strangers_of_many_sources_are_limited_too() {
    let mut door = door();
    let (_, knock) = knock(&info("a", 1, 3), &secret()).unwrap();
    let stream = connect(&door);
    let sources = (MOST_STRANGERS + 50) as u64;
    for number in 0..sources {
        let ip: IpAddr = format!("2001:db8:{number:x}::1").parse().unwrap();
        door.make_room(ip);
        let answered = Knock::read(&door.info, &door.secret, &knock).and_then(Knock::answer).ok().unwrap().0;
        let stranger = Stranger {
            stream: stream.try_clone().unwrap(),
            from: SocketAddr::new(ip, 1),
            until: Instant::now() + PATIENCE,
            frame: [0; 64],
            length: 0,
            answered: (number < 10).then_some(answered),
        };
        door.strangers.insert(number, stranger);
    }
    assert_eq!(door.strangers.len(), MOST_STRANGERS + 10);
    // Those that were silent for longest have gone.
    let left: Vec<u64> = door.strangers.keys().copied().collect();
    assert_eq!(left, (0..10).chain(sources - MOST_STRANGERS as u64..sources).collect::<Vec<_>>());
}

#[test]
fn time_runs_out_for_each_alone() {
    let mut door = door();
    let _silent = [connect(&door), connect(&door)];
    wait(&mut door);
    assert!(door.strangers.values().all(|stranger| stranger.until <= Instant::now() + PATIENCE));
    door.strangers.first_entry().unwrap().get_mut().until -= PATIENCE;
    wait(&mut door);
    assert_eq!((door.strangers.len(), door.refused.count), (1, 1));
    assert!(door.refused.summary().contains("said nothing that is complete"));
}

#[test]
fn an_answered_stranger_has_no_more_time_than_others() {
    let mut door = door();
    let visit = Visit::new(&door, 1, 3);
    wait(&mut door);
    let (_, stranger) = door.strangers.pop_first().unwrap();
    assert!(stranger.answered.is_some() && stranger.until <= Instant::now() + PATIENCE);
    drop(visit);
}

#[test]
fn a_network_of_ipv6_is_one_source() {
    let of = |address: &str| network(address.parse().unwrap()).to_string();
    assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
    assert_eq!(of("::ffff:10.0.0.7"), "10.0.0.7");
    assert_eq!(of("10.0.0.7"), "10.0.0.7");
}

/// However many were refused, a few of them are kept.
#[test]
fn few_of_the_refused_are_named() {
    let mut refused = Refused::default();
    assert_eq!(refused.summary(), "");
    (1..=1000).for_each(|port| refused.add(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port), "is late"));
    let expected = "; 1000 connections were refused: 127.0.0.1:1000 is late; 127.0.0.1:999 is late; \
        127.0.0.1:998 is late; 127.0.0.1:997 is late";
    assert_eq!(refused.summary(), expected);
}
