//! Groups over shared memory: sums, sleeps, ends of ranks, and hostile neighbours.

mod processes;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use collective::frame::{Hello, Purpose, WELCOME_BYTES, Welcome};
use collective::{CollectiveError, Element, Group, Loss};
use processes::{LIMIT, check_operations, ints, member};
use sys::local::LocalSocket;
use sys::memory::{RegionOptions, SharedMemory};
use sys::readiness::wait_readable;

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("serval-collective-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn join(folder: &Path, ranks: usize, rank: usize) -> Result<Group, CollectiveError> {
    Group::connect_shared(&member(ranks, rank), folder, LIMIT)
}

/// Runs `work` as every rank of a group; the results in the order of ranks.
fn group<R: Send>(ranks: usize, work: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let folder = Folder::new();
    thread::scope(|scope| {
        let (folder, work) = (&folder.0, &work);
        let start = |rank| scope.spawn(move || work(join(folder, ranks, rank).unwrap()));
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn sums_broadcasts_and_barriers() {
    // The longest data is more than a ring holds.
    check_operations(&[2, 3, 5, 8], &[0, 1, 9, 300_001], |ranks, work| group(ranks, work));
}

/// Pauses that are longer than a spin: each side sleeps and is woken, for bytes and for room.
#[test]
fn ranks_that_sleep_are_woken() {
    group(2, |mut group| {
        let mut data = ints(400_000, 1);
        for round in 0..8 {
            if round % 2 == group.rank() {
                thread::sleep(Duration::from_millis(2));
            }
            group.broadcast(round % 2, &mut data).unwrap();
            group.all_reduce(Element::Int32, &mut data[..64]).unwrap();
        }
    });
}

#[test]
fn failures_have_a_reason_on_all_ranks() {
    let errors = group(3, |mut group| {
        let count = if group.rank() == 1 { 3 } else { 4 };
        group.all_reduce(Element::Float32, &mut ints(count, 1)).unwrap_err()
    });
    let named = |error: &CollectiveError| {
        matches!(error, CollectiveError::Disagreement { what: "count", .. })
    };
    assert!(errors.iter().any(named), "{errors:?}");
    let known = |error: &CollectiveError| named(error) || error.name() == "group_ended";
    assert!(errors.iter().all(known), "{errors:?}");

    let results = group(3, |mut group| {
        // A rank may hear that another one has seen the end before it has seen its own barrier complete.
        let met = group.barrier();
        if group.rank() == 2 {
            met.unwrap();
            return None;
        }
        let sum = || group.all_reduce(Element::Int32, &mut ints(9, 1)).unwrap_err();
        Some(met.err().unwrap_or_else(sum))
    });
    let left = |error: &CollectiveError| {
        *error == CollectiveError::Lost(Loss::Left(2)) || error.name() == "group_ended"
    };
    assert!(results[..2].iter().flatten().all(left), "{results:?}");

    let folder = Folder::new();
    thread::scope(|scope| {
        let other = scope.spawn(|| join(&folder.0, 2, 1).unwrap());
        let mut group = join(&folder.0, 2, 0).unwrap();
        let _silent = other.join().unwrap();
        let limit = Duration::from_millis(30);
        group.set_limit(limit);
        let error = group.barrier().unwrap_err();
        assert_eq!(error, CollectiveError::Deadline { rank: 1, sequence: 1, limit });
    });
}

/// The length of a pair's region: two rings of 512 KiB and their words.
const REGION_BYTES: usize = 2 * ((512 << 10) + 512);

/// Says hello as rank 1 of 2 with a region of this length; the answer.
fn hello(
    folder: &Path,
    region: Option<usize>,
) -> (LocalSocket, Option<SharedMemory>, Option<Welcome>) {
    let at = folder.join("rank-0");
    let socket = loop {
        match LocalSocket::connect(&at) {
            Ok(socket) => break socket,
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    };
    let create = |len| SharedMemory::create("test", len, &RegionOptions::default()).unwrap();
    let region = region.map(create);
    let hello =
        Hello { purpose: Purpose::Control, ranks: 2, from: 1, to: 0, name: "test".to_owned() };
    let files: Vec<_> = region.iter().map(SharedMemory::fd).collect();
    socket.send(&hello.encode(), &files).unwrap();
    wait_readable(&[std::os::fd::AsFd::as_fd(&socket)], Some(LIMIT));
    let mut answer = [0; WELCOME_BYTES];
    let got = socket.receive(&mut answer);
    let welcome = matches!(got, Ok(Some(WELCOME_BYTES))).then(|| Welcome::decode(&answer));
    (socket, region, welcome.flatten())
}

#[test]
fn a_hostile_neighbour_is_refused_or_ends_only_its_group() {
    for (tail, status) in [(false, "protocol"), (true, "rank_lost")] {
        let folder = Folder::new();
        thread::scope(|scope| {
            let victim = scope.spawn(|| {
                let mut group = join(&folder.0, 2, 0)?;
                group.all_reduce(Element::Int32, &mut ints(4, 1))
            });
            // Regions of another length, and none.
            for region in [None, Some(4096), Some(64 << 20)] {
                assert_eq!(hello(&folder.0, region).2, None, "{region:?}");
            }
            let (socket, region, welcome) = hello(&folder.0, Some(REGION_BYTES));
            assert_eq!(welcome, Some(Welcome::Accepted));
            if tail {
                // The neighbour's process ends.
                drop(socket);
                assert_eq!(victim.join().unwrap().unwrap_err().name(), status);
            } else {
                // An impossible head in the ring from rank 1 to rank 0.
                let memory = mqueue::MappedMemory::new(std::sync::Arc::new(region.unwrap()));
                let head = (512 << 10) + 512;
                let order = mqueue::memory::Ordering::Release;
                mqueue::Memory::store(&memory, head, u64::MAX - 7, order);
                assert_eq!(victim.join().unwrap().unwrap_err().name(), status);
            }
        });
    }
}
