/* Generated from crates/wire by `cargo xtask gen-abi`. Do not edit.
 * The concepts are explained in handshake.rs and drop_reason.rs there. */
#ifndef SERVAL_CLIENT_HANDSHAKE_H
#define SERVAL_CLIENT_HANDSHAKE_H

#include <stdint.h>

#define SERVAL_HANDSHAKE_MAGIC 5571881007492253011ull
#define SERVAL_HANDSHAKE_VERSION 3u
#define SERVAL_HANDSHAKE_HELLO_BYTES 24u
#define SERVAL_HANDSHAKE_ANSWER_BYTES 32u
#define SERVAL_HANDSHAKE_ANSWER_BYTES_MAX 512u
#define SERVAL_HANDSHAKE_DESCRIPTORS 3u

#define SERVAL_DROP_REASONS(X) \
    X(0, socket_overflow) \
    X(1, truncated) \
    X(2, bad_framing) \
    X(3, connection_limit) \
    X(45, tenant_connections) \
    X(4, idle_timeout) \
    X(36, looped_source) \
    X(37, privileged_source) \
    X(5, too_long) \
    X(6, too_short) \
    X(7, no_credit) \
    X(8, no_accelerator) \
    X(9, queue_time) \
    X(43, tenant_rate) \
    X(44, tenant_outstanding) \
    X(10, request_timeout) \
    X(11, bad_length) \
    X(12, kernel_drop) \
    X(13, reply_too_long) \
    X(14, reply_ratio) \
    X(15, reply_unframable) \
    X(16, client_gone) \
    X(17, slow_client) \
    X(18, reply_memory) \
    X(19, send_failed) \
    X(20, mqueue_dead) \
    X(21, accelerator_lost) \
    X(22, accelerator_stalled) \
    X(23, reconfiguring) \
    X(24, handover_full) \
    X(25, draining) \
    X(26, drain_timeout) \
    X(38, function_drop) \
    X(39, function_failed) \
    X(42, ring_full) \
    X(40, upstream_refused) \
    X(41, upstream_flows) \
    X(27, stale_token) \
    X(28, bad_message) \
    X(29, unwanted_reply) \
    X(30, consumed_drop) \
    X(31, backend_late) \
    X(32, backend_protocol) \
    X(33, backend_unasked) \
    X(34, backend_too_long) \
    X(35, backend_mismatch) \
    X(46, backend_function) \

#endif
