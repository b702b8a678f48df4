//! The directory of functions from a shell: keys, signatures, installed modules, and a server that runs them.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::running::{Running, table};
use common::*;

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fn-directory-{name}"));
    // Of an earlier run.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[track_caller]
fn says(at: &Path, arguments: &[&str], code: i32, expected: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    let output = command.args(arguments).current_dir(at).output().unwrap();
    let text = String::from_utf8([output.stdout.as_slice(), &output.stderr].concat()).unwrap();
    assert!(
        output.status.code() == Some(code) && text.contains(expected),
        "{arguments:?}: {output:?}"
    );
    text.trim_end().to_owned()
}

/// The module `threshold` with a manifest, in a folder.
fn module(at: &Path) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../functions/threshold.wasm");
    let text = "name = \"limits\"\nversion = \"1.2\"\nsummary = \"drops\"";
    let manifest = onpath::wasm::Manifest::parse(text).unwrap();
    fs::write(at.join("limits.wasm"), manifest.put(&fs::read(file).unwrap()).unwrap()).unwrap();
}

#[test]
fn a_module_is_signed_installed_and_run_by_its_digest() {
    let at = folder("run");
    module(&at);
    let key = says(&at, &["fn", "keygen", "mine.key"], 0, "ed25519:");
    says(&at, &["fn", "keygen", "mine.key"], 1, "cannot be written");
    let install = ["fn", "install", "limits.wasm", "--directory", "functions", "--trust", &key];
    says(&at, &install, 1, "the module has no signature: `serval fn sign` makes one");
    says(&at, &["fn", "sign", "limits.wasm", "--key", "mine.key"], 0, "signed by ed25519:");
    says(&at, &install[..5], 1, "which is not trusted");
    let pin = says(&at, &install, 0, "limits@sha256:");
    let trusted = ["--directory", "functions", "--trust", &key];
    says(&at, &[&["fn", "list", "--installed"], &trusted[..]].concat(), 0, "1.2");
    says(&at, &[&["fn", "list", "--installed"], &trusted[..2]].concat(), 0, "refused: ");
    says(&at, &[&["fn", "verify", &pin], &trusted[..]].concat(), 0, "version 1.2, signed by ");
    says(&at, &["fn", "verify", "limits.wasm", "--trust", &key], 0, &pin);
    says(&at, &["fn", "verify", "limits.wasm"], 1, "which is not trusted");
    says(&at, &["fn", "verify", "limits@sha256:00"], 2, "NAME@sha256:DIGEST");
    says(&at, &["fn", "list", "--installed", "--directory", "none"], 0, "no module is in none");

    // What is no module, and a key that others can read.
    fs::write(at.join("letter"), "dear all").unwrap();
    let sign = ["fn", "sign", "letter", "--key", "mine.key"];
    says(&at, &sign, 1, "it is no WebAssembly module");
    assert!(!at.join("letter.sig").exists());
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::copy(at.join("mine.key"), at.join("open.key")).unwrap();
    fs::set_permissions(at.join("open.key"), open).unwrap();
    let sign = ["fn", "sign", "limits.wasm", "--key", "open.key"];
    says(&at, &sign, 1, "other users may read or write the key file open.key (mode 0644)");
    // A file whose name is an option.
    fs::copy(at.join("limits.wasm"), at.join("--help")).unwrap();
    let named = ["fn", "install", "--directory", "named", "--unsigned", "--", "--help"];
    says(&at, &named, 0, &pin);
    let named = ["fn", "sign", "--key", "mine.key", "--", "--help"];
    says(&at, &named, 0, "--help.sig: signed by ed25519:");

    let port = free_port();
    let engine = format!(
        "functions = {:?}\nfunction_keys = [{key:?}]\n",
        at.join("functions").display().to_string()
    );
    let service = table("echo", port, "echo", "")
        + &format!(
            "[[service.function]]\nname = \"limits\"\nfunction = {pin:?}\nparams = {{ offset = 0 }}\ndeadline_us = 1000000\n"
        );
    let server = Running::start("fn-directory", &(engine.clone() + &service));
    let client = udp_client(([127, 0, 0, 1], port).into());
    assert_eq!(ask(&client, &[0, 0, 0, 9]), [0, 0, 0, 9]);
    let socket = server.socket.to_str().unwrap();
    says(&at, &["fn", "list", "--server", socket], 0, &pin);
    let attach = ["fn", "attach", "echo", "more", &pin, "--server", socket];
    says(&at, &[&attach[..], &["--param", "offset=0"]].concat(), 0, "attached");
    assert_eq!(ask(&client, &[0, 0, 0, 9]), [0, 0, 0, 9]);
    let other = format!("limits@sha256:{}", "0".repeat(64));
    says(
        &at,
        &["fn", "attach", "echo", "f", &other, "--server", socket],
        1,
        "is not in the directory",
    );
    assert_eq!(server.end(), 0);

    // A server that does not trust the key does not run it, and reports it before it starts.
    let file = at.join("service.toml");
    let untrusted = engine.replace(&format!("{key:?}"), "");
    fs::write(&file, format!("schema = 1\n[engine]\n{untrusted}{service}")).unwrap();
    says(&at, &["check-config", "service.toml"], 2, "which is not trusted");
    fs::write(
        &file,
        format!("schema = 1\n[engine]\n{untrusted}unsigned_functions = true\n{service}"),
    )
    .unwrap();
    says(&at, &["check-config", "service.toml"], 0, &pin);
}
