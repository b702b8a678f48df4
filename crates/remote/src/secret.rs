//! The shared secret: proofs that the other side knows it, and the keys of a link.
//!
//! A proof is HMAC-SHA-256 (RFC 2104) with the secret over the side's name and both hellos, which contain the version
//! and a fresh nonce of each side. The keys of the two directions are derived with HKDF-SHA-256 (RFC 5869) from the
//! secret and an ephemeral X25519 agreement (RFC 7748): who learns the secret later cannot decrypt recorded traffic.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aws_lc_rs::aead::{AES_256_GCM, LessSafeKey, UnboundKey};
use aws_lc_rs::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::{digest, hmac};
use wire::link::{DIGEST_BYTES, PROOF_BYTES};

/// Shortest secret: it must not be guessable by a peer that records one handshake.
const SECRET_BYTES_MIN: usize = 32;
const SECRET_BYTES_MAX: u64 = 4096;

/// The secret that both machines know.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

/// Why a file is not used as a secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read.
    #[error("the secret file {path:?} cannot be read: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others can read it.
    #[error("the secret file {0:?} can be read by other users: run chmod 600 on it")]
    Open(PathBuf),
    /// Its length.
    #[error(
        "the secret file {path:?} has {bytes} bytes, must have {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}: \
         write one with `head -c 32 /dev/urandom | base64`"
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Its bytes without white space at the end.
        bytes: usize,
    },
}

impl Secret {
    /// Reads a file that only its owner can access. White space at its end does not count.
    pub fn read(path: &Path) -> Result<Self, SecretError> {
        let failed = |source| SecretError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
            return Err(SecretError::Open(path.to_owned()));
        }
        let mut bytes = Vec::new();
        file.take(SECRET_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
        let long = bytes.len() as u64 > SECRET_BYTES_MAX;
        bytes.truncate(bytes.trim_ascii_end().len());
        if long || bytes.len() < SECRET_BYTES_MIN {
            return Err(SecretError::Length { path: path.to_owned(), bytes: bytes.len() });
        }
        Ok(Self(bytes))
    }

    /// The text of a new secret: 64 hexadecimal digits.
    pub fn random() -> io::Result<String> {
        let mut bytes = [0u8; 32];
        let failed = |_| io::Error::other("the host has no random numbers");
        aws_lc_rs::rand::fill(&mut bytes).map_err(failed)?;
        Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// A secret of these bytes, for tests.
    #[doc(hidden)]
    pub fn of(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    fn context(&self, parts: &[&[u8]]) -> hmac::Context {
        let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, &self.0));
        parts.iter().for_each(|part| context.update(part));
        context
    }

    /// The engine's proof for a hello and a challenge.
    pub(crate) fn proof(&self, transcript: &[u8]) -> [u8; PROOF_BYTES] {
        bytes_of(self.context(&[b"serval link engine", transcript]).sign().as_ref())
    }

    /// The accelerator's, which also depends on the engine's.
    pub(crate) fn welcome(&self, transcript: &[u8], proof: &[u8]) -> [u8; PROOF_BYTES] {
        bytes_of(self.context(&[b"serval link accelerator", transcript, proof]).sign().as_ref())
    }
}

/// The SHA-256 digest of a kernel's file, by which both sides know whether they mean the same one.
pub fn digest_of(file: &[u8]) -> [u8; DIGEST_BYTES] {
    bytes_of(digest::digest(&digest::SHA256, file).as_ref())
}

fn bytes_of(bytes: &[u8]) -> [u8; PROOF_BYTES] {
    bytes.try_into().expect("SHA-256 has 32 bytes")
}

/// Compares in constant time.
pub(crate) fn same(a: &[u8; PROOF_BYTES], b: &[u8; PROOF_BYTES]) -> bool {
    aws_lc_rs::constant_time::verify_slices_are_equal(a, b).is_ok()
}

/// One side's fresh nonce and key pair.
pub(crate) struct Fresh {
    pub(crate) nonce: [u8; PROOF_BYTES],
    pub(crate) public: [u8; PROOF_BYTES],
    private: EphemeralPrivateKey,
}

impl Fresh {
    pub(crate) fn new() -> io::Result<Self> {
        let failed = |_| io::Error::other("the host has no random numbers");
        let mut nonce = [0; PROOF_BYTES];
        aws_lc_rs::rand::fill(&mut nonce).map_err(failed)?;
        let private =
            EphemeralPrivateKey::generate(&X25519, &SystemRandom::new()).map_err(failed)?;
        let public = private.compute_public_key().map_err(failed)?;
        let public = public.as_ref().try_into().expect("X25519 keys have 32 bytes");
        Ok(Self { nonce, public, private })
    }

    /// The keys from the accelerator to the engine, and back. `None`: the peer's key is invalid.
    pub(crate) fn keys(
        self,
        secret: &Secret,
        theirs: &[u8; PROOF_BYTES],
        transcript: &[u8],
    ) -> Option<[LessSafeKey; 2]> {
        let transcript = if mutants::on("keys_without_handshake") { &[] } else { transcript };
        let salt = digest::digest(&digest::SHA256, transcript);
        let theirs = UnparsedPublicKey::new(&X25519, theirs);
        agree_ephemeral(self.private, theirs, (), |shared| {
            let known = match () {
                () if mutants::on("keys_without_agreement") => secret.0.clone(),
                () if mutants::on("keys_without_secret") => shared.to_vec(),
                () => [&secret.0[..], shared].concat(),
            };
            let root = Salt::new(HKDF_SHA256, salt.as_ref()).extract(&known);
            let key = |name: &[u8]| {
                let name = [name];
                let expanded = root.expand(&name, &AES_256_GCM).expect("a short output");
                LessSafeKey::new(UnboundKey::from(expanded))
            };
            let to_engine = b"serval link to engine";
            let to_accelerator: &[u8] = match mutants::on("one_key_for_both_directions") {
                true => to_engine,
                false => b"serval link to accelerator",
            };
            Ok([key(to_engine), key(to_accelerator)])
        })
        .ok()
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::aead::{Aad, Nonce};

    use super::*;

    const OWN: &[u8] = b"a secret of the tests, of at least 32 bytes";
    const OTHER: &[u8] = b"another secret of the tests, of 32 bytes";

    /// A text that is sealed with the first of the keys.
    fn sealed(keys: Option<[LessSafeKey; 2]>) -> Vec<u8> {
        let [key, _] = keys.expect("a valid key");
        let mut text = vec![0; 32];
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        key.seal_in_place_append_tag(nonce, Aad::empty(), &mut text).unwrap();
        text
    }

    /// The keys depend on all three: the secret, the agreement, without which who learns the secret later could read what was
    /// recorded, and the handshake.
    #[test]
    fn the_keys_depend_on_the_secret_the_agreement_and_the_handshake() {
        let secrets = [OWN, OTHER].map(Secret::of);
        // Both sides of one agreement, with what they agree upon beside it.
        let both = |secrets: [&Secret; 2], transcripts: [&[u8]; 2]| {
            let [a, b] = [(); 2].map(|()| Fresh::new().unwrap());
            let [of_a, of_b] = [a.public, b.public];
            let a = a.keys(secrets[0], &of_b, transcripts[0]);
            let b = b.keys(secrets[1], &of_a, transcripts[1]);
            [sealed(a), sealed(b)]
        };
        let [a, b] = both([&secrets[0]; 2], [b"handshake"; 2]);
        assert_eq!(a, b);
        let [a, b] = both([&secrets[0], &secrets[1]], [b"handshake"; 2]);
        assert_ne!(a, b, "the secret");
        let [a, b] = both([&secrets[0]; 2], [b"handshake", b"another"]);
        assert_ne!(a, b, "the handshake");
        let [one, other] = [(); 2].map(|()| both([&secrets[0]; 2], [b"handshake"; 2]));
        assert_ne!(one, other, "the agreement");
        // A key of which every agreement is known.
        let known = Fresh::new().unwrap().keys(&secrets[0], &[0; PROOF_BYTES], b"handshake");
        assert!(known.is_none());
    }
}
