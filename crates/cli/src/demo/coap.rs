//! The key of the CoAP requests of demos.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use bench::client::workload::coap::KEY;
use onpath::{Param, Spec};

use super::DemoError;

/// A file with the key, while this lives.
pub(super) struct KeyFile(PathBuf);

impl KeyFile {
    pub(super) fn write() -> Result<Self, DemoError> {
        let path = std::env::temp_dir().join(format!("serval-demo-{}.keys", std::process::id()));
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&path);
        file.and_then(|mut file| writeln!(file, "demo {KEY}")).map_err(|error| {
            let what = format!("write the keys {}", path.display());
            DemoError::Io { what, error }
        })?;
        Ok(Self(path))
    }

    /// The function with this key, and these other parameters.
    pub(super) fn function(&self, params: &[(&str, &str)]) -> Spec {
        let mut spec = Spec::new("auth", "coap-auth");
        // The client, and other programs, may interrupt the worker.
        spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
        spec.params = vec![("keys".into(), Param::Text(self.0.to_string_lossy().into_owned()))];
        spec.params.extend(params.iter().map(|(name, value)| ((*name).into(), (*value).into())));
        spec
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        // A file that is left in the temporary folder does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}
