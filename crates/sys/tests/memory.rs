//! Shared regions: mappings, seals, and hostile descriptors.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use mqueue::memory::Mapping;
use sys::memory::{HUGE_PAGE_BYTES, Pages, page_bytes};
use sys::{MemoryError, PrivateMemory, RegionOptions, SharedMemory, SharedView};

const LIMIT: usize = 64 << 20;

fn create(len_bytes: usize) -> SharedMemory {
    SharedMemory::create("serval:test:acc0:1", len_bytes, &RegionOptions::default()).unwrap()
}

fn copy_of(region: &SharedMemory) -> OwnedFd {
    region.fd().try_clone_to_owned().unwrap()
}

/// A word of shared memory.
fn word(base: *mut u8, at: usize) -> &'static AtomicU64 {
    // SAFETY: the tests keep the mapping for as long as they use the word, which is aligned and
    // inside.
    unsafe { &*base.add(at).cast::<AtomicU64>() }
}

#[test]
fn two_mappings_of_one_region_are_one_memory() {
    let ours = create(100_000);
    assert_eq!(ours.len_bytes() % page_bytes(), 0);
    assert!(ours.len_bytes() >= 100_000);
    let theirs = SharedMemory::open(copy_of(&ours), LIMIT, false).unwrap();
    let view = SharedView::open(ours.fd(), LIMIT).unwrap();
    assert_eq!((theirs.len_bytes(), view.len_bytes()), (ours.len_bytes(), ours.len_bytes()));
    let last = ours.len_bytes() - 8;
    assert_eq!(word(theirs.base(), last).load(Ordering::Acquire), 0);
    word(ours.base(), last).store(42, Ordering::Release);
    assert_eq!(word(theirs.base(), last).load(Ordering::Acquire), 42);
    assert_eq!(word(view.as_ptr().cast_mut(), last).load(Ordering::Acquire), 42);
    assert_eq!(ours.base() as usize % 128, 0);
    drop(ours);
    assert_eq!(word(theirs.base(), last).load(Ordering::Acquire), 42, "mappings are independent");
}

#[test]
fn a_region_can_neither_shrink_nor_grow() {
    let region = create(1 << 20);
    for len_bytes in [0, page_bytes(), 2 << 20] {
        // SAFETY: no pointers.
        let ret = unsafe { libc::ftruncate(region.fd().as_raw_fd(), len_bytes as libc::off_t) };
        assert_eq!(ret, -1, "resized to {len_bytes}");
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("memfd:serval:test:acc0:1"));
}

fn memfd(flags: libc::c_uint, len_bytes: i64, seals: i32) -> OwnedFd {
    let name = CString::new("stranger").unwrap();
    // SAFETY: the name is a C string; the descriptor returned is new and ours.
    unsafe {
        let raw = libc::memfd_create(name.as_ptr(), flags);
        assert!(raw >= 0);
        assert_eq!(libc::ftruncate(raw, len_bytes), 0);
        if seals != 0 {
            assert_eq!(libc::fcntl(raw, libc::F_ADD_SEALS, seals), 0);
        }
        OwnedFd::from_raw_fd(raw)
    }
}

#[test]
fn descriptors_that_could_hurt_are_refused() {
    let all = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let sealable = libc::MFD_ALLOW_SEALING;
    let strangers = [
        ("no seals", memfd(sealable, 1 << 20, 0)),
        ("could shrink", memfd(sealable, 1 << 20, libc::F_SEAL_GROW | libc::F_SEAL_SEAL)),
        ("could grow", memfd(sealable, 1 << 20, libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL)),
        ("empty", memfd(sealable, 0, all)),
        ("read-only", memfd(sealable, 4 << 20, all | libc::F_SEAL_WRITE)),
        ("part of a page", memfd(sealable, 5000, all)),
        ("over the limit", memfd(sealable, 128 << 20, all)),
        ("a file", std::fs::File::open("/proc/self/exe").unwrap().into()),
        ("a socket", std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into()),
    ];
    for (what, file) in strangers {
        let view = SharedView::open(std::os::fd::AsFd::as_fd(&file), LIMIT);
        assert!(matches!(view, Err(MemoryError::NotARegion { .. })), "{what}");
        let error = SharedMemory::open(file, LIMIT, true).unwrap_err();
        assert!(matches!(error, MemoryError::NotARegion { .. }), "{what}: {error}");
    }
    // Needs no free huge page: the descriptor is refused before it is mapped.
    let huge = memfd(sealable | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB, 2 << 20, all);
    let error = SharedView::open(std::os::fd::AsFd::as_fd(&huge), LIMIT).unwrap_err();
    assert!(error.to_string().contains("hugetlb"), "{error}");
    let error = SharedMemory::open(huge, LIMIT, false).unwrap_err();
    assert!(error.to_string().contains("hugetlb"), "{error}");
    let good = memfd(sealable, 1 << 20, all);
    assert_eq!(SharedMemory::open(good, LIMIT, false).unwrap().len_bytes(), 1 << 20);
}

#[test]
fn huge_pages_are_optional() {
    let options = RegionOptions { hugetlb: true, numa_node: Some(0), lock: false };
    let region = SharedMemory::create("huge", 3 << 20, &options).unwrap();
    word(region.base(), (3 << 20) - 8).store(1, Ordering::Relaxed);
    if region.pages() == Pages::Hugetlb {
        assert_eq!(region.len_bytes() % HUGE_PAGE_BYTES, 0);
        let error = SharedMemory::open(copy_of(&region), LIMIT, false).unwrap_err();
        assert!(matches!(error, MemoryError::NotARegion { .. }));
    }
    assert!(SharedMemory::open(copy_of(&region), LIMIT, true).is_ok());
}

/// Huge pages of the page cache in the mapping at `base`, in KiB, as the host kernel counts them.
fn huge_kilobytes(base: *const u8) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", base as usize);
    let lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    let huge = lines.skip(1).find_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    huge.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).expect("a mapping there")
}

#[test]
fn a_large_region_uses_huge_pages_in_every_mapping() {
    let region = create((9 << 20) + 4096);
    if region.pages() == Pages::Small {
        return println!(
            "SKIPPED: this host kernel cannot collapse huge pages (MADV_COLLAPSE, Linux 6.1)"
        );
    }
    assert_eq!(region.pages(), Pages::Huge);
    assert_eq!(region.len_bytes(), (9 << 20) + 4096);
    assert_eq!(huge_kilobytes(region.base()), 8 << 10);
    let last = region.len_bytes() - 8;
    word(region.base(), last).store(7, Ordering::Relaxed);
    let again = SharedMemory::open(copy_of(&region), LIMIT, false).unwrap();
    assert_eq!((again.pages(), huge_kilobytes(again.base())), (Pages::Huge, 8 << 10));
    assert_eq!(word(again.base(), last).load(Ordering::Relaxed), 7);
    assert_eq!(create(1 << 20).pages(), Pages::Small);
}

#[test]
fn everything_is_resident_at_once() {
    let region = create(8 << 20);
    let pages = region.len_bytes() / page_bytes();
    let mut resident = vec![0u8; pages];
    // SAFETY: the range belongs to the region, and the vector has one byte per page of it.
    let ret =
        unsafe { libc::mincore(region.base().cast(), region.len_bytes(), resident.as_mut_ptr()) };
    assert_eq!(ret, 0);
    assert!(resident.iter().all(|byte| byte & 1 == 1));
}

#[test]
fn impossible_sizes_and_names_are_clear_errors() {
    let options = RegionOptions::default();
    let create = |name: &str, len| SharedMemory::create(name, len, &options).unwrap_err();
    assert!(matches!(create("x", 0), MemoryError::Length { .. }));
    assert!(matches!(create("x", usize::MAX), MemoryError::Length { .. }));
    assert!(matches!(create("a\0b", 4096), MemoryError::Name { .. }));
    assert!(matches!(create(&"n".repeat(300), 4096), MemoryError::Name { .. }));
    let error = create("x", 1 << 46);
    assert!(matches!(error, MemoryError::NoMemory { .. }), "{error}");
    assert!(error.to_string().contains("67108864 MiB"), "{error}");
}

#[test]
fn private_memory_ends_in_guards() {
    let memory = PrivateMemory::new(10_000).unwrap();
    assert_eq!(memory.len_bytes(), 10_000usize.next_multiple_of(page_bytes()));
    word(memory.base(), memory.len_bytes() - 8).store(7, Ordering::Relaxed);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let start = memory.base() as usize;
    let end = start + memory.len_bytes();
    let protection = |address: usize| {
        maps.lines().find_map(|line| {
            let (range, rest) = line.split_once(' ').unwrap();
            let (from, to) = range.split_once('-').unwrap();
            let parse = |hex| usize::from_str_radix(hex, 16).unwrap();
            (parse(from) <= address && address < parse(to)).then(|| rest[..4].to_owned())
        })
    };
    assert_eq!(protection(start).as_deref(), Some("rw-p"));
    assert_eq!(protection(end - 1).as_deref(), Some("rw-p"));
    assert_eq!(protection(start - 1).as_deref(), Some("---p"));
    assert_eq!(protection(end).as_deref(), Some("---p"));
}
