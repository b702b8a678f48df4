//! The imports of a WebAssembly module. A sans-IO crate has none: no clock, no
//! randomness, no file.

use crate::Findings;

const IMPORTS: u8 = 2;
const CODE: u8 = 10;
/// A module with less code than this, in bytes, has lost the crates to the linker.
const CODE_BYTES_MIN: usize = 100_000;

/// The modules that `module` imports from, or why it proves nothing.
pub(crate) fn imports(module: &[u8]) -> Findings {
    let mut reader = Reader(module);
    match check(&mut reader) {
        Some(findings) => findings,
        None => vec!["this is not a WebAssembly module".to_owned()],
    }
}

fn check(reader: &mut Reader<'_>) -> Option<Findings> {
    if reader.take(8)? != b"\0asm\x01\0\0\0" {
        return None;
    }
    let (mut findings, mut code_bytes) = (Findings::new(), 0);
    while !reader.0.is_empty() {
        let id = reader.take(1)?[0];
        let bytes = reader.number()?;
        let section = reader.take(bytes)?;
        match id {
            IMPORTS => {
                let mut section = Reader(section);
                let count = section.number()?;
                if count > 0 {
                    let first = [section.name()?, section.name()?].join(".");
                    findings
                        .push(format!("{count} imports, the first one {first}: it is not sans-IO"));
                }
            }
            CODE => code_bytes = bytes,
            _ => {}
        }
    }
    if code_bytes < CODE_BYTES_MIN {
        findings.push(format!("only {code_bytes} bytes of code: nothing was linked"));
    }
    Some(findings)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// An unsigned number in LEB128.
    fn number(&mut self) -> Option<usize> {
        let mut number = 0;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.take(1)?[0];
            number |= usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn name(&mut self) -> Option<String> {
        let bytes = self.number()?;
        Some(String::from_utf8_lossy(self.take(bytes)?).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_import_is_found() {
        let head = b"\0asm\x01\0\0\0".to_vec();
        let imports_of = |sections: &[&[u8]]| imports(&[&head[..], &sections.concat()].concat());
        let import = b"\x02\x0d\x01\x03env\x04time\x00\x00";
        let large = [&[10, 0x80, 0x80, 0x08][..], &vec![0; 128 << 10]].concat();
        assert_eq!(imports_of(&[b"\x02\x01\x00", &large]), Findings::new());
        assert!(imports_of(&[&import[..12], b"", &large])[0].contains("not a WebAssembly"));
        let import = b"\x02\x0c\x01\x03env\x04time\x00\x00";
        assert!(imports_of(&[import, &large])[0].contains("1 imports, the first one env.time"));
        assert!(imports_of(&[])[0].contains("nothing was linked"));
        assert!(imports(b"MZ")[0].contains("not a WebAssembly"));
    }
}
