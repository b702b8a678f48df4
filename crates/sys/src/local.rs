//! Communication between programs of one machine: Unix sockets that preserve message boundaries and pass
//! descriptors.
//!
//! This is the control path of shared-memory ports: a message here is a handshake, not a request. Sockets
//! are of type `SOCK_SEQPACKET`: a message arrives whole or not at all, and the connection ends when either
//! process exits.

use std::fs;
use std::io;
use std::mem::{size_of, size_of_val};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr;

use libc::{c_int, c_void};

use crate::os::{check, check_size, int_option, own, zeroed};
use crate::process::{PeerCredentials, peer_credentials, peer_groups};

/// Longest socket path in bytes: `sockaddr_un` without the terminating zero.
pub const PATH_BYTES_MAX: usize = 107;
/// Maximum number of descriptors per message.
pub const DESCRIPTORS_MAX: usize = 9;
/// Length of the accept queue.
const BACKLOG: c_int = 128;

/// Why listening at a path failed.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The path cannot name a socket.
    #[error(
        "{path:?} cannot name a socket: it has to be absolute, without NUL, and at most {PATH_BYTES_MAX} bytes long"
    )]
    Path {
        /// The path given.
        path: PathBuf,
    },
    /// Another process listens there.
    #[error("{path:?} is taken: another process listens there; stop it or choose another path")]
    Taken {
        /// The path given.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("{path:?} exists and is not a socket: choose another path, or remove it")]
    NoSocket {
        /// The path given.
        path: PathBuf,
    },
    /// Any other error of the host kernel.
    #[error("cannot listen at {path:?}: {source}")]
    Host {
        /// The path given.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// The file of a listening socket; dropping it removes the file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Its device and inode: a file that replaced it at the same path is not removed.
    id: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = |found: &fs::Metadata| (found.dev(), found.ino()) == self.id;
        if fs::symlink_metadata(&self.path).as_ref().is_ok_and(ours) {
            // If removing fails, the next listener replaces the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A listening socket of this type (`SOCK_STREAM`, `SOCK_SEQPACKET`) at `path`, for processes of this user (mode 0600). A socket file
/// left behind by a dead process is replaced; one with a live listener is not.
pub(crate) fn listen(
    path: &Path,
    kind: c_int,
    backlog: c_int,
) -> Result<(OwnedFd, SocketFile), LocalError> {
    let wrong = || LocalError::Path { path: path.to_owned() };
    let address = Address::new(path).filter(|_| path.is_absolute()).ok_or_else(wrong)?;
    let host = |source| LocalError::Host { path: path.to_owned(), source };
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(LocalError::NoSocket { path: path.to_owned() });
        }
        match connect(&address, kind) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(host)?;
            }
            // A listener exists, even if it refuses us or its queue is full.
            _ => return Err(LocalError::Taken { path: path.to_owned() }),
        }
    }
    let socket = socket(kind).map_err(host)?;
    let (pointer, len) = address.raw();
    // SAFETY: pointer and length describe `address`, which outlives the call.
    check(unsafe { libc::bind(socket.as_raw_fd(), pointer, len) }).map_err(
        |source| match source.kind() {
            io::ErrorKind::AddrInUse => LocalError::Taken { path: path.to_owned() },
            _ => host(source),
        },
    )?;
    // Connecting is impossible before `listen`, so the mode is in place in time.
    let prepared = fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::symlink_metadata(path))
        .and_then(|found| {
            // SAFETY: no pointers.
            check(unsafe { libc::listen(socket.as_raw_fd(), backlog) })?;
            Ok((found.dev(), found.ino()))
        });
    match prepared {
        Ok(id) => Ok((socket, SocketFile { path: path.to_owned(), id })),
        Err(error) => {
            // Report the first failure.
            let _ = fs::remove_file(path);
            Err(host(error))
        }
    }
}

/// A stream socket, connected to the listener at a path. Non-blocking: a full queue of the listener is `WouldBlock`.
pub fn connect_stream(path: &Path) -> io::Result<OwnedFd> {
    connect(&Address::new(path).ok_or(io::ErrorKind::InvalidInput)?, libc::SOCK_STREAM)
}

fn connect(address: &Address, kind: c_int) -> io::Result<OwnedFd> {
    let socket = socket(kind)?;
    let (pointer, len) = address.raw();
    // SAFETY: pointer and length describe `address`, which outlives the call.
    check(unsafe { libc::connect(socket.as_raw_fd(), pointer, len) })?;
    Ok(socket)
}

/// A listening socket for handshakes; dropping it removes its file.
#[derive(Debug)]
pub struct LocalListener {
    socket: OwnedFd,
    file: SocketFile,
}

impl LocalListener {
    /// Listens at `path`, for processes of this user (mode 0600). A socket file left behind by a dead process
    /// is replaced; one with a live listener is not.
    pub fn bind(path: &Path) -> Result<Self, LocalError> {
        let (socket, file) = listen(path, libc::SOCK_SEQPACKET, BACKLOG)?;
        Ok(Self { socket, file })
    }

    /// The path it listens at.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Accepts one connection; `None` if none is pending.
    pub fn accept(&self) -> io::Result<Option<LocalSocket>> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: a null address is allowed: the peer's address is not requested.
        let accepted = own(unsafe {
            libc::accept4(self.socket.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), flags)
        });
        match accepted {
            Ok(socket) => Ok(Some(LocalSocket { socket })),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for LocalListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// One connection. Non-blocking.
#[derive(Debug)]
pub struct LocalSocket {
    socket: OwnedFd,
}

impl LocalSocket {
    /// Connects to a listener.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let address = Address::new(path).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { socket: connect(&address, libc::SOCK_SEQPACKET)? })
    }

    /// Both ends of a connection, one of them for a child process.
    pub fn pair() -> io::Result<(Self, Self)> {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let mut ends: [c_int; 2] = [-1; 2];
        // SAFETY: the host kernel writes two descriptors to `ends`.
        check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })?;
        // SAFETY: both are new and owned by nothing else.
        let [ours, theirs] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        Ok((Self { socket: ours }, Self { socket: theirs }))
    }

    /// A connection inherited from the parent process, for example as standard input. Anything but a
    /// `SOCK_SEQPACKET` Unix socket is refused.
    pub fn inherited(descriptor: OwnedFd) -> io::Result<Self> {
        let option = |name| int_option(descriptor.as_fd(), libc::SOL_SOCKET, name);
        if option(libc::SO_DOMAIN)? != libc::AF_UNIX
            || option(libc::SO_TYPE)? != libc::SOCK_SEQPACKET
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: no pointers.
        check(unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
        Ok(Self { socket: descriptor })
    }

    /// Credentials of the peer process.
    pub fn peer(&self) -> io::Result<PeerCredentials> {
        peer_credentials(self.socket.as_fd())
    }

    /// Supplementary groups that the peer process had when it connected.
    pub fn peer_groups(&self) -> io::Result<Vec<u32>> {
        peer_groups(self.socket.as_fd())
    }

    /// Sends one message with descriptors, at most [`DESCRIPTORS_MAX`]; does not wait.
    pub fn send(&self, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        assert!(descriptors.len() <= DESCRIPTORS_MAX, "more than {DESCRIPTORS_MAX} descriptors");
        let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let mut part = libc::iovec {
            iov_base: message.as_ptr().cast_mut().cast::<c_void>(),
            iov_len: message.len(),
        };
        let mut control = Control::new();
        // SAFETY: integers and pointers, for which zero is a value.
        let mut header: libc::msghdr = unsafe { zeroed() };
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        if !raw.is_empty() {
            let bytes = size_of_val(raw.as_slice());
            header.msg_control = control.0.as_mut_ptr().cast();
            // SAFETY: arithmetic.
            header.msg_controllen = unsafe { libc::CMSG_SPACE(bytes as u32) } as _;
            // SAFETY: the control buffer is aligned for a header and holds DESCRIPTORS_MAX descriptors,
            // of which there are no more (asserted above).
            unsafe {
                let first = libc::CMSG_FIRSTHDR(&raw const header);
                (*first).cmsg_level = libc::SOL_SOCKET;
                (*first).cmsg_type = libc::SCM_RIGHTS;
                (*first).cmsg_len = libc::CMSG_LEN(bytes as u32) as _;
                ptr::copy_nonoverlapping(raw.as_ptr().cast::<u8>(), libc::CMSG_DATA(first), bytes);
            }
        }
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: `header` points to `message`, which is only read, and to `control`; all outlive the call.
        check_size(unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const header, flags) })?;
        Ok(())
    }

    /// Receives one message; the host kernel closes any descriptors in it. `None`: none is available
    /// yet. `Some(0)`: the connection has ended.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        // SAFETY: pointer and length describe `into`.
        let got = check_size(unsafe {
            libc::recv(
                self.socket.as_raw_fd(),
                into.as_mut_ptr().cast(),
                into.len(),
                libc::MSG_DONTWAIT,
            )
        });
        match got {
            Ok(len) => Ok(Some(len)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Receives one message with its descriptors, at most [`DESCRIPTORS_MAX`], as [`Self::receive`].
    pub fn receive_descriptors(
        &self,
        into: &mut [u8],
    ) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
        let mut part =
            libc::iovec { iov_base: into.as_mut_ptr().cast::<c_void>(), iov_len: into.len() };
        let mut control = Control::new();
        // SAFETY: integers and pointers, for which zero is a value.
        let mut header: libc::msghdr = unsafe { zeroed() };
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control.0) as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: `header` points to `into` and `control`, which outlive the call.
        let got =
            check_size(unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut header, flags) });
        let len = match got {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut descriptors = Vec::new();
        // SAFETY: the host kernel filled in `control` and its length; the macros stay inside it. Every
        // descriptor in it is new and owned by nothing else.
        unsafe {
            let mut at = libc::CMSG_FIRSTHDR(&raw const header);
            while !at.is_null() {
                if (*at).cmsg_level == libc::SOL_SOCKET && (*at).cmsg_type == libc::SCM_RIGHTS {
                    let bytes = (*at).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    let first = libc::CMSG_DATA(at).cast::<RawFd>();
                    for index in 0..bytes / size_of::<RawFd>() {
                        let raw = ptr::read_unaligned(first.add(index));
                        descriptors.push(OwnedFd::from_raw_fd(raw));
                    }
                }
                at = libc::CMSG_NXTHDR(&raw const header, at);
            }
        }
        Ok(Some((len, descriptors)))
    }

    /// Shuts the connection down for all its descriptors, in both processes.
    pub fn shut_down(&self) {
        // Fails if the connection has already ended.
        // SAFETY: no pointers.
        let _ = check(unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) });
    }
}

impl From<LocalSocket> for OwnedFd {
    fn from(socket: LocalSocket) -> Self {
        socket.socket
    }
}

impl AsFd for LocalSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn socket(kind: c_int) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    own(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })
}

/// A path in the form of the host kernel.
struct Address {
    raw: libc::sockaddr_un,
    len: libc::socklen_t,
}

impl Address {
    fn new(path: &Path) -> Option<Self> {
        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.len() > PATH_BYTES_MAX || bytes.contains(&0) {
            return None;
        }
        // SAFETY: integers, for which zero is a value.
        let mut raw: libc::sockaddr_un = unsafe { zeroed() };
        raw.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in raw.sun_path.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        Some(Self { raw, len: size_of::<libc::sockaddr_un>() as libc::socklen_t })
    }

    fn raw(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        ((&raw const self.raw).cast(), self.len)
    }
}

/// Room for the descriptors of one message, aligned for its header.
#[repr(align(8))]
struct Control([u8; 64]);

impl Control {
    fn new() -> Self {
        // SAFETY: arithmetic.
        let need = unsafe { libc::CMSG_SPACE((DESCRIPTORS_MAX * size_of::<RawFd>()) as u32) };
        let control = Self([0; 64]);
        assert!(need as usize <= control.0.len());
        control
    }
}
