//! What a module may consist of, checked before it is compiled: by the engine, which then need not start the compiler, and again by the compiler.
//!
//! Compiling takes time and memory for each function, also for an empty one of three bytes, and the engine keeps a record of each function, type, import and export
//! of a module that it has loaded. So the size of the file alone limits nothing.

/// Functions of a module at most, and entries of each other section: types, imports, tables, globals, exports, elements and data.
pub const ENTRIES_MAX: u32 = 10_000;
/// Sections of a module at most.
const SECTIONS_MAX: usize = 1000;
/// The bytes with which a module begins: `\0asm`, version 1.
pub(crate) const HEADER: [u8; 8] = *b"\0asm\x01\0\0\0";

/// Sections that begin with the number of their entries, and what these are.
const COUNTED: [(u8, &str); 10] = [
    (1, "types"),
    (2, "imports"),
    (3, "functions"),
    (4, "tables"),
    (5, "memories"),
    (6, "globals"),
    (7, "exports"),
    (9, "elements"),
    (10, "functions"),
    (11, "data segments"),
];

/// Whether a module of at most `bytes_max` is small enough to be compiled. The error says what is wrong and what would be right; other mistakes are the compiler's to find.
pub fn check(module: &[u8], bytes_max: u64) -> Result<(), String> {
    let bytes = module.len();
    if bytes as u64 > bytes_max {
        return Err(format!("it has {bytes} bytes, and a module has at most {bytes_max}"));
    }
    for section in sections(module)? {
        let Some((_, what)) = COUNTED.iter().find(|(id, _)| *id == section.id) else { continue };
        let (count, _) = read_number(section.content).unwrap_or_default();
        if count > ENTRIES_MAX {
            return Err(format!("it has {count} {what}, and a module has at most {ENTRIES_MAX}"));
        }
    }
    Ok(())
}

/// A section of a module.
pub(crate) struct Section<'a> {
    pub(crate) id: u8,
    pub(crate) content: &'a [u8],
    /// With its id and its length.
    #[cfg_attr(not(feature = "wasm"), allow(dead_code))]
    pub(crate) whole: &'a [u8],
}

pub(crate) fn sections(module: &[u8]) -> Result<Vec<Section<'_>>, String> {
    let wrong = || "it is no WebAssembly module: its sections are cut off".to_owned();
    let Some(mut rest) = module.strip_prefix(&HEADER) else {
        return Err("it is no WebAssembly module: it does not begin with \\0asm, version 1".into());
    };
    let mut sections = Vec::new();
    while let Some((id, after)) = rest.split_first() {
        let (len, after) = read_number(after).ok_or_else(wrong)?;
        let content = after.get(..len as usize).ok_or_else(wrong)?;
        let next = &after[len as usize..];
        let whole = &rest[..rest.len() - next.len()];
        if sections.len() == SECTIONS_MAX {
            return Err(format!("it has more than {SECTIONS_MAX} sections"));
        }
        sections.push(Section { id: *id, content, whole });
        rest = next;
    }
    Ok(sections)
}

/// An unsigned 32-bit number in LEB128, and what follows it.
pub(crate) fn read_number(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let mut number = 0u32;
    for (index, byte) in bytes.iter().take(5).enumerate() {
        let part = u32::from(byte & 0x7f);
        if index == 4 && part > 15 {
            return None;
        }
        number |= part << (7 * index);
        if byte & 0x80 == 0 {
            return Some((number, &bytes[index + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A module with one section.
    fn with_section(id: u8, content: &[u8]) -> Vec<u8> {
        let len = content.len() as u32;
        let number = [len as u8 & 0x7f | 0x80, (len >> 7) as u8 & 0x7f | 0x80, (len >> 14) as u8];
        [&HEADER[..], &[id], &number, content].concat()
    }

    #[test]
    fn each_kind_of_entry_has_a_limit() {
        // 10 000 and 10 001 in LEB128.
        let (most, more) = ([0x90, 0x4e], [0x91, 0x4e]);
        for (id, what) in COUNTED {
            assert_eq!(check(&with_section(id, &most), 100), Ok(()));
            let why = check(&with_section(id, &more), 100).unwrap_err();
            assert_eq!(why, format!("it has 10001 {what}, and a module has at most 10000"));
        }
        assert_eq!(check(&with_section(0, &more), 100), Ok(()), "a section of others");
        let many = [&HEADER[..], &[0, 0].repeat(SECTIONS_MAX + 1)].concat();
        assert_eq!(check(&many, 1 << 20), Err("it has more than 1000 sections".to_owned()));
        let long = check(&many, 100).unwrap_err();
        assert!(long.contains("and a module has at most 100"), "{long}");
    }
}
