//! The metrics endpoint over raw sockets: what well-behaved and other clients get.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::metrics::{
    FunctionMetrics, FunctionSample, Metrics, RuntimeMetrics, ServiceMetrics, TenantMetrics,
};
use engine::tenants::Tenants;
use onpath::dictionary::Dictionary;
use server::Stall;
use server::exporter::page::Page;
use server::exporter::{CONNECTIONS_MAX, Exporter, Health, REQUEST_BYTES_MAX};
use transfer::{Command, Place};

const PATIENCE: Duration = Duration::from_secs(60);

fn start() -> (Exporter, Metrics, Arc<Health>) {
    let metrics = Metrics::new(1, ["digits".to_owned()]);
    let health = Arc::new(Health::default());
    let address = ([127, 0, 0, 1], 0).into();
    let exporter = Exporter::start(address, metrics.clone(), health.clone()).unwrap();
    (exporter, metrics, health)
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Everything until the endpoint closes the connection.
fn rest(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("the connection ends in time");
    String::from_utf8(answer).unwrap()
}

fn ask(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = connect(address);
    stream.write_all(request).unwrap();
    rest(stream)
}

fn get(address: SocketAddr, path: &str) -> String {
    ask(address, format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or(answer)
}

#[test]
fn counters_are_served_as_they_are_now() {
    let (exporter, metrics, _) = start();
    let line = |n: u64| format!("\nserval_requests_received_total{{service=\"digits\"}} {n}\n");
    let before = get(exporter.address(), "/metrics");
    assert_eq!(status(&before), "200");
    assert!(
        before.contains("Content-Type: application/openmetrics-text; version=1.0.0"),
        "{before}"
    );
    assert!(before.contains(&line(0)), "{before}");
    metrics.of_worker(0).1[0].0.received.add(41);
    assert!(get(exporter.address(), "/metrics?name[]=x").contains(&line(41)));
    let (head, body) = before.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    assert!(head.ends_with("Connection: close"), "{head}");
}

/// What is exported only once it has happened.
fn let_everything_happen(metrics: &Metrics, health: &Health) {
    let transfers = transfer::Engine::start(transfer::Limits::default()).unwrap();
    let this = File::open(std::env::current_exe().unwrap()).unwrap();
    let null = File::options().write(true).open("/dev/null").unwrap();
    let (source, sink) = (Place::File(this.into(), 0), Place::File(null.into(), 0));
    let command = Command::new(source, None, Vec::new(), sink);
    transfers.submit_for(&transfers.tenant("red"), command, drop).unwrap();
    health.watch_transfers(transfers.counters());
    health.watch_functions(Arc::default());
    let lives = RuntimeMetrics::new("digits", "gpu0");
    lives.end(1, "lost");
    lives.begin(2);
    lives.set_round_trip_ns(50_000);
    let service = ServiceMetrics::new("digits".to_owned(), 1);
    service.of_worker(0).0.sockets_opened.add(1);
    metrics.set_running(
        [Arc::new(service)].into(),
        [Arc::new(lives)].into(),
        ["digits".to_owned()].into(),
    );
    let stall = Stall {
        worker: 0,
        kernel: "lenet".into(),
        service: "digits".into(),
        accelerator: "acc0".into(),
        ..Stall::default()
    };
    health.watch(Arc::new(vec![stall].into()));
    let function = FunctionMetrics::new("digits".into(), "limits".into(), 1);
    function.set_sample(FunctionSample {
        registers: vec![("count".into(), 7), ("high".into(), u64::MAX)],
        state_bytes: 4096,
    });
    // A function would have it; here it stays until the process ends.
    let dictionary = Box::leak(Box::new(Arc::new(Dictionary::new(16))));
    function.set_dictionary(Some(dictionary));
    metrics.set_functions([Arc::new(function)].into());
    let state = Tenants::default().named("red");
    metrics.set_tenants([TenantMetrics { state, services: Vec::new() }].into());
}

#[test]
fn the_dashboard_shows_only_what_is_exported() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/grafana.json");
    let board: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let (exporter, metrics, health) = start();
    let_everything_happen(&metrics, &health);
    let answer = get(exporter.address(), "/metrics");
    let page = Page::parse(answer.split_once("\r\n\r\n").unwrap().1);
    let exported: BTreeSet<&str> = page.names().collect();
    let (mut shown, mut ids) = (BTreeSet::new(), BTreeSet::new());
    for panel in board["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "two panels have one id: {panel}");
        for target in panel["targets"].as_array().unwrap() {
            let words = target["expr"].as_str().unwrap();
            let words = words.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            shown.extend(words.filter(|w| w.starts_with("serval_")).map(str::to_owned));
        }
    }
    for name in &shown {
        assert!(exported.contains(name.as_str()), "{name} is not exported");
    }
    for name in [
        "serval_ready",
        "serval_accelerator_up",
        "serval_accelerator_restarts_total",
        "serval_service_paused",
        "serval_log_lines_dropped_total",
        "serval_worker_stalled",
    ] {
        assert!(shown.contains(name), "no panel shows {name}");
    }
}

/// The table of docs/operations.md, from what is exported: name, labels, meaning.
#[test]
fn the_page_of_all_metrics_matches_the_exporter() {
    let (exporter, metrics, health) = start();
    let_everything_happen(&metrics, &health);
    let answer = get(exporter.address(), "/metrics");
    let mut table = String::from("| metric | labels | meaning |\n|---|---|---|\n");
    for line in answer.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
        let (family, help) = line.split_once(' ').unwrap();
        let kind = format!("# TYPE {family} ");
        let kind = answer.lines().find_map(|line| line.strip_prefix(&kind)).unwrap();
        let name = if kind == "counter" { format!("{family}_total") } else { family.to_owned() };
        let sample = answer.lines().find(|l| !l.starts_with('#') && l.starts_with(&name));
        let sample = sample.unwrap_or_else(|| panic!("{name} has no sample"));
        let labels = sample.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
        let labels = labels.split("\",").filter_map(|label| label.split_once('='));
        let labels: Vec<&str> = labels.map(|(label, _)| label).filter(|l| *l != "le").collect();
        let kind = if kind == "histogram" { " (histogram)" } else { "" };
        table += &format!("| `{name}`{kind} | {} | {help} |\n", labels.join(", "));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once("<!-- metrics -->\n").unwrap();
    let (_, after) = rest.split_once("<!-- end -->").unwrap();
    let expected = format!("{before}<!-- metrics -->\n\n{table}\n<!-- end -->{after}");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(path, &expected).unwrap();
    } else {
        assert!(page == expected, "docs/operations.md: run this test with UPDATE_GOLDEN=1");
    }
}

#[test]
fn health_follows_the_server() {
    let (exporter, _, health) = start();
    let ready = || status(&get(exporter.address(), "/readyz")).to_owned();
    assert_eq!(status(&get(exporter.address(), "/healthz")), "200");
    assert_eq!(ready(), "503");
    health.set_ready();
    assert_eq!(ready(), "200");
    health.set_draining();
    assert_eq!(ready(), "503");
    assert_eq!(status(&get(exporter.address(), "/healthz")), "200");
}

#[test]
fn invalid_requests_are_answered_with_the_reason() {
    let (exporter, _, _) = start();
    let at = exporter.address();
    assert_eq!(status(&get(at, "/")), "404");
    assert_eq!(status(&get(at, "/metrics/../etc/passwd")), "404");
    let post = ask(at, b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!(status(&post), "405");
    assert!(post.contains("Allow: GET, HEAD\r\n"), "{post}");
    assert_eq!(status(&ask(at, b"\x16\x03\x01\x02\x00\x01\x00")), "400");
    assert_eq!(status(&ask(at, b"GET /metrics HTTP/3.0\r\n\r\n")), "400");
    assert_eq!(status(&ask(at, b"get\x00/metrics\r\n\r\n")), "400");
    let head = ask(at, b"HEAD /healthz HTTP/1.0\r\n\r\n");
    assert!(head.contains("Content-Length: 3\r\n") && head.ends_with("\r\n\r\n"), "{head}");
}

#[test]
fn a_request_that_is_too_long_is_refused_and_the_reason_arrives() {
    let (exporter, _, _) = start();
    let mut long = b"GET /metrics HTTP/1.1\r\n".to_vec();
    while long.len() < 8 * REQUEST_BYTES_MAX {
        long.extend_from_slice(b"X-Filler: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n");
    }
    assert_eq!(status(&ask(exporter.address(), &long)), "431");
    let one_line = [b"GET /".as_slice(), &[b'a'; 4 * REQUEST_BYTES_MAX]].concat();
    assert_eq!(status(&ask(exporter.address(), &one_line)), "431");
}

#[test]
fn a_request_may_come_in_pieces() {
    let (exporter, _, _) = start();
    let mut stream = connect(exporter.address());
    stream.set_nodelay(true).unwrap();
    for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" {
        stream.write_all(&[*byte]).unwrap();
    }
    assert_eq!(status(&rest(stream)), "200");
}

#[test]
fn a_client_that_closes_its_side_after_asking_is_answered() {
    let (exporter, _, _) = start();
    let mut stream = connect(exporter.address());
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(rest(stream).ends_with("# EOF\n"));
}

#[test]
fn slow_clients_cannot_keep_others_out() {
    let (exporter, _, _) = start();
    // More connections than the limit, whose requests never end.
    let mut slow: Vec<TcpStream> = Vec::new();
    for _ in 0..2 * CONNECTIONS_MAX {
        let mut stream = connect(exporter.address());
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nX-Slow: ");
        slow.push(stream);
        assert_eq!(status(&get(exporter.address(), "/healthz")), "200");
    }
    // The oldest had to make room; the youngest are still connected.
    let mut byte = [0];
    assert!(!matches!(slow[0].read(&mut byte), Ok(1..)));
    let youngest = slow.last_mut().unwrap();
    youngest.write_all(b"a\r\n\r\n").unwrap();
    assert_eq!(status(&rest(slow.pop().unwrap())), "200");
}

#[test]
fn a_request_that_never_ends_is_given_up() {
    let (exporter, _, _) = start();
    let mut stream = connect(exporter.address());
    stream.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let began = Instant::now();
    let mut byte = [0];
    // The connection ends although this side neither sends nor closes.
    assert!(!matches!(stream.read(&mut byte), Ok(1..)));
    assert!(began.elapsed() < PATIENCE);
}

#[test]
fn many_clients_at_once_are_all_answered() {
    let (exporter, _, _) = start();
    let address = exporter.address();
    let clients: Vec<_> = (0..16)
        .map(|_| {
            std::thread::spawn(move || {
                for _ in 0..20 {
                    assert!(get(address, "/metrics").ends_with("# EOF\n"));
                }
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
}

#[test]
fn clients_that_leave_do_no_harm() {
    let (exporter, _, _) = start();
    for cut in 0..30 {
        let mut stream = connect(exporter.address());
        let request = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        stream.write_all(&request[..cut]).unwrap();
    }
    assert_eq!(status(&get(exporter.address(), "/healthz")), "200");
}

#[test]
fn an_address_that_is_taken_is_named_and_a_dropped_exporter_frees_it() {
    let (exporter, metrics, health) = start();
    let address = exporter.address();
    let again = || Exporter::start(address, metrics.clone(), health.clone());
    let error = again().err().expect("the address is taken").to_string();
    assert!(error.contains("engine.metrics") && error.contains(&address.to_string()), "{error}");
    drop(exporter);
    assert_eq!(status(&get(again().unwrap().address(), "/healthz")), "200");
}
