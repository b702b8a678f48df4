//! The copy agent of blocks on host cores: commands go through the rings to a thread, as in a runtime.

mod common;

use std::sync::mpsc;
use std::time::Duration;

use accel::copy::{
    Copier, CopyAgent, CopyFailed, CopyThread, DirectCommands, HOST_ADDRESS, HostCopier,
};
use common::{Engine, Shape};
use engine::commands::address_map::TranslateError;
use engine::commands::{
    AddressCopy, COMMANDS_IN_FLIGHT, Command, Commands, Completion, Outcome, Refused, SubmitError,
};
use mqueue::abi::ring_kind;
use mqueue::command::{BufferRange, Copy, Direction};
use mqueue::memory::{Memory, Ordering};
use mqueue::{MappedMemory, Region};

const STAGING_BYTES: u64 = 1024;
const BUFFER_BYTES: usize = 4096;

const COPY: Copy = Copy {
    direction: Direction::ToBuffer,
    staging_offset: 0,
    buffer: 0,
    buffer_offset: 0,
    bytes: 64,
};

fn engine() -> Engine {
    Engine::new(&Shape { staging_bytes: STAGING_BYTES, ..Shape::default() })
}

fn agent(memory: &MappedMemory, copier: impl Copier + 'static) -> CopyAgent {
    CopyAgent::join(memory, Box::new(copier)).unwrap().expect("the region has command rings")
}

fn host(memory: &MappedMemory) -> HostCopier {
    HostCopier::new(memory.clone(), BUFFER_BYTES)
}

fn polled(commands: &mut impl Commands, now_ns: u64) -> Vec<Outcome> {
    let mut done: Vec<Completion> = Vec::new();
    commands.poll(now_ns, &mut done, 100);
    done.into_iter().map(|done| done.outcome).collect()
}

#[test]
fn commands_are_carried_out_by_a_thread() {
    let mut engine = engine();
    let thread = CopyThread::start(vec![agent(&engine.memory, host(&engine.memory))]).unwrap();
    engine.copies_work(BUFFER_BYTES as u64);
    drop(thread);
    // The agent is gone: the deadline ends the command.
    engine.commands.submit(0, &Command::Copy(COPY), 5).unwrap();
    assert_eq!(polled(&mut engine.commands, 4), []);
    assert_eq!(polled(&mut engine.commands, 5), [Outcome::Timeout]);
}

#[test]
fn a_region_without_command_rings_has_no_agent() {
    let engine = Engine::new(&Shape::default());
    let agent = CopyAgent::join(&engine.memory, Box::new(host(&engine.memory)));
    assert!(agent.unwrap().is_none());
}

#[test]
fn an_accelerator_in_this_process_is_commanded_directly() {
    let engine = engine();
    let staging = (engine.staging, STAGING_BYTES);
    let mut commands = DirectCommands::new(host(&engine.memory), staging);
    engine.memory.copy_in(engine.staging, &[7; 64]);
    for (copy, outcome) in [
        (COPY, Outcome::Done),
        (Copy { direction: Direction::FromBuffer, staging_offset: 64, ..COPY }, Outcome::Done),
        (Copy { buffer: 1, ..COPY }, Outcome::Range),
        (Copy { staging_offset: STAGING_BYTES, ..COPY }, Outcome::Range),
        (Copy { bytes: u64::MAX, ..COPY }, Outcome::Range),
    ] {
        commands.submit(0, &Command::Copy(copy), 0).unwrap();
        assert_eq!(polled(&mut commands, 0), [outcome]);
    }
    let mut back = [0; 64];
    engine.memory.copy_out(engine.staging + 64, &mut back);
    assert_eq!(back, [7; 64]);
    let at = |address| {
        let direction = Direction::ToBuffer;
        Command::CopyAt(AddressCopy { direction, staging_offset: 0, address, bytes: 64 })
    };
    let unknown = SubmitError::Refused(Refused::Address(TranslateError::Unknown));
    assert_eq!(commands.submit(0, &at(HOST_ADDRESS), 0), Err(unknown), "it was not described");
    for (command, outcome) in [
        (Command::Describe(1), Outcome::Range),
        (Command::Describe(0), Outcome::Done),
        (at(HOST_ADDRESS + BUFFER_BYTES as u64 - 64), Outcome::Done),
    ] {
        commands.submit(0, &command, 0).unwrap();
        assert_eq!(polled(&mut commands, 0), [outcome]);
    }
    let beyond = SubmitError::Refused(Refused::Address(TranslateError::BeyondEnd));
    let last = HOST_ADDRESS + BUFFER_BYTES as u64 - 8;
    assert_eq!(commands.submit(0, &at(last), 0), Err(beyond));
    assert_eq!(commands.submit(1, &Command::Copy(COPY), 0), Err(SubmitError::Unusable));
    for _ in 0..COMMANDS_IN_FLIGHT {
        commands.submit(0, &Command::Copy(COPY), 0).unwrap();
    }
    assert_eq!(commands.submit(0, &Command::Copy(COPY), 0), Err(SubmitError::Full));
}

/// How a copier fails; it must not be asked for a second copy.
#[derive(PartialEq, Eq)]
enum Fails {
    ToBegin,
    Later,
    ToEnd,
}

struct Broken {
    fails: Fails,
    begun: u32,
}

impl Copier for Broken {
    fn buffer(&self, _: u32) -> Option<BufferRange> {
        Some(BufferRange { address: 4096, bytes: BUFFER_BYTES as u64 })
    }
    fn begin(&mut self, _: &Copy, _: u64) -> Result<(), CopyFailed> {
        self.begun += 1;
        assert_eq!(self.begun, 1, "it has failed");
        if self.fails == Fails::ToBegin { Err(CopyFailed) } else { Ok(()) }
    }
    fn is_done(&mut self) -> Result<bool, CopyFailed> {
        if self.fails == Fails::Later { Err(CopyFailed) } else { Ok(false) }
    }
}

/// A copy that does not end, or fails, produces a status, and later copies are not started.
#[test]
fn a_copier_that_fails_or_hangs_gives_a_status() {
    for (fails, ends) in [(Fails::Later, true), (Fails::ToEnd, false)] {
        let mut engine = engine();
        let mut agent = agent(&engine.memory, Broken { fails, begun: 0 });
        for _ in 0..2 {
            engine.commands.submit(0, &Command::Copy(COPY), u64::MAX).unwrap();
        }
        assert!(agent.step(0));
        let minute = 60_000_000_000;
        if !ends {
            assert!(!agent.step(1_000_000), "it is in progress");
        }
        assert!(agent.step(minute) && agent.step(minute) && !agent.step(minute));
        assert_eq!(polled(&mut engine.commands, 0), [Outcome::Failed; 2]);
    }
}

/// A command with wrong numbers is refused, which is no failure of the copier; one that it cannot begin is.
#[test]
fn a_copier_that_cannot_begin_a_copy_gets_no_other() {
    let mut engine = engine();
    let mut agent = agent(&engine.memory, Broken { fails: Fails::ToBegin, begun: 0 });
    for copy in [Copy { buffer_offset: u64::MAX, ..COPY }, COPY, COPY] {
        engine.commands.submit(0, &Command::Copy(copy), u64::MAX).unwrap();
        assert!(agent.step(0));
    }
    let outcomes = [Outcome::Range, Outcome::Failed, Outcome::Failed];
    assert_eq!(polled(&mut engine.commands, 0), outcomes);
}

/// Hangs in `begin` until the other end of the channel is dropped.
struct Hangs(mpsc::Sender<()>, mpsc::Receiver<()>);

impl Copier for Hangs {
    fn buffer(&self, _: u32) -> Option<BufferRange> {
        Some(BufferRange { address: 4096, bytes: BUFFER_BYTES as u64 })
    }
    fn begin(&mut self, _: &Copy, _: u64) -> Result<(), CopyFailed> {
        self.0.send(()).unwrap();
        self.1.recv().map_err(|_| CopyFailed)
    }
    fn is_done(&mut self) -> Result<bool, CopyFailed> {
        Ok(true)
    }
}

#[test]
fn a_thread_that_hangs_in_a_copy_is_abandoned() {
    let mut engine = engine();
    let ((begun, begins), (release, released)) = (mpsc::channel(), mpsc::channel());
    let hangs = agent(&engine.memory, Hangs(begun, released));
    let thread = CopyThread::start(vec![hangs]).unwrap();
    engine.commands.submit(0, &Command::Copy(COPY), u64::MAX).unwrap();
    begins.recv().unwrap();
    assert!(!thread.stop(Duration::from_millis(20)));
    // It ends after all when its copy does: then its copier is dropped.
    drop(release);
    assert!(begins.recv().is_err());
    let idle = CopyThread::start(vec![agent(&engine.memory, host(&engine.memory))]).unwrap();
    assert!(idle.stop(Duration::from_secs(60)));
}

/// The agent never waits for an engine that ignores its limits or writes garbage, and touches only its rings, the staging and the buffer.
#[test]
fn an_engine_that_writes_nonsense_is_not_waited_for() {
    for seed in 1..300u64 {
        let engine = engine();
        let mut agent = agent(&engine.memory, host(&engine.memory));
        let region = Region::join(engine.memory.clone()).unwrap();
        let rings = region.entries().iter();
        let rings: Vec<_> = rings
            .filter(|ring| matches!(ring.kind, ring_kind::COMMANDS | ring_kind::COMPLETIONS))
            .collect();
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let outside = |memory: &MappedMemory| -> Vec<u64> {
            let own = |at: &u64| rings.iter().all(|r| !(r.offset..r.offset + r.bytes).contains(at));
            let all = (0..memory.len_bytes()).step_by(8).filter(own);
            all.map(|at| memory.load(at, Ordering::Relaxed)).collect()
        };
        let before = outside(&engine.memory);
        for _ in 0..200 {
            let ring = rings[next(2) as usize];
            let at = ring.offset + 8 * next(ring.bytes / 8);
            let old = engine.memory.load(at, Ordering::Relaxed);
            let new = match next(5) {
                0 => old.wrapping_add(1),
                1 => old ^ 1 << next(64),
                2 => next(4096),
                3 => u64::MAX - next(9),
                _ => 1 << 32 | 32,
            };
            engine.memory.store(at, new, Ordering::Relaxed);
            // Every step ends.
            let _ = (agent.step(0), agent.step(u64::MAX));
        }
        assert!(outside(&engine.memory) == before, "seed {seed}");
    }
}
