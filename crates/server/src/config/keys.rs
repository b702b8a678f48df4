//! All keys of the configuration file, in one table: name, value, target field, description.
//!
//! A key whose value is a number, a Boolean or a word, and that is stored directly in a field, needs only a row here
//! and the field: [`read_fields`](super::fields::read_fields) reads it, checks it and records it, and its default is the field's. Keys that
//! depend on others or have a special form are read by code in `sections.rs` and `service.rs`.
//!
//! Documents, hints about unknown keys and the order of listings are generated from the same rows (`reference.rs`,
//! `reader.rs`).

use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use engine::topology::{
    Backend, EngineSettings, Limits, Polling, Replies, Rings, SOCKET_BYTES_MAX, SOCKET_BYTES_MIN,
    Service, Sockets, Tenant, UPSTREAM_FLOWS_MAX, WEIGHT_MAX, WORKERS_MAX,
};
use mqueue::abi::{DEPTH_MAX, MESSAGE_BYTES_MAX, SOCKETS_MAX};
use onpath::Spec;
use onpath::dictionary::{KIB_MAX, KIB_MIN};
use onpath::spec::{DEADLINE_US_MAX, MEMORY_MIB_MAX};
use runtime::kinds::KINDS;
use transfer::ServiceLimits;

/// The range of `idle_s`, of a service and in `[limits]`.
pub(super) const IDLE_S: RangeInclusive<u64> = 1..=86_400;

/// A table of the file.
pub(super) struct Table {
    /// Its header, as in hints.
    pub(super) header: &'static str,
    /// Its keys in the order of the documentation.
    pub(super) keys: Vec<Key>,
}

/// One key. A key with different meanings in different tables of its kind has one row for each.
#[derive(Clone)]
pub(super) struct Key {
    pub(super) name: &'static str,
    /// With the name of its table, unless the table is in a list: `engine.workers`.
    pub(super) path: &'static str,
    /// The table of the reference's sample that contains it.
    pub(super) sample: Cow<'static, str>,
    /// Where it is valid; empty: everywhere.
    pub(super) only: Cow<'static, str>,
    pub(super) kind: Kind,
    /// The default in words, if the reader does not return it as a value.
    pub(super) default: &'static str,
    pub(super) what: Cow<'static, str>,
}

/// The type of a value, and its target.
#[derive(Clone)]
pub(super) enum Kind {
    /// Stored directly in a field, and read by [`read_fields`](super::fields::read_fields). Other keys are read by dedicated code.
    Field(Field),
    /// An integer; its unit. The range is taken from the reader.
    Integer(&'static str),
    /// A word; the choices are taken from the reader.
    Word,
    Boolean,
    /// A framing.
    FramingName,
    /// Described in words.
    Other(&'static str),
}

/// Keys with their table of the sample.
macro_rules! keys {
    ($sample:literal: $( $name:ident $(($only:literal in $at:literal))?: $kind:expr, $default:literal, $what:literal; )+) => {
        &[ $( Key {
            name: stringify!($name),
            path: concat!($sample, ".", stringify!($name)),
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

/// The target of a key's value, by the struct that the table describes.
#[derive(Clone)]
pub(crate) enum Field {
    Engine(Setter<EngineSettings>),
    Limits(Setter<Limits>),
    Service(Setter<Service>),
    Backend(Setter<Backend>),
    Transfer(Setter<ServiceLimits>),
    Function(Setter<Spec>),
    Tenant(Setter<Tenant>),
}

/// A field of a `T`, and its valid values. Its default is that of a new `T`.
#[derive(Clone)]
pub(crate) enum Setter<T: 'static> {
    Integer { unit: &'static str, range: RangeInclusive<u64>, number: fn(&mut T) -> Number<'_> },
    Boolean(fn(&mut T) -> &mut bool),
    Word(fn(&mut T) -> &mut dyn Choice),
}

/// An integer field.
pub(crate) enum Number<'a> {
    U32(&'a mut u32),
    U64(&'a mut u64),
    Usize(&'a mut usize),
    /// The field contains the value times 1000: milliseconds for seconds.
    Thousands(&'a mut u64),
}

impl Number<'_> {
    pub(super) fn value(&self) -> u64 {
        match self {
            Self::U32(field) => u64::from(**field),
            Self::U64(field) => **field,
            Self::Usize(field) => **field as u64,
            Self::Thousands(field) => **field / 1000,
        }
    }

    /// The range of the key has been checked and fits the field.
    pub(super) fn set(self, value: u64) {
        match self {
            Self::U32(field) => *field = value as u32,
            Self::U64(field) => *field = value,
            Self::Usize(field) => *field = value as usize,
            Self::Thousands(field) => *field = value * 1000,
        }
    }
}

/// The words of an enumeration.
pub(super) trait Words: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];
}

/// A field whose value is one of some words.
pub(crate) trait Choice {
    /// The words, each with its index.
    fn words(&self) -> Vec<(&'static str, usize)>;
    /// The word of the current value.
    fn word(&self) -> &'static str;
    /// Sets the value to the word with this index.
    fn choose(&mut self, place: usize);
}

impl<W: Words> Choice for W {
    fn words(&self) -> Vec<(&'static str, usize)> {
        W::WORDS.iter().enumerate().map(|(place, (word, _))| (*word, place)).collect()
    }

    fn word(&self) -> &'static str {
        let found = W::WORDS.iter().find(|(_, value)| value == self);
        found.expect("every value has its word").0
    }

    fn choose(&mut self, place: usize) {
        *self = W::WORDS[place].1;
    }
}

impl Words for Polling {
    const WORDS: &'static [(&'static str, Self)] =
        &[("spin", Self::Spin), ("adaptive", Self::Adaptive), ("block", Self::Block)];
}

impl Words for Replies {
    const WORDS: &'static [(&'static str, Self)] = &[("one", Self::One), ("none", Self::None)];
}

impl Words for Rings {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("auto", Self::Auto),
        ("doorbell", Self::Doorbell),
        ("granule", Self::Granule),
        ("granule8", Self::Granule8),
        ("bundle", Self::Bundle),
    ];
}

impl Words for Sockets {
    const WORDS: &'static [(&'static str, Self)] =
        &[("persistent", Self::Persistent), ("per-request", Self::PerRequest)];
}

/// A struct that a table of the file describes.
pub(crate) trait Target: Sized + 'static {
    /// The table's header.
    const HEADER: &'static str;
    /// The field, if it is one of this type.
    fn setter(field: &Field) -> Option<&Setter<Self>>;
}

macro_rules! targets {
    ($( $target:ty = $variant:ident, $make:ident, $header:literal; )+) => {
        $(
            impl Target for $target {
                const HEADER: &'static str = $header;

                fn setter(field: &Field) -> Option<&Setter<Self>> {
                    match field {
                        Field::$variant(setter) => Some(setter),
                        _ => None,
                    }
                }
            }

            const fn $make(setter: Setter<$target>) -> Kind {
                Kind::Field(Field::$variant(setter))
            }
        )+

        impl Field {
            /// The kind as shown in the reference.
            pub(super) fn shown(&self) -> Kind {
                match self { $( Self::$variant(setter) => setter.shown(), )+ }
            }
        }
    };
}

targets! {
    EngineSettings = Engine, engine, "[engine]";
    Limits = Limits, limits, "[limits]";
    Service = Service, service, "[[service]]";
    Backend = Backend, backend, "[[service.backend]]";
    ServiceLimits = Transfer, transfers, "[transfer]";
    Spec = Function, function, "[[service.function]]";
    Tenant = Tenant, tenants, "[[tenant]]";
}

const fn number<T>(
    unit: &'static str,
    range: RangeInclusive<u64>,
    number: fn(&mut T) -> Number<'_>,
) -> Setter<T> {
    Setter::Integer { unit, range, number }
}

impl<T> Setter<T> {
    fn shown(&self) -> Kind {
        match self {
            Self::Integer { unit, .. } => Kind::Integer(unit),
            Self::Boolean(_) => Kind::Boolean,
            Self::Word(_) => Kind::Word,
        }
    }

    /// Whether the field has the same value in both.
    fn is_same(&self, one: &mut T, other: &mut T) -> bool {
        match self {
            Self::Integer { number, .. } => number(one).value() == number(other).value(),
            Self::Boolean(field) => field(one) == field(other),
            Self::Word(field) => field(one).word() == field(other).word(),
        }
    }
}

/// The keys of `T`'s table that are stored directly in a field.
pub(super) fn fields<T: Target>() -> impl Iterator<Item = (&'static Key, &'static Setter<T>)> {
    let table = TABLES.iter().find(|table| table.header == T::HEADER).expect("it has a table");
    table.keys.iter().filter_map(|key| match &key.kind {
        Kind::Field(field) => Some((key, T::setter(field)?)),
        _ => None,
    })
}

/// The paths of those keys whose values differ.
pub(crate) fn differences<T: Target + Clone>(one: &T, other: &T) -> Vec<&'static str> {
    let (mut one, mut other) = (one.clone(), other.clone());
    let differs = |(_, setter): &(_, &Setter<T>)| !setter.is_same(&mut one, &mut other);
    fields::<T>().filter(differs).map(|(key, _)| key.path).collect()
}

/// The integer values of a tenant, by key.
pub(crate) fn tenant_values(tenant: &Tenant) -> Vec<(&'static str, u64)> {
    let mut tenant = tenant.clone();
    let value = |(key, setter): (&'static Key, &'static Setter<Tenant>)| match setter {
        Setter::Integer { number, .. } => Some((key.name, number(&mut tenant).value())),
        Setter::Boolean(_) | Setter::Word(_) => None,
    };
    fields::<Tenant>().filter_map(value).collect()
}

/// Sets an integer value of a tenant; the error is one sentence.
pub(crate) fn set_tenant_value(tenant: &mut Tenant, key: &str, value: u64) -> Result<(), String> {
    let found = fields::<Tenant>().find_map(|(known, setter)| match setter {
        Setter::Integer { range, number, .. } if known.name == key => Some((range, number)),
        _ => None,
    });
    let Some((range, number)) = found else {
        let keys: Vec<_> = fields::<Tenant>().map(|(known, _)| known.name).collect();
        return Err(format!("a tenant has no value {key:?}: it has {}", keys.join(", ")));
    };
    if !range.contains(&value) {
        return Err(format!("{key:?} is {value}, must be in [{}, {}]", range.start(), range.end()));
    }
    number(tenant).set(value);
    Ok(())
}

/// The table type of a section's path: `engine`, `service.digits`, `service.digits.backend.db`.
fn table_of(path: &str) -> &'static Table {
    let header = match path.split('.').collect::<Vec<_>>().as_slice() {
        ["engine"] => "[engine]",
        ["limits"] => "[limits]",
        ["transfer"] => "[transfer]",
        ["accelerator", ..] => "[[accelerator]]",
        ["service", _, "backend", _, "function", ..] => "[[service.function]]",
        ["service", _, "backend", ..] => "[[service.backend]]",
        ["service", _, "function", ..] => "[[service.function]]",
        ["service", _, "socket", ..] => "[[service.socket]]",
        ["service", _, "file", ..] => "[[service.file]]",
        ["service", ..] => "[[service]]",
        ["tenant", ..] => "[[tenant]]",
        _ => "the top of the file",
    };
    TABLES.iter().find(|table| table.header == header).expect("every header has a table")
}

/// The table that has a key of this name.
pub(super) fn section_with(key: &str) -> Option<&'static str> {
    let has = |table: &&Table| table.keys.iter().any(|known| known.name == key);
    TABLES.iter().find(has).map(|table| table.header)
}

/// The keys of `engine` or `limits`, which environment variables can set.
pub(super) fn keys_of(section: &str) -> Vec<&'static str> {
    let header = format!("[{section}]");
    let found = TABLES.iter().find(|table| table.header == header);
    found.map_or(Vec::new(), |table| table.keys.iter().map(|key| key.name).collect())
}

/// The position of a key among the others of its section, in documents, hints and listings.
pub(super) fn place_of(path: &str, key: &str) -> usize {
    let keys = &table_of(path).keys;
    keys.iter().position(|known| known.name == key).unwrap_or(keys.len())
}

use Kind::{Boolean, FramingName, Integer, Other, Word};

const TIMEOUT_MS: RangeInclusive<u64> = 1..=3_600_000;
const MESSAGE_BYTES: RangeInclusive<u64> = 1..=MESSAGE_BYTES_MAX as u64;

/// Every table.
pub(super) static TABLES: LazyLock<Vec<Table>> = LazyLock::new(|| {
    let table = |(header, keys): &(&'static str, &[Key])| Table { header, keys: keys.to_vec() };
    let mut tables: Vec<Table> = COMMON.iter().map(table).collect();
    let accelerators = tables.iter_mut().find(|table| table.header == "[[accelerator]]");
    let accelerators = accelerators.expect("there is such a table");
    let kind = accelerators.keys.iter_mut().find(|key| key.name == "kind");
    let kinds = KINDS.iter().map(|kind| format!("`{}`: {}. ", kind.name(), kind.summary()));
    kind.expect("accelerators have kinds").what =
        kinds.collect::<String>().trim_end().to_owned().into();
    accelerators.keys.extend(own_keys());
    tables
});

/// The keys that are specific to one kind of accelerator.
fn own_keys() -> impl Iterator<Item = Key> {
    let key = |owner: &str, name, kind, default, what: &'static str| Key {
        name,
        path: name,
        sample: format!("accelerator.{owner}").into(),
        only: format!("`{owner}` that the engine starts").into(),
        kind,
        default,
        what: what.into(),
    };
    KINDS.iter().flat_map(move |kind| {
        let owner = kind.name();
        let numbers = kind.keys().iter();
        let numbers = numbers.map(move |of| key(owner, of.name, Integer(of.unit), "", of.what));
        let texts = kind.texts().iter();
        numbers.chain(texts.map(move |of| key(owner, of.name, Other(of.form), "required", of.what)))
    })
}

/// The keys of every table, except those that are specific to one kind of accelerator.
const COMMON: &[(&str, &[Key])] = &[
    (
        "the top of the file",
        keys! { "":
            schema: Other("integer: `1`"), "required",
                "The version of the file format. It precedes the first table.";
            engine: Other("table"), "every key's default", "`[engine]`, below.";
            limits: Other("table"), "every key's default", "`[limits]`, below.";
            transfer: Other("table"), "every key's default", "`[transfer]`, below: moves files for other programs.";
            tenant: Other("list of tables"), "none", "`[[tenant]]`, below: who shares the engine.";
            accelerator: Other("list of tables"), "`acc0` of kind `cpu`; for kernel files `process` of kind `process`",
                "`[[accelerator]]`, below: where kernels run.";
            service: Other("list of tables"), "required, unless `[transfer]` has a `socket`", "`[[service]]`, below: the services.";
        },
    ),
    (
        "[engine]",
        keys! { "engine":
            workers: engine(number("threads", 1..=WORKERS_MAX as u64, |e| Number::Usize(&mut e.workers))), "",
                "Threads that receive, dispatch and send. Each has its own socket on every port. Raise it when `serval top` shows \
                 workers that are busy all the time and cores are free.";
            cores: Other("`\"auto\"`, or a list of core numbers"), "",
                "Pins worker *n* to the *n*-th core of the list; `auto` pins none. The list needs a core for each worker. Pin workers for \
                 steady latencies, and keep other programs off these cores.";
            polling: engine(Setter::Word(|e| &mut e.polling)), "",
                "What a worker without work does. `spin` polls continuously: the lowest latency, a whole core. `adaptive` polls \
                 for 50 us and then sleeps. `block` sleeps at once: the least CPU. None sleeps while a request is outstanding.";
            drain_ms: engine(number("ms", 0..=600_000, |e| Number::U64(&mut e.drain_ms))), "",
                "How long a server that ends, and a service that a reload changes or removes, may take to answer accepted requests. \
                 The rest is dropped as `drain_timeout`.";
            metrics: Other("string: `IP:PORT`, or `none`"), "none",
                "Serves `/metrics`, `/healthz` and `/readyz` there. Keep it on loopback: nothing is encrypted or authenticated.";
            control: Other("string: absolute path, `auto` or `off` (also `\"\"`)"), "auto",
                "A Unix socket for `serval top` and `serval reload`. The engine's user and root may use it. `auto` is `PID.sock` in \
                 `$XDG_RUNTIME_DIR/serval`, or in `/run/serval` if that variable is not set; both commands find it there. If it \
                 cannot be created, the server logs a warning and runs without it.";
            functions: Other("string: path"), "`/var/lib/serval/functions`",
                "The directory of functions, where `serval fn install` puts modules and `function = \"NAME@sha256:…\"` finds them. Relative to \
                 the file's folder. A change needs a restart, as of the next two keys.";
            function_keys: Other("list of strings: `ed25519:` and 64 hexadecimal digits"), "`[]`",
                "Who may sign modules of the directory: the keys that `serval fn keygen` prints. Modules without a signature by one of them are refused.";
            unsigned_functions: engine(Setter::Boolean(|e| &mut e.unsigned_functions)), "",
                "Whether modules of the directory are used that none of these keys has signed. They are pinned by their digests all the same.";
            user_deadline_us: engine(number("us", 1..=DEADLINE_US_MAX, |e| Number::U64(&mut e.user_deadline_us))), "",
                "The longest `deadline_us` of a function that a user other than the operator attaches (`function_users`, `users` of a tenant); a longer one is \
                 shortened to this. For so long one call of it can hold up everything else on its worker. A change applies to functions that are attached later, as of the next key.";
            user_function_percent: engine(number("percent", 1..=100, |e| Number::U32(&mut e.user_function_percent))), "",
                "The part of a worker's time that such functions of one chain may take together for a second. When they take more, the one that took most is suspended, \
                 for a second at first, then for twice as long each time, up to a minute: its messages are treated as `on_failure` says. 100: no limit.";
        },
    ),
    (
        "[limits]",
        keys! { "limits":
            connections: limits(number("connections", 1..=1_000_000, |l| Number::U32(&mut l.connections))), "",
                "Open TCP connections and shared-memory clients of the whole engine; more are refused as `connection_limit`. The \
                 default is lowered if the process may have fewer file descriptors; a configured number is refused then.";
            pipelined: limits(number("requests", 1..=65_536, |l| Number::U32(&mut l.pipelined))), "",
                "Requests in flight for each connection; more wait unread. Raise it for one client that must fill many mqueues: each \
                 needs memory (operations.md, Limits).";
            idle_s: limits(number("s", IDLE_S, |l| Number::Thousands(&mut l.idle_ms))), "", "A connection without a complete message for this long is closed (`idle_timeout`), up to 1.6 s later by a worker that sleeps. \
                 A service may have its own.";
            slow_client_ms: limits(number("ms", 1..=3_600_000, |l| Number::U64(&mut l.slow_client_ms))), "",
                "A connection that takes no byte of a waiting reply for this long is closed (`slow_client`), up to 1.6 s later by a worker that \
                 sleeps.";
            region_mib: limits(number("MiB", 1..=1 << 20, |l| Number::U64(&mut l.region_mib))), "",
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
        "[transfer]",
        keys! { "transfer":
            socket: Other("string: absolute path, or `off` (also `\"\"`)"), "off",
                "A Unix socket where programs on this machine ask for transfers (transfer.md). The engine's user and root may use it, and users of tenants \
                 if the engine runs as root. \
                 `off`: the server moves no files.";
            in_flight: transfers(number("transfers", 1..=4096, |t| Number::U32(&mut t.in_flight))), "",
                "Transfers in flight; more are refused as `too_many`. A tenant gets at most as many as all leave free, times its weight.";
            threads: transfers(number("threads", 1..=64, |t| Number::U32(&mut t.threads))), "",
                "Threads that move bytes at a time; another one waits.";
            memory_mib: transfers(number("MiB", 64..=1 << 20, |t| Number::U32(&mut t.memory_mib))), "",
                "Memory of all transfers in flight; one that needs more than is left is refused as `too_much_memory`. One process gets at most as much as all leave free: half of it alone, a third beside another one. A transfer counts \
                 with what it may hold: 1 MiB, 0.5 MiB for each stage that changes bytes, and what stages need: 8.5 MiB to expand \
                 Zstandard, 4 MiB to compress to it, 0.5 MiB for gzip, 4.3 MiB for a search by lines.";
            per_client: transfers(number("transfers", 1..=4096, |t| Number::U32(&mut t.per_client))), "",
                "Transfers in flight of one process, on all its connections.";
            clients: transfers(number("connections", 1..=4096, |t| Number::U32(&mut t.clients))), "",
                "Connections; more are refused as `too_many_clients`.";
        },
    ),
    (
        "[[tenant]]",
        keys! { "tenant.shop":
            name: Other("string: 1 to 64 letters, digits, `_`, `-`"), "required",
                "The name that services use, and the label in metrics. `default` is the operator's own.";
            weight: tenants(number("parts", 1..=WEIGHT_MAX as u64, |t| Number::U32(&mut t.weight))), "",
                "What the tenant gets of a worker for which others wait too, relative to their weights. What it does not use, others get.";
            messages_per_s: tenants(number("messages/s", 0..=1_000_000_000, |t| Number::U64(&mut t.messages_per_s))), "",
                "Requests a second, of all its services. More datagrams are dropped as `tenant_rate`; over TCP and `shm://` requests wait. 0: no limit.";
            bytes_per_s: tenants(number("bytes/s", 0..=1 << 40, |t| Number::U64(&mut t.bytes_per_s))), "",
                "The same for their payload bytes, and for bytes of kernels' connections in both directions.";
            burst_ms: tenants(number("ms", 1..=60_000, |t| Number::U64(&mut t.burst_ms))), "",
                "After a pause it may send what its rates allow in this time at once.";
            outstanding: tenants(number("messages", 0..=1 << 40, |t| Number::U64(&mut t.outstanding))), "",
                "Messages in flight. More datagrams are dropped as `tenant_outstanding`, other requests wait. Workers \
                 that take messages at the same moment divide what is left. 0: no limit.";
            connections: tenants(number("connections", 0..=1_000_000, |t| Number::U64(&mut t.connections))), "",
                "Open TCP connections at `listen` ports and clients over shared memory; more are refused as `tenant_connections`. 0: only `limits.connections`.";
            mqueues: tenants(number("mqueues", 0..=1 << 32, |t| Number::U64(&mut t.mqueues))), "",
                "Mqueues of all its services. 0: no limit.";
            memory_mib: tenants(number("MiB", 0..=1 << 30, |t| Number::U64(&mut t.memory_mib))), "",
                "Memory of the regions of all its services, of modules (three instances of each) and caches on their paths, for each worker, of dictionaries, and of rings of its users. 0: no limit.";
            users: Other("list of integers"), "`[]`",
                "Users, by number, whose processes may make requests about functions of the tenant's services over the control socket, and no others \
                 ([tenants.md](tenants.md)).";
            netns: Other("string"), "the engine's",
                "The network namespace in which the ports of its services are opened: a name of `ip netns`, or an absolute path such as `/proc/PID/ns/net`. \
                 The engine needs CAP_SYS_ADMIN.";
            user: Other("integer: 0 to 4 294 967 294"), "the engine's",
                "The user, by number, of the isolated processes of its kernels; their group has the same number. The engine has to run as root.";
            namespaces: Other("list of `\"ipc\"`, `\"mount\"`, `\"pid\"`"), "`[]`",
                "What those processes have namespaces of their own for, in a user namespace of their own. With `\"mount\"` they write no file, with `\"pid\"` \
                 no other process exists for them.";
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
                "Threads that share the blocks of a service; a block has its thread for itself while it works on a message. 0: one for each mqueue, up to the \
                 cores of the machine, but up to four on fewer cores, because kernels that wait use none. With `cores` as many as those, at most. \
                 Idle threads sleep.";
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
            kernel: Other("string, or list with one for each accelerator"), "required, unless `upstream` is there",
                "A built-in kernel (below), or the path of a compiled one, relative to the file's folder: `mine.so`, `mine.fatbin`, \
                 `mine.so:NAME` where a library has several. \
                 A program of yours that attaches (`launch = \"external\"`) may give its kernels any name of letters, digits, `_` and `-`.";
            params: Other("table of numbers, true and false, or texts of at most 255 bytes"), "none",
                "The kernel's parameters, at most 32: `params = { microseconds = 20 }`. Built-in kernels have no texts.";
            mqueues: Integer("mqueues, or a list with one for each accelerator"), "",
                "Message queues, each with a block of its own. On a GPU as many as blocks that fit; with `cpu` kernels a few \
                 for each thread.";
            slots: service(number("messages, a power of two", 1..=DEPTH_MAX as u64, |s| Number::U32(&mut s.slots))), "",
                "Length of each ring: requests that an mqueue holds. More slots absorb longer bursts (see `no_credit`), need more memory, and \
                 let requests wait longer.";
            arena_bytes: service(number("bytes", 0..=1 << 40, |s| Number::U64(&mut s.arena_bytes))), "",
                "Room in each ring for payloads where messages may exceed 1.5 KiB. 0: as many of the longest messages as there are slots, \
                 but at most 256 KiB or four messages. `serval check-config` warns if that is little.";
            max_message_bytes: service(number("bytes", MESSAGE_BYTES, |s| Number::U32(&mut s.max_message_bytes))), "",
                "Longest request; longer ones are dropped as `too_long`. Messages of up to 1536 bytes are stored in the slots themselves: set no \
                 more than you need.";
            max_reply_bytes: Integer("bytes"), "`max_message_bytes`",
                "Longest reply; longer ones are dropped as `reply_too_long`. With a `udp://` port at most 65 507. Set less if the \
                 kernel's replies are always shorter than its requests: it saves memory.";
            replies: service(Setter::Word(|s| &mut s.replies)), "", "`none`: the kernel never answers, requests are consumed.";
            ordered: service(Setter::Boolean(|s| &mut s.ordered)), "",
                "Replies on a TCP connection keep the order of its requests. `false`: each is sent as soon as it is ready; the client must match \
                 them with its requests.";
            dispatch: Word, "",
                "How the mqueue of a request is chosen: in turn, the one with the fewest requests in flight, by the client's address, or by bytes of \
                 the message. Use `least-loaded` for kernels or accelerators of different speed, the hashes if a kernel keeps state.";
            key ("`dispatch = \"key-hash\"`" in "service.digits"): Other("string: `OFFSET:LENGTH` in bytes"), "required",
                "The position of the key in a message.";
            request_timeout_ms: service(number("ms", TIMEOUT_MS, |s| Number::U64(&mut s.request_timeout_ms))), "", "A request without a reply for this long is dropped as `request_timeout`.";
            queue_us_max: service(number("us", 0..=1_000_000_000, |s| Number::U64(&mut s.queue_us_max))), "",
                "New requests are shed (`queue_time`) while the oldest has waited for longer. 0: never. Set it if late answers are \
                 useless.";
            idle_s: Integer("s"), "`idle_s` of `[limits]`",
                "A TCP connection of this service without a complete message for this long is closed (`idle_timeout`), and so is the flow of a UDP client \
                 of a proxy. Set more for clients that keep connections open between rare requests. Connections of blocks have `idle_ms` of their `[[service.socket]]`.";
            error_reply_hex: Other("string: 1 to 255 bytes in hexadecimal digits"), "none",
                "The reply to a request over TCP that is refused or dropped, as a payload: the framing delimits it like any reply. Without it such a request \
                 ends its connection. Not with framing `memcached`, which has error replies of its own, nor with `replies = \"none\"`.";
            tenant: Other("string: 1 to 64 letters, digits, `_`, `-`"), "",
                "The owner of the service: a `[[tenant]]`, if the file has some. Kernels of all but `default` run in processes, and never in one with \
                 those of another tenant.";
            rings: service(Setter::Word(|s| &mut s.rings)), "",
                "How requests travel to blocks. `auto`: bursts of one client as bundles, where blocks are busy or kernels fast for the size of the \
                 burst, else one by one, through `doorbell` rings on host cores and `granule` rings on GPUs. The others are for experiments: one \
                 by one through rings of this protocol, or `bundle`: all consecutive requests of one client and one length. Bundles are made of \
                 datagrams, requests over shared memory, and over TCP with framing `fixed:N` or `length`. They need blocks that \
                 take them (those of `process` and `cuda` do), replies, and a service without functions and without dispatch by key. Granule rings carry up \
                 to 1536 bytes.";
            backend: Other("list of tables"), "none", "`[[service.backend]]`, below.";
            upstream: Other("string: `HOST:PORT`"), "none",
                "The service is a proxy: its requests go to the server at this address, from a socket or connection for each client, and what \
                 the server answers goes to the client ([proxy.md](proxy.md)). A host name is resolved once, at start. Instead of `kernel` and \
                 everything that belongs to it.";
            upstream_flows ("`upstream`" in "service.proxy"): service(number("flows", 1..=UPSTREAM_FLOWS_MAX as u64, |s| Number::U32(&mut s.upstream_flows))), "",
                "Most UDP clients that have a socket to the server, on each worker. When all are in use, the one that has been idle for longest \
                 is closed for a new client; if none is idle, one that the server does not answer, or one of a host that has more than a quarter \
                 of them ([proxy.md](proxy.md)). Each is a file descriptor.";
            proxy_protocol ("`upstream`" in "service.proxy"): service(Setter::Boolean(|s| &mut s.proxy_protocol)), "",
                "What goes to the server begins with the addresses of the client, in a header of the PROXY protocol, version 2: each connection and each \
                 datagram. For servers that know it, and for those that `serval fn run` starts.";
            function: Other("list of tables"), "none", "`[[service.function]]`, below.";
            peer_address: Boolean, "",
                "Each request that a kernel gets begins with 32 bytes: the address, port and family of its client ([kernels.md](kernels.md#where-a-request-comes-from)). \
                 They count as bytes of `max_message_bytes`. For kernels of yours.";
            function_users: Other("list of integers"), "`[]`",
                "Users, by number, that may attach functions to this service besides the engine's user and root. They see and change its \
                 messages. With such users the control socket accepts processes of all users and refuses those that no service names; give \
                 `engine.control` a path in a folder that they may enter ([functions.md](functions.md)).";
            file: Other("list of tables"), "none", "`[[service.file]]`, below.";
            socket: Other("list of tables"), "none", "`[[service.socket]]`, below. A service with sockets needs no `listen`.";
            sockets_per_block: service(number("sockets", 1..=SOCKETS_MAX as u64, |s| Number::U32(&mut s.sockets_per_block))), "",
                "Stream sockets of each block: the connections that a kernel may have at a time. Only with `[[service.socket]]`.";
            socket_bytes: service(number("bytes, a power of two", SOCKET_BYTES_MIN..=SOCKET_BYTES_MAX, |s| Number::U64(&mut s.socket_bytes))), "",
                "Ring of each socket and direction. Larger ones help long streams and need more memory: twice this for each socket of each block.";
        },
    ),
    (
        "[[service.backend]]",
        keys! { "service.digits.backend.db":
            name: Other("string: 1 to 64 letters, digits, `_`, `-`"), "required",
                "The name in metrics and log messages. Kernels address backends by their order.";
            connect: Other("string: `tcp://HOST:PORT`, `udp://HOST:PORT`, `transfer`"), "required",
                "Its address. A host name is resolved once, at start. `transfer`: it is no server, and moves bytes between `[[service.file]]` and memory \
                 of the blocks ([transfer.md](transfer.md#from-a-kernel)); with `memory_bytes`, `in_flight` (4) and `timeout_ms` (30 000) of each block, and no other key.";
            memory_bytes ("`connect = \"transfer\"`" in "service.files.backend.disk"): Other("integer, bytes: 4096 to 67 108 864"), "1 048 576",
                "Memory of each block for transfers.";
            framing: Other("as of a service"), "",
                "How answers are delimited on a TCP connection. `memcached` also over UDP: the engine writes and reads its frame header.";
            connections: backend(number("connections of each worker", 1..=64, |b| Number::U32(&mut b.connections))), "", "TCP connections. Raise it if one core of the backend is not enough.";
            timeout_ms: backend(number("ms", TIMEOUT_MS, |b| Number::U64(&mut b.timeout_ms))), "", "If an answer takes longer, the kernel gets `TIMEOUT`.";
            in_flight: backend(number("requests", 1..=65_536, |b| Number::U32(&mut b.in_flight))), "",
                "Requests in flight on each TCP connection, with `match` over UDP in each mqueue; more wait. (UDP without `match`: one \
                 in each mqueue.) With `sockets = \"per-request\"`: sockets of each worker, at most 1024.";
            max_message_bytes: backend(number("bytes", MESSAGE_BYTES, |b| Number::U32(&mut b.max_message_bytes))), "", "Longest request to it and longest answer (`backend_too_long`).";
            match: Other("string: `id:OFFSET:LENGTH` in bytes, LENGTH 1 to 8"), "none",
                "The position of an id that requests and answers share. An answer with another id than its request goes to no request \
                 (`backend_mismatch`). Not with framing `memcached`, whose answers are matched by key.";
            sockets: backend(Setter::Word(|b| &mut b.sockets)), "",
                "`per-request`: each request has a connection or UDP socket of its own, which is closed after the answer or the time-out. \
                 Slower, but no late or duplicate answer can reach another request.";
            function: Other("list of tables"), "none",
                "`[[service.backend.function]]`, with the keys of `[[service.function]]`: functions that see what kernels ask this backend, and what it answers ([functions.md](functions.md#between-kernels-and-backends)).";
        },
    ),
    (
        "[[service.socket]]",
        keys! { "service.streams.socket.peers":
            name: Other("string: 1 to 64 letters, digits, `_`, `-`"), "required",
                "The name in messages. Kernels address sockets by their order.";
            listen: Other("string: `tcp://IP:PORT` or `unix:///PATH`"), "none",
                "Blocks accept the connections that arrive here. Either this or `connect`. At a Unix socket the engine's user and root may connect.";
            connect: Other("string: `tcp://HOST:PORT` or `unix:///PATH`"), "none",
                "Blocks may connect to this address; all others are refused. A host name is resolved once, at start.";
            idle_ms: Other("integer, ms: 0 to 86 400 000"), "0",
                "A connection without a byte in either direction for this long is reset (`idle`). 0: never, since only the kernel knows how long \
                 an answer takes.";
        },
    ),
    (
        "[[service.file]]",
        keys! { "service.files.file.model":
            name: Other("string: 1 to 64 letters, digits, `_`, `-`"), "required",
                "The name in messages. Kernels address files by their order.";
            path: Other("string"), "none",
                "A regular file that transfers of kernels may use, relative to the file's folder. Opened when the service starts. Either this or `connect`.";
            access: Word, "",
                "What they may do with it. `write`: also write; `create`: the same, and it is created if it does not exist.";
            connect: Other("string: `tcp://HOST:PORT` or `unix:///PATH`"), "none",
                "A peer to which each transfer makes a connection of its own.";
            key: Other("string"), "none",
                "A key file: streams to this place can be sealed, and streams from it opened.";
        },
    ),
    (
        "[[service.function]]",
        keys! { "service.digits.function.limits":
            name: Other("string: 1 to 64 letters, digits, `_`, `-`"), "required",
                "The name in metrics, the log and `serval fn`. Unique in its service.";
            function: Other("string"), "required",
                "A built-in function (below), or the path of a WebAssembly module, relative to the file's folder: `mine.wasm`.";
            params: Other("table"), "none", "Values of the function's parameters: `params = { low = 20 }`. Settings are integers; some functions have parameters that are texts, or paths relative to the file's folder.";
            on_failure: function(Setter::Word(|f| &mut f.on_failure)), "",
                "What becomes of messages with which the function traps, panics or exceeds its deadline, and of those that arrive while it is not restarted: \
                 `open`: they pass; `closed`: they are dropped as `function_failed`.";
            deadline_us: function(number("us", 1..=DEADLINE_US_MAX, |f| Number::U64(&mut f.deadline_us))), "",
                "How long a call for one batch of messages may take. A longer one is counted as an overrun. A module is also ended: after \
                 this time, in whole milliseconds and at least one. A built-in function is not.";
            memory_mib ("modules" in "service.digits.function.limits"): function(number("MiB", 1..=MEMORY_MIB_MAX as u64, |f| Number::U32(&mut f.memory_mib))), "",
                "Memory of each instance of a module; each worker has one, and two in reserve. About 1 MiB of it holds the messages of a batch.";
            dictionary: Other("string: 1 to 64 letters, digits, `_`, `-`"), "none",
                "The dictionary of the tenant that the function uses ([functions.md](functions.md#dictionaries)). Functions that name the same one share it.";
            dictionary_kib: function(number("KiB", KIB_MIN as u64..=KIB_MAX as u64, |f| Number::U32(&mut f.dictionary_kib))), "",
                "The size of that. With another size a new one begins.";
        },
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_know_their_table() {
        assert_eq!(section_with("workers"), Some("[engine]"));
        assert_eq!(section_with("connect"), Some("[[service.backend]]"));
        assert_eq!(section_with("nothing"), None);
    }
}
