//! The messages of transfers: decoded as encoded, or refused. Sealed streams: opened to what was sealed, or refused.

use transfer::message::{ANSWER_BYTES_MAX, Answer, REQUEST_BYTES_MAX, Request};
use transfer::seal::{HEADER_BYTES, Opener, RECORD_BYTES};
use transfer::{Cipher, Key, Ran, TransferError};

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

/// Opens a stream that comes in parts.
fn open(cipher: Cipher, stream: &[u8], part: usize) -> Result<Vec<u8>, TransferError> {
    let mut opener = Opener::new(cipher, &Key::new([0x5e; 32]));
    let (mut plain, mut out, mut at) = (Vec::new(), vec![0; RECORD_BYTES], 0usize);
    loop {
        let end = at.saturating_add(part).min(stream.len());
        let Ran { taken, made, done } =
            opener.run(&stream[at..end], end == stream.len(), &mut out)?;
        assert!(taken <= end - at && made <= out.len());
        plain.extend(&out[..made]);
        at += taken;
        if done {
            assert_eq!(at, stream.len());
            return Ok(plain);
        }
        assert!(taken > 0 || made > 0 || end < stream.len(), "it goes on");
    }
}
