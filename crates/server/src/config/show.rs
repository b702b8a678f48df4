//! The output of `serval check-config`.

use engine::commands::STAGING_BYTES;
use engine::topology::{AcceleratorKind, Service};
use mqueue::PoolPlan;
use onpath::Param;
use serde_json::{Map, Value as Json, json};

use super::Config;

/// A parameter as requests and answers show it.
pub(crate) fn param_json(value: &Param) -> Json {
    match value {
        Param::Integer(value) => (*value).into(),
        Param::Text(text) => text.as_str().into(),
    }
}

/// The memory of one service's rings on one accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionUse {
    /// Name of the service.
    pub service: String,
    /// Name of the accelerator.
    pub accelerator: String,
    /// Bytes of the region.
    pub bytes: u64,
    /// The sizes that make it up.
    pub arithmetic: String,
}

impl Config {
    /// The region of every service on every accelerator it uses.
    pub fn regions(&self) -> Vec<RegionUse> {
        let mut regions = Vec::new();
        for service in &self.topology.services {
            for (place, index) in service.accelerators.iter().enumerate() {
                let accelerator = &self.topology.accelerators[*index];
                let workers = self.topology.engine.workers;
                let plan = service.region_plan(place, &accelerator.kind, 1, workers);
                regions.push(RegionUse {
                    service: service.name.clone(),
                    accelerator: accelerator.name.clone(),
                    bytes: plan.bytes().expect("the topology was checked"),
                    arithmetic: arithmetic(service, place, &accelerator.kind, plan.pools),
                });
            }
        }
        regions
    }

    /// Everything as one JSON value: `settings` in the structure of the file, `origins` of the values that are not
    /// defaults, `regions`, `warnings`.
    pub fn json(&self) -> Json {
        let mut tree = Map::new();
        let mut origins = Map::new();
        for setting in &self.settings {
            let mut at = &mut tree;
            for part in setting.section.split('.').filter(|part| !part.is_empty()) {
                let table = at.entry(part).or_insert_with(|| Json::Object(Map::new()));
                at = table.as_object_mut().expect("tables and keys have different names");
            }
            at.insert(setting.key.clone(), setting.value.clone());
            if setting.origin != super::Origin::Default {
                let path = format!("{}.{}", setting.section, setting.key);
                let path = path.trim_start_matches('.').to_owned();
                origins.insert(path, setting.origin.to_string().into());
            }
        }
        let region = |r: &RegionUse| {
            json!({
                "service": r.service, "accelerator": r.accelerator,
                "bytes": r.bytes, "arithmetic": r.arithmetic,
            })
        };
        let regions: Vec<Json> = self.regions().iter().map(region).collect();
        json!({ "settings": tree, "origins": origins, "regions": regions, "warnings": self.warnings })
    }
}

/// `4 mqueues x (RX 64 slots x 1024 B + TX 64 slots x 1024 B) + 1 x pool of 262144 B`: payload room; headers, rounding and status words make
/// up the rest of the region.
fn arithmetic(
    service: &Service,
    place: usize,
    kind: &AcceleratorKind,
    pools: Option<PoolPlan>,
) -> String {
    let part = |(index, mqueue): (usize, &mqueue::MqueuePlan)| {
        let ring = |name: &str, ring: &mqueue::RingPlan| {
            let slots = format!("{name} {} slots x {} B", mqueue.depth, ring.inline_bytes());
            match ring.arena_bytes {
                0 => slots,
                arena => format!("{slots} + arena {arena} B"),
            }
        };
        let rings = format!("{} + {}", ring("RX", &mqueue.rx), ring("TX", &mqueue.tx));
        match index.checked_sub(1).and_then(|backend| service.backends.get(backend)) {
            Some(backend) => format!("{}: {rings}", backend.name),
            None => rings,
        }
    };
    let parts: Vec<String> = service.mqueue_plans(place).iter().enumerate().map(part).collect();
    let commands = match kind {
        AcceleratorKind::Cpu { .. } => String::new(),
        AcceleratorKind::Process { .. } => {
            format!(" + command rings and {STAGING_BYTES} B staging")
        }
    };
    let pools = pools.map_or(String::new(), |PoolPlan { workers, bytes }| {
        format!(" + {workers} x pool of {bytes} B")
    });
    format!("{} mqueues x ({}){commands}{pools}", service.mqueues_on(place), parts.join("; "))
}

/// Bytes in a readable unit: `552.3 KiB`.
pub fn bytes_for_people(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} GiB")
}

#[cfg(test)]
mod tests {
    use super::super::Overrides;
    use super::*;

    /// The configuration of one service with `mqueues` small mqueues on an accelerator of this kind, without pools.
    fn parse(kind: &str, mqueues: u32) -> Result<Config, super::super::ConfigError> {
        let text = format!(
            "schema = 1\n[limits]\nregion_mib = 1\n[[accelerator]]\nname = \"own\"\nkind = \"{kind}\"\n\
             [[service]]\nname = \"a\"\nlisten = \"udp://127.0.0.1:9000\"\naccelerator = \"own\"\nkernel = \"echo\"\n\
             mqueues = {mqueues}\nslots = 1\nmax_message_bytes = 8\nrings = \"doorbell\"\n"
        );
        Config::parse("test", &text, "".as_ref(), &Overrides::default())
    }

    #[test]
    fn command_rings_count_in_the_region_of_a_runtime_and_its_limit() {
        let region = |kind| parse(kind, 1).unwrap().regions().remove(0);
        let (cpu, process) = (region("cpu"), region("process"));
        let commands = process.bytes - cpu.bytes;
        assert!(commands > STAGING_BYTES && process.arithmetic.contains("command rings"));
        // The largest region without command rings is too large with them.
        let most = (1..).take_while(|mqueues| parse("cpu", *mqueues).is_ok()).last().unwrap();
        let largest = parse("cpu", most).unwrap().regions().remove(0);
        assert!(largest.bytes + commands > 1 << 20, "one more mqueue takes more than the rings");
        let refused = parse("process", most).unwrap_err().to_string();
        assert!(refused.contains("limits.region_mib = 1"), "{refused}");
    }
}
