//! Answers to requests about functions.

use onpath::{Direction, Verdict};
use std::os::fd::AsFd as _;

use serde_json::{Map, Value as Json, json};
use sys::PrivateFile;

use super::protocol::{FunctionRequest, spec_json};
use super::{FunctionTask, Told};
use crate::{Caller, FunctionError, FunctionView, Origin, Server, TracedMessage, Uncompiled};

/// The module that has to be compiled before a request is done, and the service on whose path it will be.
pub(super) fn module(server: &Server, task: &FunctionTask) -> Option<(Uncompiled, Option<String>)> {
    let FunctionTask { caller, request, content, .. } = task;
    let (caller, content) = (*caller, content.as_deref());
    match request {
        FunctionRequest::Create { spec, .. } => server
            .functions
            .module_of_new(&server.engine, caller, None, spec, content)
            .map(|module| (module, None)),
        FunctionRequest::Attach { service, spec, .. } => {
            let module = server.functions.module_of_new(
                &server.engine,
                caller,
                Some(service),
                spec,
                content,
            )?;
            Some((module, Some(service.clone())))
        }
        FunctionRequest::AttachCreated { id, service, .. } => {
            let module =
                server.functions.module_of_created(&server.engine, caller, *id, service)?;
            Some((module, Some(service.clone())))
        }
        FunctionRequest::Replace(target, by) => {
            server.functions.module_of_replacement(&server.engine, caller, target, by, content)
        }
        _ => None,
    }
}

/// Executes a request. The answer to one that fails is one sentence.
pub(super) fn answer(
    server: &mut Server,
    caller: Caller,
    request: &FunctionRequest,
    content: Option<Vec<u8>>,
) -> Told {
    if let FunctionRequest::Ring { id, entries, message_bytes } = request {
        return match server.functions.make_ring(
            &server.engine,
            caller,
            *id,
            *entries,
            *message_bytes,
        ) {
            Ok((files, workers)) => {
                Told { answer: json!({ "result": "created", "workers": workers }), files }
            }
            Err(error) => json!({ "error": error.to_string() }).into(),
        };
    }
    if let FunctionRequest::State(target) = request {
        let state = server
            .functions
            .state(&server.engine, caller, target)
            .map_err(|error| error.to_string());
        let file = state.and_then(|state| {
            if state.is_empty() {
                return Err("the function has no state: read its registers".to_owned());
            }
            let file = PrivateFile::of("state", &state).map_err(|error| error.to_string())?;
            Ok((state.len(), file.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?))
        });
        return match file {
            Ok((bytes, file)) => {
                Told { answer: json!({ "result": "read", "bytes": bytes }), files: vec![file] }
            }
            Err(error) => json!({ "error": error }).into(),
        };
    }
    let done = done(server, caller, request, content);
    done.unwrap_or_else(|error| json!({ "error": error.to_string() })).into()
}

fn done(
    server: &mut Server,
    caller: Caller,
    request: &FunctionRequest,
    content: Option<Vec<u8>>,
) -> Result<Json, FunctionError> {
    let user = caller.user;
    match request {
        FunctionRequest::List => {
            let functions: Vec<Json> =
                server.functions.list(&server.engine, caller).iter().map(view).collect();
            Ok(json!({ "result": "listed", "functions": functions }))
        }
        FunctionRequest::Ring { .. } | FunctionRequest::State(_) => {
            unreachable!("its answer has descriptors")
        }
        FunctionRequest::Create { spec, bound } => {
            let id = server.functions.create(&server.engine, caller, spec, content, *bound)?;
            let (name, function) = (&spec.name, &spec.function);
            tracing::info!(user, id, name, function, "function created");
            Ok(json!({ "result": "created", "id": id }))
        }
        FunctionRequest::AttachCreated { id, service, place } => {
            server.functions.attach_created(&server.engine, caller, *id, service, place)?;
            tracing::info!(user, id, service, "function attached");
            Ok(json!({ "result": "attached", "id": id }))
        }
        FunctionRequest::Attach { service, spec, place } => {
            let attached = server.functions.attach_new(
                &server.engine,
                caller,
                service,
                spec,
                content,
                place,
            )?;
            let result = if attached.replaced { "replaced" } else { "attached" };
            let (name, function, id) = (&spec.name, &spec.function, attached.id);
            tracing::info!(user, id, service, name, function, "function {result}");
            Ok(json!({ "result": result, "id": id }))
        }
        FunctionRequest::Replace(target, by) => {
            let origin = server.functions.replace(&server.engine, caller, target, by, content)?;
            tracing::info!(user, "function {target} replaced");
            let note =
                "it is in the configuration file: the next reload gives it what the file says";
            Ok(noted("replaced", origin, note))
        }
        FunctionRequest::Detach(target) => {
            let origin = server.functions.detach(&server.engine, caller, target)?;
            tracing::info!(user, "function {target} detached");
            let note = "it is in the configuration file: the next reload attaches it again";
            Ok(noted("detached", origin, note))
        }
        FunctionRequest::Trace { service, count } => {
            server.functions.begin_trace(&server.engine, caller, service, *count as usize)?;
            Ok(json!({ "result": "tracing" }))
        }
        FunctionRequest::Traced { service, stop } => {
            Ok(match server.functions.end_trace(&server.engine, caller, service, *stop)? {
                Ok(messages) => {
                    let messages: Vec<Json> = messages.iter().map(traced).collect();
                    json!({ "result": "traced", "messages": messages })
                }
                Err(recorded) => json!({ "result": "tracing", "recorded": recorded }),
            })
        }
        FunctionRequest::Destroy(id) => {
            server.functions.destroy(&server.engine, caller, *id)?;
            tracing::info!(user, id, "function destroyed");
            Ok(json!({ "result": "destroyed" }))
        }
        FunctionRequest::Registers(target, action) => {
            let values = server.functions.registers(&server.engine, caller, target, action)?;
            let registers: Map<String, Json> =
                values.into_iter().map(|(name, value)| (name, value.into())).collect();
            Ok(json!({ "result": "done", "registers": registers }))
        }
    }
}

fn traced(message: &TracedMessage) -> Json {
    let TracedMessage { worker, traced, functions } = message;
    let steps = traced.steps.iter().zip(functions).map(|(step, function)| {
        let (verdict, more) = match step.verdict {
            Verdict::Pass => ("pass", Json::Null),
            Verdict::Rewrite => ("rewrite", Json::Null),
            Verdict::Steer(to) => ("steer", to.into()),
            Verdict::Reply => ("reply", Json::Null),
            Verdict::Deliver => ("deliver", Json::Null),
            Verdict::Drop(reason) => ("drop", reason.name().into()),
        };
        json!({
            "function": function, "verdict": verdict, "argument": more, "batch": step.batch,
            "took_ns": step.took_ns,
        })
    });
    let direction = match traced.direction {
        Direction::Requests => "request",
        Direction::Replies => "reply",
    };
    json!({
        "worker": worker, "direction": direction, "bytes": traced.bytes, "at_ns": traced.at_ns,
        "steps": steps.collect::<Vec<_>>(),
    })
}

fn noted(result: &str, origin: Origin, note: &str) -> Json {
    match origin {
        Origin::File => json!({ "result": result, "note": note }),
        _ => json!({ "result": result }),
    }
}

fn view(function: &FunctionView) -> Json {
    let mut shown = spec_json(&function.spec);
    let counters: Map<String, Json> = function
        .counted
        .named()
        .into_iter()
        .map(|(name, _, value)| (name.to_owned(), value.into()))
        .collect();
    let (origin, user, bound) = match function.origin {
        Origin::File => ("file", None, false),
        Origin::Attached(user) => ("attached", Some(user), false),
        Origin::Created { user, connection } => ("created", Some(user), connection.is_some()),
    };
    shown["id"] = function.id.into();
    shown["origin"] = origin.into();
    shown["user"] = user.into();
    shown["bound"] = bound.into();
    shown["service"] = function.service.as_deref().into();
    shown["registers"] = function.registers.clone().into();
    shown["last_failure"] = function.last_failure.as_str().into();
    shown["counters"] = counters.into();
    shown
}
