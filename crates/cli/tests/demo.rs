//! The demos as they are started from a shell, in their short form.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

const PATIENCE: Duration = Duration::from_secs(60);

fn demo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("demo").args(arguments).stdin(Stdio::null());
    if !arguments.contains(&"--plot") {
        command.arg("--no-plot");
    }
    command
}

fn report(arguments: &[&str]) -> Json {
    let done = demo(arguments).args(["--quick", "--json"]).output().unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

#[test]
fn digits_are_read_over_both_transports_and_compared() {
    let report = report(&["lenet", "--cpu"]);
    assert_eq!(report["no_gpu_because"], "--cpu was given", "{report}");
    let digits = report["digits"].as_u64().unwrap();
    assert!(digits >= 100 && report["right_udp"] == report["right_tcp"], "{report}");
    assert!(report["right_udp"].as_u64().unwrap() * 100 >= digits * 97, "{report}");
    for server in ["serval", "host_centric"] {
        assert!(report["comparison"][server]["rate"].as_f64().unwrap() > 0.0, "{report}");
        assert!(report["comparison"][server]["p50_us"].as_f64().unwrap() > 0.0, "{report}");
    }
    // The other server was asked over UDP only.
    let tcp_rate = |server: &str| report["comparison"][server].get("tcp_rate");
    assert!(tcp_rate("serval").is_some() && tcp_rate("host_centric").is_none(), "{report}");
}

#[test]
fn many_mqueues_all_work() {
    let report = report(&["echo", "--mqueues", "240", "--workers", "2"]);
    assert_eq!(report["mqueues"], 240);
    assert_eq!(report["busy_blocks"], 240, "{report}");
    assert_eq!(report["rows"].as_array().unwrap().len(), 8);
}

#[test]
fn numbers_are_scaled_and_printed_as_text() {
    let done = demo(&["scale", "--quick"]).output().unwrap();
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    for part in ["p50, 1 in flight", "host-centric", "class T0", "requests received ="] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(!text.contains('\u{1b}'));
}

#[test]
fn functions_are_replaced_under_load_and_a_spoiled_byte_is_found() {
    let shown = report(&["functions"]);
    assert!(shown["checked"].as_u64().unwrap() > 4000, "{shown}");
    assert_eq!(shown["wrong"], 0, "{shown}");
    assert!(shown["replaced"].as_u64().unwrap() > 1, "{shown}");
    for registers in shown["registers"].as_array().unwrap() {
        let value = |name: &str| registers[name].as_u64().unwrap();
        assert_eq!((value("count"), value("dropped"), value("sum")), (2000, 1000, 1_999_000));
    }
    let done = demo(&["functions", "--quick", "--json", "--corrupt"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let shown: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(shown["wrong"], 1, "{shown}");
}

#[test]
fn a_flooding_tenant_is_limited_and_a_spoiled_byte_is_found() {
    let shown = report(&["tenants"]);
    assert!(shown["checked"].as_u64().unwrap() > 3000, "{shown}");
    assert_eq!((&shown["wrong"], &shown["lost"]), (&0.into(), &0.into()), "{shown}");
    let of = |part: usize, key: &str| shown["rows"][part][key].as_f64().unwrap();
    assert!(of(0, "flood_received") == 0.0 && of(1, "flood_received") > 0.0, "{shown}");
    assert!(of(1, "flood_shed") == 0.0 && of(2, "flood_shed") > 0.0, "{shown}");
    let done = demo(&["tenants", "--quick", "--json", "--corrupt"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let shown: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(shown["wrong"], 1, "{shown}");
}

#[test]
fn kernels_multiply_and_echo_over_their_own_connections_and_a_spoiled_byte_is_found() {
    let shown = report(&["sockets"]);
    assert!(shown["checked"].as_u64().unwrap() > 4 << 20, "{shown}");
    assert_eq!(shown["wrong"], 0, "{shown}");
    let books = &shown["sockets"];
    assert_eq!(books["opened"], 21, "{shown}");
    assert_eq!(books["received_bytes"], books["read_bytes"], "{shown}");
    assert_eq!(books["written_bytes"], books["sent_bytes"], "{shown}");
    let done = demo(&["sockets", "--quick", "--json", "--corrupt"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let shown: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(shown["wrong"], 1, "{shown}");
}

#[test]
fn local_and_remote_accelerators_give_the_same_answers_and_a_spoiled_byte_is_found() {
    let shown = report(&["remote"]);
    assert_eq!((&shown["checked"], &shown["wrong"]), (&400.into(), &0.into()), "{shown}");
    let remote = &shown["rows"][2];
    assert!(remote["service"] == "remote" && remote["added_p50_us"].is_f64(), "{shown}");
    let done = demo(&["remote", "--quick", "--json", "--corrupt"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let shown: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(shown["wrong"], 1, "{shown}");
}

#[test]
fn faces_are_verified_against_memcached() {
    let report = report(&["faces"]);
    let people = report["people"].as_u64().unwrap();
    assert_eq!(report["answers"][2]["unknown"], people, "{report}");
    for known in 0..2 {
        let answers = &report["answers"][known];
        let counted = answers["match"].as_u64().unwrap() + answers["no_match"].as_u64().unwrap();
        assert_eq!(counted, people, "{report}");
    }
    let costs = report["costs"].as_array().unwrap();
    assert_eq!(costs[0]["server"], "Serval");
    for figure in ["rate", "client_cpu_us", "server_cpu_us", "memcached_cpu_us", "cpu_us"] {
        for cost in costs {
            assert!(cost[figure].as_f64().unwrap() > 0.0, "{figure}: {report}");
        }
    }
    // Beside the program, where the demo looks; they may not have been built.
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_serval"));
    let beside = program.parent().unwrap().parent().unwrap().join("baselines/faces");
    assert_eq!(costs.len(), if beside.is_file() { 3 } else { 1 }, "{report}");
}

#[test]
fn demos_that_measure_find_a_spoiled_byte() {
    for name in ["lenet", "echo", "scale", "faces"] {
        // Those that use no GPU accept the flag, too.
        let done = demo(&[name, "--cpu", "--quick", "--json", "--corrupt"]).output().unwrap();
        let told = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{name}: {told}");
        assert!(told.contains("answered right, 1 wrong, 0 not at all"), "{name}: {told}");
    }
}

#[test]
fn without_memcached_one_sentence_says_how_to_get_it() {
    let done = demo(&["faces", "--quick"]).env("PATH", "/nonexistent").output().unwrap();
    let told = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1));
    assert!(told.contains("needs memcached") && told.contains("apt install memcached"), "{told}");
    assert_eq!(told.trim_end().lines().count(), 1, "{told}");
}

#[test]
fn a_file_that_holds_no_pictures_is_refused() {
    let path = std::env::temp_dir().join(format!("serval-pictures-{}", std::process::id()));
    fs::write(&path, b"SVFACES1 and nothing else").unwrap();
    let done = demo(&["faces", "--pictures", path.to_str().unwrap()]).output().unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("not one of pictures"));
}

/// Processes that `pid` has started.
fn children(pid: u32) -> Vec<u32> {
    // Listed by the thread that started them.
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.map(|t| fs::read_to_string(t.path().join("children")).unwrap_or_default());
    let listed = lists.collect::<Vec<_>>().join(" ");
    listed.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

#[test]
fn an_interrupted_demo_ends_its_memcached() {
    // The full length, so that the signal comes in the middle.
    let mut running =
        demo(&["faces"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    let memcached = loop {
        let found = children(running.id());
        let name = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if let Some(pid) = found.into_iter().find(|pid| name(pid).trim() == "memcached") {
            break pid;
        }
        assert!(Instant::now() < deadline && running.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(2));
    };
    let pid = running.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let done = running.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(String::from_utf8_lossy(&done.stderr).contains("interrupted"));
    assert!(!fs::exists(format!("/proc/{memcached}")).unwrap(), "memcached is still there");
}

#[test]
fn a_chart_is_saved_at_the_given_path_and_other_files_are_kept() {
    let folder = std::env::temp_dir().join(format!("serval-demo-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let plot = folder.join("scale.svg");
    let path = plot.to_str().unwrap();
    for _ in 0..2 {
        let done = demo(&["scale", "--quick", "--plot", path]).output().unwrap();
        let text = String::from_utf8(done.stdout).unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(text.trim_end().ends_with(&format!("Plot: {path}")), "{text}");
    }
    let svg = fs::read_to_string(&plot).unwrap();
    // On a busy machine there are not enough replies for more than this share.
    for part in
        ["<svg", ">Serval</text>", ">host-centric</text>", ">latency</text>", ">50 %</text>"]
    {
        assert!(svg.contains(part), "{part} is not in\n{svg}");
    }
    fs::write(&plot, "a letter").unwrap();
    let done = demo(&["scale", "--quick", "--plot", path]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("choose another name"));
    assert_eq!(fs::read_to_string(&plot).unwrap(), "a letter");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_cache_answers_for_memcached_and_a_spoiled_byte_is_found() {
    let shown = report(&["cache"]);
    assert!(shown["checked"].as_u64().unwrap() > 10_000, "{shown}");
    assert_eq!(shown["wrong"], 0, "{shown}");
    let rows = shown["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    assert!(rows[1]["hits_percent"].as_f64().unwrap() > 80.0, "{shown}");
    assert!(rows[2]["hits_percent"].as_f64().unwrap() > 10.0, "{shown}");
    assert!(shown["registers"]["writes"].as_u64().unwrap() > 10_000, "{shown}");
    let done = demo(&["cache", "--quick", "--json", "--corrupt"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let shown: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(shown["wrong"], 1, "{shown}");
}

#[test]
fn forged_requests_are_refused_beside_legitimate_ones_and_a_spoiled_byte_is_found() {
    let shown = report(&["auth"]);
    assert_eq!(shown["wrong"], 0, "{shown}");
    assert!(shown["checked"].as_u64().unwrap() >= 200, "{shown}");
    assert!(shown["forged_refused"].as_u64().unwrap() > 0, "{shown}");
    assert!(shown["passed"].as_u64() <= shown["legitimate_sent"].as_u64(), "{shown}");
    let done = demo(&["auth", "--quick", "--json", "--corrupt"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let shown: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(shown["wrong"], 1, "{shown}");
}

#[test]
fn the_books_of_a_chain_are_closed_and_a_spoiled_byte_is_found() {
    let shown = report(&["chain"]);
    assert_eq!((&shown["wrong"], &shown["lost"]), (&0.into(), &0.into()), "{shown}");
    assert!(shown["checked"].as_u64().unwrap() > 400, "{shown}");
    assert!(shown["hits_percent"].as_f64().unwrap() > 10.0, "{shown}");
    assert!(shown["share"]["limited"].as_u64().unwrap() > 0, "{shown}");
    for balance in shown["books"].as_array().unwrap() {
        assert_eq!(balance["left"], balance["right"], "{shown}");
        assert!(balance["left"].as_u64().unwrap() > 0, "{shown}");
    }
    let steps: Vec<_> = shown["trace"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| {
            format!(
                "{} {} {} {}",
                step["chain"], step["message"], step["function"], step["verdict"]
            )
        })
        .collect();
    for expected in [
        r#""faces" "request" "tenant faces" "charges""#,
        r#""faces" "request" "auth" "answers""#,
        r#""faces" "request" "auth" "rewrites""#,
        r#""faces/db" "request" "hot" "answers""#,
        r#""faces" "reply" "auth" "passes""#,
    ] {
        assert!(steps.iter().any(|step| step == expected), "{expected} is not in {steps:?}");
    }
    let done = demo(&["chain", "--quick", "--json", "--corrupt"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let shown: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(shown["wrong"], 1, "{shown}");
}
