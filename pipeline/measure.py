"""Measures a build against its sources: every figure that a gate may judge.

Does: open the build and the 16-bit checkpoint, generate the held-out continuations, call
`calibration.quality` and `calibration.acceptance`. Does not: judge (see `gates`) or change a byte
of the build.

Inputs: `Subject`. Outputs: figures by statistic, in three tiers: `structure` (headers and files),
`numeric` (weights and held-out text), `behaviour` (what the build says and how its drafters draft).

Invariant: what is measured is the build's files, read the way a user's runtime reads them; the
16-bit side comes from the checkpoint it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.checkpoint import Checkpoint, Overlay, TensorSource
from artifacts.files import read_json
from pipeline.stage import Progress

if TYPE_CHECKING:
    import torch

    from artifacts.runtime.build import Build
    from artifacts.runtime.dflash import Drafter
    from artifacts.runtime.target import Target
    from calibration.measured import Measured
    from calibration.tokensets import PromptSet
    from calibration.traffic import Traffic

TIERS = ("structure", "numeric", "behaviour")
CROSS_CHECK_PROMPTS = 4
CONSUMER_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured, beside what, and on what.

    Attributes:
        build: folder with target/, and drafter/ and draft_vocab/ where there are such.
        base, drafter: folders of the 16-bit checkpoints; drafter None if there is none.
        heldout, texts: token sets (safetensors) that nothing was calibrated or chosen on.
        states: held-out final hidden states (safetensors).
        config: the settings of `settings_of`.
        scratch: an empty folder.
        device, dtype: of the computation.
        seed: of sampling.
    """

    build: Path
    base: Path
    drafter: Path | None
    heldout: Path
    texts: Path
    states: Path
    config: dict[str, Any]
    scratch: Path
    device: str
    dtype: torch.dtype
    seed: int


def measure(
    subject: Subject, tier: str, progress: Progress, checkpoint: Callable[[str], None]
) -> dict[str, Measured]:
    """Figures by statistic for `tier` and the tiers below it."""
    figures = {"structure_problems": structure_figure(subject)}
    if tier == "structure" or figures["structure_problems"].point:
        return figures  # what is not in order is not worth loading
    checkpoint("structure")
    bench = _Bench(subject, progress)
    figures |= bench.numeric()
    checkpoint("numeric")
    if tier == "behaviour":
        figures |= bench.behaviour()
    return figures


def structure_figure(subject: Subject) -> Measured:
    """Problems of files, headers, names, scales and tokenizer, each with its line."""
    from artifacts.structure import check_build_structure
    from calibration.measured import Measured

    drafter = None if subject.drafter is None else Checkpoint.open(subject.drafter)
    problems = check_build_structure(subject.build, Checkpoint.open(subject.base), drafter=drafter)
    return Measured(point=len(problems), sample=1, detail={"problems": problems})


class _Bench:
    """The loaded build with its 16-bit counterpart; loads each model once."""

    def __init__(self, subject: Subject, progress: Progress) -> None:
        from artifacts.runtime.build import load_build

        self.subject = subject
        self.progress = progress
        self.base = Checkpoint.open(subject.base)
        self.build: Build = load_build(
            subject.build, verify=False, dtype=subject.dtype, device=subject.device
        )
        self.reference: Target = self._target(self.base)
        generation = subject.base / "generation_config.json"
        self.generation = read_json(generation) if generation.is_file() else {}

    def _target(self, source: TensorSource) -> Target:
        from artifacts.runtime.target import Target

        return Target.load(source, dtype=self.subject.dtype, device=self.subject.device)

    # numeric

    def numeric(self) -> dict[str, Measured]:
        """lm_head's KL; perplexity and KL on texts; the body beside round-to-nearest."""
        from calibration.quality import text_figures
        from calibration.tokensets import PromptSet

        figures: dict[str, Measured] = {}
        source = Checkpoint.open(self.subject.build / "target")
        if "lm_head.weight_packed" in source and "lm_head.weight" in self.base:
            self.progress.say("measuring the head's KL on held-out states")
            figures["lm_head_kl_ratio"] = self._head(source)
        texts = PromptSet.load(self.subject.texts)
        documents = [entry.document for entry in texts.entries]
        self.progress.say(f"measuring perplexity on {sum(map(len, texts.ids))} held-out tokens")
        body, rtn = self._bodies(source)
        figures |= text_figures(
            self.reference, self.build.target, texts.ids, documents, body=body, body_rtn=rtn
        )
        return figures

    def _head(self, source: TensorSource) -> Measured:
        from artifacts.packing import PackedMatrix
        from calibration.quality import head_figures
        from calibration.solve import plain_round_to_nearest
        from calibration.states import States

        matrix = PackedMatrix.from_source(source, "lm_head")
        reference = self.base.get("lm_head.weight").float()
        rtn = plain_round_to_nearest(reference, matrix.scheme).dense()
        states = States.load(self.subject.states)
        return head_figures(states, reference, matrix.dense(), rtn)

    def _bodies(self, source: TensorSource) -> tuple[Target | None, Target | None]:
        """The build's body, and the same matrices rounded to nearest, with the 16-bit head."""
        from artifacts.names import packed_modules
        from artifacts.packing import PackedMatrix
        from calibration.solve import plain_round_to_nearest
        from pipeline.stages.common import write_packed

        modules = [m for m in packed_modules(source) if ".layers." in m and m[:4] != "mtp."]
        if not modules or any(f"{m}.weight" not in self.base for m in modules):
            return None, None  # an imported body: there is no 16-bit matrix to round
        own = {m: PackedMatrix.from_source(source, m) for m in modules}
        targets = []
        for name, matrices in (
            ("body", own),
            (
                "rtn",
                {
                    m: plain_round_to_nearest(self.base.get(f"{m}.weight").float(), x.scheme)
                    for m, x in own.items()
                },
            ),
        ):
            folder = self.subject.scratch / name
            folder.mkdir(parents=True, exist_ok=True)
            write_packed(folder, matrices)
            targets.append(self._target(Overlay(self.base, folder / "packed.safetensors")))
        return targets[0], targets[1]

    # behaviour

    def behaviour(self) -> dict[str, Measured]:
        """Acceptance, coverage, diversity, equality of decoding, and a consumer's logits."""
        from calibration.quality import diversity_figures
        from calibration.tokensets import PromptSet
        from calibration.traffic import GREEDY, resolve_sampling

        config = self.subject.config
        prompts = PromptSet.load(self.subject.heldout)
        sampling = resolve_sampling(self.generation, config["sampling"])
        greedy = self._continue(self.build.target, prompts, GREEDY, "greedy")
        sampled = self._continue(self.build.target, prompts, sampling, "sampled")
        few = prompts.select(range(min(len(prompts), config["diversity_prompts"])))
        plain = self._continue(self.reference, few, sampling, "16-bit sampled")
        figures = diversity_figures(sampled.outputs[: len(few)], plain.outputs)
        if self.build.draft_vocab is not None:
            figures["draft_vocab_coverage"] = self._coverage(sampled)
        figures |= self._acceptance(greedy, "tokens_per_step_ratio")
        figures |= self._acceptance(sampled.select(range(len(few))), "sampled_ratio")
        figures["greedy_differences"] = self._cross_check(prompts, greedy)
        if "consumer_logits" in config["gates"]:
            figures["transformers_logit_difference"] = self._transformers(prompts)
        return figures

    def _continue(
        self, target: Target, prompts: PromptSet, sampling: dict[str, Any], label: str
    ) -> Traffic:
        from calibration.traffic import own_outputs, resolve_stop_ids

        config = self.subject.config
        block = self.build.drafter.block_size if self.build.drafter is not None else 0
        length = config["new_tokens"] + max(block, config["depth"] + 1)
        with self.progress.task(f"continuing: {label}", len(prompts) * length, "tokens") as task:
            return own_outputs(
                target,
                prompts,
                sampling,
                max_new_tokens=length,
                seed=self.subject.seed,
                stop_ids=resolve_stop_ids(self.generation, self.base.config),
                chunk=config["chunk"],
                folder=self.subject.scratch / label.replace(" ", "-"),
                identity=label,
                progress=task,
            )

    def _coverage(self, sampled: Traffic) -> Measured:
        from calibration.acceptance import coverage_figure

        assert self.build.draft_vocab is not None
        ids = self.build.draft_vocab.target_ids.tolist()
        domains = [entry.domain for entry in sampled.prompts.entries]
        return coverage_figure(ids, sampled.outputs, domains)

    def _acceptance(self, traffic: Traffic, statistic: str) -> dict[str, Measured]:
        from artifacts.runtime.mtp import MtpHead
        from calibration.acceptance import drafter_figure, mtp_figure
        from calibration.teacher_forced import TeacherForced

        drafter, config = self.build.drafter, self.subject.config
        taps = tuple(drafter.tap_ids) if drafter is not None else ()
        forced = TeacherForced(self.build.target, traffic, tap_ids=taps)
        figures: dict[str, Measured] = {}
        if self.build.mtp is not None:
            self.progress.say(f"replaying MTP: {statistic}")
            figures[f"mtp_{statistic}"] = mtp_figure(
                forced,
                MtpHead.load(Checkpoint.open(self.subject.build / "target"), self.build.target),
                MtpHead.load(self.base, self.build.target),
                config["depth"],
                limit=config["new_tokens"],
                draft_head=self.build.draft_head,
            )
        if drafter is not None:
            self.progress.say(f"replaying the drafter: {statistic}")
            figures[f"drafter_{statistic}"] = drafter_figure(
                forced, drafter, self._reference_drafter(), limit=config["new_tokens"]
            )
        return figures

    def _reference_drafter(self) -> Drafter:
        from artifacts.runtime.dflash import Drafter

        assert self.subject.drafter is not None
        return Drafter.load(Checkpoint.open(self.subject.drafter), self.build.target)

    def _cross_check(self, prompts: PromptSet, greedy: Traffic) -> Measured:
        """Prompts whose real draft-and-verify differs from plain greedy decoding, any method."""
        from artifacts.runtime.decode import Decoder
        from artifacts.runtime.sampling import SamplingParams
        from calibration.measured import Measured
        from calibration.traffic import resolve_stop_ids

        stop_ids = resolve_stop_ids(self.generation, self.base.config)
        different: list[str] = []
        methods = self.build.methods()
        for method in methods:
            decoder = Decoder.of(self.build, method, depth=self.subject.config["depth"])
            for row in range(min(CROSS_CHECK_PROMPTS, len(prompts))):
                expected = greedy.outputs[row]
                got = decoder.complete(
                    prompts.ids[row],
                    SamplingParams(temperature=0.0),
                    max_new_tokens=len(expected),
                    stop_ids=stop_ids,
                )
                if got != expected:
                    different.append(f"{method}: {prompts.entries[row].id}")
        checked = len(methods) * min(CROSS_CHECK_PROMPTS, len(prompts))
        return Measured(point=len(different), sample=checked, detail={"different": different})

    def _transformers(self, prompts: PromptSet) -> Measured:
        """Largest difference of logits between transformers' loading of the build and ours."""
        from calibration.measured import Measured
        from pipeline.consumers import transformers_logits

        ids = _first_tokens(prompts.ids, CONSUMER_TOKENS)
        ours = self.build.target.logits(self.build.target.forward(ids).hidden_bth)
        theirs = transformers_logits(self.subject.build / "target", ids)
        difference = float((ours.cpu() - theirs).abs().max())
        return Measured(point=difference, sample=ids.numel(), detail={"dtype": "float32"})


def _first_tokens(rows: Sequence[Sequence[int]], count: int) -> torch.Tensor:
    """int64 [1, t]: the first `count` tokens of the rows, end to end."""
    import torch

    stream = [token for row in rows for token in row][:count]
    return torch.tensor([stream], dtype=torch.int64)
