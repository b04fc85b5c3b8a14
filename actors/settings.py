"""Every limit and default of the runtime, with its unit and its reason."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from timers.quotas import ROLLUP_MS

KIB = 1024
MIB = 1024 * KIB
DAY_MS = 24 * 60 * 60 * 1_000


class Settings(BaseModel):
    """Limits and defaults of a runtime. Passed to `Runtime.start(settings=...)`; immutable afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # --- durability and commit
    durability: Literal["full", "normal", "off"] = Field(
        "full", description="SQLite synchronous mode. 'normal' may lose the last commits on a power failure."
    )
    max_group_rows: int = Field(2_000, ge=1, description="Rows in one group commit; more wait for the next.")
    slice_rows: int = Field(500, ge=1, description="Rows written per loop slice: about 2 ms of SQLite work.")
    max_write_set_ops: int = Field(10_000, ge=1, description="Operations that one turn may write.")
    max_write_set_bytes: int = Field(16 * MIB, ge=1, description="Encoded bytes that one turn may write.")
    wal_truncate_bytes: int = Field(64 * MIB, ge=MIB, description="The WAL is truncated once it is larger.")
    checkpoint_interval_ms: int = Field(1_000, ge=10, description="How often the WAL is copied back.")

    # --- values and keys
    max_key_bytes: int = Field(1_024, ge=1, le=1_024, description="UTF-8 bytes of an object's key.")
    max_storage_key_bytes: int = Field(2_048, ge=1, description="UTF-8 bytes of a storage key.")
    max_value_bytes: int = Field(2 * MIB, ge=1, description="Encoded bytes of one stored value.")
    max_args_bytes: int = Field(8 * MIB, ge=1, description="Encoded bytes of one call's arguments or reply.")
    max_list_rows: int = Field(100_000, ge=1, description="Rows that one storage.list() may return.")

    # --- calls
    call_timeout_ms: int = Field(60_000, ge=1, description="Default deadline of a call.")
    call_memory_ms: int = Field(600_000, ge=1_000, description="How long replies of vanished clients are kept.")
    max_reply_memory_bytes: int = Field(64 * KIB, ge=1, description="Larger replies to outside calls are marked lost.")
    max_in_flight_calls: int = Field(2_048, ge=1, description="Calls a process has on the wire to one partition.")
    max_queued_calls: int = Field(20_000, ge=1, description="Calls that may wait in a process for one partition.")
    max_partition_calls: int = Field(20_000, ge=1, description="Calls a partition holds that have not ended.")
    max_queued_turns: int = Field(2_048, ge=1, description="Turns waiting at one object (class option overrides).")
    max_chain_depth: int = Field(64, ge=1, le=64, description="Calls nested in one chain.")
    max_nested_calls: int = Field(1_000, ge=1, description="Calls that one turn may have outstanding.")

    # --- turns and objects
    turn_timeout_ms: int = Field(30_000, ge=1, description="Running time of a turn (class option overrides).")
    timer_turn_timeout_ms: int = Field(900_000, ge=1, description="Running time of a timer's turn.")
    cancel_grace_ms: int = Field(2_000, ge=1, description="A cancelled turn that still runs then is abandoned.")
    idle_timeout_ms: int = Field(10_000, ge=1, description="Idle objects leave memory after this.")
    max_active_objects: int = Field(50_000, ge=1, description="Objects in memory; idle ones leave first.")

    # --- timers
    max_timers_per_object: int = Field(10_000, ge=1, description="Named timers of one object.")
    max_timer_payload_bytes: int = Field(128 * KIB, ge=1, description="Encoded bytes of a timer's payload.")
    max_timer_turns: int = Field(1_024, ge=1, description="Timer turns queued or running in a partition.")
    max_timer_turns_per_class: int = Field(512, ge=1, description="The same for one class: it leaves room to others.")
    max_timer_turns_per_object: int = Field(64, ge=1, description="Due timers queued at one object.")
    misfire_all_limit: int = Field(1_000, ge=1, description="Runs that `misfire='all'` catches up with.")
    poll_ms: int = Field(1_000, ge=1, description="Every partition compares min(due) with the clock this often.")
    crash_limit: int = Field(3, ge=1, description="Crashes while alone that turn work into a dead letter.")
    careful_solo_ms: int = Field(1_000, ge=1, description="How long careful mode lets one turn run alone.")
    max_dead_letters: int = Field(100_000, ge=1, description="Dead letters a partition keeps; past it status warns.")

    # --- release wheel
    release_wheel: bool = Field(True, description="The node's release wheel wakes partitions; else each wakes itself.")
    wheel_lead_max_ms: int = Field(
        5, ge=1, le=1_000, description="The wheel wakes at most this early; the partition waits out the rest."
    )
    wheel_near_ms: int = Field(
        20, ge=0, description="Nearer wakes stay in the partition: the way to the wheel and back is not worth it."
    )
    wheel_retry_ms: int = Field(1_000, ge=1, description="How often a partition looks for a wheel that is gone.")

    # --- outcomes, tickets, reservations
    max_outcomes_per_object: int = Field(10_000, ge=1, description="Outcomes an object may have waiting.")
    max_outcome_bytes: int = Field(64 * KIB, ge=1, description="Encoded bytes of an outcome's or a ticket's payload.")
    max_tickets_per_object: int = Field(10_000, ge=1, description="Tickets an object may have open.")
    max_tickets_per_holder: int = Field(1_000, ge=1, description="Tickets one holder may have open in an object.")
    max_reservations_per_object: int = Field(100_000, ge=1, description="Reservations, remembered ones included.")
    reservation_memory_ms: int = Field(
        3_600_000, ge=1, description="How long an ended reservation is remembered: longer than any late commit takes."
    )

    # --- quotas
    quota_rollup_ms: int = Field(
        ROLLUP_MS, ge=100, le=ROLLUP_MS, description="How often an object's counts go to the coordinator."
    )

    # --- messages between objects
    max_message_bytes: int = Field(128 * KIB, ge=1, description="Encoded bytes of a message's arguments.")
    max_messages_per_turn: int = Field(1_000, ge=1, description="Messages that one turn may send.")
    max_outbox_messages: int = Field(10_000, ge=1, description="Undelivered messages of one object.")
    max_outbox_pairs: int = Field(
        100_000, ge=1, description="Pairs of objects with messages that a partition's relay has in memory: 50 MiB."
    )
    max_messages_in_flight: int = Field(
        1_024, ge=1, description="Messages a partition has under way to one other; more wait on disk."
    )
    message_page: int = Field(32, ge=1, description="Messages of one pair of objects under way at a time.")

    # --- durable functions
    max_journal_steps: int = Field(
        10_000, ge=1, le=1_000_000, description="Steps, sleeps and promises of one execution."
    )
    max_journal_bytes: int = Field(64 * MIB, ge=1, description="Encoded bytes of all results of one execution.")
    max_journal_payload_bytes: int = Field(MIB, ge=1, description="Encoded bytes of a step's or promise's result.")
    max_executions_per_object: int = Field(10_000, ge=1, description="Executions an object keeps, ended ones too.")
    execution_retention_ms: int = Field(
        7 * DAY_MS, ge=1, description="How long completed and canceled executions keep their result."
    )
    failed_execution_retention_ms: int = Field(30 * DAY_MS, ge=1, description="The same for failed and aborted ones.")

    # --- coordinator, leases
    coordinator_wait_ms: int = Field(
        10_000, ge=0, description="How long a turn waits for a coordinator that does not answer: it may be restarting."
    )
    lease_ttl_ms: int = Field(30_000, ge=1, description="How long a lease lasts that is not renewed.")
    max_lease_ttl_ms: int = Field(
        86_400_000, ge=1, description="The longest that may be asked for: others wait so long when a holder is gone."
    )
    lease_margin_ms: int = Field(
        5_000,
        ge=1,
        description="A holder stops using a lease so long before its end: clocks differ, commits wait.",
    )
    lease_min_usable_ms: int = Field(1_000, ge=1, description="What must be left of a lease without the margin.")

    # --- moves of slots
    moves_side_by_side: int = Field(2, ge=1, description="Moves of slots at a time; one at a time from each partition.")
    slots_per_move: int = Field(64, ge=1, le=4_096, description="Slots that move together; their calls wait meanwhile.")
    move_bytes_per_s: int = Field(
        64 * MIB, ge=MIB, description="What each move may send per second on average: it rests after a move."
    )

    # --- publications
    max_unpublished_advances: int = Field(
        64, ge=1, le=64, description="Unpublished advances of a publication line: one batch may publish them all."
    )
    max_advance_items: int = Field(
        4_096, ge=1, le=4_096, description="Items, dependencies and external bases of one advance, each."
    )
    max_advance_bytes: int = Field(
        512 * KIB, ge=KIB, description="Encoded bytes of one advance; each recheck reads it."
    )

    # --- process
    loop_blocked_ms: int = Field(1_000, ge=1, description="A loop blocked for this long is reported with its stack.")
    loop_hang_ms: int = Field(60_000, ge=1, description="A loop blocked for this long ends its process.")
    metrics_interval_ms: int = Field(5_000, ge=100, description="How often partitions hand their numbers to Ray.")
    partition_lease_ms: int = Field(
        30_000, ge=100, description="A partition whose process has been silent for this long is killed and restarted."
    )
    partition_renew_ms: int = Field(10_000, ge=10, description="How often a partition says that its process runs.")
    lock_wait_ms: int = Field(10_000, ge=0, description="How long opening waits for a partition's lock.")
    busy_timeout_ms: int = Field(30_000, ge=0, description="SQLite busy timeout of the writer.")

    # --- link
    max_frame_bytes: int = Field(32 * MIB, ge=KIB, description="Bytes of one frame on a link.")
    handshake_timeout_ms: int = Field(5_000, ge=1, description="A peer must have proved itself by then.")
    link_high_water_bytes: int = Field(8 * MIB, ge=KIB, description="A slower reader pauses its own calls.")
    link_kill_bytes: int = Field(64 * MIB, ge=KIB, description="A reader this far behind is disconnected.")
    max_connections: int = Field(1_024, ge=1, description="Connections that one partition accepts.")
    batch_delay_ms: int = Field(0, ge=0, description="Extra time stubs wait to gather calls; 0: one loop tick.")
    ack_delay_ms: int = Field(50, ge=0, description="Idle stubs acknowledge replies after this.")
    connect_timeout_ms: int = Field(30_000, ge=1, description="Starting: how long to wait for a partition to serve.")

    @model_validator(mode="after")
    def _lease_outlasts_its_margin(self) -> Settings:
        if self.lease_ttl_ms <= self.least_lease_ttl_ms:
            raise ValueError(
                f"lease_ttl_ms = {self.lease_ttl_ms} must be more than lease_margin_ms + lease_min_usable_ms = "
                f"{self.least_lease_ttl_ms}: nothing of a lease would be left to use"
            )
        if self.max_lease_ttl_ms < self.lease_ttl_ms:
            raise ValueError(f"max_lease_ttl_ms = {self.max_lease_ttl_ms} is less than lease_ttl_ms")
        return self

    @property
    def least_lease_ttl_ms(self) -> int:
        """A lease must last longer than this."""
        return self.lease_margin_ms + self.lease_min_usable_ms
