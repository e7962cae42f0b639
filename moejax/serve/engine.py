"""A model in memory, for programs: logits and log probabilities of tokens, and texts that go on."""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.typing import ArrayLike

from moejax.checkpoint.find import Saved
from moejax.config.checks import check
from moejax.config.checks.planned import EXCHANGE, LAYOUT
from moejax.errors import InputError
from moejax.evaluate.checkpoint import (
    FORWARD,
    Chosen,
    checked_settings,
    choose,
    evaluation_config,
    names_mesh,
    read_weights,
)
from moejax.runtime.processes import ALONE, Processes
from moejax.serve.batch import Batch, Request
from moejax.serve.experts.places import Places
from moejax.serve.placing import (
    PlacedModel,
    check_expert_slots,
    check_overrides,
    place,
    place_beside,
    place_weights,
)
from moejax.serve.programs import SHORT, Programs, build_programs
from moejax.serve.prompts import Vocabulary, check_length, encode_prompts, open_vocabulary
from moejax.serve.samples import Sample, check_counts, draw_samples, draw_texts, each
from moejax.serve.sampling import GREEDY, Sampling
from moejax.serve.texts import checked_stops
from moejax.serve.weights import Separator
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep, local_bytes
from moejax.train.records.summary import check_memory
from moejax.train.start import check_simulated_devices

Prompt = str | Sequence[int]  # a text, or ids
# Settings for weights of a run in memory, whose devices are given.
IN_MEMORY = (*LAYOUT, "mesh.nodes", *EXCHANGE, "route_trim", "model.dtype")


@runtime_checkable
class RunInMemory(Protocol):
    """A run whose weights are on the devices: `LiveRun` and `TrainedRun`."""

    @property
    def state(self) -> TrainState | None:
        """The train state; None if nothing is in memory."""

    @property
    def train_step(self) -> TrainStep | None:
        """The functions that take the state."""

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        ...

    @property
    def processes(self) -> Processes:
        """The program's."""
        ...


class Engine:
    """A model with its weights on devices.

        engine = moejax.Engine("imported/olmoe")
        logits = engine.logits([[1, 733, 16289]])

    B sequences, T tokens of each, V vocabulary, L layers with experts, K experts of a token.

    Where several processes train, each has its engine, and they call it together: the same
    methods in the same order, with the same arguments. All get the same results.

    A call compiles what is new: a length of texts (in steps of 64), a number of texts (up to
    the next power of two), a kind of sampling, scores, experts.

    Attributes:
      path: the checkpoint's directory; of a run in memory the one that its step has or would have.
      step: optimizer steps that were done.
      vocab_size: V.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunInMemory,
        *,
        step: int | None = None,
        overrides: Iterable[str] = (),
        processes: Processes = ALONE,
        expert_slots: int = 0,
        follow_load: bool = False,
    ):
        """Reads the weights of a checkpoint, or copies those of a run in memory.

        A run in memory keeps its state. Its weights are copied layer by layer into
        `model.dtype`; arrays that are in it already are shared and not copied. A device holds the
        state, the copy and one further layer meanwhile; then the state, the copy, and a cache of
        keys and values while it writes.

        The model runs on the run's mesh, whose pipeline stages become shards. If devices have
        room they hold all that training gathers, so that no call gathers weights; else experts
        are spread over fsdp as well, if they divide.

        Args:
          run: a run directory, an imported folder, or one checkpoint; or what `run_training`
            returned or calls a function with. One that had ended before is read from its directory.
          step: its checkpoint of this step; None: the newest.
          overrides: settings of the mesh and of computing, as `mesh.tensor=2` or
            `model.dtype=float32`. Those of a run in memory leave its devices as they are.
          processes: the program's, if several read a checkpoint together.
          expert_slots: further experts that each device has room for: see `place_experts`.
          follow_load: whether it is called before each batch of texts, and experts move between two
            steps of a batch too: each layer's at most every 64 steps.
        Raises:
          InputError: if there is no whole checkpoint, a setting does not fit it, or the copy does
            not fit beside the state.
        """
        self._processes, overrides = processes, tuple(overrides)
        self._vocabularies: dict[bool, Vocabulary] = {}
        self._programs_of: dict[tuple[int, ...], Programs] = {}  # by what was asked for
        self._state: TrainState | None = None
        if expert_slots < 0:
            raise InputError(f"`expert_slots` is {expert_slots}. It is 0 or more. Change it.")
        self._expert_slots, self._places = expert_slots, None
        self._follow_load = follow_load
        if isinstance(run, str | os.PathLike):
            self._read(os.fspath(run), step, overrides)
        elif run.state is None or run.train_step is None:
            self._read(os.fspath(run.run_dir), step, overrides)
        else:
            self._copy(run, run.state, run.train_step, step, overrides)

    def _read(self, run: str, step: int | None, overrides: tuple[str, ...]) -> None:
        """Starts the devices and reads a checkpoint."""
        check_overrides(overrides)
        chosen = choose(run, step, overrides, self._processes, FORWARD)
        check_expert_slots(chosen.cfg, self._expert_slots)
        check_simulated_devices(chosen.cfg)
        for note in chosen.notes:
            warnings.warn(note.removeprefix("warning: "), stacklevel=3)
        programs = self._begin(chosen, place(chosen, self._processes), beside=0)
        state = read_weights(chosen, programs.stored, self._processes)
        self._state = self._at_home(self._separator.take(state))

    def _copy(
        self,
        run: RunInMemory,
        state: TrainState,
        train_step: TrainStep,
        step: int | None,
        overrides: tuple[str, ...],
    ) -> None:
        """Takes the weights of a run in memory."""
        if step is not None:
            raise InputError(
                f"`step` has no effect. Got {step} for a run in memory. It has the weights of its "
                f"last step. Leave it out, or name the run's directory."
            )
        self._processes = run.processes
        path = Path(run.run_dir) / "checkpoints" / str(int(state.step))
        settings = checked_settings(overrides, IN_MEMORY)
        cfg = evaluation_config(train_step.cfg, settings)
        if settings:
            check(cfg, trained=False)
        saved = Saved(int(state.step), path, {})
        chosen = Chosen(saved, cfg, [], names_mesh=names_mesh(settings))
        placed = place_beside(train_step, chosen.cfg, run.processes)
        self._begin(chosen, placed, beside=local_bytes(train_step.abstract))
        self.update(state)

    def _begin(self, chosen: Chosen, placed: PlacedModel, *, beside: int) -> Programs:
        """Describes the functions, and checks that the weights fit beside so many bytes."""
        self._chosen, self.vocab_size = chosen, placed.cfg.model.vocab_size
        self.path, self.step = Path(chosen.saved.path), chosen.saved.step
        usual = {
            "slots": placed.cfg.train.batch_sequences,
            "positions": placed.cfg.data.sequence_length,
            "allowed": self.vocab_size,
            "expert_slots": self._expert_slots,
        }
        given = {"named": chosen.names_mesh, "beside": beside, **usual}
        self._placed, _ = place_weights(placed, self._processes, **given)
        programs = self._programs(1, 1, self.vocab_size)
        beside += programs.bytes_beside_weights()
        check_memory(programs.train_step, self._processes, gradients=False, beside=beside)
        self._separator = Separator(programs.homes, self._processes)
        if self._expert_slots:
            self._places = Places(programs, self._processes)
        return programs

    def _at_home(self, state: TrainState, *, keep: bool = False) -> TrainState:
        """Returns weights as the programs take them: experts at home, slots without choices."""
        return state if self._places is None else self._places.at_home(state, keep=keep)

    def update(self, state: TrainState) -> None:
        """Takes newer weights of the same run, on the same devices. Compiles nothing anew.

        The engine gives up its weights first; then the state's are copied as at the beginning.
        Experts are at home again.

        Args:
          state: a state of the run, which stays as it is.
        Raises:
          InputError: if it is of another model.
        """
        held = self._programs(1, 1, self.vocab_size).stored.abstract
        shapes = [
            jax.tree.map(lambda x: x.shape, (one.params, one.router_bias, one.frozen))
            for one in (state, held)
        ]
        if shapes[0] != shapes[1]:
            raise InputError(
                "state of another model. Its parameters have other names or shapes than the "
                "engine's. An engine takes states of the run that it was made for. Make another: "
                "moejax.Engine(run)."
            )
        self.release()
        self._state = self._at_home(self._separator.take(state, keep=True), keep=True)
        self.step = int(state.step)
        self.path = self.path.with_name(str(self.step))

    def release(self) -> None:
        """Gives up the weights, and keeps the compiled functions; see `update`."""
        self._state = None

    @property
    def has_weights(self) -> bool:
        """Whether there are weights: not after `release`."""
        return self._state is not None

    def place_experts(self, load_LE: ArrayLike | None = None, plan: str = "best") -> None:
        """Moves hot experts to slots of other devices for later calls; compiles nothing anew.

        Texts stay the same. Only layers whose busiest device gets 5 % less to do are changed.

        Args:
          load_LE: choices that each expert of each layer with experts may get; only proportions
            count. None: those of the tokens since the last call, of `sample` and its like.
          plan: by_node, greedy, first_fit, eplb or best: see `moejax.serve.experts.tables`.
        Raises:
          InputError: if the engine has no slots, the load is of another model, or no plan has
            this name.
        """
        if self._places is None:
            raise InputError(
                "experts have no slots. `expert_slots` is 0. Make an engine with some: "
                "moejax.Engine(run, expert_slots=1)."
            )
        load_LE = self._places.load_LE if load_LE is None else np.asarray(load_LE, float)
        self._state = self._places.place(self._weights, load_LE, plan)

    def logits(self, token_ids: ArrayLike) -> np.ndarray:
        """Returns the logits of the token after each position, float32.

            engine.logits([[1, 733, 16289]])[0, -1].argmax()

        No token is put in front, and experts drop none.

        Args:
          token_ids: one sequence [T], or several of one length [B, T].
        Returns:
          logits [T, V] or [B, T, V].
        Raises:
          InputError: if they are no ids of the vocabulary.
        """
        state, token_BT = self._weights, self._checked(token_ids)
        count, length = token_BT.shape[0], token_BT.shape[1]
        programs = self._programs(length, count, self.vocab_size)
        (B, T), parts = programs.train_step.batch_shape, []
        for first in range(0, count, B):
            rows_BT = token_BT[first : first + B]
            # Behind a sequence nothing is seen, and other rows take part in nothing.
            padded_BT = np.zeros((B, T), np.int32)
            padded_BT[: len(rows_BT), :length] = rows_BT
            function, arguments = programs.logits, (state, programs.place_batch(padded_BT))
            if self._processes.count > 1:
                function = self._processes.compile(function, *arguments)
                logit_BTV = np.asarray(function(*arguments).addressable_data(0))
            else:
                logit_BTV = np.asarray(function(*arguments))
            parts.append(logit_BTV[: len(rows_BT), :length])
        found_BTV = np.concatenate(parts)
        return found_BTV[0] if np.ndim(token_ids) == 1 else found_BTV

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        chat: bool = False,
    ) -> list[str]:
        """Returns the texts that continue prompts, as `moejax generate` writes them.

            engine.generate(["The capital of France", "Once"], tokens=40)

        Args:
          prompts: one text or several.
          tokens: the most that continue each.
          temperature: 0 takes the likeliest token.
          top_k: draws from this number of the likeliest tokens; None: from all.
          top_p: then from the likeliest of this mass.
          min_p: then from those at least this many times as likely as the likeliest.
          seed: seed of the draws.
          stop: text or texts; a continuation ends before the first that it would hold.
          chat: whether prompts are messages of a user, which the chat template writes.
        Raises:
          InputError: if an option is out of range, or the model has no place for so much text.
          RunError: if logits are not finite.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        form = {"tokens": tokens, "sampling": sampling, "stop": stop, "chat": chat}
        return [sample.text for sample in self.sample(prompts, **form)]

    def sample(
        self,
        prompts: str | Sequence[Prompt],
        *,
        tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        n: int = 1,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        prompt_logprobs: bool = False,
        routing: bool = False,
    ) -> list[Sample]:
        """Returns texts that continue prompts, with their ids, log probabilities and experts.

            sampling = moejax.Sampling(temperature=1.0, seed=step)
            samples = engine.sample(["def ", [1, 733, 16289]], n=8, sampling=sampling)

        Args:
          prompts: one text, or several; each a text, or ids, in front of which nothing is put.
          tokens: the most that continue a prompt; one number, or one for each prompt.
          sampling: the sampling parameters; one, or one for each prompt.
          n: samples of each prompt, which stand together in the result.
          stop: text or texts; a sample ends before the first that it would hold.
          chat: whether texts are messages of a user, which the chat template writes.
          prompt_logprobs: whether log probabilities of the prompts' tokens are returned, [T - 1].
          routing: whether the experts of all tokens are returned.
        Raises:
          InputError: if an option is out of range, or the model has no place for so much text.
          RunError: if logits are not finite.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not prompts:
            return []
        most, rules = each(tokens, len(prompts), "tokens"), each(sampling, len(prompts), "rules")
        for rule in rules:
            rule.check()
        check_counts(most, rules, n)
        stops = checked_stops(stop)
        vocabulary = self._vocabulary(chat)
        encoded = self._encoded(prompts, vocabulary, max(most))
        asked = {"scored": prompt_logprobs, "routing": routing}
        requests = [
            Request(ids, most[i], rules[i], vocabulary.stops, number=i * n + j, **asked)
            for i, ids in enumerate(encoded)
            for j in range(n)
        ]
        batch = self._batch(requests, vocabulary.allowed)
        return draw_texts(batch, requests, vocabulary.tokenizer.decode, stops)

    def score(self, texts: str | Sequence[Prompt]) -> list[np.ndarray]:
        """Returns the log probability of each token behind a text's first, float32 [T - 1].

            logprobs = engine.score([prompt_ids + answer_ids])[0][-len(answer_ids):]

        Args:
          texts: one text, or several; each a text, or ids, in front of which nothing is put.
        Raises:
          InputError: if a text has no token, or one that is not in the vocabulary.
          RunError: if logits are not finite.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            return []
        named = any(isinstance(text, str) for text in texts)
        encoded = self._encoded(texts, self._vocabulary(False) if named else None, 0)
        requests = [Request(ids, 0, scored=True) for ids in encoded]
        samples = draw_samples(self._batch(requests, self.vocab_size), requests)
        return [np.array(one.prompt_logprobs, np.float32) for one in samples]

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Returns the ids of a text as a prompt, with what the tokenizer puts in front."""
        return self._vocabulary(chat).encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        return self._vocabulary(False).tokenizer.decode(list(ids))

    def _batch(self, requests: list[Request], allowed: int) -> Batch:
        """Returns a batch with slots for some requests."""
        if self._follow_load:
            self.place_experts()
        state, longest = self._weights, max(len(one.ids) + one.tokens for one in requests)
        programs = self._programs(longest, len(requests), allowed)
        batch = Batch(programs, state, self._processes)
        if self._places is not None:
            batch.count = self._places.count
            batch.follow = self._follow if self._follow_load else None
        return batch

    def _follow(self, state: TrainState, running: jax.Array) -> TrainState:
        """Returns the weights for the next call of a batch: see `Places.follow`."""
        assert self._places is not None, "without slots nothing is followed"
        self._state = self._places.follow(state, running)
        return self._state

    def _encoded(
        self, prompts: Sequence[Prompt], vocabulary: Vocabulary | None, tokens: int
    ) -> list[list[int]]:
        """Returns the ids of texts and of lists of ids."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        found: list[list[int]] = []
        if vocabulary is not None and texts:
            found, notes = encode_prompts(texts, vocabulary, self._placed.cfg, tokens)
            for note in notes:
                warnings.warn(note.removeprefix("warning: "), stacklevel=4)
        known = iter(found)
        encoded = [
            next(known) if isinstance(prompt, str) else self._checked(prompt, (1,))[0].tolist()
            for prompt in prompts
        ]
        if vocabulary is not None:
            check_length(encoded, tokens, vocabulary)
        return encoded

    def _vocabulary(self, chat: bool) -> Vocabulary:
        """Returns the tokenizer, opened once."""
        if chat not in self._vocabularies:
            self._vocabularies[chat] = open_vocabulary(self._chosen, None, None, chat=chat)
        return self._vocabularies[chat]

    @property
    def _weights(self) -> TrainState:
        if self._state is None:
            raise InputError(
                "engine has no weights. They were released: after `on_step` returns, the run's "
                "memory belongs to its steps. Take them again: `run.engine()` inside `on_step`, or "
                "`engine.update(state)`."
            )
        return self._state

    def _programs(self, positions: int, texts: int, allowed: int) -> Programs:
        """Returns the compiled functions for some texts; the same again for their like."""
        # A power of two, so that another number of texts seldom compiles anew.
        slots = min(1 << (texts - 1).bit_length(), self._placed.cfg.train.batch_sequences)
        asked = (slots, -(-positions // SHORT), allowed)
        if asked not in self._programs_of:
            form = {"slots": slots, "positions": positions, "allowed": allowed}
            form["expert_slots"] = self._expert_slots
            new = build_programs(*self._placed, **form)
            # Slots and positions are rounded up: others may have asked for the same.
            alike = (one for one in self._programs_of.values() if one.form == new.form)
            self._programs_of[asked] = next(alike, new)
        return self._programs_of[asked]

    def _checked(self, token_ids: Any, dims: tuple[int, ...] = (1, 2)) -> np.ndarray:
        """Returns ids as [B, T]."""
        rule = "Ids are one list of whole numbers, or several lists of one length."
        if dims == (1,):
            rule = "A prompt is a text or a list of ids; prompts are a list of them: [[1, 2, 3]]."
        try:
            ids = np.asarray(token_ids)
        except ValueError as error:  # lists of several lengths
            raise InputError(
                f"ids have several lengths. {rule} Fill the shorter lists up."
            ) from error
        if ids.ndim not in dims or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"no token ids. Got {ids.dtype} of shape {ids.shape}. {rule}")
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            raise InputError(
                f"unknown token. Got id {wrong.flat[0]}. Ids are at least 0 and below "
                f"{self.vocab_size}, the model's vocabulary. Take the model's tokenizer."
            )
        return np.atleast_2d(ids).astype(np.int32)

    def __repr__(self) -> str:
        return f"<model of step {self.step} in {self.path}>"
