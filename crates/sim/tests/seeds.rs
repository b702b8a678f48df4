//! The simulator's everyday run: many seeds, none fails; a seed is a test case.

use sim::run::{Violation, simulate};

fn hold(seeds: impl Iterator<Item = u64>) {
    for seed in seeds {
        if let Err(violation) = simulate(seed, false) {
            panic!("{violation}\nreproduce: cargo run -p serval-sim -- --seed {seed} --trace");
        }
    }
}

#[test]
fn the_first_fifty_seeds_hold() {
    hold(1..=50);
}

#[test]
fn the_second_fifty_seeds_hold() {
    hold(51..=100);
}

#[test]
fn a_seed_reproduces_a_run_exactly() {
    let mut hashes = Vec::new();
    for seed in [3, 7, 11] {
        let run = || -> Result<_, Violation> { simulate(seed, false) };
        let (first, second) = (run().unwrap(), run().unwrap());
        assert_eq!(first, second, "seed {seed}");
        assert!(first.events > 1000, "seed {seed} does next to nothing");
        hashes.push(first.trace_hash);
    }
    hashes.dedup();
    assert_eq!(hashes.len(), 3, "different seeds are different runs");
}
