//! The transport over shared memory, for ranks of one machine: a region for each pair of ranks with a ring of bytes in each
//! direction (`mqueue::ByteWriter`), and a Unix socket for notices, over which the region is passed.
//!
//! A rank that waits spins, and then sleeps on its sockets: the other side of a ring sends a notice if it sees that this one sleeps.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mqueue::{BrokenRing, ByteReader, ByteWriter, MappedMemory, byte_ring_bytes};
use sys::local::{LocalListener, LocalSocket};
use sys::memory::{RegionOptions, SharedMemory};
use sys::readiness::Interest;
use sys::readiness::wait_ready;

use crate::control::Controls;
use crate::error::{CollectiveError, Loss};
use crate::frame::{Notice, Purpose};
use crate::group::Group;
use crate::mesh::{Formed, FormingLimits, form};
use crate::network::{Member, Network};
use crate::transport::{SLEEP_MAX, Spin, Transport, Wants};

/// Bytes that each direction of a pair holds.
const CAPACITY: u64 = 512 << 10;
/// After a transfer of more bytes than this a rank that sleeps is woken at once. To look whether one sleeps, a core waits until its
/// stores are visible; at the end of a short call they are.
const WAKE_BYTES: usize = 4 << 10;
/// Bytes of one ring, and of a pair's region.
const RING_BYTES: u64 = byte_ring_bytes(CAPACITY);
const REGION_BYTES: usize = (2 * RING_BYTES) as usize;

/// Rings with all other ranks.
pub struct Shared {
    /// By rank; `None` for this one.
    pairs: Vec<Option<Pair>>,
    controls: Controls<LocalSocket>,
    spin: Spin,
    /// Ranks to which this one has written, and from which it has read, since it looked whether they sleep; a bit each.
    written: u8,
    read: u8,
}

struct Pair {
    writer: ByteWriter<MappedMemory>,
    reader: ByteReader<MappedMemory>,
}

impl Group {
    /// Forms a group of processes of this machine over shared memory: returns when this rank is connected with all others, or fails
    /// after `limit`.
    ///
    /// `folder` exists, and is the same on all ranks: each listens at a socket `rank-NUMBER` in it until the group is formed. Only
    /// processes of the same user and of root can join.
    pub fn connect_shared(
        member: &Member,
        folder: &Path,
        limit: Duration,
    ) -> Result<Self, CollectiveError> {
        Self::connect_shared_unless(member, folder, limit, &mut || false)
    }

    /// [`Self::connect_shared`], which ends early if `interrupt` returns true. It is asked about twenty times a second.
    pub fn connect_shared_unless(
        member: &Member,
        folder: &Path,
        limit: Duration,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, CollectiveError> {
        member.check()?;
        let own = folder.join(format!("rank-{}", member.rank));
        let listener =
            LocalListener::bind(&own).map_err(|error| member.failed(error.to_string()))?;
        let patience = FormingLimits::new(member, limit, interrupt);
        let Formed { joined: pairs, closed } =
            form(member, &Folder { folder, listener }, patience)?;
        let (mut controls, mut rings) = (Vec::new(), Vec::new());
        for (peer, pair) in pairs.into_iter().enumerate() {
            let joined = pair.and_then(|mut joined| joined.pop());
            let (socket, region) = joined.unzip();
            let pair = region.flatten().map(|region| Pair::new(region, member.rank < peer));
            controls.push(socket);
            rings.push(pair);
        }
        let transport = Shared {
            pairs: rings,
            controls: Controls::new(controls.into_iter()),
            spin: Spin::of(member.ranks),
            written: 0,
            read: 0,
        };
        Ok(Self::new(member.ranks, member.rank, transport).with_closed(closed))
    }
}

impl Pair {
    fn new(region: SharedMemory, is_lower: bool) -> Self {
        let memory = MappedMemory::new(Arc::new(region));
        // The lower rank writes to the first ring.
        let (write_at, read_at) = if is_lower { (0, RING_BYTES) } else { (RING_BYTES, 0) };
        Self {
            writer: ByteWriter::new(memory.clone(), write_at, CAPACITY),
            reader: ByteReader::new(memory, read_at, CAPACITY),
        }
    }
}

/// Where the ranks listen.
struct Folder<'a> {
    folder: &'a Path,
    listener: LocalListener,
}

impl Network for Folder<'_> {
    type Socket = LocalSocket;
    const PURPOSES: &'static [Purpose] = &[Purpose::Control];
    const HAS_REGION: bool = true;

    fn place(&self, peer: usize) -> String {
        self.folder.join(format!("rank-{peer}")).display().to_string()
    }

    fn dial(&self, peer: usize, _: Duration) -> io::Result<LocalSocket> {
        LocalSocket::connect(&self.folder.join(format!("rank-{peer}")))
    }

    fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn accept(&self) -> io::Result<LocalSocket> {
        let socket = self.listener.accept()?.ok_or(io::ErrorKind::WouldBlock)?;
        let own = sys::process::user();
        match socket.peer() {
            Ok(peer) if peer.user == own || peer.user == 0 => Ok(socket),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    fn region(&self) -> io::Result<Option<SharedMemory>> {
        let options = RegionOptions::default();
        let region = SharedMemory::create("serval:collective", REGION_BYTES, &options);
        region.map(Some).map_err(io::Error::other)
    }

    fn introduce(
        &self,
        socket: &LocalSocket,
        hello: &[u8],
        region: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        socket.send(hello, region.as_slice())
    }

    fn receive(
        &self,
        socket: &LocalSocket,
        into: &mut [u8],
    ) -> io::Result<(usize, Option<SharedMemory>)> {
        let received = socket.receive_descriptors(into)?;
        let (len, mut descriptors) = received.ok_or(io::ErrorKind::WouldBlock)?;
        let Some(descriptor) = descriptors.pop() else { return Ok((len, None)) };
        // A page more than the length, because a region has whole pages.
        let region = SharedMemory::open(descriptor, REGION_BYTES + (64 << 10), false);
        let region = region.map_err(io::Error::other)?;
        if region.len_bytes() < REGION_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok((len, Some(region)))
    }
}

impl Shared {
    fn pair(&mut self, peer: usize) -> &mut Pair {
        self.pairs[peer].as_mut().expect("no schedule has transfers of a rank with itself")
    }

    /// Says whether this side sleeps, in the rings for which it waits.
    fn set_sleeping(&mut self, wants: &Wants, sleeps: bool) {
        for (rank, pair) in self.pairs.iter_mut().enumerate() {
            let Some(pair) = pair else { continue };
            if wants.receive & 1 << rank != 0 {
                pair.reader.set_sleeping(sleeps);
            }
            if wants.send & 1 << rank != 0 {
                pair.writer.set_sleeping(sleeps);
            }
        }
    }
}

/// Whether something can be moved; fails if what is waited for cannot come. `has_left`: whether a rank has left in order.
fn can_move(
    pairs: &mut [Option<Pair>],
    wants: &Wants,
    has_left: impl Fn(usize) -> bool,
) -> Result<bool, Loss> {
    for (rank, pair) in pairs.iter_mut().enumerate() {
        let Some(pair) = pair else { continue };
        let broken = |_: BrokenRing| Loss::Garbage(rank);
        let (receives, sends) = (wants.receive & 1 << rank != 0, wants.send & 1 << rank != 0);
        if receives && pair.reader.available().map_err(broken)? > 0
            || sends && pair.writer.room().map_err(broken)? > 0
        {
            return Ok(true);
        }
        if (receives || sends) && has_left(rank) {
            return Err(Loss::Left(rank));
        }
    }
    Ok(false)
}

impl Transport for Shared {
    fn send(&mut self, peer: usize, head: &[u8], body: &[u8], _: bool) -> Result<usize, Loss> {
        let pair = self.pair(peer);
        let sent = pair.writer.write(head, body).map_err(|_| Loss::Garbage(peer))?;
        if sent > 0 {
            self.written |= 1 << peer;
            if sent > WAKE_BYTES {
                self.wake();
            }
        }
        Ok(sent)
    }

    fn receive(&mut self, peer: usize, into: &mut [u8], _: bool) -> Result<usize, Loss> {
        let pair = self.pair(peer);
        let got = pair.reader.read(into).map_err(|_| Loss::Garbage(peer))?;
        if got > 0 {
            self.read |= 1 << peer;
            if got > WAKE_BYTES {
                self.wake();
            }
        }
        Ok(got)
    }

    fn wake(&mut self) {
        let (written, read) = (std::mem::take(&mut self.written), std::mem::take(&mut self.read));
        for (rank, pair) in self.pairs.iter().enumerate() {
            let Some(pair) = pair else { continue };
            let reader_sleeps = written & 1 << rank != 0 && pair.writer.reader_sleeps();
            let writer_sleeps = read & 1 << rank != 0 && pair.reader.writer_sleeps();
            if reader_sleeps || writer_sleeps {
                self.controls.notify(rank, Notice::Wake);
            }
        }
    }

    fn looks(&self) -> u32 {
        self.spin.looks()
    }

    fn wait(&mut self, wants: &Wants, waited: Duration, limit: Duration) -> Result<(), Loss> {
        if waited.is_zero() {
            self.controls.begin_wait();
        }
        if self.spin.spins(waited) {
            return Ok(());
        }
        self.set_sleeping(wants, true);
        let movable = can_move(&mut self.pairs, wants, |rank| self.controls.has_left(rank));
        if matches!(movable, Ok(false)) {
            let files: Vec<_> =
                self.controls.files().map(|file| (file, Interest::Receive)).collect();
            wait_ready(&files, Some(limit.min(SLEEP_MAX)));
        }
        self.set_sleeping(wants, false);
        movable?;
        let Self { pairs, controls, .. } = self;
        controls.read_unless(|| can_move(pairs, wants, |_| false))
    }

    fn end(&mut self, notice: Notice) {
        self.controls.notify_all(notice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank 0, and what rank 1 has of the pair.
    fn ends() -> (Shared, ByteReader<MappedMemory>, LocalSocket, ByteWriter<MappedMemory>) {
        let options = RegionOptions::default();
        let region = SharedMemory::create("test", REGION_BYTES, &options).unwrap();
        let (own, other) = LocalSocket::pair().unwrap();
        let memory = MappedMemory::new(Arc::new(region));
        let writer = ByteWriter::new(memory.clone(), 0, CAPACITY);
        let reader = ByteReader::new(memory.clone(), RING_BYTES, CAPACITY);
        let shared = Shared {
            pairs: vec![None, Some(Pair { writer, reader })],
            controls: Controls::new([None, Some(own)].into_iter()),
            spin: Spin::of(2),
            written: 0,
            read: 0,
        };
        let theirs = ByteWriter::new(memory.clone(), RING_BYTES, CAPACITY);
        (shared, ByteReader::new(memory, 0, CAPACITY), other, theirs)
    }

    #[test]
    fn what_a_rank_sent_before_its_end_is_received() {
        let (mut shared, _, socket, mut writer) = ends();
        let wants = Wants { receive: 1 << 1, send: 0 };
        writer.write(&[1; 8], &[]).unwrap();
        drop(socket);
        let wait = |shared: &mut Shared, millis| {
            shared.wait(&wants, Duration::from_millis(millis), Duration::from_secs(60))
        };
        assert_eq!(wait(&mut shared, 0), Ok(()), "it spins");
        assert_eq!(wait(&mut shared, 1), Ok(()));
        // A call that cannot take the bytes does not wait without end.
        assert_eq!(wait(&mut shared, 2), Err(Loss::Ended(1)));
        // They move, and the next wait begins.
        assert_eq!(wait(&mut shared, 0), Ok(()));
        assert_eq!(wait(&mut shared, 1), Ok(()));
        assert_eq!(shared.receive(1, &mut [0; 16], false), Ok(8));
        assert_eq!(wait(&mut shared, 0), Ok(()));
        assert_eq!(wait(&mut shared, 1), Err(Loss::Ended(1)));
    }

    #[test]
    fn a_rank_that_sleeps_is_woken_at_the_end_of_a_call_or_after_many_bytes() {
        let (mut shared, reader, socket, _) = ends();
        let woken = || {
            let got = socket.receive(&mut [0; 64]).unwrap();
            got.is_some()
        };
        shared.send(1, &[1; 8], &[], false).unwrap();
        shared.wake();
        assert!(!woken(), "it does not sleep");
        reader.set_sleeping(true);
        shared.send(1, &[1; 8], &[], false).unwrap();
        assert!(!woken(), "the call goes on");
        shared.wake();
        assert!(woken());
        shared.wake();
        assert!(!woken(), "nothing has moved since");
        shared.send(1, &[1; 8], &[1; WAKE_BYTES], false).unwrap();
        assert!(woken());
    }
}
