//! Descriptors of messages, as they stand in a module's memory.

/// Bytes of a descriptor: six little-endian words of 32 bits.
pub const DESCRIPTOR_BYTES: usize = 24;

/// Verdicts, as in `serval_function.h`.
const PASS: u32 = 0;
const DROP: u32 = 1;
const REPLY: u32 = 2;
const REWRITE: u32 = 3;
const STEER: u32 = 4;
const DELIVER: u32 = 5;

/// What a module has decided about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It goes on.
    Pass,
    /// It is dropped.
    Drop,
    /// It is answered with these bytes of the module's memory.
    Reply(usize, usize),
    /// These bytes take its place.
    Rewrite(usize, usize),
    /// It goes to this mqueue.
    Steer(u32),
    /// It goes into the ring of the application.
    Deliver,
}

/// The descriptor of a message that is at these bytes of the module's memory, and of the connection with this number if it is a chunk.
pub(super) fn write_descriptor(
    to: &mut [u8; DESCRIPTOR_BYTES],
    address: u32,
    len: u32,
    connection: u64,
) {
    // Two words at a time; the verdict is PASS.
    let first = u64::from(address) | u64::from(len) << 32;
    // In the argument, and in the length of what is written.
    let second = u64::from(PASS) | connection << 32;
    let third = connection >> 32 << 32;
    let (words, _) = to.as_chunks_mut::<8>();
    for (bytes, word) in words.iter_mut().zip([first, second, third]) {
        *bytes = word.to_le_bytes();
    }
}

/// Whether no descriptor has another verdict than to pass. Without a branch for each one.
pub(super) fn all_pass(descriptors: &[u8]) -> bool {
    let (descriptors, _) = descriptors.as_chunks::<DESCRIPTOR_BYTES>();
    let verdicts = descriptors.iter().map(|bytes| {
        let [_, _, _, _, _, _, _, _, a, b, c, d, ..] = *bytes;
        u32::from_le_bytes([a, b, c, d]) ^ PASS
    });
    verdicts.fold(0, |all, verdict| all | verdict) == 0
}

/// Reads what a module has written. `memory_bytes` is the length of its memory. The error says what is wrong.
pub fn read_descriptor(
    bytes: &[u8; DESCRIPTOR_BYTES],
    memory_bytes: usize,
) -> Result<Decision, String> {
    let word = |index: usize| {
        let bytes = bytes[4 * index..].first_chunk().expect("there are six words");
        u32::from_le_bytes(*bytes)
    };
    let (verdict, argument, address, len) = (word(2), word(3), word(4) as usize, word(5) as usize);
    if !matches!(verdict, REPLY | REWRITE) {
        return match verdict {
            PASS => Ok(Decision::Pass),
            DROP => Ok(Decision::Drop),
            STEER => Ok(Decision::Steer(argument)),
            DELIVER => Ok(Decision::Deliver),
            other => Err(format!("it wrote the verdict {other}, which does not exist")),
        };
    }
    if address.checked_add(len).is_none_or(|end| end > memory_bytes) {
        return Err(format!("it wrote {len} bytes at {address}, which is outside of its memory"));
    }
    let rewrites = verdict == REWRITE;
    Ok(if rewrites { Decision::Rewrite(address, len) } else { Decision::Reply(address, len) })
}
