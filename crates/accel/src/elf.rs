//! ELF files and their loaders. An ELF file is complete if everything that its headers place in the
//! file is inside it (elf(5)): both loaders, the dynamic one and a GPU's driver, read as far as the
//! headers say.

const SECTION_BYTES: u64 = 64;
const SEGMENT_BYTES: u64 = 56;
const BITS_64_LITTLE_ENDIAN: u64 = 0x0102;
/// A section with a size but no bytes in the file.
const NOBITS: u64 = 8;
/// `PT_LOAD`.
const LOAD: u64 = 1;
/// `PT_DYNAMIC`.
const DYNAMIC: u64 = 2;
/// `ET_DYN`.
const SHARED: u64 = 3;
/// `EM_X86_64` or `EM_AARCH64`.
const MACHINE: u64 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// The dynamic loader's own message.
pub(crate) fn loader_message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Whether these bytes begin like an ELF file.
pub(crate) fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// The defect of these bytes as a shared library for this machine, as the end of a sentence that starts with "it".
pub(crate) fn check_library(bytes: &[u8]) -> Result<(), String> {
    let say = |why: &str| Err(why.to_owned());
    if !is_elf(bytes) {
        return say("is not an ELF file");
    }
    let (Some(class), Some(kind), Some(machine)) =
        (number(bytes, 4, 2), number(bytes, 0x10, 2), number(bytes, 0x12, 2))
    else {
        return say("ends inside its header");
    };
    if class != BITS_64_LITTLE_ENDIAN || machine != MACHINE {
        return say("is built for another architecture");
    }
    if kind != SHARED {
        return say("is an ELF file, but not a shared library");
    }
    let Some((segments, sections)) = tables(bytes) else { return say("ends inside its header") };
    let whole = check_table(bytes, &segments, SEGMENT_BYTES, (8, 0x20), |_| true)
        .and_then(|()| {
            let in_file = |at| number(bytes, at + 4, 4) != Some(NOBITS);
            check_table(bytes, &sections, SECTION_BYTES, (0x18, 0x20), in_file)
        })
        .map_err(|end| match end {
            Some(end) => {
                let len = bytes.len();
                format!("is truncated: its headers describe {end} bytes, but it has {len}")
            }
            None => "has damaged headers".to_owned(),
        });
    whole?;
    let mut dynamic = false;
    for at in segments.places(SEGMENT_BYTES) {
        let kind = number(bytes, at, 4);
        dynamic |= kind == Some(DYNAMIC);
        let (in_file, in_memory) = (number(bytes, at + 0x20, 8), number(bytes, at + 0x28, 8));
        if kind == Some(LOAD) && in_file > in_memory {
            return say("has damaged headers");
        }
    }
    if dynamic { Ok(()) } else { say("is an ELF file, but not a shared library") }
}

/// Whether these bytes are a complete cubin. Without a section there is no kernel; code for this machine's processor is a
/// library.
pub(crate) fn is_cubin(bytes: &[u8]) -> bool {
    let Some((segments, sections)) = tables(bytes) else { return false };
    if number(bytes, 0x12, 2) == Some(MACHINE) {
        return false;
    }
    let in_file = |at| number(bytes, at + 4, 4) != Some(NOBITS);
    number(bytes, 4, 2) == Some(BITS_64_LITTLE_ENDIAN)
        && sections.count > 0
        && check_table(bytes, &sections, SECTION_BYTES, (0x18, 0x20), in_file).is_ok()
        && check_table(bytes, &segments, SEGMENT_BYTES, (8, 0x20), |_| true).is_ok()
}

/// A table of headers: its offset in the file, the size of an entry, and their number.
struct Table {
    start: u64,
    entry_bytes: u64,
    count: u64,
}

impl Table {
    /// Offset of each entry; the table must have been checked.
    fn places(&self, entry_bytes: u64) -> impl Iterator<Item = u64> {
        let start = self.start;
        (0..self.count).map(move |n| start + n * entry_bytes)
    }
}

/// The tables of segments and of sections. A count that does not fit its field is stored as 0: then there is none.
fn tables(bytes: &[u8]) -> Option<(Table, Table)> {
    let table = |start, entry_bytes, count| {
        Some(Table {
            start: number(bytes, start, 8)?,
            entry_bytes: number(bytes, entry_bytes, 2)?,
            count: number(bytes, count, 2)?,
        })
    };
    Some((table(0x20, 0x36, 0x38)?, table(0x28, 0x3a, 0x3c)?))
}

/// Whether a table and the file ranges of its entries, with offset and size at these positions of an entry, are inside
/// the file. The error is the required end of the file, if known.
fn check_table(
    bytes: &[u8],
    table: &Table,
    entry_bytes: u64,
    (offset, size): (u64, u64),
    in_file: impl Fn(u64) -> bool,
) -> Result<(), Option<u64>> {
    if table.count == 0 {
        return Ok(());
    }
    if table.entry_bytes != entry_bytes {
        return Err(None);
    }
    lies_inside(bytes, table.start, table.count * entry_bytes)?;
    for at in table.places(entry_bytes).filter(|at| in_file(*at)) {
        let field = |place| number(bytes, at + place, 8).ok_or(None);
        lies_inside(bytes, field(offset)?, field(size)?)?;
    }
    Ok(())
}

fn lies_inside(bytes: &[u8], start: u64, len: u64) -> Result<(), Option<u64>> {
    let end = start.checked_add(len).ok_or(None)?;
    if end <= bytes.len() as u64 { Ok(()) } else { Err(Some(end)) }
}

/// The little-endian number of `len` bytes, 8 at most.
pub(crate) fn number(bytes: &[u8], at: u64, len: usize) -> Option<u64> {
    let field = bytes.get(usize::try_from(at).ok()?..)?.get(..len)?;
    let mut number = [0; 8];
    number[..len].copy_from_slice(field);
    Some(u64::from_le_bytes(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shared library that every test program here has loaded.
    fn libc() -> Vec<u8> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps.lines().find_map(|line| {
            let path = line.split_whitespace().nth(5)?;
            path.contains("libc.so").then(|| path.to_owned())
        });
        std::fs::read(path.expect("tests are linked dynamically")).unwrap()
    }

    #[test]
    fn a_library_is_complete_or_refused_wherever_it_is_cut() {
        let whole = libc();
        assert_eq!(check_library(&whole), Ok(()));
        for step in 0..200 {
            let cut = &whole[..whole.len() * step / 200];
            assert!(check_library(cut).is_err(), "{} bytes", cut.len());
        }
        let why = check_library(&whole[..whole.len() - 1]).unwrap_err();
        assert!(why.starts_with("is truncated: its headers describe"), "{why}");
        assert_eq!(check_library(b"not an ELF file").unwrap_err(), "is not an ELF file");
    }

    #[test]
    fn headers_that_lie_are_refused_and_read_nothing_beyond_the_file() {
        let whole = libc();
        // Every byte of the file header, set to every kind of extreme.
        for at in 0..64 {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                let _ = check_library(&bytes);
                let _ = is_cubin(&bytes);
            }
        }
        let mut other = whole.clone();
        other[0x12] = 40;
        assert_eq!(check_library(&other).unwrap_err(), "is built for another architecture");
        let mut program = whole;
        program[0x10] = 2;
        assert!(check_library(&program).unwrap_err().contains("not a shared library"));
    }
}
