//! Readiness: one edge-triggered epoll set for streams, listeners and the waker, and sleeping.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, epoll_event};

use crate::os::{check, check_size, own};
use crate::readiness::WakeFd;

/// Maximum number of events per epoll call.
const EVENTS_MAX: usize = 256;

/// The source of an epoll event, packed into the event's 64 bits of user data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Stream(u32),
    /// A UDP stream: that it can be written is no news. Each datagram that leaves would be an edge.
    DatagramStream(u32),
    Listener(u16),
    /// A UDP port (`watched.rs`).
    Datagrams(u16),
    Waker,
    /// A wake-up from another process: it ends a sleep and carries no other information.
    WakeFd,
}

impl Source {
    fn pack(self) -> u64 {
        match self {
            Self::Stream(key) => u64::from(key),
            Self::DatagramStream(key) => 4 << 32 | u64::from(key),
            Self::Listener(port) => 1 << 32 | u64::from(port),
            Self::Datagrams(port) => 5 << 32 | u64::from(port),
            Self::Waker => 2 << 32,
            Self::WakeFd => 3 << 32,
        }
    }

    fn unpack(word: u64) -> Self {
        match word >> 32 {
            0 => Self::Stream(word as u32),
            1 => Self::Listener(word as u16),
            5 => Self::Datagrams(word as u16),
            2 => Self::Waker,
            4 => Self::DatagramStream(word as u32),
            _ => Self::WakeFd,
        }
    }
}

/// Ends the sleep of one worker's [`wire::nic::Nic::poll`] from any thread.
///
/// What the waker's thread wrote before [`Waker::wake`] is visible to the worker after the `poll`
/// that it ended. Waking a worker that is awake costs one atomic exchange.
#[derive(Clone, Debug)]
pub struct Waker {
    shared: Arc<WakerShared>,
}

#[derive(Debug)]
struct WakerShared {
    epoll: OwnedFd,
    eventfd: OwnedFd,
    /// The eventfd is signalled and the worker has not consumed it yet.
    pending: AtomicBool,
}

impl Waker {
    fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let epoll = own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: no pointers.
        let eventfd = own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        let pending = AtomicBool::new(false);
        Ok(Self { shared: Arc::new(WakerShared { epoll, eventfd, pending }) })
    }

    /// Lets another process end the worker's sleeps through `wake_fd`. Each wake-up is an edge, and the
    /// descriptor's count is never read.
    pub fn listen_to(&self, wake_fd: &WakeFd) -> io::Result<()> {
        add(&self.shared.epoll, wake_fd.as_fd(), Source::WakeFd, libc::EPOLLIN | libc::EPOLLET)
    }

    /// Removes a wake-up descriptor. Closing it is not enough while another process holds it.
    pub fn forget(&self, wake_fd: &WakeFd) {
        self.forget_file(wake_fd.as_fd());
    }

    fn forget_file(&self, file: BorrowedFd<'_>) {
        // Fails only for a descriptor that was never added.
        // SAFETY: a deletion ignores the event.
        let _ = check(unsafe {
            libc::epoll_ctl(
                self.shared.epoll.as_raw_fd(),
                libc::EPOLL_CTL_DEL,
                file.as_raw_fd(),
                ptr::null_mut(),
            )
        });
    }

    /// Ends the current sleep, or the next one if the worker is awake.
    pub fn wake(&self) {
        // An exchange, not a load: it orders what was written before it against the worker's
        // exchange in `consume`, so a wake that finds `pending` set was seen or will be.
        if self.shared.pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let one = 1u64.to_ne_bytes();
        // Fails only if the counter is full, and then the worker wakes up anyway.
        // SAFETY: `one` is 8 readable bytes.
        let _ =
            unsafe { libc::write(self.shared.eventfd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Called after waking up: the next `wake` signals again.
    fn consume(&self) {
        let mut count = [0u8; 8];
        // SAFETY: `count` is 8 writable bytes.
        let _ = check_size(unsafe {
            libc::read(self.shared.eventfd.as_raw_fd(), count.as_mut_ptr().cast(), count.len())
        });
        self.shared.pending.swap(false, Ordering::AcqRel);
    }
}

/// The epoll set and the arrays for a sleep.
pub(super) struct Poller {
    ready: Vec<epoll_event>,
    /// Holds the epoll set, to which other threads add wake-up descriptors.
    waker: Waker,
    /// The epoll set first, then the sockets polled only in a sleep.
    sleepers: Vec<libc::pollfd>,
}

impl Poller {
    pub(super) fn new() -> io::Result<Self> {
        let waker = Waker::new()?;
        let mut poller =
            Self { ready: Vec::with_capacity(EVENTS_MAX), waker, sleepers: Vec::new() };
        poller.sleepers.push(pollfd(poller.waker.shared.epoll.as_fd()));
        // Level-triggered: a wake that was not consumed must end the next sleep as well.
        let eventfd = poller.waker.shared.eventfd.as_fd();
        poller.add(eventfd, Source::Waker, libc::EPOLLIN)?;
        Ok(poller)
    }

    pub(super) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Watches `socket` until it is closed: for edges, and a UDP port for as long as it has something.
    pub(super) fn watch(&self, socket: BorrowedFd<'_>, source: Source) -> io::Result<()> {
        let interest = match source {
            Source::Stream(_) => libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET,
            Source::Datagrams(_) if mutants::on("watch_ports_for_edges") => {
                libc::EPOLLIN | libc::EPOLLET
            }
            Source::Datagrams(_) => libc::EPOLLIN,
            Source::DatagramStream(_) | Source::Listener(_) | Source::Waker | Source::WakeFd => {
                libc::EPOLLIN | libc::EPOLLET
            }
        };
        self.add(socket, source, interest)
    }

    /// Removes the entry of a socket from the epoll set.
    pub(super) fn forget(&self, socket: BorrowedFd<'_>) {
        self.waker.forget_file(socket);
    }

    /// Lets a datagram on `socket` end a sleep. Such a socket is not in the epoll set: senders pay nothing for each datagram while the
    /// worker spins.
    pub(super) fn watch_sleeping(&mut self, socket: BorrowedFd<'_>) {
        self.sleepers.push(pollfd(socket));
    }

    /// Removes the socket at this position among those of [`Self::watch_sleeping`]; the last one gets its position.
    pub(super) fn forget_sleeping(&mut self, position: usize) {
        self.sleepers.swap_remove(1 + position);
    }

    /// Makes room for this many sockets of [`Self::watch_sleeping`].
    pub(super) fn reserve_sleepers(&mut self, sockets: usize) {
        self.sleepers.reserve((1 + sockets).saturating_sub(self.sleepers.len()));
    }

    fn add(&self, file: BorrowedFd<'_>, source: Source, events: c_int) -> io::Result<()> {
        add(&self.waker.shared.epoll, file, source, events)
    }

    /// Collects ready events of the epoll set without sleeping; returns how many.
    pub(super) fn collect(&mut self) -> usize {
        self.epoll_wait(0)
    }

    /// Sleeps at most `sleep_ns`; `on_socket` is called with the position of every socket of
    /// [`Self::watch_sleeping`] that is ready. Returns how many epoll events were collected.
    pub(super) fn sleep(&mut self, sleep_ns: u64, mut on_socket: impl FnMut(usize)) -> usize {
        if self.sleepers.len() == 1 {
            return self.epoll_wait(sleep_ns);
        }
        let timeout = timespec(sleep_ns);
        // SAFETY: pointer and length describe `sleepers`; the timeout outlives the call; no signal
        // mask.
        let ready = unsafe {
            libc::ppoll(
                self.sleepers.as_mut_ptr(),
                self.sleepers.len() as libc::nfds_t,
                &raw const timeout,
                ptr::null(),
            )
        };
        if ready <= 0 {
            return 0;
        }
        for (position, sleeper) in self.sleepers[1..].iter().enumerate() {
            // Errors count as ready: receiving clears them.
            if sleeper.revents != 0 {
                on_socket(position);
            }
        }
        if self.sleepers[0].revents != 0 { self.collect() } else { 0 }
    }

    /// One of the collected events: its source and the EPOLL* bits.
    pub(super) fn event(&self, position: usize) -> (Source, c_int) {
        let event = self.ready[position];
        (Source::unpack(event.u64), event.events as c_int)
    }

    /// Acknowledges a [`Source::Waker`] event after a sleep.
    pub(super) fn consume_wake(&self) {
        self.waker.consume();
    }

    fn epoll_wait(&mut self, sleep_ns: u64) -> usize {
        let timeout = timespec(sleep_ns);
        self.ready.clear();
        let room = self.ready.spare_capacity_mut();
        // SAFETY: `room` has space for that many events; a null mask changes no signals. The plain
        // call has no nanosecond resolution but is cheaper when that is not needed.
        let count = unsafe {
            let events = room.as_mut_ptr().cast::<epoll_event>();
            let len = room.len() as c_int;
            if sleep_ns == 0 {
                libc::epoll_wait(self.waker.shared.epoll.as_raw_fd(), events, len, 0)
            } else {
                epoll_pwait2(self.waker.shared.epoll.as_raw_fd(), events, len, &timeout)
            }
        };
        // An interruption ends the sleep early, which the caller allows.
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: the host kernel wrote `count` events.
        unsafe { self.ready.set_len(count) };
        count
    }
}

/// `epoll_pwait2` (Linux 5.11), or `epoll_wait` with the time rounded up on older host kernels.
///
/// # Safety
/// `events` must have room for `len` events.
unsafe fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    len: c_int,
    timeout: &libc::timespec,
) -> c_int {
    // SAFETY: the caller's promise about `events`; `timeout` is a reference; no signal mask.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            epoll,
            events,
            len,
            ptr::from_ref(timeout),
            ptr::null::<libc::sigset_t>(),
            size_of::<u64>(),
        )
    };
    if ret != -1 || io::Error::last_os_error().raw_os_error() != Some(libc::ENOSYS) {
        return ret as c_int;
    }
    let ms =
        timeout.tv_sec.saturating_mul(1000).saturating_add((timeout.tv_nsec + 999_999) / 1_000_000);
    // SAFETY: as above.
    unsafe { libc::epoll_wait(epoll, events, len, c_int::try_from(ms).unwrap_or(c_int::MAX)) }
}

fn add(epoll: &OwnedFd, file: BorrowedFd<'_>, source: Source, events: c_int) -> io::Result<()> {
    control(epoll, libc::EPOLL_CTL_ADD, file, source, events)
}

fn control(
    epoll: &OwnedFd,
    operation: c_int,
    file: BorrowedFd<'_>,
    source: Source,
    events: c_int,
) -> io::Result<()> {
    let mut event = epoll_event { events: events as u32, u64: source.pack() };
    // SAFETY: `event` outlives the call.
    check(unsafe {
        libc::epoll_ctl(epoll.as_raw_fd(), operation, file.as_raw_fd(), &raw mut event)
    })?;
    Ok(())
}

fn pollfd(file: BorrowedFd<'_>) -> libc::pollfd {
    libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

fn timespec(ns: u64) -> libc::timespec {
    // SAFETY: integers; zeroed because some targets have padding fields.
    let mut time: libc::timespec = unsafe { crate::os::zeroed() };
    time.tv_sec = (ns / 1_000_000_000) as libc::time_t;
    time.tv_nsec = (ns % 1_000_000_000) as _;
    time
}
