//! The regular run of the simulator: many seeds, each a test case, none of which may fail.

use sim::campaign::{Campaign, Totals};
use sim::case::Case;
use sim::run::simulate;

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

/// In this run the first datagram after the faults arrives at a worker without mqueues of its own, which sheds it
/// unless it knows about the restarted ones.
#[test]
fn a_probe_waits_until_workers_know_the_others_credit() {
    let held = simulate(9711, false);
    assert!(held.is_ok(), "{held:?}");
}

/// In these runs clients leave requests behind for which a block still has to ask a backend that owes earlier answers;
/// new requests meanwhile find no credit, or no time. In the second run the block is between two of them
/// at the time of the check.
#[test]
fn a_probe_waits_until_requests_of_old_clients_have_ended() {
    for seed in [86_126, 176_886] {
        let held = simulate(seed, false);
        assert!(held.is_ok(), "{held:?}");
    }
}

/// In these runs a service without replies is replaced while its kernel has unread messages; messages dropped
/// then were counted a second time when the kernel read them.
#[test]
fn what_is_given_up_unread_is_counted_once() {
    for seed in [617_215, 263_166, 380_139] {
        let held = simulate(seed, false);
        assert!(held.is_ok(), "{held:?}");
    }
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
