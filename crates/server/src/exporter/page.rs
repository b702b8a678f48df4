//! A page of metrics: its address and its content.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

/// Time limit of each step.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum size of a page that is read.
const PAGE_BYTES_MAX: u64 = 16 << 20;

/// Why a page could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// Not the address of an endpoint.
    #[error(
        "{0:?} is not an endpoint: write http://HOST:PORT/metrics, HOST:PORT or a configuration file"
    )]
    Address(String),
    /// No answer, or not with HTTP.
    #[error(
        "{url} does not answer: {source}; is the server running with engine.metrics at this address?"
    )]
    Unreachable {
        /// The endpoint.
        url: String,
        /// The host kernel's error.
        source: std::io::Error,
    },
    /// The answer is not a page of this server's metrics.
    #[error("{url} has no metrics of Serval: it answers {answer:?}")]
    Other {
        /// The endpoint.
        url: String,
        /// The first line of the answer.
        answer: String,
    },
}

/// The address of a metrics page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    path: String,
}

impl Endpoint {
    /// From `http://HOST:PORT[/PATH]` or `HOST:PORT`.
    pub fn parse(text: &str) -> Result<Self, PageError> {
        let wrong = || PageError::Address(text.to_owned());
        let rest = text.strip_prefix("http://").unwrap_or(text);
        let (host, path) = match rest.find('/') {
            Some(at) if at + 1 < rest.len() => rest.split_at(at),
            Some(at) => (&rest[..at], "/metrics"),
            None => (rest, "/metrics"),
        };
        let (name, port) = host.rsplit_once(':').ok_or_else(wrong)?;
        let printable = rest.bytes().all(|byte| byte.is_ascii_graphic());
        if name.is_empty() || port.parse::<u16>().is_err() || !printable {
            return Err(wrong());
        }
        Ok(Self { host: host.to_owned(), path: path.to_owned() })
    }

    /// The whole address.
    pub fn url(&self) -> String {
        format!("http://{}{}", self.host, self.path)
    }

    /// Sends one request.
    pub fn fetch(&self) -> Result<Page, PageError> {
        let answer =
            self.ask().map_err(|source| PageError::Unreachable { url: self.url(), source })?;
        let text = String::from_utf8_lossy(&answer);
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        let ok = text.starts_with("HTTP/1.1 200") || text.starts_with("HTTP/1.0 200");
        if !ok || !body.contains("serval_ready") {
            let answer = text.lines().next().unwrap_or_default().chars().take(80).collect();
            return Err(PageError::Other { url: self.url(), answer });
        }
        Ok(Page::parse(body))
    }

    fn ask(&self) -> std::io::Result<Vec<u8>> {
        let unresolved = || std::io::Error::other("the name has no address");
        let address = self.host.to_socket_addrs()?.next().ok_or_else(unresolved)?;
        let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let Self { host, path } = self;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.take(PAGE_BYTES_MAX).read_to_end(&mut answer)?;
        Ok(answer)
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Point {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

/// The values on a page of metrics (OpenMetrics text).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    points: Vec<Point>,
}

impl Page {
    /// Parses the known syntax; other lines are skipped.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self { points: lines.filter_map(point).collect() }
    }

    /// The value of a metric whose labels include these.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let has = |point: &&Point| {
            let of = |(label, value): &(&str, &str)| {
                point.labels.iter().any(|(l, v)| l == label && v == value)
            };
            point.name == name && labels.iter().all(of)
        };
        self.points.iter().find(has).map(|point| point.value)
    }

    /// The values of a label of a metric, without duplicates, in the order of the page.
    pub fn labels<'a>(&'a self, name: &str, label: &str) -> impl Iterator<Item = &'a str> {
        let mut found: Vec<&str> = Vec::new();
        for point in self.points.iter().filter(|point| point.name == name) {
            let value = point.labels.iter().find(|(l, _)| l == label).map(|(_, v)| v.as_str());
            found.extend(value.filter(|value| !found.contains(value)));
        }
        found.into_iter()
    }

    /// The names of all metrics, with duplicates.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.points.iter().map(|point| point.name.as_str())
    }
}

/// `name{label="value",...} value`; values have no escapes but `\"`, `\\` and `\n`.
fn point(line: &str) -> Option<Point> {
    let (name, rest) = line.split_at(line.find(['{', ' '])?);
    let mut labels = Vec::new();
    let mut rest = rest;
    if let Some(mut inside) = rest.strip_prefix('{') {
        while !inside.starts_with('}') {
            let (label, after) = inside.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.push((label.to_owned(), value));
            inside = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &inside[1..];
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Point { name: name.to_owned(), labels, value })
}

/// Text up to its closing quote, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    loop {
        match characters.next()? {
            (at, '"') => return Some((value, &text[at + 1..])),
            (_, '\\') => value.push(match characters.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            (_, other) => value.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_have_three_notations() {
        for text in ["http://127.0.0.1:9464/metrics", "127.0.0.1:9464", "http://127.0.0.1:9464/"] {
            assert_eq!(Endpoint::parse(text).unwrap().url(), "http://127.0.0.1:9464/metrics");
        }
        assert_eq!(Endpoint::parse("[::1]:1/x").unwrap().url(), "http://[::1]:1/x");
        for wrong in ["", "localhost", "https://a:1", ":1", "a:b", "a:1/ b", "a:1/\r\nX: y"] {
            assert!(Endpoint::parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_page_is_read_line_by_line() {
        let page = Page::parse(
            "# HELP a b\na{x=\"1\",y=\"q\\\"}\"} 2.5\na{x=\"2\"} 1e3\nplain 7\nbad{x=\"1} 3\nlast 1 99\n\nnone\n",
        );
        assert_eq!(page.value("a", &[("y", "q\"}")]), Some(2.5));
        assert_eq!(page.value("a", &[("x", "2")]), Some(1000.0));
        assert_eq!(page.value("a", &[("x", "3")]), None);
        assert_eq!((page.value("plain", &[]), page.value("last", &[])), (Some(7.0), Some(1.0)));
        assert_eq!(page.labels("a", "x").collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(page.names().count(), 4);
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "[a-c{}=\",\\\\ 0-9.\n#é]{0,200}") {
            let _ = Page::parse(&text);
            let _ = Endpoint::parse(&text);
        }
    }
}
