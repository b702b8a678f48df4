//! `serval fn keygen`, `sign`, `verify`, `install` and `list --installed`: the directory of functions.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use builtins::read_module;
use clap::Args;
use onpath::spec::Pin;
use serde_json::json;
use server::directory::{Directory, DirectoryError, PublicKey, Signature, SigningKey, read_text};

use super::{At, Failure};
use crate::screen::{Screen, Table};

pub(super) const KEYGEN_HELP: &str = "\
The file is readable for its user only; keep it secret. The public key is printed: who trusts it
writes it into `engine.function_keys`.

Examples:
  serval fn keygen mine.key";

pub(super) const SIGN_HELP: &str = "\
Examples:
  serval fn sign mine.wasm --key mine.key";

pub(super) const VERIFY_HELP: &str = "\
Examples:
  serval fn verify mine.wasm --trust ed25519:...
  serval fn verify mine@sha256:... --directory functions --trust ed25519:...

Exit codes: 0 it can be used, 1 it cannot; the sentence says why.";

pub(super) const INSTALL_HELP: &str = "\
The signature is MODULE.sig beside the module. What is printed is the name for the configuration.

Examples:
  serval fn install mine.wasm --trust ed25519:...
  serval fn install mine.wasm --directory functions --unsigned";

pub(super) const LIST_HELP: &str = "\
Examples:
  serval fn list
  serval fn list --installed --directory functions --trust ed25519:...";

#[derive(Args, Debug)]
pub(crate) struct Keygen {
    /// The file of the key, which must not exist
    file: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct Sign {
    /// The module
    module: PathBuf,

    /// The file of the key
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

/// The directory, and what is trusted.
#[derive(Args, Debug)]
struct Of {
    /// The directory of functions
    #[arg(long, value_name = "DIR", default_value = onpath::spec::DIRECTORY)]
    directory: PathBuf,

    /// A key whose signatures are trusted; may be repeated
    #[arg(long, value_name = "KEY", value_parser = public_key)]
    trust: Vec<PublicKey>,

    /// Modules without a trusted signature can be used as well
    #[arg(long)]
    unsigned: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Verify {
    /// A module, or the name of one in the directory: NAME@sha256:DIGEST
    module: String,

    #[command(flatten)]
    of: Of,
}

#[derive(Args, Debug)]
pub(crate) struct Install {
    /// The module
    module: PathBuf,

    #[command(flatten)]
    of: Of,
}

#[derive(Args, Debug)]
pub(crate) struct List {
    /// List the modules of the directory instead
    #[arg(long, conflicts_with = "server")]
    pub(super) installed: bool,

    #[command(flatten)]
    of: Of,

    #[command(flatten)]
    pub(super) at: At,
}

fn public_key(text: &str) -> Result<PublicKey, String> {
    text.parse().map_err(|error: DirectoryError| error.to_string())
}

fn failed(error: DirectoryError) -> Failure {
    Failure::Run(error.to_string())
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    File::open(path)
        .and_then(read_module)
        .map_err(|error| Failure::Run(format!("{} cannot be read: {error}", path.display())))
}

/// Where the signature of a module is.
fn signature_of(module: &Path) -> PathBuf {
    let mut name = module.as_os_str().to_owned();
    name.push(".sig");
    name.into()
}

fn read_signature(module: &Path) -> Result<Option<Signature>, Failure> {
    let path = signature_of(module);
    if !path.exists() {
        return Ok(None);
    }
    let text = read_text(&path).map_err(failed)?;
    Signature::parse(&text).map(Some).map_err(failed)
}

impl Of {
    fn directory(&self) -> Directory {
        let folder = self.directory.clone();
        Directory { folder, keys: self.trust.clone(), unsigned: self.unsigned }
    }
}

impl Keygen {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let key = SigningKey::make(&self.file).map_err(failed)?.public().to_string();
        screen.show(|| format!("{key}\n"), || json!({ "key": key }));
        Ok(())
    }
}

impl Sign {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let module = read(&self.module)?;
        let signature = SigningKey::open(&self.key).and_then(|key| key.sign_module(&module));
        let signature = signature.map_err(failed)?;
        let path = signature_of(&self.module);
        fs::write(&path, signature.text()).map_err(|error| {
            Failure::Run(format!("{} cannot be written: {error}", path.display()))
        })?;
        let (path, key) = (path.display().to_string(), signature.key.to_string());
        screen.show(
            || format!("{path}: signed by {key}\n"),
            || json!({ "signature": path, "key": key }),
        );
        Ok(())
    }
}

impl Verify {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let directory = self.of.directory();
        let (module, signature) = match self.module.parse::<Pin>() {
            // It is checked with its signature.
            Ok(pin) => {
                (directory.open(&pin).map_err(failed)?, directory.signature(&pin).map_err(failed)?)
            }
            Err(why) if Pin::is_meant(&self.module) && !Path::new(&self.module).exists() => {
                return Err(Failure::Usage(why));
            }
            Err(_) => {
                let path = Path::new(&self.module);
                (read(path)?, read_signature(path)?)
            }
        };
        let manifest = directory.verify(&module, signature.as_ref()).map_err(failed)?;
        let pin = Pin { name: manifest.name, sha256: Pin::digest(&module) }.to_string();
        let by = signature.map(|signature| signature.key.to_string());
        let signed = by.clone().map_or("not signed".to_owned(), |key| format!("signed by {key}"));
        screen.show(
            || format!("{pin}: version {}, {signed}\n", manifest.version),
            || json!({ "module": pin, "version": manifest.version, "key": by }),
        );
        Ok(())
    }
}

impl Install {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let (module, signature) = (read(&self.module)?, read_signature(&self.module)?);
        let pin = self.of.directory().install(&module, signature.as_ref()).map_err(failed)?;
        let pin = pin.to_string();
        screen.show(|| format!("{pin}\n"), || json!({ "module": pin }));
        Ok(())
    }
}

impl List {
    pub(super) fn run(&self, screen: &Screen) -> Result<(), Failure> {
        let listed = self.of.directory().list().map_err(failed)?;
        let rows: Vec<_> = listed
            .iter()
            .map(|listed| match &listed.found {
                Ok((manifest, key)) => json!({
                    "module": listed.pin.to_string(), "version": manifest.version, "summary": manifest.summary,
                    "state": manifest.state.to_string(), "key": key.map(|key| key.to_string()),
                }),
                Err(error) => json!({ "module": listed.pin.to_string(), "refused": error.to_string() }),
            })
            .collect();
        let text = || {
            if rows.is_empty() {
                return format!("no module is in {}\n", self.of.directory.display());
            }
            let mut table = Table::new(&["module", "version", "state", "signed by", "summary"]);
            for row in &rows {
                let cell = |key: &str| row[key].as_str().unwrap_or("-").to_owned();
                let summary = row["refused"].as_str().map(|why| format!("refused: {why}"));
                let summary = summary.unwrap_or_else(|| cell("summary"));
                table.row([cell("module"), cell("version"), cell("state"), cell("key"), summary]);
            }
            table.render(screen)
        };
        screen.show(text, || json!({ "modules": rows }));
        Ok(())
    }
}
