//! The time of a request by stage, with a clock that advances within a turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::scene::{MS, Scene, request, script};
use engine::stages::{ObservationSnapshot, Stage};
use engine::topology::Replies;
use sim::behaviour::Behaviour;
use sim::shared::lock;
use wire::DropReason;
use wire::framing::Framing;

/// Nanoseconds between two reads of the clock.
const LOOK_NS: u64 = 100;

/// Gives the worker of a scene a clock that is never behind its turns.
fn run_clock(scene: &mut Scene) {
    let (net, last_ns) = (scene.world.net.clone(), Arc::new(AtomicU64::new(0)));
    scene.world.workers[0].set_clock(move || {
        let now_ns = lock(&net).now_ns().max(last_ns.load(Ordering::Relaxed)) + LOOK_NS;
        last_ns.store(now_ns, Ordering::Relaxed);
        now_ns
    });
}

fn observed(scene: &Scene) -> ObservationSnapshot {
    scene.world.metrics.observed(0)
}

fn sum_ns(observed: &ObservationSnapshot, stage: Stage) -> u64 {
    observed.stages[stage as usize].sum_ns
}

#[test]
fn a_block_inside_the_turn_has_the_time_of_its_drive() {
    let mut scene = script(Framing::Raw).play();
    run_clock(&mut scene);
    for sequence in 0..10 {
        scene.ask(request(sequence));
        scene.wait_ms(1);
    }
    let seen = observed(&scene);
    // Clock: published, driven (the next poll finds the slot released), reply seen, sent.
    assert_eq!((seen.total.count(), seen.total.sum_ns), (10, 10 * 4 * LOOK_NS));
    assert_eq!(sum_ns(&seen, Stage::Receive), 10 * LOOK_NS);
    assert_eq!(sum_ns(&seen, Stage::Queue), 0);
    assert_eq!(sum_ns(&seen, Stage::Accelerator), 10 * 2 * LOOK_NS);
    assert_eq!(sum_ns(&seen, Stage::Send), 10 * LOOK_NS);
}

#[test]
fn a_slow_accelerator_and_a_queue_in_front_of_it_are_distinguished() {
    let mut script = script(Framing::Raw);
    *script.behaviour() =
        Behaviour { remote: true, delay_ns: (20 * MS, 20 * MS), ..Behaviour::default() };
    let mut scene = script.play();
    run_clock(&mut scene);
    scene.ask(request(0));
    scene.wait_ms(1);
    // The block is busy: this one waits, and is not sampled, because the first one is.
    scene.ask(request(1));
    scene.wait_ms(21);
    assert_eq!((scene.replied(), observed(&scene).total.count()), (1, 1));
    assert!(sum_ns(&observed(&scene), Stage::Queue) < MS);
    // This one is sampled, and waits for the second.
    scene.ask(request(2));
    scene.wait_ms(60);
    let seen = observed(&scene);
    assert_eq!((scene.replied(), seen.total.count()), (3, 2));
    let times = [Stage::Queue, Stage::Accelerator].map(|stage| sum_ns(&seen, stage) / MS);
    assert!((16..=20).contains(&times[0]) && (39..=41).contains(&times[1]), "{seen:?}");
}

#[test]
fn a_service_without_replies_has_two_stages() {
    let mut script = script(Framing::Raw);
    script.service().replies = Replies::None;
    let mut scene = script.play();
    run_clock(&mut scene);
    for sequence in 0..10 {
        scene.ask(request(sequence));
        scene.wait_ms(1);
    }
    let counts = observed(&scene).stages.map(|stage| stage.count());
    assert_eq!(counts, [10, 10, 0, 0]);
}

#[test]
fn requests_that_end_without_a_reply_are_no_longer_sampled() {
    let mut script = script(Framing::Raw);
    script.service().request_timeout_ms = 5;
    *script.behaviour() = Behaviour { swallow: 1000, ..Behaviour::default() };
    let mut scene = script.play();
    scene.ask(request(0));
    scene.wait_ms(10);
    assert_eq!(scene.dropped(DropReason::RequestTimeout), 1);
    assert_eq!(observed(&scene).total.count(), 0);
    lock(&scene.world.models[0]).set_behaviour(Behaviour::default());
    scene.ask(request(1));
    scene.wait_ms(10);
    assert_eq!(observed(&scene).total.count(), 1);
}

#[test]
fn the_depth_of_queues_is_observed() {
    let mut script = script(Framing::Raw);
    script.service().mqueues = 2;
    *script.behaviour() = Behaviour { stall_after: Some(0), ..Behaviour::default() };
    let mut scene = script.play();
    scene.ask_times(5, request(0));
    scene.wait_ms(2);
    let seen = observed(&scene);
    assert_eq!((seen.mqueues, seen.depth, seen.depth_max), (2, 5, 3));
}
