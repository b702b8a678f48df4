//! TLS records by the library for LD_PRELOAD: what OpenSSL asks the kernel for. The records of random calls into a socket that takes random
//! parts are opened by another implementation of the ciphers, and nginx and Python serve clients of OpenSSL.

#[path = "common/preloaded.rs"]
mod preloaded;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use preloaded::{LIBRARY, Setup, free_address, over_http2};

/// The type of records with data.
const DATA: u8 = 23;

/// The program that makes records: built once, with sanitizers.
static RECORDS: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("transfer-tls");
    let program = folder.join("tls_test.san");
    let output = Command::new("make")
        .args(["--no-print-directory", "-C"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lib"))
        .arg(&program)
        .arg(format!("BUILD={}", folder.display()))
        .output()
        .expect("make has to be installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
});

/// A new key and a certificate for it.
fn certificate(folder: &Path) -> String {
    let [key, certificate] = ["key", "certificate"].map(|name| folder.join(name));
    let output = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=localhost", "-keyout"])
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .expect("`make setup-test` installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let both = folder.join("both.pem");
    fs::write(&both, [fs::read(key).unwrap(), fs::read(certificate).unwrap()].concat()).unwrap();
    both.display().to_string()
}

/// What a program prints that must succeed.
fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {complaints}");
    assert_eq!(complaints, "", "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Types and plain bytes of all records, opened with the keys of `tls_test.c`.
fn open(wire: &[u8], is_13: bool, cipher: u32) -> Vec<(u8, Vec<u8>)> {
    let (algorithm, key_bytes): (&'static Algorithm, u8) = match cipher {
        128 => (&AES_128_GCM, 16),
        256 => (&AES_256_GCM, 32),
        _ => (&CHACHA20_POLY1305, 32),
    };
    let key: Vec<u8> = (0..key_bytes).map(|at| 7 * at + 1).collect();
    let key = LessSafeKey::new(UnboundKey::new(algorithm, &key).unwrap());
    let has_explicit_nonce = !is_13 && cipher != 20;
    let salt = [100, 101, 102, 103];
    let (mut rest, mut records) = (wire, Vec::new());
    for number in 250_u64.. {
        let Some((header, after)) = rest.split_first_chunk::<5>() else { break };
        assert_eq!(header[1..3], [3, 3]);
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        let (mut body, after) = after.split_at(len);
        rest = after;
        let mut nonce = [0; 12];
        if has_explicit_nonce {
            let (explicit, sealed) = body.split_first_chunk::<8>().unwrap();
            nonce[..4].copy_from_slice(&salt);
            nonce[4..].copy_from_slice(explicit);
            // From the one that the program has given, each once.
            let first = u64::from_be_bytes([200, 201, 202, 203, 204, 205, 206, 207]);
            assert_eq!(u64::from_be_bytes(*explicit), first + (number - 250));
            body = sealed;
        } else {
            let iv: Vec<u8> = match cipher {
                20 => (200..212).collect(),
                _ => salt.into_iter().chain(200..208).collect(),
            };
            nonce[4..].copy_from_slice(&number.to_be_bytes());
            nonce.iter_mut().zip(iv).for_each(|(byte, mask)| *byte ^= mask);
        }
        let more = if is_13 {
            header.to_vec()
        } else {
            let plain = u16::try_from(body.len() - 16).unwrap().to_be_bytes();
            [&number.to_be_bytes()[..], &header[..3], &plain].concat()
        };
        let mut plain = body.to_vec();
        let nonce = Nonce::assume_unique_for_key(nonce);
        let len = key.open_in_place(nonce, Aad::from(more), &mut plain).expect("it opens").len();
        plain.truncate(len);
        let kind = if is_13 {
            assert_eq!(header[0], DATA);
            plain.pop().unwrap()
        } else {
            header[0]
        };
        assert!(!plain.is_empty() && plain.len() <= 16384, "{}", plain.len());
        records.push((kind, plain));
    }
    assert!(rest.is_empty());
    records
}

/// With data that follows data joined.
fn joined(records: impl IntoIterator<Item = (u8, Vec<u8>)>) -> Vec<(u8, Vec<u8>)> {
    let mut joined: Vec<(u8, Vec<u8>)> = Vec::new();
    for (kind, bytes) in records {
        match joined.last_mut() {
            Some((DATA, before)) if kind == DATA => before.extend(bytes),
            _ => joined.push((kind, bytes)),
        }
    }
    joined
}

/// What the program was told that it has sent.
fn told(mut rest: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut told = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<5>() {
        let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let (bytes, after) = after.split_at(len);
        told.push((head[0], bytes.to_vec()));
        rest = after;
    }
    told
}

#[test]
fn records_are_whole_and_in_order_whatever_a_socket_takes() {
    let folder = std::env::temp_dir().join(format!("serval-tls-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (wire, said_sent) = (folder.join("wire"), folder.join("told"));
    for (seed, version, cipher) in (0..4)
        .flat_map(|seed| [12, 13].map(|version| (seed, version)))
        .flat_map(|(seed, version)| [128, 256, 20].map(|cipher| (seed, version, cipher)))
    {
        let mut program = Command::new(RECORDS.as_path());
        program.args([version, cipher, seed].map(|number: u32| number.to_string()));
        assert_eq!(said(program.arg(&wire).arg(&said_sent)), "ok\n");
        let opened = open(&fs::read(&wire).unwrap(), version == 13, cipher);
        let expected = told(&fs::read(&said_sent).unwrap());
        assert!(opened.len() > 400 && opened.iter().any(|(kind, _)| *kind != DATA));
        let case = format!("version {version}, cipher {cipher}, seed {seed}");
        if seed % 2 == 0 {
            assert!(joined(opened) == joined(expected), "{case}");
        } else {
            // A message overtakes the rest of a call, so their order among each other is free.
            for is_data in [true, false] {
                let only = |all: &[(u8, Vec<u8>)]| {
                    joined(all.iter().filter(|(kind, _)| (*kind == DATA) == is_data).cloned())
                };
                assert!(only(&opened) == only(&expected), "{case}, data {is_data}");
            }
        }
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn every_call_on_a_connection_of_python_is_sealed_or_refused() {
    let setup = Setup::new("tls-calls");
    setup.file("source", 3_000_001);
    let certificate = certificate(&setup.folder);
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/tls_calls.py");
    let python = fs::canonicalize("/usr/bin/python3").unwrap();
    // The file that names programs, and the variable.
    let settings = setup.folder.join("transfer.toml");
    let text = format!("[[program]]\npath = \"{}\"\ntls = true\n", python.display());
    fs::write(&settings, text).unwrap();
    fs::set_permissions(&settings, fs::Permissions::from_mode(0o600)).unwrap();
    let settings = settings.to_str().unwrap();
    for (version, variable, value) in
        [("TLSv1_2", "SERVAL_TRANSFER_CONFIG", settings), ("TLSv1_3", "SERVAL_TRANSFER_TLS", "1")]
    {
        let mut command = Command::new(&python);
        command.arg(&program).arg(&certificate).arg(setup.folder.join("files/source")).arg(version);
        command.env("LD_PRELOAD", LIBRARY.as_path()).env(variable, value);
        command.env("SERVAL_TRANSFER_VERBOSE", "1");
        let done = command.output().unwrap();
        let [out, errors] = [done.stdout, done.stderr].map(|b| String::from_utf8(b).unwrap());
        assert!(done.status.success() && out == "ok\n", "{version}: {out}{errors}");
        // Whether records are made shows nowhere else.
        let number = version.trim_start_matches("TLSv").replace('_', ".");
        let line = format!("(first connection: TLS {number})");
        let is_said = errors.contains("makes the TLS records of process") && errors.contains(&line);
        assert!(is_said, "{errors}");
    }
}

#[test]
fn nginx_serves_tls_through_the_library() {
    let mut setup = Setup::new("tls-nginx");
    setup.file("large", 5_000_003);
    setup.file("small", 1000);
    let certificate = certificate(&setup.folder);
    let folder = setup.folder.display().to_string();
    // TLS 1.3 leaves the choice of a cipher to the server.
    let ciphers =
        ["TLS_AES_256_GCM_SHA384", "TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256"];
    let addresses = ciphers.map(|_| free_address());
    let servers: Vec<String> = ciphers
        .iter()
        .zip(addresses)
        .map(|(cipher, address)| {
            format!("server {{ listen {address} ssl; ssl_conf_command Ciphersuites {cipher}; ssl_conf_command Options KTLS; }}")
        })
        .collect();
    let config = format!(
        "daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log debug;
         events {{ worker_connections 64; }}
         http {{
             access_log off; sendfile on; tcp_nopush on; root {folder}/files;
             ssl_certificate {certificate}; ssl_certificate_key {certificate}; ssl_protocols TLSv1.2 TLSv1.3;
             client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
             uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
             {}
         }}",
        servers.join("\n")
    );
    fs::write(setup.folder.join("nginx.conf"), config).unwrap();
    let path = setup.folder.join("nginx.conf");
    let mut command = Command::new("nginx");
    command.arg("-p").arg(&setup.folder).arg("-c").arg(path).env("SERVAL_TRANSFER_TLS", "1");
    setup.start(&mut command, addresses[0]);
    let get = |port: u16, version: &str, cipher: &str| {
        let mut client = Command::new("/usr/bin/python3");
        client.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/tls_get.py"));
        client.arg(port.to_string()).arg(setup.folder.join("files"));
        client.args(["large", "small", version, cipher]);
        assert_eq!(said(&mut client), "ok\n", "{version} {cipher}");
    };
    for (cipher, address) in ciphers.iter().zip(addresses) {
        get(address.port(), "TLSv1_3", cipher);
    }
    for cipher in ["AES256", "AES128"].map(|name| format!("ECDHE-ECDSA-{name}-GCM-SHA")) {
        let hash = if cipher.contains("256-GCM") { "384" } else { "256" };
        get(addresses[0].port(), "TLSv1_2", &(cipher + hash));
    }
    get(addresses[0].port(), "TLSv1_2", "ECDHE-ECDSA-CHACHA20-POLY1305");
    // A cipher that the kernel does not have, either: OpenSSL seals.
    let log = || fs::read_to_string(setup.folder.join("error.log")).unwrap();
    let before = log().matches("SSL_sendfile: ").count();
    get(addresses[0].port(), "TLSv1_2", "ECDHE-ECDSA-AES256-SHA384");
    let log = log();
    assert_eq!(log.matches("SSL_sendfile: ").count(), before);
    assert!(before > 6 * 8 * 6, "nginx has left files to SSL_sendfile {before} times");
    for level in ["[alert]", "[crit]", "[emerg]"] {
        assert!(!log.contains(level), "{log}");
    }
    assert_eq!(setup.service.counters().started(), 0);
}

#[test]
fn nginx_serves_http2_over_tls_through_the_library() {
    let mut setup = Setup::new("tls-http2");
    let contents = [setup.file("large", 5_000_003), setup.file("small", 1000)];
    let certificate = certificate(&setup.folder);
    let folder = setup.folder.display().to_string();
    let address = free_address();
    let config = format!(
        "daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log debug;
         events {{ worker_connections 64; }}
         http {{
             access_log off; sendfile on; tcp_nopush on; root {folder}/files;
             ssl_certificate {certificate}; ssl_certificate_key {certificate};
             ssl_protocols TLSv1.2 TLSv1.3; ssl_conf_command Options KTLS;
             client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
             uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
             server {{ listen {address} ssl http2; }}
         }}"
    );
    fs::write(setup.folder.join("nginx.conf"), config).unwrap();
    let path = setup.folder.join("nginx.conf");
    let mut command = Command::new("nginx");
    command.arg("-p").arg(&setup.folder).arg("-c").arg(path).env("SERVAL_TRANSFER_TLS", "1");
    setup.start(&mut command, address);
    let paths = ["/large", "/small", "/large", "/large", "/small"];
    for version in ["1.2", "1.3"] {
        let most = ["--http2", "--insecure", "--tls-max", version];
        let got = over_http2(&setup.folder, &format!("https://{address}"), &paths, &most);
        for (path, got) in paths.iter().zip(got) {
            let expected = &contents[usize::from(*path == "/small")];
            assert!(got == *expected, "TLS {version}, {path}: {} bytes", got.len());
        }
    }
    let log = fs::read_to_string(setup.folder.join("error.log")).unwrap();
    for level in ["[alert]", "[crit]", "[emerg]"] {
        assert!(!log.contains(level), "{log}");
    }
}
