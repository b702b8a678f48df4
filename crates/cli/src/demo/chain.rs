//! `serval demo chain`: a request meets the share of its tenant, a function, a kernel, and a function between the kernel and its database.
//!
//! Clients send CoAP requests with a token and a face. `coap-auth` refuses forged ones and gives the kernel the payload of the others. The kernel
//! asks memcached for the stored picture, and `memcached-cache` answers most of that. The books of all of them must agree. The service belongs to a
//! tenant, whose requests wait over TCP while it is over its rate.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bench::client::workload::{Faces, Pictures, coap};
use bench::client::{self, Load, Outcome, Stream, Workload};
use bench::memcached::Memcached;
use bench::units::per_second;
use engine::tenants::TenantUse;
use engine::topology::{Backend, Service, Tenant};
use onpath::{Direction, Spec, Verdict};
use serde_json::{Value as Json, json};
use server::{Caller, FunctionError, Server, TracedMessage};
use wire::framing::Framing;
use wire::nic::Transport;

use super::coap::KeyFile;
use super::{DemoError, Report, Stage, accounts};
use crate::screen::{Table, Tone};

const MQUEUES: u32 = 8;
const WINDOW: usize = 16;
const REQUESTS: u64 = 100_000;
const QUICK_REQUESTS: u64 = 400;
/// One of each four requests is forged.
const FORGED: u64 = 4;
/// Token, map and header around a picture, at most.
const AROUND_BYTES: usize = 256;
/// A server that is this late has failed.
const PATIENCE: Duration = Duration::from_secs(20);
/// The tenant of the service.
const TENANT: &str = "faces";
/// Requests a second of its share in the last part, and how many are asked then.
const SHARE: u64 = 100;
const SHARED: u64 = 40;
/// The chains, by name.
const CLIENTS: &str = "faces";
const BACKEND: &str = "faces/db";

/// Faces with tokens, some of them forged. The first verdict is spoiled if that is asked for.
struct Guarded<'a> {
    faces: Faces<'a>,
    face: Vec<u8>,
    forged: u64,
    spoil: bool,
}

impl Workload for Guarded<'_> {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        self.face.clear();
        self.faces.request(index / FORGED, &mut self.face);
        coap::write_request(index, index % FORGED == 0, &self.face, into);
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        if index % FORGED == 0 {
            self.forged += 1;
            return coap::answers(index, coap::UNAUTHORIZED, &[], reply);
        }
        let mut reply = reply.to_vec();
        if std::mem::take(&mut self.spoil) {
            reply.iter_mut().take(1).for_each(|byte| *byte ^= 0x80);
        }
        self.faces.accepts(index / FORGED, &reply)
    }
}

fn failed(error: FunctionError) -> DemoError {
    DemoError::Wrong(error.to_string())
}

/// A function's registers.
struct Registers(Vec<(String, u64)>);

impl Registers {
    fn of(server: &Server, chain: &str, name: &str) -> Result<Self, DemoError> {
        Ok(Self(server.functions.read(&server.engine, chain, name).map_err(failed)?))
    }

    fn sum(&self, names: &[&str]) -> u64 {
        let named = self.0.iter().filter(|(name, _)| names.contains(&&**name));
        named.map(|(_, value)| value).sum()
    }

    /// Questions that the cache did not answer.
    fn forwarded(&self) -> u64 {
        self.sum(&["misses", "invalid", "sampled", "ordered", "unasked"])
    }

    fn hits(&self) -> u64 {
        self.sum(&["hits"])
    }
}

/// One check of the books.
struct Balance {
    what: &'static str,
    left: u64,
    right: u64,
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let pictures = Pictures::built_in();
    let memcached = Memcached::start()?;
    memcached.store(pictures.people.iter().map(|person| (person.database_key(), person.stored)))?;
    let keys = KeyFile::write()?;
    let service = service(stage, &memcached, &keys);
    let (mut server, udp, tcp) = stage.serve(service)?;
    let faces = Faces::new(&pictures.people);
    let asking = Guarded { faces, face: Vec::new(), forged: 0, spoil: stage.options.corrupt };
    let mut demo = Demo { stage, udp, asking, checked: 0, wrong: 0, lost: 0, refused: 0 };

    let bar = stage.progress("asking for faces", 4);
    let deadline = Instant::now() + PATIENCE;
    while Registers::of(&server, BACKEND, "hot")?.hits() == 0 {
        demo.ask(WINDOW, Some(4 * FORGED))?;
        if Instant::now() > deadline {
            return Err(DemoError::Wrong("the cache does not answer".to_owned()));
        }
    }
    bar.inc(1);
    let many = demo.ask(WINDOW, None)?;
    bar.inc(1);
    for chain in [CLIENTS, BACKEND] {
        server.functions.begin_trace(&server.engine, Caller::engine(), chain, 8).map_err(failed)?;
    }
    let share = Tenant { weight: 2, messages_per_s: SHARE, burst_ms: 50, ..Tenant::new(TENANT) };
    let set = server.put_tenant(Caller::engine(), share, false);
    set.map_err(|error| DemoError::Wrong(error.to_string()))?;
    let before = used(&server);
    demo.ask(1, Some(FORGED))?;
    let charged = used(&server).charged - before.charged;
    let trace = traced(&mut server)?;
    bar.inc(1);
    demo.ask_beyond_the_share(tcp)?;
    let share = Share { charged, limited: used(&server).limited };
    bar.finish_and_clear();

    let balances = balances(&server, &demo)?;
    let cache = Registers::of(&server, BACKEND, "hot")?;
    let accounts = accounts(&server);
    if !server.shutdown().is_clean() {
        return Err(DemoError::Wrong("the server did not end cleanly".to_owned()));
    }
    Ok(report(stage, &demo, &many, (&trace, &share, &balances), &cache, &accounts))
}

/// What the tenant has used.
fn used(server: &Server) -> TenantUse {
    let tenants = server::tenants::list(&server.engine, Caller::engine());
    let own = tenants.iter().find(|of| of.tenant.name == TENANT);
    own.map(|of| of.used).unwrap_or_default()
}

/// What its share has meant for the tenant.
struct Share {
    /// For the requests that were traced, in bytes.
    charged: u64,
    /// Turns of workers in which it had to wait.
    limited: u64,
}

fn service(stage: &Stage<'_>, memcached: &Memcached, keys: &KeyFile) -> Service {
    let mut service = Service::new("faces", Vec::new(), "faces");
    service.tenant = TENANT.into();
    service.max_message_bytes = (Faces::REQUEST_BYTES + AROUND_BYTES) as u32;
    service.max_reply_bytes = service.max_message_bytes;
    service.framing = Framing::LengthU16;
    service.mqueues = stage.options.mqueues.unwrap_or(MQUEUES);
    service.functions = vec![keys.function(&[("refuse", "answer"), ("forward", "payload")])];
    let mut backend = Backend::new("db", Transport::Tcp, memcached.address(), Framing::Memcached);
    // The machine may be busy; a demo needs no tight limits.
    backend.timeout_ms = 10_000;
    let mut cache = Spec::new("hot", "memcached-cache");
    cache.deadline_us = onpath::spec::DEADLINE_US_MAX;
    cache.params = vec![("grace_ms".into(), 20.into())];
    backend.functions = vec![cache];
    service.backends = vec![backend];
    service.request_timeout_ms = 20_000;
    service
}

struct Demo<'a> {
    stage: &'a Stage<'a>,
    udp: SocketAddr,
    asking: Guarded<'a>,
    checked: u64,
    wrong: u64,
    lost: u64,
    refused: u64,
}

impl Demo<'_> {
    /// Asks for this number of requests, or for that of a measurement.
    fn ask(&mut self, window: usize, requests: Option<u64>) -> Result<Outcome, DemoError> {
        let many = if self.stage.options.quick { QUICK_REQUESTS } else { REQUESTS };
        let load = Load {
            window,
            requests: requests.unwrap_or(many),
            timeout: PATIENCE,
            cancel: self.stage.options.cancel.clone(),
            ..Load::default()
        };
        self.asking.forged = 0;
        let outcome = client::udp(self.udp, &load, &mut self.asking)?;
        self.note(outcome)
    }

    /// Asks over TCP, for more than the share of the tenant.
    fn ask_beyond_the_share(&mut self, tcp: SocketAddr) -> Result<Outcome, DemoError> {
        let (framing, reply_framing) = (Framing::LengthU16, Framing::LengthU16);
        let stream = Stream { connections: 1, framing, reply_framing };
        let cancel = self.stage.options.cancel.clone();
        let load =
            Load { window: WINDOW, requests: SHARED, timeout: PATIENCE, cancel, ..Load::default() };
        self.asking.forged = 0;
        let outcome = client::tcp(tcp, &stream, &load, &mut self.asking)?;
        self.note(outcome)
    }

    fn note(&mut self, outcome: Outcome) -> Result<Outcome, DemoError> {
        self.stage.check_interrupted()?;
        self.refused += self.asking.forged;
        self.checked += outcome.replied + outcome.wrong;
        self.wrong += outcome.wrong + outcome.duplicated;
        self.lost += outcome.lost;
        Ok(outcome)
    }
}

/// What the messages of both chains have met, in the order of time.
fn traced(server: &mut Server) -> Result<Vec<(&'static str, TracedMessage)>, DemoError> {
    let mut all = Vec::new();
    for chain in [CLIENTS, BACKEND] {
        let found = server
            .functions
            .end_trace(&server.engine, Caller::engine(), chain, true)
            .map_err(failed)?;
        all.extend(found.unwrap_or_default().into_iter().map(|message| (chain, message)));
    }
    all.sort_by_key(|(_, message)| message.traced.at_ns);
    Ok(all)
}

/// What has to be the same.
fn balances(server: &Server, demo: &Demo<'_>) -> Result<Vec<Balance>, DemoError> {
    let auth = Registers::of(server, CLIENTS, "auth")?;
    let cache = Registers::of(server, BACKEND, "hot")?;
    let counted = server.metrics().service(0);
    let (passed, refused) = (auth.sum(&["passed"]), auth.sum(&["bad_signature"]));
    let asked = demo.checked + demo.lost;
    let balance = |what, left, right| Balance { what, left, right };
    Ok(vec![
        balance("sent by clients = received", asked, counted.received),
        balance("received = passed + refused", counted.received, passed + refused),
        balance("refused = answered with 4.01", refused, demo.refused),
        balance("received = replied", counted.received, counted.replied),
        balance("passed = questions to the database", passed, cache.hits() + cache.forwarded()),
        balance("misses of the cache = sent to memcached", cache.forwarded(), counted.backend_sent),
        balance("questions = answers to kernels", passed, counted.backend_answered),
    ])
}

fn verdict(verdict: Verdict) -> String {
    match verdict {
        Verdict::Pass => "passes".to_owned(),
        Verdict::Rewrite => "rewrites".to_owned(),
        Verdict::Steer(to) => format!("steers to {to}"),
        Verdict::Reply => "answers".to_owned(),
        Verdict::Deliver => "delivers".to_owned(),
        Verdict::Drop(reason) => format!("drops: {}", reason.name()),
    }
}

/// The trace as a table and as JSON.
fn show(stage: &Stage<'_>, trace: &[(&str, TracedMessage)], share: &Share) -> (String, Vec<Json>) {
    let mut table =
        Table::new(&[">at", "on the path of", "message", ">bytes", "function", ">took"]);
    let begin_ns = trace.first().map_or(0, |(_, message)| message.traced.at_ns);
    // Before any function sees them.
    let tenant = format!("tenant {TENANT}");
    let did = format!("charges {} bytes for {FORGED} requests", share.charged);
    let first = ["0.0 us", CLIENTS, "request", ""].map(str::to_owned);
    table.row(first.into_iter().chain([format!("{tenant} {did}"), String::new()]));
    let mut rows = vec![json!({
        "at_us": 0.0, "chain": CLIENTS, "message": "request", "bytes": share.charged,
        "function": tenant, "verdict": "charges", "took_us": 0.0,
    })];
    for (chain, message) in trace {
        let traced = &message.traced;
        let at_us = (traced.at_ns - begin_ns) as f64 / 1000.0;
        let direction = match traced.direction {
            Direction::Requests => "request",
            Direction::Replies => "reply",
        };
        for (step, function) in traced.steps.iter().zip(&message.functions) {
            let (did, took_us) = (verdict(step.verdict), step.took_ns as f64 / 1000.0);
            table.row([
                format!("{at_us:.1} us"),
                (*chain).to_owned(),
                direction.to_owned(),
                traced.bytes.to_string(),
                format!("{function} {did}"),
                format!("{took_us:.1} us"),
            ]);
            rows.push(json!({
                "at_us": at_us, "chain": chain, "message": direction, "bytes": traced.bytes,
                "function": function, "verdict": did, "took_us": took_us,
            }));
        }
    }
    (table.render(&stage.options.screen), rows)
}

fn report(
    stage: &Stage<'_>,
    demo: &Demo<'_>,
    many: &Outcome,
    (trace, share, balances): (&[(&str, TracedMessage)], &Share, &[Balance]),
    cache: &Registers,
    accounts: &str,
) -> Report {
    let screen = &stage.options.screen;
    let Demo { checked, wrong, lost, refused, .. } = demo;
    let (table, steps) = show(stage, trace, share);
    let hits = 100.0 * cache.hits() as f64 / (cache.hits() + cache.forwarded()).max(1) as f64;
    let mut text = format!(
        "{}\n\n  {FORGED} requests, one of them forged:\n\n{table}\n",
        screen.paint(Tone::Bold, "Tenant's share, authentication, faces kernel, cache, memcached"),
    );
    let _ = writeln!(
        text,
        "  {} with {WINDOW} in flight. The cache answered {hits:.0} % of the kernel's questions.\n  {checked} answers were \
         checked, {wrong} were wrong; {refused} requests were refused. {}.\n",
        per_second(many.rate()),
        stage.cores()
    );
    let _ = writeln!(
        text,
        "  Over TCP, {SHARED} requests waited for the share of {SHARE} a second in {} turns of the worker; none was lost.\n",
        share.limited
    );
    let mut open = Vec::new();
    for Balance { what, left, right } in balances {
        let _ = writeln!(text, "  {what}: {left} = {right}");
        if left != right {
            open.push(format!("{what}: {left} and {right}"));
        }
    }
    let _ = writeln!(text, "\n  {accounts}");
    let books: Vec<Json> = balances
        .iter()
        .map(|Balance { what, left, right }| json!({ "what": what, "left": left, "right": right }))
        .collect();
    let json = json!({
        "demo": "chain", "checked": checked, "wrong": wrong, "lost": lost, "refused": refused,
        "rate": many.rate(), "hits_percent": hits, "trace": steps, "books": books,
        "share": { "charged": share.charged, "limited": share.limited },
    });
    let failure = if *wrong > 0 {
        Some(format!("{wrong} of the {checked} answers that were checked are wrong"))
    } else if *lost > 0 {
        Some(format!("{lost} requests had no answer"))
    } else if share.charged == 0 || share.limited == 0 {
        Some("the share of the tenant did not hold".to_owned())
    } else if !open.is_empty() {
        Some(format!("the books are not closed: {}", open.join("; ")))
    } else {
        None
    };
    Report { text, json, chart: None, failure }
}
