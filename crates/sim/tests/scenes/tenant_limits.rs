//! Connections and byte streams of tenants that are over their limits, and messages on the way between workers.

use crate::scene::{Scene, request, script};
use engine::topology::{Dispatch, Tenant};
use sim::message::{Flavor, request_payload, request_wire};
use sim::net::{Faults, PeerRead};
use sim::shared::lock;
use wire::framing::Framing;
use wire::nic::{Close, Transport};

/// Byte streams whose tenant is over its rate wait in the order in which their servers spoke: a turn reads a few of them, the worker sleeps
/// meanwhile, and each gets its turn.
#[test]
fn many_byte_streams_over_a_rate_cost_a_turn_a_few_looks() {
    const STREAMS: u32 = 500;
    const IN_TURN: u64 = 64;
    let mut script = script(Framing::Raw);
    script.upstream(Transport::Tcp);
    script.limits().connections = 2 * STREAMS;
    script.service().tenant = "many".into();
    let tenant = Tenant { burst_ms: 1, ..Tenant::new("many") };
    script.setup.topology.tenants = vec![tenant.clone()];
    let mut scene = script.play();
    // The test is the server.
    scene.backend = None;
    let callers: Vec<_> = (0..STREAMS).map(|_| scene.connect()).collect();
    scene.run(200);
    let servers: Vec<_> = {
        let mut net = lock(&scene.world.net);
        (0..STREAMS).map(|_| net.take_arrived(0).expect("each client has a connection")).collect()
    };
    let received = |scene: &Scene| scene.world.metrics.service(0).received;
    // The first one brings the tenant over its rate for 100 ms; then the others speak.
    let slow = Tenant { messages_per_s: 10, ..tenant.clone() };
    scene.world.tenants().set(&[slow], |_| true);
    lock(&scene.world.net).peer_write(servers[0], b"first");
    scene.run(5);
    assert_eq!(received(&scene), 1);
    for server in &servers[1..] {
        lock(&scene.world.net).peer_write(*server, b"hello");
    }
    scene.run(20);
    let mut asleep = 0;
    for _ in 0..50 {
        scene.wait_ms(1);
        asleep += u32::from(!scene.world.is_awake(0));
    }
    assert_eq!((received(&scene), asleep), (1, 50), "nothing is due");
    // Some close while they wait, and others have their keys.
    for caller in &callers[1..21] {
        lock(&scene.world.net).peer_close(caller.conn, Close::Reset);
    }
    scene.run(20);
    let newcomers: Vec<_> = (0..20).map(|_| scene.connect()).collect();
    scene.run(20);
    scene.world.tenants().set(&[tenant], |_| true);
    let (mut before, mut most) = (received(&scene), 0);
    for _ in 0..100 {
        scene.run(1);
        let after = received(&scene);
        (most, before) = (most.max(after - before), after);
    }
    assert_eq!(before, u64::from(STREAMS) - 20, "all but those that are closed");
    assert!((IN_TURN / 2..=IN_TURN).contains(&most), "{most} in a turn");
    for caller in &callers[21..] {
        assert_eq!(scene.hear(*caller), b"hello");
    }
    for newcomer in newcomers {
        assert_eq!(scene.hear(newcomer), b"", "its server has said nothing");
    }
}

/// A connection that waits for its tenant is closed, and another client that has to wait gets its key: that one waits once.
#[test]
fn a_key_that_is_used_again_is_read_once_in_a_turn() {
    // The bytes of one read.
    const READ_BYTES: usize = 16 << 10;
    let mut script = script(Framing::LengthU16);
    script.limits().idle_ms = 5;
    script.limits().pipelined = 4096;
    script.service().slots = 4096;
    script.service().tenant = "many".into();
    let tenant = Tenant { burst_ms: 1, ..Tenant::new("many") };
    script.setup.topology.tenants = vec![tenant.clone()];
    let mut scene = script.play();
    let first = scene.connect();
    scene.run(20);
    let slow = Tenant { messages_per_s: 1, ..tenant.clone() };
    scene.world.tenants().set(&[slow], |_| true);
    scene.call(first, request(0));
    scene.run(5);
    let closed = |scene: &Scene| scene.world.metrics.service(0).connections_closed;
    for number in 0..5 {
        let caller = scene.connect();
        scene.run(5);
        scene.call(caller, request(0));
        while closed(&scene) <= number {
            scene.wait_ms(1);
        }
    }
    let last = scene.connect();
    scene.run(5);
    let (mut bytes, mut requests) = (0, 0);
    while bytes < 4 * READ_BYTES {
        let body = scene.call(last, request(requests));
        bytes += request_wire(
            Framing::LengthU16,
            &request_payload(Framing::LengthU16, &body, Flavor::Plain),
        )
        .len();
        requests += 1;
    }
    scene.run(5);
    let received = |scene: &Scene| scene.world.metrics.service(0).received;
    assert_eq!(received(&scene), 1, "the others wait");
    scene.world.tenants().set(&[tenant], |_| true);
    scene.run(1);
    let part = u64::from(requests) / 4;
    let taken = received(&scene) - 1;
    assert!((part / 2..=part + part / 8).contains(&taken), "{taken} of {requests} in a turn");
}

/// Requests that wait between two workers, or for a block there, are in flight.
#[test]
fn requests_that_are_handed_over_are_in_flight() {
    const MOST: u64 = 6;
    let mut script = script(Framing::LengthU16);
    script.limits().pipelined = 64;
    script.setup.topology.engine.workers = 2;
    let service = script.service();
    (service.mqueues, service.slots, service.dispatch) = (2, 2, Dispatch::FlowHash);
    service.tenant = "limited".into();
    script.behaviour().delay_ns = (1_000_000, 1_000_000);
    let tenant = Tenant { outstanding: MOST, ..Tenant::new("limited") };
    script.setup.topology.tenants = vec![tenant];
    let mut scene = script.play();
    // Half of them have their mqueue on the worker that does not have their connection.
    let callers: Vec<_> = (0..20).map(|_| scene.connect()).collect();
    scene.run(20);
    for sequence in 0..20 {
        for caller in &callers {
            scene.call(*caller, request(sequence));
        }
    }
    let (mut most, mut handed) = (0, 0);
    for _ in 0..2000 {
        scene.run(1);
        let counted = scene.world.metrics.service(0);
        let on_the_way = counted.handed_out - counted.handed_in;
        let in_mqueues = scene.world.workers.iter().flat_map(|of| of.outstanding_by_mqueue(0));
        most = most.max(in_mqueues.map(u64::from).sum::<u64>() + on_the_way);
        handed = counted.handed_out;
    }
    assert!(handed > 5, "{handed} were handed over");
    // Both workers have connections, and each takes at least one at a time.
    assert!((2..=MOST + 1).contains(&most), "{most} at a time");
    scene.wait_ms(400);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.replied, counted.dropped_requests()), (400, 0));
    assert_eq!(scene.world.tenants().named("limited").used().outstanding, 0);
}

/// Chunks that their server does not take count as messages in flight, also those that one turn brings.
#[test]
fn chunks_that_wait_for_a_server_are_in_flight() {
    const MOST: u64 = 4;
    let mut script = script(Framing::Raw);
    script.upstream(Transport::Tcp);
    script.service().tenant = "limited".into();
    let tenant = Tenant { outstanding: MOST, ..Tenant::new("limited") };
    script.setup.topology.tenants = vec![tenant];
    let mut scene = script.play();
    scene.backend = None;
    scene.faults(Faults { pipe_bytes: 100, ..Faults::default() });
    let callers: Vec<_> = (0..30).map(|_| scene.connect()).collect();
    scene.run(50);
    let servers: Vec<_> = {
        let mut net = lock(&scene.world.net);
        callers.iter().map(|_| net.take_arrived(0).expect("each client has one")).collect()
    };
    // One chunk fills the way to the server, which does not read, and the next one waits.
    let mut got = vec![0; servers.len()];
    for _ in 0..3 {
        for caller in &callers {
            lock(&scene.world.net).peer_write(caller.conn, &[1; 100]);
        }
        for _ in 0..20 {
            scene.run(1);
            let waiting = scene.world.in_flight(0);
            assert!(waiting <= MOST, "{waiting} chunks wait");
        }
    }
    assert_eq!(scene.world.in_flight(0), MOST);
    for _ in 0..200 {
        for (server, got) in servers.iter().zip(&mut got) {
            if let PeerRead::Bytes(bytes) = lock(&scene.world.net).peer_read(*server, 1000) {
                *got += bytes.len();
            }
        }
        scene.wait_ms(1);
    }
    assert!(got.iter().all(|bytes| *bytes >= 200), "{got:?}");
    assert_eq!(scene.world.in_flight(0), 0);
}

/// A server that reads nothing while its output is full is read also when its tenant has as many messages in flight as it may: they wait for just that.
#[test]
fn servers_that_write_before_they_read_are_read() {
    const MOST: u64 = 4;
    const BYTES: usize = 5000;
    let mut script = script(Framing::Raw);
    script.upstream(Transport::Tcp);
    script.service().tenant = "limited".into();
    let tenant = Tenant { outstanding: MOST, ..Tenant::new("limited") };
    script.setup.topology.tenants = vec![tenant];
    let mut scene = script.play();
    scene.backend = None;
    scene.faults(Faults { pipe_bytes: 100, ..Faults::default() });
    let callers: Vec<_> = (0..MOST).map(|_| scene.connect()).collect();
    scene.run(50);
    let servers: Vec<_> = {
        let mut net = lock(&scene.world.net);
        callers.iter().map(|_| net.take_arrived(0).expect("each client has one")).collect()
    };
    let bulk: Vec<u8> = (0..BYTES).map(|at| at as u8).collect();
    let mut said = vec![0; callers.len()];
    let mut heard = vec![Vec::new(); callers.len()];
    let mut echo = vec![Vec::new(); callers.len()];
    let mut most = 0;
    for round in 0..4000 {
        for index in 0..callers.len() {
            let conn = callers[index].conn;
            let mut net = lock(&scene.world.net);
            said[index] += net.peer_write(conn, &bulk[said[index]..]);
            let written = net.peer_write(servers[index], &echo[index]);
            echo[index].drain(..written);
            if echo[index].is_empty()
                && let PeerRead::Bytes(bytes) = net.peer_read(servers[index], 1000)
            {
                echo[index] = bytes;
            }
        }
        scene.run(1);
        most = most.max(scene.world.tenants().named("limited").used().outstanding);
        // Clients write until nothing moves, and read then.
        if round >= 100 {
            for (caller, heard) in callers.iter().zip(&mut heard) {
                if let PeerRead::Bytes(bytes) = lock(&scene.world.net).peer_read(caller.conn, 50) {
                    heard.extend(bytes);
                }
            }
        }
        scene.wait_ms(1);
    }
    assert_eq!(most, MOST, "the limit was reached");
    for heard in heard {
        assert!(heard == bulk, "{} of {BYTES} came back", heard.len());
    }
    assert_eq!(scene.world.in_flight(0), 0);
}
