//! A machine with a GPU that has none: the driver's place is taken by `crates/accel/tests/kernels/fake_driver.cpp`.

use std::fs;
use std::path::{Path, PathBuf};

use super::build_kernel;

/// A folder in which the dynamic linker finds the driver, and a kernel image for it.
pub(crate) fn driver_folder() -> (PathBuf, String) {
    let library = build_kernel("crates/accel/tests/kernels/fake_driver.cpp");
    let folder = Path::new(&library).with_file_name("fake-gpu");
    fs::create_dir_all(&folder).unwrap();
    let place = |name: &str, write: &dyn Fn(&Path)| {
        // In one step: another test may be about to load it.
        let fresh = folder.join(format!("{name}.{:?}", std::thread::current().id()));
        write(&fresh);
        fs::rename(&fresh, folder.join(name)).unwrap();
    };
    place("libcuda.so.1", &|path| assert!(fs::copy(&library, path).unwrap() > 0));
    let mut image = 0xba55_ed50u32.to_le_bytes().to_vec();
    image.extend(0x0010_0001u32.to_le_bytes());
    image.extend(0u64.to_le_bytes());
    place("k.fatbin", &|path| fs::write(path, &image).unwrap());
    let kernel = format!("{}/k.fatbin:echo", folder.display());
    (folder, kernel)
}
