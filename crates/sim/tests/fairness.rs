//! Every client gets a share of a service's credit, however much others demand.

mod scene;

use std::net::SocketAddr;

use engine::topology::{Dispatch, Listen};
use scene::{Caller, Scene, Script, UDP, request, script};
use sim::net::lock;
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
