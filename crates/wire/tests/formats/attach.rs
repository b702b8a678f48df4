//! The attach protocol: messages round-trip, and invalid bytes are only refused.

use proptest::collection::vec;
use proptest::prelude::*;
use wire::attach::{
    Bye, FromEngine, FromRuntime, Hello, KERNEL_BYTES_MAX, MESSAGE_BYTES_MAX, NAME_BYTES_MAX,
    Offer, PARAM_NAME_BYTES_MAX, PARAM_TEXT_BYTES_MAX, PARAMS_MAX, ParamValue, Ready,
    TEXT_BYTES_MAX, TOGETHER_MAX,
};

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: if cfg!(miri) { 8 } else { 512 },
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// A text of at most `most` bytes.
fn text(most: usize) -> impl Strategy<Value = String> {
    vec(any::<char>(), 0..=most / 4).prop_map(String::from_iter)
}

/// A sentence, which is decoded without control characters.
fn sentence() -> impl Strategy<Value = String> {
    text(TEXT_BYTES_MAX).prop_map(|text| text.replace(char::is_control, "?"))
}

fn from_runtime() -> impl Strategy<Value = FromRuntime> {
    let hello =
        (any::<(u32, u32)>(), text(NAME_BYTES_MAX), text(NAME_BYTES_MAX), text(KERNEL_BYTES_MAX))
            .prop_map(|((abi_version, process), kind, service, kernel)| {
                FromRuntime::Hello(Hello { abi_version, process, kind, service, kernel })
            });
    let ready = any::<(u64, u32)>()
        .prop_map(|(generation, blocks)| FromRuntime::Ready(Ready { generation, blocks }));
    let bye = (any::<u64>(), sentence())
        .prop_map(|(reason, text)| FromRuntime::Bye(Bye { reason, text }));
    prop_oneof![hello, ready, bye]
}

fn from_engine() -> impl Strategy<Value = FromEngine> {
    let number = any::<f64>().prop_filter("equal to itself", |value| !value.is_nan());
    let words = text(PARAM_TEXT_BYTES_MAX).prop_map(ParamValue::Text);
    let value = prop_oneof![number.prop_map(ParamValue::Number), words];
    let params = vec((text(PARAM_NAME_BYTES_MAX), value), 0..=PARAMS_MAX);
    let names = (text(NAME_BYTES_MAX), text(NAME_BYTES_MAX), text(KERNEL_BYTES_MAX));
    let offer = (any::<(u64, u64, u32, u32)>(), names, params).prop_map(
        |(
            (generation, region_bytes, blocks, heartbeat_ms),
            (service, accelerator, kernel),
            params,
        )| {
            FromEngine::Offer(Offer {
                generation,
                region_bytes,
                blocks,
                heartbeat_ms,
                service,
                accelerator,
                kernel,
                params,
            })
        },
    );
    let refuse = sentence().prop_map(FromEngine::Refuse);
    let stop = any::<u32>().prop_map(|drain_ms| FromEngine::Stop { drain_ms });
    let together = (1..=TOGETHER_MAX).prop_map(FromEngine::Together);
    prop_oneof![offer, refuse, stop, together]
}

/// Changes, truncations and extensions of bytes.
fn damaged(mut bytes: Vec<u8>, changes: &[(usize, u8)], len: usize, more: &[u8]) -> Vec<u8> {
    for (at, value) in changes {
        let at = at % bytes.len();
        bytes[at] = *value;
    }
    bytes.truncate(len);
    bytes.extend_from_slice(more);
    bytes
}

fn damage() -> impl Strategy<Value = (Vec<(usize, u8)>, usize, Vec<u8>)> {
    (vec(any::<(usize, u8)>(), 0..4), 0..=MESSAGE_BYTES_MAX, vec(any::<u8>(), 0..8))
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn messages_round_trip(runtime in from_runtime(), engine in from_engine()) {
        let bytes = runtime.encode();
        prop_assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        prop_assert_eq!(FromRuntime::decode(&bytes), Ok(runtime));
        let bytes = engine.encode();
        prop_assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        prop_assert_eq!(FromEngine::decode(&bytes), Ok(engine));
    }

    /// A message decoded from damaged bytes is within its limits: encoded again it gives the same bytes, except for
    /// control characters in a sentence.
    #[test]
    fn damaged_messages_are_refused_or_round_trip(
        runtime in from_runtime(),
        engine in from_engine(),
        (changes, len, more) in damage(),
    ) {
        let bytes = damaged(runtime.encode(), &changes, len, &more);
        match FromRuntime::decode(&bytes) {
            Ok(FromRuntime::Bye(Bye { text, .. })) if text.contains('?') => {
                prop_assert!(!text.contains(char::is_control));
            }
            Ok(message) => prop_assert_eq!(message.encode(), bytes),
            Err(_) => {}
        }
        let bytes = damaged(engine.encode(), &changes, len, &more);
        match FromEngine::decode(&bytes) {
            Ok(FromEngine::Refuse(_)) | Err(_) => {}
            Ok(message) => prop_assert_eq!(message.encode(), bytes),
        }
    }
}
