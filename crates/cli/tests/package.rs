//! The Debian package of `tools/deb`: installed into a scratch root by dpkg, used from there, and removed, without root rights.
// xtask: ci

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Peer, free_port};

/// A scratch folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("serval-package-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn join(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a command that must succeed; returns its standard output.
fn done(command: &mut Command) -> String {
    let ended = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{command:?}: {errors}");
    String::from_utf8(ended.stdout).unwrap()
}

/// Files and links below a folder, relative to it, without dpkg's database.
fn files(below: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![below.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(below).unwrap().to_str().unwrap().to_owned();
                if !name.starts_with("var/") {
                    found.insert(name);
                }
            }
        }
    }
    found
}

/// dpkg with a database of its own in `root`. Dependencies are packages of this machine, which that database does not know.
fn dpkg(root: &Path) -> Command {
    let mut command = Command::new("dpkg");
    command.arg(format!("--root={}", root.display()));
    command.args(["--force-not-root", "--force-depends", "--force-bad-path", "--no-triggers"]);
    command.env("PATH", "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin");
    command
}

/// The installed command serves, asks and compiles, with nothing but its own files and the system's compiler.
fn the_installed_command_works(root: &Path, folder: &Folder) {
    let serval = root.join("usr/bin/serval");
    let command = || {
        let mut command = Command::new(&serval);
        command.current_dir(&folder.0).env_clear().env("PATH", "/usr/bin:/bin");
        command.env("HOME", &folder.0).env("SERVAL_ENGINE_CONTROL", "off");
        command.envs(std::env::var_os("CXX").map(|compiler| ("CXX", compiler)));
        command
    };
    let version = done(command().arg("version"));
    assert!(version.starts_with(&format!("serval {}", env!("CARGO_PKG_VERSION"))), "{version}");

    fs::write(
        folder.join("shout.cpp"),
        "#include <serval/kernel.h>\n\
         SERVAL_KERNEL(shout)(serval::Block& block, serval::Mqueue& q) {\n\
             while (auto msg = q.recv(block)) {\n\
                 auto reply = q.reply(block, msg, msg.len());\n\
                 for (unsigned i = block.rank(); reply && i < msg.len(); i += block.size())\n\
                     reply.as<char>()[i] = msg.as<const char>()[i] - 32;\n\
                 q.send(block, reply);\n\
             }\n\
         }\n",
    )
    .unwrap();
    done(command().args(["kernel", "build", "shout.cpp"]));
    let ports = [free_port(), free_port()];
    let services: Vec<_> = ["echo", "shout.so"]
        .iter()
        .zip(ports)
        .map(|(kernel, port)| {
            let name = kernel.split('.').next().unwrap();
            format!("[[service]]\nname = \"{name}\"\nlisten = \"udp://127.0.0.1:{port}\"\nkernel = \"{kernel}\"\n")
        })
        .collect();
    fs::write(folder.join("two.toml"), format!("schema = 1\n{}", services.concat())).unwrap();
    let mut server = command();
    server.args(["serve", "two.toml"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut server = Peer(server.spawn().unwrap());
    let mut ready = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert!(ready.starts_with("ready: "), "{ready}");
    for (port, reply) in ports.into_iter().zip(["hello\n", "HELLO\n"]) {
        let url = format!("udp://127.0.0.1:{port}");
        let arguments = ["ask", &url, "hello", "--timeout", "30s"];
        assert_eq!(done(command().args(arguments)), reply);
    }
    done(Command::new("kill").arg(server.0.id().to_string()));
    assert!(server.0.wait().unwrap().success());

    // A program in C against the installed library.
    fs::write(
        folder.join("client.c"),
        "#include <serval/client.h>\nint main(void) { return serval_strerror(0) == 0; }\n",
    )
    .unwrap();
    let mut compiler = Command::new("cc");
    compiler.current_dir(&folder.0).args(["client.c", "-o", "client", "-pthread"]);
    compiler.arg(format!("-I{}", root.join("usr/include").display()));
    done(compiler.arg(root.join("usr/lib/libserval_client.so")));
    done(Command::new(folder.join("client")).env("LD_LIBRARY_PATH", root.join("usr/lib")));
    let library = fs::read_to_string(root.join("usr/lib/pkgconfig/serval_client.pc")).unwrap();
    assert!(library.contains("prefix=/usr\n"), "{library}");
    // Names that a library defines for programs.
    for (library, prefixes) in [
        ("client", &["serval_"] as &[&str]),
        ("transfer", &["sv_"]),
        // Those of NICA's library.
        ("ik", &["ik_", "custom_ring_"]),
    ] {
        let library = root.join(format!("usr/lib/libserval_{library}.so"));
        let names = Command::new("nm").args(["-D", "--defined-only", "-P"]).arg(&library).output();
        let names = String::from_utf8(names.unwrap().stdout).unwrap();
        let others: Vec<&str> = names
            .lines()
            .filter(|name| !prefixes.iter().any(|prefix| name.starts_with(prefix)))
            .collect();
        assert!(!names.is_empty() && others.is_empty(), "{}: {others:?}", library.display());
    }
    let unit = root.join("usr/lib/systemd/system/serval.service");
    let unit = fs::read_to_string(unit).unwrap();
    assert!(unit.contains("\nExecStart=/usr/bin/serval serve "), "{unit}");
}

#[test]
fn the_package_is_installed_used_and_removed_without_a_trace() {
    let folder = Folder::new();
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut build = Command::new(top.join("tools/deb"));
    build.arg(folder.join("debian")).env("BUILD", folder.join("build"));
    build.env("SERVAL", env!("CARGO_BIN_EXE_serval")).env("DEB_FLAGS", "-Znone");
    for inherited in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "DESTDIR", "PREFIX", "SUDO_USER"] {
        build.env_remove(inherited);
    }
    let package = done(&mut build).trim_end().to_owned();
    let expected = format!("serval_{}-1_", env!("CARGO_PKG_VERSION"));
    assert!(Path::new(&package).file_name().unwrap().to_str().unwrap().starts_with(&expected));
    let field = |name: &str| done(Command::new("dpkg-deb").args(["--field", &package, name]));
    assert!(field("Depends").starts_with("libc6 (>= 2."), "{}", field("Depends"));
    assert!(!field("Maintainer").trim().is_empty() && field("Description").lines().count() > 1);

    let root = folder.join("root");
    for below in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers"] {
        fs::create_dir_all(root.join(below)).unwrap();
    }
    fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
    done(dpkg(&root).arg("--install").arg(&package));
    let installed = files(&root);
    for file in [
        "usr/bin/serval",
        "usr/include/serval/attach.h",
        "usr/include/serval/client.h",
        "usr/include/serval/ik.h",
        "usr/include/serval/kernel.h",
        "usr/include/serval/transfer.h",
        "usr/include/serval_function.h",
        "usr/lib/libserval_attach.a",
        "usr/lib/libserval_client.so",
        "usr/lib/libserval_functions_preload.so",
        "usr/lib/libserval_ik.a",
        "usr/lib/libserval_ik.so.1",
        "usr/lib/libserval_client.so.0",
        "usr/lib/libserval_transfer.so.1",
        "usr/lib/libserval_transfer_preload.so",
        "usr/lib/systemd/system/serval.service",
        "usr/share/bash-completion/completions/serval",
        "usr/share/doc/serval/copyright",
        "usr/share/doc/serval/docs/getting-started.md",
        "usr/share/doc/serval/examples/01_echo/service.toml",
        "usr/share/fish/vendor_completions.d/serval.fish",
        "usr/share/man/man1/serval.1",
        "usr/share/zsh/vendor-completions/_serval",
    ] {
        assert!(installed.contains(file), "{file} is not among {installed:?}");
    }
    assert!(installed.iter().all(|file| file.starts_with("usr/")), "{installed:?}");

    the_installed_command_works(&root, &folder);

    done(dpkg(&root).args(["--purge", "serval"]));
    assert_eq!(files(&root), BTreeSet::new());
    assert!(!root.join("usr").exists(), "an empty folder is left");
}
