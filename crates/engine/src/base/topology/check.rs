//! Checks of a topology: each error names a field.

use wire::error_reply::ErrorReply;

use super::*;

/// An invalid topology: the field, and valid values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}.{field}: {message}")]
pub struct TopologyError {
    /// The part, for humans: `service "digits"`.
    pub place: String,
    /// Index path for callers that have a file: (table, index, sub-index).
    pub path: (&'static str, usize, Option<usize>),
    /// The field's name in the configuration.
    pub field: &'static str,
    /// The error and the fix.
    pub message: String,
}

/// The message about a value that must be in [`min`, `max`].
fn outside(value: u64, min: u64, max: u64) -> Option<String> {
    let inside = (min..=max).contains(&value);
    (!inside).then(|| format!("is {value}, must be in [{min}, {max}]"))
}

fn service_error(
    index: usize,
    service: &Service,
    field: &'static str,
    message: String,
) -> TopologyError {
    let place = format!("service {:?}", service.name);
    TopologyError { place, path: ("service", index, None), field, message }
}

impl Topology {
    /// Rejects an invalid topology with its first problem.
    pub fn check(&self) -> Result<(), TopologyError> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// All problems, except those that only follow from another problem of the same service.
    pub fn problems(&self) -> Vec<TopologyError> {
        let mut problems: Vec<TopologyError> = self.check_engine().err().into_iter().collect();
        for (index, service) in self.services.iter().enumerate() {
            let before = problems.len();
            if let Err(error) = self.check_service(index, service, &mut problems) {
                problems.push(error);
            }
            if problems.len() == before {
                problems.extend(self.check_regions(index, service).err());
            }
        }
        self.check_ports(&mut problems);
        problems.extend(self.check_tenants());
        problems
    }

    /// Quotas of tenants for what their services have from the start.
    fn check_tenants(&self) -> Vec<TopologyError> {
        let mut problems = Vec::new();
        for (index, tenant) in self.tenants.iter().enumerate() {
            let mut wrong = |field, message| {
                let place = format!("tenant {:?}", tenant.name);
                problems.push(TopologyError {
                    place,
                    path: ("tenant", index, None),
                    field,
                    message,
                });
            };
            if self.tenants[..index].iter().any(|other| other.name == tenant.name) {
                wrong("name", "names a tenant that is there already; give each its own".into());
            }
            let weight = outside(tenant.weight.into(), 1, WEIGHT_MAX.into());
            weight.into_iter().for_each(|message| wrong("weight", message));
            let services = || self.services.iter().filter(|of| of.tenant == tenant.name);
            let mqueues: u64 = services().map(Service::mqueues_total).sum();
            if tenant.mqueues > 0 && mqueues > tenant.mqueues {
                let most = tenant.mqueues;
                wrong(
                    "mqueues",
                    format!(
                        "is {most}, but its services have {mqueues}: give them fewer, or raise it"
                    ),
                );
            }
        }
        problems
    }

    /// Size of the regions of a service; 0 if they cannot be laid out, which is another problem.
    pub(super) fn region_bytes(&self, service: &Service) -> u64 {
        let regions = service.accelerators.iter().enumerate().filter_map(|(place, index)| {
            let kind = &self.accelerators.get(*index)?.kind;
            service.region_plan(place, kind, 1, self.engine.workers).bytes().ok()
        });
        regions.sum()
    }

    fn check_engine(&self) -> Result<(), TopologyError> {
        let wrong = |field, message: String| TopologyError {
            place: "engine".into(),
            path: ("engine", 0, None),
            field,
            message,
        };
        let engine = &self.engine;
        if engine.workers == 0 || engine.workers > WORKERS_MAX {
            return Err(wrong("workers", format!("must be in [1, {WORKERS_MAX}]")));
        }
        if !engine.cores.is_empty() && engine.cores.len() < engine.workers {
            let (cores, workers) = (engine.cores.len(), engine.workers);
            let message = format!("lists {cores} cores for {workers} workers; name one core each");
            return Err(wrong("cores", message));
        }
        Ok(())
    }

    /// The message about a request time-out above the block's time limit.
    fn too_late(&self, service: &Service) -> Option<String> {
        let timeout = service.request_timeout_ms;
        let hangs = service.accelerators.iter().zip(&service.hang_ms);
        let (accelerator, hang_ms) = hangs.into_iter().find(|(_, hang)| **hang < timeout)?;
        let name = &self.accelerators[*accelerator].name;
        Some(format!(
            "is {timeout}, but accelerator {name:?} has hang_ms = {hang_ms}: a kernel that may still answer would be taken for \
             hung; set hang_ms to {timeout} or more, or request_timeout_ms to {hang_ms} or less"
        ))
    }

    /// Returns an error that prevents further checks.
    fn check_service(
        &self,
        index: usize,
        service: &Service,
        problems: &mut Vec<TopologyError>,
    ) -> Result<(), TopologyError> {
        let wrong = |field, message| service_error(index, service, field, message);
        if service.upstream.is_some() {
            return self.check_proxy(index, service, problems);
        }
        if service.accelerators.is_empty() {
            return Err(wrong("accelerator", "names none; give at least one".into()));
        }
        if service.accelerators.iter().any(|a| *a >= self.accelerators.len()) {
            return Err(wrong("accelerator", "names an accelerator that is not defined".into()));
        }
        if !service.shares.is_empty() && service.shares.len() != service.accelerators.len() {
            return Err(wrong("accelerator", "needs a share for each accelerator".into()));
        }
        let mut found = |field, message: Option<String>| {
            problems.extend(message.map(|message| wrong(field, message)));
        };
        if service.listen.is_empty()
            && service.memory_ports.is_empty()
            && service.sockets.is_empty()
        {
            found("listen", Some("names no address; give at least one".into()));
        }
        found("socket", check_sockets(service));
        let places = 0..service.accelerators.len();
        let mqueues = places.map(|place| u64::from(service.mqueues_on(place)));
        found("mqueues", mqueues.into_iter().find_map(|n| outside(n, 1, BLOCKS_MAX.into())));
        found(
            "slots",
            outside(service.slots.into(), 1, DEPTH_MAX.into()).or_else(|| {
                let next = service.slots.checked_next_power_of_two().unwrap_or(DEPTH_MAX);
                let message = format!("is {}, must be a power of two: {next}", service.slots);
                (!service.slots.is_power_of_two()).then_some(message)
            }),
        );
        let most = u64::from(MESSAGE_BYTES_MAX);
        let (request, reply) = (service.max_message_bytes, service.max_reply_bytes);
        let udp = service.listen.iter().any(|l| l.transport == Transport::Udp);
        found("max_message_bytes", outside(request.into(), 1, most));
        found(
            "max_reply_bytes",
            outside(reply.into(), 1, most).or_else(|| {
                let message = format!(
                    "is {reply}, but a UDP datagram carries at most {UDP_PAYLOAD_MAX} bytes"
                );
                (udp && reply as usize > UDP_PAYLOAD_MAX).then_some(message)
            }),
        );
        let framed = service.framing.check(request as usize, reply as usize);
        found("framing", framed.err().map(|error| error.to_string()));
        found("idle_s", service.check_idle());
        found("error_reply_hex", service.check_error_reply());
        let timeout = outside(service.request_timeout_ms, 1, 3_600_000);
        found("request_timeout_ms", timeout.or_else(|| self.too_late(service)));
        found("backend", outside(service.backends.len() as u64, 0, BACKENDS_MAX.into()));
        found("file", outside(service.files.len() as u64, 0, FILE_SPECS_MAX as u64));
        let idle =
            !service.files.is_empty() && !service.backends.iter().any(Backend::does_transfers);
        let why = "has files, but no backend with connect = \"transfer\", which would use them";
        found("file", idle.then(|| why.to_owned()));
        let transfers = service.backends.iter().filter(|backend| backend.does_transfers()).count();
        let why = "has sockets and several backends with connect = \"transfer\": what goes to a socket has an order through one of them only; keep one";
        let several = !service.sockets.is_empty() && transfers > 1;
        found("backend", several.then(|| why.to_owned()));
        for (sub, backend) in service.backends.iter().enumerate() {
            let mut found = |field, message: Option<String>| {
                problems.extend(message.map(|message| TopologyError {
                    place: format!("service {:?}, backend {:?}", service.name, backend.name),
                    path: ("backend", index, Some(sub)),
                    field,
                    message,
                }));
            };
            found("connections", outside(backend.connections.into(), 1, 64));
            found("timeout_ms", outside(backend.timeout_ms, 1, 3_600_000));
            found("in_flight", outside(backend.in_flight.into(), 1, 65_536));
            found("max_message_bytes", outside(backend.max_message_bytes.into(), 1, most));
            if backend.does_transfers() {
                let (min, max) = (MEMORY_BYTES_MIN, MEMORY_BYTES_MAX);
                found("memory_bytes", outside(backend.memory_bytes, min, max));
                let functions = "has functions, which see no transfers; remove them".to_owned();
                found("function", (!backend.functions.is_empty()).then_some(functions));
                continue;
            }
            let max = backend.max_message_bytes as usize;
            let framed = backend.framing.check_backend(max, max);
            found("framing", framed.err().map(|error| error.to_string()));
            if let Err((field, message)) = backend.check_matching() {
                found(field, Some(message));
            }
        }
        Ok(())
    }

    /// The same for a service with an upstream server.
    fn check_proxy(
        &self,
        index: usize,
        service: &Service,
        problems: &mut Vec<TopologyError>,
    ) -> Result<(), TopologyError> {
        let wrong = |field, message| service_error(index, service, field, message);
        let mut found = |field, message: Option<String>| {
            problems.extend(message.map(|message| wrong(field, message)));
        };
        if service.listen.is_empty() {
            found("listen", Some("names no address; give at least one".into()));
        }
        let without = |present: bool, what: &str| {
            present.then(|| format!("has no meaning with upstream{what}; remove one of them"))
        };
        found("accelerator", without(!service.accelerators.is_empty(), ", which runs no kernel"));
        found("backend", without(!service.backends.is_empty(), ", which runs no kernel"));
        found("listen", without(!service.memory_ports.is_empty(), " where it names shm:// ports"));
        found("replies", without(service.replies == Replies::None, " where it is \"none\""));
        let most = u64::from(MESSAGE_BYTES_MAX);
        let (request, reply) = (service.max_message_bytes, service.max_reply_bytes);
        found("max_message_bytes", outside(request.into(), 1, most));
        found("max_reply_bytes", outside(reply.into(), 1, most));
        let framed = service.framing.check(request as usize, reply as usize);
        found("framing", framed.err().map(|error| error.to_string()));
        found("request_timeout_ms", outside(service.request_timeout_ms, 1, 3_600_000));
        let flows = outside(service.upstream_flows.into(), 1, UPSTREAM_FLOWS_MAX.into());
        found("upstream_flows", flows);
        found("error_reply_hex", service.check_error_reply());
        found("upstream", self.leads_back(index));
        Ok(())
    }

    /// Whether a proxy's requests would come back to it: its upstream server is its own port, or a proxy of this engine that
    /// leads there.
    fn leads_back(&self, index: usize) -> Option<String> {
        let mut at = index;
        for _ in 0..self.services.len() {
            let upstream = self.services[at].upstream?;
            let listens = |service: &Service| {
                let to = |listen: &Listen| Listen { address: upstream, ..*listen };
                service.listen.iter().any(|listen| listen.collides(&to(listen)))
            };
            at = self.services.iter().position(listens)?;
            if at == index {
                let own = self.services[index].upstream?;
                return Some(format!(
                    "{own} leads back to this service: its requests would go in a circle; name the server's own address"
                ));
            }
        }
        None
    }

    /// Whether the regions of a service can be laid out and are not larger than allowed.
    fn check_regions(&self, index: usize, service: &Service) -> Result<(), TopologyError> {
        let wrong = |field, message| service_error(index, service, field, message);
        for (place, accelerator) in service.accelerators.iter().enumerate() {
            let plan = service.region_plan(
                place,
                &self.accelerators[*accelerator].kind,
                1,
                self.engine.workers,
            );
            let bytes = plan.bytes().map_err(|e| wrong("slots", e.to_string()))?;
            if bytes > self.limits.region_mib << 20 {
                let sum = service.region_arithmetic(place, &plan, self.limits.region_mib);
                return Err(wrong("mqueues", sum));
            }
        }
        Ok(())
    }

    /// Checks that no two services listen on the same address (port 0 never collides).
    fn check_ports(&self, problems: &mut Vec<TopologyError>) {
        let mut seen: Vec<(&str, Listen, Option<PathBuf>)> = Vec::new();
        let mut paths: Vec<(&str, &Path)> = Vec::new();
        for (index, service) in self.services.iter().enumerate() {
            let taken_by = |what: String, by: &str| TopologyError {
                place: format!("service {:?}", service.name),
                path: ("service", index, None),
                field: "listen",
                message: format!("{what} is taken by service {by:?}"),
            };
            let memory = service.memory_ports.iter().map(|path| (path.as_path(), "listen"));
            let unix = service.unix_ports().map(|(path, _)| (path, "socket"));
            for (path, field) in memory.chain(unix) {
                if let Some((by, _)) = paths.iter().find(|(_, other)| *other == path) {
                    let error = taken_by(path.display().to_string(), by);
                    problems.push(TopologyError { field, ..error });
                }
                paths.push((&service.name, path));
            }
            let netns = self.confinement_of(&service.tenant).netns;
            for (listen, socket) in service.ports() {
                let collides = |(_, other, of): &&(&str, Listen, Option<PathBuf>)| {
                    *of == netns && other.collides(&listen)
                };
                if let Some((by, other, _)) = seen.iter().find(collides) {
                    let mut error = taken_by(listen.address.to_string(), by);
                    error.field = if socket.is_some() { "socket" } else { "listen" };
                    if *other != listen {
                        error.message += &format!(", which listens on {}", other.address);
                    }
                    problems.push(error);
                }
                seen.push((&service.name, listen, netns.clone()));
            }
        }
    }
}

/// What is wrong with a service's stream sockets.
fn check_sockets(service: &Service) -> Option<String> {
    let count = service.sockets.len();
    if count > SOCKET_SPECS_MAX {
        return Some(format!("names {count} addresses; give at most {SOCKET_SPECS_MAX}"));
    }
    let slots = outside(service.sockets_per_block.into(), 1, mqueue::abi::SOCKETS_MAX.into());
    let slots = slots.map(|problem| format!("sockets_per_block {problem}"));
    let bytes = outside(service.socket_bytes, SOCKET_BYTES_MIN, SOCKET_BYTES_MAX);
    let bytes = bytes.or_else(|| {
        let next = service.socket_bytes.next_power_of_two();
        let problem = format!("is {}, must be a power of two: {next}", service.socket_bytes);
        (!service.socket_bytes.is_power_of_two()).then_some(problem)
    });
    slots.or(bytes.map(|problem| format!("socket_bytes {problem}")))
}

impl Service {
    /// Whether a port of it takes connections.
    fn takes_connections(&self) -> bool {
        self.listen.iter().any(|listen| listen.transport == Transport::Tcp)
    }

    /// What is wrong with the time-out of its connections.
    fn check_idle(&self) -> Option<String> {
        self.idle_ms?;
        let why = "idle_s is for connections over TCP, and the service has no tcp:// port; remove it, or add one to listen";
        (!self.takes_connections()).then(|| why.to_owned())
    }

    /// What is wrong with its error reply.
    fn check_error_reply(&self) -> Option<String> {
        let (bytes, framing) = (self.error_reply.len(), self.framing);
        if bytes == 0 {
            return None;
        }
        if bytes > ERROR_REPLY_BYTES_MAX {
            return Some(format!("is {bytes} bytes, must be at most {ERROR_REPLY_BYTES_MAX}"));
        }
        if framing.error_reply(ErrorReply::Failed).is_some() {
            return Some(format!(
                "error_reply_hex has no meaning with framing = \"{framing}\", which has error replies of its own; remove it"
            ));
        }
        if self.replies == Replies::None {
            return Some(
                "error_reply_hex has no meaning with replies = \"none\", where no request has a reply; remove it".to_owned(),
            );
        }
        if self.relays_streams() {
            return Some(format!(
                "error_reply_hex has no meaning for a proxy with framing = \"{framing}\", which passes bytes on and has no requests \
                 over TCP; remove it, or choose another framing"
            ));
        }
        if !self.takes_connections() {
            return Some(
                "error_reply_hex is for clients over TCP, and the service has no tcp:// port; remove it, or add one to listen".to_owned(),
            );
        }
        framing.encode_reply(&self.error_reply, &mut Vec::new()).is_err().then(|| {
            format!("error_reply_hex cannot be a reply with framing = \"{framing}\"; choose bytes that a kernel could send")
        })
    }
}

impl Backend {
    /// Rejects a `match` that this transport and framing do not support.
    fn check_matching(&self) -> Result<(), (&'static str, String)> {
        let max = self.max_message_bytes as usize;
        if let Some(id) = self.matching {
            let (key, most) = match self.framing {
                Framing::Memcached => {
                    let why = "match has no meaning with framing = \"memcached\", whose answers are matched by \
                               key; remove it";
                    return Err(("match", why.into()));
                }
                Framing::Raw if self.transport == Transport::Tcp => {
                    let why = "match needs messages, and over TCP framing = \"raw\" has none; choose another \
                               framing, or remove it";
                    return Err(("match", why.into()));
                }
                Framing::Fixed(size) if self.transport == Transport::Tcp => {
                    ("framing", size as usize)
                }
                _ => ("max_message_bytes", max),
            };
            id.check(key, most).map_err(|error| ("match", error.to_string()))?;
        }
        if self.sockets == Sockets::PerRequest {
            if self.connections != 1 {
                let why = "connections has no meaning with sockets = \"per-request\"; remove it, in_flight limits the \
                           sockets";
                return Err(("connections", why.into()));
            }
            if self.in_flight > REQUEST_SOCKETS_MAX {
                let why = format!(
                    "is {}, must be in [1, {REQUEST_SOCKETS_MAX}] with sockets = \"per-request\"",
                    self.in_flight
                );
                return Err(("in_flight", why));
            }
        }
        Ok(())
    }
}
