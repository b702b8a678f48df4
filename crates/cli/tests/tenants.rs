//! `serval tenant`, the metrics of tenants and the audit lines, against a running server.

mod common;

use std::process::Command;

use common::running::{Running, table};
use common::*;

fn serval_tenant(server: &Running, arguments: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("tenant").args(arguments).arg("--server").arg(&server.socket);
    let output = command.output().unwrap();
    let text = [output.stdout.as_slice(), &output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

fn done(server: &Running, arguments: &[&str], expected: &str) {
    let (code, text) = serval_tenant(server, arguments);
    assert!(code == 0 && text.contains(expected), "{arguments:?}: {code} {text}");
}

fn refused(server: &Running, arguments: &[&str], expected: &str) {
    let (code, text) = serval_tenant(server, arguments);
    assert!(code != 0 && text.contains(expected), "{arguments:?}: {code} {text}");
}

#[test]
fn tenants_of_a_running_server_are_managed_from_a_shell() {
    let port = free_port();
    let server = Running::start("tenants", &table("echo", port, "echo", ""));
    done(&server, &["list"], "echo");
    assert!(!page(server.metrics).contains("serval_tenant"), "there is only the operator");
    done(&server, &["add", "shop", "weight=2", "messages_per_s=500_000"], "added");
    done(&server, &["list"], "500000");
    done(&server, &["set", "default", "weight=3", "burst_ms=7"], "set; the next reload");
    done(&server, &["set", "shop", "users=1001,1002"], "set");
    refused(&server, &["add", "shop"], "there is a tenant \"shop\" already");
    refused(&server, &["set", "none", "weight=1"], "there is no tenant \"none\"");
    refused(&server, &["set", "shop", "weight=0"], "must be in [1, 1000]");
    refused(&server, &["set", "shop", "wait=0"], "a tenant has no value \"wait\"");
    refused(&server, &["set", "default", "users=1"], "the operator's own");
    refused(&server, &["add", "a b"], "cannot be a name");
    refused(&server, &["remove", "default"], "cannot be removed");
    let client = udp_client(([127, 0, 0, 1], port).into());
    assert_eq!(ask(&client, b"one"), b"one");
    server.wait_for_line("serval_tenant_requests_total{tenant=\"default\"} 1");
    server.wait_for_line("serval_tenant_requests_total{tenant=\"shop\"} 0");
    // Who asked for what is in the log.
    let log = server.log();
    for line in ["audit: tenant add was done", "audit: tenant set was refused"] {
        assert!(log.contains(line), "{line} in {log}");
    }
    // Both rates are shown, and that messages waited for them.
    done(&server, &["set", "default", "messages_per_s=1", "bytes_per_s=7777777"], "set");
    let waited = || {
        let (code, text) = serval_tenant(&server, &["list"]);
        assert!(code == 0 && text.contains("bytes/s") && text.contains("7777777"), "{text}");
        let own = text.lines().find(|line| line.trim_start().starts_with("default"));
        let words: Vec<&str> = own.unwrap().split_whitespace().collect();
        // The last column but one; the service is the last one.
        words[words.len() - 2].parse::<u64>().unwrap()
    };
    eventually("messages wait for the rate", || {
        (0..10).for_each(|_| drop(client.send(b"more")));
        waited() > 0
    });
    done(&server, &["remove", "shop"], "removed");
    refused(&server, &["remove", "shop"], "there is no tenant");
    // A reload gives tenants what the file says.
    server.write("", &(table("echo", port, "echo", "") + "\n[[tenant]]\nname = \"file\"\n"));
    let (code, out, error) = server.reload();
    assert_eq!(code, 0, "{out}{error}");
    done(&server, &["list"], "file");
    assert_eq!(server.end(), 0);
}

/// The kernels of tenants run in processes that are isolated, one for each, and answer there.
#[test]
fn kernels_of_tenants_run_in_isolated_processes() {
    let ports = [free_port(), free_port()];
    let service = |tenant: &str, port: u16| {
        format!(
            "[[tenant]]\nname = \"{tenant}\"\n[[service]]\nname = \"of-{tenant}\"\nlisten = \"udp://127.0.0.1:{port}\"\n\
             accelerator = \"own\"\nkernel = \"echo\"\nmqueues = 2\ntenant = \"{tenant}\"\n"
        )
    };
    let accelerator = "[[accelerator]]\nname = \"own\"\nkind = \"process\"\n";
    let text = [accelerator, &service("a", ports[0]), &service("b", ports[1])].concat();
    let server = Running::start("isolated", &text);
    for port in ports {
        let client = udp_client(([127, 0, 0, 1], port).into());
        assert_eq!(ask(&client, b"one"), b"one");
    }
    let processes = children(server.process.0.id());
    assert_eq!(processes.len(), 2, "each tenant has a process of its own");
    for process in processes {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
        assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    }
    assert_eq!(server.end(), 0);
}

/// `benches/tenants/measure`, the program of the rows about tenants: each part ends with its figures, and replies were checked.
#[test]
fn the_program_that_measures_tenants_prints_figures() {
    let measure =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/tenants/measure");
    for (part, figure) in [
        ("shares --weights 1,2,3", "jain"),
        ("alternating", "busy_ns"),
        ("alternating --alone", "busy_ns"),
        ("configured --configured 30 --ports", "busy_ns"),
        ("scale --workers 2 --tenants 2", "rate_each"),
        ("module --does trap", "rate"),
        ("module --does reload", "replaced"),
        ("flood --alone", "p99_ns"),
    ] {
        let mut said = String::new();
        // A machine that is busy may keep a client from its replies for as long as it measures.
        eventually(part, || {
            let mut command = Command::new(&measure);
            command.args(part.split(' ')).args(["--seconds", "0.5"]);
            command.args(["--serval", env!("CARGO_BIN_EXE_serval")]);
            let output = command.output().expect("python3 is installed");
            said = String::from_utf8_lossy(&output.stderr).into_owned();
            if !output.status.success() {
                assert!(said.starts_with("measure: "), "{part}: {said}");
                println!("{part}: {said}");
                return false;
            }
            let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert!(figures[figure].as_f64().is_some_and(|value| value > 0.0), "{part}: {figures}");
            true
        });
    }
}

/// The namespaces of a process, by kind.
fn namespace(process: u32, kind: &str) -> std::path::PathBuf {
    std::fs::read_link(format!("/proc/{process}/ns/{kind}")).unwrap()
}

/// Kernels of a tenant with namespaces of its own answer there, are restarted there, and end with the engine.
#[test]
fn isolated_processes_have_the_namespaces_and_the_user_of_their_tenant() {
    let may = Command::new("unshare").args(["--user", "true"]).status();
    if !may.is_ok_and(|status| status.success()) {
        println!("SKIPPED: user namespaces are refused here (unshare --user)");
        return;
    }
    let own = sys::process::user();
    isolated_processes_of(None, own);
    if own == 0 {
        isolated_processes_of(Some(65534), 65534);
    } else {
        println!("SKIPPED: processes of another user, which only root can start");
    }
}

/// The same where the processes have this `user` of the configuration, which is the user `id`.
fn isolated_processes_of(user: Option<u32>, id: u32) {
    let port = free_port();
    let user = user.map_or_else(String::new, |user| format!("user = {user}\n"));
    let text = format!(
        "[[tenant]]\nname = \"a\"\n{user}namespaces = [\"pid\", \"mount\", \"ipc\"]\n[[accelerator]]\nname = \"own\"\nkind = \"process\"\n\
         [[service]]\nname = \"of-a\"\nlisten = \"udp://127.0.0.1:{port}\"\naccelerator = \"own\"\nkernel = \"echo\"\ntenant = \"a\"\n"
    );
    let server = Running::start(&format!("namespaces-{id}"), &text);
    let client = udp_client(([127, 0, 0, 1], port).into());
    assert_eq!(ask(&client, b"one"), b"one");
    let engine = server.process.0.id();
    let runtime = || {
        let [waits] = children(engine)[..] else { return None };
        let [runs] = children(waits)[..] else { return None };
        Some((waits, runs))
    };
    let (waits, runs) = runtime().expect("a process that waits for another one");
    for kind in ["user", "pid", "mnt", "ipc"] {
        assert_ne!(namespace(runs, kind), namespace(engine, kind), "{kind}");
    }
    let status = std::fs::read_to_string(format!("/proc/{runs}/status")).unwrap();
    let first = status.lines().find(|line| line.starts_with("NSpid:")).unwrap();
    assert!(first.ends_with("\t1"), "{status}");
    assert!(
        status.contains("Seccomp:\t2") && status.contains("CapEff:\t0000000000000000"),
        "{status}"
    );
    assert!(status.contains(&format!("Uid:\t{id}\t{id}\t{id}\t{id}")), "{status}");
    let group = format!("Gid:\t{id}\t{id}\t{id}\t{id}");
    assert!(user.is_empty() || status.contains(&group), "{status}");
    let mounts = std::fs::read_to_string(format!("/proc/{runs}/mounts")).unwrap();
    let writable = |line: &str| line.split(' ').nth(3).is_some_and(|o| o.starts_with("rw"));
    assert!(mounts.lines().count() > 0 && !mounts.lines().any(writable), "{mounts}");
    // The process that runs the kernel ends: so does the one that waits for it, and both are started again.
    let killed = Command::new("kill").args(["-9", &runs.to_string()]).status().unwrap();
    assert!(killed.success());
    eventually("they are started again", || runtime().is_some_and(|(_, other)| other != runs));
    eventually("it answers again", || {
        client.send(b"two").unwrap();
        let mut reply = [0; 16];
        client.set_read_timeout(Some(std::time::Duration::from_millis(100))).unwrap();
        client.recv(&mut reply).is_ok_and(|bytes| &reply[..bytes] == b"two")
    });
    assert!(!std::path::Path::new(&format!("/proc/{waits}")).exists());
    let (waits, runs) = runtime().unwrap();
    assert_eq!(server.end(), 0);
    for process in [waits, runs] {
        let path = format!("/proc/{process}");
        eventually("it has ended", || !std::path::Path::new(&path).exists());
    }
}
