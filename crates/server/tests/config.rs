//! Every way in which a configuration can be wrong, with the exact text a person gets.
//!
//! `tests/config/NAME.toml` is refused with `tests/config/NAME.stderr`. Comment lines at the top of a
//! case give what comes after the file: `# env: NAME=VALUE` and `# set: KEY=VALUE`. After a change of
//! wording, `UPDATE_GOLDEN=1 cargo test -p serval-server --test config` rewrites the texts; read the diff. `[framings]` stands
//! for the names of all framings, `[kinds]` for those of all kinds of accelerators, `[keys of TABLE]` for those of all keys of a table.

use std::fs;
use std::path::{Path, PathBuf};

use runtime::kinds::KINDS;
use server::config::{Config, Overrides};
use wire::framing::Framing;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config")
}

fn overrides(text: &str) -> Overrides {
    let mut overrides = Overrides::default();
    for line in text.lines().take_while(|line| line.starts_with('#')) {
        if let Some(set) = line.strip_prefix("# set: ") {
            overrides.sets.push(set.to_owned());
        } else if let Some((name, value)) =
            line.strip_prefix("# env: ").and_then(|variable| variable.split_once('='))
        {
            overrides.environment.push((name.to_owned(), value.to_owned()));
        }
    }
    overrides
}

/// `a, b and c`: the kinds of accelerators, quoted.
fn kinds_in_words() -> String {
    let kinds: Vec<String> = KINDS.iter().map(|kind| format!("\"{}\"", kind.name())).collect();
    let (last, others) = kinds.split_last().unwrap();
    format!("{} and {last}", others.join(", "))
}

/// Lists that grow with every framing, kind and key are no part of the texts.
fn without_lists(text: String) -> String {
    let text = text.replace(&Framing::choices(), "[framings]");
    let mut kinds: Vec<&str> = KINDS.iter().map(|kind| kind.name()).collect();
    kinds.sort_unstable();
    let text = text.replace(&format!("\"{}\"", kinds.join("\", \"")), "[kinds]");
    let text = text.replace(&kinds_in_words(), "[kinds]");
    let tables = server::config::reference_tables();
    let of_keys = tables.iter().filter(|(header, _)| header.starts_with('['));
    of_keys.fold(text, |text, (header, table)| {
        let mut keys: Vec<&str> =
            table.lines().filter_map(|row| row.strip_prefix("| `")?.split('`').next()).collect();
        keys.dedup();
        text.replace(&keys.join(", "), &format!("[keys of {header}]"))
    })
}

#[test]
fn every_wrong_configuration_is_refused_with_its_text() {
    let mut cases: Vec<PathBuf> =
        fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    cases.sort();
    assert!(cases.len() >= 40, "only {} cases", cases.len());
    let mut wrong = Vec::new();
    for path in &cases {
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = fs::read_to_string(path).unwrap();
        let Err(error) = Config::parse(name, &text, &folder(), &overrides(&text)) else {
            wrong.push(format!("{name}: was accepted"));
            continue;
        };
        let shown = format!("{error}\n");
        let shown = without_lists(shown);
        let golden = path.with_extension("stderr");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&golden, &shown).unwrap();
        }
        let expected = fs::read_to_string(&golden).unwrap_or_default();
        if shown != expected {
            wrong.push(format!("{name}: expected\n{expected}\ngot\n{shown}"));
        }
        for entry in error.entries() {
            assert!(entry.line > 0 && entry.column > 0, "{name}: {entry:?}");
            assert!(!entry.what.is_empty() && !entry.right.is_empty(), "{name}: {entry:?}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn no_text_is_left_without_its_case() {
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "stderr") {
            assert!(path.with_extension("toml").exists(), "{}", path.display());
        }
    }
}

/// docs/configuration.md: what stands between `<!-- keys: NAME -->` and `<!-- end -->` is made from the reader.
#[test]
fn the_page_of_all_keys_matches_the_reader() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let text = fs::read_to_string(&path).unwrap();
    let mut expected = text.clone();
    for (name, table) in server::config::reference_tables() {
        let begin = format!("<!-- keys: {name} -->\n");
        let place = expected.split_once(&begin).and_then(|(before, rest)| {
            Some((before.to_owned(), rest.split_once("<!-- end -->")?.1.to_owned()))
        });
        let (before, after) = place.unwrap_or_else(|| panic!("no place for {name}"));
        expected = format!("{before}{begin}\n{table}\n<!-- end -->{after}");
    }
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &expected).unwrap();
    } else {
        let line = expected.lines().zip(text.lines()).find(|(a, b)| a != b);
        assert!(text == expected, "run `cargo xtask configuration`; first difference: {line:?}");
    }
}

/// Pages that name every framing or kind in their prose or tables do name all of them.
#[test]
fn the_pages_name_every_framing_and_every_kind() {
    let page = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        fs::read_to_string(path).unwrap()
    };
    let start = page("getting-started.md");
    let list = start.split_once("Framings: ").and_then(|(_, rest)| rest.split_once(". "));
    let (list, _) = list.expect("docs/getting-started.md lists the framings");
    for framing in Framing::ALL {
        assert!(list.contains(&format!("`{}`", framing.form())), "getting-started.md: {framing}");
    }
    let kernels = page("kernels.md");
    for kind in KINDS {
        let name = format!("`kind = \"{}\"`", kind.name());
        assert!(kernels.contains(&name), "kernels.md, \"Where a kernel runs\": no {name}");
    }
}

/// Keys that [`FULL`] does not have, because their default cannot be written or another value must be there.
const NOT_IN_FULL: &[(&str, &[&str])] = &[
    // Of other placements and kinds.
    ("[[accelerator]]", &["threads", "cores", "attach", "heartbeat_ms", "hang_ms"]),
    // The default of `idle_s` is that of `[limits]`.
    ("[[service]]", &["key", "upstream", "upstream_flows", "proxy_protocol", "idle_s"]),
    // `memory_bytes` is for backends that do transfers.
    ("[[service.backend]]", &["match", "function", "memory_bytes"]),
    // A socket has one of `listen` and `connect`.
    ("[[service.socket]]", &["connect"]),
    // A file has one of `path` and `connect`.
    ("[[service.file]]", &["connect", "key"]),
    // Of modules, and not there by default.
    ("[[service.function]]", &["memory_mib", "dictionary"]),
];

#[test]
fn the_full_file_has_every_key() {
    let tables = server::config::reference_tables();
    let (top, _) = FULL.split_once('[').unwrap();
    for (header, table) in
        tables.iter().filter(|(header, _)| !matches!(*header, "framings" | "kernels" | "functions"))
    {
        let part = match FULL.split_once(&format!("\n{header}\n")) {
            Some((_, rest)) => rest.split_once("\n[").map_or(rest, |(part, _)| part),
            None if *header == "the top of the file" => top,
            None => "",
        };
        // A key that is a table has one of these headers.
        let outer = header.trim_matches(['[', ']']);
        let is_table = |key: &str| {
            let path = match *header {
                "the top of the file" => key.to_owned(),
                _ => format!("{outer}.{key}"),
            };
            let headers = [format!("[{path}]"), format!("[[{path}]]")];
            tables.iter().any(|(header, _)| headers.iter().any(|of| of == header))
        };
        let excepted =
            NOT_IN_FULL.iter().find(|(of, _)| of == header).map_or(&[][..], |(_, keys)| keys);
        let own = |key: &&str| {
            KINDS.iter().any(|kind| {
                kind.keys().iter().any(|own| own.name == *key)
                    || kind.texts().iter().any(|own| own.name == *key)
            })
        };
        for key in table.lines().filter_map(|row| row.strip_prefix("| `")?.split('`').next()) {
            let is_there = part.lines().any(|line| line.starts_with(&format!("{key} = ")));
            let excused = excepted.contains(&key)
                || *header == "[[accelerator]]" && own(&key)
                || is_table(key);
            assert!(is_there != excused, "write `{key}` of {header} in FULL, or in NOT_IN_FULL");
        }
    }
}

/// The file of the documentation, every key spelled out.
const FULL: &str = r#"
schema = 1
[engine]
workers = 1
cores = "auto"
polling = "adaptive"
drain_ms = 3000
metrics = ""
control = "auto"
functions = "/var/lib/serval/functions"
function_keys = []
unsigned_functions = false
user_deadline_us = 1000
user_function_percent = 50
[limits]
connections = 16384
pipelined = 64
idle_s = 60
slow_client_ms = 5000
region_mib = 2048
udp_reply_ratio = 0
udp_privileged_sources = true
[transfer]
socket = "off"
in_flight = 256
threads = 2
memory_mib = 1024
per_client = 64
clients = 256
[[tenant]]
name = "default"
weight = 1
messages_per_s = 0
bytes_per_s = 0
burst_ms = 100
outstanding = 0
connections = 0
mqueues = 0
memory_mib = 0
users = []
netns = ""
user = 0
namespaces = []
[[accelerator]]
name = "acc0"
kind = "cpu"
launch = "engine"
placement = "worker"
stack_kib = 64
[[service]]
name = "digits"
listen = ["udp://127.0.0.1:9000", "tcp://127.0.0.1:9000"]
framing = "fixed:784"
accelerator = "acc0"
kernel = "lenet"
params = {}
mqueues = 4
slots = 64
arena_bytes = 0
max_message_bytes = 1024
max_reply_bytes = 1024
replies = "one"
ordered = true
dispatch = "round-robin"
request_timeout_ms = 1000
queue_us_max = 0
error_reply_hex = ""
tenant = "default"
peer_address = false
function_users = []
rings = "auto"
sockets_per_block = 4
socket_bytes = 65536
[[service.backend]]
name = "db"
connect = "tcp://127.0.0.1:11211"
framing = "memcached"
connections = 1
timeout_ms = 100
in_flight = 256
max_message_bytes = 2048
sockets = "persistent"
[[service.function]]
name = "limits"
function = "threshold"
params = {}
on_failure = "closed"
deadline_us = 50000
dictionary_kib = 64
[[service]]
name = "streams"
accelerator = "acc0"
kernel = "stream_echo"
[[service.socket]]
name = "peers"
listen = "tcp://127.0.0.1:9003"
idle_ms = 0
[[service]]
name = "files"
listen = "udp://127.0.0.1:9004"
accelerator = "acc0"
kernel = "echo"
[[service.backend]]
name = "disk"
connect = "transfer"
[[service.file]]
name = "model"
path = "model.bin"
access = "read"
"#;

#[test]
fn the_documented_file_is_accepted_and_its_values_are_the_defaults() {
    let full = Config::parse("full.toml", FULL, Path::new(""), &Overrides::default()).unwrap();
    // Without the keys that have a default, everything stays as it is.
    let needed = [
        "schema",
        "name",
        "listen",
        "framing",
        "accelerator",
        "kernel",
        "path",
        "connect",
        "function",
        "udp_reply_ratio",
        "udp_privileged_sources",
    ];
    let lines = FULL.lines().filter(|line| {
        line.starts_with('[') || needed.iter().any(|key| line.starts_with(&format!("{key} =")))
    });
    let short = lines.collect::<Vec<_>>().join("\n");
    let short = Config::parse("short.toml", &short, Path::new(""), &Overrides::default()).unwrap();
    assert_eq!(format!("{:?}", full.topology), format!("{:?}", short.topology));
    assert_eq!(full.json()["settings"], short.json()["settings"]);
    assert_eq!(full.json()["settings"]["service"]["digits"]["framing"], "fixed:784");
    assert_eq!(full.regions()[0].service, "digits");
    assert!(full.regions()[0].bytes > 4 * 2 * 64 * 1024);
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let overrides = Overrides::default();
    let error = Config::load(Path::new("/nonexistent/serval.toml"), &overrides).unwrap_err();
    assert!(
        error.to_string().starts_with("error: cannot read /nonexistent/serval.toml: "),
        "{error}"
    );
    let folder_error = Config::load(&folder(), &overrides).unwrap_err();
    assert!(folder_error.to_string().contains("it is a folder, not a file"), "{folder_error}");
    let endless = Config::load(Path::new("/dev/zero"), &overrides).unwrap_err();
    assert!(endless.to_string().contains("it is a device, not a file"), "{endless}");
    let path = std::env::temp_dir().join(format!("serval-config-{}.fifo", std::process::id()));
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    // It has no writer, and is not waited for.
    let fifo = Config::load(&path, &overrides).unwrap_err();
    fs::remove_file(&path).unwrap();
    assert!(fifo.to_string().contains("it is a FIFO, not a file"), "{fifo}");
    let path = std::env::temp_dir().join(format!("serval-config-{}.toml", std::process::id()));
    fs::write(&path, b"schema = 1\nname = \"\xff\"\n").unwrap();
    let binary = Config::load(&path, &overrides).unwrap_err();
    fs::remove_file(&path).unwrap();
    assert!(binary.to_string().contains("is not UTF-8 text: line 2"), "{binary}");
    let path = std::env::temp_dir().join(format!("serval-config-{}.long", std::process::id()));
    fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
    let long = Config::load(&path, &overrides).unwrap_err();
    fs::remove_file(&path).unwrap();
    assert!(long.to_string().contains("longer than 1 MiB"), "{long}");
}

/// What a service does not set, `[limits]` does: a change there changes no service.
#[test]
fn a_service_may_have_its_own_idle_time() {
    let text = "schema = 1\n[limits]\nidle_s = 30\n[[service]]\nname = \"a\"\nlisten = \"tcp://127.0.0.1:9000\"\n\
                kernel = \"echo\"\nidle_s = 3600\n[[service]]\nname = \"b\"\nlisten = \"tcp://127.0.0.1:9001\"\n\
                kernel = \"echo\"\n[[service]]\nname = \"p\"\nlisten = \"udp://127.0.0.1:9002\"\n\
                upstream = \"127.0.0.1:53\"\nidle_s = 5\n";
    let config = Config::parse("idle.toml", text, Path::new(""), &Overrides::default()).unwrap();
    let own: Vec<_> = config.topology.services.iter().map(|service| service.idle_ms).collect();
    assert_eq!(own, [Some(3_600_000), None, Some(5000)]);
    let shown = |service: &str| config.json()["settings"]["service"][service]["idle_s"].clone();
    assert_eq!([shown("a"), shown("b"), shown("p")], [3600, 30, 5]);
}
