//! `serval fn run`: starts an unmodified server with `libserval_functions_preload.so`, so that it takes its place behind a proxy.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use engine::topology::Listen;
use server::config::{Config, Overrides};
use wire::nic::Transport;

use crate::command::Failure;

const LIBRARY: &str = "libserval_functions_preload.so";
/// A program's headers are in its first bytes, and a script's first line.
const HEAD_BYTES: usize = 4096;
const PROGRAM_BYTES_MAX: u64 = 1 << 30;

#[derive(Args, Debug)]
pub(in crate::command) struct Run {
    /// The service, which has `upstream`
    service: String,

    /// The configuration of the engine
    config: PathBuf,

    /// The library that is loaded into the program [default: the one that was installed with this command]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl Run {
    /// Becomes the program; returns only if it cannot.
    pub(super) fn run(&self) -> Result<(), Failure> {
        let rules = self.rules()?;
        let library = self.library()?;
        let program = found(Path::new(&self.program[0])).ok_or_else(|| {
            Failure::Run(format!(
                "there is no program {}: give its path, or one in PATH",
                Path::new(&self.program[0]).display()
            ))
        })?;
        check(&program).map_err(|why| {
            let program = program.display();
            Failure::Run(format!(
                "{program} {why}, so no library can put it behind the proxy: give it another port and name that in `upstream` (docs/proxy.md)"
            ))
        })?;
        let mut libraries = library.into_os_string();
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            libraries.push(":");
            libraries.push(others);
        }
        let mut command = Command::new(&program);
        command.arg0(&self.program[0]).args(&self.program[1..]);
        command.env("LD_PRELOAD", libraries).env("SERVAL_BEHIND", rules);
        let error = command.exec();
        Err(Failure::Run(format!("{} does not start: {error}", program.display())))
    }

    /// What the library gets: where the proxy listens, and where the program is to listen in its place.
    fn rules(&self) -> Result<String, Failure> {
        let config = Config::load(&self.config, &Overrides::default())
            .map_err(|error| Failure::Run(error.to_string()))?;
        let services = &config.topology.services;
        let service = services.iter().find(|service| service.name == self.service);
        let upstream = service.map(|service| service.upstream);
        let (service, upstream) = match (service, upstream.flatten()) {
            (Some(service), Some(upstream)) => (service, upstream),
            (Some(_), None) => {
                return Err(Failure::Run(format!(
                    "service {:?} has no `upstream`: name the address there that the program gets, such as \"127.0.0.1:5300\"",
                    self.service
                )));
            }
            (None, _) => {
                let proxies = services.iter().filter(|service| service.upstream.is_some());
                let proxies: Vec<&str> = proxies.map(|service| &*service.name).collect();
                return Err(Failure::Run(format!(
                    "{} has no service {:?}: its proxies are {}",
                    self.config.display(),
                    self.service,
                    if proxies.is_empty() { "none".to_owned() } else { proxies.join(", ") }
                )));
            }
        };
        let rules: Vec<String> = service
            .listen
            .iter()
            .map(|listen| rule(listen, upstream, service.proxy_protocol))
            .collect();
        Ok(rules.join(";"))
    }

    fn library(&self) -> Result<PathBuf, Failure> {
        let command = std::env::current_exe().ok();
        let beside = command.as_deref().and_then(Path::parent).and_then(Path::parent);
        let installed = beside.map(|folder| folder.join("lib").join(LIBRARY));
        let library = self.library.clone().or(installed).unwrap_or_else(|| LIBRARY.into());
        let shown = library.display().to_string();
        let file = library.canonicalize().ok().filter(|file| file.is_file());
        file.ok_or_else(|| {
            Failure::Run(format!(
                "there is no library {shown}: `make install` installs it, `make -C lib functions` builds it in target/lib; name it with --library"
            ))
        })
    }
}

fn rule(listen: &Listen, upstream: SocketAddr, has_header: bool) -> String {
    let transport = match listen.transport {
        Transport::Udp => "udp",
        Transport::Tcp => "tcp",
    };
    let (asked, given) = (listen.address, upstream);
    let has_header = u8::from(has_header);
    let asked = format!("{} {}", asked.ip(), asked.port());
    format!("{transport} {asked} {} {} {has_header}", given.ip(), given.port())
}

/// A program by its path, or in `PATH`.
fn found(program: &Path) -> Option<PathBuf> {
    let is_program = |file: &PathBuf| {
        let found = file.metadata().ok();
        found.is_some_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    if program.components().count() > 1 {
        return Some(program.to_owned()).filter(is_program);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(is_program)
}

/// Says why a library cannot be loaded into a program, or would not see its calls.
fn check(program: &Path) -> Result<(), String> {
    let unreadable = |error: std::io::Error| format!("cannot be read ({error})");
    let about = program.metadata().map_err(unreadable)?;
    if about.permissions().mode() & 0o6000 != 0 {
        return Err("is set-user-ID or set-group-ID".to_owned());
    }
    if about.len() > PROGRAM_BYTES_MAX {
        return Err("is too long to be looked at".to_owned());
    }
    let bytes = std::fs::read(program).map_err(unreadable)?;
    if let Some(interpreter) = interpreter_of(&bytes) {
        return match found(&interpreter) {
            Some(interpreter)
                if !std::fs::read(&interpreter).is_ok_and(|b| b.starts_with(b"#!")) =>
            {
                check(&interpreter).map_err(|why| format!("has an interpreter that {why}"))
            }
            _ => Err("has an interpreter that cannot be looked at".to_owned()),
        };
    }
    check_elf(&bytes)
}

/// The program that executes a script.
fn interpreter_of(bytes: &[u8]) -> Option<PathBuf> {
    let line = bytes.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let line = std::str::from_utf8(&line[..line.len().min(HEAD_BYTES)]).ok()?;
    let mut words = line.split_whitespace();
    let first = words.next()?;
    match first.rsplit('/').next() {
        Some("env") => words.find(|word| !word.starts_with('-')).map(PathBuf::from),
        _ => Some(first.into()),
    }
}

/// The same for an executable.
fn check_elf(bytes: &[u8]) -> Result<(), String> {
    const PROGRAM_INTERPRETER: u32 = 3;
    let no_program = || Err("is no program for this machine".to_owned());
    let number = |at: usize, len: usize| -> Option<u64> {
        let bytes = bytes.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    };
    // 64 bits, least significant byte first.
    if !bytes.starts_with(b"\x7fELF\x02\x01") {
        return no_program();
    }
    let (Some(headers), Some(size), Some(count)) = (number(32, 8), number(54, 2), number(56, 2))
    else {
        return no_program();
    };
    let mut kinds = (0..count).map(|index| {
        let at = index.checked_mul(size).and_then(|offset| offset.checked_add(headers))?;
        number(usize::try_from(at).ok()?, 4)
    });
    if !kinds.any(|kind| kind == Some(PROGRAM_INTERPRETER.into())) {
        return Err("is linked statically".to_owned());
    }
    // Programs in Go make system calls without the C library.
    if bytes.windows(14).any(|window| window == b"\xff Go buildinf:") {
        return Err(
            "is a program in Go, which does not use the C library for its sockets".to_owned()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_judged_by_their_interpreter() {
        let of = |text: &str| interpreter_of(text.as_bytes());
        assert_eq!(of("#!/bin/sh\necho"), Some("/bin/sh".into()));
        assert_eq!(of("#! /usr/bin/env -S node --x\n"), Some("node".into()));
        assert_eq!(of("#!"), None);
        assert_eq!(of("\x7fELF"), None);
    }

    #[test]
    fn what_is_no_dynamic_program_is_refused() {
        // Not this program, which contains the mark of programs in Go.
        let shell = Path::new("/bin/sh");
        assert_eq!(check(shell), Ok(()));
        let bytes = std::fs::read(shell).unwrap();
        assert_eq!(check_elf(&bytes), Ok(()));
        for wrong in [&b""[..], b"\x7fELF\x01\x01", b"\x7fELF\x02\x01", &bytes[..57]] {
            assert!(check_elf(wrong).unwrap_err().contains("is no program for this machine"));
        }
        // Offsets that overflow, or lie outside.
        for offset in [u64::MAX, u64::MAX - 56, bytes.len() as u64] {
            let mut spoiled = bytes[..64].to_vec();
            spoiled[32..40].copy_from_slice(&offset.to_le_bytes());
            assert_eq!(check_elf(&spoiled), Err("is linked statically".to_owned()));
        }
        let go = [&bytes[..], b"\xff Go buildinf:"].concat();
        assert!(check_elf(&go).unwrap_err().contains("a program in Go"));
    }

    #[test]
    fn a_rule_has_both_addresses() {
        let listen = Listen { transport: Transport::Udp, address: "[::]:53".parse().unwrap() };
        assert_eq!(
            rule(&listen, "127.0.0.1:5300".parse().unwrap(), true),
            "udp :: 53 127.0.0.1 5300 1"
        );
    }
}
