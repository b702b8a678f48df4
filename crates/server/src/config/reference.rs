//! Every key of the configuration file: its name, what it is for, and the tables of docs/configuration.md.
//!
//! What a key does is written here. Ranges, words and defaults are not: [`tables`] asks the reader for them, by
//! reading a sample with and without wrong values, so that the page cannot say something else than what is read.
//! `crates/server/tests/config.rs` holds the page to it; `cargo xtask configuration` writes it.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::LazyLock;

use runtime::kinds::KINDS;
use serde_json::Value as Json;
use wire::framing::Framing;

use super::{BUILTINS, Config, ConfigError, Origin, Overrides};

/// A table of the file.
pub(super) struct Table {
    /// Its header, as hints name it.
    pub(super) header: &'static str,
    /// Its keys in the order of the documentation.
    pub(super) keys: Vec<Key>,
}

/// One key. A key that means different things in different tables of its kind has a line for each.
#[derive(Clone)]
pub(super) struct Key {
    pub(super) name: &'static str,
    /// The table of [`SAMPLE`] that has it.
    sample: Cow<'static, str>,
    /// Where it has a meaning; empty: everywhere.
    only: Cow<'static, str>,
    kind: Kind,
    /// What holds without it, where the reader does not say it as a value.
    default: &'static str,
    what: Cow<'static, str>,
}

/// What a value is.
#[derive(Clone)]
enum Kind {
    /// An integer; its unit. The range is asked for.
    Integer(&'static str),
    /// One of some words, which are asked for.
    Word,
    Boolean,
    /// A framing.
    FramingName,
    /// In words.
    Other(&'static str),
}

/// Keys with their table of the sample.
macro_rules! keys {
    ($sample:literal: $( $name:ident $(($only:literal in $at:literal))?: $kind:expr, $default:literal, $what:literal; )+) => {
        &[ $( Key {
            name: stringify!($name),
            sample: Cow::Borrowed(keys!(@ $sample $($at)?)),
            only: Cow::Borrowed(concat!($($only)?)),
            kind: $kind,
            default: $default,
            what: Cow::Borrowed($what),
        }, )+ ]
    };
    (@ $sample:literal) => { $sample };
    (@ $sample:literal $at:literal) => { $at };
}

use Kind::{Boolean, FramingName, Integer, Other, Word};

/// Every table.
pub(super) static TABLES: LazyLock<Vec<Table>> = LazyLock::new(|| {
    let table = |(header, keys): &(&'static str, &[Key])| Table { header, keys: keys.to_vec() };
    let mut tables: Vec<Table> = COMMON.iter().map(table).collect();
    let accelerators = tables.iter_mut().find(|table| table.header == "[[accelerator]]");
    let accelerators = accelerators.expect("there is such a table");
    let kind = accelerators.keys.iter_mut().find(|key| key.name == "kind");
    let kinds = KINDS.iter().map(|kind| format!("`{}`: {}. ", kind.name(), kind.summary()));
    kind.expect("accelerators have kinds").what =
        (kinds.collect::<String>() + "`remote` is refused: not built yet.").into();
    accelerators.keys.extend(own_keys());
    tables
});

/// The keys that only one kind of accelerator has.
fn own_keys() -> impl Iterator<Item = Key> {
    KINDS.iter().flat_map(|kind| {
        let name = kind.name();
        kind.keys().iter().map(move |key| Key {
            name: key.name,
            sample: format!("accelerator.{name}").into(),
            only: format!("`{name}` that the engine starts").into(),
            kind: Integer(key.unit),
            default: "",
            what: key.what.into(),
        })
    })
}

/// The keys of every table, but for those that only one kind of accelerator has.
const COMMON: &[(&str, &[Key])] = &[
    (
        "the top of the file",
        keys! { "":
            schema: Other("integer: `1`"), "required",
                "The version of the file format. It precedes the first table.";
            engine: Other("table"), "every key's default", "`[engine]`, below.";
            limits: Other("table"), "every key's default", "`[limits]`, below.";
            accelerator: Other("list of tables"), "`acc0` of kind `cpu`; for kernel files `process` of kind `process`",
                "`[[accelerator]]`, below: where kernels run.";
            service: Other("list of tables"), "required", "`[[service]]`, below: the services.";
        },
    ),
    (
        "[engine]",
        keys! { "engine":
            workers: Integer("threads"), "",
                "Threads that receive, dispatch and send. Each has its own socket on every port. Raise it when `serval top` shows \
                 workers that are busy all the time and cores are free.";
            cores: Other("`\"auto\"`, or a list of core numbers"), "",
                "Pins worker *n* to the *n*-th core of the list; `auto` pins none. The list needs a core for each worker. Pin workers for \
                 steady latencies, and keep other programs off these cores.";
            polling: Word, "",
                "What a worker without work does. `spin` polls continuously: the lowest latency, a whole core. `adaptive` polls \
                 for 50 us and then sleeps. `block` sleeps at once: the least CPU. None sleeps while a request is outstanding.";
            drain_ms: Integer("ms"), "",
                "How long a server that ends, and a service that a reload changes or removes, may take to answer accepted requests. \
                 The rest is dropped as `drain_timeout`.";
            metrics: Other("string: `IP:PORT`, or `none`"), "none",
                "Serves `/metrics`, `/healthz` and `/readyz` there. Keep it on loopback: nothing is encrypted or authenticated.";
            control: Other("string: absolute path, `auto` or `off` (also `\"\"`)"), "auto",
                "A Unix socket for `serval top` and `serval reload`. The engine's user and root may use it. `auto` is `PID.sock` in \
                 `$XDG_RUNTIME_DIR/serval`, or in `/run/serval` if that variable is not set; both commands find it there. If it \
                 cannot be created, the server logs a warning and runs without it.";
        },
    ),
    (
        "[limits]",
        keys! { "limits":
            connections: Integer("connections"), "",
                "Open TCP connections and shared-memory clients of the whole engine; more are refused as `connection_limit`. The \
                 default is lowered if the process may have fewer file descriptors; a configured number is refused then.";
            pipelined: Integer("requests"), "",
                "Requests in flight for each connection; more wait unread. Raise it for one client that must fill many mqueues: each \
                 needs memory (operations.md, Limits).";
            idle_s: Integer("s"), "", "A connection without a complete message for this long is closed (`idle_timeout`).";
            slow_client_ms: Integer("ms"), "",
                "A connection that takes no byte of a waiting reply for this long is closed (`slow_client`).";
            region_mib: Integer("MiB"), "",
                "Largest region, the shared memory of one service on one accelerator. Guards against typos: \
                 `serval check-config` shows the size of each region.";
            udp_reply_ratio: Integer("times the request's length"), "3 for ports off loopback, else 0",
                "Longest reply to a UDP source, whose address may be forged, so that a server cannot be used to flood others; \
                 longer ones are dropped as `reply_ratio`. 0: any length. Raise it only where the network is trusted.";
            udp_privileged_sources: Boolean, "`true` for ports on loopback, else `false`",
                "Whether datagrams from source ports below 1024 are served. Services of other machines use these ports (`echo`, `chargen`, \
                 DNS, NTP), and with a forged source two servers that answer any message would answer each other. `false`: such \
                 datagrams are dropped as `privileged_source`. Set `true` if clients use such ports, as old DNS resolvers do.";
        },
    ),
    (
        "[[accelerator]]",
        keys! { "accelerator.worker":
            name: Other("string: 1 to 64 letters, digits, `_`, `-`"), "required", "The name in services and metrics. Unique.";
            kind: Word, "",
                "";
            launch: Word, "",
                "Who starts the process of a kind other than `cpu`: `engine` starts it and starts it again when it ends; `external` waits for \
                 `serval attach`, or a program of yours, at `attach`.";
            placement ("`cpu`" in "accelerator.worker"): Word, "",
                "`worker`: kernels run in the worker's own thread: no hand-over, and a slow kernel holds the worker up. `threads`: on \
                 threads of their own: for kernels that take longer than some microseconds.";
            threads ("`placement = \"threads\"`, or `process` that the engine starts" in "accelerator.process"): Integer("threads"), "",
                "Threads that share the blocks. As many as cores are to be used.";
            cores ("`placement = \"threads\"`, or `process` that the engine starts" in "accelerator.process"): Other("`\"auto\"`, or a list of core numbers"), "", "Pins the threads, one core each.";
            stack_kib ("`cpu`, or `process` that the engine starts" in "accelerator.process"): Integer("KiB"), "",
                "Stack of each block, rounded up to whole pages; only the pages that a kernel uses take memory. Raise it where a kernel needs \
                 large local arrays or deep recursion. With `launch = \"external\"` give it to the runtime: `serval attach PATH --stack-kib N`.";
            attach ("`launch = \"external\"`" in "accelerator.external"): Other("string: absolute path"), "required",
                "The Unix socket where runtimes attach. The engine's user and root may.";
            heartbeat_ms ("all kinds but `cpu`" in "accelerator.process"): Integer("ms"), "",
                "A runtime that stands still for longer is given up and replaced; what was with it ends as `accelerator_stalled`. Raise \
                 it on machines that pause (a suspended virtual machine, a debugger).";
            hang_ms ("`placement = \"threads\"`, or a process that the engine starts" in "accelerator.process"): Integer("ms"), "",
                "A block that works on one message for longer hangs: its process ends and starts again; with `placement = \"threads\"` \
                 its mqueues are dead and `/readyz` fails until the service changes. Unless set, it is raised to the longest \
                 `request_timeout_ms` of the service; a value below that is refused. The engine does not know the limit of a runtime that attaches \
                 (`launch = \"external\"`): give it `serval attach --hang-ms N`, at least the longest `request_timeout_ms` of its services.";
        },
    ),
    (
        "[[service]]",
        keys! { "service.digits":
            name: Other("string: 1 to 64 letters, digits, `_`, `-`"), "required",
                "The name in metrics, the log and a reload. Unique.";
            listen: Other("string or list: `udp://IP:PORT`, `tcp://IP:PORT`, `shm:///PATH`"), "required",
                "The ports for clients. `0.0.0.0` is every IPv4 address of the machine, `[::]` every IPv6 address; for port 0 the host \
                 kernel chooses.";
            framing: FramingName, "",
                "How messages are delimited on a TCP connection. A datagram is one message.";
            accelerator: Other("string, or list of strings"), "`process` for a kernel file: a process of its own; for a built-in kernel `acc0` where the file defines none, else required",
                "The accelerators that run the kernel, by name. With several, requests go where there is credit. `acc0` runs a kernel file on \
                 the engine's own core where the file defines no accelerator.";
            kernel: Other("string, or list with one for each accelerator"), "required",
                "A built-in kernel (below), or the path of a compiled one, relative to the file's folder: `mine.so`, `mine.fatbin`, \
                 `mine.so:NAME` where a library has several. \
                 A program of yours that attaches (`launch = \"external\"`) may give its kernels any name of letters, digits, `_` and `-`.";
            params: Other("table of numbers, or true and false"), "none", "The kernel's parameters: `params = { microseconds = 20 }`.";
            mqueues: Integer("mqueues, or a list with one for each accelerator"), "",
                "Message queues, each with a block of its own. On a GPU as many as blocks that fit; with `cpu` kernels a few \
                 for each thread.";
            slots: Integer("messages, a power of two"), "",
                "Length of each ring: requests that an mqueue holds. More slots absorb longer bursts (see `no_credit`), need more memory, and \
                 let requests wait longer.";
            arena_bytes: Integer("bytes"), "",
                "Room in each ring for payloads where messages may exceed 1.5 KiB. 0: as many of the longest messages as there are slots, \
                 but at most 256 KiB or four messages. `serval check-config` warns if that is little.";
            max_message_bytes: Integer("bytes"), "",
                "Longest request; longer ones are dropped as `too_long`. Messages of up to 1536 bytes are stored in the slots themselves: set no \
                 more than you need.";
            max_reply_bytes: Integer("bytes"), "`max_message_bytes`",
                "Longest reply; longer ones are dropped as `reply_too_long`. With a `udp://` port at most 65 507. Set less if the \
                 kernel's replies are always shorter than its requests: it saves memory.";
            replies: Word, "", "`none`: the kernel never answers, requests are consumed.";
            ordered: Boolean, "",
                "Replies on a TCP connection keep the order of its requests. `false`: each is sent as soon as it is ready; the client must match \
                 them with its requests.";
            dispatch: Word, "",
                "How the mqueue of a request is chosen: in turn, the one with the fewest requests in flight, by the client's address, or by bytes of \
                 the message. Use `least-loaded` for kernels or accelerators of different speed, the hashes if a kernel keeps state.";
            key ("`dispatch = \"key-hash\"`" in "service.digits"): Other("string: `OFFSET:LENGTH` in bytes"), "required",
                "The position of the key in a message.";
            request_timeout_ms: Integer("ms"), "", "A request without a reply for this long is dropped as `request_timeout`.";
            queue_us_max: Integer("us"), "",
                "New requests are shed (`queue_time`) while the oldest has waited for longer. 0: never. Set it if late answers are \
                 useless.";
            tenant: Other("string: 1 to 64 letters, digits, `_`, `-`"), "",
                "The owner of the service. Services of one tenant share a process on a GPU, services of different tenants never do.";
            rings: Word, "",
                "Ring protocol. `auto`: `doorbell` on host cores, `granule` on GPUs. The others are for experiments. Granule rings carry \
                 up to 1536 bytes.";
            backend: Other("list of tables"), "none", "`[[service.backend]]`, below.";
        },
    ),
    (
        "[[service.backend]]",
        keys! { "service.digits.backend.db":
            name: Other("string: 1 to 64 letters, digits, `_`, `-`"), "required",
                "The name in metrics and log messages. Kernels address backends by their order.";
            connect: Other("string: `tcp://HOST:PORT`, `udp://HOST:PORT`"), "required",
                "Its address. A host name is resolved once, at start.";
            framing: Other("as of a service"), "",
                "How answers are delimited on a TCP connection. `memcached` also over UDP: the engine writes and reads its frame header.";
            connections: Integer("connections of each worker"), "", "TCP connections. Raise it if one core of the backend is not enough.";
            timeout_ms: Integer("ms"), "", "If an answer takes longer, the kernel gets `TIMEOUT`.";
            in_flight: Integer("requests"), "",
                "Requests in flight on each TCP connection, with `match` over UDP in each mqueue; more wait. (UDP without `match`: one \
                 in each mqueue.) With `sockets = \"per-request\"`: sockets of each worker, at most 1024.";
            max_message_bytes: Integer("bytes"), "", "Longest request to it and longest answer (`backend_too_long`).";
            match: Other("string: `id:OFFSET:LENGTH` in bytes, LENGTH 1 to 8"), "none",
                "The position of an id that requests and answers share. An answer with another id than its request goes to no request \
                 (`backend_mismatch`). Not with framing `memcached`, whose answers are matched by key.";
            sockets: Word, "",
                "`per-request`: each request has a connection or UDP socket of its own, which is closed after the answer or the time-out. \
                 Slower, but no late or duplicate answer can reach another request.";
        },
    ),
];

/// A configuration with the least that each table needs, and an accelerator of each kind.
static SAMPLE: LazyLock<String> = LazyLock::new(|| {
    let of_kinds = KINDS.iter().filter(|kind| !kind.keys().is_empty()).map(|kind| {
        let name = kind.name();
        format!("[[accelerator]]\nname = \"{name}\"\nkind = \"{name}\"\n")
    });
    [SAMPLE_ACCELERATORS, &of_kinds.collect::<String>(), SAMPLE_SERVICE].concat()
});

const SAMPLE_ACCELERATORS: &str = r#"schema = 1
[[accelerator]]
name = "worker"
[[accelerator]]
name = "threads"
placement = "threads"
[[accelerator]]
name = "process"
kind = "process"
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
"#;

/// A word that no key takes.
const NO_WORD: &str = "none-of-these";

fn read(text: &str, set: Option<String>) -> Result<Config, ConfigError> {
    let overrides =
        Overrides { environment: Vec::new(), sets: set.into_iter().collect(), inspect: None };
    Config::parse("sample.toml", text, Path::new(""), &overrides)
}

impl Key {
    /// What the reader says is right instead of a value that is not.
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
        match self.kind {
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

    /// What holds when nobody says anything.
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

/// The tables of docs/configuration.md, each with the name that its place there has.
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
    TABLES.iter().map(table).chain([("framings", framings()), ("kernels", kernels())]).collect()
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The keys that the reader says a table has.
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
    fn every_key_that_is_read_is_described_and_no_other() {
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
    fn what_is_required_is_missed() {
        for line in [
            "schema = 1",
            "attach = \"/run",
            "listen =",
            "accelerator =",
            "kernel =",
            "connect =",
            "name = \"worker\"",
            "name = \"digits\"",
            "name = \"db\"",
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
    fn ranges_and_words_are_those_of_the_reader() {
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
