//! Answers to requests about functions.

use serde_json::{Map, Value as Json, json};

use super::protocol::{FunctionRequest, RegisterAction, spec_json};
use crate::{FunctionError, FunctionView, Server};

/// Executes a request. The answer to one that fails is one sentence.
pub(super) fn answer(server: &mut Server, request: &FunctionRequest) -> Json {
    done(server, request).unwrap_or_else(|error| json!({ "error": error.to_string() }))
}

fn done(server: &mut Server, request: &FunctionRequest) -> Result<Json, FunctionError> {
    match request {
        FunctionRequest::List => {
            let functions: Vec<Json> = server.functions().iter().map(view).collect();
            Ok(json!({ "result": "listed", "functions": functions }))
        }
        FunctionRequest::Attach { service, spec, place } => {
            let replaced = server.attach_function(service, spec, *place)?;
            let result = if replaced { "replaced" } else { "attached" };
            tracing::info!(
                service,
                name = spec.name,
                function = spec.function,
                "function {result}"
            );
            Ok(json!({ "result": result }))
        }
        FunctionRequest::Detach { service, name } => {
            server.detach_function(service, name)?;
            tracing::info!(service, name, "function detached");
            Ok(json!({ "result": "detached" }))
        }
        FunctionRequest::Registers { service, name, action } => {
            let values = match action {
                RegisterAction::Read => server.read_function(service, name)?,
                RegisterAction::Reset => server.reset_function(service, name)?,
                RegisterAction::Write(register, value) => {
                    server.write_function(service, name, register, *value)?
                }
            };
            let registers: Map<String, Json> =
                values.into_iter().map(|(name, value)| (name, value.into())).collect();
            Ok(json!({ "result": "done", "registers": registers }))
        }
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
    shown["service"] = function.service.as_str().into();
    shown["registers"] = function.registers.clone().into();
    shown["last_failure"] = function.last_failure.as_str().into();
    shown["counters"] = counters.into();
    shown
}
