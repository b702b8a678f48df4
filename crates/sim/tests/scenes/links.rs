//! Accelerators behind links, in plans of seeds: what links lose has a reason, nothing wrong arrives, and accelerators come back.

use sim::fault::Fault;
use sim::net::LinkFaults;
use sim::plan::Plan;
use sim::run::{Report, simulate, simulate_plan};
use wire::DropReason;

/// Seeds with links, and their plans.
fn plans() -> impl Iterator<Item = (u64, Plan)> {
    let plans = (1..).map(|seed| (seed, Plan::of_seed(seed)));
    plans.filter(|(_, plan)| !plan.setup.links.is_empty())
}

fn run(seed: u64, plan: Plan) -> Report {
    let ran = simulate_plan(plan, false, |nic| nic);
    ran.unwrap_or_else(|(at_ns, text)| panic!("seed {seed} at {at_ns} ns: {text}"))
}

/// What services with links lost for a reason.
fn lost(report: &Report, linked: &[(usize, usize)], reason: DropReason) -> u64 {
    let services = report.services.iter().enumerate();
    let linked = services.filter(|(service, _)| linked.iter().any(|(of, _)| of == service));
    linked.map(|(_, counted)| counted.dropped(reason)).sum()
}

/// After the faults a new request is answered at every port: the run fails otherwise.
#[test]
fn links_break_and_accelerators_come_back() {
    let (mut breaks, mut requests) = ([0; 3], 0);
    for (seed, mut plan) in plans().take(30) {
        (plan.drain_at, plan.probe) = (None, true);
        plan.faults.link = LinkFaults { cut: 3, damage: 1, silence: 1, ..plan.faults.link };
        let links = plan.setup.links.clone();
        let report = run(seed, plan);
        let faults = [Fault::LinkCut, Fault::LinkDamage, Fault::LinkSilence];
        for (sum, fault) in breaks.iter_mut().zip(faults) {
            *sum += report.fault_counts.count(fault);
        }
        requests += lost(&report, &links, DropReason::AcceleratorLost);
    }
    assert!(breaks.iter().all(|count| *count > 5) && requests > 50, "{breaks:?} {requests}");
}

/// Delays, stalls, and reads and writes of a part of what is possible do not break a link, and lose nothing.
#[test]
fn slow_links_lose_no_accelerator() {
    let mut stalls = 0;
    for (seed, mut plan) in plans().take(20) {
        plan.restarts.clear();
        let LinkFaults { delay_ns, pipe_bytes, heartbeat_ns, .. } = plan.faults.link;
        let slow = LinkFaults { delay_ns, pipe_bytes, heartbeat_ns, ..LinkFaults::default() };
        plan.faults.link = LinkFaults { short: 900, stall: 50, ..slow };
        let links = plan.setup.links.clone();
        let report = run(seed, plan);
        assert_eq!(lost(&report, &links, DropReason::AcceleratorLost), 0, "seed {seed}");
        stalls += report.fault_counts.count(Fault::LinkStall);
    }
    assert!(stalls > 50, "{stalls}");
}

/// The keys of links are random in every run; nothing else depends on them.
#[test]
fn a_seed_with_links_reproduces_a_run_exactly() {
    for (seed, _) in plans().take(5) {
        assert_eq!(simulate(seed, false), simulate(seed, false), "seed {seed}");
    }
}
