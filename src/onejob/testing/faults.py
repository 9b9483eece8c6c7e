"""Fault points by name, and how a test arms one: the process that reaches it dies there by SIGKILL (core/faults.py).

    subprocess.run(["onejob", "run", "job.toml"], env={**os.environ, **armed("shim.before_exit")})

The variable is inherited by every process below, and a point belongs to one part: so arming `step.before_entry` for a
supervisor kills the step, and nothing else.
"""

from __future__ import annotations

from onejob.core.faults import VARIABLE

POINTS: dict[str, str] = {
    # exec: the supervisor's side
    "local.before_shim": "The task's folder holds shim.json; no shim was started.",
    "local.after_shim": "A shim was started; nobody has waited for it, or noted its handle.",
    # exec: the shim
    "shim.before_started": "The shim runs, and nobody can know it: there is no started.json.",
    "shim.after_started": "started.json is there; no rank was started.",
    "shim.after_ranks": "The ranks run.",
    "shim.before_exit": "Everything that the task had started has ended; there is no exit.json.",
    "shim.after_exit": "exit.json is there; the shim is about to end.",
    # exec: a rank of a step
    "step.before_entry": "The entry is loaded, and not yet called.",
    "step.after_entry": "The entry has returned; its outputs were not checked.",
    "step.before_exit": "All is written and checked; the process is about to end.",
    # store
    "blobs.after_write": "The bytes lie aside, durable, under no digest yet.",
    "blobs.after_rename": "The blob is there; nothing in the ledger names it.",
    "claim.before_commit": "A new execution, in a transaction that is still open.",
    "runs.before_commit": "A run or step was changed, in a transaction that is still open.",
    "executions.before_commit": "An execution was changed, in a transaction that is still open.",
    "catalog.before_commit": "An artifact or ref was changed, in a transaction that is still open.",
    "endpoints.before_commit": "An endpoint was changed, in a transaction that is still open.",
    "segments.before_commit": "A sealed segment was added, in a transaction that is still open.",
    "signals.before_commit": "Findings were stored, in a transaction that is still open.",
    "turns.before_commit": "A run of an endpoint's loop was added or ended, in a transaction that is still open.",
    "decisions.before_commit": "A decision was stored or settled, in a transaction that is still open.",
    "promotions.before_commit": "An engine took another's place, in a transaction that is still open.",
    "migrate.before_commit": "A migration was carried out, in a transaction that is still open.",
    "gc.after_forget": "Executions were forgotten; what they left is still there.",
    "gc.after_drop": "Artifacts were dropped from the catalogue; their blobs are still there.",
    "gc.after_blob": "A blob was deleted; others are still there.",
    "gc.before_folder": "Blobs are freed; folders of ended work are still there.",
    "backup.after_blob": "Some blobs are in the backup that is being written.",
    "backup.before_rename": "The backup is whole, and not yet under its name.",
    "restore.after_blob": "Some blobs were brought back; the ledger is empty.",
    "restore.before_rows": "All blobs were brought back; the ledger is empty.",
    # loop
    "loop.after_claim": "An execution is ours; the step doesn't know it.",
    "task.prepared_inputs": "The work folder holds the inputs; there is no task.json.",
    "loop.before_submit": "The work folder is complete; nothing was started.",
    "loop.after_submit": "The task was started; the ledger doesn't know its handle.",
    "ingest.after_blob": "Some files of an output are blobs.",
    "ingest.before_commit": "All outputs are blobs; the execution isn't done.",
    "loop.after_finish": "The execution is done; the step doesn't know it.",
    "loop.before_refs": "Every step is done; no ref was set.",
    "loop.before_done": "Everything is done, but for the run's own state.",
    "endpoint.before_submit": "An endpoint is wanted; its host wasn't started.",
    "endpoint.after_submit": "An endpoint's host was started; the ledger doesn't know its handle.",
    "serve.before_add": "The files of a model that is to be served are blobs; nothing names them.",
    "serve.before_run": "A model is in the catalogue; no run says that it is to be served.",
    # data
    "data.read": "The sources were read; nothing was computed.",
    "data.computed": "The rows are computed; nothing was written.",
    "data.shard_written": "Some shards are written.",
    "data.written": "Everything is written; the output isn't declared.",
    # train
    "train.step": "An optimizer step was made; later than the last checkpoint.",
    "checkpoint.after_shard": "This rank's part of a checkpoint is written; the checkpoint doesn't count.",
    "checkpoint.before_manifest": "Every rank's part is written; the checkpoint doesn't count.",
    # optimize
    "export.written": "The graph is written; the output isn't declared.",
    "int8.quantised": "The quantised graph is written; the output isn't declared.",
    "openvino.written": "The candidate is written; the output isn't declared.",
    "choose.measured": "Everything was measured; nothing was decided.",
    "choose.copied": "The engine's files are there; the output isn't declared.",
    # serve and monitor
    "host.before_start": "The host has its socket; no replica was started.",
    "host.before_switch": "New replicas are ready; the old ones still serve.",
    "host.before_settle": "An engine that was tried is to take all, or to go back; nothing says so yet.",
    "host.after_settle": "rollout.json says what goes on; the replicas weren't told.",
    "host.before_open": "A model is to be loaded; no replica was told.",
    "host.before_use": "Every replica could open a model, and models.json has it; none was told to use it.",
    "replica.before_use": "The host has told a replica to use a model that it has opened; it doesn't yet.",
    "replica.before_settle": "The host has told a replica which of its two engines goes on; it hasn't followed.",
    "host.retire": "Old replicas were asked to drain.",
    "replica.before_warm_up": "The model is loaded; it has answered nothing.",
    "replica.ready": "The replica is ready; its host doesn't know it.",
    "replica.draining": "The replica takes no new connections, and has answers on their way.",
    "replica.before_log": "Requests were answered; their lines aren't written.",
    "spool.before_seal": "A writer's file is whole and durable, and still under its open name.",
    "spool.before_rescue": "A dead writer's file was cut to its whole part, and is still under its open name.",
    "capture.before_write": "Rows were answered and encoded; they aren't written.",
    "capture.after_write": "Rows were written; their file isn't sealed.",
    "labels.before_write": "Labels were checked and numbered; they aren't written, nor acknowledged.",
    "labels.after_write": "Labels are durable; they weren't acknowledged.",
    "traffic.before_add": "A sealed file is a blob; the ledger doesn't know it.",
    "traffic.after_add": "A segment is in the ledger; its file still lies in the endpoint's folder.",
    # loop: closing it
    "closing.before_signals": "A report was read; its signals aren't stored, and its turn hasn't ended.",
    "closing.after_signals": "A report's signals are stored; no run was started for them.",
    "closing.before_decision": "What the gate said was read; it isn't stored.",
    "closing.after_decision": "A decision is stored; nothing has come of it.",
    "closing.before_promote": "A challenger is to take the champion's place; it hasn't.",
    "closing.after_promote": "A challenger has taken the champion's place; its host doesn't know it.",
    "closing.before_roll_back": "The former champion is to come back; it hasn't.",
    "closing.after_roll_back": "The former champion is wanted again; its host doesn't know it.",
    "closing.before_add": "A run of an endpoint's loop is planned; it isn't in the ledger.",
    "closing.after_add": "A run of an endpoint's loop is in the ledger, with the signals that it consumes.",
    "monitor.before_append": "The counters were read; the series has no new line.",
    "monitor.before_trim": "The series has its new line; old ones weren't cut.",
}
"""Name -> what is true at that line."""


def armed(name: str, nth: int = 1) -> dict[str, str]:
    """Environment that kills the process which passes this point for the n-th time."""
    assert name in POINTS, f"{name!r} is no fault point; known: {', '.join(POINTS)}"
    return {VARIABLE: f"{name}:{nth}"}
