//! Network namespaces: sockets that are opened in another one than the process's.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread;

use crate::os::check;

/// Calls `open` in the network namespace of this file, on a thread that exists for this call. Sockets that it opens stay in that namespace,
/// also if threads of others use them.
pub fn within<T: Send>(namespace: &Path, open: impl FnOnce() -> T + Send) -> io::Result<T> {
    // A FIFO is not waited for.
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(namespace)?;
    let enter = || {
        // SAFETY: no pointers. The thread ends after the call, and no other one changes its namespace.
        check(unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) })?;
        Ok(open())
    };
    thread::scope(|scope| {
        let started =
            thread::Builder::new().name("serval-netns".into()).spawn_scoped(scope, enter)?;
        started.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
