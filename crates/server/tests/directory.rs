//! The directory of functions: what is signed, pinned and installed, and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use onpath::StateKind;
use onpath::spec::Pin;
use onpath::wasm::Manifest;
use proptest::prelude::*;
use server::directory::{Directory, DirectoryError, PublicKey, Signature, SigningKey};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("directory-{name}"));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn key(&self, name: &str) -> SigningKey {
        SigningKey::make(&self.0.join(name)).unwrap()
    }

    fn directory(&self, keys: &[PublicKey], unsigned: bool) -> Directory {
        Directory { folder: self.0.join("functions"), keys: keys.to_vec(), unsigned }
    }
}

fn module(name: &str) -> Vec<u8> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../functions/threshold.wasm");
    let [name, version] = [name, "1.0"].map(str::to_owned);
    let manifest = Manifest { name, version, summary: String::new(), state: StateKind::Mergeable };
    manifest.put(&fs::read(file).unwrap()).unwrap()
}

fn refused<T>(done: Result<T, DirectoryError>, expected: &str) {
    let error = done.err().unwrap().to_string();
    assert!(error.contains(expected) && !error.contains('\n'), "{expected}: {error}");
}

#[test]
fn a_signed_module_is_installed_and_read_by_its_digest() {
    let folder = Folder::new("signed");
    let key = folder.key("key");
    let directory = folder.directory(&[key.public()], false);
    let module = module("limits");
    let pin = directory.install(&module, Some(&key.sign(&module))).unwrap();
    assert_eq!(pin, Pin { name: "limits".into(), sha256: Pin::digest(&module) });
    assert_eq!(directory.open(&pin).unwrap(), module);
    let again = directory.install(&module, Some(&key.sign(&module))).unwrap();
    assert_eq!(again, pin, "installed again");
    let listed = directory.list().unwrap();
    assert_eq!((listed.len(), &listed[0].pin), (1, &pin));
    assert_eq!(listed[0].found.as_ref().unwrap().1, Some(key.public()));
    let files: Vec<_> = fs::read_dir(folder.0.join("functions/limits")).unwrap().collect();
    assert_eq!(files.len(), 2, "nothing half-written is left: {files:?}");
}

#[test]
fn what_is_not_signed_by_somebody_trusted_is_refused() {
    let folder = Folder::new("unsigned");
    let (key, other) = (folder.key("key"), folder.key("other"));
    let directory = folder.directory(&[key.public()], false);
    let (module, another) = (module("limits"), module("another"));
    refused(directory.install(&module, None), "no signature");
    refused(directory.install(&module, Some(&other.sign(&module))), "which is not trusted");
    refused(directory.install(&module, Some(&key.sign(&another))), "is wrong");
    assert!(!folder.0.join("functions").exists(), "nothing was written");
    // Where that is allowed it is used; a wrong signature never is.
    let open = folder.directory(&[], true);
    let pin = open.install(&module, None).unwrap();
    open.install(&another, Some(&other.sign(&another))).unwrap();
    refused(open.install(&module, Some(&key.sign(&another))), "is wrong");
    assert!(open.open(&pin).is_ok());
    refused(directory.open(&pin), "no signature");
    let listed = directory.list().unwrap();
    assert!(listed.len() == 2 && listed.iter().all(|listed| listed.found.is_err()));
}

#[test]
fn a_module_that_was_changed_or_exchanged_is_refused() {
    let folder = Folder::new("changed");
    let key = folder.key("key");
    let directory = folder.directory(&[key.public()], false);
    let module_a = module("a");
    let pin = directory.install(&module_a, Some(&key.sign(&module_a))).unwrap();
    let missing = Pin { sha256: [7; 32], ..pin.clone() };
    refused(directory.open(&missing), "is not in the directory");
    let file = folder.0.join("functions/a").join(format!("{}.wasm", &pin.to_string()[9..]));
    assert!(file.exists(), "{}", file.display());
    let mut changed = module_a.clone();
    *changed.last_mut().unwrap() ^= 1;
    fs::write(&file, &changed).unwrap();
    refused(directory.open(&pin), "another content than its name says");
    fs::write(&file, &module_a).unwrap();
    assert!(directory.open(&pin).is_ok());
    // The module of another name, with the right digest and signature.
    let module_b = module("b");
    let of_b = directory.install(&module_b, Some(&key.sign(&module_b))).unwrap();
    let folder_a = folder.0.join("functions/a");
    for suffix in ["wasm", "sig"] {
        let name = format!("{}.{suffix}", &of_b.to_string()[9..]);
        fs::copy(folder.0.join("functions/b").join(&name), folder_a.join(&name)).unwrap();
    }
    let exchanged = Pin { name: "a".into(), ..of_b };
    refused(directory.open(&exchanged), "has the name \"b\", not \"a\"");
    // Whatever else is in the folder is not a module.
    fs::write(folder.0.join("functions/text"), "").unwrap();
    fs::create_dir(folder.0.join("functions/.hidden")).unwrap();
    fs::write(folder_a.join("x.wasm"), "").unwrap();
    assert_eq!(directory.list().unwrap().len(), 3);
}

#[test]
fn a_module_without_a_manifest_or_a_function_is_refused() {
    let folder = Folder::new("module");
    let directory = folder.directory(&[], true);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../functions/threshold.wasm");
    refused(directory.install(&fs::read(file).unwrap(), None), "has no manifest");
    refused(directory.install(b"text", None), "it is no WebAssembly module");
    let [name, version] = ["empty", "1"].map(str::to_owned);
    let manifest = Manifest { name, version, summary: String::new(), state: StateKind::Single };
    let empty = manifest.put(b"\0asm\x01\0\0\0").unwrap();
    refused(directory.install(&empty, None), "exports no 32-bit memory");
}

#[test]
fn a_key_is_secret_and_is_not_overwritten() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = Folder::new("key");
    let public = folder.key("key").public();
    let path = folder.0.join("key");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(SigningKey::open(&path).unwrap().public(), public);
    refused(SigningKey::make(&path), "cannot be written");
    let set_mode = |path: &Path, mode: u32| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    for mode in [0o644, 0o640, 0o602, 0o610] {
        set_mode(&path, mode);
        refused(SigningKey::open(&path), &format!("(mode {mode:04o}), so anybody may have signed"));
    }
    set_mode(&path, 0o400);
    assert_eq!(SigningKey::open(&path).unwrap().public(), public);
    let text = folder.0.join("text");
    fs::write(&text, "serval function key 1\n00").unwrap();
    set_mode(&text, 0o600);
    refused(SigningKey::open(&text), "it is no key file");
    assert_eq!(public.to_string().parse::<PublicKey>().unwrap(), public);
    let text = public.to_string();
    for wrong in [&text[8..], &text[..71], &format!("{text}0"), &text.to_uppercase()] {
        assert!(wrong.parse::<PublicKey>().is_err(), "{wrong}");
    }
}

#[test]
fn only_a_module_with_a_manifest_is_signed() {
    let folder = Folder::new("sign");
    let key = folder.key("key");
    let module = module("mine");
    assert_eq!(key.sign_module(&module).unwrap(), key.sign(&module));
    refused(key.sign_module(b"I owe you 1000"), "it is no WebAssembly module");
    refused(key.sign_module(b""), "it is no WebAssembly module");
    refused(key.sign_module(b"\0asm\x01\0\0\0"), "has no manifest");
    // A command would take such a name for an option.
    let option = self::module("--help");
    refused(key.sign_module(&option), "`name` of the manifest is \"--help\"");
    refused(folder.directory(&[], true).install(&option, None), "\"--help\"");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
    /// A signature has one text, and is for one module.
    #[test]
    fn a_signature_is_for_its_bytes(module: Vec<u8>, other: Vec<u8>, at in 0usize..240, bit in 0u32..7) {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("directory-key-of-signatures");
        let key = SigningKey::open(&folder).or_else(|_| SigningKey::make(&folder)).unwrap();
        let signature = key.sign(&module);
        prop_assert!(signature.check(&module).is_ok());
        prop_assert_eq!(signature.check(&other).is_ok(), module == other);
        let text = signature.text();
        prop_assert_eq!(Signature::parse(&text).unwrap(), signature.clone());
        let mut bytes = text.clone().into_bytes();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        if let Ok(changed) = String::from_utf8(bytes)
            && let Ok(parsed) = Signature::parse(&changed)
        {
            // Without the end of its last line it is the same.
            prop_assert!(parsed == signature || parsed.check(&module).is_err());
        }
    }

    #[test]
    fn any_text_is_read_without_a_panic(text in ".*") {
        prop_assert!(Signature::parse(&text).is_err());
        prop_assert!(text.parse::<PublicKey>().is_err());
    }
}
