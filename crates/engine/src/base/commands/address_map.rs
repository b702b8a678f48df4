//! The address map: which registered buffer an accelerator virtual address belongs to.
//!
//! It has the two levels of FpgaNIC's GTLB (USENIX ATC 2022, section 4.2): entries of 2 MiB, and for those that no buffer covers as a
//! whole, a complementary table of pages of 64 KiB. A large buffer needs few entries, and a lookup is two table accesses whatever
//! the number of buffers. Unlike the GTLB, buffers may begin and end at any multiple of 8 bytes, so the exact bounds are in the buffer's own
//! record, and a page holds up to [`PER_PAGE_MAX`] of them.
//!
//! One map describes one address space. A buffer has an owner, who alone can name it. Registering allocates; translating does not.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

/// Bytes of a page of the complementary table.
pub const PAGE_BYTES: u64 = 64 << 10;
/// Bytes of an entry of the first table.
pub const ENTRY_BYTES: u64 = 2 << 20;
/// Buffers that a page may hold parts of.
pub const PER_PAGE_MAX: usize = 4;
/// Largest buffer.
pub const BUFFER_BYTES_MAX: u64 = 512 << 30;
/// Buffers of a map.
pub const BUFFERS_MAX: usize = 4096;
/// Addresses and sizes of buffers are multiples of this.
pub const ALIGNMENT: u64 = 8;

const PAGES: usize = (ENTRY_BYTES / PAGE_BYTES) as usize;
/// No buffer.
const NONE: u32 = u32::MAX;

/// Why a buffer is not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The size is 0 or too large.
    #[error("a buffer has 8 bytes to 512 GiB")]
    Size,
    /// The address or the size is not a multiple of [`ALIGNMENT`].
    #[error("address and size of a buffer are multiples of 8")]
    Unaligned,
    /// Its end is beyond the largest address.
    #[error("the buffer goes past the end of the address space")]
    Wraps,
    /// It shares addresses with a registered buffer.
    #[error("the buffer overlaps one that is registered")]
    Overlap,
    /// One of its pages holds parts of [`PER_PAGE_MAX`] buffers already.
    #[error("64 KiB hold parts of at most 4 buffers: register larger ones")]
    PageFull,
    /// The limit of buffers, or of their bytes together, is reached.
    #[error("a map has at most 4096 buffers, and 512 GiB in all")]
    Full,
}

/// Why a range is not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TranslateError {
    /// The range is empty.
    #[error("the range is empty")]
    Empty,
    /// The first byte is in no buffer.
    #[error("the address is in no registered buffer")]
    Unknown,
    /// A byte is in a buffer of another owner.
    #[error("the range touches a buffer of another owner")]
    Foreign,
    /// It begins in a buffer and continues where there is none.
    #[error("the range goes past the end of its buffer")]
    BeyondEnd,
    /// Its end is beyond the largest address.
    #[error("the range goes past the end of the address space")]
    Wraps,
}

impl TranslateError {
    /// All of them, in the order of their index.
    pub const ALL: [Self; 5] =
        [Self::Empty, Self::Unknown, Self::Foreign, Self::BeyondEnd, Self::Wraps];

    /// Name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Unknown => "unknown_address",
            Self::Foreign => "foreign_buffer",
            Self::BeyondEnd => "beyond_end",
            Self::Wraps => "wraps",
        }
    }
}

/// A part of a range: bytes of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The buffer, as [`AddressMap::register`] numbered it.
    pub buffer: u32,
    /// Offset in the buffer.
    pub offset: u64,
    /// How many bytes, at least 1.
    pub bytes: u64,
}

/// A registered buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Who may name it.
    pub owner: u32,
    /// Its first address.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
}

impl Buffer {
    fn end(&self) -> u64 {
        self.address + self.bytes
    }
}

/// The buffers of a page, in no order; [`NONE`] in free places.
type Page = [u32; PER_PAGE_MAX];

const EMPTY: Page = [NONE; PER_PAGE_MAX];

/// An entry of the first table.
#[derive(Clone, Copy)]
enum Main {
    /// One buffer covers all of it.
    Whole(u32),
    /// The group of its pages in the complementary table.
    Pages(u32),
}

/// Registered buffers by address.
#[derive(Default)]
pub struct AddressMap {
    /// By address / [`ENTRY_BYTES`]. Others choose the addresses, so the hash is keyed.
    main: HashMap<u64, Main>,
    /// The complementary table.
    groups: Vec<[Page; PAGES]>,
    free_groups: Vec<u32>,
    /// By number.
    buffers: Vec<Option<Buffer>>,
    free_numbers: Vec<u32>,
    /// Numbers by first address, to find neighbours.
    order: BTreeMap<u64, u32>,
    bytes: u64,
}

impl AddressMap {
    /// A map without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// The buffer of this number.
    pub fn buffer(&self, number: u32) -> Option<&Buffer> {
        self.buffers.get(number as usize)?.as_ref()
    }

    /// Registers a buffer, and returns its number. A number is free again when its buffer is unregistered.
    pub fn register(&mut self, owner: u32, address: u64, bytes: u64) -> Result<u32, RegisterError> {
        if !(1..=BUFFER_BYTES_MAX).contains(&bytes) {
            return Err(RegisterError::Size);
        }
        if address % ALIGNMENT != 0 || bytes % ALIGNMENT != 0 {
            return Err(RegisterError::Unaligned);
        }
        let end = address.checked_add(bytes).ok_or(RegisterError::Wraps)?;
        if self.overlaps(address, end) {
            return Err(RegisterError::Overlap);
        }
        let is_full = self.order.len() == BUFFERS_MAX || self.bytes + bytes > BUFFER_BYTES_MAX;
        if is_full {
            return Err(RegisterError::Full);
        }
        let buffer = Buffer { owner, address, bytes };
        // Only the first and the last page can hold other buffers as well.
        if [address, end - 1].into_iter().any(|at| self.page(at).is_some_and(is_page_full)) {
            return Err(RegisterError::PageFull);
        }
        let number = self.free_numbers.pop().unwrap_or_else(|| {
            self.buffers.push(None);
            self.buffers.len() as u32 - 1
        });
        self.buffers[number as usize] = Some(buffer);
        self.order.insert(address, number);
        self.bytes += bytes;
        for entry in address / ENTRY_BYTES..=(end - 1) / ENTRY_BYTES {
            self.enter(entry, number, &buffer);
        }
        Ok(number)
    }

    /// Whether a buffer has an address in the range.
    fn overlaps(&self, address: u64, end: u64) -> bool {
        let below = self.order.range(..end).next_back();
        let last = below.and_then(|(_, number)| self.buffer(*number));
        last.is_some_and(|buffer| buffer.end() > address)
    }

    /// Makes `buffer` known in one entry of the first table.
    fn enter(&mut self, entry: u64, number: u32, buffer: &Buffer) {
        let start = entry * ENTRY_BYTES;
        // The last address of the last entry has no successor.
        let last = start + (ENTRY_BYTES - 1);
        if buffer.address <= start && last < buffer.end() {
            self.main.insert(entry, Main::Whole(number));
            return;
        }
        let group = match self.main.entry(entry) {
            Entry::Occupied(known) => match *known.get() {
                Main::Pages(group) => group,
                Main::Whole(_) => unreachable!("overlapping buffers are refused"),
            },
            Entry::Vacant(vacant) => {
                let group = self.free_groups.pop().unwrap_or_else(|| {
                    self.groups.push([EMPTY; PAGES]);
                    self.groups.len() as u32 - 1
                });
                vacant.insert(Main::Pages(group));
                group
            }
        };
        for page in pages_in(start, buffer) {
            let page = &mut self.groups[group as usize][page];
            let free = page.iter_mut().find(|place| **place == NONE);
            *free.expect("the pages that can be full were checked") = number;
        }
    }

    /// Forgets a buffer and returns it; `None` if the number is free or belongs to another owner.
    pub fn unregister(&mut self, owner: u32, number: u32) -> Option<Buffer> {
        let buffer = *self.buffer(number).filter(|buffer| buffer.owner == owner)?;
        self.buffers[number as usize] = None;
        self.free_numbers.push(number);
        self.order.remove(&buffer.address);
        self.bytes -= buffer.bytes;
        for entry in buffer.address / ENTRY_BYTES..=(buffer.end() - 1) / ENTRY_BYTES {
            if let Some(Main::Pages(group)) = self.main.get(&entry).copied() {
                let pages = &mut self.groups[group as usize];
                for page in pages_in(entry * ENTRY_BYTES, &buffer) {
                    pages[page]
                        .iter_mut()
                        .filter(|place| **place == number)
                        .for_each(|p| *p = NONE);
                }
                if pages.iter().any(|page| *page != EMPTY) {
                    continue;
                }
                self.free_groups.push(group);
            }
            self.main.remove(&entry);
        }
        Some(buffer)
    }

    /// Translates the range into runs, one for each buffer that it touches, in the order of addresses. The whole range is checked
    /// first, so an error means that no run was returned.
    pub fn translate(
        &self,
        owner: u32,
        address: u64,
        bytes: u64,
    ) -> Result<Runs<'_>, TranslateError> {
        if bytes == 0 {
            return Err(TranslateError::Empty);
        }
        address.checked_add(bytes).ok_or(TranslateError::Wraps)?;
        let mut rest = Runs { map: self, address, bytes };
        while rest.bytes > 0 {
            let Some((_, buffer)) = self.find(rest.address) else {
                let is_first = rest.address == address;
                return Err(if is_first {
                    TranslateError::Unknown
                } else {
                    TranslateError::BeyondEnd
                });
            };
            if buffer.owner != owner {
                return Err(TranslateError::Foreign);
            }
            rest.skip_to(buffer.end());
        }
        Ok(Runs { map: self, address, bytes })
    }

    /// The buffer that this byte belongs to.
    fn find(&self, address: u64) -> Option<(u32, &Buffer)> {
        let numbers = match self.main.get(&(address / ENTRY_BYTES))? {
            Main::Whole(number) => std::slice::from_ref(number),
            Main::Pages(group) => &self.groups[*group as usize][page_of(address)][..],
        };
        numbers.iter().find_map(|number| {
            let buffer = self.buffer(*number)?;
            (buffer.address..buffer.end()).contains(&address).then_some((*number, buffer))
        })
    }

    /// The page of the complementary table with this address.
    fn page(&self, address: u64) -> Option<&Page> {
        match self.main.get(&(address / ENTRY_BYTES))? {
            Main::Whole(_) => None,
            Main::Pages(group) => Some(&self.groups[*group as usize][page_of(address)]),
        }
    }
}

fn is_page_full(page: &Page) -> bool {
    page.iter().all(|number| *number != NONE)
}

fn page_of(address: u64) -> usize {
    (address % ENTRY_BYTES / PAGE_BYTES) as usize
}

/// The pages of the entry that begins at `start` in which the buffer has bytes.
fn pages_in(start: u64, buffer: &Buffer) -> std::ops::RangeInclusive<usize> {
    let first = buffer.address.max(start);
    let last = (buffer.end() - 1).min(start + (ENTRY_BYTES - 1));
    page_of(first)..=page_of(last)
}

/// The runs of a range that was translated.
pub struct Runs<'a> {
    map: &'a AddressMap,
    address: u64,
    bytes: u64,
}

impl Runs<'_> {
    /// Continues at this address, or ends. Returns the number of bytes in between.
    fn skip_to(&mut self, end: u64) -> u64 {
        let bytes = self.bytes.min(end - self.address);
        self.address += bytes;
        self.bytes -= bytes;
        bytes
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.bytes == 0 {
            return None;
        }
        let (number, buffer) = self.map.find(self.address).expect("the range was checked");
        let offset = self.address - buffer.address;
        let bytes = self.skip_to(buffer.end());
        Some(Run { buffer: number, offset, bytes })
    }
}

#[cfg(test)]
mod tests;
