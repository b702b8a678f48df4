//! CoAP authentication: the formats against RFC 7252, RFC 7515 and messages that aiocoap and Python's hmac have made, and what must be refused.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use builtins::coap_auth::{
    CoapAuth, Keys, Message, Refused, Seen, Shared, Times, Use, token_of, verify,
};
use builtins::{Code, file_of};
use hmac::{Hmac, Mac};
use onpath::{Direction, Function, Messages, Outcome, RequestId, Sizes, Spec};
use proptest::prelude::*;
use sha2::Sha256;
use wire::DropReason;
use wire::session::Origin;

/// When Python has issued its tokens.
const ISSUED: u64 = 1_700_000_000;
/// The bytes 0 to 63, as NICA's tenants have keys of 64 bytes.
const KEY: &str =
    "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0-Pw";
/// {"sub":"12345","iat":1700000000}, by hmac, json and base64 of Python 3.11. Its parts have the lengths that NICA's tokens have, but for the body.
const TOKEN: &str = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NSIsImlhdCI6MTcwMDAwMDAwMH0.YnoXAwK6S6sCjzL3mxzVJFAs92FIOMoHshFld8ugC_Q";
/// {"sub":"x","iat":1700000000,"exp":1700000600,"nbf":1700000000} with the header {"typ":"JWT","kid":"b","alg":"HS256"}.
const TOKEN_OF_B: &str = "eyJ0eXAiOiJKV1QiLCJraWQiOiJiIiwiYWxnIjoiSFMyNTYifQ.eyJzdWIiOiJ4IiwiaWF0IjoxNzAwMDAwMDAwLCJleHAiOjE3MDAwMDA2MDAsIm5iZiI6MTcwMDAwMDAwMH0.d8d5xEMV-fakwF3yXZR-20uBf1cF3MpW3XDIFyskxNc";
/// aiocoap 0.4.17: a confirmable POST to coap://localhost/sensors/1?a=b, message ID 0x1234, token aabbcc; the payload is the CBOR map
/// {"token": TOKEN, "payload": h'01020304'}.
const AIOCOAP: &str = "43021234aabbcc396c6f63616c686f73748773656e736f7273013143613d62ffa265746f6b656e787c65794a68624763694f694a49557a49314e694973496e523563434936496b705856434a392e65794a7a645749694f6949784d6a4d304e534973496d6c68644349364d5463774d4441774d4441774d48302e596e6f5841774b36533673436a7a4c336d787a564a464173393246494f4d6f487368466c64387567435f51677061796c6f61644401020304";
/// RFC 7515, appendix A.1.
const RFC_KEY: &str =
    "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow";
const RFC_TOKEN: &str = "eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

fn base64(bytes: &[u8]) -> String {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let mut bits = [0; 3];
        bits[..three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes([0, bits[0], bits[1], bits[2]]);
        for digit in 0..=three.len() {
            text.push(alphabet[(bits >> (18 - 6 * digit) & 63) as usize].into());
        }
    }
    text
}

fn key_bytes() -> Vec<u8> {
    (0..64).collect()
}

/// A token with this header and body, signed whatever they say.
fn signed(header: &str, body: &str, key: &[u8]) -> String {
    let text = format!("{}.{}", base64(header.as_bytes()), base64(body.as_bytes()));
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
    mac.update(text.as_bytes());
    format!("{text}.{}", base64(&mac.finalize().into_bytes()))
}

const HEADER: &str = r#"{"alg":"HS256","typ":"JWT"}"#;

fn keys() -> Keys {
    Keys::parse(format!("a {KEY}\n").as_bytes()).unwrap()
}

fn at(now: u64) -> Times {
    Times { now, leeway: 0, window: 0 }
}

fn at_issue() -> Times {
    at(ISSUED)
}

/// A CBOR head.
fn head(major: u8, value: usize) -> Vec<u8> {
    match value {
        0..24 => vec![major << 5 | value as u8],
        24..256 => vec![major << 5 | 24, value as u8],
        _ => vec![major << 5 | 25, (value >> 8) as u8, value as u8],
    }
}

fn cbor_text(text: &str) -> Vec<u8> {
    [head(3, text.len()), text.as_bytes().to_vec()].concat()
}

fn map(token: &str) -> Vec<u8> {
    [head(5, 2), cbor_text("token"), cbor_text(token), cbor_text("payload"), vec![0xf6]].concat()
}

/// A confirmable POST with this token.
fn post(id: u16, token: &str) -> Vec<u8> {
    let id = id.to_be_bytes();
    [vec![0x42, 2, id[0], id[1], 7, 8, 0xb1, b'a', 0xff], map(token)].concat()
}

#[test]
fn messages_of_others_are_understood() {
    let bytes = unhex(AIOCOAP);
    let message = Message::parse(&bytes).unwrap();
    assert_eq!((message.kind, message.code, message.id), (0, 2, 0x1234));
    assert_eq!(message.token, [0xaa, 0xbb, 0xcc]);
    assert!(message.is_request());
    assert_eq!(token_of(message.payload), Some(TOKEN.as_bytes()));
    // RFC 7252, appendix A, figures 16 and 17: a GET, and its response.
    let get = [&[0x40, 1, 0x7d, 0x34, 0xbb][..], b"temperature"].concat();
    let message = Message::parse(&get).unwrap();
    assert_eq!((message.kind, message.code, message.id), (0, 1, 0x7d34));
    assert!(message.token.is_empty() && message.payload.is_empty() && message.is_request());
    let content = [&[0x60, 0x45, 0x7d, 0x34, 0xff][..], b"22.3 C"].concat();
    let message = Message::parse(&content).unwrap();
    assert_eq!((message.kind, message.code, message.payload), (2, 0x45, &b"22.3 C"[..]));
    assert!(!message.is_request());
    // NICA's layout: a header of 16 bytes, then the map with the token of 125 characters.
    let nica = [&[0x48, 2, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0xb2, b'a', b'b', 0xff][..], &map(TOKEN)]
        .concat();
    assert_eq!(token_of(Message::parse(&nica).unwrap().payload), Some(TOKEN.as_bytes()));
}

#[test]
fn what_is_no_message_is_refused() {
    let good = post(1, TOKEN);
    assert!(Message::parse(&good).is_some());
    for (bytes, why) in [
        (&[][..], "empty"),
        (&[0x40, 1, 0], "short"),
        (&[0x80, 1, 0, 1], "version 2"),
        (&[0x00, 1, 0, 1], "version 0"),
        (&[0x49, 1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9], "a token of 9 bytes"),
        (&[0x42, 1, 0, 1, 1], "half a token"),
        (&[0x41, 0, 0, 1, 1], "an empty message with a token"),
        (&[0x40, 0, 0, 1, 0xff, 1], "an empty message with a payload"),
        (&[0x40, 1, 0, 1, 0xff], "a marker without a payload"),
        (&[0x40, 1, 0, 1, 0xf1, 0], "a reserved delta"),
        (&[0x40, 1, 0, 1, 0x1f, 0], "a reserved length"),
        (&[0x40, 1, 0, 1, 0xd0], "a delta that is cut off"),
        (&[0x40, 1, 0, 1, 0xe0, 0], "a delta that is cut off"),
        (&[0x40, 1, 0, 1, 0x0d], "a length that is cut off"),
        (&[0x40, 1, 0, 1, 0x13, 1, 2], "a value that is cut off"),
        (&[0x40, 1, 0, 1, 0xe0, 0xff, 0xff], "an option number of more than 16 bits"),
    ] {
        assert_eq!(Message::parse(bytes), None, "{why}");
    }
    let many = [&[0x40, 1, 0, 1][..], &[0xe0, 0x80, 0, 0xe0, 0x80, 0]].concat();
    assert_eq!(Message::parse(&many), None, "option numbers that add up to too much");
}

#[test]
fn a_map_has_one_token() {
    let (token, text) = (cbor_text("token"), cbor_text("x"));
    let of = |parts: &[&[u8]]| token_of(&parts.concat()).map(<[u8]>::to_vec);
    let found = Some(b"x".to_vec());
    assert_eq!(of(&[&head(5, 1), &token, &text]), found);
    assert_eq!(of(&[&[0xbf], &token, &text, &[0xff]]), found, "of indefinite length");
    assert_eq!(of(&[&head(5, 1), &token, &[0x41, b'x']]), found, "bytes");
    // Other keys and values of all types.
    let nested = [0x83, 0x01, 0x82, 0x20, 0xf5, 0xa1, 0x01, 0xc1, 0x1a, 0, 0, 0, 1];
    let others = [0x9f, 0x5f, 0x41, 1, 0xff, 0xf9, 0x3c, 0, 0xfb, 0, 0, 0, 0, 0, 0, 0, 0, 0xff];
    assert_eq!(of(&[&head(5, 3), &[1], &nested, &token, &text, &nested, &others]), found);
    for (parts, why) in [
        (&[&head(4, 1)[..], &text][..], "an array"),
        (&[&head(5, 0)], "an empty map"),
        (&[&head(5, 1), &text, &text], "no token"),
        (&[&head(5, 1), &token, &[1]], "a number"),
        (&[&head(5, 1), &token, &[0x7f, 0x61, b'x', 0xff]], "in chunks"),
        (&[&head(5, 2), &token, &text, &token, &text], "two"),
        (&[&head(5, 1), &token, &text, &[0]], "more behind the map"),
        (&[&head(5, 2), &token, &text], "a map that is cut off"),
        (&[&[0xbf], &token, &text], "a map without an end"),
        (&[&head(5, 1), &token, &[0x78, 200, b'x']], "a text that is cut off"),
        (&[&[0xbb, 255, 255, 255, 255, 255, 255, 255, 255], &token, &text], "a map of 2^64 pairs"),
        (
            &[&head(5, 2), &text, &[0x9b, 255, 255, 255, 255, 255, 255, 255, 255], &token, &text],
            "an array of 2^64",
        ),
        (&[&head(5, 2), &text, &[0x81; 30], &[1], &token, &text], "too deep"),
        (&[&head(5, 2), &text, &[0xff], &token, &text], "an end without a begin"),
        (&[&head(5, 2), &text, &[0x1c], &token, &text], "a reserved length"),
    ] {
        assert_eq!(of(parts), None, "{why}");
    }
}

#[test]
fn tokens_of_others_are_accepted() {
    assert!(verify(TOKEN.as_bytes(), &keys(), at(ISSUED)).is_ok());
    let rfc = Keys::parse(format!("# RFC 7515\njoe   {RFC_KEY} \r\n\n").as_bytes()).unwrap();
    assert!(verify(RFC_TOKEN.as_bytes(), &rfc, at(1_300_819_379)).is_ok());
    assert_eq!(verify(RFC_TOKEN.as_bytes(), &rfc, at(1_300_819_380)), Err(Refused::Expired));
    let both = Keys::parse(format!("a {RFC_KEY}\nb {KEY}").as_bytes()).unwrap();
    assert!(verify(TOKEN_OF_B.as_bytes(), &both, at(ISSUED)).is_ok());
    assert_eq!(verify(TOKEN.as_bytes(), &both, at(ISSUED)), Err(Refused::UnknownKey), "which?");
    assert_eq!(verify(TOKEN_OF_B.as_bytes(), &keys(), at(ISSUED)), Err(Refused::UnknownKey));
    assert_eq!(verify(TOKEN.as_bytes(), &rfc, at(ISSUED)), Err(Refused::Signature));
    assert_eq!(verify(TOKEN.as_bytes(), &Keys::default(), at(ISSUED)), Err(Refused::UnknownKey));
}

#[test]
fn only_hs256_is_accepted() {
    for (header, why) in [
        (r#"{"alg":"none"}"#, Refused::Algorithm),
        (r#"{"alg":"None","typ":"JWT"}"#, Refused::Algorithm),
        (r#"{"alg":"HS512"}"#, Refused::Algorithm),
        (r#"{"alg":"HS384"}"#, Refused::Algorithm),
        (r#"{"alg":"RS256"}"#, Refused::Algorithm),
        (r#"{"alg":"ES256"}"#, Refused::Algorithm),
        (r#"{"alg":"hs256"}"#, Refused::Algorithm),
        (r#"{"alg":"HS256\u0000"}"#, Refused::Algorithm),
        (r#"{"alg":["HS256"]}"#, Refused::Algorithm),
        (r#"{"typ":"JWT"}"#, Refused::Algorithm),
        ("{}", Refused::Algorithm),
        (r#"{"alg":"HS256","crit":["b64"],"b64":false}"#, Refused::Algorithm),
        (r#"{"alg":"none","alg":"HS256"}"#, Refused::Malformed),
        (r#"{"\u0061lg":"none","alg":"HS256"}"#, Refused::Malformed),
        (r#"{"alg":"HS256","kid":7}"#, Refused::Malformed),
        (r#"{"alg":"HS256","kid":"other"}"#, Refused::UnknownKey),
        (r#"{"alg":"HS256""#, Refused::Malformed),
        (r#"{"alg":"HS256"}}"#, Refused::Malformed),
        (r#""HS256""#, Refused::Malformed),
        ("", Refused::Malformed),
    ] {
        let token = signed(header, "{}", &key_bytes());
        assert_eq!(verify(token.as_bytes(), &keys(), at(ISSUED)), Err(why), "{header}");
    }
    for header in [
        r#" { "alg" : "HS256" , "x" : [ { "y" : [ 1.5e3 , null ] } ] } "#,
        r#"{"kid":"a","alg":"HS256"}"#,
    ] {
        let token = signed(header, "{}", &key_bytes());
        assert!(verify(token.as_bytes(), &keys(), at(ISSUED)).is_ok(), "{header}");
    }
    // Without a signature, or with an empty one.
    let [header, body, _] = TOKEN.split('.').collect::<Vec<_>>()[..] else { panic!() };
    for token in [
        format!("{header}.{body}"),
        format!("{header}.{body}."),
        format!("{TOKEN}.x"),
        String::new(),
        "..".into(),
    ] {
        assert_eq!(
            verify(token.as_bytes(), &keys(), at(ISSUED)),
            Err(Refused::Malformed),
            "{token}"
        );
    }
}

#[test]
fn times_are_checked_at_their_limits() {
    let check = |body: &str, times: Times| {
        verify(signed(HEADER, body, &key_bytes()).as_bytes(), &keys(), times)
            .map(|accepted| accepted.until)
    };
    let times = |now, leeway, window| Times { now, leeway, window };
    assert_eq!(check(r#"{"exp":100}"#, times(99, 0, 0)), Ok(None));
    assert_eq!(check(r#"{"exp":100}"#, times(100, 0, 0)), Err(Refused::Expired));
    assert_eq!(check(r#"{"exp":100}"#, times(104, 5, 0)), Ok(None));
    assert_eq!(check(r#"{"exp":100}"#, times(105, 5, 0)), Err(Refused::Expired));
    assert_eq!(check(r#"{"nbf":100}"#, times(94, 5, 0)), Err(Refused::Early));
    assert_eq!(check(r#"{"nbf":100}"#, times(95, 5, 0)), Ok(None));
    assert_eq!(check(r#"{"iat":100}"#, times(94, 5, 0)), Err(Refused::Early));
    assert_eq!(check(r#"{"iat":100}"#, times(115, 5, 10)), Ok(Some(115)));
    assert_eq!(check(r#"{"iat":100}"#, times(116, 5, 10)), Err(Refused::Stale));
    assert_eq!(check(r#"{"exp":1000}"#, times(100, 5, 10)), Err(Refused::Stale), "no iat");
    assert_eq!(check(r#"{"exp":100.9}"#, times(99, 0, 0)), Ok(None));
    assert_eq!(check(r#"{"exp":-1}"#, times(99, 0, 0)), Err(Refused::Expired));
    for body in [
        r#"{"exp":"100"}"#,
        r#"{"exp":null}"#,
        r#"{"exp":1,"exp":9999}"#,
        r#"{"exp":-}"#,
        r#"{"exp":1.}"#,
        r#"{"exp":.5}"#,
        r#"{"exp":01}"#,
        r#"{"exp":+1}"#,
        r#"{"exp":1e}"#,
        r#"{"exp":1e+}"#,
        r#"{"exp":1e1.0}"#,
        r#"{"exp":1e1e1}"#,
        r#"{"exp":1-1}"#,
        r#"{"exp":--1}"#,
        r#"{"e\u0078p":1}"#,
        "[]",
        "{",
        "",
    ] {
        assert_eq!(check(body, times(99, 0, 0)), Err(Refused::Malformed), "{body}");
    }
}

/// RFC 7519, section 2: a NumericDate is a JSON numeric value, so it may have a fraction and an exponent.
#[test]
fn a_time_may_be_any_json_number() {
    let expires = |exp: &str, now: u64| {
        let token = signed(HEADER, &format!("{{\"exp\":{exp}}}"), &key_bytes());
        verify(token.as_bytes(), &keys(), Times { now, leeway: 0, window: 0 }).map(|_| ())
    };
    for (exp, end) in [
        ("1e10", 10_000_000_000),
        ("1E10", 10_000_000_000),
        ("1e+10", 10_000_000_000),
        ("1.7e9", 1_700_000_000),
        ("1.7000000009e9", 1_700_000_000),
        ("17000000009e-1", 1_700_000_000),
        ("17000000009E-01", 1_700_000_000),
        ("1700000000.999", 1_700_000_000),
        ("0.00017e13", 1_700_000_000),
        ("1e0", 1),
        ("1e19", 10_000_000_000_000_000_000),
        ("18446744073709551615", u64::MAX),
        // More than any time.
        ("18446744073709551616", u64::MAX),
        ("99999999999999999999", u64::MAX),
        ("1e20", u64::MAX),
        ("1e99999999999999999999999", u64::MAX),
    ] {
        assert_eq!(expires(exp, end - 1), Ok(()), "{exp}");
        assert_eq!(expires(exp, end), Err(Refused::Expired), "{exp}");
    }
    for over in
        ["0", "-0", "0.0", "0e99999999", "-1e10", "0.9", "9e-1", "1e-99999999999999999999999"]
    {
        assert_eq!(expires(over, 0), Err(Refused::Expired), "{over}");
    }
}

#[test]
fn a_file_of_keys_is_read_and_its_errors_show_no_key() {
    let short = base64(&[7; 31]);
    let long = base64(&[7; 513]);
    for (file, why) in [
        (String::new(), "there is no key"),
        ("# only\n\n".into(), "there is no key"),
        ("a".into(), "line 1 is no name and key"),
        (format!("a {KEY} b"), "line 1 is no name and key"),
        (format!("a {KEY}\nb {short}"), "line 2 has a key of less than 32 bytes"),
        (format!("a {long}"), "line 1 has a key that is not in base64url"),
        (format!("a {KEY}="), "line 1 has a key that is not in base64url"),
        (format!("a {KEY}\na {KEY}"), "line 2 has the name of an earlier line"),
        (format!("\u{7f} {KEY}"), "line 1 has a name"),
    ] {
        let found = Keys::parse(file.as_bytes()).err().unwrap();
        assert!(found.starts_with(why) && !found.contains(&KEY[..8]), "{found}");
    }
}

/// A function with these parameters and a clock that stands.
fn function(params: &[(&str, &str)], settings: &[(&str, u64)]) -> (CoapAuth, Arc<AtomicU64>) {
    let now = Arc::new(AtomicU64::new(ISSUED));
    let clock = now.clone();
    let mut function = CoapAuth::new(Shared::new(Arc::new(move || clock.load(Ordering::Relaxed))));
    for (param, value) in params {
        function.configure(param, value.as_bytes()).unwrap();
    }
    function.configure("keys", format!("a {KEY}\nb {RFC_KEY}").as_bytes()).unwrap();
    for (name, value) in settings {
        let at = function.registers().iter().position(|r| &*r.name == *name).unwrap();
        function.write(at, *value).unwrap();
    }
    (function, now)
}

fn from(port: u16) -> Origin {
    let peer = SocketAddr::from(([127, 0, 0, 1], port));
    Origin::Datagram { port: 0, peer, local: None }
}

fn ask(function: &mut dyn Function, port: u16, bytes: &[u8]) -> (Outcome, Vec<u8>) {
    let mut messages = Messages::new(1 << 16, 1 << 10);
    messages.push_of(&RequestId { origin: from(port), number: 0 }, bytes);
    function.decide(Direction::Requests, &mut messages).unwrap();
    (messages.outcome(0), messages.bytes(0).to_vec())
}

fn value(function: &mut dyn Function, name: &str) -> u64 {
    let at = function.registers().iter().position(|register| &*register.name == name).unwrap();
    function.read().unwrap()[at]
}

const DROPPED: Outcome = Outcome::Drop(DropReason::FunctionDrop);

#[test]
fn requests_pass_with_a_token_only_and_each_reason_is_counted() {
    let (mut f, now) = function(&[("tenant", "a")], &[("window_s", 600)]);
    let mut forged = TOKEN.to_owned().into_bytes();
    *forged.last_mut().unwrap() = b'g';
    let forged = String::from_utf8(forged).unwrap();
    let get = [&[0x40, 1, 0x7d, 0x34, 0xbb][..], b"temperature"].concat();
    let none = signed(r#"{"alg":"none"}"#, "{}", &key_bytes());
    let expired = signed(HEADER, r#"{"iat":1700000000,"exp":1}"#, &key_bytes());
    let early = signed(HEADER, r#"{"iat":1800000000}"#, &key_bytes());
    let giant = vec![0x40; 60_000];
    for (bytes, outcome, register) in [
        (post(1, TOKEN), Outcome::Pass, "passed"),
        (unhex(AIOCOAP), Outcome::Pass, "passed"),
        (vec![0x60, 0, 1, 2], Outcome::Pass, "acknowledgements"),
        (vec![0x70, 0, 1, 2], Outcome::Pass, "acknowledgements"),
        (Vec::new(), DROPPED, "malformed"),
        (giant, DROPPED, "malformed"),
        (vec![0x50, 0, 1, 2], DROPPED, "malformed"),
        ([&[0x60, 0x45, 0x7d, 0x34, 0xff][..], b"22.3 C"].concat(), DROPPED, "malformed"),
        (get, DROPPED, "no_token"),
        (post(1, &forged), DROPPED, "bad_signature"),
        (post(1, "a.b"), DROPPED, "bad_token"),
        (post(1, &none), DROPPED, "bad_algorithm"),
        (post(1, TOKEN_OF_B), DROPPED, "unknown_key"),
        (post(1, &expired), DROPPED, "expired"),
        (post(1, &early), DROPPED, "early"),
    ] {
        let before = value(&mut f, register);
        let (found, same) = ask(&mut f, 1, &bytes);
        assert_eq!((found, value(&mut f, register)), (outcome, before + 1), "{register}");
        assert_eq!(same, bytes);
    }
    now.store(ISSUED + 661, Ordering::Relaxed);
    assert_eq!((ask(&mut f, 1, &post(1, TOKEN)).0, value(&mut f, "stale")), (DROPPED, 1));
    let mut replies = Messages::new(1 << 10, 1 << 10);
    replies.push(b"no CoAP");
    f.decide(Direction::Replies, &mut replies).unwrap();
    assert_eq!(replies.outcome(0), Outcome::Pass);
    f.reset().unwrap();
    assert_eq!((value(&mut f, "passed"), value(&mut f, "window_s")), (0, 600));
}

#[test]
fn refusals_and_pings_are_answered() {
    let (mut f, _) = function(&[("refuse", "answer"), ("tenant", "a")], &[]);
    assert_eq!(ask(&mut f, 1, &[0x40, 0, 1, 2]), (Outcome::Reply, vec![0x70, 0, 1, 2]));
    let con = ask(&mut f, 1, &post(0x0304, "x"));
    assert_eq!(con, (Outcome::Reply, vec![0x62, 0x81, 3, 4, 7, 8]));
    let mut non = post(0x0304, "x");
    non[0] = 0x52;
    assert_eq!(ask(&mut f, 1, &non), (Outcome::Reply, vec![0x52, 0x81, 3, 4, 7, 8]));
    assert_eq!(ask(&mut f, 1, b"").0, DROPPED, "what is no CoAP gets no answer");
}

#[test]
fn the_payload_alone_goes_on_if_that_is_asked_for() {
    let (mut function, _) = function(&[("tenant", "a"), ("forward", "payload")], &[]);
    let (outcome, bytes) = ask(&mut function, 1, &unhex(AIOCOAP));
    assert_eq!((outcome, bytes), (Outcome::Pass, vec![1, 2, 3, 4]));
    // A token alone, and what asks for nothing.
    let without = [&[0x40, 2, 0, 1, 0xff, 0xa1, 0x65][..], b"token", &cbor_text(TOKEN)].concat();
    for other in [&without[..], &[0x60, 0, 0, 1]] {
        let (outcome, _) = ask(&mut function, 1, other);
        assert_eq!(outcome, Outcome::Drop(DropReason::FunctionDrop));
    }
    let forged = unhex(&AIOCOAP.replace("2e596e6f58", "2e5a6e6f58"));
    assert_eq!(ask(&mut function, 1, &forged).0, Outcome::Drop(DropReason::FunctionDrop));
    assert_eq!((value(&mut function, "passed"), value(&mut function, "malformed")), (1, 2));
}

#[test]
fn a_token_is_used_once_if_that_is_asked_for() {
    let (mut f, now) = function(&[("tenant", "a")], &[("window_s", 600), ("once", 1)]);
    assert_eq!(ask(&mut f, 1, &post(1, TOKEN)).0, Outcome::Pass);
    assert_eq!(ask(&mut f, 1, &post(1, TOKEN)).0, Outcome::Pass, "a retransmission");
    assert_eq!(ask(&mut f, 1, &post(2, TOKEN)).0, DROPPED, "another message");
    assert_eq!(ask(&mut f, 2, &post(1, TOKEN)).0, DROPPED, "another sender");
    assert_eq!((value(&mut f, "passed"), value(&mut f, "replayed")), (2, 2));
    let other = signed(HEADER, r#"{"iat":1700000000,"jti":2}"#, &key_bytes());
    assert_eq!(ask(&mut f, 2, &post(1, &other)).0, Outcome::Pass, "another token");
    // As long as the window is open.
    now.store(ISSUED + 660, Ordering::Relaxed);
    assert_eq!(ask(&mut f, 2, &post(1, TOKEN)).0, DROPPED);
    assert_eq!(value(&mut f, "replayed"), 3);
    now.store(ISSUED + 661, Ordering::Relaxed);
    assert_eq!(ask(&mut f, 1, &post(1, TOKEN)).0, DROPPED);
    assert_eq!(value(&mut f, "stale"), 1);
    // Without a window nothing says how long to remember a token, and a place can tell times apart for so long only.
    let (mut f, _) = function(&[("tenant", "a")], &[("once", 1)]);
    assert_eq!((ask(&mut f, 1, &post(1, TOKEN)).0, value(&mut f, "stale")), (DROPPED, 1));
    let ready = |settings: &[(&str, u64)]| function(&[], settings).0.ready();
    assert!(ready(&[("window_s", 1 << 32)]).is_ok() && ready(&[]).is_ok());
    let once = |window_s| ready(&[("once", 1), ("window_s", window_s), ("leeway_s", 10)]);
    assert!(once(1).is_ok() && once(8_000_000 - 20).is_ok());
    for window_s in [0, 8_000_000 - 19, 1 << 32] {
        let why = once(window_s).unwrap_err().to_string();
        assert!(why.contains("window_s + 2 * leeway_s is at most 8000000"), "{why}");
    }
}

#[test]
fn places_for_used_tokens_are_few_and_are_used_again() {
    let seen = Seen::default();
    assert_eq!(seen.note(1, 1, ISSUED, ISSUED + 9), Use::Crowded, "no memory was reserved");
    seen.reserve();
    // All of these tokens have the same places.
    let token = |n: u64| n << 32 | 5;
    for n in 1..=8 {
        assert_eq!(seen.note(token(n), 1, ISSUED, ISSUED + 100), Use::First);
    }
    assert_eq!(seen.note(token(9), 1, ISSUED, ISSUED + 100), Use::Crowded);
    assert_eq!(seen.note(token(8), 1, ISSUED, ISSUED + 100), Use::Again);
    assert_eq!(seen.note(token(8), 2, ISSUED, ISSUED + 100), Use::Replay);
    assert_eq!(seen.note(token(8), 2, ISSUED + 100, ISSUED + 100), Use::Replay, "to the end");
    let later = ISSUED + 100 + 32;
    assert_eq!(seen.note(token(9), 1, later, later + 100), Use::First);
    assert_eq!(seen.note(token(8), 2, later, later + 100), Use::First, "its time was over");
    // Two workers at once: one of them is first.
    let seen = &Seen::default();
    seen.reserve();
    for round in 0..2000u64 {
        let uses = std::thread::scope(|scope| {
            let note = |user| {
                move || {
                    seen.note(round.wrapping_mul(0x9e37_79b9_7f4a_7c15), user, ISSUED, ISSUED + 9)
                }
            };
            let (a, b) = (scope.spawn(note(1)), scope.spawn(note(2)));
            [a.join().unwrap(), b.join().unwrap()]
        });
        let first = uses.iter().filter(|of| **of == Use::First).count();
        assert!(first == 1 || uses == [Use::Crowded; 2], "{round}: {uses:?}");
    }
}

#[test]
fn it_needs_a_file_of_keys() {
    let made = |spec: &Spec, file: &[u8]| {
        let sizes = Sizes { message_bytes: 1024, reply_bytes: 1024 };
        let code = Code::open(spec, file).unwrap();
        code.instance(spec, sizes).err().map(|error| error.to_string())
    };
    let mut spec = Spec::new("f", "coap-auth");
    assert!(made(&spec, b"").unwrap().contains("needs the parameter \"keys\""));
    spec.params = vec![("keys".into(), "/etc/serval/keys".into())];
    assert_eq!(file_of(&spec).as_deref(), Some("/etc/serval/keys"));
    assert_eq!(made(&spec, format!("42 {KEY}").as_bytes()), None);
    let why = made(&spec, b"42 secret").unwrap();
    assert!(why.contains("cannot use the file of \"keys\"") && !why.contains("secret"), "{why}");
    // A name of digits is a text as well.
    spec.params.push(("tenant".into(), 42.into()));
    assert_eq!(made(&spec, format!("42 {KEY}").as_bytes()), None);
    spec.params[1].1 = 43.into();
    let why = made(&spec, format!("42 {KEY}").as_bytes()).unwrap();
    assert!(why.contains("no key of the tenant"), "{why}");
    spec.params = vec![("keys".into(), "k".into()), ("refuse".into(), "sometimes".into())];
    assert!(made(&spec, b"").unwrap().contains("it is \"drop\" or \"answer\""));
    spec.params = vec![("keys".into(), "k".into()), ("once".into(), 2.into())];
    assert!(made(&spec, b"").unwrap().contains("once is at most 1"));
    spec.params = vec![("keys".into(), "k".into()), ("once".into(), 1.into())];
    let file = format!("a {KEY}");
    assert!(made(&spec, file.as_bytes()).unwrap().contains("once = 1 needs window_s"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    /// No change of one character of a token is accepted, and none makes a wrong one right.
    #[test]
    fn a_changed_token_is_refused(at in 0usize..124, to: u8) {
        let mut token = TOKEN.as_bytes().to_vec();
        prop_assume!(token[at] != to);
        token[at] = to;
        let found = verify(&token, &keys(), at_issue());
        prop_assert!(found.is_err());
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300), cut in 0usize..200) {
        let (mut f, _) = function(&[("tenant", "a")], &[]);
        let (outcome, _) = ask(&mut f, 1, &bytes);
        prop_assert!(outcome != Outcome::Pass || bytes.len() == 4, "an acknowledgement at most");
        let whole = unhex(AIOCOAP);
        let (outcome, _) = ask(&mut f, 1, &whole[..cut.min(whole.len() - 1)]);
        prop_assert!(outcome != Outcome::Pass);
    }
}
