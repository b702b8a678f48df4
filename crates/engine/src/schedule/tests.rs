use proptest::prelude::*;

use super::*;
use crate::base::topology::{Tenant, WEIGHT_MAX};

/// A schedule with the tenants of an engine.
struct Play {
    schedule: Schedule,
    tenants: Tenants,
    now_ns: u64,
}

impl Play {
    fn new() -> Self {
        Self { schedule: Schedule::new(0), tenants: Tenants::new(1), now_ns: 0 }
    }

    fn place(&mut self, service: usize, tenant: &str) {
        self.schedule.place(service, self.tenants.named(tenant));
    }

    fn begin_turn(&mut self) {
        self.schedule.begin_turn(self.now_ns, &self.tenants, &mut [], &|_| 0);
    }

    fn allows(&mut self, service: u16, from: Kind) -> bool {
        self.schedule.allows(service, from)
    }

    fn charge(&mut self, service: usize, from: Kind, messages: u64, bytes: u64) {
        self.schedule.charge(service, from, Taken { messages, bytes, function_ns: 0 });
    }
}

/// A service that always has full batches of this many messages, of this many bytes each, at some endpoints.
#[derive(Clone, Copy, Debug)]
struct Flood {
    messages: u64,
    bytes: u64,
    from: Kind,
}

fn flood() -> impl Strategy<Value = Flood> {
    let from = [Kind::Udp, Kind::Tcp, Kind::Shm, Kind::Peer, Kind::Sockets, Kind::Servers];
    let from = prop::sample::select(from.to_vec());
    (64u64..1024, 0u64..1500, from).prop_map(|(messages, bytes, from)| Flood {
        messages,
        bytes: messages * bytes,
        from,
    })
}

fn cost(flood: &Flood) -> i64 {
    flood.messages as i64 * MESSAGE_COST + flood.bytes as i64
}

/// Runs turns in which every flooding service has requests; returns what each was charged.
fn play(schedule: &mut Play, floods: &[Flood], turns: usize) -> Vec<i64> {
    let mut charged = vec![0; floods.len()];
    for _ in 0..turns {
        schedule.begin_turn();
        let mut served = false;
        for (service, flood) in floods.iter().enumerate() {
            if schedule.allows(service as u16, flood.from) {
                schedule.charge(service, flood.from, flood.messages, flood.bytes);
                charged[service] += cost(flood);
                served = true;
            }
        }
        assert!(served, "a turn with work takes some of it");
    }
    charged
}

proptest! {
    #[test]
    fn two_flooding_tenants_get_equal_parts(one in flood(), other in flood()) {
        let mut schedule = Play::new();
        schedule.place(0, "one");
        schedule.place(1, "other");
        let charged = play(&mut schedule, &[one, other], 2000);
        let apart = (charged[0] - charged[1]).abs();
        // The cost of one batch, and one round.
        prop_assert!(apart <= QUANTUM + cost(&one) + cost(&other), "{charged:?}");
    }

    #[test]
    fn a_tenant_with_many_services_gets_one_part(floods in prop::collection::vec(flood(), 2..8)) {
        let mut schedule = Play::new();
        for service in 0..floods.len() {
            schedule.place(service, if service == 0 { "one" } else { "many" });
        }
        let charged = play(&mut schedule, &floods, 3000);
        let many: i64 = charged[1..].iter().sum();
        let batches: i64 = floods.iter().map(cost).sum();
        prop_assert!(many - charged[0] <= 2 * QUANTUM + batches, "{charged:?}");
    }

    /// Idle sockets are reported as ready by a worker that does not sleep: their tenant asks in every turn. It
    /// may also ask for requests that find no credit.
    #[test]
    fn a_tenant_with_little_load_delays_no_other(noisy in flood(), little in 0u64..u64::from(SHARED_BATCH)) {
        let mut schedule = Play::new();
        schedule.place(0, "noisy");
        schedule.place(1, "little");
        schedule.place(2, "idle");
        let mut skipped = 0;
        for turn in 0..2000 {
            schedule.begin_turn();
            let allowed = schedule.allows(0, noisy.from);
            if allowed {
                schedule.charge(0, noisy.from, noisy.messages, noisy.bytes);
            }
            prop_assert!(schedule.allows(1, Kind::Udp), "in turn {}", turn);
            schedule.charge(1, Kind::Udp, little, 0);
            prop_assert!(schedule.allows(2, Kind::Udp), "in turn {}", turn);
            skipped = if allowed { 0 } else { skipped + 1 };
            prop_assert!(skipped <= 1, "in turn {}", turn);
        }
    }

    #[test]
    fn a_tenant_with_little_load_is_served_at_once(noisy in flood(), every in 1usize..50) {
        let mut schedule = Play::new();
        schedule.place(0, "noisy");
        schedule.place(1, "quiet");
        for turn in 0..2000 {
            schedule.begin_turn();
            if schedule.allows(0, noisy.from) {
                schedule.charge(0, noisy.from, noisy.messages, noisy.bytes);
            }
            if turn % every == 0 {
                // Less than a round's cost in the time in which the other one uses up several rounds.
                prop_assert!(schedule.allows(1, Kind::Udp), "in turn {turn}");
                schedule.charge(1, Kind::Udp, 1, 64);
            }
        }
    }
}

#[test]
fn a_single_tenant_is_never_limited_before_and_after_a_second_one() {
    let mut schedule = Play::new();
    schedule.place(0, "default");
    schedule.place(1, "default");
    let flood = |schedule: &mut Play| {
        schedule.begin_turn();
        let allowed = [0, 1].map(|service| schedule.allows(service, Kind::Udp));
        (0..2).for_each(|service| schedule.charge(service, Kind::Udp, 1 << 20, 1 << 30));
        allowed
    };
    for _ in 0..10 {
        assert_eq!(flood(&mut schedule), [true, true]);
    }
    schedule.place(2, "other");
    flood(&mut schedule);
    assert!(schedule.allows(2, Kind::Udp));
    schedule.charge(2, Kind::Udp, 64, 0);
    schedule.begin_turn();
    assert!(schedule.allows(2, Kind::Udp));
    assert!(!schedule.allows(0, Kind::Udp), "it has no deficit left, and the other has");
    // The other one asks again and takes nothing: it has no backlog.
    schedule.begin_turn();
    assert!(schedule.allows(2, Kind::Udp));
    schedule.begin_turn();
    assert!(schedule.allows(0, Kind::Udp), "an idle tenant delays no other");
    schedule.schedule.remove(2);
    for _ in 0..10 {
        assert_eq!(flood(&mut schedule), [true, true]);
    }
}

fn tenant(name: &str, weight: u32) -> Tenant {
    Tenant { weight, ..Tenant::new(name) }
}

proptest! {
    /// In proportion to their weights, whatever they send.
    #[test]
    fn flooding_tenants_get_parts_of_their_weights(
        floods in prop::collection::vec((flood(), 1u32..=WEIGHT_MAX), 2..7)
    ) {
        let mut play = Play::new();
        let names: Vec<String> = (0..floods.len()).map(|n| format!("t{n}")).collect();
        let of = |(name, (_, weight)): (&String, &(Flood, u32))| tenant(name, *weight);
        play.tenants.set(&names.iter().zip(&floods).map(of).collect::<Vec<_>>(), |_| false);
        for (service, name) in names.iter().enumerate() {
            play.place(service, name);
        }
        let (floods, weights): (Vec<_>, Vec<_>) = floods.into_iter().unzip();
        let charged = super::tests::play(&mut play, &floods, 4000);
        // What each got for its weight; it may be wrong by a batch and a round of each.
        let biggest = floods.iter().map(cost).max().unwrap_or(0) + 2 * QUANTUM;
        let parts: Vec<f64> =
            charged.iter().zip(&weights).map(|(got, w)| *got as f64 / f64::from(*w)).collect();
        let slack: Vec<f64> = weights.iter().map(|w| biggest as f64 / f64::from(*w)).collect();
        for (one, more) in parts.iter().zip(&slack) {
            for (other, also) in parts.iter().zip(&slack) {
                prop_assert!((one - other).abs() <= more + also, "{charged:?} for {weights:?}");
            }
        }
    }

    /// The list of those to look at has each at most once, and what is not in it is as it was at first.
    #[test]
    fn only_charged_tenants_are_looked_at(
        steps in prop::collection::vec((0usize..40, 0u64..2000, any::<bool>()), 1..400)
    ) {
        let mut play = Play::new();
        (0..40).for_each(|service| play.place(service, &format!("t{}", service % 13)));
        for (service, messages, turns) in steps {
            if turns {
                play.begin_turn();
            }
            if play.allows(service as u16, Kind::Udp) {
                play.charge(service, Kind::Udp, messages, 0);
            }
            let Schedule { tenants, services, entries, .. } = &play.schedule;
            let endpoints = entries.iter().flatten().map(|entry| &entry.endpoints);
            for sharers in std::iter::once(tenants).chain(services).chain(endpoints) {
                let mut listed = sharers.charged.clone();
                listed.sort_unstable();
                listed.dedup();
                prop_assert_eq!(listed.len(), sharers.charged.len());
                for (number, sharer) in (0..).zip(&sharers.all) {
                    prop_assert_eq!(sharer.listed, listed.contains(&number));
                    prop_assert!(sharer.listed || sharer.left == sharer.quantum);
                }
            }
            let unsettled = |sharers: &Sharers| !sharers.is_settled();
            for (number, sharers) in (0..).zip(services) {
                let listed = play.schedule.services_to_settle.contains(&number);
                prop_assert_eq!(unsettled(sharers), listed);
            }
            for (number, entry) in (0..).zip(entries.iter().flatten()) {
                let listed = play.schedule.entries_to_settle.contains(&number);
                prop_assert_eq!(unsettled(&entry.endpoints), listed);
            }
        }
    }
}

/// A tenant of the smallest weight takes as much as it likes while others are idle.
#[test]
fn a_small_weight_costs_nothing_while_others_are_idle() {
    let mut play = Play::new();
    play.tenants.set(&[tenant("small", 1), tenant("large", WEIGHT_MAX)], |_| false);
    play.place(0, "small");
    play.place(1, "large");
    for messages in [1, 63, 64, 5000] {
        for turn in 0..100 {
            play.begin_turn();
            assert!(play.allows(0, Kind::Udp), "{messages} messages in turn {turn}");
            play.charge(0, Kind::Udp, messages, 0);
            assert!(play.allows(1, Kind::Udp));
        }
    }
}

#[test]
fn functions_pay_for_their_time() {
    let mut play = Play::new();
    play.place(0, "slow");
    play.place(1, "fast");
    let mut got = [0, 0];
    for _ in 0..1000 {
        play.begin_turn();
        for (service, function_ns) in [(0, 100_000), (1, 0)] {
            if play.allows(service, Kind::Udp) {
                let taken = Taken { messages: 64, bytes: 0, function_ns };
                play.schedule.charge(service.into(), Kind::Udp, taken);
                got[usize::from(service)] += 64;
            }
        }
    }
    // 64 messages cost 4096, and with 100 us of functions 54096.
    assert!(got[1] > 8 * got[0] && got[1] == 64_000, "{got:?}");
    assert_eq!(play.tenants.named("slow").used().function_ns, got[0] / 64 * 100_000);
    assert!(play.tenants.named("slow").used().skipped > 0);
    assert_eq!(play.tenants.named("fast").used().skipped, 0);
}

/// What another tenant gets, in bytes, until one with this function time and this many charges of it may take something again.
fn paid_for(charges: usize, function_ns: u64) -> i64 {
    let mut play = Play::new();
    play.place(0, "slow");
    play.place(1, "busy");
    let taken = Taken { messages: 64, bytes: 0, function_ns };
    play.begin_turn();
    (0..charges).for_each(|_| play.schedule.charge(0, Kind::Udp, taken));
    play.charge(1, Kind::Udp, 64, 0);
    let mut bytes = 0;
    loop {
        play.begin_turn();
        if play.allows(0, Kind::Udp) {
            return bytes;
        }
        assert!(play.allows(1, Kind::Udp));
        // As much as fits into a turn.
        play.charge(1, Kind::Udp, 64, 1 << 20);
        bytes += cost(&Flood { messages: 64, bytes: 1 << 20, from: Kind::Udp });
    }
}

#[test]
fn a_debt_has_a_limit() {
    let paid = paid_for(1000, 10_000_000);
    assert!(paid <= DEBT_MAX + (4 << 20), "10 s would be much more: {paid}");
    assert!(paid > DEBT_MAX / 2, "{paid}");
}

/// Otherwise a tenant whose calls take a second each has the worker nearly for itself.
#[test]
fn a_call_that_takes_long_is_paid_for_as_a_whole() {
    for function_ns in [30_000_000, 1_000_000_000] {
        let cost = (function_ns / FUNCTION_NS) as i64;
        let paid = paid_for(1, function_ns);
        assert!(cost > DEBT_MAX && paid > cost - (4 << 20), "{paid} of {cost}");
    }
}

#[test]
fn idle_tenants_with_limits_are_not_asked_about() {
    let mut play = Play::new();
    let limited = |n| Tenant { messages_per_s: 10, burst_ms: 0, ..tenant(&format!("t{n}"), 1) };
    let all: Vec<_> = (0..100).map(limited).collect();
    play.tenants.set(&all, |_| false);
    (0..100).for_each(|n| play.place(n, &format!("t{n}")));
    (0..2).for_each(|_| play.begin_turn());
    assert!(play.schedule.watched.is_empty());
    assert!(play.allows(7, Kind::Tcp));
    play.charge(7, Kind::Tcp, 3, 0);
    for ms in 1..=400 {
        play.now_ns = ms * 1_000_000;
        play.begin_turn();
        let over = ms < 300;
        assert_eq!(play.schedule.watched.contains(&7), over, "after {ms} ms");
        assert_eq!(play.schedule.wake_at(&[], &|_| 0), if over { 300_000_000 } else { u64::MAX });
    }
    // Another worker uses it up meanwhile.
    play.tenants.named("t7").charge_rates(play.now_ns, 30, 0);
    assert!(!play.allows(7, Kind::Udp) && play.schedule.watched == [7]);
    assert!(play.allows(7, Kind::Peer), "they were counted when they were received");
}

/// Messages in flight may wait for bytes of kernels' connections, and of servers: those wait for rates only.
#[test]
fn what_messages_in_flight_wait_for_does_not_wait_for_them() {
    let mut play = Play::new();
    let limited = Tenant { outstanding: 2, ..tenant("limited", 1) };
    play.tenants.set(std::slice::from_ref(&limited), |_| false);
    play.place(0, "limited");
    let state = play.tenants.named("limited");
    (0..2).for_each(|_| state.count_handed_out(0));
    play.begin_turn();
    for (from, goes_on) in
        [(Kind::Tcp, false), (Kind::Shm, false), (Kind::Sockets, true), (Kind::Servers, true)]
    {
        assert_eq!(
            (play.allows(0, from), play.schedule.is_shed(0, from)),
            (goes_on, !goes_on),
            "{from:?}"
        );
    }
    let slow = Tenant { messages_per_s: 10, burst_ms: 0, ..limited };
    play.tenants.set(&[slow], |_| false);
    play.begin_turn();
    play.charge(0, Kind::Tcp, 1, 0);
    play.begin_turn();
    assert!(play.allows(0, Kind::Servers), "what is not taken is not charged");
    play.charge(0, Kind::Servers, 1, 0);
    play.begin_turn();
    for from in [Kind::Tcp, Kind::Sockets, Kind::Servers] {
        assert!(!play.allows(0, from) && play.schedule.is_shed(0, from), "{from:?}");
    }
}

#[test]
fn a_change_of_weights_counts_from_the_next_turn() {
    let mut play = Play::new();
    play.place(0, "one");
    play.place(1, "other");
    let flood = Flood { messages: 100, bytes: 0, from: Kind::Udp };
    let floods = [flood, flood];
    let before = super::tests::play(&mut play, &floods, 4000);
    assert!((before[0] - before[1]).abs() <= 2 * QUANTUM, "{before:?}");
    play.tenants.set(&[tenant("one", 3)], |_| true);
    let after = super::tests::play(&mut play, &floods, 4000);
    assert!((after[0] - 3 * after[1]).abs() <= 8 * QUANTUM, "{after:?}");
}
