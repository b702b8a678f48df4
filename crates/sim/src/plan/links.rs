//! Accelerators behind links in a plan: which they are, and the faults of their links.

use super::Plan;
use crate::net::LinkFaults;
use crate::rng::Rng;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

impl Plan {
    /// Some accelerators are on another machine: none with sockets, which do not cross a link, and none that scribbles, because
    /// its own machine ends it.
    pub(crate) fn add_links(&mut self, seed: u64) {
        if cfg!(target_family = "wasm") {
            return;
        }
        for (service, spec) in self.setup.topology.services.iter().enumerate() {
            let mut own = Rng::named(seed, &format!("links of {service}"));
            let crosses = spec.sockets.is_empty() && !self.setup.behaviours[service].corrupts();
            if !crosses || !own.chance(400) {
                continue;
            }
            let places = (0..spec.accelerators.len()).filter(|_| own.chance(700));
            self.setup.links.extend(places.map(|place| (service, place)));
        }
        let mut own = Rng::named(seed, "faults of links");
        self.faults.link = LinkFaults {
            short: own.pick(&[0, 100, 900]),
            stall: own.pick(&[0, 5, 50]),
            cut: own.pick(&[0, 1, 5]),
            damage: own.pick(&[0, 0, 2]),
            silence: own.pick(&[0, 0, 2]),
            delay_ns: own.pick(&[(0, 0), (5 * US, 50 * US), (10 * US, MS)]),
            pipe_bytes: own.pick(&[8 << 10, 64 << 10, 1 << 20]),
            heartbeat_ns: own.pick(&[50 * MS, 200 * MS]),
        };
        self.link_rng = own.fork();
    }
}
