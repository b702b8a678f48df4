//! Memory that two processes share, for system calls that one of them makes for the other: one copies bytes in or out, the other one
//! passes the memory to the host kernel. Neither keeps a reference to it, so whatever the other one writes there meanwhile changes bytes and nothing else.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use crate::memory::{MemoryError, RegionOptions, SharedMemory};
use crate::os::check_size;

/// Memory for the bytes of one call at a time.
#[derive(Debug)]
pub struct Slot(SharedMemory);

impl Slot {
    /// New memory.
    pub fn create(name: &str, len_bytes: usize) -> Result<Self, MemoryError> {
        SharedMemory::create(name, len_bytes, &RegionOptions::default()).map(Self)
    }

    /// The memory of the other process.
    pub fn open(file: OwnedFd, len_bytes_max: usize) -> Result<Self, MemoryError> {
        SharedMemory::open(file, len_bytes_max, false).map(Self)
    }

    /// The descriptor for the other process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// Its length.
    pub fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }

    /// Copies bytes to its begin, as many as fit; returns how many.
    pub fn put(&self, bytes: &[u8]) -> usize {
        let len = bytes.len().min(self.len_bytes());
        // SAFETY: both are `len` bytes at least and do not overlap: `bytes` is no shared memory of this value, to which there are no references.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_ptr(), len) };
        len
    }

    /// Copies from byte `at` on, as many bytes as it has; returns how many.
    pub fn get(&self, at: usize, into: &mut [u8]) -> usize {
        let len = into.len().min(self.len_bytes().saturating_sub(at));
        if len > 0 {
            // SAFETY: as above; `at + len` is not behind the end.
            unsafe {
                std::ptr::copy_nonoverlapping(self.0.as_ptr().add(at), into.as_mut_ptr(), len);
            }
        }
        len
    }

    /// Reads up to `len` bytes of a file at `offset` to its begin.
    pub fn read_at(&self, file: BorrowedFd<'_>, len: usize, offset: u64) -> io::Result<usize> {
        let (len, offset) = (len.min(self.len_bytes()), place(offset)?);
        // SAFETY: `len` bytes of the mapping, which outlives the call.
        check_size(unsafe { libc::pread(file.as_raw_fd(), self.0.as_ptr().cast(), len, offset) })
    }

    /// Writes the first `len` bytes to a file at `offset`.
    pub fn write_at(&self, file: BorrowedFd<'_>, len: usize, offset: u64) -> io::Result<usize> {
        let (len, offset) = (len.min(self.len_bytes()), place(offset)?);
        // SAFETY: as above; only read.
        check_size(unsafe { libc::pwrite(file.as_raw_fd(), self.0.as_ptr().cast(), len, offset) })
    }

    /// Sends of the first `len` bytes what the socket takes now.
    pub fn send_now(&self, socket: BorrowedFd<'_>, len: usize) -> io::Result<usize> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let len = len.min(self.len_bytes());
        // SAFETY: as above; only read.
        check_size(unsafe { libc::send(socket.as_raw_fd(), self.0.as_ptr().cast(), len, flags) })
    }

    /// Receives up to `len` bytes that have arrived to its begin.
    pub fn receive_now(&self, socket: BorrowedFd<'_>, len: usize) -> io::Result<usize> {
        let (flags, len) = (libc::MSG_DONTWAIT, len.min(self.len_bytes()));
        // SAFETY: `len` bytes of the mapping, which outlives the call.
        check_size(unsafe { libc::recv(socket.as_raw_fd(), self.0.as_ptr().cast(), len, flags) })
    }
}

fn place(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    #[test]
    fn calls_move_what_the_other_side_copies() {
        let ours = Slot::create("serval:test", 8192).unwrap();
        let theirs = Slot::open(ours.fd().try_clone_to_owned().unwrap(), 8192).unwrap();
        let path = std::env::temp_dir().join(format!("serval-slot-{}", std::process::id()));
        let options = File::options().read(true).write(true).create(true).truncate(true).clone();
        let file = options.open(&path).unwrap();
        assert_eq!(ours.put(b"the bytes"), 9);
        assert_eq!(theirs.write_at(file.as_fd(), 9, 3).unwrap(), 9);
        assert_eq!(ours.put(&[0; 10_000]), 8192, "as many as fit");
        assert_eq!(theirs.read_at(file.as_fd(), 100_000, 3).unwrap(), 9);
        let mut got = [0; 9];
        assert_eq!((ours.get(0, &mut got), &got), (9, b"the bytes"));
        assert_eq!((ours.get(8192, &mut got), ours.get(usize::MAX, &mut got)), (0, 0));
        assert_eq!((ours.get(8190, &mut got), ours.get(0, &mut [])), (2, 0));
        let (one, two) = UnixStream::pair().unwrap();
        assert_eq!(theirs.send_now(one.as_fd(), 3).unwrap(), 3);
        let blocked = theirs.receive_now(one.as_fd(), 3).unwrap_err();
        assert_eq!(blocked.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(theirs.receive_now(two.as_fd(), 100_000).unwrap(), 3);
        assert!(theirs.read_at(file.as_fd(), 1, u64::MAX).is_err());
        assert!(Slot::open(ours.fd().try_clone_to_owned().unwrap(), 4096).is_err());
        std::fs::remove_file(path).unwrap();
    }
}
