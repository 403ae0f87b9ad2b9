"""Faults and bad input against real gateway processes; each test here is named by its row of FAULTS.

The table names the tests that prove each row, by path below ``tests/`` and the beginning of a test's name.
Tests marked `long` run in `make test-all`, all others in `make test`.

    1-5    faults/test_retries.py::test_1_ ::test_2_ ::test_3_ ::test_4_ ::test_5_
    6-7    faults/test_streams.py::test_6_ ::test_7_
    8-13   faults/test_streams.py::test_8_13_ ::test_12_ ::test_13_
    14     faults/test_streams.py::test_14_, gateway/protocol/test_events.py::test_any_cut_
    15-17  faults/test_streams.py::test_15_ ::test_16_ ::test_17_
    18-21  faults/test_cancellation.py::test_18_ ::test_18_19_ ::test_20_ ::test_21_,
           e2e/test_cancellation.py::test_a_slot_is_free_
    22     faults/test_slow.py::test_22_
    23-24  faults/test_death.py::test_23_24_, e2e/test_smoke.py::test_a_killed_engine_
    25-26  faults/test_death.py::test_25_ ::test_26_
    27     faults/test_slow.py::test_27_
    28-30  faults/test_retries.py::test_28_ ::test_29_ ::test_30_
    31     faults/test_death.py::test_31_
    32     faults/test_slow.py::test_32_
    33-34  faults/test_retries.py::test_33_ ::test_34_
    35-36  faults/test_drain.py::test_35_ ::test_36_,
           gateway/test_database_keys.py::test_keys_of_the_database_from_creation_to_kills
    37     gateway/accounting/test_access_changes.py::test_a_locked_database_refuses_changes_clearly
    38-39  faults/test_resources.py::test_38_ ::test_39_
    40     faults/test_drain.py::test_40_
    41     faults/test_join.py::test_41_
    42     faults/test_metrics_lie.py::test_42_
    C      faults/test_control_away.py::test_c_, faults/test_adapters_live.py::test_c_,
           faults/test_elected.py::test_c_,
           e2e/test_lifecycle.py::test_a_restarted_controller_ ::test_a_killed_ray_serve_
    43     faults/test_adapters_live.py::test_43_, store/adapters/test_bad_adapters.py::test_a_bad_adapter_
    44-45  store/adapters/test_kills.py::test_, serve/engine/adapters/test_files.py::test_deleted_files_
    46-47  faults/test_adapters_live.py::test_46_ ::test_47_,
           e2e/test_adapters.py::test_a_replacement_under_load_
    48-50  faults/test_adapters.py::test_48_ ::test_49_ ::test_50_
    51     gateway/test_access.py::test_a_key_is_revoked_,
           gateway/test_database_keys.py::test_keys_of_the_database_from_creation_to_kills
    52-53  gateway/test_limits.py::test_tokens_are_settled_ ::test_two_workers_ ::test_two_hosts_,
           policy/admission/test_provider_spend_cap.py::test_, gateway/queue/test_admission.py::test_,
           gateway/accounting/test_ledger_writer.py::test_any_order_,
           gateway/accounting/test_usage_under_kills.py::test_the_ledger_is_
    54     sim/simulator/test_overload.py::test_a_tenant_,
           faults/test_overload.py::test_54_
    55     gateway/http/test_server.py::test_invalid_requests_ ::test_endless_heads_ ::test_trailers_,
           gateway/test_access.py::test_no_spelling_of_a_path_, fuzz/test_fuzz.py::test_,
           gateway/protocol/test_paths.py::test_a_body_over_,
           gateway/protocol/test_json_structure.py::test_members_depth_
    56     gateway/http/test_server.py::test_slow_senders_, faults/test_slow.py::test_56_
    57     faults/test_schema.py::test_57_
    58     gateway/test_privacy.py::test_no_prompt_answer_or_key_is_kept_or_shown
    6-35   also by HTTP: with ``[http]`` in ``make test-all``, and what clients receive is compared in
           gateway/delivery/test_both_ways.py::test_a_client_
    frames faults/test_frames.py::test_what_is_no_frame_ ::test_64_of_256_ ::test_a_disconnect_,
           gateway/http/test_frame_client.py::test_, serve/engine/test_frame_server.py::test_,
           policy/wire/test_frames.py::test_
    load   sim/simulator/test_overload.py::test_admitted_, faults/test_overload.py::test_
"""

import pytest

pytest.register_assert_rewrite(
    "tests.faults.postconditions", "tests.faults.raw_client", "tests.faults.harness"
)
