//! `peer_address`: kernels that see where requests come from.

use builtins::PEER_BYTES;
use engine::topology::{Dispatch, Replies, Service};
use onpath::Spec;
use onpath::spec::FUNCTIONS_MAX;

use super::diagnostic::Problem;
use super::kernel::Builtin;
use super::reader::{Report, Section};

/// The built-in function that does it, and its name in the chain.
const NAME: &str = "peer-address";

/// Reads the key. The function is behind those of the file: they see requests as clients send them.
pub(super) fn read_peer_address(
    report: &mut Report<'_>,
    section: &mut Section<'_>,
    service: &mut Service,
    kernel: Option<&Builtin>,
) {
    if !section.boolean(report, "peer_address", false) {
        return;
    }
    let mut problem = |what: String, right: &str| {
        report.problem(Problem::new(section.place("peer_address"), what, right.to_owned()));
    };
    if let Some(builtin) = kernel {
        let what = format!("the kernel \"{}\" takes no addresses of clients", builtin.name);
        problem(what, "remove `peer_address`, or choose a kernel of yours");
    }
    if service.listen.is_empty() && service.memory_ports.is_empty() {
        let what = "`peer_address` is for requests, and the service has no ports for them".into();
        problem(what, "remove it, or add `listen`");
    }
    if service.functions.iter().any(|function| function.name == NAME) {
        let what = format!("the name \"{NAME}\" is that of the function that `peer_address` adds");
        problem(what, "give the function another name");
    }
    if matches!(service.dispatch, Dispatch::KeyHash(_)) {
        let what = "with `peer_address` the dispatcher would read the address for the key".into();
        problem(what, "remove one of `peer_address` and `dispatch = \"key-hash\"`");
    }
    if service.functions.len() >= FUNCTIONS_MAX {
        let what = format!("`peer_address` adds a function, and the service has {FUNCTIONS_MAX}");
        problem(what, "use one less");
    }
    let (most, framing) = (service.max_message_bytes as usize, service.framing);
    // Requests that a framing can have only with a greater maximum would all be too long.
    let reply = if service.replies == Replies::One { service.max_reply_bytes as usize } else { 1 };
    let left = most.saturating_sub(PEER_BYTES);
    if left == 0 || framing.check(most, reply).is_ok() && framing.check(left, reply).is_err() {
        let what = format!(
            "with `peer_address` requests have at most {left} bytes: {PEER_BYTES} of max_message_bytes = {most} are the address"
        );
        problem(what, "raise `max_message_bytes` by 32");
    }
    service.functions.push(Spec::new(NAME, NAME));
}
