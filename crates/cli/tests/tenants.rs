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
