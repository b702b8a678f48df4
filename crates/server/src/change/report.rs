//! The result of a change.

use std::path::PathBuf;

use super::departure::DepartureOutcome;
use super::plan::{EntryChange, Plan, ServiceAction};

/// The result of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeReport {
    /// Every service of the new topology in its order, then the removed ones.
    pub services: Vec<ServiceChange>,
    /// Keys of `[engine]` and `[limits]` with another value, and those of lists that have changed, such as `accelerator`.
    pub settings: Vec<&'static str>,
    /// What has changed in these lists.
    pub entries: Vec<EntryChange>,
}

/// The result for one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceChange {
    /// Its name.
    pub name: String,
    /// What was done.
    pub action: ServiceAction,
    /// Requests of the removed version that were not answered within `drain_ms`.
    pub unanswered: u64,
    /// A part of the removed version did not end and is left behind, or is still ending.
    pub left_behind: bool,
    /// Why a runtime that could start only after the change does not serve. The start is tried again.
    pub not_started: Option<String>,
    /// The kernel file, if its content has changed since the service started.
    pub rebuilt: Option<PathBuf>,
}

impl ChangeReport {
    /// Whether nothing had to be changed.
    pub fn is_empty(&self) -> bool {
        self.settings.is_empty()
            && self.services.iter().all(|s| s.action == ServiceAction::Unchanged)
    }
}

pub(super) fn report(
    plan: Plan,
    outcomes: &[DepartureOutcome],
    rebuilt: &[(String, PathBuf)],
) -> ChangeReport {
    let service = |(name, action): (String, ServiceAction)| {
        let outcome = outcomes.iter().find(|outcome| outcome.name == name);
        let rebuilt = rebuilt.iter().find(|(of, _)| *of == name);
        ServiceChange {
            action,
            rebuilt: rebuilt.map(|(_, file)| file.clone()),
            unanswered: outcome.map_or(0, |o| o.unanswered),
            left_behind: outcome.is_some_and(|o| o.left_behind),
            not_started: outcome.and_then(|o| o.not_started.clone()),
            name,
        }
    };
    let services = plan.services.into_iter().map(service).collect();
    ChangeReport { services, settings: plan.settings, entries: plan.entries }
}
