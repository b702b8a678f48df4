//! Proxies that pass byte streams on: the bytes are those that were sent, whatever the network, slow peers and ends of connections do.

use std::sync::{Arc, Mutex};

use crate::scene::{Caller, MS, Scene, Script, TCP, script};
use builtins::{CountMinFunction, HyperLogLogFunction};
use engine::{ChainReply, ChainRequest};
use onpath::{Command, Direction, Failure, Function, Messages, OnFailure};
use sim::ConnId;
use sim::client_address;
use sim::net::{Faults, PeerRead, Reachability};
use sim::rng::Rng;
use sim::shared::lock;
use sim::world::change::Keeps;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{Close, Transport};

fn relay(workers: usize) -> Script {
    let mut script = script(Framing::Raw);
    script.upstream(Transport::Tcp);
    script.setup.topology.engine.workers = workers;
    script
}

fn play(script: Script) -> Scene {
    let mut scene = script.play();
    // The tests are the server.
    scene.backend = None;
    scene
}

/// One end of a connection: what it has sent and got.
#[derive(Default)]
struct Side {
    sent: Vec<u8>,
    got: Vec<u8>,
    /// It sends nothing more.
    finished: bool,
    /// It has reset the connection.
    left: bool,
    /// How the connection ended for it.
    end: Option<PeerRead>,
}

impl Side {
    fn write(&mut self, scene: &Scene, conn: ConnId, rng: &mut Rng, most: u64) {
        if self.finished || self.left || self.end == Some(PeerRead::Broken) {
            return;
        }
        let bytes: Vec<u8> = (0..1 + rng.below(most)).map(|_| rng.below(256) as u8).collect();
        let count = lock(&scene.world.net).peer_write(conn, &bytes);
        self.sent.extend_from_slice(&bytes[..count]);
    }

    fn read(&mut self, scene: &Scene, conn: ConnId, max: usize) {
        if self.left || self.end.is_some() {
            return;
        }
        match lock(&scene.world.net).peer_read(conn, max) {
            PeerRead::Bytes(bytes) => self.got.extend(bytes),
            PeerRead::Empty => {}
            end => self.end = Some(end),
        }
    }

    fn finish(&mut self, scene: &Scene, conn: ConnId) {
        if !self.left && !std::mem::replace(&mut self.finished, true) {
            lock(&scene.world.net).peer_shutdown(conn);
        }
    }

    fn leave(&mut self, scene: &Scene, conn: ConnId) {
        if !std::mem::replace(&mut self.left, true) {
            lock(&scene.world.net).peer_close(conn, Close::Reset);
        }
    }
}

/// A client's connection and the one to the server.
struct Pair {
    client: ConnId,
    server: Option<ConnId>,
    c: Side,
    s: Side,
}

const NAME_BYTES: usize = 4;

struct Stage {
    scene: Scene,
    pairs: Vec<Pair>,
    /// Connections to the server whose client has not said its name, and what it has said.
    unnamed: Vec<(ConnId, Vec<u8>)>,
    numbers: u32,
}

impl Stage {
    fn new(script: Script) -> Self {
        Self { scene: play(script), pairs: Vec::new(), unnamed: Vec::new(), numbers: 0 }
    }

    fn run(&mut self, rounds: usize) {
        for _ in 0..rounds {
            self.scene.run(1);
            self.accept();
        }
    }

    fn connect(&mut self) {
        self.numbers += 1;
        let name = (self.pairs.len() as u32).to_le_bytes();
        let mut net = lock(&self.scene.world.net);
        let client = net.connect(client_address(self.numbers), TCP);
        assert_eq!(net.peer_write(client, &name), NAME_BYTES);
        let c = Side { sent: name.to_vec(), ..Side::default() };
        self.pairs.push(Pair { client, server: None, c, s: Side::default() });
    }

    /// The server learns from the first bytes whose connection it has.
    fn accept(&mut self) {
        let mut net = lock(&self.scene.world.net);
        while let Some(conn) = net.take_arrived(0) {
            self.unnamed.push((conn, Vec::new()));
        }
        let pairs = &mut self.pairs;
        self.unnamed.retain_mut(|(conn, said)| {
            if let PeerRead::Bytes(bytes) = net.peer_read(*conn, NAME_BYTES - said.len()) {
                said.extend(bytes);
            }
            let Ok(name) = <[u8; NAME_BYTES]>::try_from(&said[..]) else { return true };
            let pair = &mut pairs[u32::from_le_bytes(name) as usize];
            assert!(pair.server.is_none(), "one connection each");
            (pair.server, pair.s.got) = (Some(*conn), said.clone());
            false
        });
    }

    /// Each side does something, or not.
    fn act(&mut self, rng: &mut Rng, ends: u32) {
        let Self { scene, pairs, .. } = self;
        for Pair { client, server, c, s } in pairs {
            let ends_now = |rng: &mut Rng| rng.chance(ends);
            for (side, conn) in [(c, Some(*client)), (s, *server)] {
                let Some(conn) = conn else { continue };
                match rng.below(8) {
                    0..=2 => side.write(scene, conn, rng, 4000),
                    3..=4 => side.read(scene, conn, 1 + rng.below(3000) as usize),
                    5 if ends_now(rng) => side.finish(scene, conn),
                    6 if ends_now(rng) && ends_now(rng) => side.leave(scene, conn),
                    _ => {}
                }
            }
        }
    }

    /// Everybody sends nothing more, and reads what comes.
    fn finish(&mut self) {
        for _ in 0..3000 {
            let Self { scene, pairs, .. } = self;
            for Pair { client, server, c, s } in pairs {
                for (side, conn) in [(c, Some(*client)), (s, *server)] {
                    let Some(conn) = conn else { continue };
                    side.finish(scene, conn);
                    side.read(scene, conn, usize::MAX);
                }
            }
            self.run(1);
        }
    }
}

/// Returns how many pairs ended whole, and how many by a reset.
fn storm(seed: u64, faults: Faults, ends: u32) -> (usize, usize) {
    let mut rng = Rng::new(seed);
    let mut script = relay(1 + seed as usize % 3);
    script.setup.seed = seed;
    let mut stage = Stage::new(script);
    stage.scene.faults(faults);
    for _ in 0..60 {
        if rng.chance(250) {
            stage.connect();
        }
        stage.act(&mut rng, ends);
        stage.run(1 + rng.below(8) as usize);
    }
    stage.finish();
    let (mut whole, mut reset) = (0, 0);
    for (index, Pair { c, s, server, .. }) in stage.pairs.iter().enumerate() {
        let what = || format!("seed {seed}, pair {index}: {:?} {:?}", c.end, s.end);
        assert!(c.sent.starts_with(&s.got) && s.sent.starts_with(&c.got), "{}", what());
        if c.left || s.left {
            reset += 1;
            // The other side learns of it, and not as if all had come.
            for (side, other) in [(c, s), (s, c)] {
                let knows = server.is_some() && side.left && !other.left;
                if knows && !side.finished {
                    assert_eq!(other.end, Some(PeerRead::Broken), "{}", what());
                }
            }
            continue;
        }
        assert_eq!(
            (&c.end, &s.end),
            (&Some(PeerRead::Closed), &Some(PeerRead::Closed)),
            "{}",
            what()
        );
        assert!(c.sent == s.got && s.sent == c.got, "{}", what());
        whole += 1;
    }
    let world = &mut stage.scene.world;
    assert_eq!(world.in_flight(0), 0, "seed {seed}");
    let counted = world.metrics.service(0);
    assert_eq!(counted.connections_accepted, counted.connections_closed, "seed {seed}");
    world.check().unwrap();
    (whole, reset)
}

const ROUGH: Faults = Faults {
    lose: 0,
    duplicate: 0,
    corrupt: 0,
    truncate: 0,
    refuse_send: 0,
    full_send: 0,
    short_read: 200,
    short_write: 200,
    spurious: 20,
    late_event: 200,
    exhausted: 0,
    reset_destroys: 500,
    delay_ns: (1000, MS / 2),
    socket_datagrams: usize::MAX,
    pipe_bytes: 2000,
    link: sim::net::LinkFaults {
        short: 0,
        stall: 0,
        cut: 0,
        damage: 0,
        silence: 0,
        delay_ns: (0, 0),
        pipe_bytes: 1 << 20,
        heartbeat_ns: 200_000_000,
    },
};

#[test]
fn bytes_arrive_as_they_were_sent() {
    let storms = (0..24).map(|seed| storm(seed, Faults::default(), 0));
    let rough = (100..140).map(|seed| storm(seed, ROUGH, 0));
    let (mut whole, mut reset) = (0, 0);
    for (of_whole, of_reset) in storms.chain(rough) {
        (whole, reset) = (whole + of_whole, reset + of_reset);
    }
    assert!(whole > 500 && reset == 0, "{whole} {reset}");
}

#[test]
fn ends_and_resets_reach_the_other_side() {
    let storms: Vec<_> = (0..60).map(|seed| storm(seed, ROUGH, 150)).collect();
    let sum = |of: fn(&(usize, usize)) -> usize| storms.iter().map(of).sum::<usize>();
    assert!(sum(|of| of.0) > 100 && sum(|of| of.1) > 100, "{storms:?}");
}

/// A client and the server's end of its connection.
fn pair(scene: &mut Scene) -> (Caller, ConnId) {
    let caller = scene.connect();
    scene.run(20);
    let server = lock(&scene.world.net).take_arrived(0).expect("the server is asked at once");
    (caller, server)
}

fn hear(scene: &Scene, conn: ConnId) -> (Vec<u8>, PeerRead) {
    let mut heard = Vec::new();
    loop {
        match lock(&scene.world.net).peer_read(conn, usize::MAX) {
            PeerRead::Bytes(bytes) => heard.extend(bytes),
            end => return (heard, end),
        }
    }
}

fn say(scene: &Scene, conn: ConnId, bytes: &[u8]) -> usize {
    lock(&scene.world.net).peer_write(conn, bytes)
}

#[test]
fn the_server_may_speak_first_and_each_side_may_end_alone() {
    let mut scene = play(relay(1));
    let (caller, server) = pair(&mut scene);
    say(&scene, server, b"hello");
    scene.run(5);
    assert_eq!(hear(&scene, caller.conn), (b"hello".to_vec(), PeerRead::Empty));
    say(&scene, caller.conn, b"ask");
    lock(&scene.world.net).peer_shutdown(caller.conn);
    scene.run(5);
    assert_eq!(hear(&scene, server), (b"ask".to_vec(), PeerRead::Closed));
    for _ in 0..3 {
        say(&scene, server, b"answer");
        scene.run(5);
        assert_eq!(hear(&scene, caller.conn), (b"answer".to_vec(), PeerRead::Empty));
    }
    lock(&scene.world.net).peer_shutdown(server);
    scene.run(5);
    assert_eq!(hear(&scene, caller.conn), (Vec::new(), PeerRead::Closed));
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.connections_closed, counted.consumed, counted.replied), (1, 1, 4));
    assert_eq!(lock(&scene.world.net).closed(caller.conn), Some(Close::Graceful));
    scene.world.check_quiet().unwrap();
}

/// Neither a client that does not read nor a server that does not fills the memory of the engine.
#[test]
fn a_slow_receiver_holds_its_sender() {
    const PIPE: usize = 10_000;
    for to_server in [true, false] {
        let mut scene = play(relay(1));
        scene.faults(Faults { pipe_bytes: PIPE, ..Faults::default() });
        let (caller, server) = pair(&mut scene);
        let (from, to) = if to_server { (caller.conn, server) } else { (server, caller.conn) };
        let mut sent = Vec::new();
        for round in 0..400_u32 {
            let bytes = [round as u8; 1000];
            let count = say(&scene, from, &bytes);
            sent.extend_from_slice(&bytes[..count]);
            scene.run(2);
        }
        // Two pipes, and one chunk of what the first one holds.
        assert!((2 * PIPE..=3 * PIPE).contains(&sent.len()), "{} were taken", sent.len());
        assert_eq!(scene.world.in_flight(0), 1);
        if !to_server {
            // What waits for a client does not hold what it sends.
            say(&scene, caller.conn, b"meanwhile");
            scene.run(5);
            assert_eq!(hear(&scene, server).0, b"meanwhile");
        }
        let mut got = Vec::new();
        for _ in 0..100 {
            got.extend(hear(&scene, to).0);
            scene.run(3);
        }
        assert!(got == sent && scene.world.in_flight(0) == 0, "{} of {}", got.len(), sent.len());
        scene.world.check().unwrap();
    }
}

#[test]
fn a_client_that_does_not_read_is_closed_and_a_silent_connection_too() {
    let mut script = relay(1);
    script.limits().slow_client_ms = 20;
    let mut scene = play(script);
    scene.faults(Faults { pipe_bytes: 1000, ..Faults::default() });
    let (_, server) = pair(&mut scene);
    for _ in 0..8 {
        say(&scene, server, &[7; 1000]);
        scene.run(5);
    }
    scene.wait_ms(200);
    assert_eq!(scene.dropped(DropReason::SlowClient), 1);
    assert_eq!(hear(&scene, server).1, PeerRead::Broken);
    scene.world.check_quiet().unwrap();

    let mut script = relay(1);
    script.limits().idle_ms = 20;
    let mut scene = play(script);
    let (caller, server) = pair(&mut scene);
    for _ in 0..10 {
        say(&scene, server, b"tick");
        scene.wait_ms(10);
    }
    assert_eq!(scene.dropped(DropReason::IdleTimeout), 0);
    scene.wait_ms(200);
    assert_eq!(scene.dropped(DropReason::IdleTimeout), 1);
    let ends = (hear(&scene, caller.conn).1, hear(&scene, server).1);
    assert_eq!(ends, (PeerRead::Broken, PeerRead::Broken), "it was not at its end");
    scene.world.check_quiet().unwrap();
}

#[test]
fn a_server_that_is_not_there_ends_the_client() {
    let mut scene = play(relay(1));
    for reachability in [Reachability::Refused { after_ns: 100_000 }, Reachability::Unreachable] {
        lock(&scene.world.net).set_reachability(0, reachability);
        let before = scene.dropped(DropReason::UpstreamRefused);
        let caller = scene.connect();
        scene.say(caller, b"bytes");
        scene.wait_ms(2);
        assert_eq!(hear(&scene, caller.conn).1, PeerRead::Broken);
        // The connection, and if it was read the chunk.
        let refused = scene.dropped(DropReason::UpstreamRefused) - before;
        assert!((1..=2).contains(&refused), "{refused}");
        // The next attempt waits.
        scene.wait_ms(100);
    }
    lock(&scene.world.net).set_reachability(0, Reachability::Open { after_ns: 0 });
    scene.wait_ms(2000);
    let (caller, server) = pair(&mut scene);
    say(&scene, server, b"here");
    scene.run(5);
    assert_eq!(hear(&scene, caller.conn).0, b"here");
    scene.world.check().unwrap();
}

/// Killed while bytes wait for it and come from it.
#[test]
fn a_server_that_dies_resets_its_clients() {
    let mut scene = play(relay(2));
    scene.faults(Faults { pipe_bytes: 1000, ..Faults::default() });
    let pairs: Vec<_> = (0..5).map(|_| pair(&mut scene)).collect();
    for (caller, server) in &pairs {
        for _ in 0..5 {
            say(&scene, caller.conn, &[1; 1000]);
            say(&scene, *server, &[2; 1000]);
            scene.run(3);
        }
    }
    assert!(scene.world.in_flight(0) >= 10);
    for (_, server) in &pairs {
        lock(&scene.world.net).peer_close(*server, Close::Reset);
    }
    for (caller, _) in &pairs {
        // What came before the reset is there for a client that reads.
        let mut heard = (Vec::new(), PeerRead::Empty);
        for _ in 0..50 {
            scene.wait_ms(1);
            let (bytes, end) = hear(&scene, caller.conn);
            heard.0.extend(bytes);
            heard.1 = end;
            if heard.1 != PeerRead::Empty {
                break;
            }
        }
        assert_eq!(heard.1, PeerRead::Broken);
        assert!(heard.0.len() >= 1000 && heard.0.iter().all(|byte| *byte == 2));
    }
    assert_eq!(scene.world.in_flight(0), 0);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.connections_accepted, counted.connections_closed), (5, 5));
    scene.world.check_quiet().unwrap();
}

/// What a chain saw, by direction.
type Seen = Arc<Mutex<[Vec<u8>; 2]>>;

/// Keeps what it sees and decides by the first byte.
struct Watcher(Seen);

impl Function for Watcher {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        assert!(messages.are_chunks());
        for index in 0..messages.len() {
            let bytes = messages.bytes(index).to_vec();
            self.0.lock().unwrap()[direction as usize].extend_from_slice(&bytes);
            match bytes[0] {
                b'd' => messages.drop(index, DropReason::FunctionDrop),
                b'w' => messages.rewrite(index, &bytes.to_ascii_uppercase()),
                b'r' => messages.reply(index, b"by the function"),
                b's' => messages.steer(index, 0),
                _ => {}
            }
        }
        Ok(())
    }
}

fn watch(scene: &mut Scene) -> Seen {
    let seen = Seen::default();
    let watcher = Box::new(Watcher(Arc::clone(&seen)));
    scene.world.set_functions(0, 0, vec![(watcher, OnFailure::Closed)]);
    scene.run(1);
    seen
}

#[test]
fn functions_see_every_byte_and_decide_about_chunks() {
    let mut scene = play(relay(1));
    let seen = watch(&mut scene);
    let (caller, server) = pair(&mut scene);
    for (from, to, bytes, becomes) in [
        (caller.conn, server, "pass", "pass"),
        (server, caller.conn, "pass back", "pass back"),
        (caller.conn, server, "write", "WRITE"),
        (server, caller.conn, "write back", "WRITE BACK"),
        (caller.conn, caller.conn, "reply", "by the function"),
    ] {
        say(&scene, from, bytes.as_bytes());
        scene.run(5);
        assert_eq!(hear(&scene, to).0, becomes.as_bytes());
    }
    assert_eq!(
        *seen.lock().unwrap(),
        [b"passwritereply".to_vec(), b"pass backwrite back".to_vec()]
    );
    for (bytes, reason) in [("drop", DropReason::FunctionDrop), ("steer", DropReason::MqueueDead)] {
        for to_server in [true, false] {
            if !to_server && bytes == "steer" {
                // A reply passes.
                continue;
            }
            let (caller, server) = pair(&mut scene);
            let before = scene.dropped(reason);
            say(&scene, if to_server { caller.conn } else { server }, bytes.as_bytes());
            scene.run(10);
            let ends = (hear(&scene, caller.conn), hear(&scene, server));
            assert_eq!(ends, ((vec![], PeerRead::Broken), (vec![], PeerRead::Broken)), "{bytes}");
            assert_eq!(scene.dropped(reason), before + 1);
        }
    }
    scene.world.check().unwrap();
}

/// Replies to each chunk with its bytes.
struct Echo;

impl Function for Echo {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        for index in 0..messages.len() {
            if direction == Direction::Requests {
                let bytes = messages.bytes(index).to_vec();
                messages.reply(index, &bytes);
            }
        }
        Ok(())
    }
}

fn echo(faults: Faults) -> (Scene, Caller, ConnId) {
    let mut scene = play(relay(1));
    scene.faults(faults);
    scene.world.set_functions(0, 0, vec![(Box::new(Echo), OnFailure::Closed)]);
    scene.run(1);
    let caller = scene.connect();
    let server = (0..200).find_map(|_| {
        scene.run(1);
        lock(&scene.world.net).take_arrived(0)
    });
    (scene, caller, server.expect("the server is asked at once"))
}

/// A client that does not read replies of a function is not read, and gets all of them when it reads.
#[test]
fn replies_of_a_function_hold_their_client() {
    const PIPE: usize = 10_000;
    let (mut scene, caller, server) = echo(Faults { pipe_bytes: PIPE, ..Faults::default() });
    for round in 0..3 {
        let mut sent = Vec::new();
        for number in 0..400_u32 {
            let bytes = [number as u8; 1000];
            let count = say(&scene, caller.conn, &bytes);
            sent.extend_from_slice(&bytes[..count]);
            scene.run(2);
        }
        // Two pipes, and what waits for the client: a reply to one chunk, which one pipe held.
        assert!((2 * PIPE..=3 * PIPE).contains(&sent.len()), "{} were taken", sent.len());
        assert_eq!(scene.world.in_flight(0), 1);
        // The server's bytes come behind, and only one chunk of them.
        let more = vec![b'm'; PIPE];
        assert_eq!(say(&scene, server, &more), PIPE);
        scene.run(20);
        let mut got = Vec::new();
        for _ in 0..100 {
            got.extend(hear(&scene, caller.conn).0);
            scene.run(3);
        }
        let whole = sent.len() + PIPE;
        assert!(got.len() == whole && scene.world.in_flight(0) == 0, "{round}: {}", got.len());
        // Chunks of the two may come in turns.
        let marks = got.iter().filter(|byte| **byte == b'm').count();
        let of_sent = sent.iter().filter(|byte| **byte == b'm').count();
        assert_eq!(marks, PIPE + of_sent);
        got.retain(|byte| *byte != b'm');
        sent.retain(|byte| *byte != b'm');
        assert!(got == sent, "round {round}");
    }
    scene.world.check().unwrap();
}

/// Whatever reads and writes are short and events late, the client is read again.
#[test]
fn a_client_held_by_replies_is_read_again() {
    for seed in 0..20 {
        let (mut scene, caller, _) = echo(ROUGH);
        let mut rng = Rng::new(seed);
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for number in 0..3000_u32 {
            let bytes = vec![number as u8; 1 + rng.below(900) as usize];
            let count = say(&scene, caller.conn, &bytes);
            sent.extend_from_slice(&bytes[..count]);
            if rng.chance(200) {
                got.extend(hear(&scene, caller.conn).0);
            }
            scene.run(rng.below(4) as usize);
            let limit = 3 * ROUGH.pipe_bytes;
            assert!(sent.len() - got.len() <= limit, "seed {seed}: {}", sent.len() - got.len());
        }
        lock(&scene.world.net).peer_shutdown(caller.conn);
        for _ in 0..2000 {
            got.extend(hear(&scene, caller.conn).0);
            scene.run(1);
        }
        assert!(sent.len() > 50 * ROUGH.pipe_bytes, "seed {seed}: {}", sent.len());
        assert!(got == sent, "seed {seed}: {} of {}", got.len(), sent.len());
        scene.world.check().unwrap();
    }
}

/// Connections go on through a change of the service that keeps them, and end with one that does not.
#[test]
fn a_reload_keeps_connections_and_a_drain_waits_for_them() {
    let mut scene = play(relay(2));
    scene.faults(Faults { pipe_bytes: 1000, ..Faults::default() });
    let pairs: Vec<_> = (0..4).map(|_| pair(&mut scene)).collect();
    let spec = scene.world.topology().services[0].clone();
    let mut sent = Vec::new();
    for round in 0..3_u8 {
        for (caller, server) in &pairs {
            // Bytes wait for the client, and bytes wait to be read.
            say(&scene, *server, &[round; 600]);
            say(&scene, caller.conn, &[round; 300]);
            scene.run(1);
            say(&scene, *server, &[round; 400]);
        }
        sent.extend_from_slice(&[round; 1000]);
        let mut changed = spec.clone();
        changed.request_timeout_ms += u64::from(round) + 1;
        scene.world.put(changed, 0, Keeps::all(true), 50 * MS);
        for _ in 0..2000 {
            (0..2).for_each(|worker| scene.world.follow(worker));
            scene.run(1);
            if scene.world.is_changed() {
                break;
            }
        }
        assert!(scene.world.is_changed());
        scene.run(20);
        for (caller, server) in &pairs {
            let heard = (hear(&scene, caller.conn).0, hear(&scene, *server).0);
            scene.run(20);
            let rest = hear(&scene, caller.conn).0;
            let back = [heard.0, rest].concat();
            assert_eq!((back, heard.1), (vec![round; 1000], vec![round; 300]), "round {round}");
        }
    }
    assert_eq!(scene.dropped(DropReason::DrainTimeout), 0);
    // The engine ends: one connection ends by itself, the others at the end of the drain time.
    scene.world.begin_drain();
    scene.wait_ms(20);
    assert!(!scene.world.all_settled());
    let (caller, server) = pairs[0];
    say(&scene, caller.conn, b"last");
    scene.wait_ms(2);
    assert_eq!(hear(&scene, server).0, b"last");
    for conn in [caller.conn, server] {
        lock(&scene.world.net).peer_shutdown(conn);
    }
    scene.wait_ms(5);
    assert_eq!(hear(&scene, caller.conn).1, PeerRead::Closed);
    assert!(!scene.world.all_settled());
    scene.world.finish();
    scene.world.check_finished().unwrap();
    let (caller, server) = pairs[1];
    scene.world.advance(MS);
    let ends = (hear(&scene, caller.conn).1, hear(&scene, server).1);
    assert_eq!(ends, (PeerRead::Broken, PeerRead::Broken));
}

/// The values of a function's registers, by its place in the order of [`Scene::world`]'s functions.
fn registers(scene: &mut Scene, id: u64) -> Vec<u64> {
    let read = scene.world.ask_chain(0, (0, None), ChainRequest::Command(id, Command::Read));
    scene.run(1);
    match read.try_recv() {
        Ok(ChainReply::Command(Ok(reading))) => reading.values,
        _ => panic!("no values"),
    }
}

#[test]
fn sketches_count_items_that_chunks_cut() {
    const WORDS: u64 = 3000;
    let mut scene = play(relay(1));
    let mut sketch = HyperLogLogFunction::default();
    let mut counts = CountMinFunction::default();
    let set = |function: &mut dyn Function, name: &str, value| {
        let at = function.registers().iter().position(|of| &*of.name == name).unwrap();
        function.write(at, value).unwrap();
    };
    set(&mut sketch, "item_bytes", 8);
    set(&mut counts, "length", 8);
    let chain: Vec<(Box<dyn Function>, _)> =
        vec![(Box::new(sketch), OnFailure::Closed), (Box::new(counts), OnFailure::Closed)];
    scene.world.set_functions(0, 0, chain);
    scene.run(1);
    scene.faults(ROUGH);
    // Connections that send the same words, cut in different places.
    let stream: Vec<u8> = (0..WORDS).flat_map(|word| (word % 1500).to_be_bytes()).collect();
    let pairs: Vec<_> = (0..3).map(|_| scene.connect()).collect();
    let (mut sent, mut servers) = ([0; 3], Vec::new());
    let mut rng = Rng::new(1);
    for _ in 0..20_000 {
        for (at, caller) in pairs.iter().enumerate() {
            let len = (1 + rng.below(777) as usize).min(stream.len() - sent[at]);
            sent[at] += say(&scene, caller.conn, &stream[sent[at]..sent[at] + len]);
        }
        scene.run(3);
        while let Some(server) = lock(&scene.world.net).take_arrived(0) {
            servers.push(server);
        }
        servers.iter().for_each(|server| _ = hear(&scene, *server));
        if sent.iter().all(|sent| *sent == stream.len()) && scene.world.in_flight(0) == 0 {
            break;
        }
    }
    scene.run(200);
    let values = registers(&mut scene, 0);
    assert_eq!((values[1], values[2]), (3 * WORDS, 0), "items, and none is short");
    assert!(values[0].abs_diff(1500) < 60, "the estimate is {}", values[0]);
    let values = registers(&mut scene, 1);
    assert_eq!((values[0], values[1]), (3 * WORDS, 0));
    let counts = (0..8).map(|shown| values[9 + 2 * shown]);
    assert!(
        counts.clone().all(|count| (6..20).contains(&count)),
        "{:?}",
        counts.collect::<Vec<_>>()
    );
}
