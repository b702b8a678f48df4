//! The directory of functions: a folder of modules that are named by their digests and signed.
//!
//! ```text
//! FOLDER/NAME/SHA256.wasm    a module; its manifest has the same name
//! FOLDER/NAME/SHA256.sig     its signature, if it has one
//! ```
//!
//! A configuration names a module as `NAME@sha256:DIGEST`, so nothing but these bytes is ever run for it, also if others write to the
//! folder. The signature says who vouches for them: it is by ed25519, over the digest. An unsigned module is refused unless that is
//! allowed. A file is written under another name and then renamed, so a reader finds all of it or nothing.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use builtins::read_module;
use engine::topology::EngineSettings;
use onpath::spec::{Pin, is_name};
use onpath::wasm::{Manifest, Module};
use sys::private_file::open_regular;

/// What a signature is over, before the digest.
const CONTEXT: &[u8] = b"serval function signature 1\0";
const SIGNATURE_HEADER: &str = "serval function signature 1";
const KEY_HEADER: &str = "serval function key 1";
const KEY_PREFIX: &str = "ed25519:";
/// Longest text of a signature or of a key, in bytes.
const TEXT_BYTES_MAX: u64 = 1024;
/// Names and modules of a directory that are listed, at most.
const LISTED_MAX: usize = 10_000;

/// Why something of the directory cannot be used. One sentence each.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// A file cannot be read or written.
    #[error("{path} cannot be {verb}: {why}")]
    Io {
        /// The file.
        path: PathBuf,
        /// `read` or `written`.
        verb: &'static str,
        /// Why.
        why: String,
    },
    /// There is no such module.
    #[error("{pin} is not in the directory {folder}: `serval fn install` puts a module there")]
    Missing {
        /// What was asked for.
        pin: Pin,
        /// The directory.
        folder: PathBuf,
    },
    /// The content is not what its name says.
    #[error(
        "{path} has another content than its name says: remove it, and install the module again"
    )]
    Digest {
        /// The file.
        path: PathBuf,
    },
    /// The module cannot be used.
    #[error("the module cannot be used: {0}")]
    Module(String),
    /// It has no manifest.
    #[error("the module has no manifest: `serval fn build` makes one with it")]
    NoManifest,
    /// The manifest has another name than the file.
    #[error("the manifest of the module has the name {found:?}, not {expected:?}")]
    Name {
        /// What the manifest has.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// It has no signature.
    #[error(
        "the module has no signature: `serval fn sign` makes one; or allow unsigned modules (`engine.unsigned_functions`, `--unsigned`)"
    )]
    Unsigned,
    /// The signature is for something else.
    #[error("the signature of the module is wrong: it is for other bytes, or was not made by {0}")]
    Signature(PublicKey),
    /// The key is not one of those that are trusted.
    #[error(
        "the module is signed by {0}, which is not trusted: add this key (`engine.function_keys`, `--trust`) if you trust its owner"
    )]
    Untrusted(PublicKey),
    /// The text is no signature, or no key.
    #[error("it is no {what}: {right}")]
    Text {
        /// `signature`, `public key` or `key file`.
        what: &'static str,
        /// What would be right.
        right: &'static str,
    },
    /// Others could have read the key, or replaced it.
    #[error(
        "other users may read or write the key file {path} (mode {mode:04o}), so anybody may have signed with it: `chmod 600` it, or make another key with `serval fn keygen`"
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// There is no randomness, or the library refuses the key.
    #[error("the key cannot be used")]
    Key,
}

/// Who signs: shown as `ed25519:` and 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublicKey(pub [u8; 32]);

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{KEY_PREFIX}{}", hex(&self.0))
    }
}

impl FromStr for PublicKey {
    type Err = DirectoryError;

    fn from_str(text: &str) -> Result<Self, DirectoryError> {
        let key = text.strip_prefix(KEY_PREFIX).and_then(unhex);
        let right = "it is `ed25519:` and 64 hexadecimal digits";
        key.map(Self).ok_or(DirectoryError::Text { what: "public key", right })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

/// A signature as it stands in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Who signed.
    pub key: PublicKey,
    bytes: [u8; 64],
}

impl Signature {
    /// Reads the text of a file.
    pub fn parse(text: &str) -> Result<Self, DirectoryError> {
        let mut lines = text.lines();
        let mut line = |prefix: &str| lines.next().and_then(|line| line.strip_prefix(prefix));
        let header = line(SIGNATURE_HEADER);
        let key = line("key ").and_then(|key| key.parse().ok());
        let bytes = line("signature ").and_then(unhex);
        match (header, key, bytes, lines.next()) {
            (Some(""), Some(key), Some(bytes), None) => Ok(Self { key, bytes }),
            _ => {
                let right = "`serval fn sign` writes one, of three lines";
                Err(DirectoryError::Text { what: "signature", right })
            }
        }
    }

    /// The text.
    pub fn text(&self) -> String {
        let Self { key, bytes } = self;
        format!("{SIGNATURE_HEADER}\nkey {key}\nsignature {}\n", hex(bytes))
    }

    /// Whether it is for this module. Who signed may be anybody.
    pub fn check(&self, module: &[u8]) -> Result<(), DirectoryError> {
        let key = UnparsedPublicKey::new(&ED25519, self.key.0);
        let signed = [CONTEXT, &Pin::digest(module)].concat();
        key.verify(&signed, &self.bytes).map_err(|_| DirectoryError::Signature(self.key))
    }
}

/// A key that signs.
pub struct SigningKey(Ed25519KeyPair);

impl SigningKey {
    /// Makes a key, and writes it into a file that does not exist and that only its user may read.
    pub fn make(path: &Path) -> Result<Self, DirectoryError> {
        let mut seed = [0u8; 32];
        aws_lc_rs::rand::fill(&mut seed).map_err(|_| DirectoryError::Key)?;
        let key = Self::of_seed(&seed)?;
        let text = format!("{KEY_HEADER}\n{}\n", hex(&seed));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| written_error(path, &error))?;
        Ok(key)
    }

    /// Reads the file of a key, which no other user may have access to.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        let (file, found) = open_regular(path).map_err(|error| read_error(path, error))?;
        let mode = found.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(DirectoryError::Open { path: path.to_owned(), mode });
        }
        let text = read_short(path, file)?;
        let seed = text.strip_prefix(KEY_HEADER).and_then(|rest| unhex(rest.trim()));
        let right = "`serval fn keygen` makes one";
        Self::of_seed(&seed.ok_or(DirectoryError::Text { what: "key file", right })?)
    }

    fn of_seed(seed: &[u8; 32]) -> Result<Self, DirectoryError> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed);
        pair.map(Self).map_err(|_| DirectoryError::Key)
    }

    /// The public part.
    pub fn public(&self) -> PublicKey {
        let bytes = self.0.public_key().as_ref();
        PublicKey(bytes.try_into().expect("a public key of ed25519 has 32 bytes"))
    }

    /// Signs a module, which has a manifest: anything else is of no use, and a signature of it may be meant to be taken for one of something else.
    pub fn sign_module(&self, module: &[u8]) -> Result<Signature, DirectoryError> {
        let manifest = Manifest::of_module(module).map_err(DirectoryError::Module)?;
        manifest.map(|_| self.sign(module)).ok_or(DirectoryError::NoManifest)
    }

    /// Signs bytes as a module.
    pub fn sign(&self, module: &[u8]) -> Signature {
        let signature = self.0.sign(&[CONTEXT, &Pin::digest(module)].concat());
        let bytes = signature.as_ref().try_into().expect("a signature of ed25519 has 64 bytes");
        Signature { key: self.public(), bytes }
    }
}

/// A directory, and what is trusted in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    /// The folder.
    pub folder: PathBuf,
    /// Who may sign.
    pub keys: Vec<PublicKey>,
    /// Modules without a signature by one of `keys` are used as well.
    pub unsigned: bool,
}

/// A module of a directory.
#[derive(Debug)]
pub struct Listed {
    /// Its name and digest.
    pub pin: Pin,
    /// Its manifest and who signed it, or why it cannot be used.
    pub found: Result<(Manifest, Option<PublicKey>), DirectoryError>,
}

impl Directory {
    /// That of an engine.
    pub fn of(settings: &EngineSettings) -> Self {
        let keys = settings.function_keys.iter().map(|key| PublicKey(*key)).collect();
        Self { folder: settings.functions.clone(), keys, unsigned: settings.unsigned_functions }
    }

    /// The content of a module, which has been checked: its digest, its manifest and its signature.
    pub fn open(&self, pin: &Pin) -> Result<Vec<u8>, DirectoryError> {
        self.read(pin).map(|(bytes, ..)| bytes)
    }

    fn read(&self, pin: &Pin) -> Result<(Vec<u8>, Manifest, Option<PublicKey>), DirectoryError> {
        let path = self.file(pin, "wasm");
        if !path.exists() {
            let (pin, folder) = (pin.clone(), self.folder.clone());
            return Err(DirectoryError::Missing { pin, folder });
        }
        let file = open_regular(&path).map_err(|error| read_error(&path, error))?.0;
        let bytes = read_module(file).map_err(|error| read_error(&path, error))?;
        if Pin::digest(&bytes) != pin.sha256 && !mutants::on("believe_file_name") {
            return Err(DirectoryError::Digest { path });
        }
        let signature = self.signature(pin)?;
        let manifest = self.verify(&bytes, signature.as_ref())?;
        if manifest.name != pin.name {
            let (found, expected) = (manifest.name, pin.name.clone());
            return Err(DirectoryError::Name { found, expected });
        }
        Ok((bytes, manifest, signature.map(|signature| signature.key)))
    }

    /// The signature of a module, if it has one.
    pub fn signature(&self, pin: &Pin) -> Result<Option<Signature>, DirectoryError> {
        let path = self.file(pin, "sig");
        match path.exists() {
            true => Signature::parse(&read_text(&path)?).map(Some),
            false => Ok(None),
        }
    }

    /// Whether a module can be used here. Returns its manifest.
    pub fn verify(
        &self,
        module: &[u8],
        signature: Option<&Signature>,
    ) -> Result<Manifest, DirectoryError> {
        let manifest = Manifest::of_module(module).map_err(DirectoryError::Module)?;
        let manifest = manifest.ok_or(DirectoryError::NoManifest)?;
        match signature {
            // A wrong signature is never better than none.
            Some(signature) => {
                signature.check(module)?;
                let is_trusted =
                    self.keys.contains(&signature.key) || mutants::on("trust_every_key");
                if !is_trusted && !self.unsigned {
                    return Err(DirectoryError::Untrusted(signature.key));
                }
            }
            None if !self.unsigned => return Err(DirectoryError::Unsigned),
            None => {}
        }
        Ok(manifest)
    }

    /// Puts a module into the directory, after it has been checked and compiled once.
    pub fn install(
        &self,
        module: &[u8],
        signature: Option<&Signature>,
    ) -> Result<Pin, DirectoryError> {
        let manifest = self.verify(module, signature)?;
        Module::compile(module).map_err(DirectoryError::Module)?;
        let pin = Pin { name: manifest.name, sha256: Pin::digest(module) };
        let folder = self.folder.join(&pin.name);
        fs::create_dir_all(&folder).map_err(|error| written_error(&folder, &error))?;
        // The signature first: a module without one would be refused meanwhile.
        if let Some(signature) = signature {
            write_whole(&self.file(&pin, "sig"), signature.text().as_bytes())?;
        }
        write_whole(&self.file(&pin, "wasm"), module)?;
        Ok(pin)
    }

    /// The modules, by name and digest. Files with other names are none of them.
    pub fn list(&self) -> Result<Vec<Listed>, DirectoryError> {
        let mut pins = Vec::new();
        for name in names(&self.folder)?.into_iter().filter(|name| is_name(name)) {
            let folder = self.folder.join(&name);
            if !folder.is_dir() {
                continue;
            }
            let files = names(&folder)?.into_iter();
            let digests = files.filter_map(|file| unhex(file.strip_suffix(".wasm")?));
            pins.extend(digests.map(|sha256| Pin { name: name.clone(), sha256 }));
        }
        pins.truncate(LISTED_MAX);
        let listed = pins.into_iter().map(|pin| {
            let found = self.read(&pin).map(|(_, manifest, key)| (manifest, key));
            Listed { pin, found }
        });
        Ok(listed.collect())
    }

    /// A file of a module. The name has no character that leaves the folder: a pin cannot have another one.
    fn file(&self, pin: &Pin, suffix: &str) -> PathBuf {
        self.folder.join(&pin.name).join(format!("{}.{suffix}", hex(&pin.sha256)))
    }
}

/// The names in a folder, in order; none if it does not exist.
fn names(folder: &Path) -> Result<Vec<String>, DirectoryError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| read_error(folder, error))?,
    };
    let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let mut names: Vec<String> = entries.take(LISTED_MAX).filter_map(name).collect();
    names.sort();
    Ok(names)
}

/// Reads a short text, such as a signature.
pub fn read_text(path: &Path) -> Result<String, DirectoryError> {
    let file = open_regular(path).map_err(|error| read_error(path, error))?.0;
    read_short(path, file)
}

fn read_short(path: &Path, file: File) -> Result<String, DirectoryError> {
    let mut text = String::new();
    let read = file.take(TEXT_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|error| read_error(path, error))?;
    Ok(text)
}

fn read_error(path: &Path, error: impl fmt::Display) -> DirectoryError {
    DirectoryError::Io { path: path.to_owned(), verb: "read", why: error.to_string() }
}

fn written_error(path: &Path, error: &io::Error) -> DirectoryError {
    DirectoryError::Io { path: path.to_owned(), verb: "written", why: error.to_string() }
}

/// Writes a file: a reader finds the whole content, or what was there before.
fn write_whole(path: &Path, content: &[u8]) -> Result<(), DirectoryError> {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let beside = path.with_extension(format!("{}-{number}.new", std::process::id()));
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(&beside)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        // The new name is kept too.
        path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    };
    write().map_err(|error| {
        // Best effort: it is not the file.
        let _ = fs::remove_file(&beside);
        written_error(path, &error)
    })
}
