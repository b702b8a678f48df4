//! What a GPU changes for people: `serval demo` uses it without being told, `serval kernel build` makes kernels for it.
//! The GPU's driver is `common/fake_gpu.rs`.
// xtask: ci

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::fake_gpu::driver_folder;
use common::*;
use serde_json::Value as Json;

fn serval(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.args(arguments);
    command
}

/// A demo of digits where a driver is that behaves like this.
fn demo(behaviour: &str, arguments: &[&str]) -> Output {
    let (folder, kernel) = driver_folder();
    let kernels = kernel.rsplit_once(':').unwrap().0;
    let mut command = serval(&["demo", "lenet", "--quick", "--mqueues", "3"]);
    command.args(["--cuda-kernels", kernels]).args(arguments);
    let done = command.env("LD_LIBRARY_PATH", folder).env("FAKE_GPU", behaviour).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    done
}

#[test]
fn the_demo_reads_digits_on_the_gpu_and_reports_it() {
    let plot = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-demo.svg");
    let done = demo("any", &["--plot", plot.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&done.stdout);
    for part in
        ["runs on a GPU: fake GPU, 3 blocks", "CPU gave the same answers", "its kernel on fake GPU"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(!text.contains("No GPU is used") && !text.contains("host-centric"), "{text}");
    let svg = fs::read_to_string(&plot).unwrap();
    for part in ["LeNet-5 on fake GPU: latency", ">GPU</text>", ">CPU</text>"] {
        assert!(svg.contains(part), "{part} is not in\n{svg}");
    }
    fs::remove_file(plot).unwrap();
}

#[test]
fn an_unusable_gpu_is_reported_and_the_demo_continues() {
    let done = demo("taken", &["--json", "--no-plot"]);
    let report: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report["gpu"], Json::Null, "{report}");
    let why = report["no_gpu_because"].as_str().unwrap();
    assert!(why.contains("GPU 0 (fake GPU)") && why.contains("has the GPU to itself"), "{why}");
    assert!(report["comparison"]["host_centric"]["rate"].as_f64().unwrap() > 0.0, "{report}");

    if serval(&["doctor", "--gpus"]).output().unwrap().status.success() {
        println!("SKIPPED: this machine has a GPU driver");
        return;
    }
    let done = serval(&["demo", "lenet", "--quick", "--no-plot"]).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{text}");
    let line = text.lines().find(|line| line.contains("No GPU is used")).expect(&text);
    assert!(line.contains("libcuda.so.1 cannot be loaded"), "{line}");
}

const ECHO: &str = "#include <serval/kernel.h>\n\
    SERVAL_KERNEL(echo) (serval::Block& block, serval::Mqueue& q) {\n\
        while (auto msg = q.recv(block)) {\n\
            auto reply = q.reply(block, msg, msg.len());\n\
            for (unsigned i = block.rank(); i < msg.len(); i += block.size())\n\
                reply.as<char>()[i] = msg.as<const char>()[i];\n\
            q.send(block, reply);\n\
        }\n\
    }\n";

/// A folder of this test's own with that source in it.
fn workshop(name: &str, source: &str, text: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    // What an earlier run left.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(source), text).unwrap();
    folder
}

fn build(folder: &Path, nvcc: &str, arguments: &[&str]) -> Output {
    serval(&["kernel", "build"])
        .args(arguments)
        .current_dir(folder)
        .env("NVCC", nvcc)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

/// Echoes through a service on an accelerator of this kind whose kernel is named like this.
fn serves(name: &str, kind: &str, kernel: &str) {
    let (driver, _) = driver_folder();
    let config = format!(
        "[[accelerator]]\nname = \"a\"\nkind = \"{kind}\"\n[[service]]\nname = \"s\"\naccelerator = \"a\"\nlisten = \"udp://127.0.0.1:0\"\n\
         kernel = \"{kernel}\"\nmqueues = 2\nmax_message_bytes = 500\nrequest_timeout_ms = 60000\n"
    );
    let environment = [("LD_LIBRARY_PATH", driver.as_path())];
    let served = Served::start_with(name, "", &config, &environment);
    let client = udp_client(served.services[0][0]);
    for salt in 0..20 {
        let message = pattern(1 + salt * 20, salt);
        assert_eq!(ask(&client, &message), message);
    }
    assert_eq!(served.drain(), 0);
}

/// A compiler that writes what looks like a fatbin, or refuses; all else is as with the real one.
fn compiler(folder: &Path, body: &str) -> String {
    let path = folder.join("nvcc");
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

const COMPILES: &str = r#"echo "$@" >arguments
while [ "$1" != -o ]; do shift; done
printf '\120\355\125\272\001\000\020\000\000\000\000\000\000\000\000\000' >"$2"
echo "ptxas info    : Compiling entry function 'serval_kernel_echo' for 'sm_90'" >&2
echo "ptxas info    : Function properties for serval_kernel_echo" >&2
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" >&2
echo "mine.cu(1): warning: look here" >&2
echo "      int unused;" >&2
echo "          ^" >&2"#;

#[test]
fn one_source_becomes_a_fatbin_and_a_library() {
    let folder = workshop("gpu-build", "mine.cu", ECHO);
    let nvcc = compiler(&folder, COMPILES);
    let built = build(&folder, &nvcc, &["mine.cu"]);
    assert!(built.status.success(), "{}", said(&built));
    let text = said(&built);
    assert!(
        text.contains(
            "kernel = \"./mine.fatbin:echo\"    # echo, on an accelerator of kind \"cuda\""
        ),
        "{text}"
    );
    assert!(text.contains("warning: look here\n      int unused;\n          ^"), "{text}");
    assert!(!text.contains("ptxas info") && !text.contains("0 bytes stack frame"), "{text}");
    let asked = fs::read_to_string(folder.join("arguments")).unwrap();
    for part in ["-x cu", "code=sm_80 ", "code=sm_90 ", "code=[sm_100,compute_100]"] {
        assert!(asked.contains(part), "{part} is not in {asked}");
    }
    // Named without a folder, and with one.
    serves("gpu-build-named", "cuda", &format!("{}/mine.fatbin:echo", folder.display()));
    let built = build(&folder, &nvcc, &["mine.cu", "-o", "echo.fatbin", "--gpu", "sm_90a,sm_120"]);
    assert!(said(&built).contains("kernel = \"./echo.fatbin\"    #"), "{}", said(&built));
    let asked = fs::read_to_string(folder.join("arguments")).unwrap();
    assert!(
        asked.contains("compute_90a,code=sm_90a ") && asked.contains("[sm_120,compute_120]"),
        "{asked}"
    );
    serves("gpu-build-plain", "cuda", &format!("{}/echo.fatbin", folder.display()));

    let built = build(&folder, "", &["mine.cu", "-o", "mine.so"]);
    assert!(built.status.success(), "{}", said(&built));
    serves("gpu-build-cpu", "cpu", &format!("{}/mine.so", folder.display()));
}

#[test]
fn a_failed_build_is_reported_with_the_compilers_output() {
    let folder = workshop("gpu-refused", "mine.cu", ECHO);
    let refused = |nvcc: &str, arguments: &[&str], code: i32, parts: &[&str]| {
        let done = build(&folder, nvcc, arguments);
        assert_eq!(done.status.code(), Some(code), "{}", said(&done));
        for part in parts {
            assert!(said(&done).contains(part), "{part} is not in {}", said(&done));
        }
        assert!(!folder.join("mine.fatbin").exists());
    };
    let missing = ["no CUDA compiler found (tried /nonexistent/nvcc)", "set NVCC"];
    refused("/nonexistent/nvcc", &["mine.cu"], 1, &missing);
    let complains = compiler(&folder, "echo first line; echo second line >&2; exit 3");
    let whole = ["first line\n", "second line\n", "It was run as: ", "\"-fatbin\"", "mine.cu"];
    refused(&complains, &["mine.cu"], 1, &whole);
    let empty = compiler(&folder, "while [ \"$1\" != -o ]; do shift; done; echo >\"$2\"");
    refused(&empty, &["mine.cu"], 1, &["has no kernel: define one with SERVAL_KERNEL(name)"]);
    refused(&empty, &["mine.cu", "--gpu", "h200"], 2, &["`h200` is not a GPU architecture"]);
    refused(
        &empty,
        &["mine.cu", "--gpu", "sm_90", "-o", "a.so"],
        2,
        &["is a .fatbin or .cubin, not a.so"],
    );
    refused(&empty, &["mine.cu", "--native"], 2, &["--native is for cpu kernels"]);
}

#[test]
fn without_nvcc_the_library_among_pythons_packages_compiles() {
    let folder = workshop("gpu-nvrtc", "mine.cu", ECHO);
    let package = folder.join("venv/lib/python3.11/site-packages/nvidia/cu13");
    for part in ["lib", "include/cccl/cuda"] {
        fs::create_dir_all(package.join(part)).unwrap();
    }
    fs::write(package.join("include/cccl/cuda/atomic"), "").unwrap();
    let fake = "../accel/tests/kernels/fake_nvrtc.cpp";
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-shared", "-fPIC", "-o"]);
    compiler.arg(package.join("lib/libnvrtc.so.99"));
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(fake));
    assert!(compiler.status().expect("a C++ compiler").success());
    let run = |environment: &Path, arguments: &[&str]| -> Json {
        let mut command = serval(arguments);
        for name in ["NVCC", "CUDA_HOME", "CUDA_PATH"] {
            command.env_remove(name);
        }
        command.env("PATH", &folder).env("HOME", &folder).env("VIRTUAL_ENV", environment);
        let done = command.current_dir(&folder).output().unwrap();
        assert!(done.status.success(), "{}", said(&done));
        serde_json::from_slice(&done.stdout).unwrap()
    };
    let doctor = |environment: &Path| {
        let report = run(environment, &["doctor", "--json"]);
        let all = report["capabilities"].as_array().unwrap().clone();
        all.into_iter().find(|one| one["name"] == "kernel-build-gpu").expect("it is listed")
    };
    let without = doctor(&folder);
    if without["state"] != "off" {
        println!("SKIPPED: this machine has a compiler for GPUs, {}", without["why"]);
        return;
    }
    assert!(without["remedy"].as_str().unwrap().contains("pip install"), "{without}");
    let environment = folder.join("venv");
    let found = doctor(&environment);
    assert_eq!(found["state"], "degraded", "it has no libnvfatbin: {found}");
    assert!(found["why"].as_str().unwrap().starts_with("NVRTC 99.0, "), "{found}");
    let arguments = ["kernel", "build", "mine.cu", "-o", "mine.cubin", "--gpu", "sm_90", "--json"];
    let built = run(&environment, &arguments);
    assert_eq!(built["kernels"], serde_json::json!(["a", "b"]), "{built}");
    let code = fs::read_to_string(folder.join("mine.cubin")).unwrap();
    assert!(code.contains("-arch=sm_90 ") && code.contains("/cu13/include/cccl"), "{code}");
}

#[test]
fn kernels_of_the_other_kind_are_refused() {
    let (_, kernel) = driver_folder();
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-on-cpu.toml");
    let config = format!(
        "schema = 1\n[[service]]\nname = \"s\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"{kernel}\"\n"
    );
    fs::write(&file, config).unwrap();
    let done = serval(&["serve", file.to_str().unwrap()]).output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", said(&done));
    assert!(said(&done).contains("contains kernels for NVIDIA GPUs"), "{}", said(&done));
}

/// An nvcc of this machine, or the one that `make cuda-kernels` has fetched.
fn nvcc() -> Option<PathBuf> {
    let named = std::env::var_os("NVCC").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join("nvcc"));
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/cuda-venv/lib");
    let fetched = fs::read_dir(fetched).into_iter().flatten().flatten().flat_map(|python| {
        ["cu13", "cu12"]
            .map(|cuda| python.path().join(format!("site-packages/nvidia/{cuda}/bin/nvcc")))
    });
    let installed = PathBuf::from("/usr/local/cuda/bin/nvcc");
    let mut all = named.into_iter().chain(on_path).chain([installed]).chain(fetched);
    all.find(|path| path.is_file())
}

#[test]
fn the_real_compiler_builds_the_same_source() {
    let Some(nvcc) = nvcc() else {
        println!("SKIPPED: no nvcc; `make cuda-kernels` fetches one");
        return;
    };
    let nvcc = nvcc.canonicalize().unwrap().display().to_string();
    let folder = workshop("gpu-real", "echo.cpp", ECHO);
    let built = build(&folder, &nvcc, &["echo.cpp", "--gpu", "sm_90", "--json"]);
    assert!(built.status.success(), "{}", said(&built));
    let report: Json = serde_json::from_slice(&built.stdout).unwrap();
    assert_eq!(report["kernels"], serde_json::json!(["echo"]), "{report}");
    assert_eq!(String::from_utf8_lossy(&built.stderr), "", "no warnings");
    serves("gpu-build-real", "cuda", &format!("{}/echo.fatbin", folder.display()));
    fs::write(folder.join("echo.cpp"), ECHO.replace("msg.len()", "msg.length()")).unwrap();
    let refused = build(&folder, &nvcc, &["echo.cpp", "--gpu", "sm_90"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("has no member \"length\""), "{}", said(&refused));
}
