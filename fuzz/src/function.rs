//! The memory of a function's module: whatever a call leaves in descriptors and in the table of registers, no address outside of the
//! memory is used. And its file: whatever its sections and its manifest are, they are read inside the file.

use onpath::spec::Pin;
use onpath::wasm::{DESCRIPTOR_BYTES, Decision, Manifest, read_descriptor, read_registers};
use server::directory::Signature;

/// Descriptors of a memory whose length is in the first bytes, and the rest as a memory with a table of registers.
pub fn memory(input: &[u8]) {
    file(input);
    let Some((length, rest)) = input.split_first_chunk::<4>() else { return };
    let memory_bytes = (u32::from_le_bytes(*length) % (1 << 20)) as usize;
    for descriptor in rest.chunks_exact(DESCRIPTOR_BYTES) {
        let descriptor = descriptor.first_chunk().expect("it is that long");
        match read_descriptor(descriptor, memory_bytes) {
            Ok(Decision::Reply(start, len) | Decision::Rewrite(start, len)) => {
                assert!(start.checked_add(len).is_some_and(|end| end <= memory_bytes));
            }
            Ok(Decision::Pass | Decision::Drop | Decision::Steer(_) | Decision::Deliver) => {}
            Err(why) => assert!(!why.is_empty() && !why.contains(char::is_control), "{why:?}"),
        }
    }
    match read_registers(rest, memory_bytes % rest.len().max(1)) {
        Ok(registers) => {
            assert!(registers.len() <= 64);
            let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            let is_name = |name: &str| (1..=31).contains(&name.len()) && name.chars().all(letter);
            assert!(registers.iter().all(|register| is_name(&register.name)), "{registers:?}");
        }
        Err(why) => assert!(!why.is_empty() && !why.contains(char::is_control), "{why:?}"),
    }
}

/// A file as a module, and as the text of a manifest, of a signature, or of the name of a module in the directory.
fn file(input: &[u8]) {
    let short = |why: &str| assert!(!why.is_empty() && !why.contains(char::is_control), "{why:?}");
    let text = std::str::from_utf8(input).ok();
    match text.map(Manifest::parse) {
        Some(Ok(manifest)) => {
            assert_eq!(Manifest::parse(&manifest.text()), Ok(manifest.clone()));
            if let Ok(module) = manifest.put(b"\0asm\x01\0\0\0") {
                assert_eq!(Manifest::of_module(&module), Ok(Some(manifest)));
            }
        }
        Some(Err(why)) => short(&why),
        None => {}
    }
    if let Err(why) = Manifest::of_module(input) {
        short(&why);
    }
    let Some(text) = text else { return };
    match Signature::parse(text) {
        Ok(signature) => assert_eq!(Signature::parse(&signature.text()).ok(), Some(signature)),
        Err(why) => short(&why.to_string()),
    }
    match text.parse::<Pin>() {
        Ok(pin) => assert_eq!(pin.to_string(), text),
        Err(why) => short(&why),
    }
}
