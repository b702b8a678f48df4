//! Tenants that share a worker: what a flood of one costs the others, and what each gets.
//!
//! Time is that of the simulator: a turn takes 5 us, and half a microsecond for each message in and out; kernels answer after 100 us. Each scene begins an hour after the
//! engine's clock, as on a machine that has run for long, and nothing has happened in that time.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::scene::{Scene, Script, request, script};
use engine::topology::{Dispatch, Listen, Service, Tenant};
use onpath::{Direction, Failure, Function, Messages, OnFailure};
use sim::behaviour::Behaviour;
use sim::message::{Flavor, request_payload};
use sim::rng::Rng;
use sim::shared::lock;
use wire::DropReason;
use wire::framing::Framing;
use wire::nic::{PortIndex, Transport};

const TURN_NS: u64 = 5_000;
const MESSAGE_NS: u64 = 500;
const KERNEL_NS: u64 = 100_000;
/// Messages a second that a worker which does nothing else takes and answers.
const CAPACITY: u64 = 1_000_000_000 / (2 * MESSAGE_NS);
const TENANTS: usize = 6;
/// When a scene begins.
const BEGIN_NS: u64 = 3_600_000_000_000;
const SHARE: u64 = CAPACITY / TENANTS as u64;

/// A service of each tenant, which differ by their weights.
fn tenants(weights: [u32; TENANTS]) -> Script {
    let mut script = script(Framing::LengthU16);
    let topology = &mut script.setup.topology;
    topology.services = (0..TENANTS)
        .map(|number| {
            let address = ([127, 0, 0, 1], 9000 + number as u16).into();
            let listen = vec![Listen { transport: Transport::Udp, address }];
            let mut service = Service::new(&format!("service{number}"), listen, "model");
            service.framing = Framing::LengthU16;
            (service.mqueues, service.slots) = (4, 256);
            service.tenant = format!("tenant{number}");
            service
        })
        .collect();
    topology.tenants = weights
        .iter()
        .enumerate()
        .map(|(number, weight)| Tenant {
            weight: *weight,
            ..Tenant::new(&format!("tenant{number}"))
        })
        .collect();
    let delay =
        Behaviour { delay_ns: (KERNEL_NS, KERNEL_NS), overlap: 255, ..Behaviour::default() };
    script.setup.behaviours = vec![delay; TENANTS];
    script.setup.honest_backends = vec![true; TENANTS];
    script
}

/// The load of one tenant.
struct Load {
    /// Requests a second.
    rate: u64,
    next_ns: u64,
    asked: u64,
    /// Not of floods.
    waiting: VecDeque<(SocketAddr, u64)>,
    /// How long those took that have been answered, in nanoseconds.
    took_ns: Vec<u64>,
}

/// The scene after a long time in which nothing happened.
fn late(script: Script) -> Scene {
    let mut scene = script.play();
    scene.run(2);
    scene.world.advance(BEGIN_NS - scene.world.now_ns());
    scene
}

struct Play {
    scene: Scene,
    loads: Vec<Load>,
    rng: Rng,
    /// Messages that have been counted in and out.
    counted: u64,
}

impl Play {
    fn new(script: Script, rates: [u64; TENANTS]) -> Self {
        let load = |rate| Load {
            rate,
            next_ns: BEGIN_NS,
            asked: 0,
            waiting: VecDeque::new(),
            took_ns: Vec::new(),
        };
        let loads = rates.into_iter().map(load).collect();
        Self { scene: late(script), loads, rng: Rng::new(7), counted: 0 }
    }

    /// The requests of a tenant that are due.
    fn ask(&mut self, tenant: usize, now_ns: u64) {
        while self.loads[tenant].rate > 0 && self.loads[tenant].next_ns <= now_ns {
            let port = tenant as PortIndex;
            let peer = self.scene.client_of(0, port);
            let load = &mut self.loads[tenant];
            let body = sim::message::Body { client: load.asked as u32, ..request(0) };
            let body = sim::message::Body { sequence: tenant as u32, ..body };
            let payload = request_payload(Framing::LengthU16, &body, Flavor::Plain);
            let mut net = lock(&self.scene.world.net);
            let route = net.route(peer, port, [127, 0, 0, 1].into());
            net.ledger.ask(tenant, body, Some(route));
            net.send_datagram(peer, port, [127, 0, 0, 1].into(), &payload);
            load.asked += 1;
            if load.rate <= SHARE {
                load.waiting.push_back((peer, load.next_ns));
            }
            // Uniform around the mean, so that requests come in clusters and gaps.
            load.next_ns += 1 + self.rng.below(2_000_000_000 / load.rate);
        }
    }

    /// Reads what has arrived at the clients; those without an answer after 50 ms will get none.
    fn hear(&mut self, now_ns: u64) {
        let net = self.scene.world.net.clone();
        let mut net = lock(&net);
        for load in &mut self.loads {
            let Load { waiting, took_ns, .. } = load;
            waiting.retain(|(peer, asked_ns)| {
                let answered = net.take_datagram(*peer).is_some();
                if answered {
                    took_ns.push(now_ns - asked_ns);
                }
                !answered && now_ns - asked_ns < 50_000_000
            });
        }
    }

    /// Until this long after the scene began.
    fn run_until(&mut self, until_ns: u64) {
        while self.scene.world.now_ns() < BEGIN_NS + until_ns {
            let now_ns = self.scene.world.now_ns();
            (0..TENANTS).for_each(|tenant| self.ask(tenant, now_ns));
            let counted = (0..TENANTS)
                .map(|tenant| {
                    let counters = self.scene.world.metrics.service(tenant);
                    counters.received + counters.replied
                })
                .sum();
            let work = counted - std::mem::replace(&mut self.counted, counted);
            self.scene.run_one(TURN_NS + work * MESSAGE_NS);
            self.hear(self.scene.world.now_ns());
        }
    }

    fn replied(&self) -> [u64; TENANTS] {
        std::array::from_fn(|tenant| self.scene.world.metrics.service(tenant).replied)
    }

    /// The 99th percentile of a tenant's answer times.
    fn p99_ns(&self, tenant: usize) -> u64 {
        let mut took_ns = self.loads[tenant].took_ns.clone();
        assert!(took_ns.len() > 500, "tenant {tenant} was answered {} times", took_ns.len());
        took_ns.sort_unstable();
        took_ns[took_ns.len() * 99 / 100]
    }
}

/// Jain's index of fairness: 1 if all are equal, 1/n if one has everything.
fn jain(parts: &[f64]) -> f64 {
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|part| part * part).sum();
    sum * sum / (parts.len() as f64 * squares)
}

#[test]
fn a_flood_of_one_tenant_does_not_delay_five_others() {
    const MODERATE: u64 = SHARE * 6 / 10;
    let mut p99 = [0, 10 * SHARE].map(|flood| {
        let mut rates = [MODERATE; TENANTS];
        rates[0] = flood;
        let mut play = Play::new(tenants([1; TENANTS]), rates);
        play.run_until(40_000_000);
        for tenant in 1..TENANTS {
            let lost = play.scene.world.metrics.service(tenant).dropped_requests();
            assert_eq!(lost, 0, "tenant {tenant} loses nothing");
        }
        let used = play.replied()[0] * 25;
        assert!(flood == 0 || used > SHARE, "the flood gets what is left: {used} a second");
        (1..TENANTS).map(|tenant| play.p99_ns(tenant)).max().unwrap()
    });
    let [alone, beside] = p99.each_mut().map(|ns| *ns);
    assert!(
        alone > KERNEL_NS && beside <= 2 * alone,
        "p99 {alone} ns alone, {beside} ns beside a flood"
    );
}

#[test]
fn six_floods_get_parts_of_their_weights() {
    for weights in [[1; TENANTS], [1, 2, 3, 1, 2, 3]] {
        let mut play = Play::new(tenants(weights), [2 * SHARE; TENANTS]);
        // A round of all takes about 10 ms.
        play.run_until(10_000_000);
        let before = play.replied();
        play.run_until(50_000_000);
        let after = play.replied();
        let got: Vec<u64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
        let parts: Vec<f64> =
            got.iter().zip(weights).map(|(got, weight)| *got as f64 / f64::from(weight)).collect();
        assert!(jain(&parts) >= 0.99, "{got:?} for weights {weights:?}: {}", jain(&parts));
        assert!(got.iter().sum::<u64>() > CAPACITY / 25 * 7 / 10, "{got:?}: work is conserved");
    }
}

// provokes: tenant_rate
#[test]
fn a_rate_holds_and_everything_beyond_is_counted() {
    let mut script = tenants([1; TENANTS]);
    script.setup.topology.tenants[0].messages_per_s = 20_000;
    script.setup.topology.tenants[0].burst_ms = 1;
    let mut rates = [0; TENANTS];
    (rates[0], rates[1]) = (200_000, 20_000);
    let mut play = Play::new(script, rates);
    play.run_until(50_000_000);
    let counted = play.scene.world.metrics.service(0);
    // 1 ms at once, and the messages of one turn.
    assert!((1000..=1100).contains(&counted.accepted), "{}", counted.accepted);
    let shed = counted.dropped(DropReason::TenantRate);
    assert!(shed > 8000 && counted.received == counted.accepted + shed, "{counted:?}");
    let other = play.scene.world.metrics.service(1);
    assert_eq!((other.dropped_requests(), other.received), (0, play.loads[1].asked));
}

// provokes: tenant_outstanding
#[test]
fn messages_in_flight_stay_below_their_limit() {
    let mut script = tenants([1; TENANTS]);
    script.setup.topology.tenants[0].outstanding = 8;
    let mut rates = [0; TENANTS];
    rates[0] = 500_000;
    let mut play = Play::new(script, rates);
    let mut most = 0;
    for step in 1..1000 {
        play.run_until(step * 20_000);
        most = most.max(play.scene.world.in_flight(0));
    }
    let counted = play.scene.world.metrics.service(0);
    assert_eq!(most, 8, "no turn takes more");
    assert!(counted.dropped(DropReason::TenantOutstanding) > 1000, "{counted:?}");
    assert!(counted.replied > 500, "{counted:?}");
}

/// Requests on connections wait for the rate instead of being lost.
#[test]
fn a_connection_waits_for_its_tenants_rate() {
    let mut script = script(Framing::LengthU16);
    script.limits().pipelined = 1000;
    script.service().tenant = "slow".into();
    script.service().slots = 256;
    let tenant = Tenant { messages_per_s: 10_000, burst_ms: 1, ..Tenant::new("slow") };
    script.setup.topology.tenants = vec![tenant];
    let mut scene = late(script);
    let caller = scene.connect();
    for sequence in 0..300 {
        scene.call(caller, request(sequence));
    }
    // 300 at 10 000 a second are 30 ms.
    scene.wait_ms(10);
    let counted = scene.world.metrics.service(0);
    assert!((50..=150).contains(&counted.replied), "{counted:?}");
    scene.wait_ms(40);
    let counted = scene.world.metrics.service(0);
    assert_eq!((counted.replied, counted.dropped_requests()), (300, 0));
}

/// Connections beyond the quota are refused, and each that ends makes room.
// provokes: tenant_connections
#[test]
fn a_tenants_connections_are_counted() {
    let mut script = script(Framing::LengthU16);
    script.service().tenant = "few".into();
    let tenant = Tenant { connections: 2, ..Tenant::new("few") };
    script.setup.topology.tenants = vec![tenant];
    let mut scene = script.play();
    let callers = [0; 4].map(|_| scene.connect());
    scene.run(5);
    assert_eq!(scene.dropped(DropReason::TenantConnections), 2);
    let open = |scene: &Scene, caller: crate::scene::Caller| {
        lock(&scene.world.net).closed(caller.conn).is_none()
    };
    let alive: Vec<_> = callers.into_iter().filter(|caller| open(&scene, *caller)).collect();
    assert_eq!(alive.len(), 2);
    lock(&scene.world.net).peer_close(alive[0].conn, wire::nic::Close::Graceful);
    scene.run(20);
    let next = scene.connect();
    scene.run(5);
    assert_eq!(scene.dropped(DropReason::TenantConnections), 2);
    assert!(open(&scene, next));
}

/// A tenant whose kernels forge tokens, write impossible messages and finally random words over their rings, while its clients flood: the
/// others lose nothing, get their own answers only, and wait no longer than beside any flood.
#[test]
fn a_tenant_with_hostile_kernels_is_contained() {
    const MODERATE: u64 = SHARE * 6 / 10;
    let mut script = tenants([1; TENANTS]);
    let hostile = Behaviour {
        twice: 100,
        swallow: 50,
        forge: 200,
        steal: 200,
        bad_kind: 50,
        bad_header: 20,
        scribble_after: Some(2000),
        wide: true,
        ..script.setup.behaviours[0]
    };
    script.setup.behaviours[0] = hostile;
    script.setup.topology.services[0].request_timeout_ms = 5;
    let mut rates = [MODERATE; TENANTS];
    rates[0] = 4 * SHARE;
    let mut play = Play::new(script, rates);
    // Every turn is checked: each answer is that of its own request.
    play.run_until(30_000_000);
    let attacker = play.scene.world.metrics.service(0);
    let contained = [DropReason::StaleToken, DropReason::MqueueDead, DropReason::BadMessage];
    let counted: u64 = contained.iter().map(|reason| attacker.dropped(*reason)).sum();
    assert!(counted > 100, "{attacker:?}");
    for tenant in 1..TENANTS {
        let other = play.scene.world.metrics.service(tenant);
        assert_eq!(other.drops.iter().sum::<u64>(), 0, "tenant {tenant} notices nothing");
        assert!(play.p99_ns(tenant) <= 3 * KERNEL_NS, "{} ns", play.p99_ns(tenant));
    }
}

/// What one worker has received below the rate, another one takes over.
#[test]
fn what_is_handed_over_is_not_limited_again() {
    let mut script = tenants([1; TENANTS]);
    script.setup.topology.engine.workers = 2;
    script.setup.topology.services[0].dispatch = Dispatch::FlowHash;
    script.setup.topology.tenants[0].messages_per_s = 20_000;
    script.setup.topology.tenants[0].burst_ms = 1;
    let mut rates = [0; TENANTS];
    rates[0] = 200_000;
    let mut play = Play::new(script, rates);
    play.run_until(50_000_000);
    let counted = play.scene.world.metrics.service(0);
    assert!(counted.handed_in > 300, "{counted:?}");
    // All that was counted against the rate is accepted.
    assert!((1000..=1100).contains(&counted.accepted), "{counted:?}");
    assert!(counted.replied > 900, "{counted:?}");
}

#[test]
fn a_raised_rate_holds_at_once() {
    let mut script = tenants([1; TENANTS]);
    script.setup.topology.tenants[0].messages_per_s = 10;
    let mut rates = [0; TENANTS];
    rates[0] = 200_000;
    let mut play = Play::new(script, rates);
    play.run_until(5_000_000);
    let before = play.scene.world.metrics.service(0).accepted;
    assert!((1..100).contains(&before), "{before}");
    let mut tenants = play.scene.world.topology().tenants.clone();
    tenants[0].messages_per_s = 1_000_000;
    play.scene.world.tenants().set(&tenants, |_| true);
    play.run_until(10_000_000);
    let more = play.scene.world.metrics.service(0).accepted - before;
    assert!(more > 800, "{more} of 1000");
}

/// A worker whose only work is over a limit sleeps until some of it may be taken.
#[test]
fn a_worker_sleeps_while_a_tenant_is_over_its_rate() {
    let mut script = script(Framing::LengthU16);
    script.limits().pipelined = 1000;
    script.service().tenant = "slow".into();
    script.service().slots = 256;
    let tenant = Tenant { messages_per_s: 100, burst_ms: 1, ..Tenant::new("slow") };
    script.setup.topology.tenants = vec![tenant];
    let mut scene = script.play();
    let caller = scene.connect();
    for sequence in 0..10 {
        scene.call(caller, request(sequence));
    }
    scene.run(20);
    assert_eq!(scene.replied(), 10, "they come at once: the next 90 ms are used up");
    for sequence in 10..20 {
        scene.call(caller, request(sequence));
    }
    scene.run(20);
    let mut asleep = 0;
    for _ in 0..50 {
        scene.wait_ms(1);
        asleep += u32::from(!scene.world.is_awake(0));
    }
    assert_eq!((scene.replied(), asleep), (10, 50));
    let due_ns = scene.world.first_wake_ns().expect("it sleeps");
    assert!(due_ns <= scene.world.now_ns() + 100_000_000, "not for longer than it has to");
    scene.wait_ms(100);
    assert_eq!((scene.replied(), scene.world.metrics.service(0).dropped_requests()), (20, 0));
}

/// A tenant with many busy connections takes no more in a turn than one with a few.
#[test]
fn many_connections_of_a_tenant_get_a_part_of_a_turn() {
    let mut script = script(Framing::LengthU16);
    script.service().tenant = "many".into();
    (script.service().mqueues, script.service().slots) = (4, 1024);
    script.another_service(Transport::Udp);
    script.setup.topology.services[1].tenant = "few".into();
    let mut scene = script.play();
    let callers: Vec<_> = (0..200).map(|_| scene.connect()).collect();
    let ask = |scene: &mut Scene, sequence| {
        let (peer, local) = (scene.client_of(0, 2), [127, 0, 0, 1].into());
        let body = sim::message::Body { client: u32::MAX, ..request(sequence) };
        let mut net = lock(&scene.world.net);
        let route = net.route(peer, 2, local);
        net.ledger.ask(1, body, Some(route));
        let payload = request_payload(Framing::LengthU16, &body, Flavor::Plain);
        net.send_datagram(peer, 2, local, &payload);
        drop(net);
        scene.run(1);
        scene.world.metrics.service(0).received
    };
    for sequence in 0..5 {
        scene.call(callers[0], request(sequence));
        ask(&mut scene, sequence);
    }
    scene.run(20);
    for caller in &callers {
        for sequence in 5..9 {
            scene.call(*caller, request(sequence));
        }
    }
    let (mut before, mut most) = (scene.world.metrics.service(0).received, 0);
    for sequence in 5..25 {
        let received = ask(&mut scene, sequence);
        most = most.max(received - before);
        before = received;
    }
    assert_eq!(before, 805);
    assert!((16..=256).contains(&most), "{most} in a turn");
}

/// A thousand connections of a tenant that is over its rate wait in the order in which they came: each gets its turn, none is lost, and a turn
/// looks at a few of them.
#[test]
fn each_of_a_thousand_connections_over_a_rate_gets_its_turn() {
    const CONNECTIONS: u32 = 1000;
    let mut script = script(Framing::LengthU16);
    script.limits().connections = 2 * CONNECTIONS;
    script.service().tenant = "many".into();
    script.service().slots = 1024;
    let tenant = Tenant { messages_per_s: 5_000, burst_ms: 1, ..Tenant::new("many") };
    script.setup.topology.tenants = vec![tenant];
    let mut scene = script.play();
    let callers: Vec<_> = (0..CONNECTIONS).map(|_| scene.connect()).collect();
    scene.run(200);
    // The first one brings the tenant over its rate, before the others ask.
    const FIRST: u32 = 50;
    for sequence in 0..FIRST {
        scene.call(callers[0], request(sequence));
    }
    scene.run(5);
    for caller in &callers[1..] {
        scene.call(*caller, request(0));
    }
    // 1000 at 5000 a second are 200 ms.
    scene.wait_ms(100);
    let half = scene.world.metrics.service(0).replied;
    assert!((200..800).contains(&half), "{half}");
    scene.wait_ms(250);
    let counted = scene.world.metrics.service(0);
    let all = u64::from(CONNECTIONS + FIRST - 1);
    assert_eq!((counted.replied, counted.dropped_requests()), (all, 0));
    // Those that close while they wait are closed here as well.
    for sequence in FIRST..2 * FIRST {
        scene.call(callers[0], request(sequence));
    }
    scene.run(5);
    for caller in &callers[1..] {
        scene.call(*caller, request(1));
        lock(&scene.world.net).peer_close(caller.conn, wire::nic::Close::Reset);
    }
    scene.wait_ms(300);
    let counted = scene.world.metrics.service(0);
    assert_eq!(counted.connections_closed, u64::from(CONNECTIONS) - 1, "{counted:?}");
    assert!(counted.replied >= all + u64::from(FIRST), "the first one was answered");
}

/// Adds the time that it takes to a clock.
struct Slow(Arc<AtomicU64>);

impl Function for Slow {
    fn decide(&mut self, _: Direction, _: &mut Messages) -> Result<(), Failure> {
        self.0.fetch_add(1_000_000_000, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn functions_do_not_pay_for_the_time_before_there_was_a_limit() {
    let mut script = script(Framing::LengthU16);
    script.service().tenant = "slow".into();
    let mut scene = script.play();
    let clock = Arc::<AtomicU64>::default();
    let reads = clock.clone();
    scene.world.workers[0].set_clock(move || reads.load(Ordering::Relaxed));
    let slow = Slow(clock.clone());
    scene.world.set_functions(0, 0, vec![(Box::new(slow), OnFailure::Closed)]);
    scene.run(1);
    scene.ask(request(0));
    scene.run(20);
    assert_eq!((scene.replied(), clock.load(Ordering::Relaxed)), (1, 2_000_000_000));
    let tenant = Tenant { messages_per_s: 1_000_000, ..Tenant::new("slow") };
    scene.world.tenants().set(&[tenant], |_| true);
    scene.run(5);
    assert_eq!(scene.world.tenants().named("slow").used().function_ns, 0);
    scene.ask(request(1));
    scene.run(20);
    assert_eq!(scene.world.tenants().named("slow").used().function_ns, 2_000_000_000);
}
