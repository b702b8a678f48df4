//! The seeded mutants around the data path, and the tests that catch them: links to other machines, runtimes, the control side,
//! transfers, collectives and the command.

use super::{Mutant, mutant};

/// See the module's text.
pub(super) const MUTANTS: &[Mutant] = &[
    // Caught after a minute: the others run meanwhile.
    mutant(
        "miss_end_of_rank",
        "the end of a rank is not noticed",
        &["crates/collective/tests/tcp.rs::an_end_is_noticed_by_a_rank_that_waits_for_another_one"],
    ),
    // Remote links: their records, who may join, and what the other side may claim.
    mutant(
        "seal_with_one_nonce",
        "all records of a link are sealed and opened with the same nonce",
        &["crates/remote/src/channel.rs::no_two_records_are_sealed_with_one_key_and_nonce"],
    ),
    mutant(
        "forget_sealed_record",
        "the sender of a link does not count its records",
        &["crates/remote/src/channel.rs::no_two_records_are_sealed_with_one_key_and_nonce"],
    ),
    mutant(
        "forget_opened_record",
        "the receiver of a link does not count its records",
        &[
            "crates/remote/src/channel.rs::records_that_are_repeated_removed_or_swapped_end_the_link",
        ],
    ),
    mutant(
        "read_digested_file_again",
        "the other machine loads a kernel's file again after it compared the digest",
        &["crates/runtime/tests/remote.rs::the_bytes_that_were_digested_are_those_that_run"],
    ),
    mutant(
        "believe_proof",
        "an engine that does not know the secret gets a link",
        &["crates/remote/src/handshake.rs::another_secret_gets_no_keys_and_both_sides_say_why"],
    ),
    mutant(
        "believe_welcome",
        "an engine trusts an accelerator that does not know the secret",
        &[
            "crates/remote/src/handshake.rs::an_accelerator_that_does_not_know_the_secret_is_not_trusted",
        ],
    ),
    mutant(
        "one_key_for_both_directions",
        "both directions of a link have the same key",
        &["crates/remote/src/channel.rs::no_two_records_are_sealed_with_one_key_and_nonce"],
    ),
    mutant(
        "keys_without_agreement",
        "who learns the secret of a link can read what was recorded before",
        &[
            "crates/remote/src/secret.rs::the_keys_depend_on_the_secret_the_agreement_and_the_handshake",
        ],
    ),
    mutant(
        "keys_without_secret",
        "the keys of a link do not depend on the secret",
        &[
            "crates/remote/src/secret.rs::the_keys_depend_on_the_secret_the_agreement_and_the_handshake",
        ],
    ),
    mutant(
        "keys_without_handshake",
        "the keys of a link do not depend on what was said before",
        &[
            "crates/remote/src/secret.rs::the_keys_depend_on_the_secret_the_agreement_and_the_handshake",
        ],
    ),
    mutant(
        "lose_early_bytes",
        "bytes that follow a proof at once are lost",
        &["crates/remote/src/greet.rs::bytes_behind_a_proof_end_the_connection"],
    ),
    mutant(
        "lose_bad_header",
        "a message with an invalid header does not reach the engine",
        &[
            "crates/remote/tests/mirror.rs::a_message_with_an_invalid_header_has_one_on_the_other_side_too",
        ],
    ),
    mutant(
        "believe_released",
        "slots are free whose messages the other side never got",
        &[
            "crates/runtime/tests/remote.rs::an_engine_that_breaks_the_protocol_ends_only_its_link",
            "crates/runtime/tests/remote.rs::an_accelerator_that_breaks_the_protocol_is_a_lost_link_and_the_engine_learns_why",
        ],
    ),
    mutant(
        "believe_kind",
        "messages of any kind reach the blocks of a remote accelerator",
        &["crates/runtime/tests/remote.rs::an_engine_that_breaks_the_protocol_ends_only_its_link"],
    ),
    // Runtimes.
    mutant(
        "keep_rebuilt_kernel",
        "a kernel file that was rebuilt is taken for the one that is open",
        &["crates/runtime/src/kernel_file.rs::a_file_with_another_content_is_another_one"],
    ),
    mutant(
        "answer_call_twice",
        "a host call answers a message twice",
        &[
            "crates/runtime/tests/host_call.rs::batches_are_taken_from_all_mqueues_and_answered_together",
        ],
    ),
    mutant(
        "leave_unanswered",
        "messages for which a host call has no answer are lost",
        &[
            "crates/runtime/tests/host_call.rs::batches_are_taken_from_all_mqueues_and_answered_together",
        ],
    ),
    mutant(
        "serve_another_life",
        "a runtime serves a region of another generation than it was offered",
        &["crates/cli/tests/attach.rs::invalid_offers_are_reported_in_one_sentence"],
    ),
    // Control side of the server.
    mutant(
        "serve_every_user",
        "users of functions may reload and read everything",
        &[
            "crates/server/src/control/reception.rs::another_user_may_make_requests_about_functions_only",
        ],
    ),
    mutant(
        "remember_removed_user",
        "a user that a reload has removed goes on",
        &[
            "crates/server/src/control/reception.rs::another_user_may_make_requests_about_functions_only",
        ],
    ),
    mutant(
        "share_functions",
        "every user sees and changes the functions of all",
        &[
            "crates/server/src/functions/objects.rs::a_function_belongs_to_its_user_and_to_the_operator",
        ],
    ),
    mutant(
        "share_dictionaries_of_users",
        "functions of a user read what those of the operator know",
        &[
            "crates/server/src/functions/objects.rs::functions_of_another_tenant_or_user_have_another_dictionary",
        ],
    ),
    mutant(
        "share_dictionaries_of_tenants",
        "functions of a tenant read what those of another one know",
        &[
            "crates/server/src/functions/objects.rs::functions_of_another_tenant_or_user_have_another_dictionary",
        ],
    ),
    mutant(
        "believe_file_name",
        "a module is run whose content was exchanged",
        &["crates/server/tests/directory.rs::a_module_that_was_changed_or_exchanged_is_refused"],
    ),
    mutant(
        "trust_every_key",
        "a module is run that anybody has signed",
        &["crates/server/tests/directory.rs::what_is_not_signed_by_somebody_trusted_is_refused"],
    ),
    // Transfers.
    mutant(
        "lose_rest_of_chunk",
        "what a socket did not take of a chunk is lost",
        &["crates/transfer/tests/faults.rs::every_transfer_ends_with_exact_counts"],
    ),
    mutant(
        "believe_short_stream",
        "a stream that ends early counts as whole",
        &["crates/transfer/tests/faults.rs::every_transfer_ends_with_exact_counts"],
    ),
    mutant(
        "believe_short_file",
        "a file that was shortened counts as whole",
        &["crates/transfer/tests/descriptors.rs::a_file_that_is_shortened_ends_its_transfer"],
    ),
    mutant(
        "write_from_begin",
        "each chunk overwrites the first one",
        &["crates/transfer/tests/faults.rs::every_transfer_ends_with_exact_counts"],
    ),
    mutant(
        "drop_rest_of_input",
        "what a stage has not taken yet is lost",
        &["crates/transfer/tests/faults.rs::every_transfer_ends_with_exact_counts"],
    ),
    mutant(
        "read_past_range",
        "of several files bytes behind their ranges are sent",
        &["crates/transfer/tests/descriptors.rs::several_files_are_one_stream"],
    ),
    mutant(
        "overwrite_source",
        "a file is written while it is read",
        &["crates/transfer/tests/descriptors.rs::wrong_descriptors_are_refused_with_a_sentence"],
    ),
    mutant(
        "end_in_order_after_failure",
        "the peer of a command that failed reads an orderly end",
        &["crates/cli/tests/transfer.rs::an_interrupted_sender_ends_its_receiver_with_an_error"],
    ),
    mutant(
        "use_open_key",
        "a key is used that other users can read",
        &["crates/cli/tests/transfer.rs::mistakes_get_one_sentence_and_their_exit_code"],
    ),
    mutant(
        "replace_by_nothing",
        "a peer that sends nothing empties a file",
        &["crates/cli/tests/transfer.rs::a_peer_that_sends_nothing_destroys_no_file"],
    ),
    // Collectives.
    mutant(
        "keep_silent_connections",
        "connections that say nothing keep their places at a listener",
        &[
            "crates/sys/src/accept_queue.rs::a_peer_that_says_nothing_leaves_after_its_time_and_not_before",
            "crates/sys/src/accept_queue.rs::one_byte_at_a_time_does_not_extend_the_time",
            "crates/remote/src/greet.rs::a_peer_without_a_proof_loses_its_place_after_its_time",
            "crates/collective/src/admission.rs::connections_without_a_hello_are_counted_and_keep_no_rank_out",
        ],
    ),
    mutant(
        "admit_other_groups",
        "ranks of a group of another name join",
        &[
            "crates/collective/src/network.rs::only_those_of_the_group_that_mean_this_rank_are_accepted",
        ],
    ),
    mutant(
        "admit_rank_twice",
        "a second process takes the place of a rank",
        &["crates/collective/tests/tcp.rs::a_second_process_does_not_take_the_place_of_a_rank"],
    ),
    mutant(
        "admit_other_ranks",
        "a rank joins that means another one",
        &[
            "crates/collective/src/network.rs::only_those_of_the_group_that_mean_this_rank_are_accepted",
        ],
    ),
    mutant(
        "ignore_garbage_notice",
        "a notice that is none is passed over",
        &["crates/collective/tests/tcp.rs::a_notice_that_is_none_ends_the_group"],
    ),
    mutant(
        "add_before_sending",
        "sums are sent instead of the own elements",
        &[
            "crates/collective/tests/schedules.rs::sums_are_right_on_all_numbers_of_ranks_and_the_same_in_every_run",
        ],
    ),
    mutant(
        "lose_part_of_element",
        "bytes of an element that arrives in two parts are lost",
        &[
            "crates/collective/tests/schedules.rs::sums_are_right_on_all_numbers_of_ranks_and_the_same_in_every_run",
        ],
    ),
    mutant(
        "believe_calls",
        "data of another call is taken",
        &["crates/collective/tests/schedules.rs::ranks_that_disagree_learn_about_what"],
    ),
    mutant(
        "keep_nan_bits",
        "ranks get different bits of a NaN",
        &[
            "crates/collective/tests/schedules.rs::every_nan_becomes_the_documented_one_and_infinities_stay",
        ],
    ),
    // Transfers of other programs.
    mutant(
        "admit_every_user",
        "users without a tenant connect to the transfer socket",
        &["crates/transfer/tests/users.rs::users_of_tenants_are_admitted_and_nobody_else"],
    ),
    mutant(
        "serve_users_without_a_tenant",
        "a user who has lost its tenant goes on with the connection that it has",
        &[
            "crates/transfer/tests/users.rs::a_user_that_loses_its_tenant_is_refused_on_the_connection_that_it_has",
        ],
    ),
    mutant(
        "serve_users_with_the_rights_of_the_engine",
        "transfers of other users are made with the engine's rights",
        &["crates/transfer/tests/users.rs::a_user_s_calls_are_made_with_the_user_s_rights"],
    ),
    mutant(
        "list_transfers_of_others",
        "a user lists the transfers of all",
        &["crates/transfer/tests/users.rs::a_user_lists_its_own_transfers"],
    ),
    mutant(
        "one_caller_takes_all_places",
        "a caller whose files hang takes the places of others",
        &[
            "crates/transfer/src/engine/scoreboard/tests.rs::a_caller_whose_files_hang_leaves_places_to_others",
        ],
    ),
    mutant(
        "idle_tenants_save_turns",
        "a tenant without transfers saves up turns",
        &["crates/transfer/src/engine/scoreboard/turns.rs::who_was_idle_has_saved_no_turns"],
    ),
    mutant(
        "end_before_chunks_come_back",
        "a transfer ends while another thread has a chunk of it",
        &[
            "crates/transfer/src/engine/scoreboard/tests.rs::a_transfer_that_is_done_ends_when_its_chunks_have_come_back",
        ],
    ),
    mutant(
        "cancel_while_chunks_are_away",
        "a transfer is cancelled while another thread has a chunk of it, whose bytes are not counted",
        &[
            "crates/transfer/src/engine/scoreboard/tests.rs::a_transfer_that_is_cancelled_ends_when_its_chunks_have_come_back",
        ],
    ),
    mutant(
        "go_on_behind_a_failed_part",
        "parts of a transfer behind one that has failed go on",
        &[
            "crates/transfer/src/engine/parts.rs::parts_behind_a_failed_one_are_cancelled_and_those_before_it_go_on",
        ],
    ),
    mutant(
        "seal_records_without_limit",
        "a stream has more records than its nonces allow",
        &[
            "crates/transfer/src/stages/seal.rs::a_stream_has_a_number_of_records_that_its_nonces_allow",
        ],
    ),
    mutant(
        "open_records_without_limit",
        "a stream with more records than its nonces allow opens",
        &[
            "crates/transfer/src/stages/seal.rs::a_stream_has_a_number_of_records_that_its_nonces_allow",
        ],
    ),
    mutant(
        "seal_records_with_one_nonce",
        "all records of a stream have one nonce",
        &["crates/transfer/src/stages/seal.rs::every_record_has_a_nonce_of_its_own"],
    ),
    mutant(
        "open_without_the_last_record",
        "a stream whose last records were removed opens",
        &[
            "crates/transfer/src/stages/seal.rs::records_that_are_removed_repeated_or_exchanged_do_not_open",
        ],
    ),
    mutant(
        "keep_what_did_not_open",
        "a record that did not open is taken for a part of the next one",
        &[
            "crates/transfer/src/stages/seal.rs::what_does_not_open_does_not_open_at_the_next_try_either",
        ],
    ),
    mutant(
        "name_functions_of_others",
        "an error names functions that the user does not see",
        &[
            "crates/server/tests/function_owners.rs::nobody_but_the_owner_and_the_operator_can_touch_a_function",
        ],
    ),
    mutant(
        "count_functions",
        "numbers of functions can be guessed",
        &[
            "crates/server/src/functions/objects.rs::ids_are_random_and_never_repeat_also_after_a_restart",
        ],
    ),
    mutant(
        "forget_used_token",
        "a token that was used is forgotten",
        &[
            "crates/builtins/tests/functions/coap_auth.rs::a_token_is_used_once_if_that_is_asked_for",
        ],
    ),
];
