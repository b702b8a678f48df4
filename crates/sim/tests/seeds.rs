//! The regular run of the simulator: many seeds, each a test case, none of which may fail.

use sim::campaign::{Campaign, Totals};
use sim::case::Case;
use sim::plan::Plan;
use sim::run::{simulate, simulate_plan};
use wire::nic::Transport;

fn hold(first: u64, seeds: u64, jobs: usize) -> Totals {
    let totals = Campaign { jobs, ..Campaign::new(first, seeds) }.run(|_| {});
    if let Some(violation) = totals.violations.values().next() {
        let small = violation.shrink();
        panic!("{violation}\nsmallest: {small}\nreproduce: serval-sim {} --trace", small.case);
    }
    totals
}

/// Also checks that every fault and every drop reason occurs. `SERVAL_SEEDS` is the number of seeds.
#[test]
fn seeds_hold_and_reach_everything() {
    let count = std::env::var("SERVAL_SEEDS").map_or(300, |text| text.parse().expect("a number"));
    let totals = hold(1, count, 2);
    assert_eq!(totals.unreached(), [""; 0]);
}

/// The first datagram after the faults may arrive at a worker without mqueues of its own, which sheds it unless it knows
/// about the restarted ones. One plan in 60 of these shows it. No seed is pinned: when plans change, the situation moves to
/// other seeds, and a pinned one would pass without it.
#[test]
fn a_probe_waits_until_workers_know_the_others_credit() {
    let plan = |seed| {
        let mut plan = Plan::of_seed(seed);
        plan.turns = plan.turns.min(300);
        plan
    };
    let fits = |plan: &Plan| {
        let topology = &plan.setup.topology;
        let mut restarted = topology.services.iter().zip(&plan.sound).filter(|(_, sound)| !**sound);
        let without_mqueues = restarted.any(|(service, _)| {
            (service.mqueues as usize) < topology.engine.workers
                && service.listen.iter().any(|listen| listen.transport == Transport::Udp)
        });
        plan.probe && plan.drain_at.is_none() && without_mqueues
    };
    let needs_the_wait = |seed: &u64| {
        let hasty = Plan { hasty_probe: true, ..plan(*seed) };
        simulate_plan(hasty, false, |nic| nic).is_err()
    };
    let seeds = (1..).filter(|seed| fits(&plan(*seed)));
    let seed = seeds.take(1000).find(needs_the_wait).expect("a plan in which the wait matters");
    let held = simulate_plan(plan(seed), false, |nic| nic);
    assert!(held.is_ok(), "seed {seed}: {held:?}");
}

#[test]
fn a_seed_reproduces_a_run_exactly() {
    let mut hashes = Vec::new();
    for seed in [3, 7, 11] {
        let run = || simulate(seed, false);
        let (first, second) = (run().unwrap(), run().unwrap());
        assert_eq!(first, second, "seed {seed}");
        assert!(first.events > 1000, "seed {seed} does next to nothing");
        hashes.push(first.trace_hash);
    }
    hashes.dedup();
    assert_eq!(hashes.len(), 3, "different seeds are different runs");
}

#[test]
fn it_does_not_matter_which_thread_runs_a_seed() {
    assert_eq!(hold(500, 40, 1), hold(500, 40, 4));
}

#[test]
fn a_healed_case_has_no_faults_and_is_a_run_of_its_own() {
    let case = Case { without: sim::fault::FaultSet::default().others(), ..Case::from(7) };
    let healed = simulate(&case, false).unwrap();
    let fault_counts: u64 =
        sim::fault::Fault::ALL.iter().map(|f| healed.fault_counts.count(*f)).sum();
    assert_eq!(fault_counts, 0, "{:?}", healed.fault_counts);
    assert_ne!(healed.trace_hash, simulate(7, false).unwrap().trace_hash);
}
