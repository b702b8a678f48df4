//! Proxies that pass byte streams on, with unmodified peers.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use common::faces::Memcached;
use common::*;
use engine::topology::{Service, Topology};
use onpath::Spec;
use server::Server;

fn serve(upstream: SocketAddr, workers: usize, functions: &[&str]) -> Server {
    let functions = functions.iter().map(|name| Spec::new(name, name)).collect();
    let service = Service { functions, ..Service::proxy("relay", vec![tcp()], upstream) };
    let mut topology = Topology { accelerators: Vec::new(), ..topology(vec![service]) };
    topology.engine.workers = workers;
    start(topology)
}

/// A server that sends back what it gets, until its client ends.
fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            std::thread::spawn(move || {
                let mut back = stream.try_clone().unwrap();
                let _ = std::io::copy(&mut stream, &mut back);
                let _ = back.shutdown(Shutdown::Write);
            });
        }
    });
    address
}

/// Bytes in which no part is like another.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(|_| next()).take(len).collect()
}

/// Sends all, ends its side, and returns what comes back up to the end.
fn send_all(to: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut writer = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            writer.write_all(bytes).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut back = Vec::new();
        stream.read_to_end(&mut back).expect("it ends in time");
        back
    })
}

#[test]
fn every_byte_comes_back_through_functions_and_without() {
    let upstream = echo_server();
    for functions in [&[][..], &["passthrough"], &["hyperloglog", "count-min"]] {
        let server = serve(upstream, 2, functions);
        let to = address(&server, 0);
        std::thread::scope(|scope| {
            for client in 0..6 {
                scope.spawn(move || {
                    let bytes = noise(3_000_000 + 77_777 * client, 99 + client as u64);
                    assert!(send_all(to, &bytes) == bytes, "client {client} gets its own bytes");
                });
            }
        });
        eventually("all have ended", || server.metrics().service(0).connections_closed == 6);
        assert_accounts(&server);
        assert!(server.shutdown().is_clean());
    }
}

/// A server that closes, and one that speaks first.
#[test]
fn memcached_and_a_server_that_speaks_first_notice_nothing() {
    let memcached = Memcached::start();
    let server = serve(([127, 0, 0, 1], memcached.port).into(), 1, &["passthrough"]);
    let script = b"set k 0 0 3\r\nabc\r\nget k\r\nincr k 1 noreply\r\nmg k v\r\nquit\r\n";
    let direct = send_all(([127, 0, 0, 1], memcached.port).into(), script);
    assert!(direct.starts_with(b"STORED\r\nVALUE k 0 3\r\nabc\r\n"));
    assert_eq!(send_all(address(&server, 0), script), direct);
    assert!(server.shutdown().is_clean());

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = serve(listener.local_addr().unwrap(), 1, &[]);
    let mut client = TcpStream::connect(address(&server, 0)).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut upstream, _) = listener.accept().unwrap();
    upstream.write_all(b"220 ready").unwrap();
    let mut greeting = [0; 9];
    client.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"220 ready");
    // Killed: the client gets a reset and not an end.
    let rest = client.try_clone().unwrap();
    client.write_all(b"unread").unwrap();
    upstream.set_nonblocking(false).unwrap();
    upstream.peek(&mut [0; 6]).unwrap();
    drop(upstream);
    let end = (&rest).read(&mut [0; 16]);
    assert_eq!(end.map_err(|error| error.kind()), Err(std::io::ErrorKind::ConnectionReset));
    assert!(server.shutdown().is_clean());
}

/// An unmodified web server with one long file.
struct Nginx {
    process: Child,
    address: SocketAddr,
    folder: std::path::PathBuf,
}

impl Nginx {
    fn start(file: &[u8]) -> Self {
        // The port was free a moment ago: if another program took it meanwhile, the next one is tried.
        (0..10).find_map(|_| Self::start_on(free_port(), file)).expect("nginx starts")
    }

    fn start_on(port: u16, file: &[u8]) -> Option<Self> {
        let name = format!("serval-nginx-{}-{port}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("file"), file).unwrap();
        let conf = format!(
            "daemon off; master_process off; error_log stderr; pid pid; events {{}} http {{ access_log off; \
             client_body_temp_path t; proxy_temp_path t; fastcgi_temp_path t; uwsgi_temp_path t; scgi_temp_path t; \
             server {{ listen 127.0.0.1:{port}; root .; }} }}"
        );
        std::fs::write(folder.join("conf"), conf).unwrap();
        let start = |program: &&str| {
            let mut command = Command::new(program);
            command.arg("-p").arg(&folder).args(["-c", "conf", "-e", "stderr"]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
        };
        let process = ["nginx", "/usr/sbin/nginx"].iter().find_map(start);
        let process = process.expect("install nginx-light (make setup-test does)");
        let address = ([127, 0, 0, 1], port).into();
        let mut server = Self { process, address, folder };
        for _ in 0..4000 {
            if server.process.try_wait().unwrap().is_some() {
                return None;
            }
            if TcpStream::connect(address).is_ok() {
                return Some(server);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        None
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn a_web_server_behind_a_proxy_serves_its_files() {
    let file = noise(5_000_000, 5);
    let nginx = Nginx::start(&file);
    let server = serve(nginx.address, 2, &["count-min"]);
    let ask = b"GET /file HTTP/1.1\r\nHost: a\r\n\r\nGET /file HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let (to, file) = (address(&server, 0), &file);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                let mut stream = TcpStream::connect(to).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.write_all(ask).unwrap();
                let mut back = Vec::new();
                stream.read_to_end(&mut back).expect("it ends in time");
                for _ in 0..2 {
                    let head = back.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
                    assert!(back.starts_with(b"HTTP/1.1 200 OK\r\n"));
                    assert!(back[head..].starts_with(file), "the file as it is");
                    back.drain(..head + file.len());
                }
                assert!(back.is_empty());
            });
        }
    });
    assert_accounts(&server);
    assert!(server.shutdown().is_clean());
}
