//! SIGTERM, SIGINT and SIGHUP as values that the main thread waits for.
//!
//! Built on the signal-hook crate rather than `signalfd`: that needs the signals blocked in every
//! thread, and a blocked mask is inherited by the accelerator processes the engine launches, which
//! would then ignore SIGTERM.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

/// A request to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM: drain and exit.
    Terminate,
    /// SIGINT (Ctrl-C): drain and exit.
    Interrupt,
    /// SIGHUP: reload the configuration.
    Reload,
}

/// Signals received since [`Signals::install`], each kind at most once until it is taken.
#[derive(Debug)]
pub struct Signals {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
    taken: VecDeque<Signal>,
}

impl Signals {
    /// Replaces the default action of the three signals, which is to end the process.
    pub fn install() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        let signals = [SIGTERM, SIGINT, SIGHUP];
        let delivery = SignalDelivery::with_pipe(read, write, SignalOnly, signals)?;
        Ok(Self { delivery, taken: VecDeque::new() })
    }

    /// The next signal, or `None` if none arrived within `timeout` (no limit if `None`).
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Option<Signal>> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.taken.extend(self.delivery.pending().filter_map(from_number));
            if let Some(signal) = self.taken.pop_front() {
                return Ok(Some(signal));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            wait_readable(self.as_fd(), left)?;
        }
    }
}

impl AsFd for Signals {
    /// Becomes readable when a signal arrives; then call [`Signals::wait`] with a timeout of zero
    /// until it returns `None`.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.delivery.get_read().as_fd()
    }
}

/// Makes writes beyond the file size limit (`ulimit -f`) fail with EFBIG instead of ending the process by
/// SIGXFSZ. (The Rust runtime already ignores SIGPIPE.) Child processes inherit this, which is intended: a kernel in a
/// runtime or a trial, or a compiler, that writes too long a file gets the error and is not killed.
pub fn ignore_file_size_signal() {
    // SAFETY: no pointers; SIG_IGN is a valid disposition for this signal, so the call cannot fail.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn from_number(number: i32) -> Option<Signal> {
    match number {
        SIGTERM => Some(Signal::Terminate),
        SIGINT => Some(Signal::Interrupt),
        SIGHUP => Some(Signal::Reload),
        _ => None,
    }
}

fn wait_readable(file: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<()> {
    let mut entry = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // Rounded up, so that a remainder below one millisecond does not spin.
    let ms = timeout.map_or(-1, |left| left.as_nanos().div_ceil(1_000_000).min(1 << 30) as i32);
    // SAFETY: `entry` is one pollfd and outlives the call.
    match crate::os::check(unsafe { libc::poll(&raw mut entry, 1, ms) }) {
        Err(error) if !crate::os::interrupted(&error) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_arrive_in_place_of_their_default_action() {
        let mut signals = Signals::install().unwrap();
        assert_eq!(signals.wait(Some(Duration::ZERO)).unwrap(), None);
        for (number, signal) in
            [(SIGTERM, Signal::Terminate), (SIGINT, Signal::Interrupt), (SIGHUP, Signal::Reload)]
        {
            // SAFETY: no pointers; the signal has a handler.
            assert_eq!(unsafe { libc::raise(number) }, 0);
            assert_eq!(signals.wait(None).unwrap(), Some(signal));
        }
        assert_eq!(signals.wait(Some(Duration::from_millis(1))).unwrap(), None);
    }
}
