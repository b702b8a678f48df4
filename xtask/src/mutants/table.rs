//! The seeded mutants, and the tests that catch them.

use super::{Mutant, mutant};

const SEEDS: &str = "crates/sim/tests/seeds.rs::it_does_not_matter_which_thread_runs_a_seed";

const LINKS: &str = "crates/sim/tests/scenes/links.rs::links_break_and_accelerators_come_back";

const HISTORY: &str =
    "crates/builtins/tests/functions/cache_history.rs::nothing_that_was_overwritten_is_served";

/// All mutants.
pub(super) const MUTANTS: &[Mutant] = &[
    // Mutants that are caught by a time-out come first: the others run meanwhile.
    mutant(
        "sleep_through",
        "an accelerator thread that sleeps is not woken",
        &["crates/accel/tests/threads.rs::a_sleeping_thread_is_woken_for_every_message"],
    ),
    mutant(
        "ignore_stop",
        "blocks do not get the stop request",
        &[
            "crates/accel/tests/worker.rs::a_stop_ends_blocks_with_messages_waiting_and_blocks_that_sleep",
        ],
    ),
    // Rings.
    mutant(
        "skip_release",
        "slots that were read are not released",
        &["crates/mqueue/tests/rings/ring.rs::every_protocol_carries_every_size", SEEDS],
    ),
    mutant(
        "publish_unordered",
        "the head is stored before the messages it publishes are visible",
        &["crates/mqueue-loom/tests/loom/rings.rs::doorbell_published_one_by_one"],
    ),
    mutant(
        "bundle_unordered",
        "a bundle's slot is stored before its messages are visible",
        &["crates/mqueue-loom/tests/loom/bundles.rs::a_bundle_arrives"],
    ),
    mutant(
        "lend_twice",
        "a buffer of a pool stays free while it has an owner",
        &["crates/mqueue/tests/rings/bundles.rs::a_buffer_has_one_owner"],
    ),
    mutant(
        "believe_bundle",
        "the shape of a bundle is not checked",
        &["crates/mqueue/tests/rings/bundles.rs::what_a_bundle_must_not_be"],
    ),
    mutant(
        "believe_replies",
        "replies outside the area of their bundle are read",
        &["crates/mqueue/tests/rings/bundles.rs::any_completion_is_refused_or_lies_in_its_area"],
    ),
    mutant(
        "overrun_ring",
        "a message overwrites the oldest one of a full ring",
        &["crates/mqueue/tests/rings/property.rs::a_ring_is_a_bounded_queue", SEEDS],
    ),
    mutant(
        "wrap_sequence",
        "sequence numbers of units wrap after 65 536 messages",
        &["crates/mqueue/tests/rings/property.rs::old_units_never_pass_for_new_ones"],
    ),
    mutant(
        "forget_restamp",
        "units that a message does not write keep their old sequence number",
        &["crates/mqueue/tests/rings/property.rs::old_units_never_pass_for_new_ones"],
    ),
    mutant(
        "believe_head",
        "an invalid head of the other side is used",
        &["crates/mqueue/tests/rings/hostile.rs::a_flood_without_credit_ends", SEEDS],
    ),
    mutant(
        "believe_header",
        "an invalid header of the other side is used",
        &["crates/mqueue/tests/rings/hostile.rs::a_bad_header_is_skipped"],
    ),
    // CoAP authentication.
    mutant(
        "believe_signature",
        "the signature of a token is not looked at",
        &[
            "crates/builtins/tests/functions/coap_auth.rs::requests_pass_with_a_token_only_and_each_reason_is_counted",
        ],
    ),
    mutant(
        "ignore_window",
        "a token that was issued too long ago is accepted",
        &["crates/builtins/tests/functions/coap_auth.rs::times_are_checked_at_their_limits"],
    ),
    // Sketches.
    mutant(
        "floor_too_high",
        "words whose rank is just above the least register are left out",
        &[
            "crates/builtins/tests/functions/sketch.rs::all_instructions_do_the_same_with_high_registers",
        ],
    ),
    mutant(
        "merge_by_sum",
        "registers of HyperLogLog are merged by their sum",
        &[
            "crates/builtins/tests/functions/sketch.rs::the_merge_of_two_sketches_is_that_of_their_union",
        ],
    ),
    mutant(
        "merge_last_state",
        "of the states of several workers only the last one is read",
        &["crates/builtins/tests/functions/builtins.rs::the_function_counts_a_range_and_merges"],
    ),
    mutant(
        "split_single_state",
        "several workers each have a part of a state that there is once",
        &[
            "crates/sim/tests/scenes/owners.rs::one_worker_sees_all_requests_and_their_replies",
            "crates/sim/tests/scenes/owners.rs::requests_with_the_same_key_meet_the_same_state",
        ],
    ),
    mutant(
        "limit_each_worker",
        "each worker has buckets of its own",
        &["crates/builtins/tests/functions/builtins.rs::a_rate_is_that_of_all_workers_together"],
    ),
    mutant(
        "limit_each_address",
        "a host of IPv6 has a rate for each of its addresses",
        &["crates/builtins/tests/functions/builtins.rs::each_client_has_the_rate"],
    ),
    // Commands of memcached.
    mutant(
        "memcached_flags_unchecked",
        "a line with wrong flags is taken for a command",
        &[
            "crates/server/tests/memcached_commands.rs::data_of_a_refused_line_are_commands_for_the_proxy_as_for_memcached",
        ],
    ),
    mutant(
        "memcached_refused_data",
        "what follows a refused line is taken for its data",
        &[
            "crates/server/tests/memcached_commands.rs::data_of_a_refused_line_are_commands_for_the_proxy_as_for_memcached",
        ],
    ),
    mutant(
        "memcached_error_after_noreply",
        "a malformed command with `noreply` is answered",
        &[
            "crates/server/tests/memcached_commands.rs::data_of_a_refused_line_are_commands_for_the_proxy_as_for_memcached",
        ],
    ),
    mutant(
        "memcached_limit_ends",
        "a value over the limit ends the connection",
        &[
            "crates/server/tests/memcached_commands.rs::a_value_over_the_limit_is_swallowed_and_answered",
        ],
    ),
    mutant(
        "memcached_key_as_asked",
        "a key in base64 is not the one that was asked for",
        &[
            "crates/server/tests/memcached_commands.rs::keys_have_any_bytes_and_are_returned_as_they_were_stored",
        ],
    ),
    mutant(
        "pass_any_datagram",
        "memcached gets datagrams that are not one command",
        &[
            "crates/server/tests/memcached_commands.rs::a_datagram_that_is_not_one_command_does_not_reach_memcached",
        ],
    ),
    mutant(
        "first_value_only",
        "of a datagram with several keys the client gets one value",
        &[
            "crates/server/tests/memcached_commands.rs::all_values_of_a_datagram_with_several_keys_arrive",
        ],
    ),
    mutant(
        "first_value_of_backend",
        "of a datagram with several keys a kernel gets one value",
        &["crates/server/tests/backends.rs::several_values_of_memcached_over_udp_are_one_answer"],
    ),
    // The cache in front of memcached.
    mutant(
        "cache_write_unseen",
        "a write makes entries invalid when it is answered, not before",
        &[HISTORY],
    ),
    mutant(
        "cache_fill_while_pending",
        "an answer is kept though a write is in progress",
        &[HISTORY],
    ),
    mutant(
        "cache_fill_unchecked",
        "an answer is kept though a write began since the question",
        &[HISTORY],
    ),
    mutant(
        "cache_noreply_forgotten",
        "a command without a reply is taken for done at once",
        &[HISTORY],
    ),
    mutant(
        "cache_no_grace",
        "what is lost with a connection or a datagram is taken for not done",
        &[HISTORY],
    ),
    mutant(
        "first_datagram_only",
        "of an answer in several datagrams the client gets the first",
        &["crates/server/tests/proxy.rs::an_answer_of_several_datagrams_is_delivered_whole"],
    ),
    mutant(
        "cache_datagrams_take_all",
        "datagrams may have all tickets",
        &[
            "crates/builtins/tests/functions/cache.rs::datagrams_without_answers_take_no_tickets_from_connections",
        ],
    ),
    mutant(
        "cache_missed_grace",
        "a write of a connection that lives ends after the grace period",
        &[
            "crates/builtins/tests/functions/cache.rs::a_write_of_a_live_connection_is_pending_after_a_restart",
        ],
    ),
    mutant("cache_ignore_ttl", "a value is kept for longer than the server does", &[HISTORY]),
    mutant(
        "cache_touch_is_read",
        "commands that change a value or its time are taken for reads",
        &[HISTORY],
    ),
    mutant("cache_ignore_flush", "flush_all forgets nothing", &[HISTORY]),
    mutant("cache_flush_at_once", "flush_all with a delay forgets nothing", &[HISTORY]),
    mutant(
        "cache_serve_unattached",
        "values are served though a worker does not see its messages",
        &[
            "crates/builtins/tests/functions/cache.rs::nothing_is_served_while_a_worker_does_not_see_its_messages",
        ],
    ),
    mutant(
        "cache_many_unchecked",
        "of several keys one is served that was written since",
        &[
            "crates/builtins/tests/functions/cache.rs::several_keys_are_answered_if_all_are_known",
            HISTORY,
        ],
    ),
    mutant(
        "cache_absent_unchecked",
        "that a key is not there is served though it was written since",
        &[HISTORY],
    ),
    mutant("cache_base64_as_text", "a key in base64 is taken for another one", &[HISTORY]),
    mutant(
        "cache_mix_answers",
        "an answer of several datagrams is delivered though its identifier was used again",
        &[
            "crates/builtins/tests/functions/cache_tickets.rs::an_answer_of_several_datagrams_whose_identifier_was_used_again_is_not_delivered",
        ],
    ),
    mutant(
        "cache_write_again",
        "a write that waits and is shown again has several tickets",
        &[
            "crates/builtins/tests/functions/cache_tickets.rs::a_message_that_waits_and_is_shown_again_has_one_ticket",
        ],
    ),
    mutant(
        "cache_ask_again",
        "a read that waits and is shown again has several tickets",
        &[
            "crates/builtins/tests/functions/cache_tickets.rs::a_message_that_waits_and_is_shown_again_has_one_ticket",
        ],
    ),
    mutant(
        "cache_fill_dropped",
        "a value is kept that another function has dropped",
        &[
            "crates/builtins/tests/functions/cache_tickets.rs::what_another_function_has_dropped_is_not_kept",
        ],
    ),
    mutant(
        "cache_restart_grace",
        "the grace period of a lost write begins again when its connection ends",
        &[
            "crates/builtins/tests/functions/cache_tickets.rs::the_grace_period_of_a_lost_write_begins_once",
        ],
    ),
    // Tokens.
    mutant(
        "reuse_token",
        "a token is reused as soon as it has ended",
        &["crates/wire/src/session.rs::a_token_ends_once_and_only_on_its_mqueue"],
    ),
    mutant(
        "forget_mqueue",
        "a token is valid on every mqueue",
        &["crates/wire/src/session.rs::a_token_ends_once_and_only_on_its_mqueue", SEEDS],
    ),
    mutant(
        "reuse_token_of_bundle",
        "the tokens of a bundle are reused as soon as it has ended",
        &["crates/wire/tests/formats/bundles.rs::a_table_with_bundles_matches_the_model"],
    ),
    mutant(
        "return_buffer_while_it_leaves",
        "the buffer of a bundle is free when its messages have ended, though replies leave from it",
        &["crates/wire/tests/formats/bundles.rs::a_table_with_bundles_matches_the_model"],
    ),
    mutant(
        "forget_mqueue_of_bundle",
        "a token of a bundle is valid on every mqueue",
        &["crates/wire/tests/formats/bundles.rs::a_table_with_bundles_matches_the_model"],
    ),
    // The turn.
    mutant(
        "return_buffer_early",
        "the buffer of a bundle is free when one of its messages has ended",
        &[SEEDS],
    ),
    mutant(
        "return_received_early",
        "the buffer of a GRO batch that was received in place is free when one of its bundles has ended",
        &[
            "crates/worker/tests/in_place.rs::messages_arrive_in_the_pool_and_replies_leave_from_there",
        ],
    ),
    mutant(
        "try_bundles_always",
        "where bundles do not pay, trials are as frequent as where they do",
        &["crates/engine/src/service/bundle/choice.rs::trials_get_rare_where_bundles_do_not_pay"],
    ),
    mutant(
        "flatter_bundles",
        "the single message of a trial may wait behind more requests than the bundle",
        &["crates/engine/src/service/bundle/choice.rs::no_trial_where_it_says_nothing"],
    ),
    mutant("amplify_bundle", "replies in bundles are not limited by their requests", &[SEEDS]),
    mutant(
        "leak_credit",
        "a request that times out keeps its credit",
        &["crates/sim/tests/scenes/drops.rs::an_unanswered_request_times_out", SEEDS],
    ),
    mutant(
        "lose_drop",
        "a request that times out is not counted",
        &["crates/sim/tests/scenes/drops.rs::an_unanswered_request_times_out", SEEDS],
    ),
    mutant(
        "count_twice",
        "a message that waits for credit is counted at every attempt",
        &[
            "crates/sim/tests/scenes/drops.rs::messages_waiting_for_credit_are_dropped_by_a_drain",
            SEEDS,
        ],
    ),
    mutant(
        "count_received_last",
        "datagrams that are dropped immediately are counted as dropped before they are counted as received",
        &["crates/server/tests/overload.rs::the_accounting_identity_holds_at_every_scrape"],
    ),
    mutant(
        "read_received_first",
        "a snapshot reads the received counter before the outcomes",
        &["crates/server/tests/overload.rs::the_accounting_identity_holds_at_every_scrape"],
    ),
    mutant(
        "answer_from_another_port",
        "a reply leaves through another port than its request used",
        &[
            SEEDS,
            "crates/sim/tests/scenes/promises.rs::a_stuck_block_does_not_take_its_service_with_it",
        ],
    ),
    mutant(
        "amplify",
        "a reply to a forged source may be of any length",
        &[
            "crates/sim/tests/scenes/drops.rs::a_large_reply_to_an_unverified_source_is_kept_back",
            SEEDS,
        ],
    ),
    mutant(
        "answer_own_ports",
        "a datagram whose source is a port of the server is answered",
        &["crates/sim/tests/scenes/drops.rs::datagrams_from_ports_of_the_server_get_no_answer"],
    ),
    mutant(
        "leave_requests_in_ring",
        "requests in the ring of a shared-memory client whose port is removed get no outcome",
        &["crates/bench/tests/reload_shm.rs::requests_in_the_ring_of_a_removed_port_have_outcomes"],
    ),
    mutant(
        "serve_after_drain",
        "messages that arrive during a drain are served",
        &["crates/sim/tests/scenes/promises.rs::nothing_is_taken_once_a_drain_began"],
    ),
    mutant(
        "sleep_on_requests",
        "a worker sleeps while requests are in flight",
        &["crates/sim/tests/scenes/drops.rs::an_unanswered_request_times_out", SEEDS],
    ),
    // Connections.
    mutant(
        "forget_generation",
        "a reply goes to the connection that reused the slot of a closed one",
        &[
            "crates/sim/tests/scenes/promises.rs::a_late_reply_does_not_reach_the_next_connection",
            SEEDS,
        ],
    ),
    mutant(
        "reorder_reply",
        "a reply leaves out of order as soon as it is ready",
        &["crates/sim/tests/scenes/drops.rs::early_replies_have_bounded_memory", SEEDS],
    ),
    mutant(
        "misplace_reply",
        "an early reply takes the position of another one",
        &["crates/engine/src/endpoint/tcp/connection.rs::ordered_replies_leave_in_request_order"],
    ),
    mutant(
        "resume_write_late",
        "after a partial write a byte is skipped",
        &[
            "crates/sim/tests/scenes/promises.rs::replies_before_the_end_are_written_before_the_end",
            SEEDS,
        ],
    ),
    mutant(
        "close_unflushed",
        "a connection is closed with replies in its output",
        &["crates/sim/tests/scenes/promises.rs::replies_before_the_end_are_written_before_the_end"],
    ),
    mutant(
        "read_once",
        "input beyond the size of one read is never read",
        &[
            "crates/sim/tests/scenes/promises.rs::a_read_that_fills_the_buffer_is_followed_by_another",
        ],
    ),
    // Limits.
    mutant(
        "allocate_for_reply",
        "a reply on a stream allocates",
        &["crates/bench/tests/allocation.rs::datagrams_and_streams"],
    ),
    mutant(
        "hoard_memory",
        "a closed connection leaks memory",
        &["crates/cli/tests/limits.rs::connections_that_end_in_any_way_leave_nothing"],
    ),
    mutant(
        "shed_silently",
        "a datagram without a free slot is not counted",
        &["crates/cli/tests/crowd.rs::the_counters_agree_when_much_is_lost"],
    ),
    mutant(
        "spin_without_descriptors",
        "a worker without free descriptors retries immediately, without a limit",
        &["crates/cli/tests/limits.rs::a_listener_without_a_descriptor_does_not_spin"],
    ),
    // UDP ports of a worker that has several.
    mutant(
        "watch_ports_for_edges",
        "a port that was not read, or only in part, is reported once",
        &[
            "crates/sys/tests/network/watched.rs::of_several_ports_those_are_reported_that_have_datagrams",
        ],
    ),
    mutant(
        "keep_few_ports_in_the_set",
        "of three ports one is removed, and the epoll set is still looked at in each poll",
        &[
            "crates/sys/tests/network/watched.rs::a_port_of_several_is_paused_resumed_stopped_and_added",
        ],
    ),
    // Stream sockets of blocks.
    mutant(
        "reuse_word",
        "a stream's writer overwrites a word of which the reader has read only a part",
        &[
            "crates/mqueue/src/byte_ring.rs::a_full_ring_takes_bytes_in_whole_words_again",
            "crates/mqueue/tests/rings/streams.rs::a_stream_is_a_queue_of_bytes",
        ],
    ),
    mutant(
        "end_before_bytes",
        "a stream's reader looks for bytes before it looks for the end",
        &["crates/mqueue-loom/tests/loom/bytes.rs::a_stream_ends_after_its_bytes"],
    ),
    mutant(
        "drop_unsent_silently",
        "bytes that a block wrote and that were not sent when the socket ended are in no counter",
        &["crates/sim/tests/scenes/sockets.rs::connections_end_in_every_way"],
    ),
    mutant(
        "hide_room",
        "a block is not told that the engine has sent half of its full ring",
        &["crates/sim/tests/scenes/sockets.rs::connections_end_in_every_way"],
    ),
    mutant(
        "forget_waiting_accepts",
        "the completion of an accept that waits has no room",
        &["crates/sockets/tests/block.rs::completions_of_accepts_that_wait_keep_their_room"],
    ),
    mutant(
        "keep_owed_event",
        "the next connection in a slot gets an event of the one before",
        &["crates/sockets/tests/block.rs::an_event_that_is_owed_ends_with_its_lease"],
    ),
    mutant(
        "obey_old_lease",
        "a command for an earlier connection in a slot applies to the present one",
        &["crates/sockets/tests/block.rs::a_lease_that_is_over_cannot_be_used"],
    ),
    mutant(
        "keep_idle_sockets",
        "a connection of a block stays, though no byte came or went for the `idle_ms` of its address",
        &["crates/sim/tests/scenes/sockets.rs::an_idle_connection_ends_after_its_time"],
    ),
    mutant(
        "close_while_peer_sends",
        "a connection that a block has closed is closed while its peer sends, which destroys the answer",
        &[
            "crates/sim/tests/scenes/sockets.rs::a_peer_that_still_sends_reads_the_answer",
            "crates/server/tests/sockets.rs::a_peer_that_still_sends_reads_the_whole_answer",
        ],
    ),
    mutant(
        "connect_after_cancel",
        "a connection attempt that a block has given up goes on, and its result is reported a second time",
        &["crates/sim/tests/scenes/sockets.rs::a_command_that_is_given_up_leaves_nothing"],
    ),
    mutant(
        "sockets_out_of_turn",
        "connections of kernels are read and written though their tenant has spent its part",
        &["crates/sim/tests/scenes/fairness.rs::connections_of_kernels_pay_for_their_bytes"],
    ),
    mutant(
        "tenants_in_full_batches",
        "a tenant's datagrams are taken in full batches though others wait",
        &["crates/sim/tests/scenes/tenants.rs::a_flood_of_one_tenant_does_not_delay_five_others"],
    ),
    mutant(
        "tenants_without_weights",
        "every tenant gets the same part",
        &["crates/sim/tests/scenes/tenants.rs::six_floods_get_parts_of_their_weights"],
    ),
    mutant(
        "tenant_without_limits",
        "a tenant that is over a limit goes on",
        &[
            "crates/sim/tests/scenes/tenants.rs::a_rate_holds_and_everything_beyond_is_counted",
            "crates/sim/tests/scenes/tenants.rs::messages_in_flight_stay_below_their_limit",
        ],
    ),
    mutant(
        "tenant_turn_overshoots",
        "a tenant below its limit of messages in flight takes all that has come in a turn",
        &["crates/sim/tests/scenes/tenants.rs::messages_in_flight_stay_below_their_limit"],
    ),
    mutant(
        "tenant_handover_unseen",
        "messages between two workers do not count against the limit of messages in flight",
        &["crates/sim/tests/scenes/tenant_limits.rs::requests_that_are_handed_over_are_in_flight"],
    ),
    mutant(
        "tenant_limits_twice",
        "a worker refuses what another one has received below a tenant's limits and handed over",
        &["crates/sim/tests/scenes/tenants.rs::what_is_handed_over_is_not_limited_again"],
    ),
    mutant(
        "show_what_is_shed",
        "a chain sees datagrams that are dropped for a limit of the tenant",
        &["crates/sim/tests/scenes/chain.rs::what_is_over_a_limit_is_not_delivered"],
    ),
    mutant(
        "read_what_is_shed",
        "requests on streams and in rings are looked at while their tenant is over a limit",
        &["crates/sim/tests/scenes/tenants.rs::a_worker_sleeps_while_a_tenant_is_over_its_rate"],
    ),
    mutant(
        "servers_wait_for_clients",
        "the bytes of servers wait until chunks that their servers have not taken are fewer than their tenant's limit",
        &["crates/sim/tests/scenes/tenant_limits.rs::servers_that_write_before_they_read_are_read"],
    ),
    mutant(
        "keep_rate_debt",
        "a tenant pays at its new rate for what it took at the former one",
        &["crates/sim/tests/scenes/tenants.rs::a_raised_rate_holds_at_once"],
    ),
    mutant(
        "spend_a_round",
        "a tenant with many connections may spend its part of a round in one turn",
        &["crates/sim/tests/scenes/tenants.rs::many_connections_of_a_tenant_get_a_part_of_a_turn"],
    ),
    mutant(
        "charge_former_time",
        "functions pay for the time in which nothing was charged",
        &[
            "crates/sim/tests/scenes/tenants.rs::functions_do_not_pay_for_the_time_before_there_was_a_limit",
        ],
    ),
    mutant(
        "debt_without_end",
        "what a tenant owes has no limit",
        &["crates/engine/src/schedule/tests.rs::a_debt_has_a_limit"],
    ),
    mutant(
        "debt_of_calls_forgiven",
        "a tenant does not pay for the whole time of a call that takes long",
        &["crates/engine/src/schedule/tests.rs::a_call_that_takes_long_is_paid_for_as_a_whole"],
    ),
    mutant(
        "rate_saves_up",
        "engine/base/tenants.rs due time: a tenant saves up what it does not use of its rate",
        &[
            "crates/engine/src/base/tenants.rs::a_new_or_idle_tenant_has_a_burst_and_no_more",
            "crates/sim/tests/scenes/tenants.rs::a_rate_holds_and_everything_beyond_is_counted",
            "crates/server/tests/tenants.rs::a_tenant_that_was_idle_has_no_more_than_its_rate",
        ],
    ),
    mutant(
        "late_without_end",
        "a function may exceed its deadline again and again",
        &[
            "crates/builtins/tests/functions/chain.rs::a_message_with_which_a_function_does_not_end_costs_others_a_deadline_a_second",
        ],
    ),
    mutant(
        "share_without_limit",
        "a user's function that takes too much of a worker is not suspended",
        &[
            "crates/builtins/tests/functions/chain.rs::a_function_over_its_share_is_suspended_with_a_reason",
        ],
    ),
    mutant(
        "hold_connected",
        "a planned end of a generation does not wait for the connections of its blocks",
        &["crates/sim/tests/scenes/sockets.rs::a_planned_end_waits_for_open_connections"],
    ),
    mutant(
        "accept_for_gone_blocks",
        "connections are accepted for blocks whose generation has ended",
        &["crates/sim/tests/scenes/sockets.rs::a_generation_ends_with_its_connections"],
    ),
    // Backends.
    mutant(
        "forget_late_answer",
        "a late answer of a backend is matched with the next request",
        &["crates/sim/tests/scenes/drops.rs::a_late_answer_of_a_backend_is_passed_over", SEEDS],
    ),
    mutant(
        "ignore_key",
        "a backend's answer is not compared with its request",
        &["crates/sim/tests/scenes/drops.rs::an_answer_to_another_key_ends_the_connection", SEEDS],
    ),
    mutant(
        "answer_another_transfer",
        "the end of a transfer answers the command that waits longest",
        &[
            "crates/sim/tests/scenes/transfers.rs::every_command_is_answered_once_whatever_kernels_and_executors_do",
        ],
    ),
    mutant(
        "keep_transfers_of_ended_blocks",
        "transfers of a block that has ended go on",
        &["crates/sim/tests/scenes/transfers.rs::a_block_that_ends_takes_its_transfers_with_it"],
    ),
    mutant(
        "write_while_lent",
        "bytes that a block sends behind a transfer to its socket go out while the transfer runs",
        &["crates/sim/tests/scenes/socket_transfers.rs::pieces_by_transfers_come_back_in_order"],
    ),
    mutant(
        "overtake_command",
        "bytes that a block sends behind a command for a transfer to its socket go out before the command is seen",
        &["crates/sim/tests/scenes/socket_transfers.rs::pieces_by_transfers_come_back_in_order"],
    ),
    mutant(
        "lend_to_old_lease",
        "a transfer to a socket that was closed writes to the next connection of its slot",
        &[
            "crates/server/tests/transfers_to_sockets.rs::a_transfer_never_reaches_a_later_connection_of_its_slot",
        ],
    ),
    mutant(
        "answer_backend_twice",
        "a kernel gets a late answer after it got the time-out",
        &["crates/sim/tests/scenes/drops.rs::a_late_answer_of_a_backend_is_passed_over", SEEDS],
    ),
    // Accelerator and client generations.
    mutant(
        "outlive_generation",
        "requests of an accelerator generation that ended stay in flight",
        &[
            "crates/sim/tests/scenes/promises.rs::requests_at_an_accelerator_end_with_its_generation",
            SEEDS,
        ],
    ),
    mutant(
        "forget_client",
        "a reply goes to the shared-memory client that reused the slot of a departed one",
        &["crates/engine/src/endpoint/shm.rs::a_reply_for_a_client_that_left_is_dropped", SEEDS],
    ),
    mutant(
        "leave_with_debts",
        "a service is removed before it has answered all accepted requests",
        &["crates/sim/tests/scenes/change.rs::connections_stay_or_are_closed_after_their_replies"],
    ),
    mutant(
        "hold_with_debts",
        "a planned restart ends a generation before its accepted requests are answered",
        &["crates/sim/tests/scenes/change.rs::a_held_service_loses_nothing_at_any_step"],
    ),
    // Links to remote accelerators.
    mutant(
        "release_unread",
        "a slot is free as soon as its message is sent, and not when the other side has released it",
        &[LINKS],
    ),
    mutant(
        "lose_waiting",
        "a message for which an arena has no room is lost",
        &[
            "crates/remote/tests/mirror.rs::an_mqueue_without_room_in_its_arena_waits_and_the_other_goes_on",
        ],
    ),
    mutant("report_late", "released slots are reported only with messages", &[LINKS]),
    mutant("resend_written", "bytes that a connection took are written again", &[LINKS]),
    mutant("outlive_silence", "a link is not lost when nothing arrives", &[LINKS]),
    // Between workers.
    mutant(
        "hand_over_twice",
        "a request is handed over twice",
        &["crates/sim/tests/scenes/promises.rs::a_quiet_command_stays_quiet_across_workers", SEEDS],
    ),
    mutant(
        "sleep_on_mail",
        "a worker sleeps although another worker has handed over a message",
        &["crates/sim/tests/scenes/promises.rs::a_hand_over_wakes_a_sleeper"],
    ),
    mutant(
        "miss_wakeup",
        "a sleeping worker is not woken for a handed-over message",
        &["crates/engine/src/base/fabric.rs::only_a_sleeping_worker_is_woken"],
    ),
    // Sockets.
    mutant(
        "answer_from_another_address",
        "a wildcard port replies from the address that the route prefers",
        &[
            "crates/sys/tests/network/udp.rs::a_wildcard_port_answers_from_the_address_the_client_used",
        ],
    ),
    mutant(
        "gso_batch_ignores_destination",
        "replies to several clients leave in one GSO batch to the first of them",
        &["crates/sys/tests/network/udp.rs::order_is_kept_per_peer"],
    ),
    mutant(
        "join_evicted_batch",
        "a reply joins the GSO batch of the client that evicted its own from the table",
        &[
            "crates/sys/src/socket_nic/segment_batches.rs::many_destinations_keep_their_order_and_bounded_delay",
        ],
    ),
    mutant(
        "overtake_held_back",
        "a reply that is held back for its GSO batch is overtaken by one that cannot join the batch",
        &["crates/sys/src/socket_nic/segment_batches.rs::nothing_overtakes_held_back_datagrams"],
    ),
    mutant(
        "keep_for_ever",
        "replies are held back for more replies as long as there is work",
        &[
            "crates/sim/tests/scenes/promises.rs::replies_wait_for_more_to_their_client_only_behind_other_work",
        ],
    ),
    mutant(
        "skip_after_partial_send",
        "datagrams that a send call did not accept are counted as sent",
        &["crates/sys/tests/network/udp.rs::refused_datagrams_are_counted_and_block_nothing"],
    ),
];
