//! Sockets of blocks: connections that end in every way, blocks that break every rule, and the books of bytes at every step.

use crate::scene::{MS, Scene, Script, script};
use engine::topology::{SocketSpec, Tenant};
use sim::net::Faults;
use sim::rng::Rng;
use sim::shared::lock;
use sim::socket_block::{AFTERTHOUGHT_BYTES, SocketBehaviour};
use sim::socket_peer::{EchoServer, Ending, Found, SocketClient};
use sim::world::change::Keeps;
use sockets::End;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::Close;

/// The listener of blocks.
const PORT: u16 = 2;

/// Services whose blocks echo, or with `relay` pass bytes on to a server that does.
fn sockets(seed: u64, relay: bool) -> Script {
    let mut script = script(Framing::LengthU16);
    script.setup.seed = seed;
    script.setup.topology.engine.workers = 1 + seed as usize % 2;
    let remote = seed % 3 == 1;
    let delay_ns = if remote { (0, 30_000) } else { (0, 0) };
    *script.behaviour() = sim::behaviour::Behaviour { remote, delay_ns, ..Default::default() };
    let service = script.service();
    service.mqueues = 1 + seed as u32 % 3;
    service.sockets_per_block = if relay { 4 } else { 3 };
    service.socket_bytes = 4096;
    service.sockets.push(SocketSpec::listen(([127, 0, 0, 1], 9100)));
    if relay {
        service.sockets.push(SocketSpec::connect(([203, 0, 113, 7], 7)));
    }
    script
}

/// A scene with peers.
struct Play {
    scene: Scene,
    clients: Vec<SocketClient>,
    server: EchoServer,
    rng: Rng,
}

impl Play {
    fn new(script: Script, seed: u64) -> Self {
        let server = EchoServer::new(0);
        Self { scene: script.play(), clients: Vec::new(), server, rng: Rng::new(!seed) }
    }

    fn connect(&mut self, total: u64, ending: Ending) {
        self.connect_to(PORT, total, ending);
    }

    fn connect_to(&mut self, port: u16, total: u64, ending: Ending) {
        let workers = self.scene.world.workers.len() as u64;
        let peer = self.scene.client_of(self.rng.below(workers) as usize, port);
        let net = &mut lock(&self.scene.world.net);
        let client = SocketClient::connect(net, (peer, port), total, ending);
        // The block ends one that is idle.
        let is_idle = matches!(ending, Ending::Idle(_));
        self.clients.push(if is_idle { client.of_hasty_block() } else { client });
    }

    fn run(&mut self, rounds: usize) {
        for _ in 0..rounds {
            let net = self.scene.world.net.clone();
            for client in &mut self.clients {
                client.step(&mut lock(&net), &mut self.rng);
            }
            if self.scene.world.topology().services[0].sockets.len() > 1 {
                self.server.step(&mut lock(&net), &mut self.rng);
            }
            self.scene.run(1);
        }
    }

    /// Runs until every client has ended.
    fn run_to_the_end(&mut self) {
        for _ in 0..400 {
            if self.clients.iter().all(|client| client.found().is_some()) {
                break;
            }
            self.run(50);
        }
        let stuck = self.clients.iter().filter(|client| client.found().is_none()).count();
        assert_eq!(stuck, 0, "clients that wait without an end");
        // What is left of connections that were reset has limits of time.
        self.scene.wait_ms(5);
    }

    fn found(&self, what: Found) -> usize {
        self.clients.iter().filter(|client| client.found() == Some(what)).count()
    }

    /// Every connection has ended, no slot is leased, and no byte is left.
    fn check_all_over(&self) {
        let world = &self.scene.world;
        let counted = world.metrics.service(0);
        assert_eq!(counted.sockets_opened, counted.sockets_closed);
        let leases: usize = world.models.iter().map(|model| lock(model).leases()).sum();
        assert_eq!(leases, 0, "blocks have connections");
        for (books, in_rings) in world.socket_bytes(0) {
            assert_eq!((books.outstanding(), in_rings), (0, 0));
        }
    }
}

fn seeds() -> std::ops::Range<u64> {
    0..12
}

#[test]
fn every_byte_comes_back() {
    for (seed, relay) in seeds().flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut play = Play::new(sockets(seed, relay), seed);
        // More than there are slots: some wait for others to end.
        for _ in 0..15 {
            let total = play.rng.between(1, 40_000);
            play.connect(total, Ending::Orderly);
            play.run(3);
        }
        play.run_to_the_end();
        assert_eq!(play.found(Found::All), 15, "seed {seed}, relay: {relay}");
        play.check_all_over();
        let sent: u64 = play.clients.iter().map(|client| client.received()).sum();
        let [(received, _), (_, _)] = play.scene.world.socket_bytes(0);
        let ways = if relay { 2 } else { 1 };
        assert_eq!((received.taken, received.dropped), (ways * sent, 0));
        assert_eq!(play.scene.world.metrics.service(0).sockets_opened, 15 * ways);
        assert_eq!(play.scene.world.metrics.service(0).socket_bad_commands, 0);
    }
}

/// Everything goes wrong for a while, then nothing does: clients that end in order get all bytes, and nothing is left.
#[test]
fn connections_end_in_every_way() {
    let mut found = [0; 3];
    let mut ends = [0; End::COUNT];
    for (seed, relay) in seeds().flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut script = sockets(seed, relay);
        script.limits().slow_client_ms = 3;
        script.behaviour().sockets =
            SocketBehaviour { idle: 200, reset: 5, ..SocketBehaviour::default() };
        let mut play = Play::new(script, seed);
        play.scene.faults(Faults {
            short_read: 200,
            short_write: 200,
            spurious: 50,
            late_event: 200,
            exhausted: 20,
            reset_destroys: 500,
            delay_ns: (0, MS / 5),
            pipe_bytes: 3000,
            ..Faults::default()
        });
        for _ in 0..40 {
            let total = play.rng.between(1, 30_000);
            let after = play.rng.below(total);
            let ending = match play.rng.below(6) {
                0 => Ending::Close(after),
                1 => Ending::Reset(after),
                2 => Ending::Deaf(after),
                _ => Ending::Orderly,
            };
            play.connect(total, ending);
            let rounds = play.rng.below(40);
            play.run(rounds as usize);
        }
        play.scene.faults(Faults::default());
        play.run(2000);
        play.clients.iter_mut().for_each(SocketClient::recover);
        play.run_to_the_end();
        play.check_all_over();
        for (sum, what) in found.iter_mut().zip([Found::All, Found::Reset, Found::Left]) {
            *sum += play.found(what);
        }
        for (sum, count) in ends.iter_mut().zip(play.scene.world.metrics.service(0).socket_ends) {
            *sum += count;
        }
    }
    assert!(found.iter().all(|count| *count > 50), "{found:?}");
    use End::{Closed, NoDescriptor, ResetByBlock, ResetByPeer, SlowPeer};
    for end in [Closed, ResetByBlock, ResetByPeer, SlowPeer, NoDescriptor] {
        assert!(ends[end as usize] > 0, "{}: {ends:?}", end.name());
    }
}

/// A connection on which no byte comes or goes is reset after its time. One with bytes lives longer than that.
#[test]
fn an_idle_connection_ends_after_its_time() {
    for (seed, relay) in seeds().flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut script = sockets(seed, relay);
        script.service().sockets.iter_mut().for_each(|socket| socket.idle_ms = 3);
        let mut play = Play::new(script, seed);
        play.scene.faults(Faults { pipe_bytes: 3000, ..Faults::default() });
        // 2000 bytes in a round at most: more than 5 ms.
        play.connect(1_000_000, Ending::Orderly);
        play.connect(100_000, Ending::Deaf(0));
        play.run(1500);
        play.clients[1].recover();
        play.run_to_the_end();
        let found: Vec<_> = play.clients.iter().map(|client| client.found()).collect();
        assert_eq!(found, [Some(Found::All), Some(Found::Reset)], "seed {seed}, relay: {relay}");
        play.check_all_over();
        let ends = play.scene.world.metrics.service(0).socket_ends;
        let by = |end: sockets::End| ends[end as usize];
        let ways = if relay { 2 } else { 1 };
        assert!((1..=ways).contains(&by(End::Idle)), "{ends:?}");
        // The block resets the other connection of a pair, if that was not idle as well.
        let both = by(End::Idle) + by(End::ResetByBlock);
        assert_eq!((both, by(End::Closed)), (ways, ways), "{ends:?}");
    }
}

/// A block that closes early answers a peer that still sends: its input is dropped, no reset destroys the answer, and the peer
/// reads the end. One that never stops is reset after its time.
#[test]
fn a_peer_that_still_sends_reads_the_answer() {
    let (mut dropped, mut late) = (0, 0);
    for (seed, relay) in seeds().flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut script = sockets(seed, relay);
        script.limits().slow_client_ms = 10;
        script.behaviour().sockets = SocketBehaviour { close: 100, ..Default::default() };
        let mut play = Play::new(script, seed);
        let delay_ns = (0, MS / 10);
        let faults =
            Faults { reset_destroys: 1000, pipe_bytes: 3000, delay_ns, ..Faults::default() };
        play.scene.faults(faults);
        for client in 0..11 {
            let (total, ending) =
                if client < 10 { (100_000, Ending::Orderly) } else { (1 << 40, Ending::Deaf(0)) };
            play.connect(total, ending);
            let client = play.clients.pop().expect("it has just connected");
            play.clients.push(client.of_hasty_block());
            play.run(20);
        }
        play.run(4000);
        // A relay resets a connection for whose partner it has no slot.
        let (all, reset) = (play.found(Found::All), play.found(Found::Reset));
        assert_eq!(all + reset, 10, "seed {seed}, relay: {relay}");
        assert!(reset == 0 || relay && reset < 5, "seed {seed}, relay: {relay}: {reset}");
        play.clients[10].recover();
        play.run_to_the_end();
        play.check_all_over();
        let counted = play.scene.world.metrics.service(0);
        dropped += counted.socket_unread_bytes;
        late += counted.socket_ends[End::UnreadInput as usize];
    }
    assert!(dropped > 100_000 && late > 10, "{dropped} bytes were dropped, {late} were too late");
}

/// A block writes behind its own end, and closes the connection: they go nowhere, and the worker does not wait for that.
#[test]
fn bytes_behind_the_end_of_a_connection_keep_no_worker_awake() {
    for seed in seeds() {
        let mut script = sockets(seed, false);
        script.behaviour().sockets = SocketBehaviour { afterthought: 1000, ..Default::default() };
        let mut play = Play::new(script, seed);
        (0..3).for_each(|_| play.connect(10_000, Ending::Orderly));
        play.run_to_the_end();
        let workers = play.scene.world.workers.len();
        let mut asleep = 0;
        for _ in 0..10 {
            play.scene.wait_ms(1);
            asleep += (0..workers).filter(|at| !play.scene.world.is_awake(*at)).count();
        }
        assert_eq!(asleep, 10 * workers, "seed {seed}");
        play.check_all_over();
        assert_eq!(play.found(Found::All), 3, "seed {seed}");
        let ends = play.scene.world.metrics.service(0).socket_ends;
        assert_eq!(ends[End::Closed as usize], 3, "seed {seed}: {ends:?}");
        let [_, (sent, _)] = play.scene.world.socket_bytes(0);
        assert_eq!(sent.dropped, 3 * AFTERTHOUGHT_BYTES as u64, "seed {seed}");
    }
}

/// A connection that waits for its tenant's turn is neither idle nor slow: its limits of time are for its peer.
#[test]
fn a_connection_that_waits_for_its_tenant_is_not_ended() {
    for (seed, ending) in
        seeds().flat_map(|seed| [(seed, Ending::Idle(1)), (seed, Ending::Orderly)])
    {
        let mut script = sockets(seed, false);
        script.limits().slow_client_ms = 3;
        script.service().tenant = "slow".into();
        script.service().sockets[0].idle_ms = 3;
        let tenant = Tenant { burst_ms: 1, ..Tenant::new("slow") };
        script.setup.topology.tenants = vec![tenant.clone()];
        let mut play = Play::new(script, seed);
        // What it reads brings the tenant over its rate for 100 ms.
        let slow = Tenant { messages_per_s: 10, ..tenant };
        play.scene.world.tenants().set(&[slow], |_| true);
        // One that stays never sends the rest.
        play.connect(if ending == Ending::Orderly { 1 } else { 1000 }, ending);
        for _ in 0..600 {
            play.run(1);
            play.scene.wait_ms(1);
        }
        assert_eq!(play.clients[0].received(), 1, "seed {seed}, {ending:?}");
        let ends = play.scene.world.metrics.service(0).socket_ends;
        let last = if ending == Ending::Orderly { End::Closed } else { End::Idle };
        assert_eq!(ends[last as usize], 1, "seed {seed}, {ending:?}: {ends:?}");
    }
}

/// One of two accelerators restarts: only its blocks let their idle connections go, and the restart does not wait for the others.
#[test]
fn a_pause_of_one_accelerator_leaves_the_connections_of_others_alone() {
    for seed in seeds() {
        let mut script = sockets(seed, false);
        script.setup.topology.engine.workers = 1;
        let second = script.setup.topology.accelerators[0].clone();
        script.setup.topology.accelerators.push(second);
        let service = script.service();
        service.accelerators = vec![0, 1];
        service.mqueues = 1;
        service.share_out();
        let mut play = Play::new(script, seed);
        (0..2).for_each(|_| play.connect(1000, Ending::Idle(100)));
        let has_got = |play: &Play, bytes: u64| {
            play.clients.iter().filter(|client| client.received() == bytes).count()
        };
        play.run(400);
        assert_eq!(has_got(&play, 100), 2, "seed {seed}");
        let barrier = play.scene.world.hold(0, 0, 600_000 * MS);
        for _ in 0..2500 {
            play.run(1);
            play.scene.wait_ms(1);
        }
        assert!(barrier.is_complete(1), "seed {seed}: it waits for connections of the other one");
        let gone = play.clients.iter().position(|client| client.found() == Some(Found::All));
        let gone = gone.expect("the idle connection of the accelerator that restarts has ended");
        let other = &mut play.clients[1 - gone];
        assert_eq!(other.found(), None, "seed {seed}");
        let net = play.scene.world.net.clone();
        other.send_up_to(300, &mut lock(&net), &mut play.rng);
        play.run(400);
        assert_eq!(has_got(&play, 300), 1, "seed {seed}: it goes on");
    }
}

/// Attempts to connect end in every way, at any time: each is completed once, and none is left.
#[test]
fn peers_that_cannot_be_reached_leave_nothing() {
    let mut ends = [0; End::COUNT];
    let mut all = 0;
    for seed in 0..24 {
        let mut script = sockets(seed, true);
        script.service().request_timeout_ms = 3;
        if seed % 2 == 0 {
            script.behaviour().sockets.cancel = 50;
        }
        let mut play = Play::new(script, seed);
        play.server.doors = 20;
        play.scene.faults(Faults { late_event: 200, exhausted: 20, ..Faults::default() });
        for _ in 0..40 {
            play.connect(10_000, Ending::Orderly);
            play.run(40);
        }
        play.run_to_the_end();
        play.check_all_over();
        all += play.found(Found::All);
        for (sum, count) in ends.iter_mut().zip(play.scene.world.metrics.service(0).socket_ends) {
            *sum += count;
        }
        // All ends well once it does.
        play.scene.faults(Faults::default());
        play.server.recover(&mut lock(&play.scene.world.net));
        play.clients.clear();
        if seed % 2 == 1 {
            (0..2).for_each(|_| play.connect(10_000, Ending::Orderly));
            play.run_to_the_end();
            assert_eq!(play.found(Found::All), 2, "seed {seed}");
        }
    }
    use End::{Closed, ConnectTimeout, NoDescriptor, Refused};
    for end in [Closed, ConnectTimeout, NoDescriptor, Refused] {
        assert!(ends[end as usize] > 10, "{}: {ends:?}", end.name());
    }
    assert!(all > 100, "{all} in order");
}

/// A command that its block has given up is completed once, and has no other effect: no connection comes of an attempt after its end, none
/// is left, and the commands that follow are answered.
#[test]
fn a_command_that_is_given_up_leaves_nothing() {
    let (mut all, mut given_up) = (0, 0);
    for (seed, relay) in seeds().flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut script = sockets(seed, relay);
        script.behaviour().sockets = SocketBehaviour { cancel: 200, ..Default::default() };
        let mut play = Play::new(script, seed);
        let delay_ns = (0, MS / 10);
        play.scene.faults(Faults { late_event: 200, delay_ns, ..Faults::default() });
        for _ in 0..20 {
            play.connect(20_000, Ending::Orderly);
            play.run(20);
        }
        play.run_to_the_end();
        play.check_all_over();
        let counted = play.scene.world.metrics.service(0);
        // A relay resets the connection whose partner it has given up.
        assert!(relay || play.found(Found::All) == 20, "seed {seed}");
        assert_eq!(counted.socket_bad_commands, 0);
        all += play.found(Found::All);
        given_up += counted.socket_ends[End::ConnectTimeout as usize];
    }
    assert!(all > 260 && given_up > 20, "{all} in order, {given_up} given up");
}

/// A second service with the same sockets and sound blocks, behind port 4 (3 is its message port).
const OTHER: u16 = 4;

/// Blocks that send any command and overwrite the words of their rings hurt their own connections only: the books hold, no connection
/// of another service loses a byte, and the engine ends every connection.
#[test]
fn hostile_blocks_hurt_only_themselves() {
    let (mut bad, mut broken) = (0, 0);
    for (seed, relay) in (0..24).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut script = sockets(seed, relay);
        script.another_service(wire::nic::Transport::Udp);
        let other = &mut script.setup.topology.services[1];
        other.sockets = vec![SocketSpec::listen(([127, 0, 0, 1], 9101))];
        let scribble = if seed % 2 == 0 { 0 } else { 100 };
        script.behaviour().sockets =
            SocketBehaviour { forge: 300, scribble, ..SocketBehaviour::default() };
        let mut play = Play::new(script, seed);
        for _ in 0..40 {
            let total = play.rng.between(1, 20_000);
            play.connect(total, Ending::Orderly);
            let client = play.clients.pop().expect("it has just connected");
            play.clients.push(client.of_hostile_block());
            play.connect_to(OTHER, total, Ending::Orderly);
            play.run(20);
        }
        play.run(500);
        let net = play.scene.world.net.clone();
        for hostile in play.clients.iter_mut().step_by(2) {
            hostile.end(&mut lock(&net), Close::Reset);
        }
        play.run_to_the_end();
        let mut others = play.clients.iter().skip(1).step_by(2);
        assert!(others.all(|client| client.found() == Some(Found::All)), "seed {seed}");
        let [hostile, other] = [0, 1].map(|service| play.scene.world.metrics.service(service));
        assert_eq!((other.sockets_opened, other.sockets_closed), (40, 40));
        assert!(relay || hostile.sockets_opened == hostile.sockets_closed, "{hostile:?}");
        bad += hostile.socket_bad_commands;
        broken += hostile.socket_ends[End::BlockEnded as usize];
    }
    assert!(bad > 1000 && broken > 10, "{bad} bad commands, {broken} broken");
}

/// The accelerator's generation ends at any moment, with or without a pause before: its connections are reset, the old blocks go on in
/// the old region without effect, and the next generation serves.
#[test]
fn a_generation_ends_with_its_connections() {
    let (mut reset, mut lost) = (0, 0);
    for (seed, relay) in (0..24).flat_map(|seed| [(seed, false), (seed, true)]) {
        let script = sockets(seed, relay);
        let behaviour = script.setup.behaviours[0];
        let mut play = Play::new(script, seed);
        for round in 0..4 {
            for _ in 0..6 {
                let total = play.rng.between(1, 40_000);
                play.connect(total, Ending::Orderly);
                let rounds = play.rng.below(20);
                play.run(rounds as usize);
            }
            let world = &mut play.scene.world;
            let planned = (seed + round) % 2 == 0;
            let reason =
                if planned { DropReason::Reconfiguring } else { DropReason::AcceleratorLost };
            if planned {
                world.hold(0, 0, MS);
                play.run(20);
            }
            play.scene.world.lose_runtime(0, 0, reason);
            let rounds = play.rng.below(30);
            play.run(rounds as usize);
            play.scene.world.replace_rings(0, 0, behaviour);
            let rounds = play.rng.below(30);
            play.run(rounds as usize);
            play.scene.world.resume_blocks(0, 0);
        }
        play.run_to_the_end();
        let counted = play.scene.world.metrics.service(0);
        assert_eq!(counted.sockets_opened, counted.sockets_closed, "seed {seed}, relay: {relay}");
        reset += play.found(Found::Reset);
        lost += counted.socket_ends[End::AcceleratorLost as usize];
        // The last generation serves clients that come now.
        let before = play.found(Found::All);
        (0..5).for_each(|_| play.connect(10_000, Ending::Orderly));
        play.run_to_the_end();
        assert_eq!(play.found(Found::All), before + 5, "seed {seed}, relay: {relay}");
    }
    assert!(reset > 50 && lost > 50, "{reset} clients were reset, {lost} connections lost");
}

/// Before a generation ends as planned, no connection is accepted, and those that are open go on to their end, in both directions.
#[test]
fn a_planned_end_waits_for_open_connections() {
    for seed in seeds() {
        let script = sockets(seed, false);
        let behaviour = script.setup.behaviours[0];
        let mut play = Play::new(script, seed);
        let workers = play.scene.world.workers.len();
        let blocks = play.scene.world.topology().services[0].mqueues;
        // 2000 bytes in a round at most: workers vote several times meanwhile.
        (0..3 * blocks).for_each(|_| play.connect(600_000, Ending::Orderly));
        play.run(20);
        let open = play.scene.world.metrics.service(0).sockets_opened;
        assert!(open > 0, "seed {seed}");
        let barrier = play.scene.world.hold(0, 0, 1000 * MS);
        // Those that come later wait.
        play.run(20);
        (0..3).for_each(|_| play.connect(1000, Ending::Orderly));
        for _ in 0..1000 {
            play.run(20);
            let counted = play.scene.world.metrics.service(0);
            let is_complete = barrier.is_complete(workers);
            assert!(!is_complete || counted.sockets_opened == counted.sockets_closed);
            if is_complete {
                break;
            }
        }
        assert!(barrier.is_complete(workers), "seed {seed}");
        let before = play.scene.world.metrics.service(0);
        play.scene.world.lose_runtime(0, 0, DropReason::Reconfiguring);
        play.run(20);
        play.scene.world.replace_rings(0, 0, behaviour);
        play.run(20);
        play.scene.world.resume_blocks(0, 0);
        play.run_to_the_end();
        assert_eq!(play.found(Found::All), play.clients.len(), "seed {seed}");
        let counted = play.scene.world.metrics.service(0);
        assert_eq!(counted.socket_ends[End::AcceleratorLost as usize], 0);
        assert!(counted.sockets_opened >= before.sockets_opened + 3, "they waited");
    }
}

/// Begins to stop a service, in one of these ways: it is removed, replaced, paused, or all workers drain.
fn begin_to_stop(play: &mut Play, way: u64) {
    let drain_ns = 600_000 * MS;
    let world = &mut play.scene.world;
    match way % 4 {
        0 => world.remove(0, drain_ns),
        1 => {
            let spec = world.topology().services[0].clone();
            world.put(spec, 0, Keeps::all(true), drain_ns);
        }
        2 => drop(world.hold(0, 0, drain_ns)),
        _ => world.begin_drain(),
    }
}

/// Idle connections end in order when their service stops, long before its drain time is over, and what was sent to them before that is answered.
#[test]
fn idle_connections_do_not_delay_a_drain() {
    for (seed, relay) in (0..16).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut play = Play::new(sockets(seed, relay), seed);
        let blocks = play.scene.world.topology().services[0].mqueues;
        for number in 0..2 * u64::from(blocks) {
            // The first one never sends anything.
            play.connect(100_000, Ending::Idle(3000 * number));
        }
        let clients = |play: &Play| play.clients.iter().map(SocketClient::received).sum::<u64>();
        let sum = (0..2 * u64::from(blocks)).map(|number| 3000 * number).sum::<u64>();
        for _ in 0..400 {
            play.run(50);
            let opened = play.scene.world.metrics.service(0).sockets_opened;
            let is_all = opened >= 2 * u64::from(blocks) * (1 + u64::from(relay));
            if is_all && clients(&play) == sum {
                break;
            }
        }
        assert_eq!(clients(&play), sum, "seed {seed}, relay: {relay}");
        // They have been idle for long when the last one sends something, just before the end.
        if seed % 2 == 0 {
            play.scene.wait_ms(2500);
        }
        let last = play.clients.len() - 1;
        {
            let net = play.scene.world.net.clone();
            let kept = 3000 * last as u64 + 2000;
            play.clients[last].send_up_to(kept, &mut lock(&net), &mut play.rng);
        }
        begin_to_stop(&mut play, seed / 2);
        for _ in 0..5000 {
            play.run(1);
            play.scene.wait_ms(1);
            for worker in 0..play.scene.world.workers.len() {
                play.scene.world.follow(worker);
            }
            if play.clients.iter().all(|client| client.found().is_some()) {
                break;
            }
        }
        let found = play.found(Found::All);
        assert_eq!(found, play.clients.len(), "seed {seed}, relay: {relay}");
        assert_eq!(clients(&play), sum + 2000, "seed {seed}, relay: {relay}");
        for _ in 0..300 {
            play.scene.wait_ms(1);
            for worker in 0..play.scene.world.workers.len() {
                play.scene.world.follow(worker);
            }
        }
        let counted = play.scene.world.metrics.service(0);
        assert_eq!(counted.sockets_opened, counted.sockets_closed, "seed {seed}, relay: {relay}");
        let ends = counted.socket_ends[End::Closed as usize];
        assert_eq!(ends, counted.sockets_opened, "seed {seed}, relay: {relay}");
    }
}

/// A service that is replaced, removed or stopped accepts no more; open connections go on until the drain time is over.
#[test]
fn open_connections_go_on_while_a_service_drains() {
    for (seed, relay) in (0..18).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut play = Play::new(sockets(seed, relay), seed);
        // As many as there are slots, so that all of them are open.
        let blocks = play.scene.world.topology().services[0].mqueues;
        let ends_late = seed % 2 == 0;
        for _ in 0..2 * blocks {
            let total = if ends_late { 200_000 } else { 40_000 };
            play.connect(total, Ending::Orderly);
        }
        play.run(20);
        let open = play.scene.world.metrics.service(0).sockets_opened;
        assert!(open > 0, "seed {seed}");
        let drain_ns = if ends_late { MS / 2 } else { 1000 * MS };
        match seed % 3 {
            0 => play.scene.world.remove(0, drain_ns),
            1 => {
                let spec = play.scene.world.topology().services[0].clone();
                play.scene.world.put(spec, 0, Keeps::all(true), drain_ns);
            }
            _ => play.scene.world.begin_drain(),
        }
        let changes = seed % 3 < 2;
        for _ in 0..4000 {
            play.run(5);
            for worker in 0..play.scene.world.workers.len() {
                play.scene.world.follow(worker);
            }
            let over = play.clients.iter().all(|client| client.found().is_some());
            if over && play.scene.world.is_changed() {
                break;
            }
            if !changes && ends_late {
                break;
            }
        }
        if changes {
            assert!(play.scene.world.is_changed(), "seed {seed}: the change is not complete");
        }
        play.scene.world.finish();
        play.scene.world.check_finished().unwrap();
        let counted = play.scene.world.metrics.service(0);
        assert_eq!(counted.sockets_opened, counted.sockets_closed, "seed {seed}, relay: {relay}");
        if !ends_late {
            let in_order = play.found(Found::All) as u64;
            assert!(in_order >= open / 2, "seed {seed}, relay: {relay}: {in_order} of {open}");
        }
    }
}
