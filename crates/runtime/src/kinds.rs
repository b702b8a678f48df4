//! The kinds of accelerators. Everything that knows kinds asks this registry: the configuration and its documentation,
//! `check-config`, `doctor`, `attach`, and the supervisor that starts runtimes and lets services share a device.
//!
//! A kind is one file in `kinds/` and one line in [`KINDS`]. Its kernels run in a runtime, a process of its own that
//! attaches to the engine; only `cpu` runs inside the engine.

mod cpu;
mod cuda;
mod process;
pub(crate) mod remote;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use engine::topology::{DeviceSpec, Rings, Service};

use crate::Device;
use crate::kernel_file::Target;

pub use cuda::GpuDevice;
pub use process::HostDevice;

/// Every kind, in the order of the documentation.
pub const KINDS: &[&dyn Kind] = &[&cpu::Cpu, &process::Process, &cuda::Cuda, &remote::Remote];

/// A kind of accelerator.
pub trait Kind: Sync {
    /// `kind` in a configuration.
    fn name(&self) -> &'static str;

    /// What it is, for the documentation: a noun phrase.
    fn summary(&self) -> &'static str;

    /// Which common keys of an accelerator it supports.
    fn flags(&self) -> Flags;

    /// The keys that it has besides the common ones.
    fn keys(&self) -> &'static [Key] {
        &[]
    }

    /// The keys that it has besides the common ones and are texts. All of them are required.
    fn texts(&self) -> &'static [TextKey] {
        &[]
    }

    /// The device it uses, if runtimes of several accelerators must not use it side by side unasked: services of one
    /// tenant on one accelerator then share a process, whose [`Device`] gets the jobs of all of them, and a new runtime waits
    /// until the old one is gone. Kinds that use
    /// the same device return the same key, such as `GPU 0`.
    fn exclusive_key(&self, _device: &DeviceSpec) -> Option<String> {
        None
    }

    /// What such a device is called, for messages.
    fn device_noun(&self) -> &'static str {
        "device"
    }

    /// The ring protocol behind `rings = "auto"`.
    fn default_rings(&self) -> Rings {
        Rings::Auto
    }

    /// Whether the library of its kernels takes bundles.
    fn takes_bundles(&self) -> bool {
        false
    }

    /// What kernel files are compiled for.
    fn target(&self) -> Target {
        Target::Host
    }

    /// Where kernels run, for `serval doctor`; `None`: on host threads.
    fn place(&self, _device: &DeviceSpec) -> Option<String> {
        (!self.flags().host_threads).then(|| format!("a device of kind {:?}", self.name()))
    }

    /// Whether an accelerator of this kind that the engine starts can run `kernel` for a service. The configuration refuses
    /// a service that it cannot run with the error: what is wrong, and what would be right.
    fn check(&self, _service: &Service, _kernel: &str) -> Result<(), (String, String)> {
        Ok(())
    }

    /// The file with a secret that the device needs, and why it cannot be used as it is here, in one sentence. For `serval check-config`:
    /// [`Device::start`] refuses it for the same reason.
    fn secret(&self, _device: &DeviceSpec) -> Option<(PathBuf, Result<(), String>)> {
        None
    }

    /// Makes what runs the blocks. Runs in the runtime's process. The error is one sentence.
    fn device(&self, device: &DeviceSpec, options: Options) -> Result<Box<dyn Device>, String>;
}

/// What a kind supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Its kernels run inside the engine: it has `placement`, and no runtime.
    pub in_engine: bool,
    /// Its blocks share host threads: it has `threads` and `cores`.
    pub host_threads: bool,
    /// Its blocks have stacks of their own: it has `stack_kib`.
    pub stack_kib: bool,
    /// Its blocks run on another machine: `hang_ms` is given there, and a service does not wait for its first start.
    pub elsewhere: bool,
}

/// A key that one kind has: a text.
#[derive(Clone, Debug)]
pub struct TextKey {
    /// Its name.
    pub name: &'static str,
    /// A valid value.
    pub example: &'static str,
    /// What is valid, for the documentation: a noun phrase.
    pub form: &'static str,
    /// Whether a value is valid.
    pub is_valid: fn(&str) -> bool,
    /// What it does, for the documentation.
    pub what: &'static str,
}

impl TextKey {
    /// Whether it may have this value; if not, what is wrong and what would be right.
    pub fn check(&self, value: &str) -> Result<(), (String, String)> {
        if (self.is_valid)(value) {
            return Ok(());
        }
        let right = format!("must be {}, such as {:?}", self.form, self.example);
        Err((format!("`{}` is {value:?}", self.name), right))
    }
}

/// A key that one kind has: a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// What is counted, for the documentation.
    pub unit: &'static str,
    /// What may be given.
    pub range: RangeInclusive<u64>,
    /// What holds if nothing is given.
    pub default: u64,
    /// Values are multiples of this, which is called …
    pub multiple_of: u64,
    /// … so.
    pub multiple: &'static str,
    /// How `serval attach` takes it.
    pub flag: &'static str,
    /// What it does, for the documentation.
    pub what: &'static str,
}

impl Key {
    /// Whether it may have this value; if not, what is wrong and what would be right.
    pub fn check(&self, value: u64) -> Result<(), (String, String)> {
        let Self { name, range, multiple_of, multiple, .. } = self;
        if !range.contains(&value) {
            let right = format!("must be in [{}, {}]", range.start(), range.end());
            return Err((format!("`{name}` is {value}"), right));
        }
        if value % multiple_of != 0 {
            let what = format!("{value} {name} are not whole {multiple}");
            return Err((what, format!("write a multiple of {multiple_of}")));
        }
        Ok(())
    }
}

/// How a runtime runs its blocks, whatever its kind.
#[derive(Clone, Debug)]
pub struct Options {
    /// Host threads that share the blocks; 0: as many as suit them.
    pub threads: usize,
    /// Cores to pin them to; empty: not pinned.
    pub cores: Vec<usize>,
    /// Stack of each block in KiB.
    pub stack_kib: usize,
    /// A block that works on one message for longer hangs.
    pub hung_after: Duration,
}

/// The kind of this name.
pub fn find(name: &str) -> Option<&'static dyn Kind> {
    KINDS.iter().copied().find(|kind| kind.name() == name)
}

/// A device of a kind with these values of its own keys; the other numbers have their defaults. The error is one sentence.
pub fn device_spec(kind: &str, given: &[(String, String)]) -> Result<DeviceSpec, String> {
    let names = || KINDS.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
    let found =
        find(kind).ok_or_else(|| format!("no accelerator kind {kind:?}: there are {}", names()))?;
    let sentence = |(what, right): (String, String)| format!("{what}: {right}");
    for (name, value) in given {
        if let Some(key) = found.keys().iter().find(|key| key.name == name) {
            let number =
                value.parse().map_err(|_| format!("{name} is {value:?}: write a number"))?;
            key.check(number).map_err(sentence)?;
        } else if let Some(key) = found.texts().iter().find(|key| key.name == name) {
            key.check(value).map_err(sentence)?;
        } else {
            return Err(format!("accelerators of kind {kind:?} have no key {name:?}"));
        }
    }
    let last = |key: &str| given.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value);
    let number = |key: &Key| last(key.name).and_then(|value| value.parse().ok());
    let settings =
        found.keys().iter().map(|key| (key.name, number(key).unwrap_or(key.default))).collect();
    let text = |key: &TextKey| {
        let missing = || format!("accelerators of kind {kind:?} need {}={}", key.name, key.example);
        Ok((key.name, last(key.name).ok_or_else(missing)?.clone()))
    };
    let texts = found.texts().iter().map(text).collect::<Result<_, String>>()?;
    Ok(DeviceSpec { kind: found.name(), bundles: found.takes_bundles(), settings, texts })
}

/// See [`Kind::default_rings`].
pub fn default_rings(device: &DeviceSpec) -> Rings {
    find(device.kind).map_or(Rings::Auto, Kind::default_rings)
}

/// See [`Kind::takes_bundles`]; of the kind with this name.
pub fn takes_bundles(kind: &str) -> bool {
    find(kind).is_some_and(Kind::takes_bundles)
}

/// See [`Flags::elsewhere`].
pub fn is_elsewhere(device: &DeviceSpec) -> bool {
    find(device.kind).is_some_and(|kind| kind.flags().elsewhere)
}

/// See [`Kind::target`].
pub fn target(device: &DeviceSpec) -> Target {
    find(device.kind).map_or(Target::Host, Kind::target)
}

/// See [`Kind::exclusive_key`].
pub fn exclusive_key(device: &DeviceSpec) -> Option<String> {
    find(device.kind)?.exclusive_key(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_their_keys_have_names_of_their_own_and_defaults_that_are_allowed() {
        for (at, kind) in KINDS.iter().enumerate() {
            assert!(KINDS[..at].iter().all(|other| other.name() != kind.name()), "{}", kind.name());
            for key in kind.keys() {
                assert_eq!(key.check(key.default), Ok(()), "{}", key.name);
                assert!(key.check(key.range.end() + 1).is_err(), "{}", key.name);
            }
            for key in kind.texts() {
                assert_eq!(key.check(key.example), Ok(()), "{}", key.name);
                assert!(key.check("").is_err(), "{}", key.name);
            }
            let texts = kind.texts().iter().map(|key| (key.name.into(), key.example.into()));
            let spec = device_spec(kind.name(), &texts.collect::<Vec<_>>()).unwrap();
            assert_eq!(spec.settings.len(), kind.keys().len());
            // `serval doctor` says one of them.
            assert_ne!(kind.place(&spec).is_some(), kind.flags().host_threads, "{}", kind.name());
        }
        assert_eq!(device_spec("process", &[]), Ok(DeviceSpec::host()));
    }

    #[test]
    fn devices_that_cannot_be_are_refused_in_one_sentence() {
        let given = |name: &str, value: &str| [(name.to_owned(), value.to_owned())];
        for (kind, given, why) in [
            ("quantum", vec![], "there are cpu, process"),
            ("process", given("gpu", "0").to_vec(), "have no key \"gpu\""),
            ("cuda", given("gpu", "64").to_vec(), "must be in [0, 63]"),
            ("cuda", given("threads", "48").to_vec(), "a multiple of 32"),
            ("cuda", given("gpu", "one").to_vec(), "write a number"),
            ("remote", vec![], "need address=tcp://"),
            ("remote", given("address", "10.0.0.2").to_vec(), "must be tcp://HOST:PORT"),
        ] {
            let refused = device_spec(kind, &given).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
