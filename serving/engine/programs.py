"""Compiles every step before the first request; nothing is compiled after that."""

import concurrent.futures
import os
import threading
from collections.abc import Callable

import jax
import numpy as np

from k3jax.language_model import LanguageModel
from k3jax.memory import check_fits
from k3jax.sampling import SamplingParams
from k3jax.sampling.sampler import Sample
from k3jax.state import Snapshots
from serving.engine.config import EngineConfig
from serving.engine.shapes import PrefillShape, decode_rows, prefill_shapes, snapshot_counts
from serving.engine.steps import (
    EngineState,
    PrefillInputs,
    SlotContents,
    admit_step,
    decode_step,
    prefill_step,
    restore_step,
    slot_contents,
)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_THREADS = "engine-compiler"


class Cancelled(Exception):
    """Nobody wants the programs any more."""


class CompileCounter:
    """Counts what the thread that made it compiles, and its helpers."""

    def __init__(self):
        self.total = 0
        self._threads = (threading.current_thread().name, _THREADS)
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **details) -> None:
        if event == _COMPILE_EVENT and threading.current_thread().name.startswith(self._threads):
            self.total += 1


class Programs:
    """The compiled steps of one engine; each takes a state over and returns the next."""

    def __init__(self, lm: LanguageModel, config: EngineConfig, state: EngineState, cancelled: Callable[[], bool]):
        """Compiles all of them, for states like this one.

        Raises:
          UserError: the intermediate results of a step do not fit into memory.
          Cancelled: `cancelled()` became true before a program was begun.
        """
        self.lm = lm
        self.prefill_shapes, self.decode_rows = prefill_shapes(config), decode_rows(config)
        static = {"model": lm.model, "num_logprobs": config.num_logprobs}
        model = state.model
        snapshot = Snapshots(
            *(jax.ShapeDtypeStruct(pool.shape[:1] + pool.shape[2:], pool.dtype)
              for pool in (model.kda_state, model.conv_tail))
        )
        nothing = slot_contents(
            (), state.page_table.shape[1], SamplingParams(temperature=0), 0, np.zeros(state.seen.shape[1], np.uint8)
        )
        slot = np.int32(0)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix=_THREADS) as compilers:

            def compiled(what: str, step, *arguments, **static) -> concurrent.futures.Future[jax.stages.Compiled]:
                # Traced here: the lock of the interpreter allows one at a time anyway.
                return compilers.submit(_compile, what, step.lower(*arguments, **static), cancelled)

            prefill = {
                (shape, snapshots): compiled(
                    f"a prefill step of {shape.tokens} tokens", prefill_step, lm.params, state,
                    empty_prefill(shape, snapshots), **static,
                )
                for shape in self.prefill_shapes
                for snapshots in snapshot_counts(shape, config)
            }
            decode = {
                rows: compiled(
                    f"a decode step of {rows} rows", decode_step, lm.params, state, np.zeros((rows, 3), np.int32),
                    **static,
                )
                for rows in self.decode_rows
            }
            admit = compiled("an admission", admit_step, state, slot, nothing)
            restore = compiled("a restored snapshot", restore_step, state, slot, snapshot)
        self._admit, self._restore = admit.result(), restore.result()
        self._prefill = {key: step.result() for key, step in prefill.items()}
        self._decode = {rows: step.result() for rows, step in decode.items()}

    def warm_up(self, state: EngineState) -> EngineState:
        """Runs each step once, on nobody's slot."""
        for shape, snapshots in self._prefill:
            state, *_ = self.prefill(state, shape, empty_prefill(shape, snapshots))
        for rows in self.decode_rows:
            state, _ = self.decode(state, np.zeros((rows, 3), np.int32))
        return jax.block_until_ready(state)

    def admit(self, state: EngineState, slot: int, contents: SlotContents) -> EngineState:
        """See `steps.admit_step`."""
        return self._admit(state, np.int32(slot), contents)

    def restore(self, state: EngineState, slot: int, snapshot: Snapshots) -> tuple[EngineState, jax.Array]:
        """See `steps.restore_step`."""
        return self._restore(state, np.int32(slot), snapshot)

    def prefill(self, state: EngineState, shape: PrefillShape,
                inputs: PrefillInputs) -> tuple[EngineState, Sample, tuple[Snapshots, ...]]:
        """See `steps.prefill_step`."""
        step = self._prefill[shape, len(inputs.snapshot_positions)]
        return step(self.lm.params, state, inputs)

    def decode(self, state: EngineState, rows: np.ndarray) -> tuple[EngineState, Sample]:
        """See `steps.decode_step`."""
        return self._decode[len(rows)](self.lm.params, state, rows)


def empty_prefill(shape: PrefillShape, snapshots: int) -> PrefillInputs:
    """A step of padding only."""
    return PrefillInputs(
        tokens=np.zeros(shape.tokens, np.int32),
        cu_seqlens=np.zeros(shape.sequences + 1, np.int32),
        slots=np.zeros(shape.sequences, np.int32),
        context_lens=np.zeros(shape.sequences, np.int32),
        ends=np.zeros(shape.sequences, bool),
        snapshot_positions=np.full(snapshots, -1, np.int32),
    )


def _compile(what: str, lowered: jax.stages.Lowered, cancelled: Callable[[], bool]) -> jax.stages.Compiled:
    if cancelled():
        raise Cancelled
    compiled = lowered.compile()
    analysis = compiled.memory_analysis()
    if analysis is not None:
        check_fits(analysis.temp_size_in_bytes, f"the intermediate results of {what}")
    return compiled
