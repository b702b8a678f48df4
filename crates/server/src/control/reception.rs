//! The thread that serves the control socket: it accepts connections, checks who they are of, and answers what needs no change of the server.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::metrics::Metrics;
use serde_json::{Value as Json, json};
use sys::PrivateFile;
use sys::local::{LocalListener, LocalSocket};
use sys::readiness::{WakeFd, wait_readable};

use super::protocol::{FunctionRequest, REQUEST_BYTES_MAX, Request, TenantRequest};
use super::{Outcome, ShownServices, Task, Tasks};
use crate::exporter::{Health, Pages};
use crate::{Caller, FunctionCounters, Refused};

/// Connections at a time.
const CONNECTIONS_MAX: usize = 16;
/// Of those, connections of users that are neither the engine's nor root.
const USER_CONNECTIONS_MAX: usize = 8;
/// Connections with which functions end, of all users and of one that is neither the engine's nor root.
const HOLDERS_MAX: usize = 256;
const USER_HOLDERS_MAX: usize = 16;
/// How long a connection may take to send its first request, …
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// … and until each further one.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often to check whether a requested reload is done.
const RELOAD_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long to wait before accepting again when the process has no free descriptor.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// What `status` reports.
pub(super) struct Status {
    pub(super) metrics: Metrics,
    pub(super) health: Arc<Health>,
    pub(super) shown: Arc<Mutex<ShownServices>>,
    /// The configuration file.
    pub(super) file: PathBuf,
}

/// A connection to the control socket.
pub(super) struct Connection {
    socket: LocalSocket,
    caller: Caller,
    /// Functions end with it.
    holds: bool,
    until: Instant,
    /// It has sent a request.
    has_asked: bool,
    /// The outcome of a reload, or of another request, that it waits for.
    awaits: Option<Outcome>,
    /// Set when it ends: what it waits for is not compiled any longer.
    gone: Arc<AtomicBool>,
}

/// The thread of the control socket.
pub(super) struct ControlServer {
    pub(super) listener: LocalListener,
    pub(super) wake_fd: Arc<WakeFd>,
    pub(super) ending: Arc<AtomicBool>,
    pub(super) tasks: Arc<Tasks>,
    pub(super) status: Status,
    pub(super) pages: Pages,
    pub(super) functions: Arc<FunctionCounters>,
    pub(super) connections: Vec<Connection>,
    pub(super) last_connection: u64,
}

impl ControlServer {
    pub(super) fn run(&mut self) {
        while !self.ending.load(Ordering::Relaxed) {
            self.wait_and_dispatch();
        }
    }

    fn wait_and_dispatch(&mut self) {
        let mut files: Vec<BorrowedFd<'_>> = vec![self.wake_fd.as_fd(), self.listener.as_fd()];
        files.extend(self.connections.iter().map(|connection| connection.socket.as_fd()));
        let now = Instant::now();
        let timeout = |connection: &Connection| match connection.awaits {
            Some(_) => RELOAD_POLL_INTERVAL,
            None => connection.until.saturating_duration_since(now),
        };
        let waiting = |connection: &&Connection| !connection.holds || connection.awaits.is_some();
        let timeout = self.connections.iter().filter(waiting).map(timeout).min();
        let ready = wait_readable(&files, timeout);
        if ready[0] {
            self.wake_fd.clear();
        }
        // Backwards, so that a removal does not move entries that are still to be checked.
        for index in (0..self.connections.len()).rev() {
            let stays = self.serve_connection(index, ready[2 + index]);
            if !stays {
                self.remove(index);
            }
        }
        if ready[1] {
            self.accept();
        }
    }

    fn accept(&mut self) {
        let socket = match self.listener.accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(_) => {
                // The peer stays in the backlog, and the listener stays ready.
                std::thread::sleep(EXHAUSTED_PAUSE);
                return;
            }
        };
        let own = sys::process::user();
        let refused = match socket.peer() {
            Ok(peer) if !self.may_connect(peer.user) => Some(format!(
                "the engine takes commands from processes of user {own} and root, not of user {}",
                peer.user
            )),
            Ok(peer) if self.of_users(peer.user) >= USER_CONNECTIONS_MAX => Some(format!(
                "other users have {USER_CONNECTIONS_MAX} control connections: try again later"
            )),
            Ok(_) if !self.has_room() => Some(format!(
                "{CONNECTIONS_MAX} control connections wait for a reload: try again later"
            )),
            Ok(peer) => return self.begin(socket, peer.user),
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = refused {
            let _ = socket.send(json!({ "error": why }).to_string().as_bytes(), &[]);
        }
    }

    fn begin(&mut self, socket: LocalSocket, user: u32) {
        self.last_connection += 1;
        let caller = Caller { user, connection: Some(self.last_connection) };
        let until = Instant::now() + FIRST_REQUEST_TIMEOUT;
        let (holds, has_asked, awaits, gone) = (false, false, None, Arc::default());
        self.connections.push(Connection { socket, caller, holds, until, has_asked, awaits, gone });
    }

    fn may_connect(&self, user: u32) -> bool {
        let operator = Caller { user, connection: None }.is_operator();
        operator || self.status.shown().users.contains(&user)
    }

    /// Connections of users that are not the operator, if this one is not either.
    fn of_users(&self, user: u32) -> usize {
        if (Caller { user, connection: None }).is_operator() {
            return 0;
        }
        let of_users = |c: &&Connection| !c.holds && !c.caller.is_operator();
        self.connections.iter().filter(of_users).count()
    }

    fn remove(&mut self, index: usize) {
        let gone = self.connections.swap_remove(index);
        gone.gone.store(true, Ordering::Relaxed);
        if gone.holds {
            let connection = gone.caller.connection.expect("each has a number");
            // The owner is gone only when everything ends.
            let _ = self.tasks.sender.send(Task::Ended(connection));
        }
    }

    /// Functions may end with the connection from now on, or why not.
    fn hold(&mut self, index: usize) -> Result<(), String> {
        let Connection { caller, holds, .. } = self.connections[index];
        if holds {
            return Ok(());
        }
        let holders = || self.connections.iter().filter(|connection| connection.holds);
        let own = holders().filter(|connection| connection.caller.user == caller.user).count();
        if holders().count() >= HOLDERS_MAX || !caller.is_operator() && own >= USER_HOLDERS_MAX {
            self.functions.count_refused(Refused::Limit);
            return Err(format!(
                "functions end with {own} connections of user {}, and no more can: close one first",
                caller.user
            ));
        }
        self.connections[index].holds = true;
        Ok(())
    }

    /// Whether there is room for one more connection; closes an idle one if necessary.
    fn has_room(&mut self) -> bool {
        let others = || self.connections.iter().enumerate().filter(|(_, other)| !other.holds);
        if others().count() < CONNECTIONS_MAX {
            return true;
        }
        let idle = others().filter(|(_, connection)| connection.awaits.is_none());
        let Some((oldest, _)) =
            idle.min_by_key(|(_, connection)| (connection.has_asked, connection.until))
        else {
            return false;
        };
        let gone = self.connections.swap_remove(oldest);
        answer(
            &gone.socket,
            &json!({ "error": "closed: it sent no request and other connections need its slot" }),
        );
        true
    }

    /// Whether the connection stays open.
    fn serve_connection(&mut self, index: usize, readable: bool) -> bool {
        let connection = &mut self.connections[index];
        if let Some(outcome) = connection.awaits.as_ref().and_then(|outcome| outcome.get()) {
            let files: Vec<BorrowedFd<'_>> = outcome.files.iter().map(AsFd::as_fd).collect();
            let line = format!("{}\n", outcome.answer);
            let told = connection.socket.send(line.as_bytes(), &files).is_ok();
            connection.awaits = None;
            connection.until = Instant::now() + IDLE_TIMEOUT;
            return told;
        }
        if !readable {
            let stays = connection.awaits.is_some() || connection.holds;
            return stays || Instant::now() < connection.until;
        }
        let mut bytes = [0; REQUEST_BYTES_MAX + 1];
        let (len, files) = match connection.socket.receive_descriptors(&mut bytes) {
            Ok(None) => return true,
            Ok(Some((0, _))) | Err(_) => return false,
            Ok(Some(received)) => received,
        };
        if connection.awaits.is_some() {
            return answer(&connection.socket, &json!({ "error": "one request at a time" }));
        }
        connection.until = Instant::now() + IDLE_TIMEOUT;
        connection.has_asked = true;
        let caller = connection.caller;
        // A reload may have removed the user since the connection began.
        if !self.may_connect(caller.user) && !mutants::on("remember_removed_user") {
            self.functions.count_refused(Refused::Command);
            let why = format!("no service names user {} in `function_users`", caller.user);
            return answer(&self.connections[index].socket, &json!({ "error": why }));
        }
        let connection = &mut self.connections[index];
        match Request::parse(&bytes[..len]) {
            Err(why) => answer(&connection.socket, &json!({ "error": why })),
            Ok(request) if !may_ask(caller, &request) => {
                tracing::warn!(user = caller.user, "audit: a request for the operator was refused");
                self.functions.count_refused(Refused::Command);
                let why = format!("user {} may make requests about functions only", caller.user);
                answer(&connection.socket, &json!({ "error": why }))
            }
            Ok(Request::Tenants(request)) => {
                connection.awaits = Some(self.tasks.ask_tenants(caller, request));
                true
            }
            Ok(Request::Reload) => {
                tracing::info!(user = caller.user, "audit: a reload was requested");
                connection.awaits = Some(self.tasks.reload());
                true
            }
            Ok(Request::Functions(request)) => {
                let bound = matches!(request, FunctionRequest::Create { bound: true, .. });
                let held = if bound { self.hold(index) } else { Ok(()) };
                let connection = &mut self.connections[index];
                match held.and_then(|()| content(files)) {
                    Ok(content) => {
                        let gone = connection.gone.clone();
                        let outcome = self.tasks.ask_functions(caller, request, content, gone);
                        connection.awaits = Some(outcome);
                        true
                    }
                    Err(why) => answer(&connection.socket, &json!({ "error": why })),
                }
            }
            Ok(Request::Status) => {
                let status = self.status.show();
                answer(&self.connections[index].socket, &status)
            }
            Ok(Request::Metrics) => {
                let page = self.pages.metrics().unwrap_or_default();
                let socket = &self.connections[index].socket;
                match PrivateFile::of("metrics", page.as_bytes()) {
                    Ok(file) => {
                        let line = format!("{}\n", json!({ "metrics": page.len() }));
                        socket.send(line.as_bytes(), &[file.as_fd()]).is_ok()
                    }
                    Err(error) => answer(socket, &json!({ "error": error.to_string() })),
                }
            }
        }
    }
}

/// Users other than the operator may make requests about functions, and list their tenants.
fn may_ask(caller: Caller, request: &Request) -> bool {
    let is_theirs =
        matches!(request, Request::Functions(_) | Request::Tenants(TenantRequest::List));
    caller.is_operator() || is_theirs || mutants::on("serve_every_user")
}

/// The content of a function's file that came with a request: at most one sealed memory file.
fn content(files: Vec<OwnedFd>) -> Result<Option<Vec<u8>>, String> {
    let Some(file) = files.into_iter().next() else { return Ok(None) };
    let received = PrivateFile::received(file, onpath::spec::MODULE_BYTES_MAX);
    let received =
        received.map_err(|error| format!("the content of the file cannot be used: {error}"))?;
    Ok(Some(received.bytes().to_vec()))
}

impl Status {
    fn shown(&self) -> MutexGuard<'_, ShownServices> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether users other than the operator may connect.
    pub(super) fn has_users(&self) -> bool {
        !self.shown().users.is_empty()
    }

    fn show(&self) -> Json {
        let counted = self.metrics.services();
        let mut services = self.shown().services.clone();
        for service in &mut services {
            let found = counted.iter().find(|s| service["name"] == s.name());
            let Some(snapshot) = found.map(|s| s.snapshot()) else { continue };
            service["received"] = snapshot.received.into();
            service["replied"] = snapshot.replied.into();
            service["dropped"] = snapshot.dropped_requests().into();
            service["outstanding"] = snapshot.outstanding().into();
        }
        json!({
            "version": env!("CARGO_PKG_VERSION"), "process": std::process::id(),
            "file": self.file.to_string_lossy(),
            "ready": self.health.is_ready(), "generation": self.health.generation(),
            "services": services,
        })
    }
}

/// Sends one line; returns whether it was sent.
fn answer(socket: &LocalSocket, value: &Json) -> bool {
    socket.send(format!("{value}\n").as_bytes(), &[]).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::protocol::{ANSWER_BYTES_MAX, read_answer};

    /// A server of the control socket with one user besides the operator, and the requests that it passes on.
    fn control_server(name: &str, user: u32) -> (ControlServer, std::sync::mpsc::Receiver<Task>) {
        let path = std::env::temp_dir().join(format!("serval-{name}-{}.sock", std::process::id()));
        let (tasks, inbox) = Tasks::new();
        let (metrics, health) = (Metrics::new(1, []), Arc::<Health>::default());
        let shown = ShownServices { services: Vec::new(), users: vec![user] };
        let status = Status {
            metrics: metrics.clone(),
            health: health.clone(),
            shown: Arc::new(Mutex::new(shown)),
            file: path.clone(),
        };
        let server = ControlServer {
            listener: LocalListener::bind(&path).unwrap(),
            wake_fd: Arc::new(WakeFd::new().unwrap()),
            ending: Arc::default(),
            tasks,
            status,
            pages: Pages::new(metrics, health),
            functions: Arc::default(),
            connections: Vec::new(),
            last_connection: 0,
        };
        (server, inbox)
    }

    /// A connection of a process of this user.
    fn connect(server: &mut ControlServer, user: u32) -> LocalSocket {
        let (near, far) = LocalSocket::pair().unwrap();
        server.begin(far, user);
        near
    }

    /// Sends a line on the last connection; the answer, if there is one at once.
    fn ask(server: &mut ControlServer, socket: &LocalSocket, line: &str) -> Option<Json> {
        socket.send(line.as_bytes(), &[]).unwrap();
        assert!(server.serve_connection(server.connections.len() - 1, true), "it stays open");
        let mut bytes = vec![0; ANSWER_BYTES_MAX];
        let len = socket.receive(&mut bytes).unwrap()?;
        Some(read_answer(&bytes[..len]).unwrap())
    }

    #[test]
    fn another_user_may_make_requests_about_functions_only() {
        let own = sys::process::user();
        let user = own + 1;
        let (mut server, inbox) = control_server("users", user);
        assert!(server.may_connect(own) && server.may_connect(0) && server.may_connect(user));
        assert!(!server.may_connect(own + 2));
        let list = json!({ "command": "functions", "do": "list" }).to_string();
        // As a connection that began before a reload removed its user.
        let removed = connect(&mut server, own + 2);
        let why = ask(&mut server, &removed, &list).unwrap()["error"].as_str().unwrap().to_owned();
        assert!(why.contains("no service names user"), "{why}");
        assert_eq!(server.functions.refused(), [0, 0, 0, 1]);
        server.remove(0);
        let socket = connect(&mut server, user);
        for command in ["status", "reload", "metrics"] {
            let line = json!({ "command": command }).to_string();
            let answer = ask(&mut server, &socket, &line).unwrap();
            let why = answer["error"].as_str().unwrap();
            assert!(why.contains("may make requests about functions only"), "{why}");
        }
        assert_eq!(server.functions.refused(), [0, 0, 0, 4]);
        assert_eq!(ask(&mut server, &socket, &list), None, "its answer comes from the owner");
        let Ok(Task::Functions(task)) = inbox.try_recv() else { panic!("no request") };
        assert_eq!(task.caller, Caller { user, connection: Some(2) });
        assert_eq!(task.request, FunctionRequest::List);
        assert!(inbox.try_recv().is_err(), "and no reload");
        // The operator may do more.
        let operator = connect(&mut server, own);
        let status = ask(&mut server, &operator, "{\"command\": \"status\"}").unwrap();
        assert!(status["error"].is_null(), "{status}");
    }

    #[test]
    fn connections_with_functions_stay_and_are_limited_and_their_end_is_passed_on() {
        let user = sys::process::user() + 1;
        let (mut server, inbox) = control_server("holders", user);
        let spec = |name: String| {
            let function = "passthrough";
            json!({ "command": "functions", "do": "create", "name": name, "function": function, "bound": true })
        };
        let mut sockets = Vec::new();
        for number in 0..=USER_HOLDERS_MAX {
            let socket = connect(&mut server, user);
            let answer = ask(&mut server, &socket, &spec(format!("f{number}")).to_string());
            if number < USER_HOLDERS_MAX {
                assert_eq!(answer, None);
                let Ok(Task::Functions(task)) = inbox.try_recv() else { panic!("no request") };
                assert_eq!(task.caller.connection, Some(number as u64 + 1));
            } else {
                let why = answer.unwrap()["error"].as_str().unwrap().to_owned();
                assert!(why.contains("and no more can: close one first"), "{why}");
            }
            sockets.push(socket);
        }
        assert_eq!(server.functions.refused(), [0, 0, 1, 0]);
        assert_eq!(server.of_users(user), 1, "those with functions count apart");
        assert!(server.has_room());
        // Ends of connections with functions are passed on, others are not.
        while let Some(index) = server.connections.len().checked_sub(1) {
            let (holds, of) = (server.connections[index].holds, server.connections[index].caller);
            server.remove(index);
            let ended = inbox.try_recv();
            let passed_on =
                matches!(ended, Ok(Task::Ended(number)) if Some(number) == of.connection);
            assert_eq!(passed_on, holds);
        }
        drop(sockets);
    }
}
