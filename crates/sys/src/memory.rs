//! Memory for rings: shared regions behind a sealed file descriptor, and private memory between
//! guard pages.
//!
//! A region is a memfd. Its creator seals the size, because a file that shrinks under a mapping turns
//! the next access into SIGBUS: a process that could shrink a region could kill every process that
//! maps it. [`SharedMemory::open`] therefore refuses a received descriptor without the seals
//! `F_SEAL_SHRINK`, `F_SEAL_GROW` and `F_SEAL_SEAL`.
//!
//! Seals do not stop a holder from punching holes. In ordinary (tmpfs) pages a hole is filled with
//! a zero page on the next access, which only affects data that the holder may write anyway. In
//! hugetlb pages the refill can fail, which also raises SIGBUS: give hugetlb regions to trusted
//! accelerators only, and accept none from others ([`SharedMemory::open`] refuses them unless asked).
//!
//! All pages are faulted in when they are mapped, so that running out of memory is an error here and
//! not a fault on the data path (a page fault costs microseconds, and more under nested paging).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use libc::{c_int, c_uint, c_void};

use crate::affinity::numa_nodes;
use crate::os::{check, own};
use crate::process;

/// Bytes of a huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Seals of a region: neither its length nor its seals can change.
const SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// Seals that a region must not have: it has to be writable.
const WRITE_SEALS: c_int = libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE;
/// Longest memfd name that the host kernel accepts, in bytes.
const NAME_BYTES_MAX: usize = 249;

/// Why memory could not be allocated or mapped.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The name holds a NUL byte or is too long.
    #[error("{name:?} cannot name shared memory: at most {NAME_BYTES_MAX} bytes, none of them NUL")]
    Name {
        /// The name given.
        name: String,
    },
    /// The length is zero or exceeds the address space.
    #[error("{len_bytes} bytes is not a valid memory size")]
    Length {
        /// The length asked for.
        len_bytes: usize,
    },
    /// The host does not have that much memory.
    #[error(
        "no memory for {} MiB ({} MiB are available): lower slots, arena_bytes or mqueues, or \
         raise the container's memory limit", len_bytes.div_ceil(1 << 20), available_bytes >> 20
    )]
    NoMemory {
        /// The length asked for.
        len_bytes: usize,
        /// Available memory, as the host reports it.
        available_bytes: u64,
    },
    /// The memory lock limit of the process (RLIMIT_MEMLOCK) is too low.
    #[error(
        "cannot lock {} MiB in memory, the limit is {} KiB: raise it (`ulimit -l unlimited`, \
         `--ulimit memlock=-1` for a container, LimitMEMLOCK=infinity for a unit)",
        len_bytes.div_ceil(1 << 20), limit_bytes >> 10
    )]
    LockLimit {
        /// The length asked for.
        len_bytes: usize,
        /// RLIMIT_MEMLOCK.
        limit_bytes: u64,
    },
    /// A received descriptor is not a region.
    #[error("the descriptor is not a region: {why}; pass the one that `SharedMemory::create` made")]
    NotARegion {
        /// The reason.
        why: String,
    },
    /// Any other error of the host kernel.
    #[error("{call} of {len_bytes} bytes: {source}")]
    Host {
        /// The call that failed.
        call: &'static str,
        /// The length asked for.
        len_bytes: usize,
        /// The error.
        source: io::Error,
    },
}

impl MemoryError {
    fn host(call: &'static str, len_bytes: usize) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.raw_os_error() {
            // Populating reports EFAULT where an access would raise SIGBUS.
            Some(libc::ENOMEM | libc::ENOSPC | libc::EFAULT) => Self::no_memory(len_bytes),
            _ => Self::Host { call, len_bytes, source },
        }
    }

    fn no_memory(len_bytes: usize) -> Self {
        Self::NoMemory { len_bytes, available_bytes: process::memory_available_bytes() }
    }
}

/// How to allocate a region. By default only transparent huge pages of the page cache are requested.
#[derive(Clone, Debug, Default)]
pub struct RegionOptions {
    /// Try hugetlb pages first; falls back to ordinary ones. For trusted accelerators only: see the
    /// module's text.
    pub hugetlb: bool,
    /// Prefer this NUMA node; ignored on a host with one node.
    pub numa_node: Option<u32>,
    /// Lock the pages in memory.
    pub lock: bool,
}

/// The kind of pages behind a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Ordinary pages: the region is smaller than a huge page, or the host kernel has none free.
    Small,
    /// Huge pages of the page cache, except for the remainder at the end.
    Huge,
    /// Pages of the hugetlb pool.
    Hugetlb,
}

/// A mapped region of shared memory. See the module's text.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    map: Map,
    pages: Pages,
}

impl SharedMemory {
    /// Creates, seals, maps and faults in a region of at least `len_bytes` zero bytes (rounded up
    /// to whole pages). `name` shows up in `/proc/PID/maps`, for example
    /// `serval:SERVICE:ACCEL:GEN`.
    pub fn create(
        name: &str,
        len_bytes: usize,
        options: &RegionOptions,
    ) -> Result<Self, MemoryError> {
        if options.hugetlb
            && let Ok(region) = Self::create_from(name, len_bytes, options, Pages::Hugetlb)
        {
            return Ok(region);
        }
        Self::create_from(name, len_bytes, options, Pages::Small)
    }

    /// Maps a region that another process created. `len_bytes_max` bounds the size of the mapping;
    /// `hugetlb` accepts regions of hugetlb pages, which only a trusted process may pass.
    pub fn open(file: OwnedFd, len_bytes_max: usize, hugetlb: bool) -> Result<Self, MemoryError> {
        let (len_bytes, pages) = inspect(file.as_fd(), len_bytes_max, hugetlb)?;
        Self::map(file, len_bytes, pages, &RegionOptions::default())
    }

    /// The descriptor to pass to other processes.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The kind of pages.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// First byte; aligned to a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.usable().as_ptr()
    }

    /// Length in bytes, a multiple of the page size.
    pub fn len_bytes(&self) -> usize {
        self.map.usable_bytes()
    }

    fn create_from(
        name: &str,
        len_bytes: usize,
        options: &RegionOptions,
        pages: Pages,
    ) -> Result<Self, MemoryError> {
        let (flags, unit) = match pages {
            Pages::Hugetlb => (libc::MFD_HUGETLB | libc::MFD_HUGE_2MB, HUGE_PAGE_BYTES),
            _ => (0, page_bytes()),
        };
        let len_bytes = whole(len_bytes, unit)?;
        if pages != Pages::Hugetlb && len_bytes as u64 > process::memory_available_bytes() {
            // Faulting it in would trigger the out-of-memory killer instead of returning an error.
            return Err(MemoryError::no_memory(len_bytes));
        }
        let file = memfd(name, flags)?;
        // SAFETY: no pointers.
        check(unsafe { libc::ftruncate(file.as_raw_fd(), len_bytes as libc::off_t) })
            .map_err(MemoryError::host("ftruncate", len_bytes))?;
        // SAFETY: no pointers.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })
            .map_err(MemoryError::host("sealing", len_bytes))?;
        Self::map(file, len_bytes, pages, options)
    }

    fn map(
        file: OwnedFd,
        len_bytes: usize,
        mut pages: Pages,
        options: &RegionOptions,
    ) -> Result<Self, MemoryError> {
        let map = Map::shared(file.as_fd(), len_bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        if let Some(node) = options.numa_node
            && numa_nodes().len() > 1
        {
            // Best effort: the wrong node is slower, not wrong.
            let _ = map.prefer_node(node);
        }
        map.populate(Some(file.as_fd()))?;
        if pages != Pages::Hugetlb && map.collapse() {
            pages = Pages::Huge;
        }
        if options.lock {
            map.lock()?;
        }
        Ok(Self { file, map, pages })
    }
}

// SAFETY: the mapping lives as long as the value and its address never changes; pages are aligned
// to more than 128 bytes; the file is sealed against shrinking (set by `create`, checked by
// `open`), so all `len_bytes` stay backed.
unsafe impl mqueue::memory::Mapping for SharedMemory {
    fn base(&self) -> *mut u8 {
        self.as_ptr()
    }

    fn len_bytes(&self) -> usize {
        Self::len_bytes(self)
    }
}

/// A read-only mapping of a region, for observers.
#[derive(Debug)]
pub struct SharedView {
    map: Map,
}

impl SharedView {
    /// Maps a region read-only, with the checks of [`SharedMemory::open`]; hugetlb pages are refused.
    pub fn open(file: BorrowedFd<'_>, len_bytes_max: usize) -> Result<Self, MemoryError> {
        let (len_bytes, _) = inspect(file, len_bytes_max, false)?;
        Ok(Self { map: Map::shared(file, len_bytes, libc::PROT_READ)? })
    }

    /// First byte. Other processes write here at any time: read through atomics only.
    pub fn as_ptr(&self) -> *const u8 {
        self.map.usable().as_ptr()
    }

    /// Length in bytes, a multiple of the page size.
    pub fn len_bytes(&self) -> usize {
        self.map.usable_bytes()
    }
}

/// Zeroed memory of this process between two inaccessible pages, faulted in. An out-of-bounds access of
/// less than a page past either end faults immediately.
#[derive(Debug)]
pub struct PrivateMemory {
    map: Map,
}

impl PrivateMemory {
    /// Maps at least `len_bytes` (rounded up to whole pages).
    pub fn new(len_bytes: usize) -> Result<Self, MemoryError> {
        let guard_bytes = page_bytes();
        let len_bytes = whole(len_bytes, guard_bytes)?;
        let map = Map::guarded(len_bytes, guard_bytes)?;
        if len_bytes >= HUGE_PAGE_BYTES {
            let _ = map.advise(libc::MADV_HUGEPAGE);
        }
        map.populate(None)?;
        Ok(Self { map })
    }

    /// First byte; aligned to a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.usable().as_ptr()
    }

    /// Length in bytes, a multiple of the page size.
    pub fn len_bytes(&self) -> usize {
        self.map.usable_bytes()
    }
}

// SAFETY: the mapping lives as long as the value and its address never changes; it is anonymous, so
// nothing can shrink it.
unsafe impl mqueue::memory::Mapping for PrivateMemory {
    fn base(&self) -> *mut u8 {
        self.as_ptr()
    }

    fn len_bytes(&self) -> usize {
        Self::len_bytes(self)
    }
}

/// A range of address space, unmapped on drop. The usable part lies between two guards (0 bytes
/// each for shared memory).
#[derive(Debug)]
struct Map {
    start: NonNull<u8>,
    len_bytes: usize,
    guard_bytes: usize,
}

// SAFETY: the value only names a range of the address space, which is not tied to a thread; it hands
// out a raw pointer, and users of that pointer are responsible for their accesses.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn shared(file: BorrowedFd<'_>, len_bytes: usize, access: c_int) -> Result<Self, MemoryError> {
        let flags = libc::MAP_SHARED;
        if len_bytes < HUGE_PAGE_BYTES {
            let start = mmap(len_bytes, access, flags, file.as_raw_fd())?;
            return Ok(Self { start, len_bytes, guard_bytes: 0 });
        }
        // Huge pages of a file must be aligned to their size: reserve a range large enough to align,
        // and release what is left of it.
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let reserved_bytes =
            len_bytes.checked_add(HUGE_PAGE_BYTES).ok_or(MemoryError::Length { len_bytes })?;
        let start = mmap(reserved_bytes, libc::PROT_NONE, private, -1)?;
        let before = start.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let mut map = Self { start, len_bytes: reserved_bytes, guard_bytes: 0 };
        map.keep(before, len_bytes)?;
        let fixed = flags | libc::MAP_FIXED;
        // SAFETY: replaces the pages reserved above, which belong to this mapping and hold no data.
        let placed = unsafe {
            libc::mmap(map.start.as_ptr().cast(), len_bytes, access, fixed, file.as_raw_fd(), 0)
        };
        if placed == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // Older host kernels may have unmapped the reservation before failing, and another thread may use the
            // range by now: leak a little address space instead of unmapping it.
            std::mem::forget(map);
            return Err(MemoryError::host("mmap", len_bytes)(error));
        }
        Ok(map)
    }

    /// Unmaps all but `len_bytes` starting at `before`, both in whole pages.
    fn keep(&mut self, before: usize, len_bytes: usize) -> Result<(), MemoryError> {
        let unmap = |start: NonNull<u8>, bytes: usize| {
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: the range belongs to this mapping, which no longer uses it.
            check(unsafe { libc::munmap(start.as_ptr().cast(), bytes) })
                .map(drop)
                .map_err(MemoryError::host("munmap", bytes))
        };
        let end = before + len_bytes;
        // SAFETY: inside the mapping.
        unmap(unsafe { self.start.add(end) }, self.len_bytes - end)?;
        self.len_bytes = end;
        unmap(self.start, before)?;
        // SAFETY: inside the mapping.
        self.start = unsafe { self.start.add(before) };
        self.len_bytes = len_bytes;
        Ok(())
    }

    /// Collapses the pages of a file into huge pages, whatever the host's policy for them is
    /// (MADV_COLLAPSE, Linux 6.1). A region of many rings spans thousands of ordinary pages, and every message
    /// touches a different one: more than the TLBs of a CPU, of a GPU and of the IOMMU between them hold.
    /// Returns true on success; without huge pages a region is slower, not wrong.
    fn collapse(&self) -> bool {
        const MADV_COLLAPSE: c_int = 25;
        // The advice applies to whole huge pages inside the range, so there must be at least one.
        self.usable_bytes() >= HUGE_PAGE_BYTES && self.advise(MADV_COLLAPSE).is_ok()
    }

    fn guarded(usable_bytes: usize, guard_bytes: usize) -> Result<Self, MemoryError> {
        let len_bytes = usable_bytes
            .checked_add(2 * guard_bytes)
            .ok_or(MemoryError::Length { len_bytes: usable_bytes })?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let start = mmap(len_bytes, libc::PROT_NONE, flags, -1)?;
        let map = Self { start, len_bytes, guard_bytes };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range lies inside the new mapping, which has no other user yet.
        check(unsafe { libc::mprotect(map.usable().as_ptr().cast(), usable_bytes, access) })
            .map_err(MemoryError::host("mprotect", usable_bytes))?;
        Ok(map)
    }

    fn usable(&self) -> NonNull<u8> {
        // SAFETY: the guard lies inside the mapping.
        unsafe { self.start.add(self.guard_bytes) }
    }

    fn usable_bytes(&self) -> usize {
        self.len_bytes - 2 * self.guard_bytes
    }

    fn advise(&self, advice: c_int) -> io::Result<()> {
        // SAFETY: the range belongs to this mapping; the advice values used here never discard contents.
        check(unsafe {
            libc::madvise(self.usable().as_ptr().cast(), self.usable_bytes(), advice)
        })?;
        Ok(())
    }

    /// Faults in all pages, so that missing memory is an error here.
    fn populate(&self, file: Option<BorrowedFd<'_>>) -> Result<(), MemoryError> {
        let len_bytes = self.usable_bytes();
        match self.advise(libc::MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            other => return other.map_err(MemoryError::host("populating", len_bytes)),
        }
        // Before Linux 5.14: reserve the pages of a file, then touch each one.
        if let Some(file) = file {
            // SAFETY: no pointers.
            check(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len_bytes as libc::off_t) })
                .map_err(MemoryError::host("fallocate", len_bytes))?;
        }
        for at in (0..len_bytes).step_by(page_bytes()) {
            // SAFETY: inside the mapping, which is readable; anonymous pages are only allocated by a
            // write, and a private mapping has no other user yet.
            unsafe {
                let byte = self.usable().as_ptr().add(at);
                let value = byte.read_volatile();
                if file.is_none() {
                    byte.write_volatile(value);
                }
            }
        }
        Ok(())
    }

    fn prefer_node(&self, node: u32) -> io::Result<()> {
        const MPOL_PREFERRED: c_int = 1;
        let Some(mask) = 1u64.checked_shl(node) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        // SAFETY: the range belongs to this mapping; the mask has the 64 bits announced (the host kernel
        // reads one bit less than the count given).
        let ret = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.usable().as_ptr(),
                self.usable_bytes(),
                MPOL_PREFERRED,
                &raw const mask,
                65usize,
                0 as c_uint,
            )
        };
        check(ret as c_int)?;
        Ok(())
    }

    fn lock(&self) -> Result<(), MemoryError> {
        let len_bytes = self.usable_bytes();
        // SAFETY: the range belongs to this mapping.
        let locked = check(unsafe { libc::mlock(self.usable().as_ptr().cast(), len_bytes) });
        locked.map(drop).map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM | libc::ENOMEM | libc::EAGAIN) => {
                MemoryError::LockLimit { len_bytes, limit_bytes: process::locked_memory_limit().0 }
            }
            _ => MemoryError::Host { call: "mlock", len_bytes, source },
        })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the whole range belongs to this value, which is being dropped.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

fn mmap(
    len_bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
) -> Result<NonNull<u8>, MemoryError> {
    // SAFETY: the host kernel chooses the address, so no existing mapping is touched.
    let start: *mut c_void =
        unsafe { libc::mmap(ptr::null_mut(), len_bytes, access, flags, file, 0) };
    if start == libc::MAP_FAILED {
        return Err(MemoryError::host("mmap", len_bytes)(io::Error::last_os_error()));
    }
    NonNull::new(start.cast()).ok_or(MemoryError::Length { len_bytes })
}

pub(crate) fn memfd(name: &str, flags: c_uint) -> Result<OwnedFd, MemoryError> {
    let bad_name = || MemoryError::Name { name: name.to_owned() };
    if name.len() > NAME_BYTES_MAX {
        return Err(bad_name());
    }
    let c_name = CString::new(name).map_err(|_| bad_name())?;
    let flags = flags | libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: `c_name` is a C string that outlives the call.
    let create = |flags| own(unsafe { libc::memfd_create(c_name.as_ptr(), flags) });
    // Never executable, if the host kernel supports the flag (Linux 6.3).
    let file = match create(flags | libc::MFD_NOEXEC_SEAL) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => create(flags),
        other => other,
    };
    file.map_err(MemoryError::host("memfd_create", 0))
}

/// Checks that `file` is a sealed memfd of whole pages, and not of hugetlb pages unless `hugetlb`
/// is set; returns its length and its kind of pages.
fn inspect(
    file: BorrowedFd<'_>,
    len_bytes_max: usize,
    hugetlb: bool,
) -> Result<(usize, Pages), MemoryError> {
    let refuse = |why: String| Err(MemoryError::NotARegion { why });
    // SAFETY: no pointers.
    let seals = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) });
    match seals {
        Ok(seals) if seals & SEALS == SEALS && seals & WRITE_SEALS == 0 => {}
        Ok(seals) if seals & WRITE_SEALS != 0 => {
            return refuse("it is sealed against writing".into());
        }
        Ok(_) => return refuse("its length is not sealed, so it could shrink".into()),
        Err(_) => return refuse("it is not a memfd".into()),
    }
    // SAFETY: integers, for which zero is a value.
    let mut status: libc::stat = unsafe { crate::os::zeroed() };
    // SAFETY: `status` outlives the call.
    check(unsafe { libc::fstat(file.as_raw_fd(), &raw mut status) })
        .map_err(MemoryError::host("fstat", 0))?;
    let len_bytes = usize::try_from(status.st_size).unwrap_or(0);
    if len_bytes == 0 || len_bytes % page_bytes() != 0 {
        return refuse(format!(
            "its length of {len_bytes} bytes is not a multiple of the page size"
        ));
    }
    if len_bytes > len_bytes_max {
        return refuse(format!("it has {len_bytes} bytes, over the limit of {len_bytes_max}"));
    }
    // SAFETY: integers, for which zero is a value.
    let mut system: libc::statfs = unsafe { crate::os::zeroed() };
    // SAFETY: `system` outlives the call.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) })
        .map_err(MemoryError::host("fstatfs", len_bytes))?;
    // Not by block size: a tmpfs with transparent huge pages reports the huge page size as well.
    if system.f_type != libc::HUGETLBFS_MAGIC {
        return Ok((len_bytes, Pages::Small));
    }
    if !hugetlb {
        return refuse("it has hugetlb pages, in which its creator could punch holes".into());
    }
    Ok((len_bytes, Pages::Hugetlb))
}

/// `len_bytes` rounded up to a multiple of `unit`.
fn whole(len_bytes: usize, unit: usize) -> Result<usize, MemoryError> {
    len_bytes
        .checked_next_multiple_of(unit)
        .filter(|&whole| whole > 0 && whole <= isize::MAX as usize)
        .ok_or(MemoryError::Length { len_bytes })
}

/// Bytes of an ordinary page.
pub fn page_bytes() -> usize {
    // SAFETY: no pointers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}
