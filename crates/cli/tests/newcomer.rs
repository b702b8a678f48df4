//! The pages for newcomers, followed literally: every command of README.md and docs/getting-started.md, `make install` and
//! a first kernel away from the checkout, and the example whose kernel asks memcached.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::{Peer, eventually, free_port};
use serde_json::Value as Json;

/// Longest that a line of a page may take; compilers are among them.
const PATIENCE: Duration = Duration::from_secs(60);

const GETTING_STARTED: &str = "docs/getting-started.md";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// An empty folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("serval-newcomer-{name}-{}", std::process::id()));
        // Of an earlier process of this number, which was killed.
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

/// The blocks of code of a page that are in this language.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let opening = format!("```{language}\n");
    page.split(&opening).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// A shell that gets one line after the other; processes that it started end with it.
struct Shell {
    process: Peer,
    input: ChildStdin,
    output: Receiver<String>,
    errors: PathBuf,
}

impl Shell {
    /// `path` is all that it has of the PATH, and there is nothing else in its environment but HOME and a compiler that was asked for.
    fn start(folder: &Path, path: &str) -> Self {
        let mut command = Command::new("bash");
        command.current_dir(folder).env_clear().env("PATH", path).env("HOME", folder);
        command.env("SERVAL_ENGINE_CONTROL", "off");
        command.envs(std::env::var_os("CXX").map(|compiler| ("CXX", compiler)));
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let errors = folder.join("errors.log");
        command.stderr(fs::File::create(&errors).unwrap());
        let mut process = Peer(command.spawn().expect("bash has to be installed"));
        let input = process.0.stdin.take().unwrap();
        let lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        let (sender, output) = channel();
        std::thread::spawn(move || lines.map_while(Result::ok).all(|l| sender.send(l).is_ok()));
        Self { process, input, output, errors }
    }

    /// What was written to standard error so far.
    fn errors(&self) -> String {
        fs::read_to_string(&self.errors).unwrap()
    }

    /// What comes next on standard output.
    fn line(&self, after: &str) -> String {
        let line = self.output.recv_timeout(PATIENCE);
        let line = line.unwrap_or_else(|error| panic!("{after}: {error}\n{}", self.errors()));
        line.trim_end_matches('\r').to_owned()
    }

    /// Runs a line; its exit code, and what was printed until it ended.
    fn run(&mut self, line: &str) -> (i32, Vec<String>) {
        writeln!(self.input, "{line}\necho \"== $?\"").unwrap();
        let mut printed = Vec::new();
        loop {
            let next = self.line(line);
            match next.strip_prefix("== ") {
                Some(code) => return (code.parse().unwrap(), printed),
                None => printed.push(next),
            }
        }
    }

    /// Runs a line that has to end well.
    fn done(&mut self, line: &str) -> Vec<String> {
        let (code, printed) = self.run(line);
        assert_eq!(code, 0, "{line}: {printed:?}\n{}", self.errors());
        printed
    }

    /// Runs a line that leaves a server in the background; what it says when it is ready.
    fn serve(&mut self, line: &str) -> String {
        let printed = self.done(line);
        let ready = printed.into_iter().next_back().unwrap_or_else(|| self.line(line));
        assert!(ready.starts_with("ready: "), "{line}: {ready}\n{}", self.errors());
        ready
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // The group is this shell's own.
        let group = format!("-{}", self.process.0.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
    }
}

// --- make install ---

/// `make GOAL` in the repository, with libraries built in `folder`, for any make and any user.
fn make(goal: &str, folder: &Folder, arguments: &[String]) -> Command {
    let mut command = Command::new("make");
    command.args(["--no-print-directory", "-C"]).arg(root()).arg(goal);
    command.arg(format!("BUILD={}", folder.join("build").display())).args(arguments);
    for inherited in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "DESTDIR", "PREFIX", "SUDO_USER"] {
        command.env_remove(inherited);
    }
    command
}

/// What a command that has to end well has printed.
fn done(mut command: Command) -> String {
    let done = command.output().expect("make has to be installed");
    let said = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
    assert!(done.status.success(), "{command:?}: {said}");
    said
}

/// What a command that has to fail has printed.
fn refused(mut command: Command) -> String {
    let done = command.output().expect("make has to be installed");
    let said = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
    assert!(!done.status.success(), "{command:?}: {said}");
    said
}

/// The argument with which make installs the command that is tested.
fn tested() -> String {
    format!("SERVAL={}", env!("CARGO_BIN_EXE_serval"))
}

fn made(goal: &str, folder: &Folder, arguments: &[String]) {
    done(make(goal, folder, &[arguments, &[tested()]].concat()));
}

/// A program for a PATH.
fn program(folder: &Folder, name: &str, script: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/bash\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn packages_are_installed_under_the_names_that_a_release_has() {
    let folder = Folder::new("packages");
    // The last argument is the package.
    program(&folder, "dpkg-query", "case ${@: -1} in there*) echo installed ;; *) exit 1 ;; esac");
    program(&folder, "apt-cache", "case ${@: -1} in here*) ;; *) exit 100 ;; esac");
    program(&folder, "apt-get", &format!("echo \"$*\" >>{}", folder.join("asked").display()));
    program(&folder, "sudo", "exec \"$@\"");
    let mut install = Command::new(root().join("tools/install-packages"));
    install.env("PATH", format!("{}:/usr/bin:/bin", folder.0.display()));
    install.args(["here1", "there1", "gone|here2|here3", "gone|there2", "here4|there3"]);
    done(install);
    let asked = fs::read_to_string(folder.join("asked")).unwrap();
    assert!(asked.trim_end().ends_with("--no-install-recommends here1 here2"), "{asked}");
}

/// `make install DEBUG=1`, tried with the profile of this repository and what the Makefile sets, on a program of a few lines.
#[test]
fn an_installation_for_debuggers_has_line_tables() {
    let folder = Folder::new("debug");
    let profile = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let profile = profile.split("[profile.release]").nth(1).unwrap().split("\n[").next().unwrap();
    let package =
        "[package]\nname = \"tiny\"\nversion = \"1.0.0\"\nedition = \"2024\"\n[workspace]\n";
    let cargo = format!("{package}[profile.release]{profile}");
    fs::write(folder.join("Cargo.toml"), cargo).unwrap();
    fs::create_dir(folder.join("src")).unwrap();
    let main = "mod some_file_of_it;\nfn main() { some_file_of_it::run() }\n";
    fs::write(folder.join("src/main.rs"), main).unwrap();
    let module = "#[inline(never)]\npub fn run() { std::hint::black_box(7); }\n";
    fs::write(folder.join("src/some_file_of_it.rs"), module).unwrap();
    for (debug, has_lines) in [("DEBUG=0", false), ("DEBUG=1", true)] {
        let shows = ["--eval=shown:; @env".to_owned(), debug.to_owned()];
        let shown = done(make("shown", &folder, &shows));
        let set = shown.lines().filter(|line| line.starts_with("CARGO_PROFILE_RELEASE_"));
        let mut build = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
        build.args(["build", "--release", "--offline", "--quiet"]).current_dir(&folder.0);
        build.env("CARGO_TARGET_DIR", folder.join("built"));
        build.envs(set.filter_map(|line| line.split_once('=')));
        done(build);
        let built = fs::read(folder.join("built/release/tiny")).unwrap();
        let found = memchr::memmem::find(&built, b"some_file_of_it.rs").is_some();
        assert_eq!(found, has_lines, "{debug}");
        // What is installed is what was built.
        let plan = ["--dry-run".to_owned(), debug.to_owned(), tested()];
        let plan = done(make("install", &folder, &plan));
        assert_eq!(plan.contains("install -s -m 755"), !has_lines, "{debug}: {plan}");
    }
}

/// Every file below a folder, relative to it.
fn files(below: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![below.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(below).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found
}

/// The first kernel of docs/getting-started.md, from its source to a measurement in which every reply was right.
fn the_first_kernel_serves(folder: &Path, prefix: &Path) {
    let page = fs::read_to_string(root().join(GETTING_STARTED)).unwrap();
    fs::write(folder.join("scale.cpp"), blocks(&page, "cpp")[0]).unwrap();
    let mut commands = blocks(&page, "sh").into_iter();
    let commands = commands.find(|block| block.contains("scale.cpp")).unwrap();
    let port = free_port().to_string();
    let commands = commands.replace("9000", &port);
    let (before, serve) = commands.split_once("serval serve").unwrap();

    let mut shell = Shell::start(folder, &format!("{}/bin:/usr/bin:/bin", prefix.display()));
    let version = format!("serval {}", env!("CARGO_PKG_VERSION"));
    let said = shell.done("serval version");
    assert!(said[0].starts_with(&version), "{said:?}");
    shell.done(before);
    shell.done("serval check-config scale.toml");
    let ready =
        shell.serve(&format!("serval serve {} & served=$!", serve.split('#').next().unwrap()));
    assert!(ready.contains(&format!("udp://127.0.0.1:{port}")), "{ready}");
    let bench = format!(
        "serval bench udp://127.0.0.1:{port} --workload scale --window 4 --warmup 50ms --duration 300ms \
         --timeout 20s --stolen-max 100 --json"
    );
    // On a busy machine a run may be void, and the command fails.
    let mut printed = Vec::new();
    eventually("a run that is to be believed", || {
        let (code, said) = shell.run(&bench);
        printed = said;
        code == 0
    });
    let report: Json = serde_json::from_str(&printed.join("\n")).unwrap();
    let run = &report["runs"][0];
    assert!(run["replied"].as_u64().unwrap() >= 100, "{report}");
    assert_eq!((&run["wrong"], &run["lost"]), (&Json::from(0), &Json::from(0)), "{report}");
    shell.done("kill $served; wait $served");
}

/// Every page by `man`, where that is. The scripts come from one generator; bash, which every machine has, reads its own.
fn the_manual_can_be_shown_and_completions_be_read(share: &Path) {
    for page in files(&share.join("man/man1")) {
        let page = share.join("man/man1").join(page);
        let mut man = Command::new("man");
        man.args(["--warnings", "-l"]).arg(&page).env("MANWIDTH", "100").env("LC_ALL", "C.UTF-8");
        let Ok(shown) = man.output() else {
            println!("SKIPPED: no man here to show the manual pages");
            break;
        };
        let text = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.status.success() && shown.stderr.is_empty(), "{page:?}: {shown:?}");
        assert!(text.contains("SYNOPSIS") && text.contains("Examples:"), "{page:?}: {text}");
    }
    for (shell, script) in [
        ("bash", "bash-completion/completions/serval"),
        ("zsh", "zsh/site-functions/_serval"),
        ("fish", "fish/vendor_completions.d/serval.fish"),
    ] {
        let script = share.join(script);
        let text = fs::read_to_string(&script).unwrap();
        assert!(text.contains("check-config") && text.contains("stolen-max"), "{shell}: {text}");
    }
    let script = share.join("bash-completion/completions/serval");
    let read = Command::new("bash").arg("-n").arg(&script).output().unwrap();
    assert!(read.status.success() && read.stderr.is_empty(), "{read:?}");
}

/// Files of other programs in Serval's folder.
const FOREIGN: &str = "include/serval/mine.h";

#[test]
fn the_installation_works_without_the_checkout_and_can_be_removed() {
    let folder = Folder::new("install");
    let (home, stage) = (folder.join("home/.local"), folder.join("stage"));
    let here = [format!("PREFIX={}", home.display())];
    let staged = ["PREFIX=/opt/serval".to_owned(), format!("DESTDIR={}", stage.display())];
    made("install", &folder, &here);
    made("install", &folder, &staged);
    let (installed, stage) = (files(&home), stage.join("opt/serval"));
    assert_eq!(installed, files(&stage));
    for file in [
        "bin/serval",
        "include/serval/client.h",
        "include/serval/kernel.h",
        "include/serval/attach.h",
        "lib/libserval_client.so.0",
        "lib/libserval_attach.a",
        "lib/pkgconfig/serval_client.pc",
        "share/doc/serval/LICENSE",
        "share/doc/serval/README.md",
        "share/doc/serval/SECURITY.md",
        "share/doc/serval/docs/benchmarks/udp-echo-1.json",
        "share/doc/serval/docs/configuration.md",
        "share/doc/serval/examples/11_behind/store.c",
        "share/man/man1/serval.1",
        "share/man/man1/serval-kernel-build.1",
    ] {
        assert!(installed.contains(file), "{file} is not among {installed:?}");
    }
    the_manual_can_be_shown_and_completions_be_read(&home.join("share"));
    // What says where it lies says the PREFIX, whatever DESTDIR was.
    for (below, prefix) in [(&home, home.to_str().unwrap()), (&stage, "/opt/serval")] {
        let text = |file: &str| fs::read_to_string(below.join(file)).unwrap();
        let library = text("lib/pkgconfig/serval_client.pc");
        assert!(library.contains(&format!("prefix={prefix}\n")), "{library}");
        let unit = text("share/doc/serval/docs/serval.service");
        for verb in ["ExecStartPre", "ExecStart", "ExecReload"] {
            assert!(unit.contains(&format!("\n{verb}={prefix}/bin/serval ")), "{unit}");
        }
    }

    // Where systemd is, it finds nothing to say of the unit.
    let unit = home.join("share/doc/serval/docs/serval.service");
    match Command::new("systemd-analyze").arg("verify").arg(unit).output() {
        Ok(read) => {
            let said = String::from_utf8_lossy(&read.stderr);
            assert!(!said.contains("serval"), "{said}");
        }
        Err(_) => println!("SKIPPED: no systemd-analyze here to read the installed unit"),
    }

    let elsewhere = folder.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    the_first_kernel_serves(&elsewhere, &home);
    // (A program in C against the installed client library is a test of tests/c_client.rs.)
    let example = root().join("examples/03_own_accelerator/threads.cpp");
    let mut shell = Shell::start(&elsewhere, "/usr/bin:/bin");
    shell.done(&format!(
        "${{CXX:-c++}} -std=c++17 -I{home}/include {} {home}/lib/libserval_attach.a -pthread -o threads",
        example.display(),
        home = home.display()
    ));
    assert_eq!(shell.run("./threads 2>&1").1, ["usage: threads PATH"]);

    fs::write(stage.join(FOREIGN), "").unwrap();
    made("uninstall", &folder, &here);
    made("uninstall", &folder, &staged);
    assert_eq!(files(&home), BTreeSet::new());
    for own in ["include/serval", "share/doc/serval"] {
        assert!(!home.join(own).exists(), "{own} is left");
    }
    assert_eq!(files(&stage), BTreeSet::from([FOREIGN.to_owned()]));
    // A second time there is nothing to do.
    made("uninstall", &folder, &here);
}

#[test]
fn an_ambiguous_prefix_or_destdir_is_refused() {
    let folder = Folder::new("odd");
    let touched = folder.join("touched");
    for odd in [
        "here".to_owned(),
        String::new(),
        "/a b".to_owned(),
        "/a|b".to_owned(),
        "/caf\u{e9}".to_owned(),
        "/a\nb".to_owned(),
        format!("/a;touch {}", touched.display()),
        format!("/a\"`touch {}`", touched.display()),
        format!("/a'$$(touch {})", touched.display()),
    ] {
        for goal in ["install", "uninstall"] {
            let said = refused(make(goal, &folder, &[tested(), format!("PREFIX={odd}")]));
            let odd = odd.replace("$$", "$");
            let sentence = "PREFIX has to be a path that begins with /, of";
            assert!(said.contains(sentence) && said.contains(&format!("not {odd}\n")), "{said}");
        }
    }
    for odd in ["/a b".to_owned(), "~/a".to_owned(), format!("a;touch {}", touched.display())] {
        let said = refused(make(
            "install",
            &folder,
            &[tested(), "PREFIX=/opt/serval".to_owned(), format!("DESTDIR={odd}")],
        ));
        assert!(said.contains("DESTDIR has to be a path of"), "{said}");
    }
    assert!(!touched.exists());
}

/// `make build && sudo make install`: what the user has built is installed, whatever cargo root has.
#[test]
fn under_sudo_nothing_is_built() {
    let folder = Folder::new("sudo");
    let target = folder.join("target");
    let arguments = [
        "CARGO=no-such-cargo".to_owned(),
        format!("CARGO_TARGET_DIR={}", target.display()),
        format!("PREFIX={}", folder.join("installed").display()),
    ];
    let install = || {
        let mut command = make("install", &folder, &arguments);
        command.env("SUDO_USER", "user");
        command
    };
    let said = refused(install());
    assert!(said.contains("there is no ") && said.contains("run make build"), "{said}");
    assert!(!folder.join("installed").exists());
    fs::create_dir_all(target.join("release")).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_serval"), target.join("release/serval")).unwrap();
    let said = done(install());
    assert!(said.contains("target/release/serval of 2"), "{said}");
    assert!(folder.join("installed/bin/serval").exists());
}

// --- README.md and docs/getting-started.md ---

/// A fenced block of a page.
struct Block<'a> {
    language: &'a str,
    text: &'a str,
    /// The text between the block before and this one.
    before: &'a str,
}

fn all_blocks(page: &str) -> Vec<Block<'_>> {
    let parts: Vec<&str> = page.split("```").collect();
    let blocks = parts.chunks_exact(2).map(|pair| {
        let (language, text) = pair[1].split_once('\n').unwrap();
        Block { language, text, before: pair[0] }
    });
    blocks.collect()
}

/// The last file with this extension that a text names.
fn named_file<'a>(text: &'a str, extension: &str) -> Option<&'a str> {
    text.split('`').skip(1).step_by(2).filter(|name| name.ends_with(extension)).last()
}

/// The commands of a block, each with the lines that it prints: none known for `sh`.
fn commands(block: &Block<'_>) -> Vec<(String, Option<Vec<String>>)> {
    let mut commands: Vec<(String, Option<Vec<String>>)> = Vec::new();
    let mut heredoc = false;
    for line in block.text.lines() {
        if let Some(command) = line.strip_prefix("$ ") {
            commands.push((command.to_owned(), Some(Vec::new())));
        } else if block.language == "console" {
            let (_, output) = commands.last_mut().expect("a command comes first");
            output.as_mut().unwrap().push(line.to_owned());
        } else if heredoc {
            let (command, _) = commands.last_mut().unwrap();
            *command += &format!("\n{line}");
            heredoc = line != "TOML";
        } else {
            heredoc = line.contains("<<'TOML'");
            commands.push((line.to_owned(), None));
        }
    }
    commands
}

/// Runs what a page tells a newcomer to run, block by block, and compares what is printed with the page.
struct Follower<'a> {
    shell: Shell,
    folder: &'a Folder,
    ran: usize,
}

impl Follower<'_> {
    fn follow(&mut self, page: &str) {
        for block in all_blocks(page) {
            match block.language {
                "toml" | "cpp" => {
                    let extension = format!(".{}", block.language);
                    let name = named_file(block.before, &extension).expect("the page names it");
                    fs::write(self.folder.join(name), block.text).unwrap();
                }
                "sh" | "console" => {
                    for (command, output) in commands(&block) {
                        self.run(&command, output.as_deref());
                    }
                }
                other => panic!("a block of {other}"),
            }
        }
    }

    fn run(&mut self, command: &str, output: Option<&[String]>) {
        self.ran += 1;
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            // This test is part of the one, and `tests/demo.rs` runs the other.
            ["make", goal @ ("demo" | "test"), ..] => {
                let listed = done(make(goal, self.folder, &["--dry-run".to_owned()]));
                assert!(!listed.is_empty(), "{command}");
            }
            ["make", "install", ..] => self.install(command, output),
            ["kill", ..] => {
                // The end of a job is an exit code that says how it ended.
                self.shell.run(command);
            }
            ["serval", "kernel", "build", ..] if command.contains("--gpu") => {
                let (code, _) = self.shell.run(command);
                let lacks_compiler = self.shell.errors().contains("no CUDA compiler found");
                assert!(code == 0 || lacks_compiler, "{command}: {}", self.shell.errors());
            }
            ["serval", "serve", ..] if command.contains("gpu0") => self.serve_on_a_gpu(command),
            ["serval", "serve", ..] => {
                let command = command.split(" #").next().unwrap().trim_end();
                let background = if command.ends_with('&') { "" } else { " &" };
                let ready = self.shell.serve(&format!("{command}{background}"));
                assert!(output.is_none_or(|output| output == [ready.as_str()]), "{ready}");
            }
            ["serval", "bench", ..] => {
                let command = command.split(" #").next().unwrap();
                let open = command.contains("--rate");
                // In an open loop requests are lost, and each of them waits for as long.
                let timeout = if open { "200ms" } else { "20s" };
                let short =
                    format!("--warmup 20ms --duration 100ms --timeout {timeout} --stolen-max 100");
                // A run of 100 ms on a busy machine is often not trusted, and ends with exit code 1. So the test checks that every run of the
                // command is in the table, and that replies were right.
                let (code, printed) = self.shell.run(&format!("{command} {short}"));
                let is_run =
                    |line: &&String| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
                let runs = printed.iter().filter(is_run).count();
                assert_eq!(runs, if open { 3 } else { 5 }, "{command}: {printed:?}");
                let shown = printed.join("\n");
                assert!(
                    code == 0 || code == 1 && shown.contains("NOT TRUSTED"),
                    "{command}: {shown}"
                );
                let wrong = ["replies were wrong", "replies were duplicates"];
                assert!(!wrong.iter().any(|wrong| shown.contains(wrong)), "{command}: {shown}");
            }
            _ => {
                let printed = self.shell.done(command);
                assert!(output.is_none_or(|output| output == printed), "{command}: {printed:?}");
            }
        }
    }

    /// With the command under test, so nothing is built, and what is shown of it differs.
    fn install(&mut self, command: &str, output: Option<&[String]>) {
        let (root, build) = (root(), self.folder.join("build"));
        let printed = self.shell.done(&format!(
            "{} --no-print-directory -C {} BUILD={} {}",
            command.split(" #").next().unwrap(),
            root.display(),
            build.display(),
            tested()
        ));
        let Some(output) = output else { return };
        // Which file was installed stands between brackets.
        let outside = |line: &String| {
            let (before, rest) = line.split_once(" (").unwrap();
            (before.to_owned(), rest.split_once(')').unwrap().1.to_owned())
        };
        let shown: Vec<_> =
            output.iter().filter(|l| !l.starts_with("building")).map(outside).collect();
        assert_eq!(shown, printed.iter().map(outside).collect::<Vec<_>>());
    }

    /// Without a GPU, or without kernels for one, the command reports it and ends.
    fn serve_on_a_gpu(&mut self, command: &str) {
        let said = self.folder.join("gpu.log");
        self.shell.done(&format!("{command} >gpu.log 2>&1 & gpu=$!"));
        let known = ["ready: ", "libcuda.so", "\"scale.fatbin\" cannot be read"];
        eventually("an outcome on the GPU", || {
            let said = fs::read_to_string(&said).unwrap_or_default();
            known.iter().any(|known| said.contains(known))
        });
        self.shell.run("kill $gpu; wait $gpu");
    }
}

fn follower<'a>(folder: &'a Folder, path: &str, ports: &[(&str, u16)], page: &str) -> Follower<'a> {
    let mut text = fs::read_to_string(root().join(page)).unwrap();
    for (from, to) in ports {
        text = text.replace(from, &to.to_string());
    }
    let mut follower = Follower { shell: Shell::start(&folder.0, path), folder, ran: 0 };
    follower.follow(&text);
    follower
}

#[test]
fn every_command_of_the_readme_works_as_shown() {
    let folder = Folder::new("readme");
    let ports = [("9000", free_port())];
    let follower = follower(&folder, "/usr/bin:/bin", &ports, "README.md");
    assert!(follower.ran >= 13, "{}", follower.ran);
    let words = fs::read_to_string(root().join("README.md")).unwrap().split_whitespace().count();
    assert!(words <= 900, "README.md has {words} words, at most 900");
}

#[test]
fn every_command_of_getting_started_works_as_shown() {
    if Command::new("memcached").arg("-V").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: no memcached here; `make setup-memcached` installs it");
        return;
    }
    let folder = Folder::new("getting-started");
    let ports = [("9000", free_port()), ("11211", free_port())];
    let memcached = format!("-u nobody -l 127.0.0.1 -p {}", ports[1].1);
    let memcached = Command::new("memcached").args(memcached.split(' ')).spawn().unwrap();
    let _memcached = Peer(memcached);
    eventually("memcached listens", || TcpStream::connect(("127.0.0.1", ports[1].1)).is_ok());
    // A message of the reader's own: 1 and, from `scale`, 3.
    fs::write(folder.join("question.bin"), 1.0f32.to_le_bytes()).unwrap();
    fs::write(folder.join("answer.bin"), 3.0f32.to_le_bytes()).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut follower = follower(&folder, &path, &ports, GETTING_STARTED);
    assert!(follower.ran >= 12, "{}", follower.ran);

    // The table of commands.
    let page = fs::read_to_string(root().join(GETTING_STARTED)).unwrap();
    let (_, table) = page.split_once("## The command").unwrap();
    let commands = table.lines().filter(|line| line.starts_with("| `serval "));
    let names = |row: &str| -> Vec<String> {
        let words = |command: &str| {
            let lower = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-');
            command.split(' ').take_while(lower).collect::<Vec<_>>().join(" ")
        };
        row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2).map(words).collect()
    };
    for command in commands.flat_map(names) {
        follower.shell.done(&format!("{command} --help"));
    }
    // The row of the demos names those of the command.
    let row = table.lines().find(|line| line.starts_with("| `serval demo ")).unwrap();
    let of_page: BTreeSet<&str> =
        row.split('|').nth(2).unwrap().split('`').skip(1).step_by(2).collect();
    let help = follower.shell.done("serval demo --help");
    let values = help.iter().filter_map(|line| line.trim().strip_prefix("- "));
    let of_command: BTreeSet<&str> = values.filter_map(|value| value.split(':').next()).collect();
    assert_eq!(of_page, of_command);
}

// --- examples/04_backend ---

/// What a line prints, as the comment behind it says: several lines with commas between them.
fn expected(line: &str) -> Option<Vec<&str>> {
    let says = |line: &str| line.starts_with("ask ") || line.starts_with("exec ");
    let (_, comment) = line.rsplit_once("  # ").filter(|_| says(line))?;
    Some(comment.split(", ").collect())
}

#[test]
fn the_example_uses_memcached_and_reports_its_failure() {
    let ports = [("9000", free_port()), ("11222", free_port())];
    follow_example("04_backend", &["service.toml", "lookup.cpp"], &ports, 6);
}

// --- examples/06_proxy ---

#[test]
fn the_example_of_a_proxy_answers_as_its_page_says() {
    let ports = [("11210", free_port()), ("11222", free_port())];
    follow_example("06_proxy", &["service.toml"], &ports, 5);
}

// --- examples/07_sockets ---

#[test]
fn the_example_of_kernels_with_connections_answers_as_its_page_says() {
    let ports = [("9007", free_port()), ("9008", free_port()), ("11222", free_port())];
    follow_example("07_sockets", &["service.toml", "cache.cpp", "client.py"], &ports, 4);
}

// --- examples/10_secure_multiply ---

#[test]
fn the_example_of_an_isolated_process_answers_as_its_page_says() {
    let ports = [("9000", free_port()), ("11222", free_port())];
    let files = ["service.toml", "multiply.cpp", "sealed.h", "ask.cpp"];
    follow_example("10_secure_multiply", &files, &ports, 6);
}

/// Runs the lines of an example's page, one after the other in one shell; at least `least` say what they print. The last one of `ports` is
/// memcached's.
fn follow_example(name: &str, files: &[&str], ports: &[(&str, u16)], least: usize) {
    if Command::new("memcached").arg("-V").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: no memcached here; `make setup-memcached` installs it");
        return;
    }
    let folder = Folder::new(name);
    let of_this_test = |file: &str| {
        let text = fs::read_to_string(root().join("examples").join(name).join(file)).unwrap();
        ports.iter().fold(text, |text, (from, to)| text.replace(from, &to.to_string()))
    };
    for file in files {
        fs::write(folder.join(file), of_this_test(file)).unwrap();
    }
    let program = Path::new(env!("CARGO_BIN_EXE_serval")).parent().unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Shell::start(&folder.0, &format!("{}:{path}", program.display()));
    let page = of_this_test("README.md");
    let mut compared = 0;
    for line in blocks(&page, "sh").into_iter().flat_map(str::lines) {
        if let Some(expected) = expected(line) {
            compared += 1;
            // A machine that is busy may keep memcached for longer than the example waits, and the service from seeing its end.
            let deadline = Instant::now() + PATIENCE;
            loop {
                let printed = shell.done(line);
                if printed == expected {
                    break;
                }
                assert!(Instant::now() < deadline, "{line}: {printed:?}\n{}", shell.errors());
            }
        } else if line.starts_with("serval serve") {
            let ready = shell.serve(line);
            assert!(line.contains(&format!("`{ready}`")), "{line}: {ready}");
        } else if line.starts_with("memcached") {
            shell.done(line);
            let there = ("127.0.0.1", ports[ports.len() - 1].1);
            eventually("memcached listens", || TcpStream::connect(there).is_ok());
        } else if line.contains("wait $memcached") {
            // It says by which signal it ended.
            shell.run(line);
        } else if !line.starts_with("make ") {
            shell.done(line);
        }
    }
    assert!(compared >= least, "{compared} lines say what they print");
}
