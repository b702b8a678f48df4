//! The handshake of a link, without I/O: see [`wire::link`].

use std::io;

use aws_lc_rs::aead::LessSafeKey;
use wire::link::{Greeting, LinkError};

use crate::secret::{Fresh, Secret, same};

/// The keys of a link: for what this side sends, and for what it receives.
pub(crate) type Keys = [LessSafeKey; 2];

/// Most bytes that a peer may send before it is authenticated: more than two greetings.
pub(crate) const INPUT_BYTES_MAX: usize = 2048;

/// Why a link is not made. The message is one sentence.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The bytes are no greeting.
    #[error("{0}")]
    Link(#[from] LinkError),
    /// A greeting at the wrong time.
    #[error("the other side sent a greeting out of order")]
    Order,
    /// The other side does not know the secret.
    #[error("the other side does not know the secret: both machines need the same secret file")]
    Proof,
    /// The other side refused.
    #[error("the other side refuses: {0}")]
    Refused(String),
    /// The host.
    #[error("no handshake is possible: {0}")]
    Host(#[from] io::Error),
}

/// Which side of a link this is, and what it waits for.
enum Step {
    /// Engine: the challenge.
    Challenge,
    /// Engine: the welcome that is expected, with the keys.
    Welcome([u8; 32], Keys),
    /// Accelerator: the hello.
    Hello,
    /// Accelerator: the proof.
    Proof,
    /// Nothing more.
    Over,
}

/// One side of a handshake.
pub(crate) struct Handshake {
    secret: Secret,
    fresh: Option<Fresh>,
    /// The keys after the accelerator's side has sent its challenge.
    keys: Option<Keys>,
    /// Hello and challenge, as they were sent.
    transcript: Vec<u8>,
    step: Step,
}

impl Handshake {
    /// The engine's side; `output` gets its first message.
    pub(crate) fn engine(secret: &Secret, output: &mut Vec<u8>) -> io::Result<Self> {
        let fresh = Fresh::new()?;
        let hello = Greeting::Hello(fresh.nonce, fresh.public).encode();
        output.extend_from_slice(&hello);
        let secret = secret.clone();
        let step = Step::Challenge;
        Ok(Self { secret, fresh: Some(fresh), keys: None, transcript: hello, step })
    }

    /// The accelerator's side.
    pub(crate) fn accelerator(secret: &Secret) -> Self {
        let secret = secret.clone();
        Self { secret, fresh: None, keys: None, transcript: Vec::new(), step: Step::Hello }
    }

    /// Whether the peer has sent no greeting yet.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self.step, Step::Hello)
    }

    /// Takes complete greetings from `input`. `Some`: the peer is authenticated; the keys are those for what this side sends and
    /// for what it receives. After an error the refusal in `output` should be sent.
    pub(crate) fn advance(
        &mut self,
        input: &mut Vec<u8>,
        output: &mut Vec<u8>,
    ) -> Result<Option<Keys>, HandshakeError> {
        let result = self.step(input, output);
        if let Err(error) = &result {
            self.step = Step::Over;
            // A refusal is not answered.
            if !matches!(error, HandshakeError::Refused(_)) {
                output.extend_from_slice(&Greeting::Refuse(error.to_string()).encode());
            }
        }
        result
    }

    fn step(
        &mut self,
        input: &mut Vec<u8>,
        output: &mut Vec<u8>,
    ) -> Result<Option<Keys>, HandshakeError> {
        while let Some((greeting, len)) = Greeting::decode(input)? {
            let bytes: Vec<u8> = input.drain(..len).collect();
            match (std::mem::replace(&mut self.step, Step::Over), greeting) {
                (_, Greeting::Refuse(why)) => return Err(HandshakeError::Refused(why)),
                (Step::Challenge, Greeting::Challenge(_, key)) => {
                    self.transcript.extend_from_slice(&bytes);
                    let keys = self.agree(&key)?;
                    let proof = self.secret.proof(&self.transcript);
                    let welcome = self.secret.welcome(&self.transcript, &proof);
                    output.extend_from_slice(&Greeting::Proof(proof).encode());
                    let [to_engine, to_accelerator] = keys;
                    self.step = Step::Welcome(welcome, [to_accelerator, to_engine]);
                }
                (Step::Welcome(expected, keys), Greeting::Welcome(mac)) => {
                    return if same(&expected, &mac) || mutants::on("believe_welcome") {
                        Ok(Some(keys))
                    } else {
                        Err(HandshakeError::Proof)
                    };
                }
                (Step::Hello, Greeting::Hello(_, key)) => {
                    // Not before: a peer that sends nothing costs no cryptography.
                    let own = Fresh::new()?;
                    let challenge = Greeting::Challenge(own.nonce, own.public).encode();
                    self.fresh = Some(own);
                    self.transcript = [&bytes[..], &challenge].concat();
                    self.keys = Some(self.agree(&key)?);
                    output.extend_from_slice(&challenge);
                    self.step = Step::Proof;
                }
                (Step::Proof, Greeting::Proof(mac)) => {
                    let proof = self.secret.proof(&self.transcript);
                    if !same(&proof, &mac) && !mutants::on("believe_proof") {
                        return Err(HandshakeError::Proof);
                    }
                    let welcome = self.secret.welcome(&self.transcript, &mac);
                    output.extend_from_slice(&Greeting::Welcome(welcome).encode());
                    return Ok(self.keys.take());
                }
                _ => return Err(HandshakeError::Order),
            }
        }
        Ok(None)
    }

    /// The keys from the accelerator to the engine, and back.
    fn agree(&mut self, theirs: &[u8; 32]) -> Result<Keys, HandshakeError> {
        let fresh = self.fresh.take().ok_or(HandshakeError::Order)?;
        let keys = fresh.keys(&self.secret, theirs, &self.transcript);
        keys.ok_or(LinkError::Impossible("its key").into())
    }
}

#[cfg(test)]
mod tests {
    use wire::link::VERSION;

    use super::*;

    const SECRET: &[u8] = b"the secret of both machines, 32+ bytes";

    /// Both sides with these secrets, with what `between` does to every message of the engine (0) and the accelerator (1).
    fn shake(
        secrets: [&[u8]; 2],
        mut between: impl FnMut(usize, &mut Vec<u8>),
    ) -> [Result<Option<Keys>, HandshakeError>; 2] {
        let mut wires = [Vec::new(), Vec::new()];
        let mut sides = [
            Handshake::engine(&Secret::of(secrets[0]), &mut wires[0]).unwrap(),
            Handshake::accelerator(&Secret::of(secrets[1])),
        ];
        between(0, &mut wires[0]);
        let mut results = [Ok(None), Ok(None)];
        for _ in 0..4 {
            for side in [1, 0] {
                if !matches!(results[side], Ok(None)) {
                    continue;
                }
                let mut output = Vec::new();
                results[side] = sides[side].advance(&mut wires[1 - side], &mut output);
                between(side, &mut output);
                wires[side].append(&mut output);
            }
        }
        results
    }

    #[test]
    fn both_sides_get_the_same_keys() {
        let [engine, accelerator] = shake([SECRET; 2], |_, _| {});
        let ([to, _], [_, from]) = (engine.unwrap().unwrap(), accelerator.unwrap().unwrap());
        let nonce = || aws_lc_rs::aead::Nonce::assume_unique_for_key([0; 12]);
        let none = aws_lc_rs::aead::Aad::empty;
        let mut text = b"hello".to_vec();
        to.seal_in_place_append_tag(nonce(), none(), &mut text).unwrap();
        assert_eq!(from.open_in_place(nonce(), none(), &mut text).unwrap(), b"hello");
    }

    #[test]
    fn another_secret_gets_no_keys_and_both_sides_say_why() {
        let [engine, accelerator] =
            shake([SECRET, b"another secret of thirty-two bytes"], |_, _| {});
        assert!(matches!(accelerator, Err(HandshakeError::Proof)));
        assert!(matches!(engine, Err(HandshakeError::Refused(why)) if why.contains("secret file")));
    }

    /// It sends a welcome all the same.
    #[test]
    fn an_accelerator_that_does_not_know_the_secret_is_not_trusted() {
        let mut count = 0;
        let [engine, _] = shake([SECRET; 2], |side, bytes| {
            if side == 1 && !bytes.is_empty() {
                count += 1;
                if count == 2 {
                    *bytes = Greeting::Welcome([7; 32]).encode();
                }
            }
        });
        assert!(matches!(engine, Err(HandshakeError::Proof)));
    }

    /// An older or a newer build on either side: both sides say which versions there are and what to do.
    #[test]
    fn another_version_is_refused_with_both_numbers() {
        for version in [VERSION - 1, VERSION + 1] {
            for other in [0, 1] {
                let mut first = true;
                let results = shake([SECRET; 2], |side, bytes| {
                    if side == other && !bytes.is_empty() && std::mem::take(&mut first) {
                        bytes[8..12].copy_from_slice(&version.to_le_bytes());
                    }
                });
                let text = format!(
                    "the other side speaks version {version} of the link protocol, this one {VERSION}: use matching builds"
                );
                let [own, others] = [&results[1 - other], &results[other]];
                let Err(HandshakeError::Link(refused)) = own else { panic!("it is accepted") };
                assert_eq!(refused.to_string(), text);
                let Err(HandshakeError::Refused(why)) = others else { panic!("it is not told") };
                assert_eq!(*why, text);
            }
        }
    }

    #[test]
    fn a_byte_that_changes_on_the_way_ends_the_handshake_on_both_sides_or_before_the_keys() {
        for (sender, nth) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            for at in [16, 40, 47] {
                let mut count = [0; 2];
                let results = shake([SECRET; 2], |side, bytes| {
                    if bytes.is_empty() {
                        return;
                    }
                    if (side, count[side]) == (sender, nth) {
                        bytes[at] ^= 1;
                    }
                    count[side] += 1;
                });
                // The engine never trusts such a link. The accelerator may have sent its welcome already.
                assert!(results[0].is_err(), "{sender} {nth} {at}");
                assert!(results[1].is_err() || (sender, nth) == (1, 1), "{sender} {nth} {at}");
            }
        }
    }

    #[test]
    fn a_recorded_handshake_does_not_work_again() {
        let mut sent = Vec::new();
        let _ = shake([SECRET; 2], |side, bytes| {
            if side == 0 {
                sent.extend_from_slice(bytes);
            }
        });
        let mut accelerator = Handshake::accelerator(&Secret::of(SECRET));
        let result = accelerator.advance(&mut sent, &mut Vec::new());
        assert!(matches!(result, Err(HandshakeError::Proof)));
    }

    #[test]
    fn greetings_out_of_order_are_refused() {
        for greeting in [Greeting::Proof([0; 32]), Greeting::Welcome([0; 32])] {
            let mut output = Vec::new();
            let mut accelerator = Handshake::accelerator(&Secret::of(SECRET));
            let result = accelerator.advance(&mut greeting.encode(), &mut output);
            assert!(matches!(result, Err(HandshakeError::Order)));
            assert!(matches!(Greeting::decode(&output), Ok(Some((Greeting::Refuse(_), _)))));
        }
    }
}
