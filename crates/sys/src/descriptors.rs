//! Files and stream sockets of other programs, for transfers: what a descriptor is, reads and writes that never
//! wait for a socket, and readiness.
//!
//! A descriptor that came from another process shares its open file description with that process. So nothing
//! here changes the description: no `O_NONBLOCK`, no file position, no socket option. `MSG_DONTWAIT` makes one call
//! non-blocking, and files are read and written at an offset.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use libc::{c_int, c_void};

use crate::os::{check, check_size, int_option, own, set_option, zeroed};

/// What a descriptor refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorKind {
    /// A regular file.
    File {
        /// Its length in bytes at the time of the call.
        bytes: u64,
        /// Writes go to the end of the file, whatever their offset (`O_APPEND`).
        appends: bool,
        /// Reads and writes have to be aligned (`O_DIRECT`).
        direct: bool,
    },
    /// A stream socket (TCP or Unix) with a peer, or whose peer has gone.
    Stream,
    /// A socket without a peer, that listens or never connected.
    Unconnected,
    /// `/dev/null`, which drops what is written to it.
    Null,
    /// Anything else; its name for people.
    Other(&'static str),
}

/// A descriptor as the host kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// What it refers to.
    pub kind: DescriptorKind,
    /// It can be read.
    pub readable: bool,
    /// It can be written.
    pub writable: bool,
    /// A regular file that runs with the rights of its owner or group (set-user-ID, set-group-ID).
    pub lends_rights: bool,
    /// Device and inode: the same for every descriptor of one file or socket.
    pub identity: (u64, u64),
}

/// A copy of the descriptor with this number, which the caller keeps; an error if the number is none.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no pointers, and the host kernel knows which numbers are descriptors.
    own(unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) })
}

/// Looks at a descriptor. Does not wait for the server of a network file system: length and kind are those that the host kernel knows.
pub fn describe(descriptor: BorrowedFd<'_>) -> io::Result<Descriptor> {
    // SAFETY: integers, for which zero is a value.
    let mut found: libc::statx = unsafe { zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let wanted = libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_INO | libc::STATX_SIZE;
    // SAFETY: the path is a string, and `found` outlives the call.
    check(unsafe {
        libc::statx(descriptor.as_raw_fd(), c"".as_ptr(), flags, wanted, &raw mut found)
    })?;
    // SAFETY: no pointers.
    let flags = check(unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFL) })?;
    let opened = flags & libc::O_PATH == 0;
    let mode = flags & libc::O_ACCMODE;
    let kind = match u32::from(found.stx_mode) & libc::S_IFMT {
        libc::S_IFREG => DescriptorKind::File {
            bytes: found.stx_size,
            appends: flags & libc::O_APPEND != 0,
            direct: flags & libc::O_DIRECT != 0,
        },
        libc::S_IFSOCK if opened => socket_kind(descriptor)?,
        libc::S_IFSOCK => DescriptorKind::Other("the path of a socket"),
        libc::S_IFDIR => DescriptorKind::Other("a folder"),
        libc::S_IFIFO => DescriptorKind::Other("a pipe"),
        libc::S_IFCHR if (found.stx_rdev_major, found.stx_rdev_minor) == (1, 3) => {
            DescriptorKind::Null
        }
        libc::S_IFCHR | libc::S_IFBLK => DescriptorKind::Other("a device"),
        _ => DescriptorKind::Other("neither a file nor a socket"),
    };
    Ok(Descriptor {
        kind,
        readable: opened && matches!(mode, libc::O_RDONLY | libc::O_RDWR),
        writable: opened && matches!(mode, libc::O_WRONLY | libc::O_RDWR),
        lends_rights: matches!(kind, DescriptorKind::File { .. })
            && u32::from(found.stx_mode) & (libc::S_ISUID | libc::S_ISGID) != 0,
        identity: (libc::makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino),
    })
}

/// The mount of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Its number, which Linux 6.8 and later give to no other mount, before or after it.
    id: u64,
    device: (u32, u32),
}

/// The length of a regular file, as the host kernel knows it, and its mount; `None`: it is none, or its mount is not known. Waits for
/// no server of the file system. [`describe`] knows more.
pub fn length_and_mount(file: BorrowedFd<'_>) -> Option<(u64, Mount)> {
    let found = look(file, libc::STATX_MNT_ID | libc::STATX_MNT_ID_UNIQUE)?;
    let is_file = u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFREG;
    let device = (found.stx_dev_major, found.stx_dev_minor);
    is_file.then_some((found.stx_size, Mount { id: found.stx_mnt_id, device }))
}

/// What the host kernel knows of a file without a request to the server of its file system, with the number of its mount.
fn look(file: BorrowedFd<'_>, mount: u32) -> Option<libc::statx> {
    // SAFETY: integers, for which zero is a value.
    let mut found: libc::statx = unsafe { zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let wanted = libc::STATX_TYPE | libc::STATX_SIZE | mount;
    // SAFETY: the path is a string, and `found` outlives the call.
    let looked = check(unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, wanted, &raw mut found)
    });
    (looked.is_ok() && found.stx_mask & mount != 0).then_some(found)
}

/// File systems of this machine's own disks and memory. Not overlayfs: its layers can be of any file system.
const LOCAL_FILE_SYSTEMS: [&str; 12] = [
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "erofs", "squashfs",
    "tmpfs", "ramfs",
];

/// Whether a read of the file waits for no other program and no other machine: not for FUSE, and not for the server of a network file
/// system. False of a file system that is not known. Asks no server itself, as `fstatfs` would.
pub fn reads_locally(file: BorrowedFd<'_>) -> bool {
    let Some(found) = look(file, libc::STATX_MNT_ID) else { return false };
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    file_system(&mounts, found.stx_mnt_id).is_some_and(|name| LOCAL_FILE_SYSTEMS.contains(&name))
}

/// The type of the file system of a mount, in the text of `/proc/self/mountinfo`: it follows a field `-`, which no field before it can be.
fn file_system(mounts: &str, id: u64) -> Option<&str> {
    let mut lines = mounts.lines().map(|line| line.split(' '));
    let mut fields =
        lines.find(|fields| fields.clone().next().and_then(|of| of.parse().ok()) == Some(id))?;
    fields.find(|field| *field == "-")?;
    fields.next()
}

/// File systems whose files are no data but interfaces of the host kernel, which looks at who reads and writes: procfs, sysfs, cgroup, cgroup2, debugfs, tracefs, securityfs,
/// selinuxfs, smackfs, configfs, bpf, efivarfs, binfmt_misc, pstore.
const KERNEL_FILE_SYSTEMS: [u32; 14] = [
    0x9fa0,
    0x6265_6572,
    0x0027_e0eb,
    0x6367_7270,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xf97c_ff8c,
    0x4341_5d53,
    0x6265_6570,
    0xcafe_4a11,
    0xde5e_81e4,
    0x4249_4e4d,
    0x6165_676c,
];

/// Whether a file is an interface of the host kernel. Can wait for the server of the file's file system, also for that of FUSE.
pub fn is_of_kernel(file: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: integers, for which zero is a value.
    let mut found: libc::statfs = unsafe { zeroed() };
    // SAFETY: `found` outlives the call.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) })?;
    Ok(KERNEL_FILE_SYSTEMS.contains(&(found.f_type as u32)))
}

/// Whether it is a stream socket, with a peer or without: the quick answer. [`describe`] knows more.
pub fn is_stream(socket: BorrowedFd<'_>) -> bool {
    let kind = int_option(socket, libc::SOL_SOCKET, libc::SO_TYPE);
    kind.is_ok_and(|kind| kind == libc::SOCK_STREAM)
}

fn socket_kind(socket: BorrowedFd<'_>) -> io::Result<DescriptorKind> {
    let option = |name| int_option(socket, libc::SOL_SOCKET, name);
    if option(libc::SO_TYPE)? != libc::SOCK_STREAM {
        return Ok(DescriptorKind::Other("a socket for messages"));
    }
    match option(libc::SO_DOMAIN)? {
        libc::AF_INET | libc::AF_INET6 | libc::AF_UNIX => {}
        _ => return Ok(DescriptorKind::Other("a socket of another kind than TCP or Unix")),
    }
    if option(libc::SO_ACCEPTCONN)? != 0 {
        return Ok(DescriptorKind::Unconnected);
    }
    // SAFETY: integers, for which zero is a value.
    let mut peer: libc::sockaddr_storage = unsafe { zeroed() };
    let mut len = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: pointer and length describe `peer`, which outlives the call.
    let named = check(unsafe {
        libc::getpeername(socket.as_raw_fd(), (&raw mut peer).cast(), &raw mut len)
    });
    match named {
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            // A TCP connection that was reset has no peer any more, and the next call on it reports that.
            let mut state = [0u8; 1];
            // SAFETY: pointer and length describe `state`.
            let looked = check_size(unsafe {
                let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
                libc::recv(socket.as_raw_fd(), state.as_mut_ptr().cast(), 1, flags)
            });
            match looked {
                Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
                    Ok(DescriptorKind::Unconnected)
                }
                _ => Ok(DescriptorKind::Stream),
            }
        }
        _ => Ok(DescriptorKind::Stream),
    }
}

/// Reads from a file at `offset` into the parts, one after the other. Fewer bytes than fit: the end of the file or an
/// interruption; 0: the end.
pub fn read_at(
    file: BorrowedFd<'_>,
    parts: &mut [IoSliceMut<'_>],
    offset: u64,
) -> io::Result<usize> {
    // SAFETY: `IoSliceMut` has the layout of `iovec`, and every part is writable memory.
    check_size(unsafe {
        libc::preadv(
            file.as_raw_fd(),
            parts.as_mut_ptr().cast(),
            parts.len() as c_int,
            place(offset)?,
        )
    })
}

/// Writes to a file at `offset`.
pub fn write_at(file: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> io::Result<usize> {
    let part = [IoSlice::new(bytes)];
    // SAFETY: `IoSlice` has the layout of `iovec`, and the part is only read.
    check_size(unsafe { libc::pwritev(file.as_raw_fd(), part.as_ptr().cast(), 1, place(offset)?) })
}

/// Waits until what was written to a file, and its length, are on its disk.
pub fn sync(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::fdatasync(file.as_raw_fd()) }).map(drop)
}

/// Opens a regular file in this folder that has no name; it goes away with its last descriptor, however its process ends.
pub fn nameless(folder: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o666).custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC);
    options.open(folder)
}

/// Gives a file of [`nameless`] a name. Fails with `AlreadyExists` if something has it.
pub fn give_name(file: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let own = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("no zeros");
    let path = CString::new(path.as_os_str().as_bytes())?;
    let (here, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: both are strings that outlive the call.
    check(unsafe { libc::linkat(here, own.as_ptr(), here, path.as_ptr(), follow) }).map(drop)
}

fn place(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Sends what the socket takes now; `WouldBlock` if that is nothing.
pub fn send_now(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: pointer and length describe `bytes`.
    check_size(unsafe {
        libc::send(socket.as_raw_fd(), bytes.as_ptr().cast::<c_void>(), bytes.len(), flags)
    })
}

/// As [`send_now`], with two pieces in one system call.
pub fn send_joined_now(socket: BorrowedFd<'_>, first: &[u8], second: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let piece = |bytes: &[u8]| libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast::<c_void>(),
        iov_len: bytes.len(),
    };
    let mut pieces = [piece(first), piece(second)];
    // SAFETY: all fields may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (pieces.as_mut_ptr(), pieces.len() as _);
    // SAFETY: `message` names `pieces`, which describe the two slices; sending only reads them.
    check_size(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
}

/// Receives what has arrived; 0 is the end of the stream, `WouldBlock` nothing so far.
pub fn receive_now(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    // SAFETY: pointer and length describe `into`.
    check_size(unsafe {
        libc::recv(
            socket.as_raw_fd(),
            into.as_mut_ptr().cast::<c_void>(),
            into.len(),
            libc::MSG_DONTWAIT,
        )
    })
}

/// Whether closing the last descriptor of a TCP connection sends RST, and drops what has not been sent.
pub fn reset_on_close(socket: BorrowedFd<'_>, resets: bool) -> io::Result<()> {
    let linger = libc::linger { l_onoff: resets.into(), l_linger: 0 };
    set_option(socket, libc::SOL_SOCKET, libc::SO_LINGER, linger)
}

/// Resets a TCP connection at once, for all descriptors of it: a close would wait for the last one.
pub fn disconnect(socket: BorrowedFd<'_>) {
    let nothing =
        libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    let bytes = size_of_val(&nothing) as libc::socklen_t;
    // If this fails the connection has ended, or the last close resets it.
    // SAFETY: pointer and length describe `nothing`, which outlives the call.
    let _ = check(unsafe { libc::connect(socket.as_raw_fd(), &raw const nothing, bytes) });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    #[test]
    fn files_of_the_kernel_and_files_that_lend_rights_are_known() {
        use std::os::unix::fs::PermissionsExt as _;
        for path in ["/proc/self/status", "/proc/version", "/sys/kernel/uevent_seqnum"] {
            assert!(is_of_kernel(File::open(path).unwrap().as_fd()).unwrap(), "{path}");
        }
        let path = std::env::temp_dir().join(format!("serval-lends-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        assert!(!is_of_kernel(file.as_fd()).unwrap());
        for mode in [0o600, 0o4700, 0o2750, 0o6755, 0o1777] {
            file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
            let lends = describe(file.as_fd()).unwrap().lends_rights;
            assert_eq!(lends, mode & 0o6000 != 0, "{mode:o}");
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_descriptor_says_what_it_is() {
        let kind = |descriptor: BorrowedFd<'_>| describe(descriptor).unwrap().kind;
        let (stream, _other) = UnixStream::pair().unwrap();
        assert_eq!(kind(stream.as_fd()), DescriptorKind::Stream);
        assert!(is_stream(stream.as_fd()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(kind(listener.as_fd()), DescriptorKind::Unconnected);
        let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(kind(connected.as_fd()), DescriptorKind::Stream);
        assert!(is_stream(connected.as_fd()));
        assert!(!is_stream(File::open("/").unwrap().as_fd()));
        let (datagrams, _other) = UnixDatagram::pair().unwrap();
        assert!(matches!(kind(datagrams.as_fd()), DescriptorKind::Other(_)));
        assert!(!is_stream(datagrams.as_fd()));
        assert_eq!(kind(File::open("/").unwrap().as_fd()), DescriptorKind::Other("a folder"));
        let null = describe(File::open("/dev/null").unwrap().as_fd()).unwrap();
        assert_eq!(null.kind, DescriptorKind::Null);
        assert!(null.readable && !null.writable);
        let own = File::open("/proc/self/exe").unwrap();
        let length = own.metadata().unwrap().len();
        assert_eq!(length_and_mount(own.as_fd()).unwrap().0, length);
        assert_eq!(length_and_mount(connected.as_fd()), None);
        let again = own.try_clone().unwrap();
        let [one, two] = [own, again].map(|file| describe(file.as_fd()).unwrap().identity);
        assert_eq!(one, two);
    }

    /// A connection that cannot be reset at once is not ended in another way: its peer would take a part for the whole.
    #[test]
    fn where_a_reset_is_refused_the_peer_reads_no_end() {
        // A Unix socket has none.
        let (ours, mut peer) = UnixStream::pair().unwrap();
        peer.set_nonblocking(true).unwrap();
        let lent = ours.try_clone().unwrap();
        disconnect(ours.as_fd());
        drop(ours);
        let end = std::io::Read::read(&mut peer, &mut [0]);
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(lent);
        assert_eq!(std::io::Read::read(&mut peer, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn files_of_memory_are_local_and_those_of_the_host_kernel_are_not_known() {
        assert!(reads_locally(File::open("/dev/shm").unwrap().as_fd()));
        assert!(!reads_locally(File::open("/proc/self/stat").unwrap().as_fd()));
        let (socket, _other) = UnixStream::pair().unwrap();
        assert!(!reads_locally(socket.as_fd()));
    }

    #[test]
    fn the_file_system_of_a_mount_is_found_by_its_number() {
        let mounts = "\
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24683656k
2 25 0:40 / /mnt/a\\040- rw shared:1 master:2 - fuse.sshfs host:/ext4 rw
251 1 0:41 / / rw - overlay overlay rw,lowerdir=/l
7 1 0:42 / /cut rw
";
        let of = |id| file_system(mounts, id);
        assert_eq!([25, 2, 251].map(of), ["tmpfs", "fuse.sshfs", "overlay"].map(Some));
        assert_eq!([7, 5, 0].map(of), [None; 3]);
        assert!(!LOCAL_FILE_SYSTEMS.contains(&"overlay"));
    }
}
