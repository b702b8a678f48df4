//! A server whose configuration a test changes.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Peer, eventually, free_port, page};

/// `serval serve` with a file that the test changes.
pub(crate) struct Running {
    pub(crate) process: Peer,
    pub(crate) file: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) metrics: SocketAddr,
}

impl Running {
    pub(crate) fn start(name: &str, services: &str) -> Self {
        Self::start_with(name, services, Command::new(env!("CARGO_BIN_EXE_serval")))
    }

    /// `command` gets the arguments of `serval`.
    pub(crate) fn start_with(name: &str, services: &str, mut command: Command) -> Self {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("reload-{name}.toml"));
        let socket = std::env::temp_dir().join(format!("serval-{}-{name}", std::process::id()));
        let log = std::fs::File::create(file.with_extension("log")).unwrap();
        command.args(["--json", "serve"]).arg(&file).stdout(Stdio::piped()).stderr(log);
        let metrics = ([127, 0, 0, 1], free_port()).into();
        let mut running =
            Self { process: Peer(Command::new("true").spawn().unwrap()), file, socket, metrics };
        running.write("", services);
        running.process.stop();
        running.process = Peer::start(&mut command, "cargo builds it");
        let mut ready = String::new();
        let mut output = BufReader::new(running.process.0.stdout.take().unwrap());
        output.read_line(&mut ready).unwrap();
        assert!(ready.contains("\"ready\""), "{ready}{}", running.log());
        running
    }

    pub(crate) fn write(&self, engine: &str, services: &str) {
        let (metrics, socket) = (self.metrics, self.socket.display());
        let text = format!(
            "schema = 1\n[engine]\nmetrics = \"{metrics}\"\ncontrol = \"{socket}\"\n{engine}\n{services}"
        );
        std::fs::write(&self.file, text).unwrap();
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.file.with_extension("log")).unwrap()
    }

    /// `serval reload`: exit code, standard output, standard error.
    pub(crate) fn reload(&self) -> (i32, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_serval"))
            .args(["--json", "reload"])
            .arg(&self.socket)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    pub(crate) fn wait_for_line(&self, line: &str) {
        eventually(line, || page(self.metrics).lines().any(|l| l == line));
    }

    pub(crate) fn end(mut self) -> i32 {
        self.process.signal("TERM");
        let mut code = None;
        eventually("the process ends", || {
            code = self.process.0.try_wait().unwrap();
            code.is_some()
        });
        assert!(!self.socket.exists(), "the socket's file goes");
        code.unwrap().code().expect("an exit code")
    }
}

pub(crate) fn table(name: &str, port: u16, kernel: &str, more: &str) -> String {
    format!(
        "[[service]]\nname = \"{name}\"\nlisten = \"udp://127.0.0.1:{port}\"\nkernel = \"{kernel}\"\n{more}\n"
    )
}
