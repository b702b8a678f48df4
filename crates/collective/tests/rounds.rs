//! Groups that are formed and end in every way, again and again: no descriptor, thread or memory is left.

mod processes;

use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use collective::{CollectiveError, Element, Group};
use processes::{LIMIT, ints, listeners, member};

/// How a round ends.
const ENDS: [&str; 5] = ["in order", "a rank leaves", "they disagree", "a deadline", "a stranger"];

/// What a process has.
#[derive(Debug)]
struct Books {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    /// Bytes of memory that is not shared.
    private: usize,
}

fn books() -> Books {
    let count = |folder: &str| fs::read_dir(folder).unwrap().count();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    Books {
        descriptors: count("/proc/self/fd"),
        threads: count("/proc/self/task"),
        mappings: fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
        private: kib << 10,
    }
}

/// Set when the last rank of a group has ended, in whatever way.
#[derive(Default)]
struct Ended(AtomicBool);

/// Sets it when this is dropped.
struct SetAtEnd<'a>(Option<&'a Ended>);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        if let Some(Ended(flag)) = self.0 {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

impl Ended {
    fn at_the_end_of(&self, rank: usize) -> SetAtEnd<'_> {
        SetAtEnd((rank == 1).then_some(self))
    }

    fn wait(&self) {
        while !self.0.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_micros(50));
        }
    }
}

/// What a rank does in a round.
fn work(mut group: Group, end: &str, other: &Ended) -> Result<(), CollectiveError> {
    let is_first = group.rank() == 0;
    let mut data = ints(1000, 1);
    group.all_reduce(Element::Int32, &mut data)?;
    match end {
        "a rank leaves" if is_first => Ok(()),
        "a rank leaves" => group.barrier(),
        "they disagree" if is_first => group.all_reduce(Element::Int32, &mut data),
        "they disagree" => group.all_reduce(Element::Int32, &mut data[..40]),
        "a deadline" => {
            // The first rank does not call before the other one has given up.
            if is_first {
                other.wait();
                // What the other one has sent may be enough for one call.
                group.barrier()?;
            } else {
                group.set_limit(Duration::from_nanos(1));
            }
            group.barrier()
        }
        _ => group.barrier(),
    }
}

/// One group of two ranks over TCP and one over shared memory.
fn round(folder: &Path, end: &str) {
    let (listeners, addresses) = listeners(2);
    let mut stranger = (end == "a stranger").then(|| TcpStream::connect(addresses[0]).unwrap());
    if let Some(stranger) = &mut stranger {
        stranger.write_all(&[0xff; 100]).unwrap();
    }
    let ended: [Ended; 2] = Default::default();
    let over_tcp = |rank: usize| {
        let _ended = ended[0].at_the_end_of(rank);
        let group = Group::connect(&member(2, rank), &listeners[rank], &addresses, LIMIT);
        work(group.unwrap(), end, &ended[0])
    };
    let over_shm = |rank: usize| {
        let _ended = ended[1].at_the_end_of(rank);
        let group = Group::connect_shared(&member(2, rank), folder, LIMIT);
        work(group.unwrap(), end, &ended[1])
    };
    let results = thread::scope(|scope| {
        let tcp = [0, 1].map(|rank| scope.spawn(move || over_tcp(rank)));
        let tcp = tcp.map(|rank| rank.join().unwrap());
        let shm = [0, 1].map(|rank| scope.spawn(move || over_shm(rank)));
        [tcp, shm.map(|rank| rank.join().unwrap())]
    });
    for [first, second] in results {
        match end {
            "in order" | "a stranger" => assert_eq!((first, second), (Ok(()), Ok(()))),
            "a rank leaves" => {
                // A connection that is reset may be seen before the message that says why.
                let reason = second.unwrap_err().name();
                assert!(first.is_ok() && ["rank_left", "rank_lost"].contains(&reason), "{reason}");
            }
            "they disagree" => {
                let reasons = [first, second].map(|ended| ended.unwrap_err().name());
                assert!(reasons.contains(&"disagreement"), "{reasons:?}");
            }
            "a deadline" => {
                assert_eq!(second.unwrap_err().name(), "deadline");
                // As above.
                let reason = first.unwrap_err().name();
                assert!(["group_ended", "rank_lost"].contains(&reason), "{reason}");
            }
            other => panic!("{other}"),
        }
    }
}

fn rounds(count: usize) {
    /// The books are those of the process.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let name = format!("serval-rounds-{}-{count}", std::process::id());
    let folder: PathBuf = std::env::temp_dir().join(name);
    fs::create_dir(&folder).unwrap();
    let warm_up = 20 * ENDS.len();
    let mut before = None;
    for at in 0..warm_up + count {
        if at == warm_up {
            before = Some(books());
        }
        round(&folder, ENDS[at % ENDS.len()]);
    }
    let (before, after) = (before.unwrap(), books());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "sockets are left in the folder");
    fs::remove_dir(&folder).unwrap();
    assert!(after.descriptors <= before.descriptors, "{before:?}, then {after:?}");
    assert!(after.threads <= before.threads, "{before:?}, then {after:?}");
    // The allocator may keep some: not more after ten thousand rounds than after a hundred.
    assert!(after.mappings <= before.mappings + 8, "{before:?}, then {after:?}");
    assert!(after.private <= before.private + (512 << 10), "{before:?}, then {after:?}");
}

#[test]
fn groups_come_and_go_and_leave_nothing() {
    rounds(200);
}

// xtask: ci
#[test]
fn ten_thousand_groups_come_and_go_and_leave_nothing() {
    rounds(10_000);
}
