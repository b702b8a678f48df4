//! `serval reload`: asks a running server to read its configuration again.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value as Json;
use sys::readiness::wait_readable;

use super::Failure;
use crate::screen::{Screen, Table, print};
use server::config::ControlSocket;
use server::control::ConfigSource;
use server::control::discovery;
use server::control::protocol::{ANSWER_BYTES_MAX, Request, read_answer};

pub(super) const HELP: &str = "\
Services are added, removed and changed without losing messages of the others. Services of the same
tenant on the same GPU restart together. If the file has an error, or changes a key that cannot
change while the engine runs, nothing changes and the reason is printed. Without an argument the
command uses the control socket of the only server of this user (as root: of any user); if there
are several, name one. With --pid the server gets SIGHUP, and its log shows the outcome.

Examples:
  serval reload
  serval reload /run/serval.sock
  serval reload --config service.toml
  serval reload --pid 4711

Exit codes: 0 done (or nothing to do), 1 it failed or no server answers, 2 refused, 3 done, but a
removed service did not answer all accepted requests within engine.drain_ms or did not end
completely, or a service has no runtime that serves yet.";

/// Time limit of a reload: a drain takes at most ten minutes.
const TIMEOUT: Duration = Duration::from_secs(660);
/// Interval of checks whether the server still answers.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
#[group(multiple = false)]
pub(super) struct Options {
    /// Path of the server's control socket [default: that of the one server this user runs]
    #[arg(value_name = "PATH")]
    path: Option<PathBuf>,

    /// The configuration that the server was started with; it contains the control socket, or identifies the server
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Send SIGHUP to this process
    #[arg(long, value_name = "PROCESS")]
    pid: Option<u32>,
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    if let Some(process) = options.pid {
        let sent = sys::process::reload(process);
        sent.map_err(|e| Failure::Run(format!("process {process} cannot be signalled: {e}")))?;
        let asked = || format!("process {process} got SIGHUP; its log shows the outcome\n");
        screen.show(asked, || serde_json::json!({ "result": "asked", "process": process }));
        return Ok(());
    }
    let path = match (&options.path, &options.config) {
        (Some(path), _) => path.clone(),
        (None, Some(file)) => control_path(file)?,
        (None, None) => discovery::find_one(None)?,
    };
    let outcome = ask(&path)?;
    if screen.json {
        print(&format!("{outcome}\n"));
    } else {
        show(screen, &outcome);
    }
    let message = outcome["message"].as_str().or(outcome["error"].as_str()).unwrap_or_default();
    match outcome["result"].as_str() {
        Some("changed" | "unchanged") if unanswered(&outcome) => Err(Failure::Unfinished),
        Some("changed" | "unchanged") => Ok(()),
        Some("refused") if screen.json => Err(Failure::Refused(String::new())),
        Some("refused") => Err(Failure::Refused(message.to_owned())),
        _ => Err(Failure::Run(message.to_owned())),
    }
}

fn control_path(file: &Path) -> Result<PathBuf, Failure> {
    let source = ConfigSource { path: file.to_owned(), sets: Vec::new() };
    match source.load()?.control {
        ControlSocket::At(path) => Ok(path),
        ControlSocket::Auto => Ok(discovery::find_one(Some(file))?),
        ControlSocket::Off => {
            let name = file.display();
            Err(Failure::Usage(format!("{name} turns engine.control off: use --pid")))
        }
    }
}

/// Requests a reload and waits for its outcome. That may take long, so the server is checked before and meanwhile.
fn ask(path: &Path) -> Result<Json, Failure> {
    let shown = path.display();
    let failed = |error| Failure::Run(format!("no server answers at {shown}: {error}"));
    discovery::ask(path, Request::Status)?;
    let deadline = Instant::now() + TIMEOUT;
    let socket = discovery::connect(path, Instant::now() + CHECK_INTERVAL).map_err(failed)?;
    socket.send(Request::Reload.line().as_bytes(), &[]).map_err(failed)?;
    let mut bytes = vec![0; ANSWER_BYTES_MAX];
    while Instant::now() < deadline {
        let heard = wait_readable(&[std::os::fd::AsFd::as_fd(&socket)], Some(CHECK_INTERVAL));
        match socket.receive(&mut bytes).map_err(failed)? {
            None if !heard[0] => drop(discovery::ask(path, Request::Status)?),
            None => {}
            Some(0) => return Err(Failure::Run(format!("the server at {shown} ended"))),
            Some(len) => return read_answer(&bytes[..len]).map_err(Failure::Run),
        }
    }
    Err(Failure::Run(format!("the reload of the server at {shown} timed out")))
}

fn unanswered(outcome: &Json) -> bool {
    let services = outcome["services"].as_array().map(Vec::as_slice).unwrap_or_default();
    let finished = |s: &Json| {
        s["unanswered"].as_u64() == Some(0)
            && s["left_behind"] == false
            && s["not_started"].is_null()
    };
    !services.iter().all(finished)
}

/// Remarks about a service that are not in the table.
fn remarks(service: &Json) -> Vec<String> {
    let name = service["name"].as_str().unwrap_or_default();
    let mut remarks = Vec::new();
    if let Some(file) = service["rebuilt"].as_str() {
        remarks.push(format!("kernel {file} changed: service {name} restarted with it"));
    }
    if service["left_behind"] == true {
        remarks.push(format!("service {name}: a part of its previous version did not end"));
    }
    if let Some(why) = service["not_started"].as_str() {
        remarks.push(format!("service {name}: no runtime of it serves yet: {why}"));
    }
    remarks
}

/// What was done besides the services: of a list, each entry that came, changed or went.
fn settings(outcome: &Json) -> Vec<String> {
    let list = |key: &str| outcome[key].as_array().map(Vec::as_slice).unwrap_or_default();
    let of_key = |key: &Json| {
        let entries = list("entries").iter().filter(|entry| entry["key"] == *key);
        let line = |entry: &Json| {
            let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
            format!("{} has been {}", text("what"), text("fate"))
        };
        let lines: Vec<String> = entries.map(line).collect();
        match lines.is_empty() {
            true => vec![format!("{} has been changed", key.as_str().unwrap_or_default())],
            false => lines,
        }
    };
    list("settings").iter().flat_map(of_key).collect()
}

fn show(screen: &Screen, outcome: &Json) {
    let Some(services) = outcome["services"].as_array() else { return };
    let mut table = Table::new(&["service", "what was done", "unanswered"]);
    for service in services {
        let text = |key: &str| service[key].as_str().unwrap_or_default().to_owned();
        let unanswered = service["unanswered"].as_u64().unwrap_or_default();
        table.row([text("name"), text("fate"), unanswered.to_string()]);
    }
    print(&table.render(screen));
    for remark in services.iter().flat_map(remarks) {
        print(&format!("{remark}\n"));
    }
    settings(outcome).iter().for_each(|line| print(&format!("{line}\n")));
    if outcome["result"] == "unchanged" {
        print("nothing has changed\n");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_came_was_added_and_what_went_was_removed() {
        let outcome = json!({
            "settings": ["limits.idle_s", "accelerator", "service.function"],
            "entries": [
                { "key": "accelerator", "what": "accelerator gpu0", "fate": "added" },
                { "key": "accelerator", "what": "accelerator old", "fate": "removed" },
            ],
        });
        assert_eq!(
            settings(&outcome),
            [
                "limits.idle_s has been changed",
                "accelerator gpu0 has been added",
                "accelerator old has been removed",
                "service.function has been changed",
            ]
        );
    }

    #[test]
    fn every_reason_for_the_exit_code_is_reported() {
        let service = |left_behind: bool, not_started: Option<&str>| {
            json!({
                "name": "a", "fate": "changed", "unanswered": 0,
                "left_behind": left_behind, "not_started": not_started,
            })
        };
        for (service, said) in [
            (service(false, None), &[][..]),
            (service(true, None), &["service a: a part of its previous version did not end"]),
            (service(false, Some("no GPU")), &["service a: no runtime of it serves yet: no GPU"]),
        ] {
            assert_eq!(remarks(&service), said);
            assert_eq!(unanswered(&json!({ "services": [service] })), !said.is_empty());
        }
    }
}
