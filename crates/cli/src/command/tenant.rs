//! `serval tenant`: the tenants of a running server.

use clap::{Args, Subcommand};
use serde_json::Value as Json;
use server::control::protocol::{TenantChange, TenantRequest};

use super::Failure;
use super::function::{At, show};
use crate::screen::{Screen, Table};

pub(super) const HELP: &str = "\
A tenant owns services, and has a weight, rates and quotas. add, set and remove change a running
server without touching its services; the next reload gives tenants what the configuration file
says. The engine's user and root may do that; other users list the tenants that name them.

Examples:
  serval tenant list
  serval tenant add shop weight=2 messages_per_s=500000
  serval tenant set shop outstanding=4096 users=1001,1002
  serval tenant remove shop

Exit codes: 0 done, 1 the server does not answer or refuses; the sentence says why.";

/// A value, or the users of a tenant.
#[derive(Clone, Debug)]
pub(super) enum Given {
    Value(String, u64),
    Users(Vec<u32>),
}

#[derive(Args, Debug)]
pub(super) struct Change {
    /// The tenant
    name: String,

    /// Keys of [[tenant]] with their values, such as weight=2; users=1001,1002, or users= for none
    #[arg(value_name = "KEY=VALUE", value_parser = given)]
    values: Vec<Given>,

    #[command(flatten)]
    at: At,
}

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// List the tenants, with what they use
    #[command(after_help = "Examples:\n  serval tenant list")]
    List(At),

    /// Add a tenant
    #[command(after_help = "Examples:\n  serval tenant add shop weight=2 messages_per_s=500000")]
    Add(Change),

    /// Change values of a tenant; others stay
    #[command(after_help = "Examples:\n  serval tenant set shop weight=3 users=1001")]
    Set(Change),

    /// Remove a tenant that owns no service
    #[command(after_help = "Examples:\n  serval tenant remove shop")]
    Remove {
        /// The tenant
        name: String,

        #[command(flatten)]
        at: At,
    },
}

fn given(text: &str) -> Result<Given, String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    if key == "users" {
        let users = value.split(',').filter(|user| !user.is_empty());
        let users: Result<_, _> = users.map(str::parse).collect();
        let users = users.map_err(|_| "users are numbers, separated by commas".to_owned())?;
        return Ok(Given::Users(users));
    }
    let value = value.replace('_', "").parse().map_err(|_| format!("{value:?} is no integer"))?;
    Ok(Given::Value(key.to_owned(), value))
}

pub(super) fn run(screen: &Screen, verb: &Verb) -> Result<(), Failure> {
    let change = |change: &Change| {
        let mut wanted = TenantChange { name: change.name.clone(), ..TenantChange::default() };
        for given in &change.values {
            match given {
                Given::Value(key, value) => wanted.values.push((key.clone(), *value)),
                Given::Users(users) => wanted.users = Some(users.clone()),
            }
        }
        wanted
    };
    let (at, request) = match verb {
        Verb::List(at) => (at, TenantRequest::List),
        Verb::Add(given) => (&given.at, TenantRequest::Add(change(given))),
        Verb::Set(given) => (&given.at, TenantRequest::Set(change(given))),
        Verb::Remove { name, at } => (at, TenantRequest::Remove(name.clone())),
    };
    let answer = at.connect()?.tenants(request)?;
    show(screen, &answer, text);
    Ok(())
}

fn text(screen: &Screen, answer: &Json) -> String {
    if let Some(tenants) = answer["tenants"].as_array() {
        return list(screen, tenants);
    }
    let result = answer["result"].as_str().unwrap_or("done");
    match answer["note"].as_str() {
        Some(note) => format!("{result}; {note}\n"),
        None => format!("{result}\n"),
    }
}

fn list(screen: &Screen, tenants: &[Json]) -> String {
    let columns = [
        "tenant",
        ">weight",
        ">messages/s",
        ">bytes/s",
        ">in flight",
        ">connections",
        ">mqueues",
        ">waited",
        "services",
    ];
    let mut table = Table::new(&columns);
    for tenant in tenants {
        let number = |value: &Json| value.as_u64().unwrap_or(0);
        let limit = |key: &str| match number(&tenant[key]) {
            0 => "any".to_owned(),
            limit => limit.to_string(),
        };
        let used = |key: &str| format!("{} of {}", number(&tenant["used"][key]), limit(key));
        // Turns of workers: because of the shares of others, or because of a limit.
        let waited =
            ["skipped", "limited"].map(|why| number(&tenant["used"][why])).iter().sum::<u64>();
        let services = tenant["services"].as_array().into_iter().flatten();
        let services: Vec<_> = services.filter_map(Json::as_str).collect();
        table.row([
            tenant["name"].as_str().unwrap_or_default().to_owned(),
            number(&tenant["weight"]).to_string(),
            limit("messages_per_s"),
            limit("bytes_per_s"),
            used("outstanding"),
            used("connections"),
            used("mqueues"),
            waited.to_string(),
            services.join(" "),
        ]);
    }
    table.render(screen)
}
