//! Helpers shared by the bindings: return codes to `io::Result`, and socket options.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::c_int;

/// `-1` becomes the thread's last OS error.
pub(crate) fn check(ret: c_int) -> io::Result<c_int> {
    if ret == -1 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

/// The same for calls that return a size.
pub(crate) fn check_size(ret: isize) -> io::Result<usize> {
    usize::try_from(ret).map_err(|_| io::Error::last_os_error())
}

/// Takes ownership of a descriptor a call has just returned.
pub(crate) fn own(ret: c_int) -> io::Result<OwnedFd> {
    let raw = check(ret)?;
    // SAFETY: the host kernel returned `raw` as a new descriptor with no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Whether a call was merely interrupted by a signal.
pub(crate) fn interrupted(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINTR)
}

/// Sets a socket option whose C type is `T`.
pub(crate) fn set_option<T: Copy>(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: T,
) -> io::Result<()> {
    let pointer = (&raw const value).cast::<libc::c_void>();
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `pointer` and `len` describe `value`, which outlives the call.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, pointer, len) })?;
    Ok(())
}

/// Reads an integer socket option.
pub(crate) fn int_option(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    let pointer = (&raw mut value).cast::<libc::c_void>();
    // SAFETY: `pointer` and `len` describe `value`, which outlives the call.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, pointer, &raw mut len) })?;
    Ok(value)
}

/// A C structure with every byte zero.
///
/// # Safety
/// All-zero bytes must be a valid `T`.
pub(crate) unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller's promise.
    unsafe { MaybeUninit::<T>::zeroed().assume_init() }
}
