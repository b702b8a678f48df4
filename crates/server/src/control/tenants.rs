//! Requests about tenants, and the answers to them.

use engine::topology::Tenant;
use serde_json::{Map, Value as Json, json};

use super::Told;
use super::fields::{TEXT_BYTES_MAX, text};
use crate::config::{is_tenant_name, set_tenant_value, tenant_values};
use crate::{Caller, Server, TenantView, tenants};

/// Most users of a tenant.
const USERS_MAX: usize = 64;

/// A request about tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantRequest {
    /// Which there are, and what they have used.
    List,
    /// Add a tenant.
    Add(TenantChange),
    /// Change some of a tenant's values.
    Set(TenantChange),
    /// Remove a tenant.
    Remove(String),
}

/// Values of a tenant; others stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantChange {
    /// The tenant.
    pub name: String,
    /// Keys of `[[tenant]]` with their values.
    pub values: Vec<(String, u64)>,
    /// See [`Tenant::users`].
    pub users: Option<Vec<u32>>,
}

impl TenantRequest {
    pub(super) fn parse(request: &Json) -> Result<Self, String> {
        match request.get("do").and_then(Json::as_str) {
            Some("list") => Ok(Self::List),
            Some("add") => parse_change(request).map(Self::Add),
            Some("set") => parse_change(request).map(Self::Set),
            Some("remove") => text(request, "name", TEXT_BYTES_MAX).map(Self::Remove),
            _ => Err("\"do\" is one of list, add, set and remove".to_owned()),
        }
    }

    pub(super) fn json(&self) -> Json {
        let (verb, mut request) = match self {
            Self::List => ("list", json!({})),
            Self::Add(change) => ("add", change_json(change)),
            Self::Set(change) => ("set", change_json(change)),
            Self::Remove(name) => ("remove", json!({ "name": name })),
        };
        request["command"] = "tenants".into();
        request["do"] = verb.into();
        request
    }

    /// What the audit line says.
    pub(super) fn verb(&self) -> &'static str {
        match self {
            Self::List => "tenant list",
            Self::Add(_) => "tenant add",
            Self::Set(_) => "tenant set",
            Self::Remove(_) => "tenant remove",
        }
    }

    /// The tenant that it changes.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::List => "",
            Self::Add(change) | Self::Set(change) => &change.name,
            Self::Remove(name) => name,
        }
    }
}

fn parse_change(request: &Json) -> Result<TenantChange, String> {
    let name = text(request, "name", TEXT_BYTES_MAX)?;
    if !is_tenant_name(&name) {
        return Err(format!("{name:?} cannot be a name: 1 to 64 letters, digits, `_` and `-`"));
    }
    let mut values = Vec::new();
    match request.get("values") {
        None | Some(Json::Null) => {}
        Some(Json::Object(given)) => {
            for (key, value) in given {
                let value = value.as_u64().ok_or_else(|| format!("{key:?} is no integer"))?;
                set_tenant_value(&mut Tenant::new(&name), key, value)?;
                values.push((key.clone(), value));
            }
        }
        Some(_) => return Err("\"values\" is no object".to_owned()),
    }
    let users = match request.get("users") {
        None | Some(Json::Null) => None,
        Some(Json::Array(users)) if users.len() <= USERS_MAX => {
            // The greatest number stands for no user.
            let user = |user: &Json| {
                let number = user.as_u64().and_then(|user| u32::try_from(user).ok());
                number.filter(|user| *user != u32::MAX)
            };
            let users: Option<Vec<u32>> = users.iter().map(user).collect();
            Some(users.ok_or("\"users\" has something that is no user's number")?)
        }
        Some(_) => return Err(format!("\"users\" is no list of at most {USERS_MAX} users")),
    };
    Ok(TenantChange { name, values, users })
}

fn change_json(change: &TenantChange) -> Json {
    let values: Map<String, Json> =
        change.values.iter().map(|(key, value)| (key.clone(), (*value).into())).collect();
    json!({ "name": change.name, "values": values, "users": change.users })
}

/// Executes a request. The answer to one that fails is one sentence.
pub(super) fn answer(server: &mut Server, caller: Caller, request: &TenantRequest) -> Told {
    done(server, caller, request).unwrap_or_else(|error| json!({ "error": error })).into()
}

fn done(server: &mut Server, caller: Caller, request: &TenantRequest) -> Result<Json, String> {
    let note = "the next reload gives tenants what the configuration file says";
    match request {
        TenantRequest::List => {
            let tenants: Vec<Json> =
                tenants::list(&server.engine, caller).iter().map(view).collect();
            Ok(json!({ "result": "listed", "tenants": tenants }))
        }
        TenantRequest::Add(change) | TenantRequest::Set(change) => {
            let is_new = matches!(request, TenantRequest::Add(_));
            let before = server.engine.tenant(&change.name).cloned().filter(|_| !is_new);
            let mut tenant = before.unwrap_or_else(|| Tenant::new(&change.name));
            for (key, value) in &change.values {
                set_tenant_value(&mut tenant, key, *value)?;
            }
            if let Some(users) = &change.users {
                tenant.users.clone_from(users);
            }
            let ended = server.put_tenant(caller, tenant, is_new);
            let ended = ended.map_err(|error| error.to_string())?;
            let result = if is_new { "added" } else { "set" };
            Ok(json!({ "result": result, "note": note, "ended": ended }))
        }
        TenantRequest::Remove(name) => {
            server.remove_tenant(caller, name).map_err(|error| error.to_string())?;
            Ok(json!({ "result": "removed", "note": note }))
        }
    }
}

fn view(of: &TenantView) -> Json {
    let mut shown: Map<String, Json> = tenant_values(&of.tenant)
        .into_iter()
        .map(|(key, value)| (key.into(), value.into()))
        .collect();
    let used = &of.used;
    shown.insert("name".into(), of.tenant.name.as_str().into());
    shown.insert("id".into(), of.id.into());
    shown.insert("users".into(), of.tenant.users.clone().into());
    shown.insert("services".into(), of.services.clone().into());
    shown.insert(
        "used".into(),
        json!({
            "mqueues": of.mqueues, "connections": used.connections, "outstanding": used.outstanding,
            "charged": used.charged, "function_ns": used.function_ns, "skipped": used.skipped,
            "limited": used.limited, "refused_connections": used.refused_connections,
        }),
    );
    shown.into()
}
