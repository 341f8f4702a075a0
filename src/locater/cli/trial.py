"""`locater trial`: which method keeps your own model steady, and at which learning rates?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater.cli.probe import text_of
from locater.cli.terminal import (
    EngineFlags,
    check_figure,
    parse,
    print_json,
    progress,
    say,
    show,
    values,
)
from locater.control.trial import HELD_OUT, TrialConfig, trial
from locater.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrialCommand(EngineFlags, TrialConfig):
    """Train copies of a model briefly with each method, learning rate and seed, and compare."""

    model: str
    """May stand first, without --model: a config.json (new weights for every seed), a folder with
    a checkpoint, a hub id, or demo (extra `hf`)."""
    text: Path | None = None
    """A plain text, whose last tenth is held out; the model demo brings one."""
    methods: str | None = None  # type: ignore[assignment]
    """Of none, locater, locater-covariance, sigma-reparam, qk-norm, qk-clip, soft-cap, z-loss,
    entropy-floor, qk-rate; settings follow after colons: qk-clip:max_logit=30.  By default none,
    locater, sigma-reparam and, without --lora, qk-norm and qk-clip."""
    learning_rates: str = "1e-4,3e-4,1e-3,3e-3"  # type: ignore[assignment]
    """Each is reached in a tenth of the steps and falls to 0 along a cosine."""
    store: Path = Path("out/trial")
    """Finished runs are kept here, so that an interrupted trial goes on."""
    out: Path | None = None
    """Write the picture here: a page (.html) or a figure (.svg, .png, .pdf, .json)."""
    json: bool = False
    """Print everything as JSON."""

    def __post_init__(self) -> None:
        """Settings are checked when flags have become lists."""


def do_trial(arguments: Sequence[str]) -> None:
    """Train what is missing, then print a table, a sentence and where the picture is."""
    command = parse(TrialCommand, "trial", arguments, first="model")
    check_figure(command.out)
    rates = [_number(one) for one in _listed(command.learning_rates)]
    methods = None if command.methods is None else tuple(_listed(command.methods))
    config = TrialConfig(
        **values(TrialConfig, command) | {"methods": methods, "learning_rates": tuple(rates)}
    )
    model, blocks, fresh = _loaded(command, config)
    with progress("runs") as report:
        found = trial(
            model, blocks, config, fresh=fresh, store=command.store, report=report, say=say,
            **values(EngineFlags, command),
        )  # fmt: skip
    if command.out is not None:
        from locater.report.trial_view import save_trial

        say(f"wrote {save_trial(found, command.out, title=command.model)}")
    if command.json:
        print_json(found.to_dict())
        return
    from locater.report.tables import terminal_table
    from locater.report.trial_view import columns

    title = f"loss after {config.steps} steps, mean over seeds; * diverged"
    show(terminal_table(found.standings(), columns(found), title=title, left=("method",)))
    print(found.sentence())


def _listed(text: Any) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no learning rate.", hint="write them as 1e-4,3e-4,1e-3."
        ) from error


def _loaded(
    command: TrialCommand, config: TrialConfig
) -> tuple[Any, Any, Callable[[], Any] | None]:
    """The model, the text in blocks of its tokens, and what makes new weights."""
    from locater.models.loading import (
        Bytes,
        load_model,
        model_from_config,
        read_text,
        text_blocks,
        tokenizer_beside,
    )

    text, fresh, path = read_text(text_of(command.model, command.text)), None, Path(command.model)
    if path.is_file() and path.suffix == ".json":
        fresh = model_from_config(path)
        model: Any = fresh()
        tokenizer = tokenizer_beside(path)
        size = model.get_input_embeddings().num_embeddings
        if tokenizer is None and size < 256:
            raise ConfigError(
                f"a text is read as bytes, and the model knows {size} tokens.",
                hint="put its tokenizer beside the config, or give a vocab_size of 256 or more.",
            )
        if tokenizer is None:
            say("no tokenizer: the text is read as bytes.")
            tokenizer = Bytes()
    else:
        model, tokenizer = load_model(command.model, head=True, say=say)
    wanted = config.steps * config.batch + HELD_OUT
    return model, text_blocks(tokenizer, text, tokens=config.tokens, blocks=wanted), fresh
