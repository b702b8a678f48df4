//! `serval check-config FILE`.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};

use serde_json::Value as Json;

use super::{Failure, File};
use crate::screen::{Screen, Table, Tone};
use server::config::{Config, Origin, Setting, bytes_for_people, url};
use server::machine::{missing_folders, unusable_secrets, use_cores};

pub(super) const HELP: &str = "\
Prints the effective configuration (defaults < file < environment < --set) with the origin of each
value, then the memory of every service's rings. Kernel files are opened, and libraries loaded in a
separate process. The exit code is 2 if the file is invalid; every problem is shown with its line.
It is also 2 if a file with a secret is here and `serval serve` would refuse it, as one that other
users can read. Folders, addresses and secrets that are missing on this machine are reported as
warnings.

A file to start from:
  schema = 1

  [[service]]
  name = \"echo\"
  listen = [\"udp://127.0.0.1:9000\", \"tcp://127.0.0.1:9000\"]
  framing = \"length:u16\"
  accelerator = \"acc0\"
  kernel = \"echo\"

A service may run on several accelerators: with accelerator = [\"gpu0\", \"host\"] a number of mqueues
applies to each of them, and a list, mqueues = [28, 4], has one for each. The same holds for kernel.

Examples:
  serval check-config service.toml
  serval check-config service.toml --set service.echo.mqueues=240
  SERVAL_ENGINE_WORKERS=2 serval check-config service.toml --json";

pub(super) fn run(screen: &Screen, file: &File) -> Result<(), Failure> {
    let mut config = file.source().inspect()?;
    // The file may be checked on another machine than that of the server, with other cores.
    if let Err(why) = use_cores(&mut config) {
        config.warnings.push(format!("`serval serve` would refuse here: {why}"));
    }
    // A secret that is here is wrong on every machine that it is copied to.
    let (found, absent): (Vec<_>, Vec<_>) =
        unusable_secrets(&config).into_iter().partition(|(path, _)| path.is_file());
    if !found.is_empty() {
        let why: Vec<String> = found.into_iter().map(|(_, why)| why).collect();
        return Err(Failure::Usage(why.join("\n")));
    }
    let absent = absent.into_iter().map(|(_, why)| why);
    let missing = missing_folders(&config).into_iter().chain(absent);
    let refusals = missing.chain(addresses(&config));
    let refusals = refusals.map(|why| format!("`serval serve` would refuse here: {why}"));
    let refusals: Vec<String> = refusals.collect();
    config.warnings.extend(refusals);
    screen.show(|| text(screen, &config), || config.json());
    Ok(())
}

/// Addresses that this machine does not have or this user may not listen on. An address in use may belong to the
/// server of this file. No listener is opened: a datagram socket is bound and closed.
fn addresses(config: &Config) -> Vec<String> {
    let ports = config.topology.ports().map(|(_, l)| (url(l.transport, l.address), l.address));
    let metrics = config.metrics.map(|address| (format!("http://{address}"), address));
    let refused = |(shown, address): (String, SocketAddr)| match UdpSocket::bind(address) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
            Some(format!("{shown} is not an address of this machine"))
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Some(format!(
            "{shown}: ports below 1024 need a privilege; `setcap cap_net_bind_service+ep` gives it to the program"
        )),
        _ => None,
    };
    ports.chain(metrics).filter_map(refused).collect()
}

fn text(screen: &Screen, config: &Config) -> String {
    let mut out = String::new();
    let mut sections: Vec<&str> = Vec::new();
    for setting in &config.settings {
        if !sections.contains(&setting.section.as_str()) {
            sections.push(&setting.section);
        }
    }
    for section in sections {
        let title = if section.is_empty() { "configuration" } else { section };
        let _ = writeln!(out, "{}", screen.paint(Tone::Bold, title));
        let mut table = Table::new(&["", "", ""]);
        for setting in config.settings.iter().filter(|s| s.section == section) {
            let given = setting.origin != Origin::Default;
            let tone = if given { Tone::Plain } else { Tone::Dim };
            let origin = if given { setting.origin.to_string() } else { String::new() };
            table.toned([(tone, setting.key.clone()), (tone, shown(setting)), (Tone::Dim, origin)]);
        }
        let _ = writeln!(out, "{}", table.render(screen));
    }
    let most = config.topology.limits.region_mib;
    for (index, region) in config.regions().into_iter().enumerate() {
        if index == 0 {
            let _ = writeln!(out, "{}", screen.paint(Tone::Bold, "regions"));
        }
        let _ = writeln!(
            out,
            "  {} on {}: {} and status words = {} of {most} MiB",
            region.service,
            region.accelerator,
            region.arithmetic,
            bytes_for_people(region.bytes)
        );
    }
    for warning in &config.warnings {
        let _ = writeln!(out, "\n{} {warning}", screen.paint(Tone::Yellow, "warning:"));
    }
    out
}

/// A value as in a file; a 0 with a special meaning is explained.
fn shown(setting: &Setting) -> String {
    let meaning = match setting.key.as_str() {
        "udp_reply_ratio" => "unlimited",
        "queue_us_max" => "off",
        "arena_bytes" => "auto",
        _ => return plain(&setting.value),
    };
    match plain(&setting.value) {
        zero if zero == "0" => format!("0 ({meaning})"),
        other => other,
    }
}

/// A value as in a file, including lists.
fn plain(value: &Json) -> String {
    match value {
        Json::Null => "none".to_owned(),
        Json::String(text) if text.is_empty() => "none".to_owned(),
        Json::String(text) => text.clone(),
        Json::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
        Json::Object(entries) if entries.is_empty() => "none".to_owned(),
        Json::Object(entries) => {
            let entry = |(key, value): (&String, &Json)| format!("{key} = {}", plain(value));
            entries.iter().map(entry).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_given_has_a_word() {
        for value in [Json::Null, "".into(), serde_json::json!({})] {
            assert_eq!(plain(&value), "none");
        }
    }

    #[test]
    fn a_zero_with_a_special_meaning_is_explained() {
        let setting = |key: &str, value: u64| Setting {
            section: "service.a".into(),
            key: key.into(),
            value: value.into(),
            origin: Origin::Default,
        };
        for (key, value, text) in [
            ("udp_reply_ratio", 0, "0 (unlimited)"),
            ("queue_us_max", 0, "0 (off)"),
            ("arena_bytes", 0, "0 (auto)"),
            ("arena_bytes", 4096, "4096"),
            ("drain_ms", 0, "0"),
        ] {
            assert_eq!(shown(&setting(key, value)), text);
        }
    }
}
