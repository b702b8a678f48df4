//! `tools/remote-netns` where it may not run. `cargo xtask ci remote-netns` runs it.
// xtask: ci

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

#[test]
fn a_machine_without_network_namespaces_is_named_in_one_sentence() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("remote-netns");
    fs::create_dir_all(&folder).unwrap();
    let refuses = folder.join("unshare");
    fs::write(&refuses, "#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n").unwrap();
    fs::set_permissions(&refuses, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/remote-netns");
    let mut python = Command::new("python3");
    python.arg(tool).args(["--serval", env!("CARGO_BIN_EXE_serval")]).env("PATH", path);
    let done = python.output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    if said.contains("needs `") {
        println!("SKIPPED: {said}");
        return;
    }
    assert_eq!(done.status.code(), Some(77), "{said}");
    assert!(done.stdout.is_empty());
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("user namespaces") && said.contains("not permitted"), "{said}");
}
