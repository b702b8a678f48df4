//! `serval transfer ls`: the scoreboard of the engine of a server.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use server::config::bytes_for_people;
use transfer::service::message::{Answer, Listed};
use transfer::{Activity, Client, DeviceLoad, DeviceQueue};

use super::ENGINE_SILENCE_MAX;
use crate::command::Failure;
use crate::screen::{Screen, Table};

#[derive(Args, Debug)]
pub(super) struct Options {
    /// The engine's socket (transfer.socket of a running server)
    #[arg(long, value_name = "SOCKET")]
    engine: PathBuf,
}

/// Between two looks, from which rates follow.
const INTERVAL: Duration = Duration::from_millis(300);

/// What an engine says.
struct List {
    total: u64,
    entries: Vec<Listed>,
    queues: Vec<DeviceQueue>,
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let mut client = Client::connect(&options.engine).map_err(Failure::run)?;
    let before = ask(&mut client, &options.engine)?;
    let began = Instant::now();
    std::thread::sleep(INTERVAL);
    let list = ask(&mut client, &options.engine)?;
    let devices = devices(&before.queues, &list.queues, began.elapsed());
    screen.show(|| text(screen, &list, &devices), || shown(&list, &devices));
    Ok(())
}

fn ask(client: &mut Client, engine: &Path) -> Result<List, Failure> {
    client.ask_list().map_err(Failure::run)?;
    let deadline = Instant::now() + ENGINE_SILENCE_MAX;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match client.next(left).map_err(Failure::run)? {
            Some(Answer::List { total, entries, queues }) => {
                return Ok(List { total, entries, queues });
            }
            Some(_) => {}
            None => {
                let engine = engine.display();
                let why = format!("the transfer engine at {engine} does not answer");
                return Err(Failure::Run(why));
            }
        }
    }
}

/// A device with its rates.
struct Rated {
    queue: DeviceQueue,
    /// Of files: their file system.
    name: Option<String>,
    taken_per_s: f64,
    given_per_s: f64,
}

fn devices(before: &[DeviceQueue], now: &[DeviceQueue], took: Duration) -> Vec<Rated> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let rated = |queue: &DeviceQueue| {
        let is_same =
            |old: &&DeviceQueue| (old.load.device, old.block) == (queue.load.device, queue.block);
        let old =
            before.iter().find(is_same).map_or((0, 0), |old| (old.load.taken, old.load.given));
        let rate = |now: u64, old: u64| now.saturating_sub(old) as f64 / took.as_secs_f64();
        Rated {
            queue: *queue,
            name: queue.block.map(|block| file_system(block, &mounts)),
            taken_per_s: rate(queue.load.taken, old.0),
            given_per_s: rate(queue.load.given, old.1),
        }
    };
    now.iter().map(rated).collect()
}

/// The file system with this device number: its type and where it is mounted, or the number.
fn file_system(block: u64, mounts: &str) -> String {
    let major = (block >> 8 & 0xfff) | (block >> 32 & !0xfff);
    let minor = (block & 0xff) | (block >> 12 & !0xff);
    let number = format!("{major}:{minor}");
    // ID, parent, number, root, mount point, options, tags, a hyphen, type, source.
    let found = mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(2);
        let is_it = fields.next() == Some(&number);
        let at = fields.nth(1).filter(|_| is_it)?;
        // Users name mount points of FUSE: nothing of a name may control a terminal.
        let at: String = at.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        Some(format!("{} at {at}", after.split(' ').next()?))
    });
    found.unwrap_or(number)
}

fn text(screen: &Screen, list: &List, devices: &[Rated]) -> String {
    let mut text = transfers(screen, list);
    if !devices.is_empty() {
        text.push('\n');
        text.push_str(&table(devices).render(screen));
    }
    text
}

fn table(devices: &[Rated]) -> Table {
    let columns =
        ["device", ">queued", ">running", ">waiting", ">bytes in flight", ">source", ">sink"];
    let mut table = Table::new(&columns);
    for Rated { queue, name, taken_per_s, given_per_s } in devices {
        let DeviceLoad { device, queued, running, bytes_in_flight, .. } = queue.load;
        table.row([
            name.as_ref()
                .map_or(device.name().to_owned(), |name| format!("{}: {name}", device.name())),
            queued.to_string(),
            running.to_string(),
            queue.waiting.to_string(),
            bytes_for_people(bytes_in_flight),
            format!("{}/s", bytes_for_people(*taken_per_s as u64)),
            format!("{}/s", bytes_for_people(*given_per_s as u64)),
        ]);
    }
    table
}

fn transfers(screen: &Screen, List { total, entries, .. }: &List) -> String {
    if entries.is_empty() {
        return "no transfers are in flight\n".to_owned();
    }
    let columns = [">process", ">id", "way", "state", ">read", ">written", ">age"];
    let mut table = Table::new(&columns);
    for entry in entries {
        table.row([
            entry.process.to_string(),
            entry.id.to_string(),
            way(entry),
            state(entry.activity).to_owned(),
            bytes_for_people(entry.read),
            bytes_for_people(entry.written),
            format!("{:.1} s", Duration::from_millis(entry.age_ms).as_secs_f64()),
        ]);
    }
    let mut text = table.render(screen);
    let left = total - entries.len() as u64;
    if left > 0 {
        text.push_str(&format!("  and {left} younger ones\n"));
    }
    text
}

fn shown(List { total, entries, .. }: &List, devices: &[Rated]) -> serde_json::Value {
    let entry = |entry: &Listed| {
        let stages = entry.stages.iter().map(|stage| stage.name());
        json!({
            "process": entry.process, "id": entry.id, "source": entry.source.name(),
            "stages": stages.collect::<Vec<_>>(), "sink": entry.sink.name(),
            "state": state(entry.activity), "read_bytes": entry.read,
            "written_bytes": entry.written, "age_ms": entry.age_ms,
        })
    };
    let device = |Rated { queue, name, taken_per_s, given_per_s }: &Rated| {
        let load = &queue.load;
        json!({
            "device": load.device.name(), "file_system": name, "queued": load.queued,
            "running": load.running, "waiting": queue.waiting,
            "bytes_in_flight": load.bytes_in_flight, "taken_bytes": load.taken,
            "given_bytes": load.given, "taken_bytes_per_second": taken_per_s,
            "given_bytes_per_second": given_per_s,
        })
    };
    json!({
        "in_flight": total, "transfers": entries.iter().map(entry).collect::<Vec<_>>(),
        "devices": devices.iter().map(device).collect::<Vec<_>>(),
    })
}

/// Its source, stages and sink.
fn way(entry: &Listed) -> String {
    let stages = entry.stages.iter().map(|stage| stage.name());
    let parts = [entry.source.name()].into_iter().chain(stages).chain([entry.sink.name()]);
    parts.collect::<Vec<_>>().join(" -> ")
}

fn state(activity: Activity) -> &'static str {
    match activity {
        Activity::Queued => "queued",
        Activity::Running => "running",
        Activity::Waiting => "waits for a socket",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_number_has_the_name_of_its_file_system() {
        let mounts = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
                      30 22 259:260 / /data rw - xfs /dev/nvme0n1p4 rw\n\
                      31 22 0:40 / /media/u/\u{1b}[2J rw - fuse x rw\n";
        assert_eq!(file_system(8 << 8 | 1, mounts), "ext4 at /");
        let high = 259 << 8 | 260 & 0xff | (260 & !0xff) << 12;
        assert_eq!(file_system(high, mounts), "xfs at /data");
        assert_eq!(file_system(1, mounts), "0:1");
        assert_eq!(file_system(40, mounts), "fuse at /media/u/?[2J");
    }
}
