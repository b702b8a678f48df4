//! The messages of transfers: decoded as encoded, or refused. Sealed streams: opened to what was sealed, or refused. Compressed
//! data: expanded within limits, or refused.

use transfer::command::limits::{HEADER_BYTES, RECORD_BYTES};
use transfer::service::message::{ANSWER_BYTES_MAX, Answer, REQUEST_BYTES_MAX, Request};
use transfer::stages::compress::Expander;
use transfer::stages::seal::Opener;
use transfer::{Cipher, ExpandLimits, Format, Key, Ran, TransferError};

/// A request to a transfer engine, and an answer to its caller.
pub fn message(input: &[u8]) {
    if let Ok(request) = Request::decode(input) {
        assert!(input.len() <= REQUEST_BYTES_MAX);
        assert_eq!(request.encode(), input, "a request has one encoding");
    }
    if let Ok(answer) = Answer::decode(input) {
        assert!(input.len() <= ANSWER_BYTES_MAX);
        assert_eq!(answer.encode(), input, "an answer has one encoding");
        if let Answer::Ended { result: Err(error), .. } = &answer {
            assert!(!error.text.chars().any(char::is_control), "a text steers no terminal");
            assert!(!error.name().is_empty());
        }
    }
}

/// A stream that a peer sends to be opened. The first byte is the cipher and the length of parts.
pub fn sealed(input: &[u8]) {
    let Some((choice, stream)) = input.split_first() else { return };
    let cipher = Cipher::ALL[usize::from(choice & 1)];
    let whole = open(cipher, stream, usize::MAX);
    let parts = open(cipher, stream, 1 + usize::from(choice >> 1));
    assert_eq!(whole, parts, "however the stream is cut");
    if let (Ok(plain), Cipher::Aes256Ctr) = (&whole, cipher) {
        assert_eq!(plain.len(), stream.len() - HEADER_BYTES);
    }
    // No input is a stream that a secret key has sealed.
    assert!(whole.is_err() || cipher == Cipher::Aes256Ctr, "a forged stream opens");
}

/// Compressed data of a stranger. The first byte is the format and the length of parts.
pub fn compressed(input: &[u8]) {
    const BYTES_MAX: u64 = 4 << 20;
    let Some((choice, data)) = input.split_first() else { return };
    let format = Format::ALL[usize::from(choice & 1)];
    let expand = |part| {
        let limits = ExpandLimits { bytes: BYTES_MAX, ratio: u32::MAX };
        let mut expander = Expander::new(format, limits).expect("there is memory");
        pass(data, part, |input, last, out| expander.run(input, last, out))
    };
    let (whole, parts) = (expand(usize::MAX), expand(1 + usize::from(choice >> 1)));
    match (&whole, &parts) {
        (Ok(whole), Ok(parts)) => assert!(whole == parts, "however the data is cut"),
        // What is wrong first may depend on how much has been looked at, but not whether something is.
        _ => assert!(whole.is_err() && parts.is_err()),
    }
    assert!(whole.is_ok_and(|plain| plain.len() as u64 <= BYTES_MAX) || parts.is_err());
}

/// Opens a stream that comes in parts.
fn open(cipher: Cipher, stream: &[u8], part: usize) -> Result<Vec<u8>, TransferError> {
    let mut opener = Opener::new(cipher, &Key::new([0x5e; 32]));
    pass(stream, part, |input, last, out| opener.run(input, last, out))
}

/// What a stage makes of bytes that come in parts.
fn pass(
    bytes: &[u8],
    part: usize,
    mut run: impl FnMut(&[u8], bool, &mut [u8]) -> Result<Ran, TransferError>,
) -> Result<Vec<u8>, TransferError> {
    let (mut made_all, mut out, mut at) = (Vec::new(), vec![0; RECORD_BYTES], 0usize);
    loop {
        let end = at.saturating_add(part).min(bytes.len());
        let Ran { taken, made, done } = run(&bytes[at..end], end == bytes.len(), &mut out)?;
        assert!(taken <= end - at && made <= out.len());
        made_all.extend(&out[..made]);
        at += taken;
        if done {
            assert_eq!(at, bytes.len());
            return Ok(made_all);
        }
        assert!(taken > 0 || made > 0, "it goes on");
    }
}
