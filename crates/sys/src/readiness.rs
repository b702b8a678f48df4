//! Waiting until descriptors are ready, and wake-ups from one thread or process to another.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use libc::c_int;

use crate::os::{check, own};

/// Maximum number of events of one [`Readiness::wait`].
const EVENTS_MAX: usize = 64;
/// The event of [`Readiness::wake`]; keys of sockets are smaller.
const WAKE: u64 = u64::MAX;

/// For which readiness a socket is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something has arrived, or the stream has ended.
    Receive,
    /// There is room to send.
    Send,
}

/// An epoll set that several threads wait on. Each [`Self::arm`] gives at most one event, to one thread.
#[derive(Debug)]
pub struct Readiness {
    epoll: OwnedFd,
    wake_fd: WakeFd,
}

/// Readable while [`Readiness::wait`] would return at once.
impl AsFd for Readiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Readiness {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let epoll = own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        let readiness = Self { epoll, wake_fd: WakeFd::new()? };
        // Edge-triggered and never read: every wake-up is one edge, for one thread.
        let events = libc::EPOLLIN | libc::EPOLLET;
        readiness.control(libc::EPOLL_CTL_ADD, readiness.wake_fd.as_fd(), events, WAKE)?;
        Ok(readiness)
    }

    /// Wakes one thread that waits, or else the next one that does.
    pub fn wake(&self) {
        self.wake_fd.wake();
    }

    /// Watches a socket for one event with this key.
    pub fn arm(&self, socket: BorrowedFd<'_>, key: u64, interest: Interest) -> io::Result<()> {
        let events = libc::EPOLLONESHOT
            | match interest {
                Interest::Receive => libc::EPOLLIN | libc::EPOLLRDHUP,
                Interest::Send => libc::EPOLLOUT,
            };
        match self.control(libc::EPOLL_CTL_MOD, socket, events, key) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                self.control(libc::EPOLL_CTL_ADD, socket, events, key)
            }
            done => done,
        }
    }

    /// Watches a socket no more. Closing it is not enough while another process holds it.
    pub fn forget(&self, socket: BorrowedFd<'_>) {
        // Fails only for a socket that was never armed.
        let _ = self.control(libc::EPOLL_CTL_DEL, socket, 0, 0);
    }

    /// Waits until a watched socket is ready, [`Self::wake`] is called or `timeout` has passed; adds the keys of ready sockets
    /// to `ready`. A signal may end the wait early.
    pub fn wait(&self, ready: &mut Vec<u64>, timeout: Option<Duration>) {
        let mut events = [MaybeUninit::<libc::epoll_event>::uninit(); EVENTS_MAX];
        // Rounded up: a wait that ends before its time would be repeated at once.
        let timeout = timeout.map_or(-1, |timeout| {
            c_int::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
        });
        // SAFETY: room for EVENTS_MAX events.
        let count = unsafe {
            let room = events.as_mut_ptr().cast();
            libc::epoll_wait(self.epoll.as_raw_fd(), room, EVENTS_MAX as c_int, timeout)
        };
        for event in events.iter().take(usize::try_from(count).unwrap_or(0)) {
            // SAFETY: the host kernel wrote the first `count` events.
            let key = unsafe { event.assume_init() }.u64;
            if key != WAKE {
                ready.push(key);
            }
        }
    }

    fn control(
        &self,
        operation: c_int,
        descriptor: BorrowedFd<'_>,
        events: c_int,
        key: u64,
    ) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: key };
        // SAFETY: `event` outlives the call.
        check(unsafe {
            let pointer = ptr::from_mut(&mut event);
            libc::epoll_ctl(self.epoll.as_raw_fd(), operation, descriptor.as_raw_fd(), pointer)
        })
        .map(drop)
    }
}

/// A descriptor on which one process wakes another: an eventfd, or the far end of a [`WakeSender`].
///
/// All holders of an eventfd share its open file description: one of them could make it blocking and fill
/// it, so that the next write blocks. A process therefore writes to an eventfd only if it trusts all holders.
#[derive(Debug)]
pub struct WakeFd(OwnedFd);

impl WakeFd {
    /// A new eventfd with no wake-up pending.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(Self)
    }

    /// A descriptor received from another process.
    pub fn received(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// An eventfd of a program, if it is one that never blocks. Its holders can change that later: a wake-up of a full counter would wait then.
    pub fn counting(descriptor: OwnedFd) -> Result<Self, OwnedFd> {
        if is_counter(descriptor.as_fd()) { Ok(Self(descriptor)) } else { Err(descriptor) }
    }

    /// Wakes the current waiter, or the next one.
    pub fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // Fails only if the counter is full, and then a wake-up is pending anyway.
        // SAFETY: `one` is 8 readable bytes.
        let _ = unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Clears pending wake-ups.
    pub fn clear(&self) {
        // Larger than the default buffer of a socket pair, which holds one byte per wake-up; an eventfd reads 8 bytes.
        // Leftover bytes only cause a spurious wake-up.
        let mut pending = [0u8; 512];
        // Fails if none was pending.
        // SAFETY: pointer and length describe `pending`.
        let _ =
            unsafe { libc::read(self.0.as_raw_fd(), pending.as_mut_ptr().cast(), pending.len()) };
    }
}

/// Whether it is an eventfd with `EFD_NONBLOCK` that can be written.
pub fn is_counter(descriptor: BorrowedFd<'_>) -> bool {
    let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let is_eventfd =
        std::fs::read_link(link).is_ok_and(|kind| kind.as_os_str() == "anon_inode:[eventfd]");
    // SAFETY: no pointers.
    let flags = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFL) };
    is_eventfd
        && flags >= 0
        && flags & libc::O_NONBLOCK != 0
        && flags & libc::O_ACCMODE == libc::O_RDWR
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Wakes an untrusted process without ever blocking: one end of a socket pair, whose other end the process
/// gets. The ends do not share an open file description, so the process cannot make a wake-up block.
#[derive(Debug)]
pub struct WakeSender(OwnedFd);

impl WakeSender {
    /// The sending end, and the descriptor for the other process.
    pub fn new() -> io::Result<(Self, WakeFd)> {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let mut ends: [c_int; 2] = [-1; 2];
        // SAFETY: the host kernel writes two descriptors to `ends`.
        check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })?;
        // SAFETY: both are new and owned by nothing else.
        let [ours, theirs] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        Ok((Self(ours), WakeFd(theirs)))
    }

    /// Wakes the current waiter, or the next one.
    pub fn wake(&self) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // Fails if the buffer is full, and then a wake-up is pending anyway, or if the other end is closed.
        // SAFETY: one readable byte.
        let _ = unsafe { libc::send(self.0.as_raw_fd(), [1u8].as_ptr().cast(), 1, flags) };
    }
}

/// Waits until one of `files` is readable, closed by its peer or failed, at most `timeout` (no limit if
/// `None`); returns which ones. A signal may end the wait early.
pub fn wait_readable(files: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Vec<bool> {
    poll(files.iter().map(|file| (*file, Interest::Receive)), timeout)
}

/// As [`wait_readable`], with what is waited for on each file.
pub fn wait_ready(files: &[(BorrowedFd<'_>, Interest)], timeout: Option<Duration>) -> Vec<bool> {
    poll(files.iter().copied(), timeout)
}

fn poll<'a>(
    files: impl Iterator<Item = (BorrowedFd<'a>, Interest)>,
    timeout: Option<Duration>,
) -> Vec<bool> {
    let pollfd = |(file, interest): (BorrowedFd<'_>, Interest)| libc::pollfd {
        fd: file.as_raw_fd(),
        events: match interest {
            Interest::Receive => libc::POLLIN,
            Interest::Send => libc::POLLOUT,
        },
        revents: 0,
    };
    let mut list: Vec<libc::pollfd> = files.map(pollfd).collect();
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as _,
    });
    let pointer = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: pointer and length describe `list`; the timeout outlives the call; no signal mask.
    let ready =
        unsafe { libc::ppoll(list.as_mut_ptr(), list.len() as libc::nfds_t, pointer, ptr::null()) };
    list.iter().map(|entry| ready > 0 && entry.revents != 0).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn an_armed_socket_gives_one_event() {
        let readiness = Readiness::new().unwrap();
        let (one, other) = UnixStream::pair().unwrap();
        readiness.arm(one.as_fd(), 7, Interest::Send).unwrap();
        let mut ready = Vec::new();
        readiness.wait(&mut ready, None);
        assert_eq!(ready, [7]);
        readiness.wait(&mut ready, Some(Duration::ZERO));
        assert_eq!(ready, [7]);
        readiness.arm(one.as_fd(), 8, Interest::Receive).unwrap();
        drop(other);
        readiness.wait(&mut ready, None);
        assert_eq!(ready, [7, 8]);
        readiness.forget(one.as_fd());
        readiness.wake();
        readiness.wait(&mut ready, None);
        assert_eq!(ready, [7, 8]);
    }
}
