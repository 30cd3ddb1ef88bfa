"""Sub-commands on a trained model."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import tyro

from looped.config import LARGEST
from looped.errors import UserError

_RunFolder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]


@dataclasses.dataclass
class Generate:
    """Continue prompts with a run's model, all as one batch.

    The newest checkpoint is used, whether the run is finished or not. By default the likeliest token is
    taken each time; give a temperature to sample. A text ends where the model begins another one.
    """

    directory: _RunFolder
    """The run's folder."""
    prompts: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT ...]", help_behavior_hint="")
    ] = ()
    """Texts to continue; without one, a text is made up from its start."""
    new_tokens: int = 100
    """Tokens to add, at most."""
    temperature: float = 0.0
    """Sample with this temperature; 0 takes the likeliest token."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Sample among the N likeliest tokens alone."""
    seed: int = 0
    """Seed of the sampling."""
    recurrences: Annotated[
        int | None, tyro.conf.arg(metavar="R", help_behavior_hint="(default: as trained)")
    ] = None
    """Passes of the recurrent block."""
    kv_budget: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Passes whose keys and values are kept for later tokens, the last N: a smaller cache, another function."""
    json: bool = False
    """Print a JSON array with one object a prompt, and nothing else."""

    def run(self) -> int:
        import numpy as np

        from looped.generate import Decoding, generate
        from looped.restore import load_run
        from looped.train import prepare_data

        how = Decoding(self.new_tokens, self.recurrences, self.kv_budget, self.temperature, self.top_k)
        run = load_run(self.directory)
        tokenizer = prepare_data(run.spec).tokenizer
        texts = self.prompts or ("",)
        prompts = [np.concatenate([[tokenizer.bos], tokenizer.encode(text)]) for text in texts]
        longest, trained = max(map(len, prompts)) + self.new_tokens, run.spec.model.sequence_length
        if longest > trained + 1:
            print(
                f"Note: up to {longest} tokens, but the model was trained on {trained}; what lies beyond may be poor.",
                file=sys.stderr,
            )
        news = generate(run.model, prompts, how, stop=tokenizer.bos, seed=self.seed)
        answers = [tokenizer.decode(new) for new in news]
        if self.json:
            shown = [
                {"prompt": text, "text": answer, "tokens": new.tolist()}
                for text, answer, new in zip(texts, answers, news, strict=True)
            ]
            print(json.dumps(shown, indent=2, ensure_ascii=False))
        else:
            print("\n\n".join(text + answer for text, answer in zip(texts, answers, strict=True)))
        return 0


@dataclasses.dataclass
class Eval:
    """Measure a run's validation loss at several numbers of recurrences.

    Prints a table, and writes eval.json and eval.png. The newest checkpoint is used, whether the run is
    finished or not.
    """

    directory: _RunFolder
    """The run's folder."""
    recurrences: Annotated[
        str | None, tyro.conf.arg(metavar="R,R,…", help_behavior_hint="(default: 1,2,4,… up to 2 r)")
    ] = None
    """Numbers of passes at test time, such as 1,2,4,8,16."""
    sequences: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: the run's)")
    ] = None
    """Validation sequences to measure on."""
    output: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: the run's folder)")
    ] = None
    """Folder for eval.json and eval.png."""
    json: bool = False
    """Print the content of eval.json, and nothing else."""

    def run(self) -> int:
        from looped.evaluate import LossAt, default_recurrences, recurrence_curve, write_curve
        from looped.files import check_folder
        from looped.jsonable import to_json
        from looped.restore import load_run
        from looped.train import prepare_data

        asked = _numbers(self.recurrences)
        if self.sequences is not None and self.sequences < 1:
            raise UserError(f"sequences is {self.sequences}; it must be at least 1.")
        check_folder(self.output or self.directory, "output")
        run = load_run(self.directory)
        data = prepare_data(run.spec)
        if data.hash != run.record.data_hash:
            print(
                f"Note: the data's hash is {data.hash[:12]}, the run's was {run.record.data_hash[:12]}: these losses"
                " do not compare with the recorded one.",
                file=sys.stderr,
            )

        def show(point: LossAt) -> None:
            loss = "not finite" if point.loss is None else f"{point.loss:.4f}"
            mark = "  as trained" if point.recurrences == run.spec.model.recurrences else ""
            print(f"{point.recurrences:>11}  {loss:>10}{mark}", flush=True)

        if not self.json:
            print(f"Run {run.spec.run_id} at step {run.step} of {run.record.steps}\nrecurrences        loss")
        curve = recurrence_curve(
            run,
            data,
            asked or default_recurrences(run),
            self.sequences,
            (lambda point: None) if self.json else show,
        )
        paths = write_curve(curve, self.output or self.directory)
        if self.json:
            print(json.dumps(to_json(curve), indent=2, ensure_ascii=False))
        else:
            print(
                f"Nats per token on {curve.validation_tokens:,} validation tokens; {' and '.join(paths)} written."
            )
        return 0


def _numbers(text: str | None) -> tuple[int, ...]:
    """`1,2,4` as numbers, each once and sorted; `UserError` for anything else."""
    try:
        numbers = {int(part) for part in text.split(",")} if text is not None else set()
    except ValueError:
        numbers = {0}
    if any(not 1 <= number <= LARGEST for number in numbers):
        raise UserError(f"recurrences is {text!r}; give whole numbers from 1 to {LARGEST}, such as 1,2,4,8.")
    return tuple(sorted(numbers))
