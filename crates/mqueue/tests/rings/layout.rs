//! The layout is a contract with separately compiled code: every change shows as a
//! diff, here and in the C header.

use mqueue::abi::{STRUCTS, c_header, layout_table};

/// Bytes of a Rust type as it is written in `abi`.
fn type_bytes(ty: &str) -> usize {
    match ty.strip_prefix('[').and_then(|t| t.strip_suffix(']')).and_then(|t| t.split_once("; ")) {
        Some((element, count)) => type_bytes(element) * count.parse::<usize>().unwrap(),
        None => ty[1..].parse::<usize>().unwrap() / 8,
    }
}

fn committed(path: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Compares line by line, so that a failure shows the first difference instead of two whole files.
fn assert_same(generated: &str, committed: &str, fix: &str) {
    let mut lines = committed.lines();
    for (i, line) in generated.lines().enumerate() {
        let other = lines.next().unwrap_or("(end of file)");
        assert_eq!(line, other, "line {} differs: {fix}", i + 1);
    }
    assert_eq!(lines.next(), None, "the committed file has more lines: {fix}");
}

#[test]
fn the_committed_c_header_is_the_generated_one() {
    let header = committed("../../device/include/serval/abi.h");
    assert_same(&c_header(), &header, "run `cargo xtask gen-abi` and commit the result");
}

#[test]
fn the_layout_is_the_one_on_record() {
    let fix = "if the change is intended, raise ABI_VERSION and run `cargo xtask gen-abi`";
    assert_same(&layout_table(), &committed("tests/layout.snapshot"), fix);
}

/// The structures are copied word by word, so they must consist of nothing but their fields.
#[test]
fn no_structure_has_padding_or_an_unaligned_field() {
    for s in STRUCTS {
        let mut end = 0;
        for field in s.fields {
            let bytes = type_bytes(field.ty);
            assert_eq!(field.offset, end, "{}.{} follows a hole", s.c_name, field.name);
            let element = field.ty.trim_start_matches('[').split(';').next().unwrap();
            assert_eq!(field.offset % type_bytes(element), 0, "{}.{}", s.c_name, field.name);
            end += bytes;
        }
        assert_eq!(end, s.size, "{} ends in a hole", s.c_name);
        assert_eq!(s.size % 8, 0, "{} is not whole words", s.c_name);
    }
}
