//! `[[tenant]]`, and the tenants that services name.

use std::path::{Path, PathBuf};

use engine::topology::{
    AcceleratorKind, Confinement, DEFAULT_TENANT, NAMESPACES, TENANTS_MAX, Tenant,
};

use super::diagnostic::Problem;
use super::fields::read_fields;
use super::function::read_users;
use super::reader::{Places, Report, Section, text_of, wrong_type};
use super::tables::named_section;
use super::tree::{Table, Value};
use super::words::nearest;

/// The tenants of the file, and their places.
pub(super) fn read_tenants(
    report: &mut Report<'_>,
    tables: &[&Table],
) -> (Vec<Tenant>, Vec<Places>) {
    let mut taken = Vec::new();
    let read = |(index, table): (usize, &&Table)| {
        let (mut section, name) =
            named_section(report, table, "tenant", "tenant", index, &mut taken);
        let mut tenant = Tenant::new(&name);
        read_fields(report, &mut section, &mut tenant);
        tenant.users = read_users(report, &mut section, "users");
        if name == DEFAULT_TENANT && !tenant.users.is_empty() {
            let what = format!("the tenant \"{DEFAULT_TENANT}\" is the operator's own");
            let right = "remove `users`, or give these users another tenant";
            report.problem(Problem::new(section.place("users"), what, right));
        }
        tenant.confinement = read_confinement(report, &mut section);
        if name == DEFAULT_TENANT && tenant.confinement != Confinement::default() {
            let what = format!("the tenant \"{DEFAULT_TENANT}\" is in the engine's surroundings");
            let right = "remove `netns`, `user` and `namespaces`";
            report.problem(Problem::new(section.header(), what, right));
        }
        (tenant, section.finish(report))
    };
    let read = tables.iter().enumerate().map(read).unzip();
    if tables.len() > TENANTS_MAX {
        let what = format!("{} tenants are more than {TENANTS_MAX}", tables.len());
        report.problem(Problem::new(tables[TENANTS_MAX].span, what, "remove some"));
    }
    read
}

/// Network namespaces with a name: where `ip netns add` puts them.
const NETNS_FOLDER: &str = "/run/netns";

fn read_confinement(report: &mut Report<'_>, section: &mut Section<'_>) -> Confinement {
    let given = section.text(report, "netns", "\"blue\"").filter(|(text, _)| !text.is_empty());
    let netns = given.and_then(|(text, span)| {
        let is_name = !matches!(&*text, "." | "..") && !text.contains(['/', '\0']);
        if !is_name && !Path::new(&text).is_absolute() {
            let what = format!("{text:?} is no network namespace");
            report.problem(Problem::new(span, what, "write its name, or an absolute path"));
            return None;
        }
        Some(if is_name { Path::new(NETNS_FOLDER).join(text) } else { PathBuf::from(text) })
    });
    let shown = netns.as_ref().map_or(String::new(), |path| path.display().to_string());
    section.record(report, "netns", shown);
    let user = section.integer(report, "user", 0..=u64::from(u32::MAX) - 1, 0) as u32;
    let mut namespaces = Vec::new();
    if let Some(entry) = section.entry("namespaces") {
        match &entry.node.value {
            Value::Array(items) => {
                for item in items {
                    let Some((text, span)) = text_of(report, "namespaces", item, "\"pid\"") else {
                        continue;
                    };
                    match NAMESPACES.iter().find(|known| **known == text) {
                        Some(known) => namespaces.push(*known),
                        None => {
                            let what = format!("{text:?} is no namespace of a process");
                            let right = format!("there are {}", NAMESPACES.join(", "));
                            report.problem(Problem::new(span, what, right));
                        }
                    }
                }
            }
            _ => wrong_type(report, "namespaces", &entry.node, "a list such as [\"pid\"]"),
        }
    }
    namespaces.sort_unstable();
    namespaces.dedup();
    section.record(report, "namespaces", namespaces.clone());
    Confinement { netns, user: (user > 0).then_some(user), namespaces }
}

pub(crate) fn is_tenant_name(text: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    !text.is_empty() && text.len() <= 64 && text.chars().all(letter)
}

/// The tenant that a service names. If the file defines tenants it is one of them.
pub(super) fn read_tenant(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    defined: &[Tenant],
) -> String {
    let given = section.text(report, "tenant", "\"default\"");
    let tenant = given.and_then(|(text, span)| {
        if !is_tenant_name(&text) {
            let what = format!("\"{text}\" is not a valid tenant name");
            report.problem(Problem::new(span, what, "1 to 64 letters, digits, `_` and `-`"));
            return None;
        }
        let names = || defined.iter().map(|tenant| tenant.name.as_str());
        if text != DEFAULT_TENANT && !defined.is_empty() && names().all(|name| name != text) {
            let what = format!("there is no [[tenant]] \"{text}\"");
            let right = match nearest(&text, names()) {
                Some(near) => format!("did you mean \"{near}\"? Or add it"),
                None => "add it, or name one that is there".to_owned(),
            };
            report.problem(Problem::new(span, what, right));
        }
        Some(text)
    });
    let tenant = tenant.unwrap_or_else(|| DEFAULT_TENANT.to_owned());
    section.record(report, "tenant", tenant.clone());
    tenant
}

/// Kernels of tenants other than the default run in processes of their own.
pub(super) fn check_isolated(
    report: &mut Report<'_>,
    section: &Section<'_>,
    tenant: &str,
    kinds: &[&AcceleratorKind],
) {
    let inside = kinds.iter().any(|kind| matches!(kind, AcceleratorKind::Cpu { .. }));
    if tenant != DEFAULT_TENANT && inside {
        let what =
            format!("the kernel of tenant \"{tenant}\" would run inside the engine's process");
        let right = "name an accelerator of kind = \"process\" or \"cuda\"";
        let key = if section.peek("accelerator").is_some() { "accelerator" } else { "tenant" };
        report.problem(Problem::new(section.place(key), what, right));
    }
}
