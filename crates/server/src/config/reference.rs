//! The tables of docs/configuration.md.
//!
//! The description of a key is in `keys.rs`. Ranges, words and defaults are queried from the reader, by reading a
//! sample with and without wrong values, so that the page always matches the reader. `crates/server/tests/config.rs`
//! checks the page; `cargo xtask configuration` writes it.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::LazyLock;

use runtime::kinds::KINDS;
use serde_json::Value as Json;
use wire::framing::Framing;

use super::keys::Kind::{Boolean, Field, FramingName, Integer, Other, Word};
use super::keys::{Key, TABLES, Table};
use super::{BUILTINS, Config, ConfigError, Origin, Overrides};

/// A minimal configuration for each table, with an accelerator of each kind, which has the kind's name.
static SAMPLE: LazyLock<String> = LazyLock::new(|| {
    let of_kinds = KINDS.iter().map(|kind| {
        let name = kind.name();
        let texts = kind.texts().iter().map(|key| format!("{} = {:?}\n", key.name, key.example));
        let texts = texts.collect::<String>();
        format!("[[accelerator]]\nname = \"{name}\"\nkind = \"{name}\"\n{texts}")
    });
    [SAMPLE_ACCELERATORS, &of_kinds.collect::<String>(), SAMPLE_SERVICE].concat()
});

const SAMPLE_ACCELERATORS: &str = r#"schema = 1
[[tenant]]
name = "shop"
[[accelerator]]
name = "worker"
[[accelerator]]
name = "threads"
placement = "threads"
[[accelerator]]
name = "external"
kind = "process"
launch = "external"
attach = "/run/serval/acc0"
"#;

const SAMPLE_SERVICE: &str = r#"[[service]]
name = "digits"
listen = "udp://127.0.0.1:9000"
accelerator = "worker"
kernel = "echo"
[[service.backend]]
name = "db"
connect = "tcp://127.0.0.1:11211"
[[service.function]]
name = "limits"
function = "threshold"
[[service]]
  name = "proxy"
  listen = "udp://127.0.0.1:9001"
  upstream = "127.0.0.1:9002"
[[service]]
  name = "streams"
  accelerator = "worker"
  kernel = "stream_echo"
[[service.socket]]
  name = "peers"
  listen = "tcp://127.0.0.1:9003"
[[service]]
  name = "files"
  listen = "udp://127.0.0.1:9004"
  accelerator = "worker"
  kernel = "echo"
[[service.backend]]
  name = "disk"
  connect = "transfer"
[[service.file]]
  name = "model"
  path = "model.bin"
"#;

/// A word that is not valid for any key.
const NO_WORD: &str = "none-of-these";

fn read(text: &str, set: Option<String>) -> Result<Config, ConfigError> {
    let overrides =
        Overrides { environment: Vec::new(), sets: set.into_iter().collect(), inspect: None };
    Config::parse("sample.toml", text, Path::new(""), &overrides)
}

impl Key {
    /// The reader's fix for a wrong value.
    fn right_instead_of(&self, value: &str) -> String {
        let set = format!("{}.{}={value}", self.sample, self.name);
        let error = read(&SAMPLE, Some(set)).expect_err("a wrong value");
        let named = format!("`{}`", self.name);
        let entries = error.entries();
        let about = entries.iter().find(|entry| entry.what.starts_with(&named));
        about.unwrap_or_else(|| panic!("{named}: {error}")).right.clone()
    }

    /// Type, unit and range.
    fn value(&self) -> String {
        let kind = match &self.kind {
            Field(field) => field.shown(),
            kind => kind.clone(),
        };
        match kind {
            Field(_) => unreachable!("its kind is shown instead"),
            Integer(unit) => {
                let right = self.right_instead_of("-1");
                let range = right.strip_prefix("must be in [").and_then(|r| r.strip_suffix(']'));
                let (min, max) = range.and_then(|r| r.split_once(", ")).expect("a range");
                format!("integer, {unit}: {} to {}", grouped(min), grouped(max))
            }
            Word => {
                let right = self.right_instead_of(NO_WORD);
                let words = right.strip_prefix("must be one of ").expect("words");
                let words: Vec<_> = words.split(", ").map(|w| format!("`{w}`")).collect();
                words.join(", ")
            }
            Boolean => {
                let right = self.right_instead_of(NO_WORD);
                format!(
                    "boolean: `{}`",
                    right.trim_start_matches("must be ").replace(" or ", "`, `")
                )
            }
            FramingName => {
                let names: Vec<_> =
                    Framing::ALL.iter().map(|framing| format!("`{}`", framing.form())).collect();
                format!("string: {}", names.join(", "))
            }
            Other(what) => what.to_owned(),
        }
    }

    /// The value without configuration.
    fn default_value(&self, sample: &Config) -> String {
        if !self.default.is_empty() {
            return self.default.to_owned();
        }
        let is_it = |s: &&super::Setting| s.section == self.sample && s.key == self.name;
        let setting = sample.settings.iter().find(is_it).expect("the reader tells the default");
        assert_eq!(setting.origin, Origin::Default, "{}.{}", self.sample, self.name);
        match &setting.value {
            Json::Number(number) => grouped(&number.to_string()),
            value => format!("`{value}`"),
        }
    }
}

/// `16 384` for 16384.
fn grouped(digits: &str) -> String {
    if digits.len() < 5 {
        return digits.to_owned();
    }
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(" ")
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// The tables of docs/configuration.md, each with the name of its section there.
pub fn tables() -> Vec<(&'static str, String)> {
    let sample = read(&SAMPLE, None).expect("the sample can be served");
    let table = |table: &Table| {
        let mut out = String::from("| key | value | default | what it does |\n|---|---|---|---|\n");
        for key in &table.keys {
            let only = if key.only.is_empty() { String::new() } else { format!(" ({})", key.only) };
            let (value, default) = (key.value(), key.default_value(&sample));
            let _ = writeln!(
                out,
                "| `{}`{} | {} | {} | {} |",
                key.name,
                cell(&only),
                cell(&value),
                cell(&default),
                cell(&key.what)
            );
        }
        (table.header, out)
    };
    let others = [("framings", framings()), ("kernels", kernels()), ("functions", functions())];
    TABLES.iter().map(table).chain(others).collect()
}

/// The framings.
fn framings() -> String {
    let mut out = String::from("| framing | a message on the wire |\n|---|---|\n");
    for framing in Framing::ALL {
        let _ = writeln!(out, "| `{}` | {} |", framing.form(), cell(framing.wire()));
    }
    out
}

/// The built-in kernels.
fn kernels() -> String {
    let mut out = String::from(
        "| kernel | what it does | request | reply | backends | parameters |\n|---|---|---|---|---|---|\n",
    );
    let bytes =
        |bytes: Option<u32>, any: &str| bytes.map_or(any.to_owned(), |b| format!("{b} bytes"));
    for kernel in BUILTINS {
        let params: Vec<_> =
            kernel.params.iter().map(|(n, what)| format!("`{n}`: {what}")).collect();
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} | {} | {} |",
            kernel.name,
            cell(kernel.summary),
            bytes(kernel.request_bytes, "any length"),
            bytes(kernel.reply_bytes, "as the request"),
            kernel.backends,
            params.join("; ")
        );
    }
    out
}

/// The built-in functions.
fn functions() -> String {
    let mut out = String::from("| function | what it does | params (default) |\n|---|---|---|\n");
    for function in builtins::BUILTINS {
        let settings = function.settings.iter().chain(function.texts).chain(&function.file);
        let settings: Vec<_> = settings.map(|(n, what)| format!("`{n}`: {what}")).collect();
        let (name, summary) = (function.name, cell(function.summary));
        let _ = writeln!(out, "| `{name}` | {summary} | {} |", settings.join("; "));
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The keys of a table, according to the reader.
    fn accepted(sample: &str) -> BTreeSet<String> {
        let error = if sample.is_empty() {
            read(&format!("none_of_these = 1\n{}", *SAMPLE), None)
        } else {
            read(&SAMPLE, Some(format!("{sample}.none_of_these=1")))
        };
        let error = error.expect_err("an unknown key").to_string();
        let (_, keys) = error.rsplit_once(" has ").expect("the help lists the keys");
        keys.split(", ").map(|key| key.trim().to_owned()).collect()
    }

    #[test]
    fn exactly_the_keys_that_are_read_are_described() {
        let kinds = KINDS.iter().map(|kind| kind.name()).filter(|name| *name != "cpu");
        let accelerators: Vec<_> =
            ["worker", "threads", "external"].into_iter().chain(kinds).collect();
        for table in TABLES.iter() {
            let described: BTreeSet<String> =
                table.keys.iter().map(|k| k.name.to_owned()).collect();
            let read: BTreeSet<String> = match table.header {
                "[[accelerator]]" => accelerators
                    .iter()
                    .flat_map(|a| accepted(&format!("accelerator.{a}")))
                    .collect(),
                _ => accepted(&table.keys[0].sample),
            };
            assert_eq!(described, read, "{}", table.header);
        }
    }

    #[test]
    fn missing_required_keys_are_reported() {
        for line in [
            "schema = 1",
            "attach = \"/run",
            "listen =",
            "accelerator =",
            "kernel =",
            "connect =",
            "name = \"shop\"",
            "name = \"worker\"",
            "name = \"digits\"",
            "name = \"db\"",
            "name = \"limits\"",
            "function =",
        ] {
            let without: Vec<&str> = SAMPLE.lines().filter(|l| !l.starts_with(line)).collect();
            assert_eq!(without.len() + 1, SAMPLE.lines().count(), "{line}");
            assert!(read(&without.join("\n"), None).is_err(), "{line}");
        }
        assert!(read("schema = 1\n", None).is_err(), "service");
        let by_key = Some("service.digits.dispatch=key-hash".to_owned());
        assert!(read(&SAMPLE, by_key).unwrap_err().to_string().contains("add key ="));
    }

    #[test]
    fn ranges_and_words_match_the_reader() {
        let tables = tables();
        let table = |header: &str| &tables.iter().find(|(h, _)| *h == header).unwrap().1;
        assert!(table("[engine]").contains("| `workers` | integer, threads: 1 to 64 | 1 |"));
        assert!(
            table("[engine]")
                .contains("| `\"spin\"`, `\"adaptive\"`, `\"block\"` | `\"adaptive\"` |")
        );
        assert!(table("[limits]").contains("1 to 1 000 000 | 16 384 |"));
        assert!(table("[[service]]").contains("| boolean: `true`, `false` | `true` |"));
        assert_eq!(grouped("1234"), "1234");
        assert_eq!(grouped("12345"), "12 345");
    }
}
