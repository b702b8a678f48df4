//! The fake driver (`kernels/fake_driver.cpp`), built once for a test program.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use accel::compile::{BuildOptions, build_kernel};

use crate::common::kernel_source;

/// A copy of the driver that behaves as its name says, for one test, and a file with the headers of a fatbin.
pub(crate) fn driver(behaviour: &str) -> (PathBuf, String) {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let built = folder.path().join("driver.so");
        build_kernel(&kernel_source("fake_driver.cpp"), &built, &BuildOptions::default()).unwrap();
        let mut image = 0xba55_ed50u32.to_le_bytes().to_vec();
        image.extend(0x0010_0001u32.to_le_bytes());
        image.extend(0u64.to_le_bytes());
        fs::write(folder.path().join("k.fatbin"), image).unwrap();
        folder
    });
    let copy = folder.path().join(format!("libcuda-{behaviour}.so"));
    if !copy.exists() {
        fs::copy(folder.path().join("driver.so"), &copy).unwrap();
    }
    (copy, folder.path().join("k.fatbin").display().to_string())
}
