//! The protocol of the control socket: requests as the engine reads them, answers as `serval reload` reads them.
//! Neither side trusts the other.

use builtins::file_of;
use onpath::{OnFailure, Param, Spec};
use serde_json::{Map, Value as Json, json};

use super::fields::{TEXT_BYTES_MAX, text};
use crate::config::param_json;
use crate::{Place, Replacement, Target};

pub use super::tenants::{TenantChange, TenantRequest};
pub use crate::RegisterAction;

/// Longest request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 16 << 10;
/// Longest path of a module, in bytes.
const PATH_BYTES_MAX: usize = 4096;
/// Parameters of a function, at most.
const PARAMS_MAX: usize = 64;
/// Longest answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A request to the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The current services.
    Status,
    /// Read the configuration again.
    Reload,
    /// The page of metrics. The answer contains its length; the page is in a sealed memory file sent with it.
    Metrics,
    /// About functions on the path of services.
    Functions(FunctionRequest),
    /// About tenants.
    Tenants(TenantRequest),
}

/// A request about functions. The content of the function's file may come with it, in a sealed memory file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FunctionRequest {
    /// Which there are, and what they have done.
    List,
    /// Create a function, which is attached to nothing.
    Create {
        /// The function.
        spec: Spec,
        /// It ends with the connection.
        bound: bool,
    },
    /// Attach a function that was created.
    AttachCreated {
        /// Its id.
        id: u64,
        /// The service.
        service: String,
        /// Its place in the chain.
        place: Place,
    },
    /// Attach a function to a service, or replace the one with its name.
    Attach {
        /// The service.
        service: String,
        /// The function.
        spec: Spec,
        /// Its place in the chain.
        place: Place,
    },
    /// Give a function that was created a ring for what it delivers. Its descriptors come with the answer.
    Ring {
        /// Its id.
        id: u64,
        /// Places for each worker.
        entries: u32,
        /// Longest request.
        message_bytes: u32,
    },
    /// Give a function other code, other parameters or another policy.
    Replace(Target, Replacement),
    /// Detach a function.
    Detach(Target),
    /// The state of a function, merged over all workers: in a sealed memory file with the answer.
    State(Target),
    /// Trace the next messages of a service.
    Trace {
        /// The service.
        service: String,
        /// How many.
        count: u32,
    },
    /// What was traced, if all messages were, or as far as it is.
    Traced {
        /// The service.
        service: String,
        /// End the trace now.
        stop: bool,
    },
    /// Destroy a function that was created.
    Destroy(u64),
    /// Read, reset or write registers of a function.
    Registers(Target, RegisterAction),
}

impl Request {
    /// Parses a request; the error is the answer to send.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > REQUEST_BYTES_MAX {
            return Err(format!("a request has at most {REQUEST_BYTES_MAX} bytes"));
        }
        let example = "send a JSON object such as {\"command\": \"status\"}";
        let value: Json = serde_json::from_slice(bytes).map_err(|e| format!("{e}: {example}"))?;
        match value.get("command").and_then(Json::as_str) {
            Some("status") => Ok(Self::Status),
            Some("reload") => Ok(Self::Reload),
            Some("metrics") => Ok(Self::Metrics),
            Some("functions") => FunctionRequest::parse(&value).map(Self::Functions),
            Some("tenants") => TenantRequest::parse(&value).map(Self::Tenants),
            Some(_) => Err(
                "no such command: the commands are status, reload, metrics, functions and tenants"
                    .to_owned(),
            ),
            None => Err(format!("the request has no command: {example}")),
        }
    }

    /// The line that [`Self::parse`] reads.
    pub fn line(&self) -> String {
        let request = match self {
            Self::Status => json!({ "command": "status" }),
            Self::Reload => json!({ "command": "reload" }),
            Self::Metrics => json!({ "command": "metrics" }),
            Self::Functions(request) => request.json(),
            Self::Tenants(request) => request.json(),
        };
        format!("{request}\n")
    }
}

/// A number of a request, or its default.
fn number(request: &Json, key: &str, max: u64, default: u64) -> Result<u64, String> {
    match request.get(key) {
        None | Some(Json::Null) => Ok(default),
        Some(value) => {
            let number = value.as_u64().filter(|number| *number <= max);
            number.ok_or_else(|| format!("{key:?} is no integer from 0 to {max}"))
        }
    }
}

impl FunctionRequest {
    fn parse(request: &Json) -> Result<Self, String> {
        let service = || text(request, "service", TEXT_BYTES_MAX);
        let registers = |action| Ok(Self::Registers(target(request)?, action));
        match request.get("do").and_then(Json::as_str) {
            Some("list") => Ok(Self::List),
            Some("create") => {
                Ok(Self::Create { spec: parse_spec(request)?, bound: flag(request, "bound")? })
            }
            Some("attach") if request.get("id").is_some() => {
                let (id, place) = (id(request)?, parse_place(request)?);
                Ok(Self::AttachCreated { id, service: service()?, place })
            }
            Some("attach") => {
                let (spec, place) = (parse_spec(request)?, parse_place(request)?);
                Ok(Self::Attach { service: service()?, spec, place })
            }
            Some("ring") => {
                let max = u32::MAX.into();
                let entries = number(request, "entries", max, 1024)? as u32;
                let message_bytes = number(request, "message_bytes", max, 2048)? as u32;
                Ok(Self::Ring { id: id(request)?, entries, message_bytes })
            }
            Some("replace") => Ok(Self::Replace(target(request)?, parse_replacement(request)?)),
            Some("detach") => Ok(Self::Detach(target(request)?)),
            Some("state") => Ok(Self::State(target(request)?)),
            Some("trace") => {
                let count = number(request, "count", u32::MAX.into(), 1)? as u32;
                Ok(Self::Trace { service: service()?, count })
            }
            Some("traced") => {
                Ok(Self::Traced { service: service()?, stop: flag(request, "stop")? })
            }
            Some("destroy") => Ok(Self::Destroy(id(request)?)),
            Some("read") => registers(RegisterAction::Read),
            Some("reset") => registers(RegisterAction::Reset),
            Some("write") => {
                let value = request.get("value").and_then(Json::as_u64);
                let value = value.ok_or("the request has no integer \"value\"")?;
                registers(RegisterAction::Write(text(request, "register", TEXT_BYTES_MAX)?, value))
            }
            _ => Err("\"do\" is one of list, create, ring, attach, replace, detach, destroy, state, trace, traced, read, reset and write"
                .to_owned()),
        }
    }

    fn json(&self) -> Json {
        let (verb, mut request) = match self {
            Self::List => ("list", json!({})),
            Self::Create { spec, bound } => {
                let mut request = spec_json(spec);
                request["bound"] = (*bound).into();
                ("create", request)
            }
            Self::AttachCreated { id, service, place } => {
                let mut request = json!({ "id": id, "service": service });
                place_json(&mut request, place);
                ("attach", request)
            }
            Self::Attach { service, spec, place } => {
                let mut request = spec_json(spec);
                request["service"] = service.as_str().into();
                place_json(&mut request, place);
                ("attach", request)
            }
            Self::Ring { id, entries, message_bytes } => {
                ("ring", json!({ "id": id, "entries": entries, "message_bytes": message_bytes }))
            }
            Self::Replace(target, by) => {
                let mut request = target_json(target);
                replacement_json(&mut request, by);
                ("replace", request)
            }
            Self::Detach(target) => ("detach", target_json(target)),
            Self::State(target) => ("state", target_json(target)),
            Self::Trace { service, count } => {
                ("trace", json!({ "service": service, "count": count }))
            }
            Self::Traced { service, stop } => {
                ("traced", json!({ "service": service, "stop": stop }))
            }
            Self::Destroy(id) => ("destroy", json!({ "id": id })),
            Self::Registers(target, RegisterAction::Read) => ("read", target_json(target)),
            Self::Registers(target, RegisterAction::Reset) => ("reset", target_json(target)),
            Self::Registers(target, RegisterAction::Write(register, value)) => {
                let mut request = target_json(target);
                request["register"] = register.as_str().into();
                request["value"] = (*value).into();
                ("write", request)
            }
        };
        request["command"] = "functions".into();
        request["do"] = verb.into();
        request
    }

    /// What the audit line says.
    pub(super) fn verb(&self) -> &'static str {
        match self {
            Self::List => "fn list",
            Self::Create { .. } => "fn create",
            Self::AttachCreated { .. } | Self::Attach { .. } => "fn attach",
            Self::Ring { .. } => "fn ring",
            Self::Replace(..) => "fn replace",
            Self::Detach(_) => "fn detach",
            Self::State(_) => "fn state",
            Self::Trace { .. } => "fn trace",
            Self::Traced { .. } => "fn trace (end)",
            Self::Destroy(_) => "fn destroy",
            Self::Registers(..) => "fn command",
        }
    }

    /// Whether the request, which got this answer, changed something: what only reads may be repeated many times a second. A trace has a
    /// line when it begins and one when it ends.
    pub(super) fn is_audited(&self, answer: &Json) -> bool {
        match self {
            Self::List | Self::State(_) | Self::Registers(_, RegisterAction::Read) => false,
            Self::Traced { .. } => answer["result"] == "traced",
            _ => true,
        }
    }

    /// The path of the file whose content goes with the request, if it needs one.
    pub fn file(&self) -> Option<String> {
        let file = |spec: &Spec| file_of(spec).map(|path| path.into_owned());
        match self {
            Self::Create { spec, .. } | Self::Attach { spec, .. } => file(spec),
            Self::Replace(_, Replacement { function: Some(function), params, .. }) => {
                let params = params.clone().unwrap_or_default();
                file(&Spec { params, ..Spec::new("", function) })
            }
            _ => None,
        }
    }
}

fn id(request: &Json) -> Result<u64, String> {
    let id = request.get("id").and_then(Json::as_u64);
    id.ok_or_else(|| "the request has no integer \"id\"".to_owned())
}

fn flag(request: &Json, key: &str) -> Result<bool, String> {
    match request.get(key) {
        None | Some(Json::Null) => Ok(false),
        Some(Json::Bool(flag)) => Ok(*flag),
        Some(_) => Err(format!("{key:?} is neither true nor false")),
    }
}

fn target(request: &Json) -> Result<Target, String> {
    if request.get("id").is_some() {
        return id(request).map(Target::Id);
    }
    let service = text(request, "service", TEXT_BYTES_MAX)?;
    Ok(Target::Named { service, name: text(request, "name", TEXT_BYTES_MAX)? })
}

fn target_json(target: &Target) -> Json {
    match target {
        Target::Id(id) => json!({ "id": id }),
        Target::Named { service, name } => json!({ "service": service, "name": name }),
    }
}

fn parse_place(request: &Json) -> Result<Place, String> {
    let given = |key: &&str| request.get(*key).is_some_and(|value| !value.is_null());
    let mut given = ["place", "before", "after"].into_iter().filter(given);
    let place = match given.next() {
        None => Place::Default,
        Some("before") => Place::Before(text(request, "before", TEXT_BYTES_MAX)?),
        Some("after") => Place::After(text(request, "after", TEXT_BYTES_MAX)?),
        Some(_) => Place::At(number(request, "place", u32::MAX.into(), 0)? as usize),
    };
    match given.next() {
        None => Ok(place),
        Some(_) => Err("only one of \"place\", \"before\" and \"after\" can be given".to_owned()),
    }
}

fn place_json(request: &mut Json, place: &Place) {
    match place {
        Place::Default => {}
        Place::At(at) => request["place"] = (*at).into(),
        Place::Before(name) => request["before"] = name.as_str().into(),
        Place::After(name) => request["after"] = name.as_str().into(),
    }
}

fn parse_replacement(request: &Json) -> Result<Replacement, String> {
    let given = |key: &str| request.get(key).is_some_and(|value| !value.is_null());
    // The values as a whole function has them, of which those count that are given.
    let mut whole = request.clone();
    whole["name"] = "f".into();
    if !given("function") {
        whole["function"] = "f".into();
    }
    let spec = parse_spec(&whole)?;
    let replacement = Replacement {
        function: given("function").then_some(spec.function),
        params: given("params").then_some(spec.params),
        on_failure: given("on_failure").then_some(spec.on_failure),
        deadline_us: given("deadline_us").then_some(spec.deadline_us),
        memory_mib: given("memory_mib").then_some(spec.memory_mib),
        dictionary_kib: given("dictionary_kib").then_some(spec.dictionary_kib),
        dictionary: spec.dictionary,
    };
    if replacement == Replacement::default() {
        return Err("the request replaces nothing: give \"function\", \"params\", \"on_failure\", \"deadline_us\", \"memory_mib\", \"dictionary\" or \"dictionary_kib\"".to_owned());
    }
    Ok(replacement)
}

fn replacement_json(request: &mut Json, by: &Replacement) {
    let mut spec = Spec::new("", "");
    spec.params = by.params.clone().unwrap_or_default();
    spec.on_failure = by.on_failure.unwrap_or(spec.on_failure);
    let shown = spec_json(&spec);
    if let Some(function) = &by.function {
        request["function"] = function.as_str().into();
    }
    if by.params.is_some() {
        request["params"] = shown["params"].clone();
    }
    if by.on_failure.is_some() {
        request["on_failure"] = shown["on_failure"].clone();
    }
    if let Some(deadline_us) = by.deadline_us {
        request["deadline_us"] = deadline_us.into();
    }
    if let Some(memory_mib) = by.memory_mib {
        request["memory_mib"] = memory_mib.into();
    }
    if let Some(dictionary) = &by.dictionary {
        request["dictionary"] = dictionary.as_str().into();
    }
    if let Some(dictionary_kib) = by.dictionary_kib {
        request["dictionary_kib"] = dictionary_kib.into();
    }
}

fn parse_spec(request: &Json) -> Result<Spec, String> {
    use onpath::dictionary::{KIB_MAX, KIB_MIN};
    use onpath::spec::{
        DEADLINE_US, DEADLINE_US_MAX, DICTIONARY_KIB, MEMORY_MIB, MEMORY_MIB_MAX, is_name,
    };
    let mut spec = Spec::new(
        &text(request, "name", TEXT_BYTES_MAX)?,
        &text(request, "function", PATH_BYTES_MAX)?,
    );
    match request.get("params") {
        None | Some(Json::Null) => {}
        Some(Json::Object(params)) if params.len() <= PARAMS_MAX => {
            let letter = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
            for (name, value) in params {
                let named = name.len() <= TEXT_BYTES_MAX && name.bytes().all(letter);
                let value = match value {
                    Json::String(_) => {
                        text(&request["params"], name, PATH_BYTES_MAX).ok().map(Param::Text)
                    }
                    value => value.as_u64().map(Param::Integer),
                };
                let Some(value) = value.filter(|_| named) else {
                    return Err(
                        "\"params\" has an entry that is no parameter with an integer or a text"
                            .to_owned(),
                    );
                };
                spec.params.push((name.clone(), value));
            }
        }
        Some(_) => return Err("\"params\" is no object of at most 64 parameters".to_owned()),
    }
    if file_of(&spec).is_some_and(|file| !file.starts_with('/')) {
        return Err("the path of a file must be absolute".to_owned());
    }
    spec.on_failure = match request.get("on_failure").map(Json::as_str) {
        None => OnFailure::Closed,
        Some(Some("open")) => OnFailure::Open,
        Some(Some("closed")) => OnFailure::Closed,
        Some(_) => return Err("\"on_failure\" is \"open\" or \"closed\"".to_owned()),
    };
    spec.deadline_us = number(request, "deadline_us", DEADLINE_US_MAX, DEADLINE_US)?.max(1);
    let memory_mib = number(request, "memory_mib", MEMORY_MIB_MAX.into(), MEMORY_MIB.into())?;
    spec.memory_mib = (memory_mib as u32).max(1);
    if request.get("dictionary").is_some_and(|name| !name.is_null()) {
        let name = text(request, "dictionary", TEXT_BYTES_MAX)?;
        if !is_name(&name) {
            return Err(
                "\"dictionary\" is no name: 1 to 64 letters, digits, `_` and `-`, and no `-` at the beginning".to_owned()
            );
        }
        spec.dictionary = Some(name);
    }
    let kib = number(request, "dictionary_kib", KIB_MAX.into(), DICTIONARY_KIB.into())?;
    spec.dictionary_kib = (kib as u32).max(KIB_MIN);
    Ok(spec)
}

/// A function as requests and answers show it.
pub fn spec_json(spec: &Spec) -> Json {
    let params: Map<String, Json> =
        spec.params.iter().map(|(name, value)| (name.clone(), param_json(value))).collect();
    let on_failure = match spec.on_failure {
        OnFailure::Open => "open",
        OnFailure::Closed => "closed",
    };
    let mut shown = json!({
        "name": spec.name, "function": spec.function, "params": params, "on_failure": on_failure,
        "deadline_us": spec.deadline_us, "memory_mib": spec.memory_mib,
    });
    if let Some(dictionary) = &spec.dictionary {
        shown["dictionary"] = dictionary.as_str().into();
        shown["dictionary_kib"] = spec.dictionary_kib.into();
    }
    shown
}

/// Reads an answer: an object whose texts cannot control a terminal. Control characters in them are replaced by `?`,
/// except line ends in multi-line messages.
pub fn read_answer(bytes: &[u8]) -> Result<Json, String> {
    match serde_json::from_slice(bytes) {
        Ok(Json::Object(answer)) => Ok(Json::Object(sanitize_object(answer))),
        Ok(_) => Err("not an answer of a server: it is not a JSON object".to_owned()),
        Err(error) => Err(format!("not an answer of a server: {error}")),
    }
}

fn sanitize_object(object: Map<String, Json>) -> Map<String, Json> {
    let entry = |(key, value): (String, Json)| {
        let sentence = ["message", "error"].contains(&key.as_str());
        (sanitize_text(&key, false), sanitize(value, sentence))
    };
    object.into_iter().map(entry).collect()
}

/// Recursion is limited by the parser's depth of 128.
fn sanitize(value: Json, lines: bool) -> Json {
    match value {
        Json::String(text) => Json::String(sanitize_text(&text, lines)),
        Json::Array(values) => values.into_iter().map(|value| sanitize(value, lines)).collect(),
        Json::Object(object) => Json::Object(sanitize_object(object)),
        other => other,
    }
}

fn sanitize_text(text: &str, lines: bool) -> String {
    let steers = |c: char| c.is_control() && !(lines && c == '\n');
    text.chars().map(|c| if steers(c) { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_round_trip_and_invalid_ones_get_a_fix() {
        for request in [Request::Status, Request::Reload, Request::Metrics] {
            assert_eq!(Request::parse(request.line().as_bytes()), Ok(request));
        }
        let (service, name) = ("s".to_owned(), "f".to_owned());
        let mut spec = Spec::new("f", "/lib/f.wasm");
        spec.params = vec![("low".into(), u64::MAX.into()), ("key".into(), "a b".into())];
        (spec.on_failure, spec.deadline_us, spec.memory_mib) = (OnFailure::Open, 7, 9);
        (spec.dictionary, spec.dictionary_kib) = (Some("known".into()), 64);
        let named = || Target::Named { service: service.clone(), name: name.clone() };
        let registers = |action| FunctionRequest::Registers(named(), action);
        let attach =
            |place| FunctionRequest::Attach { service: service.clone(), spec: spec.clone(), place };
        let created = |place| FunctionRequest::AttachCreated {
            id: u64::MAX,
            service: service.clone(),
            place,
        };
        let whole = Replacement {
            function: Some("/lib/g.wasm".into()),
            params: Some(vec![("low".into(), 3.into())]),
            on_failure: Some(OnFailure::Closed),
            deadline_us: Some(1),
            memory_mib: Some(1),
            dictionary: Some("known".into()),
            dictionary_kib: Some(16),
        };
        let params = Replacement { params: Some(Vec::new()), ..Replacement::default() };
        for request in [
            FunctionRequest::List,
            FunctionRequest::Create { spec: spec.clone(), bound: true },
            FunctionRequest::Create { spec: spec.clone(), bound: false },
            attach(Place::Default),
            attach(Place::At(3)),
            attach(Place::Before("g".into())),
            created(Place::Default),
            created(Place::After("g".into())),
            FunctionRequest::Replace(named(), whole),
            FunctionRequest::Replace(Target::Id(3), params),
            FunctionRequest::Detach(named()),
            FunctionRequest::Detach(Target::Id(7)),
            FunctionRequest::Destroy(1 << 60),
            FunctionRequest::State(Target::Id(9)),
            FunctionRequest::Trace { service: service.clone(), count: 7 },
            FunctionRequest::Traced { service: service.clone(), stop: true },
            FunctionRequest::Ring { id: 3, entries: 4, message_bytes: u32::MAX },
            registers(RegisterAction::Read),
            registers(RegisterAction::Reset),
            registers(RegisterAction::Write("low".into(), 1)),
        ] {
            let request = Request::Functions(request);
            assert_eq!(Request::parse(request.line().as_bytes()), Ok(request));
        }
        let of_functions = |rest: &str| {
            Request::parse(format!("{{\"command\": \"functions\", {rest}}}").as_bytes())
        };
        for (rest, why) in [
            ("\"do\": \"stop\"", "\"do\" is one of"),
            ("\"do\": \"detach\"", "has no text \"service\""),
            ("\"do\": \"detach\", \"id\": -1", "has no integer \"id\""),
            ("\"do\": \"destroy\", \"service\": \"s\", \"name\": \"f\"", "has no integer \"id\""),
            ("\"do\": \"replace\", \"id\": 1", "replaces nothing"),
            ("\"do\": \"ring\", \"id\": 1, \"entries\": 1e3", "no integer from 0 to"),
            ("\"do\": \"ring\", \"entries\": 8", "has no integer \"id\""),
            ("\"do\": \"trace\", \"service\": \"s\", \"count\": -1", "no integer from 0 to"),
            ("\"do\": \"traced\", \"service\": \"s\", \"stop\": 1", "neither true nor false"),
            ("\"do\": \"replace\", \"id\": 1, \"function\": \"f.wasm\"", "must be absolute"),
            (
                "\"do\": \"create\", \"name\": \"f\", \"function\": \"f\", \"bound\": 1",
                "neither true nor false",
            ),
            (
                "\"do\": \"attach\", \"id\": 1, \"service\": \"s\", \"place\": 1, \"after\": \"f\"",
                "only one of",
            ),
            ("\"do\": \"detach\", \"service\": 7", "has no text \"service\""),
            (
                "\"do\": \"attach\", \"service\": \"s\", \"name\": \"f\", \"function\": \"f.wasm\"",
                "must be absolute",
            ),
            (
                "\"do\": \"attach\", \"service\": \"s\", \"name\": \"f\", \"function\": \"f\", \"params\": 1",
                "no object",
            ),
            (
                "\"do\": \"attach\", \"service\": \"s\", \"name\": \"f\", \"function\": \"f\", \"params\": {\"a\": -1}",
                "no parameter with an integer",
            ),
            (
                "\"do\": \"attach\", \"service\": \"s\", \"name\": \"f\", \"function\": \"f\", \"deadline_us\": 1e9",
                "no integer from 0 to",
            ),
            (
                "\"do\": \"attach\", \"service\": \"s\", \"name\": \"f\", \"function\": \"f\", \"on_failure\": 1",
                "\"open\" or \"closed\"",
            ),
            (
                "\"do\": \"write\", \"service\": \"s\", \"name\": \"f\", \"register\": \"low\"",
                "no integer \"value\"",
            ),
        ] {
            let found = of_functions(rest).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
        for (bytes, why) in [
            (&b""[..], "send a JSON object"),
            (b"reload", "send a JSON object"),
            (b"{}", "has no command"),
            (b"[1]", "has no command"),
            (b"{\"command\": 7}", "has no command"),
            (b"{\"command\": \"stop\"}", "no such command"),
            (&[b' '; REQUEST_BYTES_MAX + 1], "at most"),
        ] {
            assert!(Request::parse(bytes).unwrap_err().contains(why));
        }
    }

    #[test]
    fn answers_cannot_control_a_terminal() {
        let hostile = json!({
            "message": "two\nlines\u{1b}[2J", "services": [{ "name": "a\nb", "\u{9b}": "\u{7f}" }],
        });
        let sanitize = json!({
            "message": "two\nlines?[2J", "services": [{ "name": "a?b", "?": "?" }],
        });
        assert_eq!(read_answer(hostile.to_string().as_bytes()), Ok(sanitize));
        for wrong in [&b""[..], b"7", b"[]", b"{", b"{\"result\":\xff}"] {
            assert!(read_answer(wrong).unwrap_err().starts_with("not an answer of a server"));
        }
    }
}
