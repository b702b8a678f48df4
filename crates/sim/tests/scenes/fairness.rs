//! Every client gets a share of a service's credit, however much others demand.

use std::net::SocketAddr;

use crate::scene::{Caller, Scene, Script, UDP, request, script};
use engine::topology::{Dispatch, Listen, SocketSpec};
use sim::rng::Rng;
use sim::shared::lock;
use sim::socket_peer::{Ending, SocketClient};
use wire::framing::Framing;
use wire::nic::{PortIndex, Transport};

/// After the two ports of every scene.
const OTHER_UDP: PortIndex = 2;

/// One mqueue of four slots, which are free again in every turn.
fn four_a_turn() -> Script {
    let mut script = script(Framing::LengthU16);
    script.limits().pipelined = 1 << 20;
    script
}

fn is_answered(scene: &Scene, peer: SocketAddr) -> bool {
    lock(&scene.world.net).take_datagram(peer).is_some()
}

/// A connection with more requests than there is credit in every turn.
struct Greedy {
    caller: Caller,
    sequence: u32,
}

impl Greedy {
    fn connect(scene: &mut Scene) -> Self {
        Self { caller: scene.connect(), sequence: 0 }
    }

    fn call(&mut self, scene: &mut Scene) {
        for _ in 0..32 {
            scene.call(self.caller, request(self.sequence));
            self.sequence += 1;
        }
    }
}

/// A flood of datagrams: five times a turn's capacity.
fn flood(scene: &mut Scene, worker: usize, port: PortIndex) {
    for _ in 0..20 {
        scene.ask_at(worker, port, request(0));
    }
}

/// The number of turns, of 80 in each of which `floods` demand more than the capacity and one polite client sends a
/// request over UDP, in which the polite client is answered.
fn answered_beside(
    scene: &mut Scene,
    (worker, port): (usize, PortIndex),
    mut floods: impl FnMut(&mut Scene),
) -> usize {
    let mut turn = |_| {
        floods(scene);
        let peer = scene.ask_at(worker, port, request(0));
        scene.run(1);
        peer
    };
    let asked: Vec<SocketAddr> = (0..80).map(&mut turn).collect();
    scene.run(5);
    asked.into_iter().filter(|peer| is_answered(scene, *peer)).count()
}

#[test]
fn a_greedy_connection_does_not_keep_others_from_their_turn() {
    let mut scene = four_a_turn().play();
    let mut greedy = Greedy::connect(&mut scene);
    let mut turn = |scene: &mut Scene| {
        greedy.call(scene);
        scene.run(1);
        scene.hear(greedy.caller);
    };
    (0..5).for_each(|_| turn(&mut scene));
    let polite = scene.connect();
    for sequence in 0..10 {
        scene.call(polite, request(sequence));
        let turns = (1..100).find(|_| {
            turn(&mut scene);
            !scene.hear(polite).is_empty()
        });
        assert!(turns.is_some_and(|turns| turns <= 10), "{turns:?}");
    }
}

#[test]
fn greedy_connections_and_datagrams_leave_something_to_a_polite_connection() {
    let mut scene = four_a_turn().play();
    let mut greedy = Greedy::connect(&mut scene);
    let mut turn = |scene: &mut Scene| {
        greedy.call(scene);
        flood(scene, 0, UDP);
        scene.run(1);
        scene.hear(greedy.caller);
    };
    (0..5).for_each(|_| turn(&mut scene));
    let polite = scene.connect();
    scene.call(polite, request(0));
    let turns = (1..100).find(|_| {
        turn(&mut scene);
        !scene.hear(polite).is_empty()
    });
    assert!(turns.is_some_and(|turns| turns <= 16), "{turns:?}");
}

#[test]
fn a_flood_at_one_port_leaves_a_share_to_another_port() {
    for (flooded, other) in [(UDP, OTHER_UDP), (OTHER_UDP, UDP)] {
        let mut script = four_a_turn();
        let address = ([127, 0, 0, 1], 9001).into();
        script.service().listen.push(Listen { transport: Transport::Udp, address });
        let mut scene = script.play();
        let answered = answered_beside(&mut scene, (0, other), |scene| {
            flood(scene, 0, flooded);
        });
        assert!(answered >= 20, "{answered} of 80 at port {other}");
    }
}

#[test]
fn what_other_workers_hand_over_leaves_a_share_to_a_workers_own() {
    let mut script = four_a_turn();
    script.setup.topology.engine.workers = 2;
    script.service().dispatch = Dispatch::KeyHash("16:4".parse().unwrap());
    let mut scene = script.play();
    let answered = answered_beside(&mut scene, (0, UDP), |scene| flood(scene, 1, UDP));
    assert!(answered >= 16, "{answered} of 80");
}

/// A tenant whose blocks have 48 busy connections moves no more bytes than one that has six and is busy in every turn.
#[test]
fn connections_of_kernels_pay_for_their_bytes() {
    let mut script = four_a_turn();
    script.another_service(Transport::Udp);
    for (service, number) in script.setup.topology.services.iter_mut().zip(0..) {
        service.tenant = format!("tenant{number}");
        (service.mqueues, service.sockets_per_block) = (3, 16);
        service.sockets = vec![SocketSpec::listen(([127, 0, 0, 1], 9100 + number))];
    }
    let mut scene = script.play();
    let mut rng = Rng::new(1);
    let mut connect = |port| {
        let peer = scene.client_of(0, port);
        SocketClient::connect(&mut lock(&scene.world.net), (peer, port), u64::MAX, Ending::Orderly)
    };
    // After the two ports for messages of the first service, and the one of the second.
    let mut clients: Vec<_> = (0..48).map(|_| connect(2)).collect();
    clients.extend((0..6).map(|_| connect(4)));
    let mut turns = |scene: &mut Scene, count| {
        for _ in 0..count {
            for client in &mut clients {
                client.step(&mut lock(&scene.world.net), &mut rng);
            }
            scene.run(1);
        }
    };
    let moved = |scene: &Scene| {
        let counted = [0, 1].map(|service| scene.world.metrics.service(service));
        assert_eq!(counted.each_ref().map(|c| c.sockets_opened), [48, 6]);
        counted.map(|counted| counted.socket_received_bytes + counted.socket_sent_bytes)
    };
    turns(&mut scene, 50);
    let before = moved(&scene);
    turns(&mut scene, 1000);
    let after = moved(&scene);
    let [many, few] = [0, 1].map(|service| after[service] - before[service]);
    assert!(few > 5_000_000, "{few} bytes: busy in every turn");
    assert!(many > few / 2 && many < 2 * few, "{many} bytes beside {few}");
}
